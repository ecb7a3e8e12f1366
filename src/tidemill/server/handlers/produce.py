"""Produce: append batches, and answer when they are as safe as the client asked for.

``acks=0`` gets no answer, ``acks=1`` one after the write, ``acks=all`` one when the high watermark has passed
the batch. A batch that is refused has changed nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from tidemill.control.image import TopicImage
from tidemill.errors import ApiError, ErrorCode, StorageError, TidemillError
from tidemill.log.storage import Buffer
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.records.compression import ZSTD
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.wire.hot import PartitionResult, encode_produce_response
from tidemill.wire.requests import ms

__all__ = ("produce",)

_ACKS_ALL = -1
_ZSTD_MIN_VERSION = 7
_TOPIC_ID_MIN_VERSION = 13

TopicResults = list[tuple[str | UUID, list[PartitionResult]]]


def produce(broker: Broker, call: Call) -> None:
    """Handle one Produce request; the answer may be sent later."""
    request = call.request
    pending = _Pending(call)
    for topic in request.topic_data:
        name = topic.topic_id if call.version >= _TOPIC_ID_MIN_VERSION else topic.name
        results: list[PartitionResult] = []
        pending.topics.append((name, results))
        for entry in topic.partition_data:
            _append_one(broker, call, pending, results, name, entry)
    pending.started(broker, request)


def _append_one(
    broker: Broker, call: Call, pending: _Pending, results: list[PartitionResult], name: Any, entry: Any
) -> None:
    request = call.request
    place = len(results)
    try:
        topic = _find_topic(broker, name)
        _check_request(request.acks, request.transactional_id)
        if topic.internal:
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"clients may not write to the internal topic {topic.name}"
            )
        records = _checked_records(entry.records, call.version)
        partition = broker.partition(topic, entry.index)
        now_ms = broker.clock_ms()
        appended = partition.append(records, now_ms)
    except TidemillError as error:
        results.append(_refusal(entry.index, error))
        return
    append_time = now_ms if partition.config.timestamp_type == "LogAppendTime" else -1
    results.append(
        PartitionResult(
            entry.index, ErrorCode.none, appended.base_offset, append_time, partition.log_start_offset
        )
    )
    if request.acks == _ACKS_ALL:
        pending.waiting += 1
        partition.when_committed(
            appended.last_offset + 1, lambda error: pending.committed(results, place, error)
        )


def _find_topic(broker: Broker, name: str | UUID | None) -> TopicImage:
    return broker.topic(name) if isinstance(name, str) else broker.topic_by_id(name)


def _check_request(acks: int, transactional_id: str | None) -> None:
    if acks not in (0, 1, _ACKS_ALL):
        raise ApiError(ErrorCode.invalid_required_acks, f"acks must be 0, 1 or -1 (all), not {acks}")
    if transactional_id is not None:
        raise ApiError(ErrorCode.invalid_txn_state, "transactions are not supported by this version")


def _checked_records(records: bytes | None, version: int) -> Buffer:
    if not records:
        raise ApiError(ErrorCode.invalid_record, "the request holds no record batch for this partition")
    if len(records) >= HEADER_BYTES:
        header = parse_header(records)
        if header.codec == ZSTD and version < _ZSTD_MIN_VERSION:
            raise ApiError(
                ErrorCode.unsupported_compression_type, "zstd needs Produce version 7 or newer: update the client"
            )
        if header.is_transactional:
            raise ApiError(ErrorCode.invalid_txn_state, "transactions are not supported by this version")
    return records


def _refusal(index: int, error: TidemillError) -> PartitionResult:
    return PartitionResult(index, error.code, -1, -1, -1, error_message=error.message)


class _Pending:
    """An answer that waits for its partitions."""

    __slots__ = ("_call", "_timer", "topics", "waiting")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.topics: TopicResults = []
        self.waiting = 1  # released by ``started``, so that nothing is sent while partitions are still added

    def started(self, broker: Broker, request: Any) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self._send()
        elif request.acks == _ACKS_ALL:
            timeout_ms = max(0, ms(request.timeout))
            self._timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._timed_out)

    def committed(self, results: list[PartitionResult], place: int, error: StorageError | None) -> None:
        if self.waiting == 0:
            return
        if error is not None:
            results[place] = _refusal(results[place].partition_index, error)
        self.waiting -= 1
        if self.waiting == 0:
            self._send()

    def _timed_out(self) -> None:
        # The batches are in the log and may yet become durable: the client retries, and is answered with
        # their offsets then.
        error = ApiError(ErrorCode.request_timed_out, "the batch was not durable within the request's timeout")
        for _, results in self.topics:
            for place, result in enumerate(results):
                if result.error_code == ErrorCode.none:
                    results[place] = _refusal(result.partition_index, error)
        self.waiting = 0
        self._send()

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        header = self._call.header
        if self._call.request.acks == 0:
            self._call.no_reply()
            return
        self._call.reply_buffers(
            [encode_produce_response(header.api_version, header.correlation_id, self.topics)]
        )
