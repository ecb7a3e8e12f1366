"""The roster of a classic group: members in the order they joined, static ids, leader, protocol votes.

Invariants: an instance id belongs to one member; the leader is a member, and there is one if there are
members; all members have at least one protocol in common. Members are frozen values: a change replaces the
value, so that a copy of the roster is cheap and an event that fails can be undone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tidemill.groups.memory import MEMBER_BYTES
from tidemill.groups.messages import JoinedMember

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidemill.groups.messages import JoinProtocol

__all__ = ("Member", "Roster")


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a classic group. ``is_new`` until it has been told of a first generation."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: tuple[JoinProtocol, ...]
    assignment: bytes = b""
    is_new: bool = False

    def metadata(self, protocol_name: str | None) -> bytes | None:
        """What the member said about itself for ``protocol_name``; None if it does not support it."""
        return next(
            (protocol.metadata for protocol in self.protocols if protocol.name == protocol_name), None
        )

    @property
    def metadata_bytes(self) -> int:
        """Size of the member's protocols: their names, and its metadata for them."""
        return sum(len(protocol.name) + len(protocol.metadata) for protocol in self.protocols)

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory for the member: its ids, its metadata and its assignment."""
        texts = len(self.member_id) + len(self.instance_id or "") + len(self.client_id)
        return MEMBER_BYTES + texts + self.metadata_bytes + len(self.assignment)

    @property
    def protocol_names(self) -> set[str]:
        """Names of the protocols that the member supports."""
        return {protocol.name for protocol in self.protocols}


class Roster:
    """The members of one group."""

    def __init__(self, members: Iterable[Member] = (), leader: str | None = None) -> None:
        self._members: dict[str, Member] = {}
        self._static: dict[str, str] = {}
        self._support: Counter[str] = Counter()
        #: Size of the metadata of all members.
        self.metadata_bytes = 0
        #: Size of the members by the hosts of their clients.
        self.bytes_by_host: Counter[str] = Counter()
        self.leader = leader
        for member in members:
            self.add(member)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    def __getitem__(self, member_id: str) -> Member:
        return self._members[member_id]

    def get(self, member_id: str) -> Member | None:
        """The member with that id; None if there is none."""
        return self._members.get(member_id)

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, oldest first."""
        return tuple(self._members.values())

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest rebalance timeout of all members."""
        return max((member.rebalance_timeout_ms for member in self._members.values()), default=0)

    def static_member_id(self, instance_id: str) -> str | None:
        """The id of the member that holds ``instance_id``."""
        return self._static.get(instance_id)

    def copy(self) -> Roster:
        """An independent roster with the same members."""
        other = Roster()
        other._members = self._members.copy()
        other._static = self._static.copy()
        other._support = self._support.copy()
        other.metadata_bytes = self.metadata_bytes
        other.bytes_by_host = self.bytes_by_host.copy()
        other.leader = self.leader
        return other

    def add(self, member: Member) -> None:
        """Take in a new member; the first one leads."""
        assert member.member_id not in self._members, member.member_id
        if member.instance_id is not None:
            assert member.instance_id not in self._static, member.instance_id
            self._static[member.instance_id] = member.member_id
        self._members[member.member_id] = member
        self._support.update(member.protocol_names)
        self.metadata_bytes += member.metadata_bytes
        self.bytes_by_host[member.client_host] += member.size_bytes
        if self.leader is None:
            self.leader = member.member_id

    def update(self, member: Member) -> None:
        """Replace what is known of the member with the same id."""
        old = self._members[member.member_id]
        assert old.instance_id == member.instance_id, member
        self._members[member.member_id] = member
        self._release(old)
        self.bytes_by_host[member.client_host] += member.size_bytes
        if old.protocols != member.protocols:
            self._withdraw_support(old)
            self._support.update(member.protocol_names)
            self.metadata_bytes += member.metadata_bytes

    def remove(self, member_id: str) -> None:
        """Remove a member. If it led, the oldest of the others leads."""
        member = self._members.pop(member_id)
        self._withdraw_support(member)
        self._release(member)
        if member.instance_id is not None:
            del self._static[member.instance_id]
        if self.leader == member_id:
            self.leader = next(iter(self._members), None)

    def _release(self, member: Member) -> None:
        self.bytes_by_host[member.client_host] -= member.size_bytes
        if not self.bytes_by_host[member.client_host]:
            del self.bytes_by_host[member.client_host]

    def _withdraw_support(self, member: Member) -> None:
        self.metadata_bytes -= member.metadata_bytes
        self._support.subtract(member.protocol_names)
        # Names that nobody supports any more are dropped: a member could fill the memory with new ones.
        self._support = +self._support

    def rename_static(self, instance_id: str, new_member_id: str) -> Member:
        """Give the static member a new id; it keeps leadership and assignment. Returns the member."""
        old = self._members.pop(self._static[instance_id])
        member = replace(old, member_id=new_member_id, is_new=False)
        self._members[new_member_id] = member
        self._release(old)
        self.bytes_by_host[member.client_host] += member.size_bytes
        self._static[instance_id] = new_member_id
        if self.leader == old.member_id:
            self.leader = new_member_id
        return member

    def elect_among(self, candidates: Iterable[str]) -> bool:
        """Keep the leader if it is a candidate, else the oldest candidate leads. False if nobody can."""
        able = set(candidates)
        if self.leader not in able:
            chosen = next((member_id for member_id in self._members if member_id in able), None)
            if chosen is None:
                return False
            self.leader = chosen
        return True

    def supported_by_all(self, protocol_names: Iterable[str]) -> bool:
        """Whether at least one of the names is supported by every member."""
        return any(self._support[name] == len(self._members) for name in protocol_names)

    def select_protocol(self) -> str:
        """The protocol with the most votes; each member votes for the first of its own that all support."""
        votes: Counter[str] = Counter()
        for member in self._members.values():
            votes[next(p.name for p in member.protocols if self._support[p.name] == len(self._members))] += 1
        return votes.most_common(1)[0][0]

    def as_seen_by_leader(self, protocol_name: str | None) -> tuple[JoinedMember, ...]:
        """The members as the leader needs them to compute assignments."""
        return tuple(
            JoinedMember(member.member_id, member.instance_id, member.metadata(protocol_name) or b"")
            for member in self._members.values()
        )
