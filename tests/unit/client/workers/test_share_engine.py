"""Workers on a share group, against nodes in memory: outcomes, stops, renewals, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from support.share_peer import PeerCluster
from tidemill.client.cluster import Cluster
from tidemill.client.share.consumer import AsyncShare
from tidemill.client.share.record import ShareRecord
from tidemill.client.workers.logs import JsonFormatter
from tidemill.client.workers.outcomes import Reject, Retry
from tidemill.client.workers.share_engine import ShareEngine
from tidemill.client.workers.worker import AsyncWorker
from tidemill.errors import ApiError, ConfigError, ErrorCode, NodeUnavailable, TidemillError


def make_worker(
    peer: PeerCluster,
    handler: Any = None,
    *,
    concurrency: int = 1,
    timeout: float | None = None,
    stop_timeout: float = 20.0,
) -> AsyncWorker:
    def open_share() -> AsyncShare:
        share = AsyncShare(
            cast("Cluster", peer), "emails", ("t",), concurrency=concurrency, renew_for=timeout
        )
        share.max_wait_ms = 20
        return share

    def engine(handler: Any) -> ShareEngine:
        return ShareEngine(
            "emails", handler, open_share, concurrency=concurrency, timeout=timeout, stop_timeout=stop_timeout
        )

    return AsyncWorker("emails", "t", engine, handler)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the state is that of nodes, which tell nobody
            await asyncio.sleep(0.002)


def judge(record: ShareRecord) -> None:
    if record.value == b"bad":
        raise Reject("no such address")
    if record.value == b"later" and record.delivery_count == 1:
        raise Retry(delay=0.5)
    if record.value == b"flaky" and record.delivery_count < 3:
        raise ValueError("not yet")


async def judge_awaited(record: ShareRecord) -> None:
    await asyncio.sleep(0)
    judge(record)


@pytest.mark.parametrize("handler", [judge, judge_awaited])
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_the_end_of_a_handler_decides_what_becomes_of_its_record(
    handler: Any, concurrency: int
) -> None:
    peer = PeerCluster({"t": 2}, nodes=2)
    peer["t", 0].write(b"good", b"bad", b"flaky")
    peer["t", 1].write(b"later", b"good")
    worker = make_worker(peer, handler, concurrency=concurrency)
    counts = await worker.run_until_empty(timeout=120)
    assert peer["t", 0].states == ["done", "dead", "done"]
    assert peer["t", 1].states == ["done", "done"]
    assert peer["t", 0].reasons == {1: "no such address"}
    assert peer["t", 1].delays_ms == {0: 500}
    assert peer["t", 0].counts == [1, 1, 3]
    assert (counts.handled, counts.accepted, counts.rejected) == (8, 4, 1)
    assert (counts.released, counts.failed, counts.running, counts.lost) == (3, 2, 0, 0)
    assert not worker.is_running
    assert peer.members == {}


async def test_a_handler_may_settle_its_record_itself() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", b"b")

    def handle(record: ShareRecord) -> None:
        if record.delivery_count == 1:
            record.release()
            raise ValueError("settled, and yet")
        record.accept()

    counts = await make_worker(peer, handle).run_until_empty(timeout=120)
    assert peer["t", 0].states == ["done", "done"]
    assert (counts.handled, counts.accepted, counts.released) == (4, 0, 0)


@pytest.mark.parametrize("is_async", [False, True])
async def test_as_many_handlers_run_side_by_side_as_asked_for(is_async: bool) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 20)
    running, most = 0, 0
    gate = threading.Barrier(5, timeout=120)

    def handle(record: ShareRecord) -> None:
        gate.wait()

    async def handle_awaited(record: ShareRecord) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        async with asyncio.timeout(120):
            while most < 5:  # noqa: ASYNC110 - all five must be here
                await asyncio.sleep(0.001)
        running -= 1

    worker = make_worker(peer, handle_awaited if is_async else handle, concurrency=5)
    counts = await worker.run_until_empty(timeout=120)
    assert counts.accepted == 20
    assert most in (0, 5)


async def test_a_slow_worker_holds_no_more_records_than_it_works_on() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 50)
    go = threading.Event()
    worker = make_worker(peer, lambda record: go.wait(120), concurrency=3)
    async with worker:
        await until(lambda: worker.counts.running == 3)
        await asyncio.sleep(0.1)
        assert peer["t", 0].states.count("acquired") == 3
        go.set()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_stop_lets_handlers_end_and_gives_back_what_waits(is_async: bool) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 100)
    go, started = threading.Event(), threading.Event()

    def handle(record: ShareRecord) -> None:
        if record.offset >= 10:
            started.set()
            go.wait(120)

    async def handle_awaited(record: ShareRecord) -> None:
        if record.offset >= 10:
            started.set()
            while not go.is_set():  # noqa: ASYNC110 - the same event for both kinds
                await asyncio.sleep(0.001)

    worker = make_worker(peer, handle_awaited if is_async else handle)
    await worker.start()
    await until(started.is_set)
    await worker.stop()
    joined = asyncio.create_task(worker.join())
    # What waited here goes back before the handler has ended.
    await until(lambda: peer["t", 0].states.count("acquired") == 1)
    assert not joined.done()
    go.set()
    async with asyncio.timeout(120):
        await joined
    assert peer["t", 0].states == ["done"] * 11 + ["available"] * 89
    # No handler has seen them, so that was no delivery.
    assert peer["t", 0].counts == [1] * 11 + [0] * 89


@pytest.mark.parametrize(("versions", "delays_ms"), [((0, 0), {0}), (None, set())])
async def test_a_stop_gives_back_what_waits_as_the_node_can_hear_it(
    versions: tuple[int, int] | None, delays_ms: set[int]
) -> None:
    peer = PeerCluster({"t": 1})
    peer.served = {} if versions is None else {1090: versions}
    peer["t", 0].write(*[b"x"] * 100)
    started = asyncio.Event()

    async def handle(record: ShareRecord) -> None:
        if record.offset >= 10:
            started.set()
            await until(lambda: peer["t", 0].states.count("acquired") == 1)

    worker = make_worker(peer, handle)
    await worker.start()
    async with asyncio.timeout(120):
        await started.wait()
        await until(lambda: peer["t", 0].states.count("acquired") > 1)
        await worker.stop_and_join()
    assert peer["t", 0].states == ["done"] * 11 + ["available"] * 89
    assert set(peer["t", 0].counts) >= {1}
    assert set(peer["t", 0].delays_ms.values()) == delays_ms


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_record_that_was_delivered_often_is_here_alone(is_async: bool) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 10)
    peer["t", 0].counts = [4] * 10
    held: list[int] = []

    def handle(record: ShareRecord) -> None:
        held.append(peer["t", 0].states.count("acquired"))

    async def handle_awaited(record: ShareRecord) -> None:
        handle(record)

    await make_worker(peer, handle_awaited if is_async else handle).run_until_empty(timeout=120)
    assert peer["t", 0].states == ["done"] * 10
    assert held == [1] * 10


async def test_a_handler_that_fails_at_every_start_kills_only_what_it_has_seen() -> None:
    """Each run handles two records and hangs on the third; nothing else comes near the limit."""
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 400)
    seen: set[int] = set()
    for _ in range(5):
        hangs = asyncio.Event()
        handled = 0

        async def handle(record: ShareRecord, hangs: asyncio.Event = hangs) -> None:
            nonlocal handled
            handled += 1
            seen.add(record.offset)
            if handled == 3:
                hangs.set()
                await asyncio.Event().wait()

        worker = make_worker(peer, handle, stop_timeout=0.01)
        await worker.start()
        async with asyncio.timeout(120):
            await hangs.wait()
            await worker.stop_and_join()
    counts = peer["t", 0].counts
    assert {offset for offset, count in enumerate(counts) if count} == seen


async def test_a_handler_that_does_not_end_is_left_and_its_record_goes_back() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")

    async def handle(record: ShareRecord) -> None:
        await asyncio.Event().wait()

    worker = make_worker(peer, handle, stop_timeout=0.05)
    await worker.start()
    await until(lambda: worker.counts.running == 1)
    async with asyncio.timeout(120):
        await worker.stop_and_join()
    assert peer["t", 0].states == ["available"]
    assert worker.counts.running == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_handler_that_takes_longer_than_its_lock_keeps_its_record(is_async: bool) -> None:
    peer = PeerCluster({"t": 1})
    peer.lock_ms = 4_000
    peer["t", 0].write(b"a")
    renewed = threading.Event()

    async def handle_awaited(record: ShareRecord) -> None:
        await until(lambda: peer.renewals >= 2)

    def handle(record: ShareRecord) -> None:
        # The thread of a plain handler is blocked: whoever renews its lock is not it.
        assert renewed.wait(120)

    async def watch() -> None:
        await until(lambda: peer.renewals >= 2)
        renewed.set()

    watching = asyncio.create_task(watch())
    counts = await make_worker(peer, handle_awaited if is_async else handle).run_until_empty(timeout=120)
    await watching
    assert (counts.accepted, counts.lost) == (1, 0)
    assert peer["t", 0].counts == [1]


async def test_a_handler_that_takes_longer_than_its_timeout_is_cancelled() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")

    async def handle(record: ShareRecord) -> None:
        if record.delivery_count == 1:
            await asyncio.Event().wait()

    counts = await make_worker(peer, handle, timeout=0.05).run_until_empty(timeout=120)
    assert (counts.released, counts.accepted) == (1, 1)
    assert peer["t", 0].counts == [2]


@pytest.mark.parametrize("kind", ["cancelled", "exit"])
async def test_what_a_handler_waited_for_may_be_cancelled(kind: str) -> None:
    """That is the handler's failure, and not the end of the task that the next handlers run in."""
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 3)

    async def handle(record: ShareRecord) -> None:
        if record.delivery_count > 1:
            return
        if kind == "exit":
            raise SystemExit("not for the worker")
        other = asyncio.ensure_future(asyncio.Event().wait())
        other.cancel()
        await other

    counts = await make_worker(peer, handle, concurrency=2).run_until_empty(timeout=120)
    assert (counts.failed, counts.released, counts.accepted, counts.running) == (3, 3, 3, 0)
    assert peer["t", 0].states == ["done"] * 3


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_runner_that_ends_for_another_reason_ends_the_worker_with_it(is_async: bool) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", b"b")

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def handle(record: ShareRecord) -> None:
        raise Unspeakable

    async def handle_awaited(record: ShareRecord) -> None:
        raise Unspeakable

    worker = make_worker(peer, handle_awaited if is_async else handle, concurrency=2)
    await worker.start()
    with pytest.raises(TidemillError, match="one of its 2 runners has ended by RuntimeError: no words"):
        async with asyncio.timeout(120):
            await worker.join()
    assert peer["t", 0].states == ["available", "available"]
    assert peer.members == {}


