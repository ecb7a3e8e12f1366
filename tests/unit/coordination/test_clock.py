"""The clocks: those that sessions and timers go by take no notice of somebody who sets the wall clock."""

from __future__ import annotations

import asyncio

import pytest

from support.virtual_loop import current_loop, run_virtual
from tidemill.coordination.clock import LoopClock

START_MS = 1_700_000_000_000
MONTH_MS = 30 * 24 * 60 * 60 * 1000


@pytest.mark.parametrize("jump_ms", [-MONTH_MS, MONTH_MS])
def test_the_loops_clock_does_not_follow_a_jump_of_the_wall_clock(jump_ms: int) -> None:
    async def story() -> None:
        wall_ms = START_MS
        clock = LoopClock(lambda: wall_ms)
        fired: list[float] = []
        begun = current_loop().time()
        clock.call_at(clock.now_ms() + 10_000, lambda: fired.append(current_loop().time() - begun))
        await asyncio.sleep(4)
        wall_ms += jump_ms
        assert clock.now_ms() == pytest.approx(START_MS + 4_000, abs=2)
        await asyncio.sleep(60)
        assert fired == [pytest.approx(10, abs=0.01)]
        assert clock.now_ms() == pytest.approx(START_MS + 64_000, abs=2)

    run_virtual(story, seed=1)
