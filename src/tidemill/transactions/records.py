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

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from tidemill.coordination.binary import MalformedBytes, Reader, pack_string
from tidemill.errors import StorageError
from tidemill.transactions.attempts import JOB_PREFIX, job_key
from tidemill.transactions.jobs import Publication
from tidemill.transactions.transaction import NO_BATCH, Transaction, TransactionState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tidemill.transactions.messages import TopicPartition

__all__ = (
    "CorruptTransactionRecord",
    "StoredRecord",
    "chunks",
    "decode_record",
    "encode_record",
    "is_job_key",
    "stored_bytes",
)

_KEY_VERSION = 0
_VALUE_VERSION = 1
_TAG_PREVIOUS_PRODUCER_ID = 0
_TAG_NEXT_PRODUCER_ID = 1
_TAG_CLIENT_VERSION = 2
_TAG_LAST_EPOCH = 1_000
_TAG_BATCH = 1_001
_JOB_KEY_VERSION = 1_000
_JOB_VALUE_VERSION = 0
#: What a record takes besides names and partitions: fixed fields, tags, and the record around them.
_RECORD_BYTES = 120
_CHUNK_RECORDS = 1_000
_CHUNK_BYTES = 768 * 1024

StoredRecord = tuple[str, "Transaction | Publication | None"]
"""A name and its new value; None forgets it. See ``encode_record``."""
_STORED_STATES = frozenset(TransactionState) - {TransactionState.DEAD, TransactionState.PREPARE_EPOCH_FENCE}


class CorruptTransactionRecord(StorageError):
    """A committed record of the transaction topic that cannot be decoded. Its shard does not load."""


def encode_record(name: str, value: Transaction | Publication | None) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log. ``name``: a transactional id, or the ``job_key`` of a job."""
    if is_job_key(name):
        key = struct.pack(">h", _JOB_KEY_VERSION) + pack_string(name[len(JOB_PREFIX) :])
    else:
        key = struct.pack(">h", _KEY_VERSION) + pack_string(name)
    if isinstance(value, Publication):
        return key, struct.pack(">hqq", _JOB_VALUE_VERSION, value.batch, value.published_ms) + _uvarint(0)
    return key, None if value is None else _encode_value(value)


def stored_bytes(name: str, value: Transaction | Publication | None) -> int:
    """About as many bytes as the record takes, without the work of making it."""
    size_bytes = _RECORD_BYTES + len(name)
    if value is None or isinstance(value, Publication):
        return size_bytes
    return size_bytes + len(_encode_partitions(value.partitions))


def chunks(records: Iterable[StoredRecord]) -> Iterator[list[StoredRecord]]:
    """Records that need not be appended as one, in parts that are not too large for one batch."""
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
    """Whether a record of that name says what a job has published."""
    return name.startswith(JOB_PREFIX) and "#" not in name


def decode_record(
    key: bytes | None, value: bytes | None
) -> tuple[str, Transaction | Publication | None] | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    try:
        if key is None:
            raise MalformedBytes("it has no key")
        reader = Reader(key)
        version = reader.int16()
        if version not in (_KEY_VERSION, _JOB_KEY_VERSION):
            return None
        name = reader.string()
        reader.end()
        if version == _JOB_KEY_VERSION:
            return job_key(name), None if value is None else _decode_publication(value)
        return name, None if value is None else _decode_value(value)
    except MalformedBytes as error:
        raise CorruptTransactionRecord(f"a transaction record cannot be decoded: {error}") from error


def _encode_value(value: Transaction) -> bytes:
    parts = [
        struct.pack(
            ">hqhib",
            _VALUE_VERSION,
            value.producer_id,
            value.producer_epoch,
            value.timeout_ms,
            value.state,
        ),
        _uvarint(0) if value.state is TransactionState.EMPTY else _encode_partitions(value.partitions),
        struct.pack(">qq", value.updated_ms, value.started_ms),
        _encode_tags(
            (_TAG_PREVIOUS_PRODUCER_ID, ">q", value.previous_producer_id, -1),
            (_TAG_NEXT_PRODUCER_ID, ">q", value.next_producer_id, -1),
            (_TAG_CLIENT_VERSION, ">h", value.client_version, 0),
            (_TAG_LAST_EPOCH, ">h", value.last_producer_epoch, -1),
            (_TAG_BATCH, ">q", value.batch, NO_BATCH),
        ),
    ]
    return b"".join(parts)


@lru_cache(maxsize=256)
def _encode_partitions(partitions: frozenset[TopicPartition]) -> bytes:
    """The attempts of a job write to the same partitions, and a publication writes a record for each."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    parts = [_uvarint(len(topics) + 1)]
    for topic, indexes in topics.items():
        raw = topic.encode()
        numbers = struct.pack(f">{len(indexes)}i", *indexes)
        parts += (_uvarint(len(raw) + 1), raw, _uvarint(len(indexes) + 1), numbers, _uvarint(0))
    return b"".join(parts)


