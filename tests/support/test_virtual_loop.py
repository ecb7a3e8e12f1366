"""Virtual time, blocking work at seeded moments, processes that can be killed."""

from __future__ import annotations

import asyncio
import time

import pytest

from support.virtual_loop import VirtualLoop, current_loop, run_virtual


async def write_lines(lines: list[tuple[str, int]], name: str) -> None:
    for number in range(10):
        await asyncio.to_thread(lines.append, (name, number))
        await asyncio.sleep(0.001)


def interleaving(seed: int) -> list[tuple[str, int]]:
    async def main() -> list[tuple[str, int]]:
        lines: list[tuple[str, int]] = []
        await asyncio.gather(write_lines(lines, "a"), write_lines(lines, "b"))
        return lines

    return run_virtual(main, seed=seed)


def test_a_day_passes_in_no_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(86_400)
        return loop.time() - began

    real = time.monotonic()
    assert run_virtual(main, seed=1) == pytest.approx(86_400)
    assert time.monotonic() - real < 60


def test_timers_come_in_the_order_of_their_times() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def after(seconds: int) -> None:
            await asyncio.sleep(seconds)
            order.append(seconds)

        await asyncio.gather(after(300), after(1), after(20))
        return order

    assert run_virtual(main, seed=1) == [1, 20, 300]


def test_what_was_due_while_time_jumped_comes_after_it() -> None:
    async def main() -> float:
        loop = current_loop()
        came: asyncio.Future[float] = loop.create_future()
        loop.call_later(10, lambda: came.set_result(loop.time()))
        loop.jump(1_000)
        return await came

    assert run_virtual(main, seed=1) == pytest.approx(1_000)


def test_a_seed_gives_one_interleaving_of_blocking_work() -> None:
    assert interleaving(1) == interleaving(1)
    assert len({tuple(interleaving(seed)) for seed in range(5)}) > 1


def test_a_pool_of_one_keeps_the_order() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        pool = current_loop().pool("one", 1)
        await asyncio.gather(*(asyncio.wrap_future(pool.submit(done.append, number)) for number in range(20)))
        return done

    assert run_virtual(main, seed=3) == list(range(20))


def test_a_pool_of_many_does_not() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        pool = current_loop().pool("many", 4)
        await asyncio.gather(*(asyncio.wrap_future(pool.submit(done.append, number)) for number in range(20)))
        return done

    assert run_virtual(main, seed=3) != list(range(20))


def test_work_that_is_throttled_takes_longer() -> None:
    async def main() -> tuple[float, float]:
        loop = current_loop()
        pace = loop.pace(1_000)
        await asyncio.to_thread(pace.spend, 60_000)
        after = loop.time()
        await asyncio.to_thread(loop.pace(0).spend, 60_000)
        return after, loop.time() - after

    throttled, unlimited = run_virtual(main, seed=1)
    assert 60 <= throttled < 62
    assert unlimited < 2


def test_an_error_of_blocking_work_reaches_who_waits() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        await asyncio.to_thread(fail)

    with pytest.raises(ValueError, match="no"):
        run_virtual(main, seed=1)


def test_a_shutdown_that_waits_has_the_rest_done() -> None:
    async def main() -> list[int]:
        done: list[int] = []
        pool = current_loop().pool("one", 1)
        for number in range(3):
            pool.submit(done.append, number)
        pool.shutdown(wait=True)
        return done

    assert run_virtual(main, seed=1) == [0, 1, 2]


def test_nothing_of_a_killed_process_goes_on() -> None:
    async def main() -> list[str]:
        loop, happened = current_loop(), list[str]()

        async def live() -> None:
            loop.call_later(5, happened.append, "timer")
            pool = loop.pool("work", 1)
            pool.submit(happened.append, "before")
            await asyncio.sleep(1)
            pool.submit(happened.append, "work")
            await asyncio.sleep(1)
            happened.append("task")

        process = loop.process("node")
        process.start(live())
        await asyncio.sleep(1)
        await process.kill()
        await asyncio.sleep(100)
        return happened

    assert run_virtual(main, seed=1) == ["before"]


def test_a_killed_process_waits_for_no_thread() -> None:
    async def main() -> None:
        process = current_loop().process("node")

        async def patient() -> None:
            running = asyncio.get_running_loop().run_in_executor(None, lambda: None)
            try:
                await asyncio.shield(running)
            finally:
                await asyncio.wait([running])
                running.exception()

        process.start(patient())
        await asyncio.sleep(0)
        await process.kill()

    run_virtual(main, seed=1)


def test_a_wait_that_cannot_end_is_told() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        run_virtual(main, seed=1)


def test_a_failure_in_a_callback_is_not_lost() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(AssertionError) as caught:
        run_virtual(main, seed=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_it_is_told_from_a_real_loop() -> None:
    async def main() -> bool:
        return isinstance(asyncio.get_running_loop(), VirtualLoop)

    assert run_virtual(main, seed=1)
