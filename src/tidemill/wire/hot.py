"""Produce, Fetch and ShareFetch responses, packed by hand because they carry the load.

Rules:

- The bytes are those of the generic encoder, in every version; the tests compare them.
- A Fetch response is a list of buffers. The record data in it are the buffers that the caller passed: nothing
  is copied, and a slice of a file or of a cache goes to the socket as it is.
- Optional values are None when they are not to be sent. What a version cannot say is left out.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from tidemill.wire.guard import write_uvarint

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = (
    "FetchPartition",
    "NodeEndpoint",
    "PartitionResult",
    "RecordBuffer",
    "SharePartitionData",
    "encode_fetch_response",
    "encode_produce_response",
    "encode_share_fetch_response",
)

RecordBuffer = bytes | bytearray | memoryview
"""Record data. A memoryview must be of bytes: its length is taken as a number of bytes."""


class NodeEndpoint(NamedTuple):
    """A node's address, for a client that is told about a new leader."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


class PartitionResult(NamedTuple):
    """The result of a Produce request for one partition."""

    partition_index: int
    error_code: int
    base_offset: int
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    record_errors: Sequence[tuple[int, str | None]] = ()
    """(index in the batch, message) of every record that was refused."""
    error_message: str | None = None
    current_leader: tuple[int, int] | None = None
    """The present leader, if it is another one: (node id, leader epoch)."""


class FetchPartition(NamedTuple):
    """The part of a Fetch response for one partition."""

    partition_index: int
    error_code: int
    high_watermark: int
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[tuple[int, int]] | None = None
    """(producer id, first offset) of every aborted transaction in the records."""
    preferred_read_replica: int = -1
    records: Sequence[RecordBuffer] = ()
    diverging_epoch: tuple[int, int] | None = None
    """Where the follower's log diverges from the leader's: (epoch, end offset)."""
    current_leader: tuple[int, int] | None = None
    """The present leader, if it is another one: (node id, leader epoch)."""
    snapshot_id: tuple[int, int] | None = None
    """The snapshot to fetch instead, in Kafka's metadata log: (end offset, epoch)."""


class SharePartitionData(NamedTuple):
    """The part of a ShareFetch response for one partition."""

    partition_index: int
    error_code: int = 0
    error_message: str | None = None
    acknowledge_error_code: int = 0
    acknowledge_error_message: str | None = None
    current_leader: tuple[int, int] = (-1, -1)
    """(node id, leader epoch); (-1, -1) if they are not known."""
    records: Sequence[RecordBuffer] = ()
    acquired: Sequence[tuple[int, int, int]] = ()
    """(first offset, last offset, delivery count) of what the member holds from now on."""


_PRODUCE_FLEXIBLE: Final = 9
_PRODUCE_LOG_START: Final = 5
_PRODUCE_RECORD_ERRORS: Final = 8
_PRODUCE_LEADER: Final = 10
_PRODUCE_TOPIC_ID: Final = 13

_FETCH_LOG_START: Final = 5
_FETCH_SESSION: Final = 7
_FETCH_READ_REPLICA: Final = 11
_FETCH_FLEXIBLE: Final = 12
_FETCH_TOPIC_ID: Final = 13
_FETCH_ENDPOINTS: Final = 16

_ONE_BYTE_VARINTS: Final = 0x80
_NO_EPOCH: Final = (-1, -1)

_int16: Final = Struct(">h").pack
_int32: Final = Struct(">i").pack
_frame_start: Final = Struct(">ii")
_produce_v3: Final = Struct(">ihqq").pack
_produce_v5: Final = Struct(">ihqqq").pack
# A partition without an error: no record errors, no message, no tagged fields.
_produce_v8_plain: Final = Struct(">ihqqqih").pack
_produce_v9_plain: Final = Struct(">ihqqqBxx").pack
_fetch_v4: Final = Struct(">ihqq").pack
_fetch_v5: Final = Struct(">ihqqq").pack
_fetch_session: Final = Struct(">ihi").pack
_share_plain: Final = Struct(">ihBhBiix").pack
_share_error: Final = Struct(">ih").pack
_leader_struct: Final = Struct(">iix").pack
_acquired: Final = Struct(">qqhx").pack
_aborted: Final = Struct(">qq").pack
_aborted_flexible: Final = Struct(">qqx").pack
# Tag, size, value and the empty tagged fields of the three tagged structs of a fetched partition.
_diverging_epoch: Final = Struct(">BBiqx").pack
_current_leader: Final = Struct(">BBiix").pack
_snapshot_id: Final = Struct(">BBqix").pack


