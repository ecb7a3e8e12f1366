"""A node under load is killed and restarted ten times; then what its clients saw is checked.

Idempotent producers write one topic, a transactional one another; a third, which is compacted all the time,
gets values under few keys.

The moments of the kills are random: the seed is printed, and ``CRASH_LOOP_SEED`` sets it. It decides when the
node is killed, not what runs at that moment, so a seed narrows a failure down without repeating it exactly.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from support.history import History, check
from support.processes import ClientProcess, NodeProcess
from support.seeds import choose_seed

_KILLS = 10
_PARTITIONS = 4
_MAX_MESSAGE_BYTES = 20_000
_TOPIC, _TRANSACTIONS, _TABLE = "load", "transactions", "table"
_TABLE_PARTITIONS = 2
_KEYS = 50
_TABLE_CONFIG: dict[str, Any] = {
    "cleanup.policy": "compact",
    "internal.segment.bytes": 30_000,
    "min.cleanable.dirty.ratio": 0.01,
}
_SEGMENTS = {"internal.segment.bytes": 100_000}


def crash(node: NodeProcess, rng: random.Random) -> None:
    """Kill the node at some moment and start it again; sometimes it dies once more while it recovers."""
    time.sleep(rng.uniform(0.2, 2.0))
    node.kill()
    if rng.random() < 0.3:
        node.launch()
        time.sleep(rng.uniform(0.0, 1.0))
        node.kill()
    node.start()


def start_load(load: ClientProcess, histories: dict[str, Path]) -> None:
    """Everything at once: plain records, transactions, and a table that is compacted all the time."""
    for name in ("one", "two"):
        load.call(
            "start_load",
            name=name,
            path=str(histories[name]),
            too_large_bytes=_MAX_MESSAGE_BYTES,
            topic=_TOPIC,
            partitions=_PARTITIONS,
        )
    load.call(
        "start_transactions",
        name="txn",
        path=str(histories["txn"]),
        topic=_TRANSACTIONS,
        partitions=_PARTITIONS,
    )
    load.call("start_keyed_load", name="keyed", topic=_TABLE, partitions=_TABLE_PARTITIONS, keys=_KEYS)


def create_topics(client: ClientProcess) -> None:
    client.call(
        "create_with",
        topic=_TOPIC,
        partitions=_PARTITIONS,
        max_message_bytes=_MAX_MESSAGE_BYTES,
        **_SEGMENTS,
    )
    client.call("create_with", topic=_TRANSACTIONS, partitions=_PARTITIONS, **_SEGMENTS)
    client.call("create_with", topic=_TABLE, partitions=_TABLE_PARTITIONS, **_TABLE_CONFIG)


def joined(histories: dict[str, Path], *names: str) -> History:
    history = History()
    for name in names:
        history.load(histories[name])
    return history


def drain(client: ClientProcess, name: str, path: Path, *, topic: str, isolated: bool) -> list[str]:
    """Read a topic to its end into a history; returns the errors on the way."""
    target: dict[str, Any] = {"topic": topic, "partitions": _PARTITIONS}
    ends = client.call("end_offsets", **target)
    client.call("start_reader", name=name, path=str(path), isolated=isolated, **target)
    errors: list[str] = client.call("stop_reader", name=name, ends=ends)
    return errors


def test_ten_kills_under_load_lose_repeat_and_invent_nothing(tmp_path: Path, start_client: Any) -> None:
    seed = choose_seed("CRASH_LOOP_SEED")
    rng = random.Random(seed)
    names = ("one", "two", "txn", "steady", "late", "committed", "drain", "txn drain", "committed drain")
    histories = {name: tmp_path / f"{name}.jsonl" for name in names}
    plain = {"topic": _TOPIC, "partitions": _PARTITIONS}
    transactions = {"topic": _TRANSACTIONS, "partitions": _PARTITIONS}
    with NodeProcess(tmp_path / "data", compaction_check_interval_ms=100) as node:
        create_topics(start_client("confluent", node))
        load, watch, draining = (start_client("load", node) for _ in range(3))
        start_load(load, histories)
        watch.call("start_reader", name="steady", path=str(histories["steady"]), **plain)
        watch.call(
            "start_reader",
            name="committed",
            path=str(histories["committed"]),
            isolated=True,
            **transactions,
        )
        for number in range(_KILLS):
            # Every life of the node is used: each load gets something acknowledged in it.
            load.call("wait_for_acks", more=20)
            if number == _KILLS // 2:
                watch.call("start_reader", name="late", path=str(histories["late"]), **plain)
            crash(node, rng)
        load.call("wait_for_acks", more=20)
        outcome = load.call("stop_load")
        ends = draining.call("end_offsets", **plain)
        errors = drain(draining, "drain", histories["drain"], topic=_TOPIC, isolated=False)
        for name, isolated in (("txn drain", False), ("committed drain", True)):
            errors += drain(draining, name, histories[name], topic=_TRANSACTIONS, isolated=isolated)
        for name in ("steady", "late"):
            errors += watch.call("stop_reader", name=name, ends=ends)
        transaction_ends = draining.call("end_offsets", **transactions)
        errors += watch.call("stop_reader", name="committed", ends=transaction_ends)
        table = draining.call("read_table", topic=_TABLE, partitions=_TABLE_PARTITIONS)
        compactions = node.metric("tidemill_compaction_runs_total")

    assert check(joined(histories, "one", "two", "steady", "late", "drain"), drain="drain") == []
    history = joined(histories, "txn", "committed", "txn drain", "committed drain")
    assert check(history, "txn drain", "committed drain") == []
    assert errors == []
    for name in ("one", "two"):
        # Nothing may be given up on: with retries for ever, every record comes to a good end.
        assert outcome[name]["unknown"] == []
        assert outcome[name]["acked"] > 1_000
        assert outcome[name]["refused"] > 10
    assert sum(ends) == outcome["one"]["acked"] + outcome["two"]["acked"]
    assert outcome["txn"]["failure"] is None
    assert outcome["txn"]["acked"] > 20 * _KILLS
    assert outcome["txn"]["aborted"] > _KILLS
    assert outcome["keyed"]["unknown"] == []
    assert table == outcome["keyed"]["last"]
    assert compactions > 0
    assert node.log_text().count("the last stop was not orderly") >= _KILLS
