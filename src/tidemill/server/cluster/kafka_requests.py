"""Requests of Kafka's protocol between nodes: a whole request travels in one message of the cluster.

Only APIs whose row in ``wire.apis`` says so travel like this. The nodes have proven the cluster's secret to
each other, so no permission is asked for: the node that asks has asked for its client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidemill.cluster.messages import (
    AppendRequest,
    AppendResponse,
    KafkaRequest,
    KafkaResponse,
    PartitionId,
)
from tidemill.errors import ApiError, ErrorCode, ProtocolError
from tidemill.server.requests.api_table import is_loaded, load, served_api
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.wire.apis import ACKS_ALL, APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header

if TYPE_CHECKING:
    from tidemill.cluster.peer import Peers
    from tidemill.server.broker import Broker

__all__ = ("NodeRequests", "serve_node_request")

#: Longer than a follower that is not in sync delays a commit, and than an election takes.
_TIMEOUT_MS: Final = 10_000
_LENGTH_BYTES: Final = 4


class NodeRequests:
    """Sends Kafka requests to other nodes and gives their answers."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def ask(self, node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
        """Send a request and give the decoded answer. Raises ``TidemillError``.

        REQUEST_TIMED_OUT and ``NodeUnavailable`` do not say whether the request was carried out.
        """
        key = APIS_BY_NAME[api].key
        frame = encode_request(key, version, 0, None, body)[_LENGTH_BYTES:]
        make = partial(KafkaRequest, frame=frame)
        answer = await self._peers.request(node_id, make, KafkaResponse, timeout_ms=_TIMEOUT_MS)
        return decode_response(key, version, answer.frame)[1]

    async def append(
        self, node_id: int, where: PartitionId, leader_epoch: int, batch: bytes, transactional_id: str
    ) -> int:
        """Have a leader write a transactional batch with acks=all; gives its offset. Raises as ``ask``."""
        make = partial(
            AppendRequest,
            partition=where,
            records=memoryview(batch),
            required_acks=ACKS_ALL,
            leader_epoch=leader_epoch,
            transactional_id=transactional_id,
        )
        return (await self._peers.request(node_id, make, AppendResponse, timeout_ms=_TIMEOUT_MS)).base_offset


async def serve_node_request(broker: Broker, node_id: int, frame: memoryview) -> memoryview:
    """Carry out another node's request, whose frame has no length; gives the answer's frame, without it.

    Raises ``ApiError`` if it is not a request that nodes send.
    """
    try:
        header = parse_header(frame)
        if not is_loaded(header.api_key):
            await asyncio.to_thread(load, header.api_key)
        served = served_api(header.api_key)
        if not (served.api.between_nodes or served.api.nodes_only):
            raise ApiError(ErrorCode.invalid_request, f"nodes do not ask each other for {served.api.name}")
        request = decode_request(header, frame)
    except ProtocolError as error:
        raise ApiError(ErrorCode.invalid_request, f"not a request of Kafka's: {error.message}") from error
    sent: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()

    # Nobody may wait any more: the node that has asked is gone, or this one stops.
    def reply(buffers: ReplyBuffers) -> None:
        if not sent.done():
            sent.set_result(buffers)

    def fail() -> None:
        if not sent.done():
            sent.set_exception(
                ApiError(ErrorCode.unknown_server_error, f"there is no answer to {served.api.name}")
            )

    call = Call(header, request, f"node {node_id}", reply, fail)
    call.between_nodes = True
    answer = served.handler(broker, call)
    if served.in_task:
        body = await answer
        call.reply(body)
    return memoryview(b"".join(await sent))[_LENGTH_BYTES:]
