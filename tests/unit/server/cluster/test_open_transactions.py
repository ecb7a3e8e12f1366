"""Asking coordinators about open transactions: a no counts only if all of them have said it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.cluster.messages import OpenTransaction
from tidemill.errors import ApiError, NodeUnavailable
from tidemill.server.cluster.open_transactions import OpenTransactions
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.transactions.messages import TopicPartition

HERE, THERE, NOBODY = 1, 2, -1
QUESTIONS = [OpenTransaction(7, "t", 0), OpenTransaction(8, "t", 0)]


class World:
    """A node whose coordinator knows producer 7, and another one that knows ``theirs``."""

    def __init__(self, *leaders: int) -> None:
        self.theirs: set[int] = set()
        self.asked: list[tuple[int, list[int]]] = []
        placed = [SimpleNamespace(leader=leader) for leader in leaders]
        topics = {TRANSACTIONS.topic: SimpleNamespace(partitions=placed)} if leaders else {}
        self.node_id = HERE
        self.image = SimpleNamespace(topics=topics)
        self.transactions = self
        self.find = self.groups = self.moments = self.clock_ms = None
        self.unreachable = False

    async def find_under_way(
        self, shards: Collection[int], asked: Sequence[tuple[int, TopicPartition]]
    ) -> list[bool]:
        self.asked.append((HERE, list(shards)))
        return [producer_id == 7 for producer_id, _ in asked]

    async def request(self, node_id: int, make: Any, answer: Any, *, timeout_ms: int) -> Any:
        if self.unreachable:
            raise NodeUnavailable("gone")
        request = make(None)
        self.asked.append((node_id, request.shards))
        return SimpleNamespace(known=[each.producer_id in self.theirs for each in request.transactions])

    async def ask(self) -> list[bool]:
        return await OpenTransactions(cast("Any", self), cast("Any", self))._ask(QUESTIONS)


async def test_every_coordinator_is_asked_for_its_shards() -> None:
    world = World(HERE, THERE, THERE, HERE)
    assert await world.ask() == [True, False]
    assert world.asked == [(HERE, [0, 3]), (THERE, [1, 2])]
    world.theirs = {8}
    assert await world.ask() == [True, True]


@pytest.mark.parametrize("leaders", [(HERE, NOBODY), ()])
async def test_without_all_coordinators_there_is_no_answer(leaders: tuple[int, ...]) -> None:
    with pytest.raises(ApiError):
        await World(*leaders).ask()


async def test_a_coordinator_that_cannot_be_reached_has_not_said_no() -> None:
    world = World(HERE, THERE)
    world.unreachable = True
    with pytest.raises(NodeUnavailable):
        await world.ask()
