"""The watchdog of the event loop, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tidemill.server.watchdog import WATCHDOG_METRICS, LoopWatchdog, TurnStart

METADATA = 3
PRODUCE = 0


class Clock:
    """Time that passes when the test says so; ``cpu`` is the processor time of the loop."""

    now = 100.0
    cpu = 5.0

    def __call__(self) -> float:
        return self.now


class Asker:
    who = "app at 10.0.0.7"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> LoopWatchdog:
    return LoopWatchdog(clock, lambda: clock.cpu)


def turn(
    watchdog: LoopWatchdog, clock: Clock, api_key: int, seconds: float, *, cpu_seconds: float = 0.0
) -> None:
    start = TurnStart(clock.now, clock.cpu)
    clock.now += seconds
    clock.cpu += cpu_seconds
    watchdog.end_turn(start, api_key, Asker())


def sample(watchdog: LoopWatchdog, name: str, api: str) -> float | None:
    (row,) = [row for row in WATCHDOG_METRICS if row.name == name]
    found = [each.value for each in row.samples(watchdog) if each.labels == (("api", api),)]
    return found[0] if found else None


def test_the_longest_turn_is_kept_with_the_name_of_its_api(watchdog: LoopWatchdog, clock: Clock) -> None:
    turn(watchdog, clock, METADATA, 0.005)
    turn(watchdog, clock, METADATA, 0.015)
    turn(watchdog, clock, PRODUCE, 0.010)
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "Metadata") == pytest.approx(0.015)
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "Produce") == pytest.approx(0.010)
    assert sample(watchdog, "tidemill_loop_longest_turn_seconds", "Metadata") == pytest.approx(0.015)
    assert sample(watchdog, "tidemill_loop_slow_turns_total", "Metadata") is None


def test_turns_above_20_ms_are_counted(watchdog: LoopWatchdog, clock: Clock) -> None:
    for seconds in (0.019, 0.021, 0.5):
        turn(watchdog, clock, METADATA, seconds)
    assert sample(watchdog, "tidemill_loop_slow_turns_total", "Metadata") == 2


def test_the_recent_longest_turn_is_forgotten_the_longest_ever_is_not(
    watchdog: LoopWatchdog, clock: Clock
) -> None:
    turn(watchdog, clock, METADATA, 0.1)
    for _ in range(2):
        clock.now += 61
        turn(watchdog, clock, PRODUCE, 0.001)
        watchdog.beaten(0.0, 0.0)
    assert sample(watchdog, "tidemill_loop_longest_turn_seconds", "Produce") == pytest.approx(0.001)
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "Metadata") == pytest.approx(0.1)


def test_a_late_beat_that_no_request_explains_is_something_else(watchdog: LoopWatchdog, clock: Clock) -> None:
    watchdog.beaten(0.3, 0.0)
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "other") == pytest.approx(0.3)


def test_a_late_beat_that_a_request_explains_is_not_counted_twice(
    watchdog: LoopWatchdog, clock: Clock
) -> None:
    turn(watchdog, clock, METADATA, 0.3)
    watchdog.beaten(0.29, 0.0)
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "other") is None


def test_the_processor_time_of_something_else_is_kept_too(watchdog: LoopWatchdog, clock: Clock) -> None:
    turn(watchdog, clock, METADATA, 0.010, cpu_seconds=0.010)
    watchdog.beaten(0.050, 0.045)
    assert sample(watchdog, "tidemill_loop_turn_cpu_seconds_max", "other") == pytest.approx(0.035)
    watchdog.beaten(0.001, 0.020)
    assert sample(watchdog, "tidemill_loop_turn_cpu_seconds_max", "other") == pytest.approx(0.035)


def test_work_before_a_beat_was_due_has_not_delayed_it(watchdog: LoopWatchdog, clock: Clock) -> None:
    watchdog.beaten(0.004, 0.050)
    assert sample(watchdog, "tidemill_loop_turn_cpu_seconds_max", "other") == pytest.approx(0.004)


async def test_the_heart_beats_faster_for_a_second_after_a_request(
    watchdog: LoopWatchdog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            turn(watchdog, clock, METADATA, 0.001)
        if len(slept) == 203:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await watchdog.beat()
    assert slept == [0.050, *[0.005] * 200, 0.050, 0.050]


def test_a_long_turn_is_told_in_the_log_but_not_each_of_many(
    watchdog: LoopWatchdog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            turn(watchdog, clock, METADATA, 0.201, cpu_seconds=0.201)
        assert [record.getMessage() for record in caplog.records] == [
            "the event loop stood still for 201 ms: a request of Metadata by app at 10.0.0.7; everybody "
            "waited (tidemill_loop_* in /metrics)"
        ]
        clock.now += 10
        turn(watchdog, clock, METADATA, 0.201, cpu_seconds=0.201)
    assert "and 49 more times" in caplog.records[-1].getMessage()


def test_a_long_turn_of_a_loop_that_only_waited_is_not_told_in_the_log(
    watchdog: LoopWatchdog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        turn(watchdog, clock, METADATA, 3.0, cpu_seconds=0.1)
        watchdog.beaten(6.0, 0.2)
    assert not caplog.records
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "other") == pytest.approx(3.0)


def test_work_that_no_request_explains_is_told_in_the_log(
    watchdog: LoopWatchdog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    turn(watchdog, clock, METADATA, 0.1, cpu_seconds=0.1)
    watchdog.beaten(0.4, 0.35)
    assert "300 ms: no request explains it" in caplog.text


async def test_each_step_of_a_handler_is_timed_alone(watchdog: LoopWatchdog, clock: Clock) -> None:
    async def handler() -> str:
        clock.now += 0.030
        await asyncio.sleep(0)
        clock.now += 0.040
        return "answer"

    assert await asyncio.create_task(watchdog.watch(handler(), METADATA, Asker())) == "answer"
    assert sample(watchdog, "tidemill_loop_slow_turns_total", "Metadata") == 2
    assert sample(watchdog, "tidemill_loop_turn_seconds_max", "Metadata") == pytest.approx(0.040)


async def test_a_watched_handler_can_fail_and_be_cancelled(watchdog: LoopWatchdog) -> None:
    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await watchdog.watch(failing(), METADATA, Asker())
    ended = asyncio.Event()

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(watchdog.watch(waiting(), METADATA, Asker()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
