"""Ordered workers against a node: order, resuming, rollback, budgets, parking, lanes, databases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import tidemill
from support.processes import wait_until
from tidemill import Action, Bounded, Ordered, Reject, Retry, WorkerFailed
from tidemill.client.admin.topics import create_topic, delete_records
from tidemill.client.cursors.admin import describe_cursor
from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction, TransactionStore
from tidemill.client.cursors.cursor import AsyncCursor
from tidemill.client.cursors.records import CursorRecord
from tidemill.client.cursors.replay import replay
from tidemill.client.cursors.sync_cursor import CursorTransaction
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.client.workers import ordered_engine
from tidemill.client.workers.opening import PARKED_OPERATION
from tidemill.cursors.errors import (
    CheckpointBelowLogStart,
    CheckpointWriteFailed,
    CursorFenced,
    CursorInUse,
    NoOpenTransaction,
)
from tidemill.errors import ApiError, ConfigError, ErrorCode
from tidemill.records.record import Record
from tidemill.share.letters import LEFT_OUT, read_letter

_numbers = itertools.count()


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"worker-{next(_numbers)}"


@pytest.fixture
def topic(db: Tidemill) -> str:
    return _topic(db)


def _topic(db: Tidemill, partitions: int = 1) -> str:
    made = f"topic-{next(_numbers)}"
    db.run(create_topic(db._awaited.cluster, made, partitions=partitions))
    return made


def _send(db: Tidemill, topic: str, keys: str | range) -> None:
    """A record for each key, with its number as value."""

    async def send() -> None:
        async with Producer(db._awaited.cluster) as producer:
            now_ms = int(time.time() * 1000)  # Retention deletes what is old.
            sent = [
                await producer.send(topic, Record(str(key).encode(), str(number).encode(), now_ms), 0)
                for number, key in enumerate(keys)
            ]
            await asyncio.gather(*sent)

    db.run(send())


def _position(db: Tidemill, name: str, topic: str, **options: Any) -> int:
    with db.cursor(name, topic, **options) as cursor:
        return cursor.committed[0].offset


def _records(db: Tidemill, topic: str) -> list[CursorRecord]:
    with db.cursor(None, topic) as cursor:
        return [each for each in cursor.poll_batch(100) if isinstance(each, CursorRecord)]


def test_records_are_handled_in_order_and_the_next_worker_goes_on_behind_them(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, range(200))
    seen: list[int] = []
    worker = db.worker(name, topic, lambda record: seen.append(record.offset), ordered=True)
    counts = worker.run_until_empty()
    assert seen == list(range(200))
    assert (counts.handled, counts.accepted, counts.failed) == (200, 200, 0)
    _send(db, topic, range(10))
    db.worker(name, topic, lambda record: seen.append(record.offset), ordered=True).run_until_empty()
    assert seen == list(range(210))


async def test_handlers_that_are_awaited_run_on_the_event_loop(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(100))
    seen: list[int] = []

    async def handle(record: Any) -> None:
        await asyncio.sleep(0)
        seen.append(record.offset)

    worker = db.worker(name, topic, handle, ordered=True)
    await asyncio.to_thread(worker.run_until_empty)
    assert seen == list(range(100))


def test_a_handler_gets_at_most_a_batch_again_when_it_raises(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(30))
    seen: list[int] = []
    errors: list[BaseException] = []

    def handle(record: Any) -> None:
        seen.append(record.offset)
        if record.offset == 17 and seen.count(17) == 1:
            raise ValueError("not today")

    options = Ordered(batch_size=10, on_restart=errors.append)
    worker = db.worker(name, topic, handle, ordered=options)
    assert worker.run_until_empty().restarts == 1
    # Batches of ten: the second begins again, the first does not.
    assert seen == [*range(10), *range(10, 18), *range(10, 30)]
    assert [str(error) for error in errors] == ["not today"]


def test_an_exhausted_budget_reaches_join_with_the_handlers_error(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, range(5))
    calls: list[int] = []
    failures: list[BaseException] = []

    def handle(record: Any) -> None:
        calls.append(record.offset)
        if record.offset == 3:
            raise KeyError("row")

    options = Ordered(batch_size=2, restart=Bounded(2, within_seconds=600), on_failure=failures.append)
    worker = db.worker(name, topic, handle, ordered=options)
    worker.start()
    with pytest.raises(WorkerFailed, match=r"budget of 2 restarts within 600 seconds.*KeyError") as raised:
        worker.join()
    assert isinstance(raised.value.__cause__, KeyError)
    assert failures == [raised.value]
    assert calls == [0, 1, *(2, 3) * 3]
    assert _position(db, name, topic) == 2


def _exit(record: Any) -> None:
    raise SystemExit(3)


async def _exit_awaited(record: Any) -> None:
    raise SystemExit(3)


async def _wait_for_what_is_cancelled(record: Any) -> None:
    given_up = asyncio.get_running_loop().create_future()
    given_up.cancel()
    await given_up


@pytest.mark.parametrize("handler", [_exit, _exit_awaited, _wait_for_what_is_cancelled])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_handler_that_exits_or_is_cancelled_has_failed_like_any_other(
    db: Tidemill, name: str, topic: str, handler: Any, concurrency: int
) -> None:
    _send(db, topic, range(2))
    options = Ordered(restart=Bounded(0, within_seconds=1))
    worker = db.worker(name, topic, handler, ordered=options, concurrency=concurrency)
    worker.start()
    with pytest.raises(WorkerFailed, match=r"SystemExit|CancelledError"):
        worker.join()


def test_a_handler_can_stop_the_worker_behind_its_record(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(20))
    worker = db.worker(name, topic, lambda record: Action.STOP if record.offset == 6 else None, ordered=True)
    worker.start()
    worker.join()
    assert _position(db, name, topic) == 7


def test_a_stop_with_rollback_ends_at_the_stored_position(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(20))
    worker = db.worker(
        name,
        topic,
        lambda record: Action.STOP_WITH_ROLLBACK if record.offset == 7 else Action.CONTINUE,
        ordered=Ordered(batch_size=5),
    )
    worker.start()
    worker.join()
    assert _position(db, name, topic) == 5


def test_a_record_that_keeps_failing_is_tried_alone_and_parked(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(10))
    letters = _topic(db)
    seen: list[int] = []
    parked: list[Any] = []

    def handle(record: Any) -> None:
        seen.append(record.offset)
        if record.offset == 4:
            raise ValueError("poison")
        if record.offset == 6:
            raise Reject("no such customer")

    worker = db.worker(
        name,
        topic,
        handle,
        ordered=Ordered(attempts=3, on_park=parked.append),
        dead_letter=letters,
        retry_backoff=0.001,
    )
    counts = worker.run_until_empty()
    assert seen == [0, 1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9]
    assert (counts.accepted, counts.rejected, counts.failed) == (8, 2, 3)
    assert [record.offset for record in parked] == [4, 6]
    found = _records(db, letters)
    said = [read_letter(each.headers) for each in found]
    assert [
        (each.group_id, each.topic, each.partition, each.offset, each.reason) for each in said if each
    ] == [
        (name, topic, 0, 4, "ValueError: poison"),
        (name, topic, 0, 6, "no such customer"),
    ]
    assert [each.value for each in found] == [b"4", b"6"]


@pytest.mark.parametrize("large", ["value", "key", "headers"])
def test_a_record_that_is_too_large_to_be_parked_whole_is_parked_without_its_contents(
    db: Tidemill, name: str, large: str
) -> None:
    limit = 10_000
    cluster = db._awaited.cluster
    topic, letters = f"{name}-records", f"{name}-letters"
    for made in (topic, letters):
        db.run(create_topic(cluster, made, partitions=1, configs={"max.message.bytes": str(limit)}))
    # It just fits its own topic: the headers of a letter are too much.
    much = b"x" * (limit - 150)
    poison = {
        "value": Record(b"k", much, headers=(("trace", b"1"),)),
        "key": Record(much, b"v"),
        "headers": Record(b"k", b"v", headers=(("trace", much),)),
    }[large]
    db.run(_send_one(db, topic, poison))
    db.run(_send_one(db, topic, Record(b"k", b"good")))
    done: list[int] = []

    def handle(record: Any) -> None:
        if record.offset == 0:
            raise ValueError("poison " * 10_000)
        done.append(record.offset)

    worker = db.worker(name, topic, handle, ordered=Ordered(attempts=1), dead_letter=letters)
    counts = worker.run_until_empty()
    assert (done, counts.rejected, counts.restarts) == ([1], 1, 0)
    (parked,) = _records(db, letters)
    said = read_letter(parked.headers)
    assert said is not None
    assert (said.group_id, said.topic, said.partition, said.offset) == (name, topic, 0, 0)
    assert said.reason.startswith("ValueError: poison")
    assert parked.value is None
    assert parked.header(LEFT_OUT) == str(len(poison.value or b"")).encode()
    if large == "value":
        assert (parked.key, parked.header("trace")) == (b"k", b"1")
    else:
        assert (parked.key, parked.header("trace")) == (None, None)
    found = db.run(replay(cluster, name, letters))
    assert (found.sent.total(), found.without_contents) == (0, 1)
    assert len(_records(db, topic)) == 2


async def _send_one(db: Tidemill, topic: str, record: Record) -> None:
    async with Producer(db._awaited.cluster) as producer:
        await (await producer.send(topic, record._replace(timestamp_ms=int(time.time() * 1000)), 0))


def test_letters_that_are_too_large_together_are_parked_whole(db: Tidemill, name: str) -> None:
    cluster = db._awaited.cluster
    letters = f"{name}-letters"
    db.run(create_topic(cluster, letters, partitions=1, configs={"max.message.bytes": "10000"}))
    topic = _topic(db)
    for number in range(4):
        db.run(_send_one(db, topic, Record(b"%d" % number, b"%d" % number * 6_000)))
    all_fail = threading.Barrier(4)

    def handle(record: Any) -> None:
        all_fail.wait(120)
        raise Reject("no")

    worker = db.worker(name, topic, handle, ordered=True, dead_letter=letters, concurrency=4)
    worker.run_until_empty()
    assert sorted(each.value or b"" for each in _records(db, letters)) == [
        b"%d" % number * 6_000 for number in range(4)
    ]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_change_of_a_table_that_fails_is_tried_again_and_parked(
    db: Tidemill, name: str, concurrency: int, caplog: pytest.LogCaptureFixture
) -> None:
    table = db.create_table(f"shop.{name}", "id bigint, item string", primary_key=["id"])
    table.upsert([{"id": number, "item": "apple"} for number in range(4)])
    table.delete(2)
    letters = _topic(db)
    seen: list[tuple[str, int]] = []
    parked: list[Any] = []

    def handle(record: Any) -> None:
        seen.append((record.op, record.row["id"]))
        if record.row["id"] == 1:
            raise ValueError("poison")
        if record.op == "delete" and seen.count(("delete", 2)) == 1:
            raise Retry("not yet", delay=0.001)

    worker = db.worker(
        name,
        table.name,
        handle,
        ordered=Ordered(attempts=2, on_park=parked.append),
        dead_letter=letters,
        retry_backoff=0.001,
        concurrency=concurrency,
    )
    counts = worker.run_until_empty()
    ids = [0, 1, 1, 2, 3]
    assert sorted(seen) == [("delete", 2), ("delete", 2), *(("upsert", number) for number in ids)]
    assert (counts.accepted, counts.rejected, counts.failed, counts.restarts) == (4, 1, 2, 0)
    assert [record.row for record in parked] == [{"id": 1, "item": "apple"}]
    (letter,) = _records(db, letters)
    assert letter.json() == {"id": 1, "item": "apple"}
    assert letter.header(PARKED_OPERATION) == b"upsert"
    assert "ValueError: poison" in caplog.text
    # An old row would replace a newer one.
    with pytest.raises(ConfigError, match="is a table: a change that is sent again would replace a newer"):
        db.run(replay(db._awaited.cluster, name, letters, execute=False))


def test_an_error_over_a_table_is_the_one_that_ends_the_worker(db: Tidemill, name: str) -> None:
    table = db.create_table(f"shop.{name}", "id bigint", primary_key=["id"])
    table.upsert({"id": 1})

    def handle(record: Any) -> None:
        raise ValueError("poison")

    worker = db.worker(name, table.name, handle, ordered=Ordered(restart=Bounded(0, within_seconds=1)))
    worker.start()
    with pytest.raises(WorkerFailed, match="last error was ValueError: poison"):
        worker.join()


def test_a_position_is_stored_as_often_as_the_options_say(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(25))
    worker = db.worker(
        name,
        topic,
        lambda record: Action.STOP_WITH_ROLLBACK if record.offset == 24 else None,
        ordered=Ordered(batch_size=4, every_records=10),
    )
    worker.start()
    worker.join()
    # Twelve records are three batches, and so are the next twelve.
    assert _position(db, name, topic) == 24


@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_is_filtered_out_behind_the_last_record_is_passed_too(
    db: Tidemill, name: str, topic: str, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    monkeypatch.setattr(ordered_engine, "_POLL_MS", 50)
    options = Ordered(key_prefix="a", batch_size=2)
    with db.worker(name, topic, lambda record: None, ordered=options, concurrency=concurrency):
        for keys in ("aab", "bbb"):
            _send(db, topic, keys)
        wait_until(lambda: _shown_position(db, name) == 6, "the position is behind all records")


def _shown_position(db: Tidemill, name: str) -> int:
    (found,) = db.run(describe_cursor(db._awaited.cluster, name)).partitions
    return found.position.offset


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("cadence", [{"every_records": 1_000}, {"every_seconds": 3_600}])
def test_a_position_is_stored_when_no_more_records_come(
    db: Tidemill,
    name: str,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    cadence: dict[str, Any],
    concurrency: int,
) -> None:
    monkeypatch.setattr(ordered_engine, "_POLL_MS", 50)
    _send(db, topic, range(3))
    worker = db.worker(name, topic, lambda record: None, ordered=Ordered(**cadence), concurrency=concurrency)
    worker.start()
    wait_until(lambda: _shown_position(db, name) == 3, "the position is behind all records")
    worker.stop_and_join()
    assert worker.run_until_empty().handled == 3


def test_a_stop_in_a_batch_stores_what_is_done(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(50))
    in_handler, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def handle(record: Any) -> None:
        seen.append(record.offset)
        if record.offset == 5:
            in_handler.set()
            assert go_on.wait(120)

    worker = db.worker(name, topic, handle, ordered=True)
    worker.start()
    assert in_handler.wait(120)
    worker.stop()
    go_on.set()
    worker.join()
    assert seen == [0, 1, 2, 3, 4, 5]
    assert _position(db, name, topic) == 6


def test_a_handler_that_does_not_end_keeps_no_process_from_ending(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    _send(db, topic, range(1))
    threads: list[threading.Thread] = []
    db.worker(
        name, topic, lambda _: threads.append(threading.current_thread()), ordered=True
    ).run_until_empty()
    db.worker(
        f"{name}-database",
        topic,
        lambda *_: threads.append(threading.current_thread()),
        ordered=Ordered(checkpoint=_connect(tmp_path / "effects.db")),
    ).run_until_empty()
    assert [thread.daemon for thread in threads] == [True, True]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_a_worker_whose_cursor_was_taken_over_ends_with_that_error(
    db: Tidemill, name: str, topic: str
) -> None:
    handled = threading.Event()
    worker = db.worker(name, topic, lambda record: handled.set(), ordered=True)
    worker.start()
    with db.cursor(name, topic, take_over=True):
        _send(db, topic, range(3))
        with pytest.raises(CursorFenced, match=name):
            worker.join()


def _impatient(db: Tidemill) -> Tidemill:
    """Another connection, that does not wait long for the owner of a cursor."""
    return tidemill.connect(db.bootstrap_servers, timeout_ms=1_000)


@pytest.mark.parametrize("is_file", [False, True])
def test_a_worker_that_stands_by_goes_on_when_the_owner_is_gone(
    db: Tidemill, name: str, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_file: bool
) -> None:
    checkpoint = tmp_path / "position" if is_file else None
    _send(db, topic, range(3))
    seen: list[int] = []
    options = Ordered(checkpoint=checkpoint, standby=True, lease_ms=200)
    caplog.set_level("INFO", "tidemill.worker")
    with _impatient(db) as other:
        worker = other.worker(name, topic, lambda record: seen.append(record.offset), ordered=options)
        # Its lease would outlast the test: only closing it can end it.
        with db.cursor(name, topic, checkpoint=checkpoint, lease_ms=300_000) as owner:
            starting = threading.Thread(target=worker.start)
            starting.start()
            wait_until(lambda: "stands by" in caplog.text, "the worker stands by")
            owner.poll(timeout_ms=30_000)
            owner.commit()
            assert not seen
        starting.join(60)
        wait_until(lambda: seen == [1, 2], "it goes on where the owner was")
        worker.stop_and_join()
    assert caplog.text.count("stands by") == 1


def test_a_worker_that_does_not_stand_by_ends_while_another_owns_its_cursor(
    db: Tidemill, name: str, topic: str
) -> None:
    with _impatient(db) as other, db.cursor(name, topic, lease_ms=300_000):
        worker = other.worker(name, topic, print, ordered=Ordered(lease_ms=200))
        with pytest.raises(CursorInUse, match="take_over"):
            worker.start()


def test_a_worker_that_stands_by_can_be_stopped(db: Tidemill, name: str, topic: str) -> None:
    worker = db.worker(name, topic, print, ordered=Ordered(standby=True))
    with db.cursor(name, topic, lease_ms=300_000):
        starting = threading.Thread(target=worker.start)
        starting.start()
        wait_until(lambda: worker.is_running, "it is being started")
        worker.stop_and_join()
    starting.join(60)
    assert not starting.is_alive()


def test_a_checkpoint_that_cannot_be_written_ends_the_worker(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    directory = tmp_path / "positions"
    directory.mkdir()
    failures: list[BaseException] = []
    options = Ordered(checkpoint=directory / "position", on_failure=failures.append)
    worker = db.worker(name, topic, lambda record: None, ordered=options)
    worker.start()
    # A directory in the way of the file that is written beside it, which not even root can replace.
    (directory / "position.new").mkdir()
    _send(db, topic, range(3))
    with pytest.raises(CheckpointWriteFailed, match="position"):
        worker.join()
    assert len(failures) == 1


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_paused_worker_takes_nothing_until_it_is_resumed(
    db: Tidemill, name: str, topic: str, concurrency: int
) -> None:
    _send(db, topic, range(40))
    seen: list[int] = []
    in_handler, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def handle(record: Any) -> None:
        in_handler.set()
        assert go_on.wait(120)
        seen.append(record.offset)
        if len(seen) == 40:
            done.set()

    with db.worker(name, topic, handle, ordered=Ordered(batch_size=2), concurrency=concurrency) as worker:
        assert in_handler.wait(120)
        worker.pause()
        go_on.set()
        # Another one of the same event loop gets to the end meanwhile.
        other = db.worker(f"{name}-other", topic, lambda record: None, ordered=Ordered(batch_size=2))
        assert other.run_until_empty().handled == 40
        # Those that were polled are done; side by side one more batch was, while handlers ran.
        polled = 2 if concurrency == 1 else 4
        wait_until(lambda: len(seen) >= polled, "what was polled is done")
        assert sorted(seen) == list(range(polled))
        worker.resume()
        assert done.wait(120)
    assert sorted(seen) == list(range(40))


# --- without a name


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_worker_without_a_name_keeps_its_position_as_long_as_it_lives(
    db: Tidemill, topic: str, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    _send(db, topic, range(30))
    commit = AsyncCursor.commit
    unlucky: list[int] = []
    seen: list[int] = []

    async def fail_once(self: AsyncCursor, *args: Any, **options: Any) -> None:
        await commit(self, *args, **options)
        if not unlucky and self.committed[0].offset >= 10:
            unlucky.append(self.committed[0].offset)
            raise ApiError(ErrorCode.not_coordinator, "the nodes are away")

    monkeypatch.setattr(AsyncCursor, "commit", fail_once)
    worker = db.worker(
        None,
        topic,
        lambda record: seen.append(record.offset),
        ordered=Ordered(batch_size=5),
        concurrency=concurrency,
    )
    assert worker.name is None
    worker.run_until_empty()
    assert unlucky
    assert sorted(set(seen)) == list(range(30))
    # Of what was stored nothing came again.
    assert all(seen.count(offset) == 1 for offset in range(unlucky[0]))
    # It goes on where it was; another one begins anew.
    before = len(seen)
    _send(db, topic, range(2))
    worker.run_until_empty()
    assert sorted(seen[before:]) == [30, 31]
    other: list[int] = []
    db.worker(None, topic, lambda record: other.append(record.offset), ordered=True).run_until_empty()
    assert other == list(range(32))


def test_a_worker_without_a_name_has_no_place_for_a_position_and_parks_nothing(
    db: Tidemill, topic: str
) -> None:
    with pytest.raises(ConfigError, match="without a name cannot park records"):
        db.worker(None, topic, print, ordered=True, dead_letter="letters")
    with pytest.raises(ConfigError, match="only an ordered one can have none"):
        db.worker(None, topic, print)
    with pytest.raises(ConfigError, match="a checkpoint needs a name"):
        db.worker(None, topic, print, ordered=Ordered(checkpoint="position")).start()


@pytest.mark.parametrize("name", ["orders#1", "n" * 243])
def test_a_worker_whose_parked_records_could_not_be_replayed_is_refused(
    db: Tidemill, name: str, topic: str
) -> None:
    with pytest.raises(ConfigError, match=r"cannot park records: 'tidemill cursor replay' needs"):
        db.worker(name, topic, print, ordered=True, dead_letter="letters")
    # What parks nothing may have such a name, and the longest one that can be replayed may park.
    db.worker(name, topic, print, ordered=True).run_until_empty()
    db.worker("n" * 242, topic, print, ordered=True, dead_letter="letters")


# --- keys side by side


def test_different_keys_run_side_by_side_and_each_in_order(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, "abcd" * 50)
    together = threading.Barrier(4, timeout=120)
    seen: dict[bytes, list[int]] = {}

    def handle(record: Any) -> None:
        if record.offset < 4:
            together.wait()  # Passes only if four handlers run at a time.
        seen.setdefault(record.key, []).append(record.offset)

    counts = db.worker(name, topic, handle, ordered=True, concurrency=4).run_until_empty()
    assert counts.accepted == 200
    assert seen == {key.encode(): list(range(start, 200, 4)) for start, key in enumerate("abcd")}
    assert _position(db, name, topic) == 200


def test_what_other_lanes_have_done_does_not_come_again_after_an_error(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, "xababab")
    seen: list[int] = []
    others_done = threading.Event()

    def handle(record: Any) -> None:
        if record.key == b"x":
            assert others_done.wait(120)
            if seen.count(0) == 0:
                seen.append(0)
                raise ValueError("once")
        seen.append(record.offset)
        if sum(offset > 0 for offset in seen) == 6:
            others_done.set()

    counts = db.worker(name, topic, handle, ordered=True, concurrency=3).run_until_empty()
    assert sorted(seen) == [0, *range(7)]
    assert counts.accepted == 7


def test_a_position_that_cannot_be_stored_now_runs_no_record_beside_itself(
    db: Tidemill, name: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _send(db, topic, "xa")
    commit = AsyncCursor.commit
    go_on = threading.Event()
    failed: list[int] = []
    running: list[int] = []
    beside: list[int] = []

    async def fail_once(self: AsyncCursor, *args: Any, **options: Any) -> None:
        if not failed:
            failed.append(1)
            threading.Timer(0.5, go_on.set).start()
            raise ApiError(ErrorCode.not_coordinator, "it moves")
        await commit(self, *args, **options)

    monkeypatch.setattr(AsyncCursor, "commit", fail_once)

    def handle(record: Any) -> None:
        if record.key == b"x":
            beside.extend(running)
            running.append(record.offset)
            assert go_on.wait(120)
            running.remove(record.offset)

    options = Ordered(batch_size=1)
    db.worker(name, topic, handle, ordered=options, concurrency=2).run_until_empty()
    assert failed
    assert not beside
    assert _position(db, name, topic) == 2


# --- effects in a database


def _connect(path: Path) -> Callable[[], sqlite3.Connection]:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=120)

    return connect


def _effects(path: Path) -> list[int]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT record FROM effects ORDER BY rowid")]


def _table(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE effects (record INTEGER)")


@pytest.mark.parametrize("concurrency", [1, 3])
def test_effects_in_a_database_happen_once_although_handlers_fail(
    db: Tidemill, name: str, topic: str, tmp_path: Path, concurrency: int
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, "abc" * 20)
    failed: list[int] = []

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        if record.offset % 20 == 3 and record.offset not in failed:
            failed.append(record.offset)
            raise ValueError("after the effect")

    options = Ordered(checkpoint=_connect(path), batch_size=8, restart=Bounded(100, within_seconds=1_000))
    worker = db.worker(name, topic, handle, ordered=options, concurrency=concurrency)
    # Lanes fail with others under way: all of it is one restart.
    worker.run_until_empty(timeout=120)
    assert sorted(_effects(path)) == list(range(60))
    if concurrency == 1:
        assert _effects(path) == list(range(60))


@pytest.mark.parametrize("kind", ["cluster", "file", "database", "transactions"])
def test_a_worker_goes_on_behind_records_that_were_deleted_only_if_it_is_told_to(
    db: Tidemill, name: str, topic: str, tmp_path: Path, kind: str
) -> None:
    checkpoint = {
        "cluster": None,
        "file": tmp_path / "checkpoint",
        "database": _connect(tmp_path / "effects.db"),
        "transactions": tidemill.IN_TRANSACTION,
    }[kind]
    seen: list[int] = []

    def run(**options: Any) -> None:
        worker = db.worker(
            name,
            topic,
            lambda record, *_: seen.append(record.offset),
            ordered=Ordered(checkpoint=checkpoint, **options),
        )
        worker.run_until_empty(timeout=120)

    _send(db, topic, range(4))
    run()
    _send(db, topic, range(6))
    db.run(delete_records(db._awaited.cluster, {(topic, 0): 8}))
    with pytest.raises(CheckpointBelowLogStart, match="if_lost='earliest'"):
        run()
    assert seen == [0, 1, 2, 3]
    run(if_lost="earliest")
    assert seen == [0, 1, 2, 3, 8, 9]


@pytest.mark.parametrize("opened_by", ["sqlite3", "connection", "session"])
def test_lanes_that_read_before_they_write_wait_for_each_other(
    db: Tidemill, name: str, topic: str, tmp_path: Path, opened_by: str
) -> None:
    path = tmp_path / "effects.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE total (records INTEGER)")
        connection.execute("INSERT INTO total VALUES (0)")
    _send(db, topic, "abcd" * 10)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 60})
    kinds = {"sqlite3": _connect(path), "connection": engine.connect, "session": lambda: Session(engine)}

    def handle(record: Any, connection: Any) -> None:
        if record.key == b"d":
            return  # Writes nothing.
        read, write = "SELECT records FROM total", "UPDATE total SET records = {}"
        if opened_by != "sqlite3":
            connection.execute(text(write.format(connection.execute(text(read)).scalar_one() + 1)))
        else:
            connection.execute(write.format(connection.execute(read).fetchone()[0] + 1))

    options = Ordered(checkpoint=kinds[opened_by], restart=Bounded(0, within_seconds=1))
    db.worker(name, topic, handle, ordered=options, concurrency=3).run_until_empty(timeout=120)
    engine.dispose()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT records FROM total").fetchone() == (30,)


def test_a_poison_record_is_parked_and_the_effects_around_it_stay(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(9))
    letters = _topic(db)

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        if record.offset == 5:
            raise ValueError("poison")

    worker = db.worker(
        name,
        topic,
        handle,
        ordered=Ordered(checkpoint=_connect(path), attempts=2),
        dead_letter=letters,
        retry_backoff=0.001,
    )
    worker.run_until_empty()
    assert _effects(path) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert [each.value for each in _records(db, letters)] == [b"5"]


def test_a_parked_record_beside_others_is_noted_as_done_at_once(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(3))
    letters = _topic(db)

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        if record.offset == 1:
            raise Reject("poison")
        if record.offset == 2:
            raise Retry(delay=600)

    def noted() -> list[tuple[int]]:
        with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
            return connection.execute("SELECT record_offset FROM tidemill_cursor_finished").fetchall()

    options = Ordered(checkpoint=_connect(path), batch_size=1_000)
    with db.worker(name, topic, handle, ordered=options, concurrency=3, dead_letter=letters):
        wait_until(lambda: (1,) in noted(), "what a crash now would leave to the next worker")


def test_a_handler_that_does_not_end_keeps_no_worker_and_its_effects_are_taken_back(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(4))
    in_handler, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        if record.offset == 2:
            in_handler.set()
            go_on.wait(120)
            ended.set()

    worker = db.worker(name, topic, handle, ordered=Ordered(checkpoint=_connect(path)), stop_timeout=0.05)
    worker.start()
    assert in_handler.wait(120)
    worker.stop_and_join()
    assert not ended.is_set(), "the worker has waited for its handler"
    go_on.set()
    # It waits until the handler has ended, and its transaction with it.
    db.worker(name, topic, handle, ordered=Ordered(checkpoint=_connect(path))).run_until_empty()
    assert _effects(path) == [0, 1, 2, 3]


def test_a_stop_with_rollback_of_a_record_that_is_done_again_takes_all_back(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(3))
    seen: list[int] = []

    def handle(record: Any, connection: sqlite3.Connection) -> Action:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        seen.append(record.offset)
        if record.offset == 2:
            raise ValueError("takes the others back")
        return Action.STOP_WITH_ROLLBACK if seen.count(1) == 2 else Action.CONTINUE

    options = Ordered(checkpoint=_connect(path))
    worker = db.worker(name, topic, handle, ordered=options, dead_letter=_topic(db))
    worker.start()
    worker.join()
    assert seen == [0, 1, 2, 0, 1]
    assert not _effects(path)


def test_a_record_that_asks_for_another_try_is_the_one_that_gets_it(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(4))
    seen: list[int] = []

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        seen.append(record.offset)
        if record.offset == 2 and seen.count(2) < 3:
            raise Retry(delay=0.001)

    db.worker(name, topic, handle, ordered=Ordered(checkpoint=_connect(path))).run_until_empty()
    assert _effects(path) == [0, 1, 2, 3]
    assert seen == [0, 1, 2, 0, 1, 2, 2, 3]


def test_a_lane_whose_cursor_was_taken_over_parks_nothing(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    letters = _topic(db)

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))

    worker = db.worker(
        name,
        topic,
        handle,
        ordered=Ordered(checkpoint=_connect(path), attempts=1),
        dead_letter=letters,
        concurrency=2,
    )
    worker.start()
    with sqlite3.connect(path, timeout=120) as connection:
        connection.execute("UPDATE tidemill_cursors SET epoch = epoch + 1")
    _send(db, topic, "ab")
    with pytest.raises(CursorFenced, match=name):
        worker.join()
    assert not _effects(path)
    assert not _records(db, letters)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_connection_that_is_lost_is_opened_again(
    db: Tidemill, name: str, topic: str, tmp_path: Path, concurrency: int
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(4))
    lost: list[int] = []

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))
        if record.offset == 2 and not lost:
            lost.append(1)
            connection.close()

    letters = _topic(db)
    options = Ordered(checkpoint=_connect(path), restart=Bounded(3, within_seconds=600), attempts=1)
    worker = db.worker(name, topic, handle, ordered=options, concurrency=concurrency, dead_letter=letters)
    assert worker.run_until_empty().restarts == 1
    assert sorted(_effects(path)) == [0, 1, 2, 3]
    assert not _records(db, letters)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_database_that_refuses_the_position_uses_the_budget_and_parks_nothing(
    db: Tidemill, name: str, topic: str, tmp_path: Path, concurrency: int
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, "ab" * 3)
    letters = _topic(db)
    refused: list[str] = []
    errors: list[BaseException] = []
    table = "tidemill_cursors" if concurrency == 1 else "tidemill_cursor_finished"

    def authorize(action: int, first: str | None, *_: str | None) -> int:
        is_write = action in (sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_INSERT)
        if is_write and first == table and threading.get_ident() in handling and not refused:
            refused.append(table)
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    handling: set[int] = set()

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=120)
        connection.set_authorizer(authorize)
        return connection

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        handling.add(threading.get_ident())
        connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))

    options = Ordered(
        checkpoint=connect, restart=Bounded(3, within_seconds=600), attempts=1, on_restart=errors.append
    )
    worker = db.worker(name, topic, handle, ordered=options, concurrency=concurrency, dead_letter=letters)
    assert worker.run_until_empty().restarts == 1
    assert refused
    assert [type(error) for error in errors] == [sqlite3.DatabaseError]
    assert sorted(_effects(path)) == list(range(6))
    assert not _records(db, letters)


def test_a_database_that_cannot_be_opened_is_told_by_start_and_by_the_callback(
    db: Tidemill, name: str, topic: str, tmp_path: Path
) -> None:
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        raise RuntimeError("the callback's own")

    options = Ordered(checkpoint=_connect(tmp_path / "none" / "effects.db"), on_failure=fail)
    with pytest.raises(sqlite3.OperationalError, match="unable to open") as raised:
        db.worker(name, topic, print, ordered=options).start()
    assert failures == [raised.value]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_handler_that_ends_the_transaction_ends_the_worker(
    db: Tidemill, name: str, topic: str, tmp_path: Path, concurrency: int
) -> None:
    path = tmp_path / "effects.db"
    _table(path)
    _send(db, topic, range(1))

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("INSERT INTO effects VALUES (?)", (record.offset,))

    options = Ordered(checkpoint=_connect(path))
    worker = db.worker(name, topic, handle, ordered=options, concurrency=concurrency)
    worker.start()
    with pytest.raises(NoOpenTransaction, match="offset 0 has ended the transaction"):
        worker.join()
    assert _effects(path) == [0]


# --- effects in Tidemill's transactions


def _in_transaction(**options: Any) -> Ordered:
    return Ordered(checkpoint=tidemill.IN_TRANSACTION, **options)


def _position_in_transactions(db: Tidemill, name: str, topic: str) -> int:
    return _position(db, name, topic, checkpoint=tidemill.IN_TRANSACTION)


def test_what_is_written_in_a_transaction_counts_once_although_handlers_fail(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, range(40))
    out = _topic(db)
    table: Any = db.create_table(f"shop.{name}", "id bigint, seen bigint", primary_key=["id"])
    table.upsert({"id": -1, "seen": 0})
    failed: list[int] = []

    def handle(record: Any, transaction: CursorTransaction) -> None:
        transaction.send(out, record.value)
        before = table.lookup(record.offset % 4)
        transaction.upsert(table, {"id": record.offset % 4, "seen": record.offset})
        if record.offset == 7:
            transaction.delete(table, -1)
        if record.offset % 10 == 3 and record.offset not in failed:
            failed.append(record.offset)
            raise ValueError(f"after the effect, with {before}")

    options = _in_transaction(batch_size=8, restart=Bounded(100, within_seconds=1_000))
    counts = db.worker(name, topic, handle, ordered=options).run_until_empty(timeout=120)
    assert counts.restarts == len(failed) == 4
    assert [each.value for each in _records(db, out)] == [b"%d" % number for number in range(40)]
    assert sorted(table.scan().to_arrow().to_pylist(), key=itemgetter("id")) == [
        {"id": number, "seen": 36 + number} for number in range(4)
    ]
    assert _position_in_transactions(db, name, topic) == 40


async def test_an_awaited_handler_awaits_its_transaction(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(20))
    out = _topic(db)

    async def handle(record: Any, transaction: AsyncCursorTransaction) -> Action | None:
        await transaction.send(out, record.value)
        return Action.STOP if record.offset == 12 else None

    worker = db.worker(name, topic, handle, ordered=_in_transaction(batch_size=5))
    await asyncio.to_thread(worker.start)
    await asyncio.to_thread(worker.join)
    assert len(_records(db, out)) == 13
    assert _position_in_transactions(db, name, topic) == 13


def test_a_record_whose_writes_are_refused_is_parked_and_the_others_count(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, range(10))
    out, letters = _topic(db), _topic(db)

    def handle(record: Any, transaction: CursorTransaction) -> None:
        # The first is refused when it is sent, the second in the handler.
        transaction.send(out, record.value if record.offset != 9 else bytes(20_000_000))
        if record.offset == 4:
            raise ValueError("poison")

    worker = db.worker(
        name,
        topic,
        handle,
        ordered=_in_transaction(attempts=2),
        dead_letter=letters,
        retry_backoff=0.001,
    )
    counts = worker.run_until_empty()
    assert (counts.accepted, counts.rejected, counts.restarts) == (8, 2, 0)
    assert [each.value for each in _records(db, out)] == [b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"8"]
    assert [each.value for each in _records(db, letters)] == [b"4", b"9"]
    assert _position_in_transactions(db, name, topic) == 10


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_commit_whose_outcome_is_not_known_is_looked_up_and_nothing_counts_twice(
    db: Tidemill, name: str, topic: str, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    _send(db, topic, range(20))
    out = _topic(db)
    end = TransactionStore.end
    lost: list[str] = []

    async def lose_the_answer(self: TransactionStore, *, commit: bool) -> None:
        if commit and not lost:
            lost.append(self.where)
            if is_committed:
                await end(self, commit=True)
            away = ApiError(ErrorCode.network_exception, "the connection broke")
            raise CheckpointWriteFailed("the transaction cannot be ended", where=self.where) from away
        await end(self, commit=commit)

    monkeypatch.setattr(TransactionStore, "end", lose_the_answer)
    worker = db.worker(
        name,
        topic,
        lambda record, transaction: transaction.send(out, record.value),
        ordered=_in_transaction(batch_size=8),
    )
    assert worker.run_until_empty().restarts == 0
    assert lost
    assert [each.value for each in _records(db, out)] == [b"%d" % number for number in range(20)]


def test_a_stop_with_rollback_takes_the_transaction_back(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(10))
    out = _topic(db)

    def handle(record: Any, transaction: CursorTransaction) -> Action | None:
        transaction.send(out, record.value)
        return Action.STOP_WITH_ROLLBACK if record.offset == 6 else None

    worker = db.worker(name, topic, handle, ordered=_in_transaction(batch_size=4))
    worker.start()
    worker.join()
    assert len(_records(db, out)) == 4
    assert _position_in_transactions(db, name, topic) == 4


def test_a_handler_that_is_given_up_writes_nothing(db: Tidemill, name: str, topic: str) -> None:
    _send(db, topic, range(4))
    out = _topic(db)
    in_handler, go_on = threading.Event(), threading.Event()
    late: list[BaseException] = []

    def handle(record: Any, transaction: CursorTransaction) -> None:
        transaction.send(out, record.value)
        if record.offset == 2 and not late:
            in_handler.set()
            go_on.wait(120)
            try:
                transaction.send(out, b"late")
            except NoOpenTransaction as error:
                late.append(error)

    worker = db.worker(name, topic, handle, ordered=_in_transaction(), stop_timeout=0.05)
    worker.start()
    assert in_handler.wait(120)
    worker.stop_and_join()
    go_on.set()
    db.worker(name, topic, handle, ordered=_in_transaction()).run_until_empty()
    assert [each.value for each in _records(db, out)] == [b"0", b"1", b"2", b"3"]
    assert late


def test_a_handler_that_ends_its_transaction_itself_ends_the_worker(
    db: Tidemill, name: str, topic: str
) -> None:
    _send(db, topic, range(1))

    def handle(record: Any, transaction: CursorTransaction) -> None:
        transaction.end(commit=True)

    worker = db.worker(name, topic, handle, ordered=_in_transaction())
    worker.start()
    with pytest.raises(NoOpenTransaction, match="offset 0 has ended the transaction"):
        worker.join()


# --- arguments


def test_options_of_share_groups_are_refused(db: Tidemill, name: str, topic: str) -> None:
    with pytest.raises(ConfigError, match="max_deliveries is for workers on a share group"):
        db.worker(name, topic, print, ordered=True, max_deliveries=3)


@pytest.mark.parametrize(
    "options", [{"batch_size": 0}, {"attempts": 0}, {"every_seconds": 0}, {"restart": 3}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Ordered(**options)


def test_ordered_is_yes_or_options(db: Tidemill, name: str, topic: str) -> None:
    wrong: Any = "by key"
    with pytest.raises(ConfigError, match="ordered is True"):
        db.worker(name, topic, print, ordered=wrong)


def test_a_checkpoint_that_only_a_cursor_can_have_is_refused(db: Tidemill, name: str, topic: str) -> None:
    with pytest.raises(ConfigError, match=r"one transaction open at a time.*concurrency is 1, not 2"):
        db.worker(name, topic, print, ordered=Ordered(checkpoint=tidemill.IN_TRANSACTION), concurrency=2)
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(ConfigError, match=r"a function that opens one.*not a Connection"),
    ):
        db.worker(name, topic, print, ordered=Ordered(checkpoint=connection))


@pytest.mark.parametrize("checkpoint", [lambda: sqlite3.connect(":memory:"), tidemill.IN_TRANSACTION])
@pytest.mark.parametrize("cadence", ["every_records", "every_seconds"])
def test_a_cadence_that_would_be_ignored_is_refused(
    db: Tidemill, name: str, topic: str, checkpoint: Any, cadence: str
) -> None:
    given: dict[str, Any] = {cadence: 5}
    options = Ordered(checkpoint=checkpoint, **given)
    with pytest.raises(ConfigError, match=rf"{cadence} has no effect.*after each batch.*batch_size"):
        db.worker(name, topic, print, ordered=options)


def test_a_database_and_lanes_take_a_cadence(db: Tidemill, name: str, topic: str, tmp_path: Path) -> None:
    options = Ordered(checkpoint=_connect(tmp_path / "effects.db"), every_records=5)
    _send(db, topic, range(12))
    worker = db.worker(name, topic, lambda *_: None, ordered=options, concurrency=2)
    assert worker.run_until_empty().handled == 12


def test_a_worker_that_owns_no_partition_is_refused(db: Tidemill, name: str, topic: str) -> None:
    with pytest.raises(ConfigError, match="own names no partition"):
        db.worker(name, topic, print, ordered=Ordered(own=[])).start()
