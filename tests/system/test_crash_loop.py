"""A node under idempotent load is killed and restarted ten times; then what its clients saw is checked.

The moments of the kills are random: the seed is printed, and ``CRASH_LOOP_SEED`` sets it. It decides when the
node is killed, not what runs at that moment, so a seed narrows a failure down without repeating it exactly.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from support.history import History, check
from support.processes import NodeProcess

_KILLS = 10
_PARTITIONS = 4
_MAX_MESSAGE_BYTES = 20_000
_TOPIC = "load"


def crash(node: NodeProcess, rng: random.Random) -> None:
    """Kill the node at some moment and start it again; sometimes it dies once more while it recovers."""
    time.sleep(rng.uniform(0.2, 2.0))
    node.kill()
    if rng.random() < 0.3:
        node.launch()
        time.sleep(rng.uniform(0.0, 1.0))
        node.kill()
    node.start()


@pytest.mark.timeout(300)
def test_ten_kills_under_load_lose_repeat_and_invent_nothing(tmp_path: Path, start_client: Any) -> None:
    seed = int(os.environ.get("CRASH_LOOP_SEED") or random.randrange(2**32))
    print(f"CRASH_LOOP_SEED={seed}")  # noqa: T201
    rng = random.Random(seed)
    histories = {name: tmp_path / f"{name}.jsonl" for name in ("one", "two", "steady", "late", "drain")}
    with NodeProcess(tmp_path / "data") as node:
        start_client("confluent", node).call(
            "create_with",
            topic=_TOPIC,
            partitions=_PARTITIONS,
            max_message_bytes=_MAX_MESSAGE_BYTES,
            **{"internal.segment.bytes": 100_000},
        )
        load, watch, drain = (start_client("load", node) for _ in range(3))
        target = {"topic": _TOPIC, "partitions": _PARTITIONS}
        for name in ("one", "two"):
            load.call(
                "start_load",
                name=name,
                path=str(histories[name]),
                too_large_bytes=_MAX_MESSAGE_BYTES,
                **target,
            )
        watch.call("start_reader", name="steady", path=str(histories["steady"]), **target)
        for number in range(_KILLS):
            # Every life of the node is used: each load gets something acknowledged in it.
            load.call("wait_for_acks", more=20)
            if number == _KILLS // 2:
                watch.call("start_reader", name="late", path=str(histories["late"]), **target)
            crash(node, rng)
        load.call("wait_for_acks", more=20)
        outcome = load.call("stop_load")
        ends = drain.call("end_offsets", **target)
        drain.call("start_reader", name="drain", path=str(histories["drain"]), **target)
        errors = drain.call("stop_reader", name="drain", ends=ends)
        errors += watch.call("stop_reader", name="steady", ends=ends) + watch.call(
            "stop_reader", name="late", ends=ends
        )

    history = History()
    for path in histories.values():
        history.load(path)
    assert check(history, drain="drain") == []
    assert errors == []
    for name in ("one", "two"):
        # Nothing may be given up on: with retries for ever, every record comes to a good end.
        assert outcome[name]["unknown"] == []
        assert outcome[name]["acked"] > 1_000
        assert outcome[name]["refused"] > 10
    assert sum(ends) == outcome["one"]["acked"] + outcome["two"]["acked"]
    assert node.log_text().count("the last stop was not orderly") >= _KILLS
