"""Housekeeping: chores run side by side, again and again, whatever one of them does."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.server.broker import Broker
from tidemill.server.broker.housekeeping import Chore, Housekeeping


async def test_a_chore_that_fails_is_logged_by_its_name_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = 0
    enough = asyncio.Event()

    async def fail() -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            enough.set()
        raise ValueError("on purpose")

    housekeeping = Housekeeping([Chore("the washing-up", 1, fail)])
    housekeeping.start()
    async with asyncio.timeout(120):
        await enough.wait()
    await housekeeping.stop()
    assert "the washing-up failed; it is tried again later" in caplog.text
    assert "on purpose" in caplog.text


async def test_a_chore_that_takes_long_does_not_hold_up_others_and_is_ended_by_a_stop() -> None:
    begun, ended, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def quick() -> None:
        done.set()

    housekeeping = Housekeeping([Chore("endless", 1, endless), Chore("quick", 1, quick)])
    housekeeping.start()
    async with asyncio.timeout(120):
        await begun.wait()
        done.clear()
        await done.wait()
    await housekeeping.stop()
    assert ended.is_set()


async def test_a_broker_has_chores_for_logs_tables_and_every_coordinator(broker: Broker) -> None:
    chores = {chore.name: chore.interval_ms for chore in broker.chores()}
    settings = broker.settings
    assert chores == {
        "retention": settings.log_retention_check_interval_ms,
        "compaction": settings.compaction_check_interval_ms,
        "the upkeep of tables": settings.kv_check_interval_ms,
        "the expiry of groups": 600_000,
        "the expiry of transactions": 3_600_000,
        "the expiry of cursors": 3_600_000,
        "the expiry of share states": 300_000,
        "share groups": 300_000,
        "dead letters that are due": 5_000,
    }
