"""The lag of share groups is known as long as they exist, also when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.share_world import ACCEPT, GROUP, REJECT, RELEASE, ShareWorld
from tidemill.server.broker import Broker
from tidemill.server.share.lag import SHARE_LAG_METRICS, ShareLag


@pytest.fixture
async def share(make_broker: Callable[..., Awaitable[Broker]]) -> ShareWorld:
    world = ShareWorld(await make_broker(), stored=True)
    await world.begin(2)
    return world


async def measured(share: ShareWorld, series_max: int = 10) -> dict[tuple[str, ...], float]:
    """The samples of the metrics by name, or group."""
    report = await ShareLag(share.broker, series_max).measure()
    return {
        tuple(said for _, said in sample.labels) or (row.name,): sample.value
        for row in SHARE_LAG_METRICS
        for sample in row.samples(report)
    }


async def test_the_lag_of_a_group_is_told_when_its_last_member_has_left(share: ShareWorld) -> None:
    await share.write(*"abcdef")
    await share.write("g", index=1)
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((1, 3, [ACCEPT, REJECT, RELEASE])) == 0
    assert (await measured(share))[GROUP,] == 5
    await member.close()
    while share.broker.share.of_group(GROUP):  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.001)
    await share.write("h", index=1)
    assert (await measured(share))[GROUP,] == 6


async def test_a_group_whose_state_is_gone_has_no_lag(share: ShareWorld) -> None:
    await share.write("a")
    for index in range(2):
        await share.persister.delete(share.key(index=index))
    assert await measured(share) == {("tidemill_share_lag_series_left_out",): 0}


async def test_of_too_many_groups_the_largest_lags_are_shown(share: ShareWorld) -> None:
    await share.write(*"abc")
    for group, start in (("g0", 0), ("g1", 1), ("g3", 3)):
        await share.initialize(group, start=start)
    assert await measured(share, series_max=2) == {
        (GROUP,): 3,
        ("g0",): 3,
        ("tidemill_share_lag_series_left_out",): 2,
    }
