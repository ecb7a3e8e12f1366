"""The pace of a worker thread, on a clock that only its own sleeping moves."""

from __future__ import annotations

from tidemill.log.pace import Pace


class Clock:
    """Time and what was slept."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_the_rate_is_kept_on_average() -> None:
    clock = Clock()
    pace = Pace(1_000_000, clock=clock, sleep=clock.sleep)
    for _ in range(1_000):
        pace.spend(10_000)
    assert abs(clock.now - 110.0) < 0.1


def test_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    pace = Pace(1_000_000, clock=clock, sleep=clock.sleep)
    clock.now += 60
    pace.spend(1_000_000)
    assert sum(clock.sleeps) >= 0.9


def test_without_a_limit_nothing_is_slept_for_bytes() -> None:
    clock = Clock()
    Pace(0, clock=clock, sleep=clock.sleep).spend(10**12)
    assert clock.sleeps == []


def test_a_breath_is_taken_once_a_millisecond() -> None:
    clock = Clock()
    pace = Pace(0, clock=clock, sleep=clock.sleep)
    for _ in range(100):
        clock.now += 0.0001
        pace.breathe()
    assert 8 <= len(clock.sleeps) <= 10


def test_a_throttle_that_has_ended_sleeps_no_more() -> None:
    pace = Pace(1)
    pace.end()
    pace.spend(10**6)