def _encode_tags(*tags: tuple[int, str, int, int]) -> bytes:
    """Each as (tag, format, value, default); defaults are left out."""
    present = [(tag, struct.pack(form, value)) for tag, form, value, default in tags if value != default]
    parts = [_uvarint(len(present))]
    for tag, raw in present:
        parts += (_uvarint(tag), _uvarint(len(raw)), raw)
    return b"".join(parts)


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode_value(raw: bytes) -> Transaction:
    reader = Reader(raw)
    version = reader.int16()
    if not 0 <= version <= _VALUE_VERSION:
        raise MalformedBytes(f"value version {version} is unknown")
    reader.flexible = version >= 1
    producer_id, producer_epoch, timeout_ms = reader.int64(), reader.int16(), reader.int32()
    number = reader.take(1)[0]
    if number not in _STORED_STATES:
        raise MalformedBytes(f"transaction state {number} does not exist in a log")
    partitions = _decode_partitions(reader)
    updated_ms, started_ms = reader.int64(), reader.int64()
    tags = _decode_tags(reader)
    reader.end()
    return Transaction(
        producer_id,
        producer_epoch,
        timeout_ms,
        TransactionState(number),
        updated_ms,
        partitions,
        started_ms,
        last_producer_epoch=tags.get(_TAG_LAST_EPOCH, -1),
        previous_producer_id=tags.get(_TAG_PREVIOUS_PRODUCER_ID, -1),
        next_producer_id=tags.get(_TAG_NEXT_PRODUCER_ID, -1),
        client_version=tags.get(_TAG_CLIENT_VERSION, 0),
        batch=tags.get(_TAG_BATCH, NO_BATCH),
    )


def _decode_publication(raw: bytes) -> Publication:
    reader = Reader(raw, flexible=True)
    version = reader.int16()
    if version != _JOB_VALUE_VERSION:
        raise MalformedBytes(f"version {version} of a publication is unknown")
    publication = Publication(reader.int64(), reader.int64())
    reader.skip_tagged_fields()
    reader.end()
    return publication


def _decode_partitions(reader: Reader) -> frozenset[TopicPartition]:
    found: set[TopicPartition] = set()
    count = reader.nullable_count(smallest_element=3)
    for _ in range(count or 0):
        topic = reader.string()
        found.update((topic, reader.int32()) for _ in range(reader.count(smallest_element=4)))
        reader.skip_tagged_fields()
    return frozenset(found)


def _decode_tags(reader: Reader) -> dict[int, int]:
    """Whole numbers by tag; unknown tags are passed over."""
    if not reader.flexible:
        return {}
    found: dict[int, int] = {}
    for _ in range(reader.uvarint()):
        tag, field = reader.uvarint(), Reader(reader.take(reader.uvarint()))
        if tag in (_TAG_PREVIOUS_PRODUCER_ID, _TAG_NEXT_PRODUCER_ID, _TAG_BATCH):
            found[tag] = field.int64()
        elif tag in (_TAG_CLIENT_VERSION, _TAG_LAST_EPOCH):
            found[tag] = field.int16()
        else:
            continue
        field.end()
    return found
