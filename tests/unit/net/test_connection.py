"""A client's connection, over a network in memory and against a node that a test plays by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.frames import split_frames
from support.sim_network import SimNetwork
from support.virtual_loop import current_loop, run_virtual
from tidemill.config.values import Address
from tidemill.errors import ApiError, ConnectionClosed, ErrorCode, NodeUnavailable, ProtocolError
from tidemill.net.connection import Connection
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_response
from tidemill.wire.requests import parse_header

ADDRESS = Address("node", 9092)
API_VERSIONS, METADATA, FIND_COORDINATOR = (
    APIS_BY_NAME[name].key for name in ("ApiVersions", "Metadata", "FindCoordinator")
)
#: What the node says that it serves, unless a test has something else.
SERVED = {API_VERSIONS: (0, 4), METADATA: (0, 9)}

Request = tuple[int, int, int]
"""The API key, the version and the correlation id of a request."""


class PlayedNode(asyncio.Protocol):
    """Answers ApiVersions by itself; everything else waits for the test."""

    def __init__(self, served: dict[int, tuple[int, int]]) -> None:
        self._served = served
        self._received = bytearray()
        self.transport: asyncio.Transport
        self.requests: list[Request] = []
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        for frame in split_frames(self._received):
            header = parse_header(frame)
            if header.api_key == API_VERSIONS:
                self.answer_versions(header.correlation_id)
            else:
                self.requests.append((header.api_key, header.api_version, header.correlation_id))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True

    def answer_versions(self, correlation_id: int) -> None:
        keys = [
            {"api_key": key, "min_version": least, "max_version": most}
            for key, (least, most) in self._served.items()
        ]
        self.send(API_VERSIONS, 0, correlation_id, {"error_code": ErrorCode.none, "api_keys": keys})

    def send(self, api_key: int, version: int, correlation_id: int, body: dict[str, Any]) -> None:
        self.transport.write(encode_response(api_key, version, correlation_id, body))

    def answer(self, request: Request, cluster_id: str) -> None:
        """Answer a request for Metadata, with an id by which the test knows the answer."""
        body = {"brokers": (), "cluster_id": cluster_id, "controller_id": 1, "topics": ()}
        self.send(*request, body)


Story = Callable[[Connection, PlayedNode], Awaitable[None]]


def tell(story: Story, served: dict[int, tuple[int, int]] = SERVED) -> None:
    """Run a story with an open connection and the node at its other end."""

    async def main() -> None:
        network, nodes = SimNetwork(current_loop()), list[PlayedNode]()

        def accept() -> PlayedNode:
            nodes.append(PlayedNode(served))
            return nodes[-1]

        listener = await network.transport("node").listen(ADDRESS, accept, 10)
        await listener.start_serving()
        connection = await Connection.open(ADDRESS, transport=network.transport("client"))
        await story(connection, nodes[0])
        await connection.close()

    run_virtual(main, seed=1)


async def arrived(node: PlayedNode, count: int) -> list[Request]:
    """The first requests that the node got, once there are so many."""
    async with asyncio.timeout(10):
        while len(node.requests) < count:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
    return node.requests[:count]


def metadata(connection: Connection, **options: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(connection.request("Metadata", {"topics": None}, **options))


# --- versions


def test_a_request_goes_out_in_the_newest_version_that_both_sides_and_the_caller_know() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        assert connection.served == SERVED
        assert connection.version_of("Metadata") == 9
        assert connection.version_of("Metadata", (0, 7)) == 7
        asking = metadata(connection, versions=(1, 8))
        (request,) = await arrived(node, 1)
        assert request[:2] == (METADATA, 8)
        node.answer(request, "c")
        assert (await asking).cluster_id == "c"

    tell(story)


def test_an_api_that_the_node_does_not_serve_is_refused_before_anything_is_sent() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        with pytest.raises(ApiError, match="does not serve FindCoordinator") as caught:
            await connection.request("FindCoordinator", {})
        assert caught.value.code is ErrorCode.unsupported_version
        with pytest.raises(ApiError, match="in versions 0 to 9, this side needs 11 to 12"):
            connection.version_of("Metadata", (11, 12))
        assert not connection.failed
        assert node.requests == []

    tell(story)


def test_a_node_that_refuses_to_name_its_versions_is_not_connected_to() -> None:
    class Refusing(PlayedNode):
        def answer_versions(self, correlation_id: int) -> None:
            body = {"error_code": ErrorCode.unsupported_version, "api_keys": ()}
            self.send(API_VERSIONS, 0, correlation_id, body)

    async def main() -> None:
        network, node = SimNetwork(current_loop()), Refusing({})
        listener = await network.transport("node").listen(ADDRESS, lambda: node, 10)
        await listener.start_serving()
        with pytest.raises(ApiError, match="refuses to say"):
            await Connection.open(ADDRESS, transport=network.transport("client"))
        await asyncio.sleep(1)
        assert node.is_closed

    run_virtual(main, seed=1)


# --- requests under way


def test_answers_find_their_requests_in_any_order() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        asking = [metadata(connection) for _ in range(5)]
        requests = await arrived(node, 5)
        assert len({correlation_id for _, _, correlation_id in requests}) == 5
        for number in (3, 0, 4, 2, 1):
            node.answer(requests[number], f"answer {number}")
        answers = [(await each).cluster_id for each in asking]
        assert answers == [f"answer {number}" for number in range(5)]

    tell(story)


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        given_up, waiting = metadata(connection), metadata(connection)
        first, second = await arrived(node, 2)
        given_up.cancel()
        node.answer(first, "too late")
        node.answer(second, "in time")
        assert (await waiting).cluster_id == "in time"
        assert not connection.failed

    tell(story)


# --- failing


def test_a_request_that_is_not_answered_in_time_fails_the_connection_for_good() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        patient = metadata(connection, timeout_ms=60_000)
        with pytest.raises(NodeUnavailable, match="Metadata was not answered within 2000 ms"):
            await metadata(connection, timeout_ms=2_000)
        assert connection.failed
        with pytest.raises(NodeUnavailable, match="within 2000 ms"):
            await patient
        sent = len(node.requests)
        with pytest.raises(NodeUnavailable, match="within 2000 ms"):
            await connection.request("Metadata", {"topics": None})
        await asyncio.sleep(1)
        assert len(node.requests) == sent
        assert node.is_closed

    tell(story)


def test_a_node_that_goes_away_fails_everything_under_way() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        asking = [metadata(connection) for _ in range(3)]
        await arrived(node, 3)
        node.transport.close()
        for each in asking:
            with pytest.raises(NodeUnavailable, match="closed the connection"):
                await each
        with pytest.raises(NodeUnavailable, match="closed the connection"):
            await connection.request("Metadata", {"topics": None})

    tell(story)


@pytest.mark.parametrize("frame", [b"\x00\x00", (77).to_bytes(4, "big")])
def test_what_is_no_answer_to_any_request_fails_the_connection(frame: bytes) -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        asking = metadata(connection)
        await arrived(node, 1)
        node.transport.write(len(frame).to_bytes(4, "big") + frame)
        with pytest.raises(ProtocolError, match="does not answer as a Kafka server would"):
            await asking
        assert connection.failed

    tell(story)


def test_closing_fails_what_is_under_way_and_may_be_repeated() -> None:
    async def story(connection: Connection, node: PlayedNode) -> None:
        asking = metadata(connection)
        await arrived(node, 1)
        await connection.close()
        await connection.close()
        with pytest.raises(ConnectionClosed, match="on this side"):
            await asking

    tell(story)


def test_a_node_that_cannot_be_reached_is_named() -> None:
    async def main() -> None:
        network = SimNetwork(current_loop())
        with pytest.raises(NodeUnavailable, match="cannot reach the node at node:9092"):
            await Connection.open(ADDRESS, transport=network.transport("client"))

    run_virtual(main, seed=1)
