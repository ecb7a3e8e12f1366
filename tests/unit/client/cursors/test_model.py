"""A cursor against a model: append, abort, compact, poll, act, seek, roll back, crash, another owner.

The log is a list of batches, read as a node reads it (``walk``) and decoded as the client does
(``arrivals_of``). Positions are kept as a coordinator keeps them (``CursorsState``), and go through their
bytes. The model knows what was written, and what it became.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill.client.cursors.records import arrivals_of, decode_records
from tidemill.cursors.checkpoint import Entry, pack_finished, unpack_finished
from tidemill.cursors.filtering import RegionFilter
from tidemill.cursors.machine import CursorMachine, Step
from tidemill.cursors.position import Position, Reason
from tidemill.cursors.region import Region
from tidemill.cursors.state import CursorsState, Given, Next
from tidemill.cursors.stored import StoredCursor, StoredRecord, decode_record, encode_record
from tidemill.cursors.walking import walk
from tidemill.errors import TableCode, TableError
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.records.columns.read import read_columns
from tidemill.records.control import Marker, build_markers
from tidemill.records.record import Record, build_batch
from tidemill.records.rewriting import rebuild_batch

_TRANSACTIONAL = 0x10
_KEYS = st.lists(st.sampled_from(["a1", "a2", "b1", "b2", "b3"]), min_size=1, max_size=5)


class _Log:
    """A partition's batches, as bytes."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.end = 0
        self.epoch = 0
        self.aborted: list[tuple[int, int]] = []

    def append(self, keys: list[str], *, producer: int = -1) -> range:
        data = build_batch(
            [Record(key.encode(), b"", 5) for key in keys],
            base_offset=self.end,
            leader_epoch=self.epoch,
            attributes=_TRANSACTIONAL if producer >= 0 else 0,
            producer_id=producer,
            producer_epoch=0 if producer >= 0 else -1,
            base_sequence=0 if producer >= 0 else -1,
        )
        self.batches.append(data)
        taken = range(self.end, self.end + len(keys))
        self.end += len(keys)
        return taken

    def mark(self, producer: int, *, commit: bool) -> int:
        end = producer, 0, Marker(commit, 0)
        self.batches.append(
            build_markers([end], timestamp_ms=5, base_offset=self.end, leader_epoch=self.epoch)
        )
        self.end += 1
        return self.end - 1

    def compact(self, kept: set[int]) -> None:
        """Leave only these offsets in batches of records; markers stay."""
        left = []
        for data in self.batches:
            header = parse_header(data)
            if header.is_control:
                left.append(data)
                continue
            columns = read_columns(data)
            chosen = [number for number, offset in enumerate(columns.offsets.tolist()) if offset in kept]
            if len(chosen) == columns.record_count:
                left.append(data)
            elif chosen:
                slices = zip(columns.record_starts.tolist(), columns.record_ends.tolist(), strict=True)
                parts = [bytes(columns.body[start:end]) for start, end in slices]
                body = b"".join(parts[number] for number in chosen)
                left.append(rebuild_batch(header, body, len(chosen), 5, None))
        self.batches = left

    def epoch_at(self, offset: int) -> int:
        found = [parse_header(data) for data in self.batches]
        return max((each.leader_epoch for each in found if each.base_offset <= offset), default=0)

    def read(self, offset: int, max_batches: int, batch_filter: RegionFilter | None) -> Any:
        """What FetchRegion answers."""
        wanted = [data for data in self.batches if parse_header(data).next_offset > offset][:max_batches]
        assert all(len(data) >= HEADER_BYTES for data in wanted)
        walked = walk(memoryview(b"".join(wanted)), offset, self.aborted, batch_filter)
        if not wanted and offset < self.end:
            walked.skip(offset, self.end - 1, Reason.COMPACTION)
            walked.next_offset = self.end
        skipped = [
            SimpleNamespace(first_offset=first, last_offset=last, reason=int(reason))
            for first, last, reason in walked.skipped
        ]
        return SimpleNamespace(
            partition=0,
            next_offset=walked.next_offset,
            leader_epoch=self.epoch_at(walked.next_offset - 1) if walked.next_offset else -1,
            records=b"".join(map(bytes, walked.batches)),
            skipped=skipped,
            skipped_dropped=walked.skipped_dropped,
        )


