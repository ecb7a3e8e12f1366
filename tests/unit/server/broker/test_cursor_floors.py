"""Retention and cursors: a warning before it passes one, or waiting where the topic says so; and lag."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from support.broker_topics import create, leader, settle_deletions, write
from tidemill.cursors.coordinator import Listed
from tidemill.cursors.state import Given, Next
from tidemill.cursors.stored import StoredCursor
from tidemill.errors import NodeUnavailable
from tidemill.server.broker import Broker
from tidemill.server.coordinators.cursors import CURSORS
from tidemill.server.cursor_lag import CursorLag

HOUR_MS = 3_600_000


async def place(broker: Broker, name: str, topic: str, offset: int) -> None:
    """A cursor that has read up to an offset."""
    await broker.coordinators.prepare(CURSORS)
    found = broker.find.topic(topic)
    about = StoredCursor(topic, found.id, b"r", f"topic {topic}", False, 0)
    start = {0: Given(0, -1, False, b"")}
    _, held = await broker.cursors.take(
        name, about, start, owner="me", lease_ms=1_000, force=True, origin=UUID(int=1)
    )
    if offset:
        epoch = held[0].position.epoch
        await broker.cursors.commit(name, {0: Next(epoch, 0, Given(offset, 0, True, b""))})


async def old_log(broker: Broker, topic: str, **configs: str) -> None:
    """Three segments: two that are too old, and a new one."""
    await create(
        broker, topic, retention_ms=str(HOUR_MS), internal_segment_bytes="300", partitions=1, **configs
    )
    for age_ms in (3 * HOUR_MS, 2 * HOUR_MS, 0):
        await write(broker, topic, "x" * 200, timestamp_ms=broker.clock_ms() - age_ms)


async def test_a_topic_that_waits_keeps_what_its_slowest_cursor_has_not_read(broker: Broker) -> None:
    await old_log(broker, "t", tidemill_retention_waits_for_cursors="true")
    await place(broker, "fast", "t", 3)
    await place(broker, "slow", "t", 1)
    await broker.log_cleanup.apply_retention()
    assert leader(broker, "t").log_start_offset == 1
    await broker.cursors.delete("slow", force=True)
    await broker.log_cleanup.apply_retention()
    await settle_deletions(broker)
    assert leader(broker, "t").log_start_offset == 2


async def test_other_topics_warn_once_before_they_delete(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await old_log(broker, "t")
    await place(broker, "slow", "t", 1)
    with caplog.at_level(logging.WARNING):
        await broker.cursor_floors.refresh()
        for _ in range(2):
            broker.cursor_floors.floor(leader(broker, "t"), broker.clock_ms())
    (warning,) = [each.message for each in caplog.records if "retention deletes" in each.message]
    assert "t-0 soon that cursor 'slow' has not read: it is at offset 1, and what goes ends at 2" in warning
    assert broker.cursor_floors.at_risk == 1
    await broker.log_cleanup.apply_retention()
    assert leader(broker, "t").log_start_offset == 2


async def test_a_cursor_is_warned_of_some_time_before_its_records_go(broker: Broker) -> None:
    await create(broker, "t", retention_ms=str(HOUR_MS))
    await write(broker, "t", "x", timestamp_ms=broker.clock_ms() - HOUR_MS + 60_000)
    await place(broker, "slow", "t", 0)
    await broker.log_cleanup.apply_retention()
    assert leader(broker, "t").log_start_offset == 0
    assert broker.cursor_floors.at_risk == 1


async def test_a_cursor_that_has_read_everything_is_at_no_risk(broker: Broker) -> None:
    await old_log(broker, "t")
    await place(broker, "fast", "t", 3)
    await broker.log_cleanup.apply_retention()
    assert broker.cursor_floors.at_risk == 0


async def test_while_a_coordinator_does_not_answer_a_topic_that_waits_keeps_everything(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_log(broker, "t", tidemill_retention_waits_for_cursors="true")
    await place(broker, "fast", "t", 3)

    async def fail(topic: str | None = None) -> Any:
        raise NodeUnavailable("no")

    monkeypatch.setattr(broker.cursors, "listing", fail)
    await broker.log_cleanup.apply_retention()
    assert leader(broker, "t").log_start_offset == 0


async def test_while_a_shard_has_no_coordinator_a_topic_that_waits_keeps_everything(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await old_log(broker, "t", tidemill_retention_waits_for_cursors="true")
    await place(broker, "slow", "t", 1)
    listing = broker.cursors.listing

    async def after_the_lead_has_moved(topic: str | None = None) -> Listed:
        listed = await listing(topic)
        led = [shard for shard in listed.shards if shard != broker.cursors.partition_of("slow")]
        return Listed([], led)

    with monkeypatch.context() as patched:
        patched.setattr(broker.cursors, "listing", after_the_lead_has_moved)
        await broker.log_cleanup.apply_retention()
        assert leader(broker, "t").log_start_offset == 0
    await broker.log_cleanup.apply_retention()
    assert leader(broker, "t").log_start_offset == 1


async def test_lag_is_measured_in_offsets_and_seconds(broker: Broker) -> None:
    await create(broker, "t")
    await write(broker, "t", "a", "b", "c")
    await place(broker, "slow", "t", 1)
    await place(broker, "fast", "t", 3)
    await broker.cursors.alter("fast", paused=True, positions={}, force=False, origin=UUID(int=2))
    report = await CursorLag(broker, 10).measure()
    assert (report.cursors, report.paused, report.left_out) == (2, 1, 0)
    assert report.records == {("fast", "t"): 0, ("slow", "t"): 2}
    assert report.seconds["fast", "t"] == 0
    assert report.seconds["slow", "t"] >= 0
    passed: Mapping[tuple[str, str], int] = report.passed
    assert passed == {("fast", "t"): 3, ("slow", "t"): 1}
    few = await CursorLag(broker, 1).measure()
    assert (len(few.records), few.left_out) == (1, 1)
