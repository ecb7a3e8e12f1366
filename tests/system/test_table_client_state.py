"""Snapshots, leases and restarts, as users of tables meet them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.processes import NodeProcess, wait_until
from support.table_nodes import SOON, by_key, new_name, records_of
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.client.tables.bucket_scanner import ScannerState
from tidemill.errors import TableCode, TableError

COLUMNS = "id bigint, v string"


def numbered(first: int, count: int, word: str = "v") -> list[dict[str, Any]]:
    return [{"id": n, "v": f"{word}{n}"} for n in range(first, first + count)]


def ids(found: Any) -> list[int]:
    return sorted(found.to_arrow().column("id").to_pylist())


def refusal(call: Any) -> TableError:
    with pytest.raises(TableError) as caught:
        call()
    return caught.value


@pytest.fixture(scope="module")
def table_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("tables") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def db(table_node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(table_node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def table(db: Tidemill) -> Table:
    return db.create_table(new_name("state"), COLUMNS, primary_key="id", buckets=2)


def snapshots_by_bucket(table: Table) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for each in table.snapshots():
        assert each.problem is None
        found.setdefault(each.bucket, []).append(each.log_offset)
    return found


# --- snapshots


def test_two_snapshots_of_every_bucket_are_kept(table: Table) -> None:
    taken = []
    for number in range(4):
        table.upsert(numbered(0, 20, f"round{number}-"))
        taken.append({each.bucket: each.log_offset for each in table.create_snapshot()})
    assert snapshots_by_bucket(table) == {bucket: [taken[2][bucket], taken[3][bucket]] for bucket in (0, 1)}
    # Nothing was written since: the newest ones are the snapshot.
    again = {each.bucket: each.log_offset for each in table.create_snapshot()}
    assert again == taken[3]
    assert all(len(offsets) == 2 for offsets in snapshots_by_bucket(table).values())
    assert [each.snapshot_count for each in table.stats()] == [2, 2]


def test_snapshots_are_taken_when_the_log_has_grown(db: Tidemill) -> None:
    table = db.create_table(
        new_name("grown"), COLUMNS, primary_key="id", properties={"snapshot.log.bytes": "2000"}
    )
    for number in range(3):
        table.upsert(numbered(number * 100, 100))

        def reached(end: int = (number + 1) * 100) -> bool:
            return snapshots_by_bucket(table).get(0, [0])[-1] == end

        wait_until(reached, "a snapshot at the end of the log")


def test_snapshots_are_taken_from_time_to_time(db: Tidemill) -> None:
    table = db.create_table(
        new_name("timed"), COLUMNS, primary_key="id", properties={"snapshot.interval.ms": "300"}
    )
    table.upsert(numbered(0, 10))
    wait_until(lambda: snapshots_by_bucket(table) == {0: [10]}, "a snapshot after the interval")
    table.upsert(numbered(10, 10))
    wait_until(lambda: snapshots_by_bucket(table) == {0: [10, 20]}, "another one")


# --- leases


def test_a_lease_keeps_its_snapshots_and_can_be_scanned(db: Tidemill, table: Table) -> None:
    table.upsert(numbered(0, 50))
    with table.lease(holder="reader") as lease:
        table.delete(range(25))
        table.upsert(numbered(100, 5))
        for _ in range(3):
            table.upsert(numbered(200, 8))
            table.create_snapshot()
        assert ids(table.scan(lease=lease)) == list(range(50))
        assert ids(table.scan(lease=lease.lease_id, where="id < 10")) == list(range(10))
        assert ids(table.scan()) == [*range(25, 50), *range(100, 105), *range(200, 208)]
        assert [len(each) for each in snapshots_by_bucket(table).values()] == [3, 3]
        (listed,) = table.leases()
        assert (listed.holder, listed.table) == ("reader", table.name)
        assert dict(listed.log_offsets) == dict(lease.log_offsets)
        assert lease.lease_id in [each.lease_id for each in db.leases()]
        lease_id = lease.lease_id
    assert table.leases() == []
    assert refusal(lambda: table.scan(lease=lease_id).to_arrow()).table_code == TableCode.lease_not_found


def test_snapshots_go_with_the_lease_that_kept_them(table: Table) -> None:
    table.upsert(numbered(0, 50))
    with table.lease():
        for _ in range(3):
            table.upsert(numbered(0, 8))
            table.create_snapshot()
        assert [len(each) for each in snapshots_by_bucket(table).values()] == [3, 3]
    assert [len(each) for each in snapshots_by_bucket(table).values()] == [2, 2]


def test_a_fresh_lease_has_what_is_there_now(table: Table) -> None:
    table.upsert(numbered(0, 10))
    table.create_snapshot()
    table.upsert(numbered(10, 10))
    with table.lease() as stale, table.lease(fresh=True) as fresh:
        assert ids(table.scan(lease=stale)) == list(range(10))
        assert ids(table.scan(lease=fresh)) == list(range(20))


def test_a_lease_that_nobody_renews_expires(table: Table) -> None:
    table.upsert(numbered(0, 10))
    lease = table.lease(duration_ms=6_000)
    held = lease.acquire()
    assert ids(table.scan(lease=held)) == list(range(10))
    wait_until(lambda: table.leases() == [], "the end of the lease")
    assert refusal(lambda: table.scan(lease=held).to_arrow()).table_code == TableCode.lease_not_found
    assert refusal(lease.renew).table_code == TableCode.lease_not_found


def test_a_lease_lasts_as_long_as_its_block(table: Table) -> None:
    table.upsert(numbered(0, 10))
    with table.lease(duration_ms=6_000) as lease:
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            assert ids(table.scan(lease=lease)) == list(range(10))
    assert table.leases() == []


@pytest.mark.parametrize("stop", ["stop", "kill"])
def test_a_lease_and_its_rows_survive_a_restart(table_node: NodeProcess, table: Table, stop: str) -> None:
    table.upsert(numbered(0, 30))
    held = table.lease(duration_ms=60_000).acquire()
    table.delete(range(10))
    table.upsert(numbered(0, 3, "again"))
    getattr(table_node, stop)()
    table_node.start()
    for _ in range(3):
        table.upsert(numbered(50, 1))
        table.create_snapshot()
    assert [each.lease_id for each in table.leases()] == [held.lease_id]
    assert ids(table.scan(lease=held)) == list(range(30))
    assert ids(table.scan()) == [0, 1, 2, *range(10, 30), 50]
    # What came behind the lease, change by change.
    changes = records_of(table.follow(lease=held, until_now=True))
    assert [op for *_, op, _ in changes].count("snapshot") == 30
    assert [op for *_, op, _ in changes].count("delete") == 10
    assert [op for *_, op, _ in changes].count("upsert") == 6


def test_a_lease_that_ran_out_while_the_node_was_down_is_over(table_node: NodeProcess, table: Table) -> None:
    table.upsert(numbered(0, 30))
    held = table.lease(duration_ms=1_000).acquire()
    table_node.kill()
    wait_until(lambda: time.time() * 1000 > held.expires_at_ms, "the end of the lease")
    table_node.start()
    assert refusal(lambda: table.scan(lease=held).to_arrow()).table_code == TableCode.lease_not_found
    assert table.leases() == []


def test_a_left_behind_lease_is_released_by_its_id(db: Tidemill, table: Table) -> None:
    table.upsert(numbered(0, 3))
    held = table.lease().acquire()
    db.release_lease(held.lease_id)
    assert table.leases() == []
    assert refusal(lambda: db.release_lease(held.lease_id)).table_code == TableCode.lease_not_found


def test_a_lease_of_a_dropped_table_goes_with_it(db: Tidemill, table: Table) -> None:
    table.upsert(numbered(0, 3))
    held = table.lease().acquire()
    table.drop()
    assert held.lease_id not in [each.lease_id for each in db.leases()]


def test_partitions_that_come_after_a_lease_are_not_in_it(db: Tidemill) -> None:
    table = db.create_table(
        new_name("parted"), "day string, id bigint", primary_key=["day", "id"], partition_by="day", buckets=2
    )
    table.upsert([{"day": "mon", "id": n} for n in range(10)])
    with table.lease() as lease:
        table.upsert([{"day": "tue", "id": n} for n in range(5)])
        assert table.scan(lease=lease).count() == 10
        changes = records_of(table.follow(lease=lease, until_now=True))
        assert [op for *_, op, _ in changes].count("snapshot") == 10
        assert [row["day"] for *_, op, row in changes if op == "upsert"] == ["tue"] * 5
        table.drop_partition("mon")
        error = refusal(lambda: table.scan(lease=lease).count())
        assert error.table_code == TableCode.snapshot_not_found


# --- restarts


def test_a_client_goes_on_after_the_node_was_killed(table_node: NodeProcess, table: Table) -> None:
    expected: dict[tuple[int], dict[str, Any]] = {}
    for number in range(3):
        rows = numbered(number * 5, 20, f"life{number}-")
        table.upsert(rows)
        expected |= {(row["id"],): row for row in rows}
        table_node.kill()
        table_node.start()
        assert table.lookup(number * 5) == rows[0]
        assert by_key(table.scan().to_arrow().to_pylist(), ["id"]) == expected


def test_a_scan_that_the_server_has_lost_fails_and_keeps_failing(
    table_node: NodeProcess, table: Table
) -> None:
    table.upsert(numbered(0, 200))
    scanner = table.bucket_scanner(0, fetch_max_bytes=100)
    assert scanner.next_batch() is not None
    # An answer that was under way already may still come; what is behind it cannot.
    table_node.kill()
    table_node.start()
    error = refusal(lambda: list(scanner))
    assert error.table_code == TableCode.unknown_scanner_id
    assert scanner.state is ScannerState.FAILED
    for _ in range(2):
        assert refusal(scanner.next_batch) is error


def test_an_iteration_goes_on_with_the_same_rows_after_the_node_was_killed(
    table_node: NodeProcess, table: Table
) -> None:
    table.upsert(numbered(0, 200))
    batches = iter(table.scan(fetch_max_bytes=100))
    seen = next(batches).to_pylist()
    table_node.kill()
    table_node.start()
    table.upsert(numbered(0, 100, "later"))
    table.upsert(numbered(200, 20))
    table.delete(list(range(150, 200)))
    for batch in batches:
        seen += batch.to_pylist()
    assert sorted(seen, key=lambda row: row["id"]) == numbered(0, 200)
    # One who has given nothing yet begins again.
    assert len(ids(table.scan())) == 170


def test_a_reader_may_take_its_time_for_a_batch(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path / "data", scan_idle_ms=1_500, kv_check_interval_ms=100) as node,
        tidemill.connect(node.bootstrap_servers) as db,
    ):
        table = db.create_table(new_name("slow"), COLUMNS, primary_key="id", buckets=6)
        table.upsert(numbered(0, 600))
        rows = 0
        for number, batch in enumerate(table.scan(fetch_max_bytes=1_000)):
            rows += batch.num_rows
            if number in (0, 10):
                # Longer than the server would wait for one who says nothing.
                time.sleep(3)
        assert rows == 600
        scanner = table.bucket_scanner(0, fetch_max_bytes=100)
        scanner.next_batch()
        # One who reads bucket by bucket says it himself, or loses the scan.
        wait_until(lambda: sum(each.scanner_count for each in table.stats()) == 0, "the end of the scan")
        assert refusal(lambda: list(scanner)).table_code == TableCode.scanner_expired


def test_a_scan_goes_on_from_its_last_key_if_that_is_asked_for(table_node: NodeProcess, table: Table) -> None:
    table.upsert(numbered(0, 200))
    with table.bucket_scanner(0) as whole:
        expected = [key for batch in whole for key in batch.column("id").to_pylist()]
    scanner = table.bucket_scanner(0, fetch_max_bytes=300)
    seen: list[int] = []
    for _ in range(3):
        batch = scanner.next_batch()
        assert batch is not None
        seen += batch.column("id").to_pylist()
    next_key = scanner.next_key
    table_node.kill()
    table_node.start()
    with table.bucket_scanner(0, start_key=next_key) as rest:
        seen += [key for batch in rest for key in batch.column("id").to_pylist()]
    assert seen == expected


def test_what_is_appended_is_there_once_although_the_node_is_killed(tmp_path: Path) -> None:
    with (
        NodeProcess(tmp_path / "data", **SOON) as node,
        tidemill.connect(node.bootstrap_servers) as db,
    ):
        table = db.create_table(new_name("appended"), "writer int, n int", buckets=3)
        stop, failures = threading.Event(), list[BaseException]()
        written = [0, 0]

        def append(writer: int) -> None:
            try:
                with tidemill.connect(node.bootstrap_servers) as own:
                    log = own.table(table.name)
                    while not stop.is_set():
                        first = written[writer]
                        log.append([{"writer": writer, "n": n} for n in range(first, first + 50)])
                        written[writer] = first + 50
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=append, args=(writer,)) for writer in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):

            def enough(before: int = sum(written)) -> bool:
                return bool(failures) or sum(written) >= before + 200

            wait_until(enough, "rows")
            node.kill()
            node.start()
        stop.set()
        for thread in threads:
            thread.join(120)
        assert failures == []
        starts = {(table.name, bucket): 0 for bucket in range(3)}
        found = Counter(
            (row["writer"], row["n"])
            for *_, row in records_of(table.follow(from_offsets=starts, until_now=True))
        )
        assert found == Counter((writer, n) for writer in range(2) for n in range(written[writer]))


# --- damage


def files_of(node: NodeProcess, pattern: str) -> list[Path]:
    return sorted((node.data_dir / "kv").glob(pattern))


def damage(path: Path) -> None:
    """Turn over bits in the middle of a file, in a copy that has no other names."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 4, len(data) // 2, 50):
        data[place] ^= 0xFF
    path.unlink()
    path.write_bytes(data)


def test_a_damaged_leased_snapshot_is_reported_and_the_state_is_left_alone(
    table_node: NodeProcess, db: Tidemill
) -> None:
    table = db.create_table(new_name("leased"), COLUMNS, primary_key="id")
    table.upsert([{"id": n, "v": os.urandom(200).hex()} for n in range(2_000)])
    held = table.lease(duration_ms=60_000).acquire()
    for path in files_of(table_node, "*/snapshots/*/*.sst"):
        damage(path)
    error = refusal(lambda: table.scan(lease=held).to_arrow())
    assert error.table_code == TableCode.snapshot_not_found
    assert not error.retriable
    assert table.scan().count() == 2_000
    assert "is built again" not in table_node.log_text()