class _Store:
    """What a coordinator keeps, and its log."""

    def __init__(self, region: Region) -> None:
        self._about = StoredCursor("t", region.topic_id, region.identity(), str(region), False, 0)
        self._log: list[tuple[bytes, bytes | None]] = []
        self._state = CursorsState(self._append)

    def _append(self, records: Sequence[StoredRecord]) -> None:
        self._log += [encode_record(*record) for record in records]

    def load(self) -> None:
        """Forget everything, and read the log."""
        self._state = CursorsState(self._append)
        for key, value in self._log:
            record = decode_record(key, value)
            assert record is not None
            self._state.replay(*record)

    def take(self) -> Entry:
        """Become the owner."""
        starts = {0: Given(0, -1, False, b"")}
        self._state.take(
            "c", self._about, starts, owner="o", lease_ms=1, force=True, origin=UUID(int=1), now_ms=0
        )
        return self.stored

    @property
    def stored(self) -> Entry:
        position = self._state.describe("c", 0)[1][0].position
        return Entry(
            position.epoch,
            Position(position.offset, position.leader_epoch, position.started),
            unpack_finished(position.offset, position.finished),
        )

    def commit(self, epoch: int, step: Step) -> None:
        given = Given(*step.after, pack_finished(step.after.offset, step.finished))
        self._state.commit("c", {0: Next(epoch, step.before.offset, given)}, 0)


class _Owner:
    """A process that has opened the cursor."""

    def __init__(self, entry: Entry) -> None:
        self.epoch = entry.epoch
        self.machine: CursorMachine[Any] = CursorMachine({0: entry.position}, {0: entry.finished})
        #: Delivered and not committed.
        self.pending: list[int] = []
        #: Where it was sent since the last commit.
        self.sought: int | None = None

    def go_back(self) -> None:
        self.pending, self.sought = [], None


