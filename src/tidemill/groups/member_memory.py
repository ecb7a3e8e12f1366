"""The memory of a node for the members of groups: what they say of themselves, and what they are assigned.

A group bounds what its own members may say. But a client can have any number of groups, so there is a bound
for all groups of a node together. An address has a share of it, by the rule of ``coordination.fair_shares``.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tidemill.coordination.fair_shares import HELD_PER_FREE, share_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ("MEMBER_BYTES_MAX", "MemberMemory")

#: The most that members of all classic groups of a node may take.
MEMBER_BYTES_MAX: Final = 256 * 1024 * 1024

_NOTHING: Final[Mapping[str, int]] = {}


class MemberMemory:
    """What the members of each group take, by the host of their client. Groups are known by their ids.

    >>> memory = MemberMemory(100)
    >>> memory.note("g", {"10.0.0.1": 70})
    >>> memory.has_capacity("10.0.0.1", 5), memory.has_capacity("10.0.0.1", 6), memory.has_capacity("h", 22)
    (True, False, True)
    """

    def __init__(self, limit_bytes: int = MEMBER_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._of_groups: dict[str, Mapping[str, int]] = {}
        self._of_addresses: Counter[str] = Counter()
        self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """What all members take."""
        return self._taken_bytes

    def has_capacity(self, host: str, more_bytes: int) -> bool:
        """Whether clients of a host may take so much more than they do."""
        if more_bytes <= 0:
            return True
        left = self._limit_bytes - self._taken_bytes - more_bytes
        held = self._of_addresses[share_address(host)] + more_bytes
        return held <= HELD_PER_FREE * left

    def note(self, group_id: str, by_host: Mapping[str, int]) -> None:
        """Note what the members of a group take now, by the host of their client."""
        before = self._of_groups.get(group_id, _NOTHING)
        if before == by_host:
            return
        for sizes, sign in ((by_host, 1), (before, -1)):
            for host, size in sizes.items():
                self._of_addresses[share_address(host)] += sign * size
                self._taken_bytes += sign * size
        if by_host:
            self._of_groups[group_id] = dict(by_host)
        else:
            del self._of_groups[group_id]
        if len(self._of_addresses) > 2 * len(self._of_groups):
            # Addresses that hold nothing any more.
            self._of_addresses = +self._of_addresses

    def forget(self, group_ids: Iterable[str]) -> None:
        """Forget groups that this node does not serve any more."""
        for group_id in group_ids:
            self.note(group_id, _NOTHING)
