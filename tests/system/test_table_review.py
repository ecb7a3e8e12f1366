"""Tables through the client where threads, large rows, leases and partitions meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import tidemill
from support.table_nodes import SOON, new_name
from tidemill.client.tables.lease import AsyncLease
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import NodeUnavailable, TableCode, TableError

DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def db() -> Iterator[EmbeddedNode]:
    with tidemill.open(**SOON, scan_max_bytes=100_000) as node:
        yield node


def test_the_first_calls_may_come_from_several_threads_at_once() -> None:
    with tidemill.open() as node:
        node.create_table("shop.orders", "id bigint, name string", primary_key="id", buckets=4)
        for _ in range(5):
            client = tidemill.Tidemill(node.bootstrap_servers)
            barrier, failures = threading.Barrier(8), list[BaseException]()

            def work(
                number: int, client: Any = client, barrier: Any = barrier, failures: Any = failures
            ) -> None:
                try:
                    barrier.wait()
                    table = client.table("shop.orders")
                    table.upsert({"id": number, "name": str(number)})
                    assert table.lookup(number)["name"] == str(number)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_SECONDS)
            client.close()
            assert failures == []
        assert node.table("shop.orders").scan().count() == 8
    names = [thread.name for thread in threading.enumerate()]
    assert "tidemill-client" not in names


def test_a_closed_connection_stays_closed(db: EmbeddedNode) -> None:
    client = tidemill.connect(db.bootstrap_servers)
    client.close()
    client.close()
    for call in (client.tables, client.ping, lambda: client.table("x.y")):
        with pytest.raises(tidemill.ConnectionClosed, match="this connection is closed"):
            call()


def test_a_connection_that_fails_leaves_no_thread() -> None:
    with pytest.raises(NodeUnavailable):
        tidemill.connect("127.0.0.1:1")
    assert "tidemill-client" not in [thread.name for thread in threading.enumerate()]


def test_rows_that_are_too_much_for_one_answer_are_looked_up_in_several(db: EmbeddedNode) -> None:
    table = db.create_table(new_name("large"), "id bigint, text string", primary_key="id", buckets=2)
    table.upsert({"id": number, "text": str(number) * 2_000} for number in range(1_000))
    keys = [*range(999, -1, -1), 5_000, 7]
    found = table.lookup(keys)
    assert found.column("id").to_pylist() == [*range(999, -1, -1), 7]
    assert found.column("text")[-1].as_py() == "7" * 2_000
    huge = db.table(table.name)
    huge.upsert({"id": 7, "text": "x" * 200_000})
    assert len((huge.lookup(7) or {})["text"]) == 200_000


def test_all_leases_are_listed_with_the_topics_of_their_partitions(db: EmbeddedNode) -> None:
    name = new_name("parts")
    table = db.create_table(
        name, "region string, id bigint", primary_key=["region", "id"], partition_by="region"
    )
    table.upsert([{"region": region, "id": 1} for region in ("eu", "us")])
    stranger = db.table(name)
    table.upsert({"region": "asia", "id": 1})
    with stranger.lease() as lease:
        topics = {f"{name}.{region}" for region in ("eu", "us", "asia")}
        assert {topic for topic, _ in lease.log_offsets} == topics
        (listed,) = [each for each in db.leases() if each.lease_id == lease.lease_id]
        assert {topic for topic, _ in listed.snapshots} == topics
        assert stranger.scan(lease=lease).count() == 3


def test_a_lease_survives_a_renewal_that_fails(db: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    table = db.create_table(new_name("leased"), "id bigint", primary_key="id")
    table.upsert({"id": 1})
    failed, real = threading.Event(), AsyncLease.renew

    async def renew(lease: AsyncLease) -> Any:
        if not failed.is_set():
            failed.set()
            raise NodeUnavailable("just now")
        return await real(lease)

    monkeypatch.setattr(AsyncLease, "renew", renew)
    with table.lease(duration_ms=6_000) as lease:
        assert failed.wait(DEADLINE_SECONDS)
        first = next(each for each in table.leases() if each.lease_id == lease.lease_id).expires_at_ms
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            (held,) = [each for each in table.leases() if each.lease_id == lease.lease_id]
            if held.expires_at_ms > first:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert table.leases() == []


def test_a_scan_with_a_limit_leaves_no_session_behind(db: EmbeddedNode) -> None:
    table = db.create_table(new_name("limited"), "id bigint, text string", primary_key="id", buckets=4)
    table.upsert({"id": number, "text": "x" * 1_000} for number in range(2_000))
    for _ in range(10):
        assert table.scan(limit=3, fetch_max_bytes=2_000).to_arrow().num_rows == 3
    assert sum(stats.scanner_count for stats in table.stats()) == 0


def test_a_dropped_partition_that_comes_again_is_written_and_read_at_once(db: EmbeddedNode) -> None:
    table = db.create_table(
        new_name("again"), "region string, id bigint", primary_key=["region", "id"], partition_by="region"
    )
    table.upsert({"region": "eu", "id": number} for number in range(50))
    db.table(table.name).drop_partition("eu")
    table.upsert({"region": "eu", "id": 1})
    assert table.lookup(("eu", 1)) == {"region": "eu", "id": 1}
    assert table.scan().count() == 1


def test_errors_of_a_table_that_is_gone_have_its_code(db: EmbeddedNode) -> None:
    table = db.create_table(new_name("dropped"), "id bigint", primary_key="id")
    table.upsert({"id": 1})
    table.drop()
    for call in (lambda: table.lookup(1), lambda: table.scan().to_arrow(), lambda: table.upsert({"id": 2})):
        with pytest.raises(TableError) as refused:
            call()
        assert refused.value.table_code == TableCode.table_not_found


def test_a_scan_gives_the_columns_that_the_table_had_when_it_was_asked_for(db: EmbeddedNode) -> None:
    # Scans of partitioned tables look for new partitions first, and find the new column as well.
    table = db.create_table(
        new_name("wider"), "region string, id bigint", primary_key=["region", "id"], partition_by="region"
    )
    table.upsert({"region": "eu", "id": 1})
    scan = table.scan()
    reader = scan.to_reader()
    db.table(table.name).alter(add_columns="note string")
    assert reader.read_all().to_pylist() == [{"region": "eu", "id": 1}]
    assert scan.to_arrow().schema.names == ["region", "id"]
    assert table.refresh().scan().to_arrow().to_pylist() == [{"region": "eu", "id": 1, "note": None}]
