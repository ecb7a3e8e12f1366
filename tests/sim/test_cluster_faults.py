"""Whole clusters of three and five nodes under faults, in virtual time: nothing acknowledged is lost.

One seed is one story (``support.cluster_story``) of one of three kinds (``KINDS``): plain records,
transactions, tables. Nodes are killed (and lose what was not synced), stopped, paused, cut off from each
other in one direction or both, have clocks of other rates, lose their way to the metadata store, their lease,
room on their disk, an fsync, or the whole disk; the store hangs, is slow, and loses answers and commits. An
operator creates and deletes topics, moves replicas, cancels moves, drains nodes and elects preferred leaders.
Then everything is healed, and what is there is compared with what clients saw:

- invariants 1 to 6 of ``support.history`` over what clients were told;
- the committed offset of a group is never older than one that was acknowledged before the question;
- one leader for each epoch of a partition; the high watermarks that clients are told never go back (7);
- below the high watermarks that any replica ever had, one value for each offset; in the end equal replicas
  with equal folds (8);
- every node sees the same metadata at the same revision, and only the controller changes partitions (9);
- in a compacted topic, the newest acknowledged record of each key, or one behind it;
- a table's scans, look-ups and folds are those of its log (11), and no answer goes back;
- all of this within a bounded time after the last fault, with every replica in sync again (13).

Answers like NOT_LEADER, AFTER_APPEND and no answer at all mean that the outcome is unknown. Safeguards that
are switched off, and must be missed: ``test_cluster_ablations.py``.

Replay one with ``run_story(seed)``; ``CLUSTER_STORY_SEEDS`` sets how many are run.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from support.cluster_story import ClusterStory
from support.cluster_tables import SETTINGS, TableUsers
from support.cluster_users import RecordUsers, TransactionUsers
from support.virtual_loop import run_virtual

SEEDS = int(os.environ.get("CLUSTER_STORY_SEEDS", "200"))
SEEDS_PER_TEST = 10
KINDS = ("records", "transactions", "tables")


def users_of(kind: str, seed: int) -> list[Any]:
    """The users of a story of a kind."""
    rng = random.Random(f"users {seed}")
    pace = rng.choice((1, 2, 4))
    match kind:
        case "records":
            return [RecordUsers(pace)]
        case "transactions":
            return [TransactionUsers(pace)]
        case _:
            what = rng.choice(("plain", "transactions", "compacted"))
            return [TableUsers(pace, with_transactions=what == "transactions", compacted=what == "compacted")]


def run_story(seed: int, kind: str | None = None) -> ClusterStory:
    """Tell one story. Raises ``Broken`` if something does not hold."""

    async def tell() -> ClusterStory:
        users = users_of(kind or KINDS[seed % len(KINDS)], seed)
        story = ClusterStory(seed, users, size=5 if seed % 5 == 4 else 3, **SETTINGS)
        await story.run()
        return story

    return run_virtual(tell, seed=seed)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_no_fault_loses_doubles_or_reorders_anything(first: int) -> None:
    told: Counter[str] = Counter()
    seeds = range(first, min(SEEDS, first + SEEDS_PER_TEST))
    for seed in seeds:
        try:
            story = run_story(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        told["faults"] += story.faults
        told["moves"] += story.moves
        for user in story.users:
            told["acknowledged"] += user.acknowledged  # type: ignore[attr-defined]
            told["committed"] += getattr(user, "committed", 0)
            told["seen"] += len(getattr(user, "seen", ()))
    assert told["faults"] > 3 * len(seeds), told
    assert told["acknowledged"] > 10 * len(seeds), told
    if len(seeds) >= len(KINDS):
        assert min(told[what] for what in ("committed", "seen", "moves")) > 0, told


if __name__ == "__main__":
    import logging
    import sys

    logging.basicConfig(level=logging.INFO)
    run_story(int(sys.argv[1]))
