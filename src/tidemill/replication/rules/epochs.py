"""The leader epoch that a request names, against the one that the metadata knows."""

from __future__ import annotations

from tidemill.errors import ApiError, ErrorCode

__all__ = ("NO_EPOCH", "check_leader_epoch")

#: The leader epoch in a request that names none.
NO_EPOCH = -1


def check_leader_epoch(topic: str, index: int, known: int, named: int) -> None:
    """Raise ``ApiError`` unless a request names the known epoch, or none.

    A lower one is FENCED_LEADER_EPOCH: the client's metadata is old. A higher one is UNKNOWN_LEADER_EPOCH:
    this node's is.
    """
    if named < 0 or named == known:
        return
    where = f"{topic}-{index} is at leader epoch {known}, the request says {named}"
    if named < known:
        raise ApiError(ErrorCode.fenced_leader_epoch, where)
    raise ApiError(ErrorCode.unknown_leader_epoch, where)
