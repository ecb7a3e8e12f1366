"""The catalogue: topics are created and deleted, with the real disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from support.broker_topics import create, refused, settle_deletions, write
from tidemill.control.commands import CreateTopic, DeleteTopic
from tidemill.errors import ApiError, DiskFull, ErrorCode
from tidemill.server.broker import Broker


async def test_a_deleted_topic_takes_its_files_along(broker: Broker, tmp_path: Path) -> None:
    await create(broker, "t")
    await write(broker, "t", "a")
    await broker.catalogue.delete_topic(broker.find.topic("t"))
    await settle_deletions(broker)
    assert list((tmp_path / "logs" / "t").iterdir()) == []
    assert refused(broker.find.topic, "t") == ErrorCode.unknown_topic_or_partition


async def test_a_refused_deletion_leaves_no_marker(broker: Broker, tmp_path: Path) -> None:
    topic_id = await create(broker, "t")
    await write(broker, "t", "a")
    stale = broker.find.topic("t")
    await broker.controller.submit(DeleteTopic(name="t"))
    with pytest.raises(ApiError):
        await broker.catalogue.delete_topic(stale)
    names = [path.name for path in (tmp_path / "logs" / "t").iterdir()]
    assert names == [f"{topic_id.hex}-0"]


async def test_a_topic_that_somebody_else_creates_first_is_not_refused(broker: Broker) -> None:
    theirs = CreateTopic(name="t", topic_id=uuid4(), partitions=3, replication=1)
    _, refusals = await asyncio.gather(
        broker.controller.submit(theirs), broker.catalogue.auto_create(["t", "u", "not a name"])
    )
    assert list(refusals) == ["not a name"]
    assert refusals["not a name"].code == ErrorCode.invalid_topic_exception
    assert len(broker.find.topic("t").partitions) == 3
    assert len(broker.find.topic("u").partitions) == broker.settings.default_partitions


async def test_what_coordinators_keep_of_a_topic_goes_with_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []

    async def forget(topics: list[str]) -> None:
        forgotten.extend(topics)

    monkeypatch.setattr(broker.coordinators, "on_topics_deleted", forget)
    await create(broker, "t")
    await broker.catalogue.delete_topic(broker.find.topic("t"))
    assert forgotten == ["t"]


async def test_a_deletion_on_a_full_disk_is_done_and_coordinators_forget_when_there_is_room(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(topics: list[str]) -> None:
        raise DiskFull("no room")

    later: list[object] = []
    monkeypatch.setattr(broker.coordinators, "on_topics_deleted", no_room)
    monkeypatch.setattr(broker.disk, "when_writable", later.append)
    await create(broker, "t")
    await broker.catalogue.delete_topic(broker.find.topic("t"))
    assert "t" not in broker.image.topics
    assert later == [broker.coordinators.forget_missing_topics]
