"""Invariant 10: read-process-write in transactions yields exactly one copy, whatever happens to the node."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support.processes import NodeProcess
from support.seeds import choose_seed

_RECORDS = 100_000
_BATCH = 750
_PARTITIONS = 4
_KILLS = 6


def test_a_copy_in_transactions_under_kills_has_every_record_once(tmp_path: Path, start_client: Any) -> None:
    seed = choose_seed("EXACTLY_ONCE_SEED")
    rng = random.Random(seed)
    with NodeProcess(tmp_path / "data", default_partitions=_PARTITIONS) as node:
        copier = start_client("copier", node)
        copier.call("fill", topic="source", records=_RECORDS)
        copier.call("start", source="source", target="target", total=_RECORDS, batch=_BATCH)
        state = copier.call("progress", at_least=1)
        for _ in range(_KILLS):
            # Each life of the node commits something, and dies in the middle of the rest.
            state = copier.call("progress", at_least=state["committed"] + 5 * _BATCH)
            if not state["alive"]:
                break
            time.sleep(rng.uniform(0.0, 0.5))
            node.kill()
            node.start()
        state = copier.call("finish")
        assert state["failure"] is None
        assert not state["alive"], state
        values = start_client("copier", node).call(
            "read_all", topic="target", partitions=_PARTITIONS, isolation="read_committed"
        )
    copies = Counter(values)
    expected = {f"copy of {number}" for number in range(_RECORDS)}
    assert not expected - copies.keys(), f"{len(expected - copies.keys())} records are missing"
    assert not copies.keys() - expected
    assert [value for value, count in copies.items() if count > 1] == []