async def test_a_retry_with_a_delay_that_cannot_be_is_a_failure_of_the_handler() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")

    def handle(record: ShareRecord) -> None:
        if record.delivery_count == 1:
            raise Retry(delay=-1)

    counts = await make_worker(peer, handle).run_until_empty(timeout=120)
    assert (counts.failed, counts.accepted) == (1, 1)


async def test_a_worker_goes_on_when_its_nodes_are_back() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    worker = make_worker(peer, judge)
    async with worker:
        await until(lambda: worker.counts.accepted == 1)
        peer.refuse("ShareGroupHeartbeat", *[NodeUnavailable("down")] * 60)
        await until(lambda: len(peer.refusals["ShareGroupHeartbeat"]) == 0)
        peer["t", 0].write(b"b")
        await until(lambda: worker.counts.accepted == 2)


async def test_what_ends_a_worker_reaches_join() -> None:
    peer = PeerCluster({"t": 1})
    worker = make_worker(peer, judge)
    await worker.start()
    peer.refuse("ShareFetch", ErrorCode.group_authorization_failed)
    with pytest.raises(ApiError, match="GROUP_AUTHORIZATION_FAILED"):
        async with asyncio.timeout(120):
            await worker.join()
    peer.refuse("ShareGroupHeartbeat", ErrorCode.group_max_size_reached)
    with pytest.raises(ApiError, match="GROUP_MAX_SIZE_REACHED"):
        await worker.start()