class CursorModel(RuleBasedStateMachine):
    """One cursor over one partition, with a filter or without."""

    is_filtered = False

    def __init__(self) -> None:
        super().__init__()
        self.log = _Log()
        self.region = Region("t", UUID(int=1), key_prefix=b"a" if self.is_filtered else None)
        self.filter = (
            RegionFilter(key_prefix=b"a", max_decompressed_bytes=10**6) if self.is_filtered else None
        )
        self.store = _Store(self.region)
        #: What each offset is: its key if it is a committed record, else why it is none.
        self.content: dict[int, str | Reason] = {}
        self.removed: set[int] = set()
        self.producers = 100
        #: Offsets whose effect counts: they were delivered, and then committed.
        self.done: set[int] = set()
        self.has_begun = False
        self.owner = _Owner(self.store.take())
        self.zombie: _Owner | None = None

    @property
    def machine(self) -> CursorMachine[Any]:
        return self.owner.machine

    # --- the log

    @rule(keys=_KEYS)
    def append(self, keys: list[str]) -> None:
        for offset, key in zip(self.log.append(keys), keys, strict=True):
            self.content[offset] = key

    @rule(keys=_KEYS, commit=st.booleans())
    def append_in_a_transaction(self, keys: list[str], commit: bool) -> None:
        self.producers += 1
        taken = self.log.append(keys, producer=self.producers)
        if not commit:
            self.log.aborted.append((taken.start, self.producers))
        for offset, key in zip(taken, keys, strict=True):
            self.content[offset] = key if commit else Reason.ABORTED
        self.content[self.log.mark(self.producers, commit=commit)] = Reason.CONTROL

    @rule()
    def elect_another_leader(self) -> None:
        self.log.epoch += 1

    @rule()
    def compact(self) -> None:
        last = {what: offset for offset, what in self.content.items() if isinstance(what, str)}
        records = {offset for offset, what in self.content.items() if isinstance(what, str)}
        kept = set(last.values())
        self.removed |= records - kept
        aborted = {offset for offset, what in self.content.items() if what is Reason.ABORTED}
        self.log.compact(kept | aborted)

    # --- the cursor

    def _fetch(self, max_batches: int) -> None:
        position = self.machine.fetch_position(0)
        if position.offset < self.log.end:
            answer = self.log.read(position.offset, max_batches, self.filter)
            self.machine.arrived(
                arrivals_of(answer, "t", position.offset, filtered=self.is_filtered, decode=decode_records)
            )

    @rule(limit=st.integers(1, 7), max_batches=st.integers(1, 4))
    def poll(self, limit: int, max_batches: int) -> None:
        if not self.machine.waiting_records:
            self._fetch(max_batches)
        before = self.machine.delivered[0].offset
        taken = self.machine.take(limit)
        assert len(taken) <= limit
        offsets = [record.offset for record in taken]
        assert offsets == sorted(set(offsets))
        assert not offsets or offsets[0] >= before or before == self.machine.delivered[0].offset
        for record in taken:
            assert self.content[record.offset] == record.key.decode()
            assert self._is_in_region(record.offset)
        assert self.owner.sought is not None or not self.done.intersection(offsets), "delivered again"
        self.owner.pending += offsets

    def _is_in_region(self, offset: int) -> bool:
        what = self.content[offset]
        return isinstance(what, str) and (not self.is_filtered or what.startswith("a"))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Commit everything that was delivered, or a prefix of it and some of what is above."""
        upto: dict[int, int] | None = None
        finished: set[int] = set()
        partly = data.draw(st.booleans())
        pending = self.owner.pending
        if pending and partly:
            upto = {0: data.draw(st.sampled_from(pending)) + 1}
            above = [offset for offset in pending if offset >= upto[0]]
            finished = data.draw(st.sets(st.sampled_from(above))) if above else set()
        self._commit(self.machine.plan_commit(upto, {0: finished}), finished)

    def _commit(self, steps: dict[int, Step], finished: set[int]) -> None:
        owner = self.owner
        begin = self.machine.committed[0].offset if owner.sought is None else owner.sought
        if steps:
            self.store.commit(owner.epoch, steps[0])
            self.machine.confirm(steps)
        position = self.machine.committed[0]
        if owner.sought is not None:
            self.done = {offset for offset in self.done if offset < owner.sought}
        acted = finished.union(offset for offset in owner.pending if offset < position.offset)
        assert not self.done & acted, "counts twice"
        self.done |= acted
        self.has_begun |= bool(acted)
        assert position.started == self.has_begun
        if position.offset > begin:
            assert position.leader_epoch >= 0
        owner.pending = [offset for offset in owner.pending if offset not in acted]
        owner.sought = None

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        """Go back to what is committed, or below it: everything from there on comes again."""
        before = self.machine.committed[0]
        target = data.draw(st.integers(0, before.offset))
        self.machine.seek(0, Position(target, started=before.started))
        self.owner.pending, self.owner.sought = [], target

    @rule()
    def roll_back(self) -> None:
        self.machine.rollback()
        self.owner.go_back()

    @rule()
    def crash_and_open_again(self) -> None:
        self.store.load()
        self.owner, self.zombie = _Owner(self.store.take()), None

    @rule()
    def another_owner_takes_over(self) -> None:
        self.zombie, self.owner = self.owner, _Owner(self.store.take())

    @precondition(lambda self: self.zombie is not None)
    @rule()
    def the_former_owner_acts(self) -> None:
        """Its commit is refused, and changes nothing."""
        assert self.zombie is not None
        steps = self.zombie.machine.plan_commit()
        before = self.store.stored
        if steps:
            with pytest.raises(TableError) as caught:
                self.store.commit(self.zombie.epoch, steps[0])
            assert caught.value.table_code is TableCode.cursor_fenced
        assert self.store.stored == before

    @precondition(lambda self: self.machine.delivered[0].offset > 0)
    @rule()
    def look_at_the_gaps(self) -> None:
        told = self.machine.gaps()
        assert not told.dropped
        for gap in told.ranges:
            for offset in range(gap.first_offset, gap.last_offset + 1):
                self._check_reason(offset, gap.reason)

    def _check_reason(self, offset: int, reason: Reason) -> None:
        what = self.content[offset]
        if isinstance(what, Reason):
            # Of a batch that compaction has dropped nobody knows any more what it was.
            assert reason in (what, Reason.COMPACTION)
        elif reason is Reason.COMPACTION:
            assert offset in self.removed
        else:
            assert reason is Reason.FILTERED
            assert self.is_filtered
            assert not what.startswith("a")

    @invariant()
    def nothing_is_lost_and_what_is_stored_is_what_counts(self) -> None:
        entry = self.store.stored
        assert entry.position == self.machine.committed[0]
        for offset in range(entry.position.offset):
            if self._is_in_region(offset) and offset not in self.removed:
                assert offset in self.done, f"{offset} was skipped"
        assert {offset for offset in self.done if offset >= entry.position.offset} == set(entry.finished)

    def teardown(self) -> None:
        """In the end everything that is still there was delivered."""
        for _ in range(1_000):
            self._fetch(3)
            self.owner.pending += [record.offset for record in self.machine.take(5)]
            if self.machine.delivered[0].offset == self.log.end:
                break
        assert self.machine.delivered[0].offset == self.log.end
        self._commit(self.machine.plan_commit(), set())
        self.nothing_is_lost_and_what_is_stored_is_what_counts()


class FilteredCursorModel(CursorModel):
    """The same with a filter by key."""

    is_filtered = True


TestCursor = CursorModel.TestCase
TestCursor.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFilteredCursor = FilteredCursorModel.TestCase
TestFilteredCursor.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
