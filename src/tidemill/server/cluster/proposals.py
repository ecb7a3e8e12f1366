"""Proposals: commands that only the controller may commit, sent to it from any node.

A node that cannot reach the controller asks the others to pass the command on. Every command names the epochs
on which it was decided, so that one that arrives twice, or late, changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tidemill.cluster.messages import (
    MetadataProposalResponse,
    ProposeMetadataRequest,
)
from tidemill.control.commands import PROPOSALS, Command
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TidemillError

if TYPE_CHECKING:
    from tidemill.cluster.peer import Peers
    from tidemill.control.cluster_controller import ClusterController
    from tidemill.control.controller import Controller

__all__ = ("Proposals", "is_certain_refusal")

R = TypeVar("R")

_TIMEOUT_MS: Final = 5_000
#: Codes with which planning refuses in-sync sets and resignations.
_REFUSALS: Final = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.invalid_update_version,
        ErrorCode.invalid_request,
        ErrorCode.stale_broker_epoch,
        ErrorCode.ineligible_replica,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
    }
)
_decode = msgspec.msgpack.Decoder(PROPOSALS).decode


class Proposals:
    """Sends commands to the controller, which may be this node."""

    def __init__(
        self, node_id: int, controller: Controller, elected: ClusterController, peers: Peers
    ) -> None:
        self._node_id = node_id
        self._controller = controller
        self._elected = elected
        self._peers = peers

    async def propose(self, command: Command[Any]) -> Any:
        """Have the controller commit ``command``; gives its result in MessagePack's types.

        Raises ``TidemillError``; ``is_certain_refusal`` tells whether that says that it was not committed.
        """
        if self._controller.went_back is not None:
            raise self._controller.went_back
        image = self._controller.image
        if self._elected.epoch is not None:
            return msgspec.to_builtins(await self._elected.submit(command))
        target = None if image.controller is None else image.controller.node_id
        if target is None:
            raise NodeUnavailable("the cluster has no controller at the moment; try again")
        try:
            return await self._send(target, command, forwarded=True)
        except NodeUnavailable as error:
            unreachable = error
        for other in sorted(image.live_nodes - {target, self._node_id}):
            try:
                return await self._send(other, command, forwarded=False)
            except NodeUnavailable:
                continue
            except ApiError as error:
                # Perhaps it is refused because the first attempt, which had no answer, was committed.
                raise NodeUnavailable(
                    f"it is not known what became of a proposal: {error.message}"
                ) from error
        raise unreachable

    async def _send(self, node_id: int, command: Command[Any], *, forwarded: bool) -> Any:
        raw = msgspec.Raw(msgspec.msgpack.encode(command))
        make = partial(ProposeMetadataRequest, command=raw, forwarded=forwarded)
        answer = await self._peers.request(node_id, make, MetadataProposalResponse, timeout_ms=_TIMEOUT_MS)
        return answer.result

    async def answer(self, request: ProposeMetadataRequest) -> MetadataProposalResponse:
        """Commit what another node proposes, or pass it on to the controller, once."""
        try:
            command: Any = _decode(request.command)
        except msgspec.MsgspecError as error:
            raise ApiError(ErrorCode.invalid_request, f"not a command for the controller: {error}") from error
        if self._controller.went_back is not None:
            raise self._controller.went_back
        if self._elected.epoch is None and request.forwarded:
            raise ApiError(ErrorCode.not_controller, f"node {self._node_id} is not the controller")
        if self._elected.epoch is not None:
            result = msgspec.to_builtins(await self._elected.submit(command))
        else:
            controller = self._controller.image.controller
            if controller is None or controller.node_id == self._node_id:
                raise ApiError(ErrorCode.not_controller, "the cluster has no controller at the moment")
            result = await self._send(controller.node_id, command, forwarded=True)
        return MetadataProposalResponse(
            request.header.answer(), result=result, revision=self._controller.image.revision
        )


def is_certain_refusal(error: TidemillError) -> bool:
    """Whether an error of ``propose`` says that the command was not committed and never will be.

    Only what planning refuses with is certain. Whatever else goes wrong can do so after a commit.
    """
    return isinstance(error, ApiError) and error.code in _REFUSALS
