"""A Kafka client with nothing hidden: one socket, one request at a time, bytes if need be."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tidemill.records.record import Record, build_batch
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response

__all__ = ("RawClient", "batch_of", "fetch_body", "produce_body")

_DEADLINE_SECONDS = 120.0
#: A node reads so many requests of a connection before it has answered them (it has a limit of 64).
_AT_ONCE = 50


def batch_of(*values: bytes, **options: Any) -> bytes:
    return build_batch([Record(None, value, 1_000) for value in values], **options)


def produce_body(topic: str, records: bytes, *, acks: int = -1, partition: int = 0) -> dict[str, Any]:
    """A Produce request for one partition; versions up to 12 name the topic."""
    entry = {"index": partition, "records": records}
    return {"acks": acks, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": [entry]}]}


def fetch_body(topic: str, offset: int = 0, *, max_bytes: int = 2**20, partition: int = 0) -> dict[str, Any]:
    """A Fetch request for one partition; versions up to 12 name the topic."""
    entry = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    return {"max_bytes": max_bytes, "session_epoch": -1, "topics": [{"topic": topic, "partitions": [entry]}]}


class RawClient:
    """Raises ``ConnectionError`` when the node has closed the connection."""

    def __init__(self, address: tuple[str, int], deadline_seconds: float = _DEADLINE_SECONDS) -> None:
        self.socket = socket.create_connection(address, timeout=deadline_seconds)
        self.correlation_id = 0

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def encode(self, api: str, version: int, body: dict[str, Any]) -> bytes:
        """The frame of a request with the next correlation id."""
        self.correlation_id += 1
        return bytes(encode_request(APIS_BY_NAME[api].key, version, self.correlation_id, "raw", body))

    def request(self, api: str, version: int, body: dict[str, Any]) -> Any:
        """Send a request and return the body of its answer."""
        self.send(self.encode(api, version, body))
        correlation_id, answer = decode_response(APIS_BY_NAME[api].key, version, self.read_frame())
        assert correlation_id == self.correlation_id
        return answer

    def request_many(self, api: str, version: int, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Send requests, many at a time, and return the bodies of their answers."""
        answers = []
        for start in range(0, len(bodies), _AT_ONCE):
            frames = [self.encode(api, version, each) for each in bodies[start : start + _AT_ONCE]]
            self.send(b"".join(frames))
            answers += [decode_response(APIS_BY_NAME[api].key, version, self.read_frame())[1] for _ in frames]
        return answers

    def produce(self, topic: str, records: bytes) -> Any:
        """The answer for partition 0."""
        return self.request("Produce", 9, produce_body(topic, records)).responses[0].partition_responses[0]

    def fetch(self, topic: str, offset: int = 0) -> Any:
        """The answer for partition 0."""
        return self.request("Fetch", 12, fetch_body(topic, offset)).responses[0].partitions[0]

    def read_frame(self) -> bytes:
        (length,) = struct.unpack(">i", self._read(4))
        return self._read(length)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            received = self.socket.recv(size - len(data))
            if not received:
                raise ConnectionError("the node closed the connection")
            data += received
        return bytes(data)

    def wait_for_close(self) -> int:
        """Wait until the node closes the connection, and return how many bytes it sent before."""
        received = 0
        try:
            while data := self.socket.recv(65536):
                received += len(data)
        except ConnectionResetError:
            pass
        return received

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
