"""``tidemill cursor``: what people see of cursors, and do with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.app import make_app
from tidemill.client.admin.topics import create_topic, delete_records, delete_topic
from tidemill.client.cursors.records import CursorRecord
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.cursors.errors import CursorFenced
from tidemill.records.record import Record
from tidemill.share.letters import Letter, letter_record


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        cluster = node._awaited.cluster

        async def fill() -> None:
            await create_topic(cluster, "orders", partitions=2)
            async with Producer(cluster) as producer:
                for number in range(20):
                    record = Record(None, b"%d" % number, 1_700_000_000_000 + number * 60_000)
                    await producer.send("orders", record, number % 2)

        node.run(fill())
        yield node


def run(db: Tidemill, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(make_app(), ["cursor", *arguments, "--server", db.bootstrap_servers])
    assert result.exit_code == code, result.output
    return result.output


def as_json(db: Tidemill, *arguments: str) -> Any:
    return json.loads(run(db, *arguments, "--format", "json"))


def test_a_cursor_is_listed_described_and_measured(db: Tidemill) -> None:
    with db.cursor("billing", "orders", key_prefix="x") as cursor:
        cursor.poll_batch(4, timeout_ms=0)
    with db.cursor("plain", "orders") as cursor:
        cursor.poll_batch(4)
        cursor.commit()
        assert "owned" in run(db, "list")
        (found,) = [each for each in as_json(db, "list") if each["cursor"] == "plain"]
        assert (found["topic"], found["paused"], len(found["owners"])) == ("orders", False, 1)
    described = as_json(db, "describe", "plain")
    assert [each["offset"] for each in described["partitions"]] == [4, 0]
    assert [each["started"] for each in described["partitions"]] == [True, False]
    assert described["lag_records"] == 16
    assert "keys from b'x'" in run(db, "list", "--topic", "orders")
    (behind,) = [each for each in as_json(db, "lag") if each["cursor"] == "plain"]
    assert behind["lag_records"] == 16
    assert behind["lag_seconds"] > 0
    assert [each["cursor"] for each in as_json(db, "lag", "plain")] == ["plain"]
    assert [each["cursor"] for each in as_json(db, "lag", "plain", "billing")] == ["plain", "billing"]
    assert as_json(db, "lag", "plain", "--topic", "others") == []
    assert "no such cursor" in run(db, "lag", "plain", "nobody", code=3)
    assert run(db, "describe", "nobody", code=3)


def test_a_cursor_whose_topic_is_gone_is_shown_beside_the_others(db: Tidemill) -> None:
    cluster = db._awaited.cluster
    db.run(create_topic(cluster, "gone", partitions=1))
    db.cursor("left", "gone").close()
    db.run(delete_topic(cluster, "gone"))
    assert "idle, cannot go on" in run(db, "lag", "--topic", "gone")
    assert "partition 0: topic 'gone' was deleted" in run(db, "describe", "left")
    db.run(create_topic(cluster, "gone", partitions=1))
    described = as_json(db, "describe", "left")
    assert described["partitions"][0]["problem"] == "topic 'gone' was deleted and created again"
    run(db, "delete", "left")


@pytest.mark.parametrize(
    ("to", "after"),
    [
        ("earliest", [0, 0]),
        ("latest", [10, 10]),
        ("3", [3, 3]),
        ("2023-11-14T22:23:20Z", [5, 5]),
        ("-10 minutes", [10, 10]),
        ("-10m", [10, 10]),
    ],
)
def test_a_reset_is_shown_first_and_done_when_told_to(db: Tidemill, to: str, after: list[int]) -> None:
    with db.cursor("resetting", "orders") as cursor:
        cursor.poll_batch(7)
        cursor.commit()
    before = [each["offset"] for each in as_json(db, "describe", "resetting")["partitions"]]
    planned = as_json(db, "reset", "resetting", "--to", to, "--dry-run")
    assert [each["to"] for each in planned["partitions"]] == after
    assert [each["offset"] for each in as_json(db, "describe", "resetting")["partitions"]] == before
    assert "nothing was changed" in run(db, "reset", "resetting", "--to", to)
    run(db, "reset", "resetting", "--to", to, "--execute")
    with db.cursor("resetting", "orders") as cursor:
        assert [each.offset for each in cursor.positions.values()] == after


def test_a_cursor_is_moved_by_some_records(db: Tidemill) -> None:
    with db.cursor("shifting", "orders", start=7) as cursor:
        cursor.commit()
    run(db, "reset", "shifting", "--to", "-2", "--partition", "1", "--execute")
    planned = as_json(db, "reset", "shifting", "--to", "+1")
    assert [(each["from"], each["to"]) for each in planned["partitions"]] == [(7, 8), (5, 6)]
    assert "earliest, latest, an offset" in run(db, "reset", "shifting", "--to", "soon", code=2)


def test_one_partition_can_be_reset(db: Tidemill) -> None:
    db.cursor("half", "orders").close()
    run(db, "reset", "half", "--to", "latest", "--partition", "1", "--execute")
    with db.cursor("half", "orders") as cursor:
        assert [each.offset for each in cursor.positions.values()] == [0, 10]


def test_an_offset_that_the_log_does_not_have_is_refused(db: Tidemill) -> None:
    cluster = db._awaited.cluster
    db.run(create_topic(cluster, "cut", partitions=1))
    db.produce_many("cut", ["a", "b", "c", "d"])
    db.cursor("cutting", "cut").close()
    db.run(delete_records(cluster, {("cut", 0): 2}))
    for to in ("1", "5"):
        for how in ("--dry-run", "--execute"):
            assert "from 2 to 4" in run(db, "reset", "cutting", "--to", to, how, code=1).replace("\n", " ")
    for to in ("2", "4"):
        run(db, "reset", "cutting", "--to", to, "--execute")
        with db.cursor("cutting", "cut") as cursor:
            assert cursor.positions[0].offset == int(to)


def test_a_dry_run_refuses_what_execute_would_refuse(db: Tidemill, tmp_path: Path) -> None:
    db.cursor("own", "orders", checkpoint=tmp_path / "position").close()
    for how in ("--dry-run", "--execute"):
        assert "keeps its position in a file" in run(db, "reset", "own", "--to", "earliest", how, code=1)


def test_a_cursor_in_use_is_reset_only_by_force_which_fences_its_owner(db: Tidemill) -> None:
    with db.cursor("busy", "orders") as cursor:
        cursor.poll_batch(3)
        assert "--force" in run(db, "reset", "busy", "--to", "latest", "--execute", code=1)
        run(db, "reset", "busy", "--to", "latest", "--execute", "--force")
        with pytest.raises(CursorFenced):
            cursor.commit()
    assert run(db, "reset", "busy", "--to", "someday", code=2)


def test_a_cursor_is_paused_and_resumed(db: Tidemill) -> None:
    with db.cursor("pausing", "orders", lease_ms=3_000) as cursor:
        cursor.poll_batch(1)
        assert "paused" in run(db, "pause", "pausing")
        cursor.commit()
        assert cursor.poll_batch(5, timeout_ms=20) == []
        assert "paused, owned" in run(db, "list")
        run(db, "resume", "pausing")
        assert cursor.poll_batch(5, timeout_ms=20_000)


def test_a_deleted_cursor_begins_anew(db: Tidemill) -> None:
    with db.cursor("gone", "orders") as cursor:
        cursor.poll_batch(20)
        cursor.commit()
        run(db, "delete", "gone", code=1)
    run(db, "delete", "gone")
    run(db, "delete", "gone", code=3)
    with db.cursor("gone", "orders") as cursor:
        assert [each.offset for each in cursor.positions.values()] == [0, 0]


def test_parked_records_are_sent_back_each_once(db: Tidemill) -> None:
    cluster = db._awaited.cluster

    async def park() -> None:
        await create_topic(cluster, "source", partitions=2)
        await create_topic(cluster, "letters", partitions=1)
        async with Producer(cluster) as producer:
            # The record at offset 7 was parked, and again after a crash.
            for offset, worker in ((5, "billing"), (7, "billing"), (7, "billing"), (5, "other")):
                letter = Letter(worker, "source", 1, offset, 3, "ValueError: poison")
                record = Record(b"k", b"%d" % offset, 1_000, (("trace", b"1"),))
                await producer.send("letters", letter_record(record, letter, copy=True, now_ms=2_000), 0)

    db.run(park())
    expected = {
        "sent": {"source": 2},
        "reasons": {"ValueError: poison": 2},
        "parked_twice": 1,
        "without_contents": 0,
        "worker": "billing",
    }
    assert as_json(db, "replay", "billing", "--from", "letters") == expected | {"executed": False}
    assert as_json(db, "replay", "billing", "--from", "letters", "--execute") == expected | {"executed": True}
    again = as_json(db, "replay", "billing", "--from", "letters", "--execute")
    assert (again["sent"], again["parked_twice"]) == ({}, 0)
    with db.cursor(None, "source") as cursor:
        sent = cursor.poll_batch(9)
    found = [each for each in sent if isinstance(each, CursorRecord)]
    assert [(each.partition, each.key, each.value, each.headers) for each in found] == [
        (1, b"k", value, (("trace", b"1"), ("tidemill-redriven-for", b"billing"))) for value in (b"5", b"7")
    ]


def test_a_replay_says_what_to_do_with_records_that_were_too_large(db: Tidemill) -> None:
    cluster = db._awaited.cluster

    async def park() -> None:
        await create_topic(cluster, "large-source", partitions=1)
        async with Producer(cluster) as producer:
            letter = letter_record(
                Record(b"k", b"much"),
                Letter("large", "large-source", 0, 1, 1, ""),
                copy=True,
                left_out=True,
                now_ms=1,
            )
            await producer.send("large-letters", letter, 0)

    db.run(park())
    for _ in range(2):
        said = run(db, "replay", "large", "--from", "large-letters", "--execute")
        assert "1 records were too large to be parked whole" in said
        assert "__dlq.errors.topic, .partition and .offset" in said
    with db.cursor(None, "large-source") as cursor:
        assert cursor.lag().records == 0


def test_changes_of_a_table_are_not_sent_back(db: Tidemill) -> None:
    cluster = db._awaited.cluster
    db.create_table("shop.parked", "id bigint, v string", primary_key=["id"])

    async def park() -> None:
        async with Producer(cluster) as producer:
            letter = letter_record(
                Record(None, b"{}"), Letter("w", "shop.parked", 0, 1, 1, ""), copy=True, now_ms=1
            )
            await producer.send("table-letters", letter, 0)

    db.run(park())
    assert "replace a newer row" in run(db, "replay", "w", "--from", "table-letters", "--execute", code=1)
