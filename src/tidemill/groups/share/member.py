"""A member of a share group (KIP-932): what it asked for, and what it was told.

Share partitions have no owner, so a member moves to its target at once: nobody has to let go of anything
first. Members are frozen values: a change makes a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tidemill.groups.consumer.member import JOIN_EPOCH, NO_PARTITIONS, Partitions
from tidemill.groups.memory import MEMBER_BYTES, NAME_BYTES

__all__ = ("MEMBER_ID_CHARACTERS_MAX", "ShareMember")

MEMBER_ID_CHARACTERS_MAX: Final = 36
"""The length of a UUID as text: clients make their own ids of one."""


@dataclass(frozen=True, slots=True)
class ShareMember:
    """One member of a share group, as a value.

    ``previous_epoch`` is accepted as well, because the answer with the new one may have been lost.
    """

    member_id: str
    epoch: int = JOIN_EPOCH
    previous_epoch: int = JOIN_EPOCH
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    assigned: Partitions = NO_PARTITIONS

    @property
    def said_bytes(self) -> int:
        """Estimate of the memory for the member's own data."""
        texts = len(self.member_id) + len(self.rack_id or "") + len(self.client_id)
        return MEMBER_BYTES + texts + sum(map(len, self.topics)) + NAME_BYTES * len(self.topics)

    def moved_to(self, epoch: int, target: Partitions) -> ShareMember:
        """The member with its target of that epoch."""
        if epoch == self.epoch:
            return self
        return replace(self, epoch=epoch, previous_epoch=self.epoch, assigned=target)
