"""An event loop for blocking callers, in the hands of several threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from tidemill.client.loop_thread import LoopThread
from tidemill.errors import ConnectionClosed, TidemillError

SOON = 120


@pytest.fixture
def loop_thread() -> LoopThread:
    return LoopThread("test", "127.0.0.1:9092")


async def _seven() -> int:
    await asyncio.sleep(0)
    return 7


def test_results_and_errors_reach_the_caller(loop_thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert loop_thread.run(_seven()) == 7
    with pytest.raises(ValueError, match="no"):
        loop_thread.run(fail())
    loop_thread.close()


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_an_exit_inside_a_call_reaches_its_caller_and_nobody_else(
    loop_thread: LoopThread, raised: type[BaseException]
) -> None:
    async def leave() -> None:
        raise raised

    async def wait(for_what: asyncio.Event) -> int:
        await for_what.wait()
        return 7

    go_on = asyncio.Event()
    other = loop_thread.spawn(wait(go_on))
    with pytest.raises(raised):
        loop_thread.run(leave())
    loop_thread._loop.call_soon_threadsafe(go_on.set)
    assert other.result(SOON) == 7
    loop_thread.close()


def test_nothing_runs_after_the_close_and_closing_twice_is_fine(loop_thread: LoopThread) -> None:
    loop_thread.close()
    loop_thread.close()
    with pytest.raises(ConnectionClosed, match="this connection is closed"):
        loop_thread.run(_seven())


def test_every_call_ends_however_it_meets_the_close() -> None:
    for _ in range(30):
        loop_thread = LoopThread("test", "127.0.0.1:9092")
        ends: list[object] = []

        def call(loop_thread: LoopThread = loop_thread, ends: list[object] = ends) -> None:
            try:
                while True:
                    loop_thread.run(_seven())
            except ConnectionClosed as error:
                ends.append(error)

        threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        loop_thread.close()
        for thread in threads:
            thread.join(SOON)
        assert len(ends) == 4


def test_a_call_that_waits_is_told_of_the_close(loop_thread: LoopThread) -> None:
    waiting, told = threading.Event(), list[BaseException]()

    async def wait() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop_thread.run(wait())
        except ConnectionClosed as error:
            told.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert waiting.wait(SOON)
    loop_thread.close()
    thread.join(SOON)
    assert "closed during the call" in str(told[0])


def test_the_loops_own_thread_may_close_it_as_the_garbage_collector_does(loop_thread: LoopThread) -> None:
    async def close() -> None:
        loop_thread.close()

    # The call is told like any other that is under way.
    with pytest.raises(ConnectionClosed, match="closed during the call"):
        loop_thread.run(_then_wait(close()))
    loop_thread.close()


async def _then_wait(first: Awaitable[object]) -> None:
    await first
    await asyncio.Event().wait()


def test_a_blocking_call_on_the_loops_own_thread_is_refused(loop_thread: LoopThread) -> None:
    async def call() -> None:
        loop_thread.run(_seven())

    with pytest.raises(TidemillError, match="use connect_async"):
        loop_thread.run(call())
    loop_thread.close()
