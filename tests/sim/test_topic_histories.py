"""Topics that are created, altered and deleted through all nodes at once, under faults: invariant 9 by name.

What clients are told of each name has one order that explains it (``support.topic_users``). Who could commit
without comparing what the change was made from would break that, and so would who refuses by metadata that
is a little old: the last tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.cluster_story import Broken, ClusterStory
from support.linearizing import TooManyOrders
from support.topic_users import TopicUsers
from support.virtual_loop import run_virtual
from tidemill.control.commands import SetTopicConfigs
from tidemill.control.controller import Controller
from tidemill.server.handlers.topics import configs

pytestmark = pytest.mark.timeout(600)

SEEDS = range(10)
#: Two alterations have to overlap, which happens in some of these stories.
ABLATION_SEEDS = range(11, 31)
#: A node has to be asked while it is behind.
REFUSAL_SEEDS = range(14, 31)


def run_story(seed: int, *, crowded: bool) -> TopicUsers:
    """``crowded``: many clients at one topic."""

    async def tell() -> TopicUsers:
        users = TopicUsers(0.2, clients=6, topics=1) if crowded else TopicUsers()
        await ClusterStory(seed, [users]).run()
        return users

    return run_virtual(tell, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_clients_are_told_of_a_topic_has_an_order(seed: int) -> None:
    # In most stories it is a hundred; in one, nearly all nodes are cut off nearly all the time.
    assert run_story(seed, crowded=seed % 2 == 0).acknowledged > 1


def test_without_comparing_what_a_change_was_made_from_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_anything(**fields: Any) -> SetTopicConfigs:
        return SetTopicConfigs(**fields | {"base": None})

    monkeypatch.setattr(configs, "SetTopicConfigs", from_anything)
    insist_that_somebody_misses_it(ABLATION_SEEDS)


def test_without_newest_metadata_refusals_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def as_it_is(self: Controller) -> None:
        pass

    monkeypatch.setattr(Controller, "catch_up", as_it_is)
    insist_that_somebody_misses_it(REFUSAL_SEEDS)


def insist_that_somebody_misses_it(seeds: range) -> None:
    for seed in seeds:
        try:
            run_story(seed, crowded=True)
        except TooManyOrders:
            continue  # Another story's are few enough to try them all.
        except Broken as error:
            assert "nothing explains" in str(error), error
            return
    raise AssertionError("nobody missed it")
