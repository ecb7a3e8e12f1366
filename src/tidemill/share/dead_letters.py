"""The interface through which a share partition has its dead letters written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.coordination.share_state import SharePartitionKey
    from tidemill.share.partition.values import DueLetter

__all__ = ("DeadLetters",)


class DeadLetters(Protocol):
    """Writes records that died, with their reasons, to the dead-letter topic of their group."""

    async def take_over(self, key: SharePartitionKey, leader_epoch: int) -> None:
        """Decide what an earlier leader left open: after that the state has its outcome.

        Raises ``ApiError`` if that could not be done; it ends by itself after a while.
        """

    async def write(self, key: SharePartitionKey, leader_epoch: int, letters: Sequence[DueLetter]) -> None:
        """Write the letters of records whose state is ARCHIVING. Returns when they are committed.

        Raises ``ApiError`` if they are not, or if that is not known: then the same ones are asked for again,
        also by a later leader.
        """
