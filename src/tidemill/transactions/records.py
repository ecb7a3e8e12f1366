"""The records of ``__transaction_state``, in Kafka's own binary format.

| | written | read |
| --- | --- | --- |
| key | v0: transactional id | v0 |
| value | v1 (flexible, with tagged fields) | v0, v1 |

A value of null is a tombstone. One tagged field is our own: the epoch before the last bump, which Kafka
forgets with a restart. With it a producer whose InitProducerId was cut off by a crash may ask again and is
not fenced. A reader that does not know the tag passes over it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from tidemill.coordination.binary import MalformedBytes, Reader, pack_string
from tidemill.errors import StorageError
from tidemill.transactions.transaction import Transaction, TransactionState

if TYPE_CHECKING:
    from tidemill.transactions.messages import TopicPartition

__all__ = ("CorruptTransactionRecord", "decode_record", "encode_record")

_KEY_VERSION = 0
_VALUE_VERSION = 1
_TAG_PREVIOUS_PRODUCER_ID = 0
_TAG_NEXT_PRODUCER_ID = 1
_TAG_CLIENT_VERSION = 2
_TAG_LAST_EPOCH = 1_000
_STORED_STATES = frozenset(TransactionState) - {TransactionState.DEAD, TransactionState.PREPARE_EPOCH_FENCE}


class CorruptTransactionRecord(StorageError):
    """A committed record of the transaction topic that cannot be decoded. Its shard does not load."""


def encode_record(transactional_id: str, value: Transaction | None) -> tuple[bytes, bytes | None]:
    """Key and value as they go into the log."""
    key = struct.pack(">h", _KEY_VERSION) + pack_string(transactional_id)
    return key, None if value is None else _encode_value(value)


def decode_record(key: bytes | None, value: bytes | None) -> tuple[str, Transaction | None] | None:
    """The inverse of ``encode_record``; None for a key version that this program does not know."""
    try:
        if key is None:
            raise MalformedBytes("it has no key")
        reader = Reader(key)
        if reader.int16() != _KEY_VERSION:
            return None
        transactional_id = reader.string()
        reader.end()
        return transactional_id, None if value is None else _decode_value(value)
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
        _encode_partitions(value),
        struct.pack(">qq", value.updated_ms, value.started_ms),
        _encode_tags(
            (_TAG_PREVIOUS_PRODUCER_ID, ">q", value.previous_producer_id, -1),
            (_TAG_NEXT_PRODUCER_ID, ">q", value.next_producer_id, -1),
            (_TAG_CLIENT_VERSION, ">h", value.client_version, 0),
            (_TAG_LAST_EPOCH, ">h", value.last_producer_epoch, -1),
        ),
    ]
    return b"".join(parts)


def _encode_partitions(value: Transaction) -> bytes:
    if value.state is TransactionState.EMPTY:
        return _uvarint(0)
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(value.partitions):
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
    )


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
        if tag in (_TAG_PREVIOUS_PRODUCER_ID, _TAG_NEXT_PRODUCER_ID):
            found[tag] = field.int64()
        elif tag in (_TAG_CLIENT_VERSION, _TAG_LAST_EPOCH):
            found[tag] = field.int16()
        else:
            continue
        field.end()
    return found
