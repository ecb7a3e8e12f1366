"""The node's memory for requests and answers under way: who gets how much of it, and who has to give way.

A connection has an account. It reserves bytes before it takes memory for a frame, and stops reading its
socket while there are none: TCP then slows the sender down. A state machine: time is passed in, nothing is
awaited.

Rules:

- **Reserve.** Connections that hold little (``small_bytes`` with the frame they read) may use all of the
  budget, the others seven eighths of it: while large frames fill it, small requests are read and answered as
  ever.
- **Share of an address.** All connections of one address hold at most half of what is there for large
  frames.
- **Ordinary and huge.** Connections that hold more than 2 MiB leave a quarter of either to those that hold
  less.
- **Order.** Of those who wait, the address that holds least comes first, and of its connections the one that
  holds least; among equals, who asked first.
- **Leader.** Half-read frames could wait for each other for ever, and large ones for small ones. So memory
  for one frame of the largest size is kept for the connection that waits longest, the leader, until its frame
  is complete.
- **Giving way.** While somebody waits, a client that sends its frame, or takes its answers, so slowly that
  it would not be done within the deadline, is closed after ``stall_seconds``; the largest first, and no more
  than needed.

Over the limit goes only what exists already (answers, frames that arrived as a whole, the first bytes of a
frame that waits for memory), and the leader in a budget smaller than two of the largest frames, by half of
such a frame at most.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from tidemill.coordination.metrics import Metric, gauge

__all__ = ("BUDGET_METRICS", "Account", "BudgetLimits", "ByteBudget", "Owner", "Stall")

KIB = 1024
_ORDINARY_BYTES = 2 * 1024 * KIB
#: Connections that are resumed, or have to give way, in one turn of the event loop: each takes a while.
_AT_ONCE = 100


class Stall(enum.Enum):
    """Why a connection holds memory without making progress."""

    FRAME = "its request arrives too slowly while others wait for memory"
    ANSWERS = "it does not read its answers while others wait for memory"
    #: The node works on its requests, or they wait for something. Long polls can be answered early.
    REQUESTS = "its requests take long while others wait for memory"


class Owner(Protocol):
    """The connection behind an account."""

    def unwritten_bytes(self) -> int:
        """Bytes of answers that the client has not taken yet."""
        ...

    def give_way(self, why: Stall) -> None:
        """Give memory back, by hurrying requests or by closing the connection."""
        ...


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """The size of a budget, and what is expected of those who use it."""

    total_bytes: int
    #: The largest frame. It must not be above ``total_bytes``.
    frame_bytes: int
    #: Connections that hold no more than this may use the reserve.
    small_bytes: int = 128 * KIB
    stall_seconds: float = 5.0
    #: A frame that is slower than this from end to end has stalled.
    frame_seconds: float = 60.0
    #: An answer that is slower than this from end to end has stalled.
    answer_seconds: float = 600.0

    #: What connections that hold more than ``small_bytes`` may use together, the leader among them.
    large_bytes: int = field(init=False)
    #: What all but the leader may use of ``large_bytes``.
    shared_bytes: int = field(init=False)
    #: What one address may hold of ``shared_bytes``.
    address_bytes: int = field(init=False)
    #: Connections that hold more than this leave a quarter of the memory to the others.
    ordinary_bytes: int = field(init=False)
    #: The bytes in use up to which the leader may reserve.
    leader_bytes: int = field(init=False)
    #: The bytes in use up to which connections that hold little may reserve.
    small_limit_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        reserve = self.total_bytes // 8
        large = max(self.total_bytes - reserve, self.frame_bytes)
        shared = max(large - self.frame_bytes, large // 2)
        for name, value in (
            ("large_bytes", large),
            ("shared_bytes", shared),
            ("address_bytes", shared // 2),
            ("ordinary_bytes", min(_ORDINARY_BYTES, shared // 16)),
            ("leader_bytes", max(large, shared + self.frame_bytes)),
            ("small_limit_bytes", large + reserve),
        ):
            object.__setattr__(self, name, value)


class _QueueEntry(NamedTuple):
    """An account in a queue. The number is never the same twice, so that accounts are not compared."""

    held_bytes: int
    number: int
    account: Account


class _Address:
    """The connections of one address: what they hold together, and which of them wait."""

    __slots__ = ("accounts", "held_bytes", "large", "small", "uncounted")

    def __init__(self) -> None:
        self.accounts = 0
        self.held_bytes = 0
        self.uncounted = 0
        #: Accounts that wait, in the order in which they are served.
        self.small: list[_QueueEntry] = []
        self.large: list[_QueueEntry] = []


class Account:
    """The memory that one connection holds. ``reading_bytes`` are those of the frame under way."""

    __slots__ = (
        "_address",
        "_budget",
        "_frame_is_small",
        "_is_closed",
        "_marked",
        "_resume",
        "_uncounted",
        "_wanted",
        "frame_bytes",
        "held_bytes",
        "moved_bytes",
        "owner",
        "reading_bytes",
    )

    def __init__(self, budget: ByteBudget, address: _Address, owner: Owner) -> None:
        self._budget = budget
        self._address = address
        self.owner = owner
        self.reading_bytes = 0
        #: Length of the frame that is being read; 0 between frames.
        self.frame_bytes = 0
        #: Bytes of requests that are complete, and of answers.
        self.held_bytes = 0
        #: Counts up with every byte that arrives and every answer that is written.
        self.moved_bytes = 0
        #: Decided when the frame begins: a small one gets all of its bytes at once, so none waits half-read.
        self._frame_is_small = False
        #: Bytes of ``reading_bytes`` that had arrived before the budget had memory for them.
        self._uncounted = 0
        self._is_closed = False
        self._wanted: int | None = None
        self._resume: Callable[[], None] = _nothing
        #: Whether it was the client's turn to move bytes, since when, and how many it had moved.
        self._marked: tuple[bool, float, int] | None = None

    @property
    def total_bytes(self) -> int:
        return self.reading_bytes + self.held_bytes

    @property
    def is_waiting(self) -> bool:
        return self._wanted is not None

    @property
    def is_small(self) -> bool:
        if self.frame_bytes:
            return self._frame_is_small
        return self.held_bytes <= self._budget.limits.small_bytes

    def begin_frame(self, frame_bytes: int) -> bool:
        """Begin a frame of this length. True: reserve all of it at once; False: reserve it as it arrives."""
        self._frame_is_small = self.held_bytes + frame_bytes <= self._budget.limits.small_bytes
        self.frame_bytes = frame_bytes
        self._marked = None
        return self._frame_is_small

    def reserve(self, count: int) -> bool:
        """Take ``count`` more bytes for the frame that is being read; False if the budget has too few."""
        return self._budget._reserve(self, count)

    def reserve_arrived(self, count: int) -> None:
        """Take bytes for the beginning of a frame, which has arrived already; ``wait`` has to follow."""
        self.reading_bytes += count
        self._uncounted += count
        self._address.uncounted += count
        self._budget._uncounted += count
        self._budget._count(self, count)

    def frame_complete(self) -> None:
        """Note that the frame has arrived: from now on its bytes are those of a request."""
        self.held_bytes += self.reading_bytes
        self.reading_bytes = self.frame_bytes = 0
        self._budget._frame_ended(self)

    def take(self, count: int) -> None:
        """Take bytes that exist already: a request that arrived as a whole, an answer that was just made."""
        self.held_bytes += count
        self._budget._count(self, count)

    def give_back(self, count: int) -> None:
        """Return bytes of requests and answers, and let those who wait for them go on."""
        if count:
            self.held_bytes -= count
            assert self.held_bytes >= 0, "more bytes were given back than taken"
            self._budget._count(self, -count)
            if self._is_closed and not self.held_bytes:
                self._budget._close(self, 0)
            else:
                self._budget._serve()

    def may_read_on(self) -> bool:
        """Whether another frame may begin."""
        return not self.is_waiting and self._budget._fits(self, 0)

    def wait(self, count: int, resume: Callable[[], None]) -> None:
        """Call ``resume`` once ``count`` bytes were taken for the frame that is being read."""
        assert self._wanted is None, "it waits already"
        self._wanted, self._resume = count, resume
        self._budget._enqueue(self)

    def close(self, kept_bytes: int = 0) -> None:
        """Give everything back and wait for nothing more.

        ``kept_bytes`` of requests are worked on although the client is gone: they are given back later.
        """
        self._budget._close(self, kept_bytes)


class ByteBudget:
    """The accounts of a node and their sum."""

    def __init__(self, limits: BudgetLimits) -> None:
        self.limits = limits
        self.used_bytes = 0
        self._addresses: dict[str, _Address] = {}
        self._accounts: dict[Account, str] = {}
        #: Accounts that wait, in the order in which they asked.
        self._waiting: dict[Account, _QueueEntry] = {}
        self._entries = 0
        #: Addresses with an account that waits.
        self._waiting_addresses: dict[_Address, None] = {}
        self._uncounted = 0
        self._leader: Account | None = None
        self._serving = False

    @property
    def waiting(self) -> int:
        """The number of connections that are not read because the budget is used up."""
        return len(self._waiting)

    def open(self, address: str, owner: Owner) -> Account:
        """An account for a connection from ``address``."""
        group = self._addresses.setdefault(address, _Address())
        group.accounts += 1
        account = Account(self, group, owner)
        self._accounts[account] = address
        return account

    def answer_bytes_max(self, address: str) -> int:
        """The most bytes that the next answer to ``address`` may have; 0 if only a small one fits."""
        held = self._addresses[address].held_bytes if address in self._addresses else 0
        limits = self.limits
        return max(0, min(limits.shared_bytes - self._used_by_others(), limits.address_bytes - held))

    # --- counting

    def _used_by_others(self) -> int:
        """Bytes in use, without the frame of ``_leader`` and bytes that came before memory was reserved."""
        return self.used_bytes - self._uncounted - self._led_bytes()

    def _led_bytes(self) -> int:
        leader = self._leader
        return leader.reading_bytes - leader._uncounted if leader is not None else 0

    def _fits(self, account: Account, count: int) -> bool:
        return self._lack(account, count) <= 0 and self._share_lack(account, count) <= 0

    def _lack(self, account: Account, count: int) -> int:
        """How many bytes too many are in use for the account to take ``count``; 0 or less if it may."""
        limits = self.limits
        count += account._uncounted
        if account is self._leader:
            return self.used_bytes - self._uncounted + count - limits.leader_bytes
        if account.is_small:
            return self.used_bytes - self._uncounted + count - limits.small_limit_bytes
        limit = limits.shared_bytes
        if account.total_bytes + count > limits.ordinary_bytes:
            limit -= limit // 4
        return self._used_by_others() + count - limit

    def _share_lack(self, account: Account, count: int) -> int:
        """How many bytes too many its address holds for it to take ``count``; 0 or less if it may."""
        if account is self._leader or account.is_small:
            return 0
        group, limit = account._address, self.limits.address_bytes
        count += account._uncounted
        held = group.held_bytes - group.uncounted
        if self._leader is not None and self._leader._address is group:
            held -= self._led_bytes()
        if account.total_bytes + count > self.limits.ordinary_bytes:
            limit -= limit // 4
        return held + count - limit

    def _count(self, account: Account, count: int) -> None:
        self.used_bytes += count
        account._address.held_bytes += count

    def _reserve(self, account: Account, count: int) -> bool:
        if account is not self._leader:
            # Nobody overtakes accounts that wait: of the same address, or for memory of the same part.
            group = account._address
            if group.small if account.is_small else (group.large or self._waits_for_memory()):
                return False
        if not self._fits(account, count):
            return False
        account.reading_bytes += count
        self._count(account, count)
        return True

    def _waits_for_memory(self) -> bool:
        """Whether an account waits although its address has not used up its share."""
        firsts = (group.large[0].account for group in self._waiting_addresses if group.large)
        return any(self._share_lack(first, first._wanted or 0) <= 0 for first in firsts)

    def _uncounted_is_over(self, account: Account) -> None:
        self._uncounted -= account._uncounted
        account._address.uncounted -= account._uncounted
        account._uncounted = 0

    # --- waiting

    def _enqueue(self, account: Account) -> None:
        group = account._address
        self._entries += 1
        entry = _QueueEntry(account.total_bytes, self._entries, account)
        insort(group.small if account.is_small else group.large, entry)
        self._waiting[account] = entry
        self._waiting_addresses[group] = None
        self._serve()

    def _leave_queue(self, account: Account) -> None:
        group = account._address
        entry = self._waiting.pop(account)
        for queue in (group.small, group.large):
            index = bisect_left(queue, entry)
            if index < len(queue) and queue[index] is entry:
                del queue[index]
        if not group.small and not group.large:
            del self._waiting_addresses[group]
        account._wanted = None

    def _frame_ended(self, account: Account) -> None:
        if account is self._leader:
            self._leader = None
            self._serve()

    def _close(self, account: Account, kept_bytes: int) -> None:
        if account not in self._accounts:
            return
        group = account._address
        if account._wanted is not None:
            self._leave_queue(account)
        self._uncounted_is_over(account)
        self._count(account, kept_bytes - account.total_bytes)
        account.reading_bytes = account.frame_bytes = 0
        account.held_bytes = kept_bytes
        account._is_closed = True
        if not kept_bytes:
            address = self._accounts.pop(account)
            group.accounts -= 1
            if not group.accounts:
                del self._addresses[address]
        if account is self._leader:
            self._leader = None
        self._serve()

    def _serve(self) -> None:
        """Resume accounts while there is memory. They may free or take more meanwhile."""
        if self._serving:
            return
        self._serving = True
        try:
            for _ in range(_AT_ONCE):
                account = self._next() if self._waiting else None
                if account is None:
                    break
                self._grant(account)
        finally:
            self._serving = False

    def _grant(self, account: Account) -> None:
        count = account._wanted or 0
        self._leave_queue(account)
        self._uncounted_is_over(account)
        account.reading_bytes += count
        self._count(account, count)
        resume, account._resume = account._resume, _nothing
        resume()

    def _next(self) -> Account | None:
        """The account that is served next; None if none can be."""
        leader = self._leader
        if leader is not None and leader._wanted is not None and self._fits(leader, leader._wanted):
            return leader
        for group in sorted(self._waiting_addresses, key=lambda group: group.held_bytes):
            for queue in (group.small, group.large):
                # A leader that waits was considered above.
                first = next((entry.account for entry in queue if entry.account is not leader), None)
                if first is not None and self._fits(first, first._wanted or 0):
                    return first
        if leader is None:
            self._leader = leader = next(filter(self._may_lead, self._waiting), None)
            if leader is not None and self._fits(leader, leader._wanted or 0):
                return leader
        return None

    def _may_lead(self, account: Account) -> bool:
        if not account.frame_bytes or account.is_small:
            return False
        # What its address holds without it must be within the address' share.
        group = account._address
        counted = account.reading_bytes - account._uncounted
        return group.held_bytes - group.uncounted - counted <= self.limits.address_bytes

    # --- giving way

    def stalled(self, now: float) -> list[tuple[Account, Stall]]:
        """The accounts that have to give way now, and why. Call it about once a second."""
        self._serve()
        if not self._waiting:
            for account in self._accounts:
                account._marked = None
            return []
        # Memory of accounts that hold little would not help a large frame.
        floor = 0 if any(account.is_small for account in self._waiting) else self.limits.small_bytes
        found = [
            (account, why)
            for account in self._accounts
            if (why := self._mark(account, now)) is not None and account.total_bytes > floor
        ]
        found.sort(key=lambda each: -each[0].total_bytes)
        needed, needed_of = self._needed()
        result: list[tuple[Account, Stall]] = []
        for account, why in found[:_AT_ONCE]:
            group, held = account._address, account.total_bytes
            if needed <= 0 and needed_of.get(group, 0) <= 0:
                continue
            result.append((account, why))
            # A connection that is only hurried may give nothing back.
            if why is not Stall.REQUESTS:
                needed -= held
                needed_of[group] = needed_of.get(group, 0) - held
        return result

    def _needed(self) -> tuple[int, dict[_Address, int]]:
        """Bytes that must be given back for all that wait: by any account, and by those of each address."""
        wants, over = 0, 0
        wants_of: dict[_Address, int] = {}
        over_of: dict[_Address, int] = {}
        for account in self._waiting:
            group, want = account._address, max(1, account.frame_bytes - account.reading_bytes)
            lack, share_lack = self._lack(account, want), self._share_lack(account, want)
            if lack > 0:
                wants, over = wants + want, max(over, lack - want)
            if share_lack > 0:
                wants_of[group] = wants_of.get(group, 0) + want
                over_of[group] = max(over_of.get(group, 0), share_lack - want)
        return wants + over, {group: want + over_of[group] for group, want in wants_of.items()}

    def _mark(self, account: Account, now: float) -> Stall | None:
        """Compare an account's progress with what it was; why it has stalled, if it has."""
        limits = self.limits
        unwritten = account.owner.unwritten_bytes()
        if unwritten:
            why, least = Stall.ANSWERS, unwritten * limits.stall_seconds / limits.answer_seconds
        elif account.frame_bytes and not account.is_waiting:
            why, least = Stall.FRAME, account.frame_bytes * limits.stall_seconds / limits.frame_seconds
        elif account.held_bytes:
            why, least = Stall.REQUESTS, 1
        else:
            account._marked = None
            return None
        moved, is_clients_turn = account.moved_bytes - unwritten, why is not Stall.REQUESTS
        if account._marked is None or account._marked[0] is not is_clients_turn:
            account._marked = (is_clients_turn, now, moved)
            return None
        _, since, moved_before = account._marked
        if now - since < limits.stall_seconds:
            return None
        account._marked = (is_clients_turn, now, moved)
        return why if moved - moved_before < max(1, least) else None


def _nothing() -> None:
    pass


BUDGET_METRICS: Final[Sequence[Metric[ByteBudget]]] = (
    gauge(
        "tidemill_inflight_bytes",
        "Bytes of requests and answers under way.",
        lambda budget: budget.used_bytes,
    ),
    gauge(
        "tidemill_connections_waiting",
        "Connections that are not read until there is memory for their requests.",
        lambda budget: budget.waiting,
    ),
)
