"""The records of ``__transaction_state``, in Kafka's own binary format.

| | written | read |
| --- | --- | --- |
| key | v0: transactional id | v0 |
| value | v1 (flexible, with tagged fields) | v0, v1 |
| key | v1000: job | v1000 |
| value | v0: batch, time of publication, tagged fields | v0 |

A value of null is a tombstone. Two tagged fields of a transactional id are our own. One is the epoch before
the last bump, which Kafka forgets with a restart: with it a producer whose InitProducerId was cut off by a
crash may ask again and is not fenced. The other is the batch of an attempt. A reader that does not know a
tag passes over it. What a job has published is a record of our own kind, which Kafka does not have; in memory
it goes by ``job_key``, a name that no transactional id of a client can have.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from tidemill.coordination.stored import Codec, RecordType, RecordTypes, Struct
from tidemill.errors import StorageError
from tidemill.transactions.jobs import Publication
from tidemill.transactions.transaction import NO_BATCH, Transaction, TransactionState
from tidemill.wire.declare import Field
from tidemill.wire.jobs import JOB_PREFIX, job_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tidemill.transactions.messages import TopicPartition

__all__ = (
    "RECORD_TYPES",
    "CorruptTransactionRecord",
    "StoredRecord",
    "chunks",
    "decode_record",
    "encode_record",
    "is_job_key",
    "stored_bytes",
)

#: Size of a record without names and partitions: fixed fields, tags, and the record around them.
_RECORD_BYTES = 120
#: Size of a topic without its name and the numbers of its partitions.
_TOPIC_BYTES = 8
#: What is written in one turn of the event loop, and then one more record at most.
_CHUNK_RECORDS = 200
_CHUNK_BYTES = 64 * 1024

StoredRecord = tuple[str, "Transaction | Publication | None"]
"""The name that ``encode_record`` takes, and its new value; None is a tombstone."""
_STORED_STATES = frozenset(TransactionState) - {TransactionState.DEAD, TransactionState.PREPARE_EPOCH_FENCE}


class CorruptTransactionRecord(StorageError):
    """A committed record of the transaction topic that cannot be decoded. Its shard does not load."""


def encode_record(name: str, value: Transaction | Publication | None) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log. ``name``: a transactional id, or the ``job_key`` of a job."""
    if is_job_key(name):
        return _PUBLICATION.encode((name[len(JOB_PREFIX) :],), value)
    return _TRANSACTION.encode((name,), value)


def decode_record(key: bytes | None, value: bytes | None) -> StoredRecord | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    return RECORD_TYPES.decode(key, value)


def stored_bytes(name: str, value: Transaction | Publication | None) -> int:
    """An estimate of the record's size in bytes that is cheaper than encoding it."""
    size_bytes = _RECORD_BYTES + len(name)
    if value is None or isinstance(value, Publication):
        return size_bytes
    return size_bytes + _partition_bytes(value.partitions)


def chunks(records: Iterable[StoredRecord]) -> Iterator[list[StoredRecord]]:
    """Split records that need not be atomic into parts that fit into one batch and one turn each."""
    chunk: list[StoredRecord] = []
    size_bytes = 0
    for record in records:
        added = stored_bytes(*record)
        if chunk and (len(chunk) >= _CHUNK_RECORDS or size_bytes + added > _CHUNK_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(record)
        size_bytes += added
    if chunk:
        yield chunk


def is_job_key(name: str) -> bool:
    """Whether the name is a job's, whose records say what the job has published."""
    return name.startswith(JOB_PREFIX) and "#" not in name


@lru_cache(maxsize=256)
def _partition_bytes(partitions: frozenset[TopicPartition]) -> int:
    topics = {topic for topic, _ in partitions}
    return sum(len(topic.encode()) + _TOPIC_BYTES for topic in topics) + 4 * len(partitions)


# -- the types -------------------------------------------------------------------------------------------


def _state(number: int) -> TransactionState:
    if number not in _STORED_STATES:
        raise ValueError(f"transaction state {number & 0xFF} does not exist in a log")
    return TransactionState(number)


def _transaction(
    producer_id: int,
    producer_epoch: int,
    timeout_ms: int,
    state: TransactionState,
    partitions: frozenset[TopicPartition],
    updated_ms: int,
    started_ms: int,
    previous_producer_id: int,
    next_producer_id: int,
    client_version: int,
    last_producer_epoch: int,
    batch: int,
) -> Transaction:
    return Transaction(
        producer_id,
        producer_epoch,
        timeout_ms,
        state,
        updated_ms,
        partitions,
        started_ms,
        last_producer_epoch,
        previous_producer_id,
        next_producer_id,
        client_version,
        batch,
    )


def _by_topic(partitions: frozenset[TopicPartition] | None) -> list[dict[str, Any]] | None:
    if partitions is None:
        return None
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    # Sorted by topic: to sort very many pairs takes several times as long.
    return [{"topic": topic, "partitions": sorted(topics[topic])} for topic in sorted(topics)]


def _partitions(topics: tuple[Any, ...] | None) -> frozenset[TopicPartition]:
    return frozenset((each.topic, index) for each in topics or () for index in each.partitions)


def _stored_partitions(value: Transaction) -> frozenset[TopicPartition] | None:
    """The partitions to store: null, as in Kafka, where no transaction was begun."""
    return None if value.state is TransactionState.EMPTY else value.partitions


_TRANSACTION: Final[RecordType[StoredRecord]] = RecordType(
    "Transaction",
    lambda transactional_id, value: (transactional_id, value),
    key_versions=(0,),
    key={"transactional_id": "string"},
    value=Struct(
        _transaction,
        {
            "producer_id": "int64",
            "producer_epoch": "int16",
            "timeout_ms": "int32",
            "state": "int8",
            "partitions": Field([{"topic": "string", "partitions": ["int32"]}], nullable=True),
            "updated_ms": "int64",
            "started_ms": "int64",
            "previous_producer_id": Field("int64", tag=0, default=-1),
            "next_producer_id": Field("int64", tag=1, default=-1),
            "client_version": Field("int16", tag=2, default=0),
            # Tidemill's own tags; the module's docstring explains them.
            "last_producer_epoch": Field("int16", tag=1_000, default=-1),
            "batch": Field("int64", tag=1_001, default=NO_BATCH),
        },
        {
            "state": Codec(unpack=_state),
            # The attempts of a job write to the same partitions, and a publication writes a record for each.
            "partitions": Codec(_partitions, _by_topic, _stored_partitions, remembered=256),
        },
    ),
    versions=range(2),
    flexible_since=1,
    written=1,
)

_PUBLICATION: Final[RecordType[StoredRecord]] = RecordType(
    "Publication",
    lambda job, value: (job_key(job), value),
    key_versions=(1_000,),
    key={"job": "string"},
    value=Struct(Publication, {"batch": "int64", "published_ms": "int64"}),
    versions=range(1),
    written=0,
)

RECORD_TYPES: Final[RecordTypes[StoredRecord]] = RecordTypes(
    "a transaction record", CorruptTransactionRecord, _TRANSACTION, _PUBLICATION
)
