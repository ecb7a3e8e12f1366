"""Writes that are being looked at when the node stops."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.server.broker import Broker


async def test_a_stop_gives_up_writes_that_take_too_long_to_look_at(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidemill.server.broker.gated_writes._CLOSE_SECONDS", 0.01)
    endless = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    broker.gated_writes["t", 0] = endless  # type: ignore[assignment]
    endless.add_done_callback(lambda _: broker.gated_writes.clear())
    await broker.close()
    assert endless.cancelled()
    assert "1 writes that were not acknowledged are given up" in caplog.text
