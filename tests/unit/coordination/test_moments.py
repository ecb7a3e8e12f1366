"""The gate between changes of several partitions and those who take a moment of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.coordination import settle
from tidemill.coordination.moments import MomentGate


class Visitor:
    """Somebody who goes in when it may, and out when the test says so."""

    def __init__(self, gate: MomentGate, *, wants_moment: bool) -> None:
        self.wants_moment = wants_moment
        self.inside = False
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate.moment() if wants_moment else gate.changing()))

    async def _visit(self, admission: Any) -> None:
        async with admission:
            self.inside = True
            try:
                await self._leave.wait()
            finally:
                self.inside = False

    async def leave(self) -> None:
        self._leave.set()
        await settle()

    async def cancel(self) -> None:
        self.task.cancel()
        await settle()


async def visit(gate: MomentGate, *, wants_moment: bool) -> Visitor:
    visitor = Visitor(gate, wants_moment=wants_moment)
    await settle()
    return visitor


async def test_changes_go_on_side_by_side_and_a_moment_waits_for_all_of_them() -> None:
    gate = MomentGate()
    changes = [await visit(gate, wants_moment=False) for _ in range(3)]
    assert all(change.inside for change in changes)
    moment = await visit(gate, wants_moment=True)
    for change in changes:
        assert not moment.inside
        await change.leave()
    assert moment.inside
    await moment.leave()


async def test_neither_starves_the_other() -> None:
    gate = MomentGate()
    first = await visit(gate, wants_moment=False)
    moment = await visit(gate, wants_moment=True)
    later = await visit(gate, wants_moment=False)
    assert (moment.inside, later.inside) == (False, False), "the later change waits behind the moment"
    await first.leave()
    assert (moment.inside, later.inside) == (True, False)
    await moment.leave()
    assert later.inside
    await later.leave()


async def test_whoever_gives_up_waiting_holds_nobody_up() -> None:
    gate = MomentGate()
    first = await visit(gate, wants_moment=False)
    moment = await visit(gate, wants_moment=True)
    later = await visit(gate, wants_moment=False)
    await moment.cancel()
    assert later.inside
    await first.leave()
    await later.leave()


async def test_a_change_that_takes_too_long_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    gate = MomentGate(change_seconds_max=0.01)
    change = await visit(gate, wants_moment=False)
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(120), gate.moment():
            assert change.inside
    assert "readers do not wait for it any more" in caplog.text
    await change.leave()
    async with asyncio.timeout(120), gate.moment():
        pass


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["change", "moment", "leave", "cancel"]), st.integers(0, 9)), max_size=40
    )
)
def test_a_moment_is_alone_and_everybody_gets_in_in_the_end(steps: list[tuple[str, int]]) -> None:
    async def story() -> None:
        gate = MomentGate()
        here: list[Visitor] = []
        for step, number in steps:
            if step in ("change", "moment"):
                here.append(await visit(gate, wants_moment=step == "moment"))
            elif here:
                visitor = here[number % len(here)]
                if step == "cancel":
                    await visitor.cancel()
                    here.remove(visitor)
                elif visitor.inside:
                    await visitor.leave()
                    here.remove(visitor)
            inside = [each for each in here if each.inside]
            assert len(inside) == 1 or not any(each.wants_moment for each in inside)
            assert inside or not here
        while here:
            visitor = next(each for each in here if each.inside)
            await visitor.leave()
            here.remove(visitor)

    asyncio.run(story())
