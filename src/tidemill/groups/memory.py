"""The memory of a node for groups: what their members say and are assigned, and what they have committed.

A group bounds what its own members may say. But a client can have any number of groups, so there is a bound
for all groups of a node together: one for members, one for committed offsets, so that neither keeps the other
out. An address has a share of each, by the rule of ``coordination.fair_shares``.

Only what a client asks for is refused. What is stored is always loaded, and what follows from the request of
another (the partitions of a member that left) or from time is only counted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tidemill.coordination.fair_shares import HELD_PER_FREE, share_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = (
    "COMMITTED_BYTES_MAX",
    "GROUP_BYTES",
    "MEMBER_BYTES",
    "MEMBER_BYTES_MAX",
    "NAME_BYTES",
    "NO_MEMORY",
    "OFFSET_BYTES",
    "PARTITION_BYTES",
    "GroupMemory",
)

#: The most that members of all groups of a node may take.
MEMBER_BYTES_MAX: Final = 256 * 1024 * 1024
#: The most that the committed offsets of all groups of a node may take.
COMMITTED_BYTES_MAX: Final = 256 * 1024 * 1024

# About what Python needs for one of each, besides the text in it.
GROUP_BYTES: Final = 2_048
MEMBER_BYTES: Final = 1_024
#: A topic's name that somebody subscribes to.
NAME_BYTES: Final = 120
#: A partition that is assigned, or of which a share group has state.
PARTITION_BYTES: Final = 128
OFFSET_BYTES: Final = 256

#: What a member is told that is refused.
NO_MEMORY: Final = (
    "the node has no memory for more members of groups of this address; stop members that are not needed "
    "(docs/limits.md)"
)
_NOTHING: Final[Mapping[str, int]] = {}


class GroupMemory:
    """What each group takes, by the host of the client that it takes it for. Groups are known by their ids.

    The host is empty if it is not known. Such memory is taken, but is part of nobody's share.

    >>> memory = GroupMemory(100)
    >>> memory.note("g", {"10.0.0.1": 70})
    >>> memory.has_capacity("10.0.0.1", 5), memory.has_capacity("10.0.0.1", 6), memory.has_capacity("h", 22)
    (True, False, True)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._of_groups: dict[str, Mapping[str, int]] = {}
        self._of_addresses: Counter[str] = Counter()
        self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """What all groups take."""
        return self._taken_bytes

    def of_group(self, group_id: str) -> int:
        """What a group was last noted to take."""
        return sum(self._of_groups.get(group_id, _NOTHING).values())

    def has_capacity(self, host: str, more_bytes: int) -> bool:
        """Whether clients of a host may take so much more than they do."""
        if more_bytes <= 0:
            return True
        left = self.limit_bytes - self._taken_bytes - more_bytes
        held = self._of_addresses[share_address(host)] if host else 0
        return held + more_bytes <= HELD_PER_FREE * left

    def note(self, group_id: str, by_host: Mapping[str, int]) -> None:
        """Note what a group takes now, by the host of the client that it is for."""
        before = self._of_groups.get(group_id, _NOTHING)
        if before == by_host:
            return
        for sizes, sign in ((by_host, 1), (before, -1)):
            for host, size in sizes.items():
                address = share_address(host)
                self._of_addresses[address] += sign * size
                if not self._of_addresses[address]:
                    del self._of_addresses[address]
                self._taken_bytes += sign * size
        if by_host:
            self._of_groups[group_id] = dict(by_host)
        else:
            del self._of_groups[group_id]

    def forget(self, group_ids: Iterable[str]) -> None:
        """Forget groups that this node does not serve any more."""
        for group_id in group_ids:
            self.note(group_id, _NOTHING)