def encode_produce_response(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[str | UUID, Sequence[PartitionResult]]],
    throttle_ms: int = 0,
    node_endpoints: Sequence[NodeEndpoint] = (),
) -> bytes:
    """The whole frame of a Produce response. Topics go by name up to version 12 and by id from 13."""
    flexible = version >= _PRODUCE_FLEXIBLE
    out = bytearray(_frame_start.size + flexible)
    out += _count(len(topics), flexible)
    for topic, partitions in topics:
        out += _topic(topic, flexible, by_id=version >= _PRODUCE_TOPIC_ID)
        out += _count(len(partitions), flexible)
        for partition in partitions:
            out += _produce_partition(version, partition)
        if flexible:
            out.append(0)
    out += _int32(throttle_ms)
    if flexible:
        out += _endpoints_tag(node_endpoints if version >= _PRODUCE_LEADER else ())
    _frame_start.pack_into(out, 0, len(out) - 4, correlation_id)
    return bytes(out)


def _produce_partition(version: int, partition: PartitionResult) -> bytes:
    index, error, base, appended_ms, log_start, record_errors, message, leader = partition
    if version < _PRODUCE_LOG_START:
        return _produce_v3(index, error, base, appended_ms)
    if version < _PRODUCE_RECORD_ERRORS:
        return _produce_v5(index, error, base, appended_ms, log_start)
    flexible = version >= _PRODUCE_FLEXIBLE
    if not record_errors and message is None and leader is None:
        if flexible:
            return _produce_v9_plain(index, error, base, appended_ms, log_start, 1)
        return _produce_v8_plain(index, error, base, appended_ms, log_start, 0, -1)
    out = bytearray(_produce_v5(index, error, base, appended_ms, log_start))
    out += _count(len(record_errors), flexible)
    for batch_index, text in record_errors:
        out += _int32(batch_index) + _string(text, flexible)
        if flexible:
            out.append(0)
    out += _string(message, flexible)
    if flexible:
        if leader is None or leader == _NO_EPOCH or version < _PRODUCE_LEADER:
            out.append(0)
        else:
            out += b"\1" + _current_leader(0, 9, *leader)
    return bytes(out)


def encode_fetch_response(
    version: int,
    correlation_id: int,
    error_code: int,
    session_id: int,
    topics: Sequence[tuple[str | UUID, Sequence[FetchPartition]]],
    throttle_ms: int = 0,
    node_endpoints: Sequence[NodeEndpoint] = (),
) -> list[RecordBuffer]:
    """The whole frame of a Fetch response, as buffers to be sent one after the other.

    Topics go by name up to version 12 and by id from 13. The buffers in ``records`` are in the result as they
    are; they must not change until they are sent.
    """
    flexible = version >= _FETCH_FLEXIBLE
    buffers: list[RecordBuffer] = []
    first = out = bytearray(_frame_start.size + flexible)
    if version >= _FETCH_SESSION:
        out += _fetch_session(throttle_ms, error_code, session_id)
    else:
        out += _int32(throttle_ms)
    out += _count(len(topics), flexible)
    for topic, partitions in topics:
        out += _topic(topic, flexible, by_id=version >= _FETCH_TOPIC_ID)
        out += _count(len(partitions), flexible)
        for partition in partitions:
            out += _fetch_partition(version, partition)
            size = sum(map(len, partition.records))
            out += write_uvarint(size + 1) if flexible else _int32(size)
            if size:
                buffers.append(out)
                buffers += partition.records
                out = bytearray()
            if flexible:
                out += _fetch_tags(partition)
        if flexible:
            out.append(0)
    if flexible:
        out += _endpoints_tag(node_endpoints if version >= _FETCH_ENDPOINTS else ())
    if out:
        buffers.append(out)
    frame_bytes = sum(map(len, buffers))
    _frame_start.pack_into(first, 0, frame_bytes - 4, correlation_id)
    return buffers


