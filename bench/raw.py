"""A client that does nothing but send a request and read its answer, so that it adds no time of its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from struct import Struct
from typing import Any

from bench.processes import NodeProcess
from tidemill.records.record import Record, build_batch
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

__all__ = ("RawClient", "batch_of")

_PRODUCE, _FETCH, _METADATA, _API_VERSIONS, _CREATE_TOPICS = 0, 1, 3, 18, 19
_TIMEOUT_MS = 60_000
_length = Struct(">i")


def batch_of(record_bytes: int, count: int) -> bytes:
    """A batch of ``count`` records with values of ``record_bytes``."""
    return build_batch([Record(None, b"x" * record_bytes)] * count)


class RawClient:
    """One blocking connection, which has sent ApiVersions as clients do."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_TIMEOUT_MS / 1000)
        self._socket = connection
        self._buffer = bytearray(1 << 20)
        # As every client does. Until a connection has asked something, a node takes small frames only.
        self.call(_API_VERSIONS, 0, {})

    @classmethod
    def of(cls, node: NodeProcess) -> RawClient:
        return cls(node.wait_ready())

    def close(self) -> None:
        self._socket.close()

    def exchange(self, frame: bytes) -> memoryview:
        """Send a whole frame; the answer's bytes stay valid until the next call."""
        self._socket.sendall(frame)
        (size,) = _length.unpack(self._read(4))
        return self._read(size)

    def _read(self, size: int) -> memoryview:
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        filled = 0
        while filled < size:
            received = self._socket.recv_into(view[filled:])
            if not received:
                raise SystemExit("the node closed the connection of the benchmark")
            filled += received
        return view

    def call(self, key: int, version: int, body: Mapping[str, Any]) -> Any:
        """Send a request and return its decoded answer."""
        return decode_response(
            key, version, bytes(self.exchange(encode_request(key, version, 1, "bench", body)))
        )[1]

    def auto_create(self, topic: str) -> None:
        """Ask for a topic's metadata until it has a leader."""
        body = {"topics": [{"name": topic}], "allow_auto_topic_creation": True}
        while self.call(_METADATA, 8, body).topics[0].error_code:
            pass

    def create_topic(
        self,
        topic: str,
        partitions: int,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int = 1,
    ) -> None:
        entry = {
            "name": topic,
            "num_partitions": partitions,
            "replication_factor": replication_factor,
            "configs": [{"name": name, "value": value} for name, value in (configs or {}).items()],
        }
        answer = self.call(_CREATE_TOPICS, 5, {"topics": [entry], "timeout": _TIMEOUT_MS})
        _check(answer.topics[0], f"create {topic}")

    def produce(self, topic: str, partitions: range, batch: bytes, *, acks: int = -1) -> None:
        """The same batch to every partition of the range, in one request; ``acks=0`` waits for nothing."""
        entries = [{"index": index, "records": batch} for index in partitions]
        body = {
            "acks": acks,
            "timeout": _TIMEOUT_MS,
            "topic_data": [{"name": topic, "partition_data": entries}],
        }
        if acks == 0:
            self._socket.sendall(encode_request(_PRODUCE, 8, 1, "bench", body))
            return
        for result in self.call(_PRODUCE, 8, body).responses[0].partition_responses:
            _check(result, f"produce to {topic}")

    def end_offset(self, topic: str) -> int:
        """The high watermark of partition 0."""
        answer = self.call(_FETCH, 11, _fetch_body(topic, 0, 1))
        partition = answer.responses[0].partitions[0]
        _check(partition, f"fetch of {topic}")
        high_watermark: int = partition.high_watermark
        return high_watermark

    @staticmethod
    def fetch_frame(topic: str, offset: int, max_bytes: int) -> bytes:
        return encode_request(_FETCH, 11, 1, "bench", _fetch_body(topic, offset, max_bytes))


def _fetch_body(topic: str, offset: int, max_bytes: int) -> dict[str, Any]:
    partition = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    return {
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": max_bytes,
        "session_epoch": -1,
        "topics": [{"topic": topic, "partitions": [partition]}],
    }


def _check(result: Any, what: str) -> None:
    if result.error_code:
        raise SystemExit(f"{what} was refused: {result.error_code!r}")
