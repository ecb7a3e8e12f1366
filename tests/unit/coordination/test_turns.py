"""Long work of the event loop in short turns."""

from __future__ import annotations

import asyncio
import random

from tidemill.coordination.turns import SLICE_SECONDS, begin_slice, sorted_in_slices


async def test_sorting_very_many_names_lets_others_have_their_turn() -> None:
    names = [f"name-{number}" for number in range(100_000)]
    random.Random(1).shuffle(names)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.get_running_loop().create_task(others())
    begin_slice()
    assert await sorted_in_slices(names) == sorted(names)
    other.cancel()
    assert turns > 3, f"slices of {SLICE_SECONDS} s"
    assert await sorted_in_slices(()) == []
