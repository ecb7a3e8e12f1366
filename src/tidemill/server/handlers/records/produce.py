"""Produce: append batches, and answer when they are as safe as the client asked for.

``acks=0`` gets no answer. ``acks=1`` gets one when the batch is on the leader's own disk, ``acks=all`` when
the high watermark has passed it. While this node is the whole in-sync set, both wait for the same flush.
Acknowledged means synced, and a client that got its answer can read the batch.

A batch that is refused has changed nothing. A client that is at the wrong node is told the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

from tidemill.control.image import TopicImage
from tidemill.errors import (
    ApiError,
    ErrorCode,
    InvalidRecords,
    TableError,
    TidemillError,
    without_traceback,
)
from tidemill.log.incoming import PreparedBatch, is_quick, prepare_quickly
from tidemill.log.log import Appended
from tidemill.log.storage import Buffer
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.compression import ZSTD
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.handlers.records.batch_gate import (
    CheckedBatch,
    CheckedBatches,
    check_batches,
    look_quickly,
)
from tidemill.server.handlers.records.current_leaders import CurrentLeaders
from tidemill.server.handlers.records.produce_gate import (
    TOPIC_ID_MIN_VERSION,
    BatchHeaders,
    Refusals,
    pass_gate,
)
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import TOPIC, TRANSACTIONAL_ID, WRITE, for_each
from tidemill.server.requests.call import Call
from tidemill.wire.apis import ACKS_ALL
from tidemill.wire.hot import NodeEndpoint, PartitionResult, encode_produce_response
from tidemill.wire.requests import ms

__all__ = ("produce",)

_ZSTD_MIN_VERSION = 7
_LEADER_MIN_VERSION = 10
_NO_TOPIC_ID = UUID(int=0)
#: Names in messages come from clients, and the old string format ends at 32767 bytes.
_MESSAGE_CHARACTERS_MAX = 1_000
#: So many records at fault are named in one answer: with a message for each it could outgrow the request.
_RECORD_ERRORS_MAX = 1_000
#: An answer for more partitions than this is encoded in a thread.
_ENCODED_AT_ONCE_MAX = 2_000

TopicResults = list[tuple[str | UUID, list[PartitionResult]]]


@serves("Produce", for_each(WRITE, TOPIC), for_each(WRITE, TRANSACTIONAL_ID), overlaps=True)
def produce(broker: Broker, call: Call) -> None:
    """Handle one Produce request; the answer may be sent later."""
    transactional_id = call.request.transactional_id
    headers: BatchHeaders = {}
    if transactional_id is None or not call.may(WRITE, TRANSACTIONAL_ID, transactional_id):
        _look_and_append(broker, call, headers, {})
    else:
        pass_gate(broker, call, headers, partial(_look_and_append, broker, call, headers))


def _look_and_append(broker: Broker, call: Call, headers: BatchHeaders, refusals: Refusals) -> None:
    """Append batches that are quickly checked now, all others when they have passed the gate."""
    checked = look_quickly(broker, call, headers)
    if checked is None:
        check_batches(broker, call, headers, refusals, partial(_append_all, broker, call))
    else:
        for _ in _append_all(broker, call, refusals, checked):
            pass


def _append_all(broker: Broker, call: Call, refusals: Refusals, checked: CheckedBatches) -> Iterator[None]:
    """Append the batches, one at each step, and have the answer sent when it is due."""
    request = call.request
    pending = _Pending(broker, call)
    for topic in request.topic_data:
        # The id of all zeros, which is decoded as None, is answered like any other that nobody has.
        name = (topic.topic_id or _NO_TOPIC_ID) if call.version >= TOPIC_ID_MIN_VERSION else topic.name
        results: list[PartitionResult] = []
        pending.topics.append((name, results))
        for entry in topic.partition_data:
            _append_one(broker, call, pending, results, name, entry, refusals, checked.get(id(entry)))
            yield
    pending.started(request)


def _append_one(
    broker: Broker,
    call: Call,
    pending: _Pending,
    results: list[PartitionResult],
    name: Any,
    entry: Any,
    refusals: Refusals,
    checked: CheckedBatch | BatchHeader | TidemillError | None,
) -> None:
    request = call.request
    position = len(results)
    try:
        if call.authorizer is not None:
            _authorize(broker, call, name)
        topic = _find_topic(broker, name)
        _check_acks(request.acks)
        if (topic.name, entry.index) in refusals:
            raise refusals[topic.name, entry.index]
        if isinstance(checked, TidemillError):
            raise checked
        if topic.internal:
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"clients may not write to the internal topic {topic.name}"
            )
        records = _checked_records(entry.records, call.version)
        partition = broker.find.partition(topic, entry.index)
        if request.acks == ACKS_ALL:
            partition.as_leader.check_enough_replicas()
        now_ms = broker.clock_ms()
        appended, newest_ms = _write(broker, topic, partition, records, checked, now_ms)
        partition.bytes_in += len(records)
    except TidemillError as error:
        refusal = _refusal(entry.index, without_traceback(error), pending.record_errors_left)
        pending.record_errors_left -= len(refusal.record_errors)
        results.append(refusal)
        return
    # The timestamp of the records, which were stamped before they may have waited for others.
    append_time = newest_ms if partition.config.timestamp_type == "LogAppendTime" else -1
    results.append(
        PartitionResult(
            entry.index, ErrorCode.none, appended.base_offset, append_time, partition.log_start_offset
        )
    )
    if request.acks != 0:
        # A duplicate may be of an old batch, whose first answer said that it is committed.
        committed = request.acks == ACKS_ALL or appended.duplicate
        pending.wait_for(partition, appended.last_offset + 1, results, position, committed=committed)


def _write(
    broker: Broker,
    topic: TopicImage,
    partition: Partition,
    records: Buffer,
    checked: CheckedBatch | BatchHeader | None,
    now_ms: int,
) -> tuple[Appended, int]:
    """Append a batch, and tell its table about the rows; also returns its newest timestamp."""
    table = broker.image.table_of_topic(topic.id)
    looked_at = checked if isinstance(checked, CheckedBatch) else None
    table_partition = None if looked_at is None else looked_at.table_partition
    if table is not None and (table_partition is None or table_partition.topic_id != topic.id):
        # The topic became this table's while the request was under way: its rows were not checked.
        raise ApiError(ErrorCode.leader_not_available, f"topic {topic.name!r} is being created; try again")
    if looked_at is not None and looked_at.prepared.config is partition.config:
        prepared: PreparedBatch | None = looked_at.prepared
    else:
        prepared = _prepare_now(partition, records, checked, now_ms)
    if prepared is None:
        # The topic was created, or its configuration changed, while the request was under way. Checking such
        # a batch takes long, so it is not done here.
        raise ApiError(ErrorCode.leader_not_available, f"topic {topic.name!r} has changed; try again")
    appended = partition.append_prepared(prepared, now_ms)
    if looked_at is not None and looked_at.table is not None and looked_at.table_partition is not None:
        broker.tables.rows_appended(
            looked_at.table, looked_at.table_partition, looked_at.changes, partition, appended
        )
    return appended, prepared.header.max_timestamp


def _prepare_now(
    partition: Partition, records: Buffer, checked: CheckedBatch | BatchHeader | None, now_ms: int
) -> PreparedBatch | None:
    """Check and prepare a batch on the event loop; None if that would take long."""
    if len(records) < HEADER_BYTES:
        return partition.prepare(records, now_ms)  # Raises the error that says what is wrong with it.
    header = checked if isinstance(checked, BatchHeader) else parse_header(records)
    if isinstance(checked, CheckedBatch):
        return prepare_quickly(records, header, partition.config, now_ms)
    if not is_quick(header, len(records), partition.config):
        return None
    return partition.prepare(records, now_ms, header=header)


def _find_topic(broker: Broker, name: str | UUID | None) -> TopicImage:
    return broker.find.topic(name) if isinstance(name, str) else broker.find.topic_by_id(name)


def _authorize(broker: Broker, call: Call, name: str | UUID) -> None:
    if call.request.transactional_id is not None:
        call.authorize(WRITE, TRANSACTIONAL_ID, call.request.transactional_id)
    call.authorize(WRITE, TOPIC, name if isinstance(name, str) else _find_topic(broker, name).name)


def _check_acks(acks: int) -> None:
    if acks not in (0, 1, ACKS_ALL):
        raise ApiError(ErrorCode.invalid_required_acks, f"acks must be 0, 1 or -1 (all), not {acks}")


def _checked_records(records: bytes | None, version: int) -> Buffer:
    if not records:
        raise ApiError(ErrorCode.invalid_record, "the request holds no record batch for this partition")
    if version < _ZSTD_MIN_VERSION and len(records) >= HEADER_BYTES and parse_header(records).codec == ZSTD:
        raise ApiError(
            ErrorCode.unsupported_compression_type,
            "zstd needs Produce version 7 or newer: update the client",
        )
    return records


def _refusal(index: int, error: TidemillError, record_errors_max: int = 0) -> PartitionResult:
    message = error.message[:_MESSAGE_CHARACTERS_MAX]
    faults: list[tuple[int, str]] = []
    if isinstance(error, InvalidRecords | TableError):
        faults = [
            (number, text[:_MESSAGE_CHARACTERS_MAX])
            for number, text in error.record_errors[:record_errors_max]
        ]
    return PartitionResult(index, error.code, -1, -1, -1, record_errors=faults, error_message=message)


class _Pending:
    """An answer to Produce that waits for its partitions."""

    __slots__ = (
        "_broker",
        "_call",
        "_sent",
        "_started",
        "_task",
        "_timer",
        "_waiting",
        "record_errors_left",
        "topics",
    )

    def __init__(self, broker: Broker, call: Call) -> None:
        self._broker = broker
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = False
        self._sent = False
        #: Results whose batches are not durable yet, by their position in ``topics``: (topic, partition).
        self._waiting: dict[tuple[int, int], list[PartitionResult]] = {}
        self.topics: TopicResults = []
        self.record_errors_left = _RECORD_ERRORS_MAX

    def wait_for(
        self,
        partition: Partition,
        offset: int,
        results: list[PartitionResult],
        position: int,
        *,
        committed: bool,
    ) -> None:
        """Send nothing before everything below ``offset`` is committed, or durable on this node's disk."""
        key = len(self.topics), position
        self._waiting[key] = results
        wait = partition.when_acknowledged if committed else partition.when_durable
        wait(offset, lambda error: self._settled(key, error))

    def started(self, request: Any) -> None:
        """Note that all batches are appended: from now on the answer can be sent."""
        self._started = True
        if not self._waiting:
            self._send()
        else:
            timeout_ms = max(0, ms(request.timeout))
            self._timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._timed_out)

    def _settled(self, key: tuple[int, int], error: TidemillError | None) -> None:
        if self._sent:
            return
        results, position = self._waiting.pop(key), key[1]
        if error is not None:
            results[position] = _refusal(results[position].partition_index, error)
        if self._started and not self._waiting:
            self._send()

    def _timed_out(self) -> None:
        # The batches are in the log and may yet become durable: the client retries, and is answered with
        # their offsets then.
        error = ApiError(
            ErrorCode.request_timed_out, "the batch was not durable within the request's timeout"
        )
        for (_, position), results in self._waiting.items():
            results[position] = _refusal(results[position].partition_index, error)
        self._send()

    def _send(self) -> None:
        self._sent = True
        if self._timer is not None:
            self._timer.cancel()
        header = self._call.header
        if self._call.request.acks == 0:
            self._finish_without_answer()
            return
        endpoints = self._name_leaders() if header.api_version >= _LEADER_MIN_VERSION else []
        encode = partial(
            encode_produce_response,
            header.api_version,
            header.correlation_id,
            self.topics,
            node_endpoints=endpoints,
        )
        if sum(len(results) for _, results in self.topics) > _ENCODED_AT_ONCE_MAX:
            self._task = self._call.start_task(self._send_from_thread(encode))
        else:
            self._call.reply_buffers([encode()])

    def _name_leaders(self) -> list[NodeEndpoint]:
        """Complete refusals with the present leaders; gives their addresses."""
        leaders: CurrentLeaders | None = None
        for topic, results in self.topics:
            for position, result in enumerate(results):
                if result.error_code:
                    leaders = leaders or CurrentLeaders(self._broker)
                    leader = leaders.of(topic, result.partition_index, result.error_code)
                    results[position] = result._replace(current_leader=leader)
        return [] if leaders is None else leaders.endpoints

    async def _send_from_thread(self, encode: Callable[[], bytes]) -> None:
        self._call.reply_buffers([await asyncio.get_running_loop().run_in_executor(None, encode)])

    def _finish_without_answer(self) -> None:
        failed = any(result.error_code != ErrorCode.none for _, results in self.topics for result in results)
        if failed:
            # Closing the connection is the only way to tell the producer: it connects again and asks for
            # metadata.
            self._call.abort()
        else:
            self._call.no_reply()
