"""The stories of ``test_node_faults``, in which another node also leads for a while, and then this one again.

The other node writes nothing, so nothing is cut. What must hold all the same: whoever waits is answered, no
acknowledged record, transaction or offset is lost, and coordinators begin anew from their logs, also from
what was not committed when they were taken over.
"""

from __future__ import annotations

import asyncio

import pytest

from sim.test_node_faults import TOPIC, Story, run_story
from support.leadership import elect
from tidemill.replication.partition import Partition
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS

SEEDS = 40
SEEDS_PER_TEST = 20
OTHER = 2


class LeadershipStory(Story):
    """A story with elections."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.elections = 0

    async def _start(self) -> None:
        await super()._start()
        await self._take_back()

    async def _step(self) -> None:
        if self.rng.random() < 0.2:
            await self._hand_over()
        await super()._step()

    async def _hand_over(self) -> None:
        """Another node leads some partitions, for no time at all or for a little."""
        image = self.node.broker.image
        for name in (TOPIC, GROUPS.topic, TRANSACTIONS.topic):
            if name in image.topics and self.rng.random() < 0.5:
                for index in range(len(image.topics[name].partitions)):
                    await elect(self.node.broker.controller, name, index, OTHER)
                    self._check_let_go(name, index)
                    self.elections += 1
        await asyncio.sleep(self.rng.choice((0, 0.002, 0.05)) * self.rng.random())
        await self._take_back()

    def _check_let_go(self, name: str, index: int) -> None:
        """Nobody waits for a partition that another node leads, and its coordinator has stopped."""
        broker = self.node.broker
        partition = broker.replicas.peek(broker.image.topics[name].id, index)
        if partition is not None:
            waiting = len(partition._waiters) + len(partition._durable_waiters)
            assert not waiting, "somebody waits for what another node leads"
        for row, coordinator in ((GROUPS, broker.groups), (TRANSACTIONS, broker.transactions)):
            if row.topic == name:
                serving = [shard.partition for shard in coordinator._shards.loaded()]
                assert index not in serving, "a coordinator serves what another node leads"

    async def _take_back(self) -> None:
        node = self.node.broker
        for topic in node.image.topics.values():
            for index, placed in enumerate(topic.partitions):
                if placed.leader != node.node_id:
                    await elect(node.controller, topic.name, index, node.node_id)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, SEEDS_PER_TEST))
def test_leadership_that_goes_and_comes_back_loses_nothing(first_seed: int) -> None:
    elections = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        story, violations = run_story(LeadershipStory, seed)
        assert not violations, f"seed {seed}: {violations}"
        elections += story.elections
    assert elections >= SEEDS_PER_TEST, "the stories have too few elections to show anything"


@pytest.mark.parametrize(
    ("name", "breaks"), [("_fail_waiters", "somebody waits"), ("depend", "a coordinator serves")]
)
def test_ablation_letting_go_of_leadership_is_needed(
    monkeypatch: pytest.MonkeyPatch, name: str, breaks: str
) -> None:
    monkeypatch.setattr(Partition, name, lambda *_: None)

    def run_all() -> None:
        for seed in range(SEEDS):
            run_story(LeadershipStory, seed)

    with pytest.raises(AssertionError, match=breaks):
        run_all()