def encode_share_fetch_response(
    correlation_id: int,
    error_code: int,
    error_message: str | None,
    lock_duration_ms: int,
    topics: Sequence[tuple[UUID, Sequence[SharePartitionData]]],
    node_endpoints: Sequence[NodeEndpoint] = (),
) -> list[RecordBuffer]:
    """The whole frame of a ShareFetch response as buffers; every version that there is has the same bytes."""
    buffers: list[RecordBuffer] = []
    out = first = bytearray(_frame_start.size + 1)
    out += _int32(0) + _int16(error_code) + _string(error_message, True) + _int32(lock_duration_ms)
    out += _count(len(topics), flexible=True)
    for topic_id, partitions in topics:
        out += topic_id.bytes + _count(len(partitions), flexible=True)
        for partition in partitions:
            out += _share_partition(partition)
            size = sum(map(len, partition.records))
            out += write_uvarint(size + 1)
            if size:
                buffers.append(out)
                buffers += partition.records
                out = bytearray()
            out += _count(len(partition.acquired), flexible=True)
            out += b"".join([_acquired(*each) for each in partition.acquired])
            out.append(0)
        out.append(0)
    out += _count(len(node_endpoints), flexible=True)
    for node_id, host, port, rack in node_endpoints:
        out += _int32(node_id) + _string(host, True) + _int32(port) + _string(rack, True) + b"\0"
    out.append(0)
    buffers.append(out)
    _frame_start.pack_into(first, 0, sum(map(len, buffers)) - 4, correlation_id)
    return buffers


def _share_partition(partition: SharePartitionData) -> bytes:
    """The bytes of a partition of a ShareFetch response up to its records."""
    index, error, message, ack_error, ack_message, leader = partition[:6]
    if message is None and ack_message is None:
        return _share_plain(index, error, 0, ack_error, 0, *leader)
    return (
        _share_error(index, error)
        + _string(message, True)
        + _int16(ack_error)
        + _string(ack_message, True)
        + _leader_struct(*leader)
    )


def _fetch_partition(version: int, partition: FetchPartition) -> bytes:
    """The bytes of a fetched partition up to its records."""
    index, error, high_watermark, last_stable, log_start, aborted, read_replica = partition[:7]
    flexible = version >= _FETCH_FLEXIBLE
    if version >= _FETCH_LOG_START:
        start = _fetch_v5(index, error, high_watermark, last_stable, log_start)
    else:
        start = _fetch_v4(index, error, high_watermark, last_stable)
    if aborted is None:
        start += b"\0" if flexible else _int32(-1)
    else:
        pack = _aborted_flexible if flexible else _aborted
        start += _count(len(aborted), flexible) + b"".join([pack(*each) for each in aborted])
    return start + _int32(read_replica) if version >= _FETCH_READ_REPLICA else start


def _fetch_tags(partition: FetchPartition) -> bytes:
    diverging, leader, snapshot = partition[8:]
    if diverging is None and leader is None and snapshot is None:
        return b"\0"
    tags = []
    if diverging is not None and diverging != _NO_EPOCH:
        tags.append(_diverging_epoch(0, 13, *diverging))
    if leader is not None and leader != _NO_EPOCH:
        tags.append(_current_leader(1, 9, *leader))
    if snapshot is not None and snapshot != _NO_EPOCH:
        tags.append(_snapshot_id(2, 13, *snapshot))
    return bytes([len(tags)]) + b"".join(tags)


def _endpoints_tag(endpoints: Sequence[NodeEndpoint]) -> bytes:
    """The tagged fields of a response with the addresses of the leaders that its partitions name."""
    if not endpoints:
        return b"\0"
    value = bytearray(_count(len(endpoints), flexible=True))
    for node_id, host, port, rack in endpoints:
        value += _int32(node_id) + _string(host, True) + _int32(port) + _string(rack, True) + b"\0"
    return b"\1\0" + write_uvarint(len(value)) + value


def _count(count: int, flexible: bool) -> bytes:
    if not flexible:
        return _int32(count)
    count += 1
    return bytes((count,)) if count < _ONE_BYTE_VARINTS else write_uvarint(count)


def _string(text: str | None, flexible: bool) -> bytes:
    if text is None:
        return b"\0" if flexible else _int16(-1)
    data = text.encode()
    return (write_uvarint(len(data) + 1) if flexible else _int16(len(data))) + data


def _topic(topic: str | UUID, flexible: bool, *, by_id: bool) -> bytes:
    if isinstance(topic, UUID) != by_id:
        raise TypeError(f"this version names topics by {'id' if by_id else 'name'}, not as {topic!r}")
    return topic.bytes if isinstance(topic, UUID) else _string(topic, flexible)
