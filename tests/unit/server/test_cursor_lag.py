"""Lag of cursors of a real node: known after a restart without opening logs, not shown where unknown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.lag_nodes import StartNode, make_topic, nodes_on, scrape
from support.prometheus_text import Family
from tidemill.cursors.state import Given, Next
from tidemill.cursors.stored import StoredCursor
from tidemill.errors import SyncFailed
from tidemill.server.broker.finding import PartitionFinder
from tidemill.server.coordinators.cursors import CURSORS
from tidemill.server.node import Node


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartNode]:
    async with nodes_on(tmp_path) as begin:
        yield begin


async def place(node: Node, name: str, topic: str, offsets: dict[int, int]) -> None:
    """A cursor that has read up to these offsets."""
    cursors = node.broker.cursors
    await node.broker.coordinators.prepare(CURSORS)
    about = StoredCursor(topic, node.broker.find.topic(topic).id, b"r", f"topic {topic}", False, 0)
    starts = {index: Given(0, -1, False, b"") for index in offsets}
    _, held = await cursors.take(
        name, about, starts, owner="me", lease_ms=1_000, force=True, origin=UUID(int=1)
    )
    steps = {
        index: Next(held[index].position.epoch, 0, Given(offset, 0, True, b""))
        for index, offset in offsets.items()
        if offset
    }
    if steps:
        await cursors.commit(name, steps)


def lags(found: dict[str, Family], what: str = "records") -> dict[str, float]:
    """By cursor; empty if there is no series."""
    family = found.get(f"tidemill_cursor_lag_{what}")
    samples = {} if family is None else family.samples
    return {dict(labels)["cursor"]: value for (_, labels), value in samples.items()}


async def test_a_cursor_that_nobody_moves_has_the_same_lag_after_a_restart(start: StartNode) -> None:
    node = await start()
    await make_topic(node, "t", [50, 3])
    await place(node, "dead", "t", {0: 10, 1: 3})
    await place(node, "done", "t", {0: 50, 1: 3})
    assert lags(await scrape(node)) == {"dead": 40, "done": 0}
    await node.stop()
    again = await start()
    topic = again.broker.find.topic("t")
    for _ in range(2):
        found = await scrape(again)
        assert lags(found) == {"dead": 40, "done": 0}
        assert lags(found, "seconds")["dead"] > 0
        assert [again.broker.replicas.peek(topic.id, index) for index in range(2)] == [None] * 2
    partition = again.broker.find.partition(topic, 0)
    partition.append(plain_batch("v"), again.broker.clock_ms())
    await again.broker.flusher.drain([partition])
    assert lags(await scrape(again)) == {"dead": 41, "done": 1}, "an open log is asked itself"


async def test_a_cursor_over_a_stopped_partition_or_a_deleted_topic_has_no_lag(start: StartNode) -> None:
    node = await start()
    await make_topic(node, "t", [5, 3])
    await make_topic(node, "gone", [4])
    await place(node, "both", "t", {0: 1, 1: 1})
    await place(node, "second", "t", {1: 1})
    await place(node, "late", "gone", {0: 1})
    node.broker.find.partition(node.broker.find.topic("t"), 0).flush_failed(SyncFailed("a bad disk"))
    await node.broker.catalogue.delete_topic(node.broker.find.topic("gone"))
    found = await scrape(node)
    assert lags(found) == {"second": 2}, "half of a lag would look like all of it"
    assert set(lags(found, "seconds")) == {"second"}
    assert found["tidemill_cursors"].value() == 3


async def test_a_cursor_over_a_topic_that_other_nodes_hold_has_no_lag(
    start: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start()
    await make_topic(node, "t", [5])
    await place(node, "far", "t", {0: 1})
    await node.stop()
    again = await start()
    monkeypatch.setattr(PartitionFinder, "held_placement", lambda *_: None)
    assert lags(await scrape(again)) == {}
