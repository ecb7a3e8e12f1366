"""Scan sessions: one story per rule, and random calls against a model that keeps lists of batches."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tidemill.coordination.fair_shares import NOBODY, Client
from tidemill.errors import TableCode, TableError
from tidemill.tables.scanning import sessions as scanners
from tidemill.tables.scanning.sessions import BucketKey, ReadPlan, ScanLimits, ScanSession, ScanSessions

LIMITS = ScanLimits(per_bucket=2, per_node=3, idle_ms=1_000, linger_ms=100, lingering=2)
ROWS = tuple(b"%02d" % number for number in range(8))
BUCKETS = tuple(BucketKey(7, 0, number) for number in range(3))

_ids = itertools.count()


def new_session(
    bucket: BucketKey = BUCKETS[0], *, now_ms: int = 0, limit: int | None = None, client: Client = NOBODY
) -> ScanSession:
    return ScanSession(b"scan %d" % next(_ids), bucket, object(), now_ms, b"", limit, client=client)


def read(plan: ReadPlan, size: int) -> tuple[list[bytes], bytes | None]:
    """What a view of ``ROWS`` gives: the batch, and where the next one starts."""
    rows = [row for row in ROWS if row >= plan.start and (plan.end is None or row < plan.end)]
    wanted = len(rows) if plan.is_repeat else size
    if plan.rows_max is not None and plan.rows_max <= wanted:
        return rows[: plan.rows_max], None
    return rows[:wanted], rows[wanted] if wanted < len(rows) else None


def call(sessions: ScanSessions, scanner_id: bytes, sequence: int, size: int, now_ms: int) -> list[bytes]:
    """One call as a node makes it."""
    session = sessions.get(scanner_id, now_ms)
    plan = session.plan(sequence)
    batch, read_to = read(plan, size)
    session.advance(plan, read_to, len(batch))
    sessions.answered(session)
    return batch


def code_of(error: pytest.ExceptionInfo[TableError]) -> tuple[int, bool]:
    return error.value.table_code.value, error.value.retriable


@pytest.fixture
def sessions() -> ScanSessions:
    return ScanSessions(LIMITS)


@pytest.fixture
def scan(sessions: ScanSessions) -> ScanSession:
    """A session whose call 0 gave three of the eight rows."""
    session = new_session()
    sessions.open(session)
    assert call(sessions, session.id, 0, 3, 0) == [b"00", b"01", b"02"]
    return session


# --- sequences


def test_calls_are_numbered_from_0_and_end_with_the_last_row(
    sessions: ScanSessions, scan: ScanSession
) -> None:
    assert call(sessions, scan.id, 1, 3, 0) == [b"03", b"04", b"05"]
    assert not scan.is_drained
    assert call(sessions, scan.id, 2, 3, 0) == [b"06", b"07"]
    assert scan.is_drained


def test_a_call_that_is_repeated_gives_the_same_batch_whatever_size_it_asks_for(
    sessions: ScanSessions, scan: ScanSession
) -> None:
    for size in (3, 1, 8):
        assert call(sessions, scan.id, 0, size, 0) == [b"00", b"01", b"02"]
    assert call(sessions, scan.id, 1, 2, 0) == [b"03", b"04"]
    assert call(sessions, scan.id, 1, 100, 0) == [b"03", b"04"]


def test_the_last_batch_can_be_asked_for_again_until_it_is_swept(
    sessions: ScanSessions, scan: ScanSession
) -> None:
    assert call(sessions, scan.id, 1, 8, 50) == [b"03", b"04", b"05", b"06", b"07"]
    assert sessions.sweep(149) == []
    assert call(sessions, scan.id, 1, 8, 149) == [b"03", b"04", b"05", b"06", b"07"]
    assert sessions.sweep(249) == [scan]
    with pytest.raises(TableError) as error:
        sessions.get(scan.id, 249)
    assert code_of(error) == (1067, False)


@pytest.mark.parametrize("wrong", [-1, 2, 7, 2**31 - 1])
def test_a_wrong_number_is_refused_and_the_session_lives_on(
    sessions: ScanSessions, scan: ScanSession, wrong: int
) -> None:
    with pytest.raises(TableError, match="the next call of this scan has number 1") as error:
        call(sessions, scan.id, wrong, 3, 0)
    assert code_of(error) == (1068, False)
    assert call(sessions, scan.id, 1, 3, 0) == [b"03", b"04", b"05"]


def test_a_number_before_the_last_one_is_refused(sessions: ScanSessions, scan: ScanSession) -> None:
    call(sessions, scan.id, 1, 3, 0)
    with pytest.raises(TableError, match="has number 2, not 0; 1 gives the last batch again"):
        call(sessions, scan.id, 0, 3, 0)


def test_behind_the_end_there_is_no_call(sessions: ScanSessions, scan: ScanSession) -> None:
    call(sessions, scan.id, 1, 8, 0)
    with pytest.raises(TableError, match="came to its end with call 1; there is no call 2") as error:
        call(sessions, scan.id, 2, 8, 0)
    assert code_of(error) == (1067, False)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_limit_ends_the_scan_and_counts_over_all_batches(sessions: ScanSessions, size: int) -> None:
    session = new_session(limit=5)
    sessions.open(session)
    batches: list[list[bytes]] = []
    while not session.is_drained:
        batches.append(call(sessions, session.id, len(batches), size, 0))
        assert call(sessions, session.id, len(batches) - 1, size, 0) == batches[-1]
    assert list(itertools.chain(*batches)) == list(ROWS[:5])


# --- expiry


def test_a_session_that_nobody_asked_for_expires(sessions: ScanSessions, scan: ScanSession) -> None:
    assert sessions.sweep(999) == []
    assert sessions.sweep(1_000) == [scan]
    with pytest.raises(TableError, match="idle for 1000 ms; start it again") as error:
        sessions.get(scan.id, 1_000)
    assert code_of(error) == (1066, False)


def test_every_call_and_every_look_keeps_a_session_alive(sessions: ScanSessions, scan: ScanSession) -> None:
    sessions.get(scan.id, 900)
    assert sessions.sweep(1_899) == []
    call(sessions, scan.id, 0, 3, 1_899)
    assert sessions.sweep(2_898) == []
    assert sessions.sweep(2_899) == [scan]


def test_an_expired_id_is_remembered_for_twice_the_idle_time(
    sessions: ScanSessions, scan: ScanSession
) -> None:
    sessions.sweep(5_000)
    sessions.sweep(6_999)
    with pytest.raises(TableError) as error:
        sessions.get(scan.id, 6_999)
    assert code_of(error)[0] == 1066
    sessions.sweep(7_000)
    with pytest.raises(TableError) as error:
        sessions.get(scan.id, 7_000)
    assert code_of(error)[0] == 1067


def test_an_id_that_never_was_is_unknown_not_expired(sessions: ScanSessions) -> None:
    with pytest.raises(TableError, match="knows no such scan") as error:
        sessions.get(b"made up", 0)
    assert code_of(error) == (1067, False)


def test_a_closed_session_is_unknown_not_expired(sessions: ScanSessions, scan: ScanSession) -> None:
    assert sessions.close(scan.id) is scan
    with pytest.raises(TableError) as error:
        sessions.get(scan.id, 0)
    assert code_of(error)[0] == 1067


def test_not_more_ended_ids_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanners, "_IDS_REMEMBERED_MAX", 2)
    sessions = ScanSessions(ScanLimits(per_bucket=9, per_node=9, idle_ms=1_000))
    ids = []
    for number in range(4):
        session = new_session(now_ms=number)
        sessions.open(session)
        ids.append(session.id)
        sessions.end_bucket(session.bucket, "it was time", number)
    sessions.sweep(10)
    codes = []
    for scanner_id in ids:
        with pytest.raises(TableError) as error:
            sessions.get(scanner_id, 10)
        codes.append(code_of(error)[0])
    assert codes == [1067, 1067, 1066, 1066]


# --- places


def test_a_bucket_takes_so_many_sessions_and_no_more(sessions: ScanSessions) -> None:
    for _ in range(2):
        sessions.open(new_session())
    with pytest.raises(TableError, match="2 scans of bucket 0 can be open") as error:
        sessions.open(new_session())
    assert code_of(error) == (1069, True)
    sessions.open(new_session(BUCKETS[1]))


def test_one_client_leaves_places_of_a_bucket_and_of_the_node_to_others() -> None:
    sessions = ScanSessions(ScanLimits(per_bucket=8, per_node=16))
    hog, neighbour, other = Client("a", 1), Client("a", 2), Client("b", 3)

    def fill(client: Client, bucket: BucketKey) -> str:
        while True:
            try:
                sessions.open(new_session(bucket, client=client))
            except TableError as error:
                return error.message

    assert "(scan_sessions_per_bucket), and this connection holds 5 of them" in fill(hog, BUCKETS[0])
    assert sessions.count(BUCKETS[0]) == 5
    assert "(scan_sessions), and this connection holds 9 of them" in fill(hog, BUCKETS[1])
    for client in (neighbour, other):
        for bucket in BUCKETS[:2]:
            sessions.open(new_session(bucket, client=client))


def test_a_node_takes_so_many_sessions_and_no_more(sessions: ScanSessions) -> None:
    for bucket in (BUCKETS[0], BUCKETS[0], BUCKETS[1]):
        sessions.open(new_session(bucket))
    with pytest.raises(TableError, match="3 scans on this node can be open") as error:
        sessions.open(new_session(BUCKETS[2]))
    assert code_of(error) == (1069, True)


def test_closing_gives_the_place_free_and_closing_twice_is_fine(sessions: ScanSessions) -> None:
    first = new_session()
    sessions.open(first)
    sessions.open(new_session())
    assert sessions.close(first.id) is first
    assert sessions.close(first.id) is None
    assert sessions.close(b"made up") is None
    assert (len(sessions), sessions.count(BUCKETS[0])) == (1, 1)
    sessions.open(new_session())


def test_the_end_of_the_data_gives_the_place_free_at_once(sessions: ScanSessions, scan: ScanSession) -> None:
    sessions.open(new_session())
    call(sessions, scan.id, 1, 8, 0)
    assert sessions.count(BUCKETS[0]) == 1
    sessions.open(new_session())
    # Its end must not give free what others have taken since.
    call(sessions, scan.id, 1, 8, 0)
    assert sessions.close(scan.id) is scan
    assert (len(sessions), sessions.count(BUCKETS[0])) == (2, 2)


def test_only_the_newest_of_those_that_came_to_their_end_linger(sessions: ScanSessions) -> None:
    made, gone = [], []
    for _ in range(4):
        session = new_session()
        sessions.open(session)
        plan = session.plan(0)
        session.advance(plan, None, 1)
        made.append(session)
        gone += sessions.answered(session)
        assert sessions.answered(session) == [], "it lingers once"
    assert gone == made[:2]
    with pytest.raises(TableError) as error:
        sessions.get(made[1].id, 0)
    assert code_of(error)[0] == 1067
    assert [sessions.get(each.id, 0) for each in made[2:]] == made[2:]


def test_one_that_is_closed_does_not_take_the_room_of_those_that_linger(sessions: ScanSessions) -> None:
    made = []
    for number in range(4):
        session = new_session()
        sessions.open(session)
        session.advance(session.plan(0), None, 1)
        made.append(session)
        assert sessions.answered(session) == []
        if number in (1, 2):
            sessions.close(session.id)
    assert [sessions.get(each.id, 0) for each in (made[0], made[3])] == [made[0], made[3]]


def test_a_change_of_leader_ends_the_sessions_of_that_bucket_alone(sessions: ScanSessions) -> None:
    ours, other = new_session(BUCKETS[0]), new_session(BUCKETS[1])
    sessions.open(ours)
    sessions.open(other)
    assert sessions.end_bucket(BUCKETS[0], "bucket 0 has a new leader epoch", 5) == [ours]
    with pytest.raises(TableError, match="is over: bucket 0 has a new leader epoch") as error:
        sessions.get(ours.id, 5)
    assert code_of(error) == (1066, False)
    assert sessions.get(other.id, 5) is other
    assert len(sessions) == 1


def test_the_defaults_are_those_of_the_source() -> None:
    limits = ScanLimits()
    assert (limits.per_bucket, limits.per_node, limits.idle_ms) == (16, 200, 600_000)


# --- any order of calls


@dataclass
class ModelScan:
    """A scan as its client sees it: what it got so far."""

    bucket: BucketKey
    used_ms: int
    limit: int | None
    batches: list[list[bytes]] = field(default_factory=list)
    #: When it came to its end, counted in ends.
    end: int = -1

    @property
    def rows(self) -> list[bytes]:
        return [row for batch in self.batches for row in batch]

    @property
    def is_drained(self) -> bool:
        return len(self.rows) == min(len(ROWS), self.limit or len(ROWS))


class ScanMachine(RuleBasedStateMachine):
    """Any calls at any times: sessions do what a model does that remembers everything."""

    scans = Bundle("scans")

    def __init__(self) -> None:
        super().__init__()
        self.sessions = ScanSessions(LIMITS)
        self.now_ms = 0
        self.ends = 0
        self.alive: dict[bytes, ModelScan] = {}
        self.ended_ms: dict[bytes, int] = {}

    def active(self, bucket: BucketKey | None = None) -> int:
        scans = self.alive.values()
        return sum(not scan.is_drained and bucket in (None, scan.bucket) for scan in scans)

    def refusal_of_dead(self, scanner_id: bytes) -> TableCode:
        known = scanner_id in self.ended_ms
        return TableCode.scanner_expired if known else TableCode.unknown_scanner_id

    def expect(self, code: TableCode, scanner_id: bytes, sequence: int) -> None:
        with pytest.raises(TableError) as error:
            call(self.sessions, scanner_id, sequence, 1, self.now_ms)
        assert error.value.table_code is code

    @rule(
        target=scans,
        bucket=st.sampled_from(BUCKETS),
        limit=st.none() | st.integers(1, 10),
        size=st.integers(1, 10),
    )
    def open(self, bucket: BucketKey, limit: int | None, size: int) -> Any:
        session = new_session(bucket, now_ms=self.now_ms, limit=limit)
        full = self.active(bucket) >= LIMITS.per_bucket or self.active() >= LIMITS.per_node
        if full:
            with pytest.raises(TableError) as error:
                self.sessions.open(session)
            assert error.value.table_code is TableCode.too_many_scanners
            return multiple()
        self.sessions.open(session)
        self.alive[session.id] = ModelScan(bucket, self.now_ms, limit)
        self.go_on(session.id, size)
        return session.id

    @rule(scanner_id=scans, size=st.integers(1, 10))
    def go_on(self, scanner_id: bytes, size: int) -> None:
        scan = self.alive.get(scanner_id)
        if scan is None:
            self.expect(self.refusal_of_dead(scanner_id), scanner_id, 0)
            return
        sequence = len(scan.batches)
        was_drained = scan.is_drained
        if was_drained:
            scan.used_ms = self.now_ms
            self.expect(TableCode.unknown_scanner_id, scanner_id, sequence)
            return
        left = len(ROWS) if scan.limit is None else scan.limit - len(scan.rows)
        first = bisect_left(ROWS, scan.rows[-1] + b"\0") if scan.rows else 0
        wanted = list(ROWS[first : first + min(size, left)])
        assert call(self.sessions, scanner_id, sequence, size, self.now_ms) == wanted
        scan.batches.append(wanted)
        scan.used_ms = self.now_ms
        if scan.is_drained:
            self.ends += 1
            scan.end = self.ends
            lingering = [each for each, other in self.alive.items() if other.is_drained]
            for each in sorted(lingering, key=lambda each: self.alive[each].end)[: -LIMITS.lingering]:
                del self.alive[each]

    @rule(scanner_id=scans, size=st.integers(1, 10))
    def repeat(self, scanner_id: bytes, size: int) -> None:
        scan = self.alive.get(scanner_id)
        if scan is not None:
            sequence = len(scan.batches) - 1
            assert call(self.sessions, scanner_id, sequence, size, self.now_ms) == scan.batches[-1]
            scan.used_ms = self.now_ms

    @rule(scanner_id=scans, away=st.sampled_from([-3, -2, -1, 2, 3]))
    def call_out_of_order(self, scanner_id: bytes, away: int) -> None:
        scan = self.alive.get(scanner_id)
        if scan is not None:
            code = TableCode.unknown_scanner_id if scan.is_drained else TableCode.invalid_scan_request
            self.expect(code, scanner_id, len(scan.batches) - 1 + away)
            scan.used_ms = self.now_ms

    @rule(scanner_id=scans)
    def keep_alive(self, scanner_id: bytes) -> None:
        scan = self.alive.get(scanner_id)
        if scan is not None:
            self.sessions.get(scanner_id, self.now_ms)
            scan.used_ms = self.now_ms

    @rule(scanner_id=scans)
    def close(self, scanner_id: bytes) -> None:
        closed = self.sessions.close(scanner_id)
        assert (closed is not None) == (self.alive.pop(scanner_id, None) is not None)

    @rule(scanner_id=consumes(scans))
    def forget(self, scanner_id: bytes) -> None:
        """Its client went away without a word."""

    @rule(bucket=st.sampled_from(BUCKETS))
    def change_leader(self, bucket: BucketKey) -> None:
        gone = {scanner_id for scanner_id, scan in self.alive.items() if scan.bucket == bucket}
        ended = self.sessions.end_bucket(bucket, "a new leader epoch", self.now_ms)
        assert {session.id for session in ended} == gone
        for scanner_id in gone:
            del self.alive[scanner_id]
            self.ended_ms[scanner_id] = self.now_ms

    @rule(passed_ms=st.sampled_from([0, 1, 99, 100, 500, 999, 1_000, 1_999, 2_000]), sweep=st.booleans())
    def let_time_pass(self, passed_ms: int, sweep: bool) -> None:
        self.now_ms += passed_ms
        if not sweep:
            return
        gone = set()
        for scanner_id, scan in list(self.alive.items()):
            idle_ms = self.now_ms - scan.used_ms
            if idle_ms >= (LIMITS.linger_ms if scan.is_drained else LIMITS.idle_ms):
                gone.add(scanner_id)
                del self.alive[scanner_id]
                if not scan.is_drained:
                    self.ended_ms[scanner_id] = self.now_ms
        assert {session.id for session in self.sessions.sweep(self.now_ms)} == gone
        self.ended_ms = {
            scanner_id: ended_ms
            for scanner_id, ended_ms in self.ended_ms.items()
            if self.now_ms - ended_ms < 2 * LIMITS.idle_ms
        }

    @invariant()
    def places_are_counted(self) -> None:
        assert len(self.sessions) == self.active()
        for bucket in BUCKETS:
            assert self.sessions.count(bucket) == self.active(bucket)


TestScanMachine = ScanMachine.TestCase
TestScanMachine.settings = settings(max_examples=60, stateful_step_count=40)
