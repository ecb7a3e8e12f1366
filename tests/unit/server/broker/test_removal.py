"""Removing files in a thread."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from support.broker_topics import settle_deletions
from tidemill.errors import StorageError
from tidemill.server.broker import Broker


async def test_files_that_cannot_be_removed_are_reported(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(topic: str, topic_id: UUID) -> None:
        raise StorageError("cannot remove it")

    monkeypatch.setattr(broker.replicas, "remove_files", fail)
    broker.removal.remove_topic("t", uuid4())
    await settle_deletions(broker)
    assert "cannot remove it" in caplog.text
