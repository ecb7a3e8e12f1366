"""The state machine of a cursor: positions, what was fetched, what was delivered, what is committed. Pure.

Three positions of each partition, in this order of offsets:

    committed  ≤  delivered  ≤  fetched
    in the store  handed out    asked for from here on

- ``arrived`` takes what a fetch gave; ``take`` hands records out, in the order in which they arrived: in the
  order of offsets within a partition.
- The delivered position goes behind a record when it is handed out, and over what was passed over behind it
  once nothing is waiting in front.
- ``plan_commit`` says what to store: for each partition from where to where. ``confirm`` makes it so. Between
  the two the store may fail; then the plan is dropped, and nothing has changed.
- ``rollback`` goes back to what is committed, or to positions that the store has told.
- ``seek`` goes elsewhere, also below the committed position; the next commit stores that.
- Offsets that are finished above the committed position are not handed out again, unless by ``seek``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tidemill.cursors.position import FINISHED_AHEAD_MAX, NO_EPOCH, Gap, GapBuffer, Gaps, Position

__all__ = ("GAPS_KEPT", "Arrival", "CursorMachine", "HasOffset", "Step")

#: Gaps that are kept until somebody asks for them.
GAPS_KEPT: Final = 1_000


class HasOffset(Protocol):
    """What a cursor delivers: something at an offset."""

    @property
    def offset(self) -> int: ...


R = TypeVar("R", bound=HasOffset)


class Arrival(NamedTuple, Generic[R]):
    """What a fetch gave of one partition: records of one leader epoch from ``start`` up to ``end``.

    ``gaps`` are the offsets in between that are no records here, in order. ``records`` are in order, too.
    ``gaps_dropped`` more are between the last gap and the end, of which nobody knows the reason.
    """

    partition: int
    start: int
    records: Sequence[R]
    end: int
    leader_epoch: int
    gaps: Sequence[Gap] = ()
    gaps_dropped: int = 0


class Step(NamedTuple):
    """What a commit changes in one partition.

    Attributes:
        before: the position that is stored.
        after: the position to store.
        finished: offsets above ``after`` that are done.
        finished_before: offsets above ``before`` that are stored as done.
        sought: whether somebody has sent the cursor to ``after`` or below it. Nothing but ``finished`` is
            done above it then, whatever a store may know.
    """

    before: Position
    after: Position
    finished: tuple[int, ...] = ()
    finished_before: tuple[int, ...] = ()
    sought: bool = False


@dataclass(slots=True, eq=False)
class _Waiting(Generic[R]):
    """An arrival, of which records from ``next`` on are not handed out yet, and gaps not noted."""

    arrival: Arrival[R]
    next: int = 0
    next_gap: int = 0


@dataclass(slots=True)
class _Partition:
    committed: Position
    delivered: Position
    fetched: int
    #: Offsets at or above the committed one that are finished.
    finished: set[int] = field(default_factory=set)
    #: Where somebody has sent the cursor since the commit.
    sought: Position | None = None
    #: Ends and epochs of what was delivered since the commit, in order: the epoch of a prefix is found there.
    passed: list[tuple[int, int]] = field(default_factory=list)

    def go_to(self, position: Position) -> None:
        self.delivered = position
        self.fetched = position.offset
        self.passed.clear()

    @property
    def begin(self) -> Position:
        """From where on things were delivered that are not committed."""
        return self.committed if self.sought is None else self.sought

    @property
    def done(self) -> set[int]:
        """Offsets that are not to be delivered although they are at or above ``begin``."""
        return self.finished if self.sought is None else set()


class CursorMachine(Generic[R]):
    """A cursor over some partitions, which begin at the given positions."""

    def __init__(
        self,
        positions: Mapping[int, Position],
        finished: Mapping[int, Iterable[int]] | None = None,
        *,
        gaps_kept: int = GAPS_KEPT,
    ) -> None:
        self._partitions: dict[int, _Partition] = {}
        self._waiting: deque[_Waiting[R]] = deque()
        self._waiting_records = 0
        self._gaps = GapBuffer(gaps_kept)
        for partition, position in positions.items():
            self.add(partition, position, (finished or {}).get(partition, ()))

    def add(self, partition: int, position: Position, finished: Iterable[int] = ()) -> None:
        """Read one more partition, from the position that its store has."""
        self._partitions[partition] = _Partition(position, position, position.offset, set(finished))

    # --- what there is

    @property
    def partitions(self) -> list[int]:
        return list(self._partitions)

    @property
    def committed(self) -> dict[int, Position]:
        """The positions in the store."""
        return {number: each.committed for number, each in self._partitions.items()}

    @property
    def delivered(self) -> dict[int, Position]:
        """The positions behind what was handed out: what a commit stores now."""
        return {number: each.delivered for number, each in self._partitions.items()}

    @property
    def waiting_records(self) -> int:
        """Records that were fetched and not handed out."""
        return self._waiting_records

    def fetch_position(self, partition: int) -> Position:
        """Where the next fetch of a partition begins, with the epoch of what is right below it."""
        each = self._partitions[partition]
        epoch = each.delivered.leader_epoch
        for waiting in self._waiting:
            if waiting.arrival.partition == partition:
                epoch = waiting.arrival.leader_epoch
        return Position(each.fetched, epoch)

    # --- records

    def arrived(self, arrivals: Iterable[Arrival[R]]) -> None:
        """Take what was fetched. Answers to fetches from before a rollback or seek are dropped."""
        for arrival in arrivals:
            each = self._partitions.get(arrival.partition)
            if each is None or arrival.start != each.fetched:
                continue
            each.fetched = max(arrival.end, arrival.start)
            if each.done:
                arrival = _without(arrival, each.done)
            self._waiting.append(_Waiting(arrival))
            self._waiting_records += len(arrival.records)
        self._pass_over()

    def take(self, limit: int) -> list[R]:
        """Hand out up to ``limit`` records that have arrived."""
        taken: list[R] = []
        while self._waiting and len(taken) < limit:
            waiting = self._waiting[0]
            arrival, first = waiting.arrival, waiting.next
            behind = min(len(arrival.records), first + limit - len(taken))
            if behind > first:
                taken += arrival.records[first:behind]
                waiting.next = behind
                self._delivered(waiting, first)
            self._pass_over()
        return taken

    def gaps(self) -> Gaps:
        """The gaps that were passed over since the last call."""
        return self._gaps.take()

    def _delivered(self, waiting: _Waiting[R], first: int) -> None:
        arrival, behind = waiting.arrival, waiting.next
        each = self._partitions[arrival.partition]
        self._waiting_records -= behind - first
        offset = arrival.records[behind - 1].offset + 1
        each.delivered = Position(offset, arrival.leader_epoch, started=True)
        self._note_gaps(waiting, offset)
        if behind < len(arrival.records):
            _pass(each.passed, offset, arrival.leader_epoch)

    def _pass_over(self) -> None:
        """Remove arrivals that are handed out completely, and move the delivered position behind them."""
        while self._waiting and self._waiting[0].next >= len(self._waiting[0].arrival.records):
            waiting = self._waiting.popleft()
            arrival = waiting.arrival
            each = self._partitions[arrival.partition]
            epoch = arrival.leader_epoch if arrival.leader_epoch != NO_EPOCH else each.delivered.leader_epoch
            each.delivered = Position(max(arrival.end, each.delivered.offset), epoch, each.delivered.started)
            self._note_gaps(waiting, arrival.end)
            self._gaps.note_dropped(arrival.partition, arrival.end - 1, arrival.gaps_dropped)
            _pass(each.passed, each.delivered.offset, epoch)

    def _note_gaps(self, waiting: _Waiting[R], below: int) -> None:
        gaps, first = waiting.arrival.gaps, waiting.next_gap
        while waiting.next_gap < len(gaps) and gaps[waiting.next_gap].last_offset < below:
            waiting.next_gap += 1
        if waiting.next_gap > first:
            self._gaps.note(gaps[first : waiting.next_gap])

    # --- commit and rollback

    def plan_commit(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Iterable[int]] | None = None
    ) -> dict[int, Step]:
        """What to store: everything that was delivered, or in some partitions a prefix of it.

        ``upto`` has offsets behind the last finished record; ``finished`` those above that are done as well,
        less than ``FINISHED_AHEAD_MAX`` above. What the store has as finished already is added to them: a
        database may know of more ahead, because lanes note each record on its own.
        Raises ``ValueError`` for what was not delivered.
        """
        unknown = {*(upto or ()), *(finished or ())} - self._partitions.keys()
        if unknown:
            raise ValueError(f"partition {min(unknown)} is not read here")
        steps: dict[int, Step] = {}
        for number, each in self._partitions.items():
            after = each.delivered
            given = (finished or {}).get(number)
            if upto is not None:
                if number not in upto and given is None:
                    continue
                after = self._prefix(number, each, upto.get(number, each.begin.offset))
            done = self._finished(number, each, after, given)
            sought = each.sought is not None
            if sought or after != each.committed or set(done) != each.finished:
                steps[number] = Step(each.committed, after, done, tuple(sorted(each.finished)), sought)
        return steps

    def _prefix(self, number: int, each: _Partition, offset: int) -> Position:
        begin = each.begin
        if not begin.offset <= offset <= each.delivered.offset:
            what = "committed" if each.sought is None else "sought"
            raise ValueError(
                f"offset {offset} of partition {number} is not between the {what} {begin.offset} "
                f"and the delivered {each.delivered.offset}"
            )
        if offset == begin.offset:
            return begin
        if offset == each.delivered.offset:
            return each.delivered
        index = bisect_left(each.passed, (offset, -2))
        epoch = each.passed[index][1] if index < len(each.passed) else each.delivered.leader_epoch
        return Position(offset, epoch, started=True)

    def _finished(
        self, number: int, each: _Partition, after: Position, given: Iterable[int] | None
    ) -> tuple[int, ...]:
        new = set(given or ()) - each.done
        last = max(new, default=after.offset)
        if last - after.offset >= FINISHED_AHEAD_MAX:
            raise ValueError(
                f"offset {last} of partition {number} is finished {last - after.offset} ahead of "
                f"{after.offset}, {FINISHED_AHEAD_MAX} are the most"
            )
        return tuple(sorted(offset for offset in each.done | new if offset >= after.offset))

    def confirm(self, steps: Mapping[int, Step]) -> None:
        """Take over the positions of ``plan_commit`` as committed: the store has them now."""
        for number, step in steps.items():
            each = self._partitions.get(number)
            if each is not None:
                each.committed = step.after
                each.finished = set(step.finished)
                each.sought = None
                del each.passed[: bisect_left(each.passed, (step.after.offset, 2**31))]

    def rollback(
        self,
        stored: Mapping[int, Position] | None = None,
        finished: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Go back to what is committed, or to what the store says is committed."""
        self._waiting.clear()
        self._waiting_records = 0
        for number, each in self._partitions.items():
            if stored is not None and number in stored:
                each.committed = stored[number]
                each.finished = set((finished or {}).get(number, ()))
            each.sought = None
            each.go_to(each.committed)

    def seek(self, partition: int, position: Position) -> None:
        """Go on from another position. The store keeps the old one until the next commit.

        Everything from there on is handed out, also what is finished.
        """
        each = self._partitions[partition]
        if position.offset < each.delivered.offset:
            self._gaps.forget_above(partition, position.offset)
        dropped = [waiting for waiting in self._waiting if waiting.arrival.partition == partition]
        for waiting in dropped:
            self._waiting.remove(waiting)
            self._waiting_records -= len(waiting.arrival.records) - waiting.next
        each.sought = position
        each.go_to(position)

    def note_gap(self, gap: Gap) -> None:
        """Note a gap that no fetch has told of."""
        self._gaps.note([gap])


def _pass(passed: list[tuple[int, int]], offset: int, epoch: int) -> None:
    """Note how far an epoch reaches; one entry for each epoch is enough."""
    if passed and passed[-1][1] == epoch:
        passed[-1] = offset, epoch
    else:
        passed.append((offset, epoch))


def _without(arrival: Arrival[Any], finished: set[int]) -> Arrival[Any]:
    return arrival._replace(records=[each for each in arrival.records if each.offset not in finished])
