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
    from collections.abc import Mapping

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

#: The error message for a member that is refused.
NO_MEMORY: Final = (
    "the node has no memory for more members of groups of this address; stop members that are not needed "
    "(docs/limits.md)"
)
_NOTHING: Final[Mapping[str, int]] = {}


class GroupMemory:
    """The memory of each group, by the host of the client for which it is taken.

    Groups are noted by shard and id, so that all groups of a shard are forgotten at once. The host is empty
    if it is not known. Such memory counts as taken, but belongs to no address's share.

    >>> memory = GroupMemory(100)
    >>> memory.note(0, "g", {"10.0.0.1": 70})
    >>> memory.has_capacity("10.0.0.1", 5), memory.has_capacity("10.0.0.1", 6), memory.has_capacity("h", 22)
    (True, False, True)
    >>> memory.forget(0)
    >>> memory.has_capacity("10.0.0.1", 75)
    True
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._shards: dict[int, _ShardMemory] = {}

    @property
    def taken_bytes(self) -> int:
        """Memory of all groups together."""
        return sum(shard.taken_bytes for shard in self._shards.values())

    def of_group(self, shard: int, group_id: str) -> int:
        """Memory of one group, as it was last noted."""
        noted = self._shards.get(shard)
        return 0 if noted is None else sum(noted.of_groups.get(group_id, _NOTHING).values())

    def has_capacity(self, host: str, more_bytes: int) -> bool:
        """Whether clients of a host may take ``more_bytes`` in addition to what they have."""
        if more_bytes <= 0:
            return True
        left = self.limit_bytes - self.taken_bytes - more_bytes
        address = share_address(host)
        held = sum(shard.of_addresses[address] for shard in self._shards.values()) if host else 0
        return held + more_bytes <= HELD_PER_FREE * left

    def note(self, shard: int, group_id: str, by_host: Mapping[str, int]) -> None:
        """Note the present memory of a group of a shard, by client host."""
        noted = self._shards.get(shard)
        if noted is None:
            noted = self._shards[shard] = _ShardMemory()
        noted.note(group_id, by_host)

    def forget(self, shard: int) -> None:
        """Forget the groups of a shard, which this node does not serve any more."""
        self._shards.pop(shard, None)


class _ShardMemory:
    """Memory of the groups of one shard."""

    def __init__(self) -> None:
        self.of_groups: dict[str, Mapping[str, int]] = {}
        self.of_addresses: Counter[str] = Counter()
        self.taken_bytes = 0

    def note(self, group_id: str, by_host: Mapping[str, int]) -> None:
        before = self.of_groups.get(group_id, _NOTHING)
        if before == by_host:
            return
        for sizes, sign in ((by_host, 1), (before, -1)):
            for host, size in sizes.items():
                address = share_address(host)
                self.of_addresses[address] += sign * size
                if not self.of_addresses[address]:
                    del self.of_addresses[address]
                self.taken_bytes += sign * size
        if by_host:
            self.of_groups[group_id] = dict(by_host)
        else:
            del self.of_groups[group_id]
