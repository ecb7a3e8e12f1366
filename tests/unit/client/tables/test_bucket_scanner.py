"""``AsyncBucketScanner`` against a node without sockets: answers get lost, late or refused as a test says.

The node keeps its sessions with the real state machine; what a real node can be made to do is in
``tests/system/test_scan_sessions.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.client.tables import bucket_scanner as scanner_module
from tidemill.client.tables.bucket_scanner import (
    DEFAULT_FETCH_BYTES,
    AsyncBucketScanner,
    BucketScan,
    ScannerState,
    read_batches,
)
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TableCode, TableError, TidemillError
from tidemill.tables.scanning.reading import pack_batches
from tidemill.tables.scanning.sessions import BucketKey, ScanLimits, ScanSession, ScanSessions

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
SCAN = BucketScan(table_id=7, partition_id=0, topic="shop.orders", bucket=3)
LOST_REQUEST, LOST_ANSWER = "lost request", "lost answer"


class Node:
    """A node with one bucket of numbers, and the ``Cluster`` that leads to it.

    ``faults`` has what becomes of the next ScanKv requests: an error code, one of the two above, or None.
    """

    def __init__(self, rows: int, *, per_batch: int = 2, faults: Iterable[Any] = (), places: int = 8) -> None:
        self.sessions = ScanSessions(ScanLimits(per_bucket=places))
        self.faults: deque[Any] = deque(faults)
        self.calls: list[dict[str, Any]] = []
        self.forgotten = 0
        #: Requests wait here for the test, if it is not set.
        self.answers = asyncio.Event()
        self.answers.set()
        self._rows = [number.to_bytes(2, "big") for number in range(rows)]
        self._per_batch = per_batch
        self._opened = 0

    # --- what a scanner needs of a cluster

    async def leaders(self, places: Any) -> dict[int, Any]:
        assert list(places) == [("shop.orders", 3)]
        return {1: places}

    async def connection(self, node_id: int, purpose: str) -> Node:
        assert (node_id, purpose) == (1, "scan")
        return self

    def forget(self) -> None:
        self.forgotten += 1

    async def request(self, name: str, body: dict[str, Any]) -> Any:
        assert name == "ScanKv"
        self.calls.append(body)
        await asyncio.sleep(0)
        await self.answers.wait()
        fault = self.faults.popleft() if self.faults else None
        if fault == LOST_REQUEST:
            raise NodeUnavailable("the connection broke")
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None and fault != LOST_ANSWER:
            return _answer(int(fault), f"the node says {fault.name}")
        try:
            response = self._handle(body)
        except TableError as error:
            response = _answer(int(error.table_code), error.message)
        if fault == LOST_ANSWER:
            raise NodeUnavailable("the connection broke")
        return response

    # --- what a node does

    def _handle(self, body: dict[str, Any]) -> Any:
        scanner_id = body["scanner_id"]
        if body.get("close"):
            self.sessions.close(scanner_id)
            return _answer()
        if body.get("keep_alive"):
            self.sessions.get(scanner_id, 0)
            return _answer()
        if scanner_id is None:
            self._opened += 1
            session = ScanSession(
                b"scan %d" % self._opened, BucketKey(7, 0, 3), None, 0, b"", body["limit"] or None
            )
            self.sessions.open(session)
        else:
            session = self.sessions.get(scanner_id, 0)
        plan = session.plan(body["call_sequence"])
        rows = [row for row in self._rows if row >= plan.start and (plan.end is None or row < plan.end)]
        count = len(rows) if plan.is_repeat else self._per_batch
        count = count if plan.rows_max is None else min(count, plan.rows_max)
        ended = plan.rows_max == count
        batch, next_key = rows[:count], None if ended or count >= len(rows) else rows[count]
        session.advance(plan, next_key, len(batch))
        self.sessions.answered(session)
        columns = pa.record_batch([pa.array([int.from_bytes(row, "big") for row in batch])], schema=SCHEMA)
        records = pack_batches([columns]) if batch else None
        has_more = session.next_start is not None
        answer = _answer()
        answer.scanner_id = session.id if has_more or batch else None
        answer.has_more, answer.next_key, answer.records = has_more, session.next_start, records
        answer.log_offset = 50 if scanner_id is None else -1
        return answer


def _answer(code: int = 0, message: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        error_code=code,
        error_message=message,
        scanner_id=None,
        has_more=False,
        log_offset=-1,
        next_key=None,
        records=None,
    )


def scanner_of(node: Any, scan: BucketScan = SCAN, **options: Any) -> AsyncBucketScanner:
    return AsyncBucketScanner(node, scan, **options)


async def drain(scanner: AsyncBucketScanner) -> list[int]:
    found: list[int] = []
    while (batch := await scanner.next_batch()) is not None:
        found += batch.column("id").to_pylist()
    return found


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner_module, "_FIRST_PAUSE_MS", 0)


# --- Pending → Active → Done


async def test_a_scanner_is_pending_active_and_done() -> None:
    node = Node(5)
    scanner = scanner_of(node)
    assert (scanner.state, scanner.topic_partition) == (ScannerState.PENDING, ("shop.orders", 3))
    assert node.calls == []
    assert (scanner.log_offset, scanner.next_key) == (None, None)
    first = await scanner.next_batch()
    assert first is not None
    assert first.to_pylist() == [{"id": 0}, {"id": 1}]
    assert (scanner.state, scanner.log_offset, scanner.next_key) == (ScannerState.ACTIVE, 50, b"\0\2")
    assert await drain(scanner) == [2, 3, 4]
    assert (scanner.state, scanner.log_offset, scanner.next_key) == (ScannerState.DONE, 50, None)
    for _ in range(2):
        assert await scanner.next_batch() is None
    assert [call["call_sequence"] for call in node.calls] == [0, 1, 2]
    assert len(node.sessions) == 0


async def test_an_empty_bucket_is_done_at_once() -> None:
    node = Node(0)
    scanner = scanner_of(node)
    assert await scanner.next_batch() is None
    assert (scanner.state, scanner.log_offset) == (ScannerState.DONE, 50)
    await scanner.close()
    assert len(node.calls) == 1


async def test_what_to_read_is_in_the_open_and_4_mib_is_the_default() -> None:
    node = Node(3)
    scan = BucketScan(7, 0, "shop.orders", 3, "pin", "lease", 9, ("id",), b"filter", b"from", b"to")
    await drain(scanner_of(node, scan))
    opened, again = node.calls
    assert DEFAULT_FETCH_BYTES == again["batch_size_bytes"] == 4 * 1024 * 1024
    assert opened == {
        "scanner_id": None,
        "table_id": 7,
        "partition_id": 0,
        "bucket": 3,
        "leader_epoch": -1,
        "pin_id": "pin",
        "lease_id": "lease",
        "limit": 9,
        "columns": ("id",),
        "predicate": b"filter",
        "start_key": b"from",
        "end_key": b"to",
        "call_sequence": 0,
        "batch_size_bytes": 4 * 1024 * 1024,
    }


async def test_the_next_request_is_under_way_while_the_caller_works() -> None:
    node = Node(6)
    scanner = scanner_of(node, fetch_max_bytes=128)
    await scanner.next_batch()
    await settle()
    assert [(call["call_sequence"], call["batch_size_bytes"]) for call in node.calls] == [(0, 128), (1, 128)]
    await scanner.next_batch()
    await settle()
    assert len(node.calls) == 3
    await scanner.close()


async def test_batches_that_a_filter_has_emptied_are_passed_over() -> None:
    class Choosy(Node):
        def _handle(self, body: dict[str, Any]) -> Any:
            answer = super()._handle(body)
            if body["call_sequence"] < 3:
                answer.records = None
            return answer

    node = Choosy(10)
    scanner = scanner_of(node)
    batch = await scanner.next_batch()
    assert batch is not None
    assert batch.column("id").to_pylist() == [6, 7]
    assert await drain(scanner) == [8, 9]


# --- lost answers


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("fault", [LOST_REQUEST, LOST_ANSWER])
async def test_a_lost_answer_costs_nothing(fault: str, call: int) -> None:
    """The first call, one in the middle, and the very last one."""
    node = Node(6, faults=[None] * call + [fault])
    assert await drain(scanner_of(node)) == list(range(6))
    assert [call["call_sequence"] for call in node.calls] == sorted([0, 1, 2, call])
    assert node.forgotten == 1


RETRIABLE = [
    TableCode.too_many_scanners,
    TableCode.state_not_ready,
    TableCode.state_damaged,
    ErrorCode.not_leader_or_follower,
    ErrorCode.leader_not_available,
    ErrorCode.fenced_leader_epoch,
    ErrorCode.unknown_leader_epoch,
]


@settings(max_examples=60)
@given(
    rows=st.integers(0, 9),
    per_batch=st.integers(1, 4),
    limit=st.integers(0, 10),
    faults=st.lists(st.none() | st.sampled_from([LOST_REQUEST, LOST_ANSWER, *RETRIABLE]), max_size=12),
)
def test_every_row_comes_once_and_in_order_whatever_gets_lost(
    rows: int, per_batch: int, limit: int, faults: list[Any]
) -> None:
    async def story() -> None:
        node = Node(rows, per_batch=per_batch, faults=faults, places=20)
        scan = BucketScan(7, 0, "shop.orders", 3, limit=limit)
        async with scanner_of(node, scan) as scanner:
            assert await drain(scanner) == list(range(min(rows, limit or rows)))

    asyncio.run(story())


@pytest.mark.parametrize("code", RETRIABLE)
async def test_a_retriable_refusal_is_tried_again_until_it_passes(code: TableCode | ErrorCode) -> None:
    node = Node(3, faults=[code, code, None, code])
    assert await drain(scanner_of(node)) == [0, 1, 2]
    assert node.forgotten == 3


async def test_a_scanner_gets_its_turn_when_a_place_is_free() -> None:
    node = Node(8, places=1)
    first, second = scanner_of(node), scanner_of(node)
    await first.next_batch()
    waiting = asyncio.ensure_future(drain(second))
    await settle()
    assert not waiting.done()
    assert second.state is ScannerState.PENDING
    assert await drain(first) == list(range(2, 8))
    assert await waiting == list(range(8))


async def test_pauses_grow_up_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(scanner_module, "_FIRST_PAUSE_MS", 25)
    monkeypatch.setattr(asyncio, "sleep", note)
    await drain(scanner_of(Node(1, faults=[TableCode.too_many_scanners] * 8)))
    longest = [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert len(pauses) == 8
    for pause, most in zip(pauses, longest, strict=True):
        assert most / 2 <= pause <= most


async def test_what_does_not_pass_in_time_is_reported_with_the_servers_words() -> None:
    node = Node(3, faults=[TableCode.too_many_scanners] * 50)
    with pytest.raises(TableError, match="it was tried until the scan's timeout was over") as error:
        await scanner_of(node, timeout_ms=-1).next_batch()
    assert error.value.table_code is TableCode.too_many_scanners
    assert "the node says too_many_scanners" in error.value.message
    node = Node(3, faults=[LOST_REQUEST] * 50)
    with pytest.raises(NodeUnavailable):
        await scanner_of(node, timeout_ms=-1).next_batch()


# --- failures that stay failures


FATAL = [
    TableCode.scanner_expired,
    TableCode.unknown_scanner_id,
    TableCode.invalid_scan_request,
    TableCode.table_not_found,
    TableCode.pin_not_found,
    ErrorCode.unknown_topic_or_partition,
]


@pytest.mark.parametrize("code", FATAL)
@pytest.mark.parametrize("call", [0, 1])
async def test_a_failed_scanner_keeps_failing(code: TableCode | ErrorCode, call: int) -> None:
    node = Node(8, faults=[None] * call + [code])
    scanner = scanner_of(node)
    for _ in range(call):
        await scanner.next_batch()
    errors = []
    for _ in range(3):
        with pytest.raises(TidemillError, match=f"the node says {code.name}") as error:
            await scanner.next_batch()
        errors.append(error.value)
        assert scanner.state is ScannerState.FAILED
    assert errors[0] is errors[1] is errors[2]
    if isinstance(code, TableCode):
        assert isinstance(errors[0], TableError)
        assert errors[0].table_code is code
    await scanner.close()
    with pytest.raises(TidemillError):
        await scanner.next_batch()
    assert scanner.state is ScannerState.FAILED


async def test_a_failure_ahead_of_the_caller_is_raised_when_he_asks_and_not_before() -> None:
    node = Node(8, faults=[None, TableCode.scanner_expired])
    scanner = scanner_of(node)
    assert await scanner.next_batch() is not None
    await settle()
    assert scanner.state is ScannerState.ACTIVE
    with pytest.raises(TableError):
        await scanner.next_batch()


async def test_an_answer_that_cannot_be_read_is_a_failure_that_stays() -> None:
    class Garbled(Node):
        def _handle(self, body: dict[str, Any]) -> Any:
            answer = super()._handle(body)
            if body.get("call_sequence") == 1:
                answer.records = b"these are no rows"
            return answer

    node = Garbled(8)
    async with scanner_of(node) as scanner:
        assert await scanner.next_batch() is not None
        for _ in range(3):
            with pytest.raises(Exception, match=r"rows|Arrow|message|IPC|Expected"):
                await scanner.next_batch()
            assert scanner.state is ScannerState.FAILED
    assert len(node.sessions) == 0


async def test_a_server_without_scans_is_named_as_such() -> None:
    missing = ApiError(ErrorCode.unsupported_version, "the node at h:1 does not serve ScanKv (API key 1061)")
    scanner = scanner_of(Node(3, faults=[missing]))
    for _ in range(2):
        with pytest.raises(ApiError, match="this server cannot scan tables: the node at h:1") as error:
            await scanner.next_batch()
        assert error.value.code is ErrorCode.unsupported_version


async def test_a_code_from_the_future_is_reported_with_its_number() -> None:
    class Newer(Node):
        def _handle(self, body: dict[str, Any]) -> Any:
            return _answer(1999, "what only a newer node knows")

    with pytest.raises(TidemillError, match="what only a newer node knows"):
        await scanner_of(Newer(3)).next_batch()


# --- cancelled callers


async def test_a_cancelled_caller_can_ask_again_and_finds_the_answer() -> None:
    node = Node(6)
    scanner = scanner_of(node)
    for expected in ([0, 1], [2, 3], [4, 5]):
        node.answers.clear()
        caller = asyncio.ensure_future(scanner.next_batch())
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        node.answers.set()
        batch = await scanner.next_batch()
        assert batch is not None
        assert batch.column("id").to_pylist() == expected
    assert [call["call_sequence"] for call in node.calls] == [0, 1, 2]


# --- closing


async def test_closing_in_the_middle_frees_the_place_on_the_server() -> None:
    node = Node(20)
    async with scanner_of(node) as scanner:
        await scanner.next_batch()
        assert len(node.sessions) == 1
    assert node.calls[-1] == {"scanner_id": b"scan 1", "close": True}
    assert (len(node.sessions), scanner.state) == (0, ScannerState.DONE)
    assert await scanner.next_batch() is None
    count = len(node.calls)
    await scanner.close()
    assert len(node.calls) == count


async def test_closing_before_the_first_call_or_after_the_last_asks_for_nothing() -> None:
    node = Node(3)
    unused = scanner_of(node)
    await unused.close()
    assert unused.state is ScannerState.DONE
    assert await unused.next_batch() is None
    assert node.calls == []
    used = scanner_of(node)
    await drain(used)
    await used.close()
    assert len(node.calls) == 2


async def test_closing_while_the_open_is_under_way_closes_what_it_opened() -> None:
    node = Node(20)
    node.answers.clear()
    scanner = scanner_of(node)
    caller = asyncio.ensure_future(scanner.next_batch())
    await settle()
    caller.cancel()
    closing = asyncio.ensure_future(scanner.close())
    await settle()
    node.answers.set()
    await closing
    assert len(node.sessions) == 0
    assert node.calls[-1].get("close")


async def test_closing_closes_also_what_was_opened_for_a_caller_that_went_away() -> None:
    node = Node(20)
    scanner = scanner_of(node)
    caller = asyncio.ensure_future(scanner.next_batch())
    await asyncio.sleep(0)
    caller.cancel()
    await settle()
    assert len(node.sessions) == 1
    await scanner.close()
    assert len(node.sessions) == 0


async def test_closing_while_the_open_waits_for_a_place_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scanner_module, "_FIRST_PAUSE_MS", 60_000)
    node = Node(20, places=0)
    scanner = scanner_of(node)
    caller = asyncio.ensure_future(scanner.next_batch())
    await settle()
    caller.cancel()
    async with asyncio.timeout(120):
        await scanner.close()
    count = len(node.calls)
    await settle()
    assert len(node.calls) == count, "it does not go on asking"


@pytest.mark.parametrize("fault", [LOST_REQUEST, LOST_ANSWER, OSError("broken"), TableCode.table_not_found])
async def test_a_close_that_fails_is_nobodys_problem(fault: Any) -> None:
    node = Node(20)
    scanner = scanner_of(node)
    await scanner.next_batch()
    await settle()
    node.faults.append(fault)
    await scanner.close()
    assert scanner.state is ScannerState.DONE


async def test_a_scanner_that_failed_for_its_own_reasons_lets_go_of_its_place() -> None:
    node = Node(20, faults=[None, TableCode.state_damaged])
    scanner = scanner_of(node, timeout_ms=-1)
    await scanner.next_batch()
    with pytest.raises(TableError):
        await scanner.next_batch()
    await scanner.close()
    assert len(node.sessions) == 0


async def test_a_scanner_whose_node_is_gone_does_not_ask_it_to_close() -> None:
    node = Node(20, faults=[None, LOST_REQUEST])
    scanner = scanner_of(node, timeout_ms=-1)
    await scanner.next_batch()
    with pytest.raises(NodeUnavailable):
        await scanner.next_batch()
    count = len(node.calls)
    await scanner.close()
    assert len(node.calls) == count


async def test_closing_does_not_wait_for_ever_for_a_node_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner_module, "_CLOSE_SECONDS", 0.01)
    node = Node(20)
    scanner = scanner_of(node)
    await scanner.next_batch()
    node.answers.clear()
    async with asyncio.timeout(120):
        await scanner.close()
    assert scanner.state is ScannerState.DONE


# --- keeping alive


async def test_keep_alive_is_for_scanners_that_are_open() -> None:
    node = Node(20)
    scanner = scanner_of(node)
    await scanner.keep_alive()
    assert node.calls == []
    await scanner.next_batch()
    await scanner.keep_alive()
    assert {"scanner_id": b"scan 1", "keep_alive": True} in node.calls
    assert await drain(scanner) == list(range(2, 20))
    count = len(node.calls)
    await scanner.keep_alive()
    assert len(node.calls) == count


# --- reading


def test_the_pieces_of_an_answer_are_one_batch() -> None:
    pieces = [pa.record_batch([pa.array([number])], schema=SCHEMA) for number in range(3)]
    packed = pack_batches(pieces)
    assert packed is not None
    assert read_batches(packed.to_pybytes()).column("id").to_pylist() == [0, 1, 2]
    empty = pack_batches([pieces[0].slice(0, 0)])
    assert empty is not None
    assert read_batches(empty.to_pybytes()).num_rows == 0