async def test_a_worker_is_a_decorator_and_calls_its_handler() -> None:
    peer = PeerCluster({"t": 1})
    seen: list[object] = []

    @make_worker(peer)
    def handle(record: object) -> str:
        seen.append(record)
        return "done"

    assert isinstance(handle, AsyncWorker)
    assert handle("a record") == "done"
    assert seen == ["a record"]
    with pytest.raises(ConfigError, match="has no handler"):
        await make_worker(peer).start()


async def test_a_topic_that_does_not_get_empty_is_reported_with_what_was_done() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")

    def handle(record: ShareRecord) -> None:
        raise Retry

    with pytest.raises(TimeoutError, match=r"not empty after 0\.2 seconds.*released="):
        await make_worker(peer, handle).run_until_empty(timeout=0.2)
    assert peer["t", 0].states == ["available"]


async def test_logs_have_fields_and_tell_each_failure(caplog: pytest.LogCaptureFixture) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"bad", b"flaky", key=b"k")
    with caplog.at_level(logging.INFO, "tidemill.worker"):
        await make_worker(peer, judge).run_until_empty(timeout=120)
    lines = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
    assert [line["message"] for line in lines if "outcome" not in line] == [
        "worker emails: started on share group emails",
        "worker emails: stopped after 4 records",
    ]
    rejected = next(line for line in lines if line.get("outcome") == "rejected")
    assert (rejected["level"], rejected["reason"]) == ("warning", "no such address")
    failed = [line for line in lines if line.get("outcome") == "released"]
    assert [line["delivery_count"] for line in failed] == [1, 2]
    named = {name: failed[0][name] for name in ("worker", "topic", "partition", "offset", "key")}
    assert named == {"worker": "emails", "topic": "t", "partition": 0, "offset": 1, "key": "k"}
    assert failed[0]["duration_ms"] >= 0
    assert "ValueError: not yet" in failed[0]["exception"]
