"""Scan sessions of a real node over TCP: raw ScanKv requests, and scanners whose connections break.

``tests/unit/server/handlers/tables/test_scans.py`` has every rule for itself, with a manual clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pyarrow as pa
import pytest

import tidemill
from support.ports import free_port
from tidemill.client.async_client import AsyncTidemill
from tidemill.client.cluster import Cluster
from tidemill.client.tables.bucket_scanner import ScannerState
from tidemill.client.tables.table import AsyncTable
from tidemill.config.values import Address
from tidemill.control.commands import BumpLeaderEpochs
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.net.connection import Connection

EXPIRED, UNKNOWN, INVALID, TOO_MANY = 1066, 1067, 1068, 1069
SMALL = 128
DEADLINE_SECONDS = 120


class CuttingProxy:
    """Stands between clients and a node, and loses an answer with its connection now and then."""

    def __init__(self, node_port: int) -> None:
        self._node_port = node_port
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        #: Says of each piece that comes from the node whether it gets lost.
        self.loses: Callable[[], bool] = lambda: False
        self.lost = 0

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self._node_port)
        pair = {writer, node_writer}
        self._writers |= pair
        for pump in (self._pump(reader, node_writer, pair), self._pump(node_reader, writer, pair, True)):
            task = asyncio.get_running_loop().create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: set[asyncio.StreamWriter],
        from_node: bool = False,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if from_node and self.loses():
                    self.lost += 1
                    break
                writer.write(data)
                await writer.drain()
        for each in pair:
            each.transport.abort()
        self._writers -= pair


def on_node(node: EmbeddedNode, work: Coroutine[Any, Any, Any]) -> Any:
    """Run something on the event loop of a node."""
    assert node._loop is not None
    return asyncio.run_coroutine_threadsafe(work, node._loop).result(DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    """A node with few places for scans."""
    with tidemill.open(scan_sessions_per_bucket=3, scan_sessions=5) as running:
        yield running


@pytest.fixture
async def db(node: EmbeddedNode) -> AsyncIterator[AsyncTidemill]:
    async with await tidemill.connect_async(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
async def table(db: AsyncTidemill, request: pytest.FixtureRequest) -> AsyncIterator[AsyncTable]:
    """Two buckets with 200 rows."""
    name = f"t.{request.node.originalname[:80]}"
    made = await db.create_table(name, "id bigint, name string", primary_key=["id"], buckets=2)
    await made.upsert([{"id": number, "name": f"row {number}"} for number in range(200)])
    yield made
    await db.drop_table(name)


class Raw:
    """ScanKv requests over one connection, with nothing hidden."""

    def __init__(self, connection: Connection, table: AsyncTable) -> None:
        self.connection = connection
        self._table = table

    async def open(self, bucket: int = 0, **more: Any) -> Any:
        definition = self._table.definition
        body = {
            "scanner_id": None,
            "table_id": definition.table_id,
            "bucket": bucket,
            "leader_epoch": -1,
            "batch_size_bytes": SMALL,
            **more,
        }
        return await self.connection.request("ScanKv", body)

    async def call(self, scanner_id: bytes, sequence: int, size: int = SMALL) -> Any:
        body = {"scanner_id": scanner_id, "call_sequence": sequence, "batch_size_bytes": size}
        return await self.connection.request("ScanKv", body)

    async def close(self, scanner_id: bytes) -> Any:
        return await self.connection.request("ScanKv", {"scanner_id": scanner_id, "close": True})


@pytest.fixture
async def connect(
    node: EmbeddedNode, table: AsyncTable
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, Raw]]]:
    """Opens connections of their own."""
    host, port = node.bootstrap_servers.split(":")
    opened: list[Connection] = []

    async def open_one() -> Raw:
        opened.append(await Connection.open(Address(host, int(port))))
        return Raw(opened[-1], table)

    yield open_one
    for connection in opened:
        await connection.close()


@pytest.fixture
async def raw(connect: Callable[[], Coroutine[Any, Any, Raw]]) -> Raw:
    return await connect()


async def scanner_count(table: AsyncTable) -> int:
    return sum(bucket.scanner_count for bucket in await table.stats())


async def no_scanners(table: AsyncTable) -> None:
    """Wait until the table has no scan that is open."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await scanner_count(table):  # noqa: ASYNC110 - only asking shows it
            await asyncio.sleep(0.01)


def ids(batches: list[pa.RecordBatch]) -> list[int]:
    return [number for batch in batches for number in batch.column("id").to_pylist()]


def rows_of(response: Any) -> list[dict[str, Any]]:
    return [] if response.records is None else pa.ipc.open_stream(response.records).read_all().to_pylist()


# --- sequences and duplicates


async def test_calls_count_up_from_0_to_the_end(table: AsyncTable, raw: Raw) -> None:
    found, total = [], 0
    for bucket in (0, 1):
        response, sequence = await raw.open(bucket), 0
        scanner_id = response.scanner_id
        assert response.log_offset > 0
        total += response.log_offset
        found += rows_of(response)
        while response.has_more:
            sequence += 1
            response = await raw.call(scanner_id, sequence)
            found += rows_of(response)
        assert (await raw.call(scanner_id, sequence + 1)).error_code == UNKNOWN
    assert sorted(row["id"] for row in found) == list(range(200))
    assert total == 200
    assert await scanner_count(table) == 0


async def test_a_duplicate_call_returns_the_same_batch_also_after_the_connection_was_lost(
    connect: Callable[[], Coroutine[Any, Any, Raw]],
) -> None:
    first = await connect()
    opened = await first.open()
    second_batch = await first.call(opened.scanner_id, 1)
    await first.connection.close()
    other = await connect()
    again = await other.call(opened.scanner_id, 1)
    assert (again.records, again.next_key) == (second_batch.records, second_batch.next_key)
    last = await other.call(opened.scanner_id, 2, 1 << 20)
    assert not last.has_more
    await other.connection.close()
    third = await connect()
    again = await third.call(opened.scanner_id, 2, 1 << 20)
    assert (again.error_code, again.records, again.has_more) == (0, last.records, False)


async def test_a_wrong_call_is_refused_and_the_session_lives_on(raw: Raw) -> None:
    opened = await raw.open()
    for wrong in (2, 5, -1):
        assert (await raw.call(opened.scanner_id, wrong)).error_code == INVALID
    assert (await raw.open(call_sequence=1)).error_code == INVALID
    assert (await raw.call(opened.scanner_id, 1)).error_code == 0
    await raw.close(opened.scanner_id)


async def test_closing_twice_and_closing_what_never_was_is_fine(table: AsyncTable, raw: Raw) -> None:
    opened = await raw.open()
    assert await scanner_count(table) == 1
    for scanner_id in (opened.scanner_id, opened.scanner_id, b"made up"):
        assert (await raw.close(scanner_id)).error_code == 0
    assert await scanner_count(table) == 0
    assert (await raw.call(opened.scanner_id, 1)).error_code == UNKNOWN


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"bucket": 2}, TableCode.bucket_not_found),
        ({"bucket": -1}, TableCode.bucket_not_found),
        ({"partition_id": 4}, TableCode.partition_not_found),
        ({"table_id": 10**9}, TableCode.table_not_found),
        ({"leader_epoch": 99}, ErrorCode.unknown_leader_epoch),
        ({"columns": ["colour"]}, TableCode.invalid_scan_request),
        ({"batch_size_bytes": 0}, TableCode.invalid_scan_request),
        ({"pin_id": "made up"}, TableCode.pin_not_found),
        ({"lease_id": "made up"}, TableCode.lease_not_found),
        ({"predicate": b"\xff"}, TableCode.invalid_predicate),
    ],
)
async def test_a_scan_that_cannot_be_is_refused_with_its_code(
    table: AsyncTable, raw: Raw, more: dict[str, Any], code: int
) -> None:
    response = await raw.open(**more)
    assert (response.error_code, bool(response.error_message)) == (code, True)
    assert await scanner_count(table) == 0


async def test_a_table_without_a_key_cannot_be_scanned(db: AsyncTidemill, raw: Raw) -> None:
    log = await db.create_table("t.log", "id bigint")
    response = await raw.open(table_id=log.definition.table_id)
    assert response.error_code == TableCode.not_a_primary_key_table
    with pytest.raises(TableError, match="no primary key") as error:
        log.scan()
    assert error.value.table_code is TableCode.not_a_primary_key_table
    await db.drop_table("t.log")


async def test_an_empty_bucket_has_no_more_and_no_id(db: AsyncTidemill, raw: Raw) -> None:
    empty = await db.create_table("t.empty", "id bigint", primary_key=["id"])
    response = await raw.open(table_id=empty.definition.table_id)
    assert (response.scanner_id, response.has_more, response.records) == (None, False, None)
    scanner = empty.bucket_scanner(0)
    assert await scanner.next_batch() is None
    assert (scanner.state, scanner.log_offset) == (ScannerState.DONE, 0)
    await db.drop_table("t.empty")


# --- limits


async def test_limits_are_told_and_scanners_succeed_as_places_become_free(
    table: AsyncTable, raw: Raw, connect: Callable[[], Coroutine[Any, Any, Raw]]
) -> None:
    held = [await raw.open(0) for _ in range(3)]
    held.append(await (await connect()).open(1))
    assert [response.error_code for response in held] == [0] * 4
    per_bucket, per_node = await raw.open(0), await raw.open(1)
    assert (per_bucket.error_code, per_node.error_code) == (TOO_MANY, TOO_MANY)
    assert "3 scans of bucket 0 can be open at a time" in per_bucket.error_message
    assert "5 scans on this node can be open at a time" in per_node.error_message
    assert "the connections of 127.0.0.1 hold 4 of them" in per_node.error_message

    async def read(bucket: int) -> list[int]:
        async with table.bucket_scanner(bucket, fetch_max_bytes=1_000) as scanner:
            batches = []
            while (batch := await scanner.next_batch()) is not None:
                batches.append(batch)
            return ids(batches)

    reading = [asyncio.ensure_future(read(number % 2)) for number in range(12)]
    await asyncio.wait(reading, timeout=0.2)
    assert not any(task.done() for task in reading), "there is no place yet"
    for response in held:
        await raw.close(response.scanner_id)
    async with asyncio.timeout(DEADLINE_SECONDS):
        results = await asyncio.gather(*reading)
    assert sorted(results[0] + results[1]) == list(range(200))
    assert all(result == results[number % 2] for number, result in enumerate(results))
    assert await scanner_count(table) == 0


async def test_a_table_with_more_buckets_than_the_node_has_places_is_scanned_whole(db: AsyncTidemill) -> None:
    wide = await db.create_table("t.wide", "id bigint", primary_key=["id"], buckets=17)
    await wide.upsert([{"id": number} for number in range(500)])
    scans = [wide.scan(fetch_max_bytes=SMALL, parallel=8).to_arrow() for _ in range(3)]
    async with asyncio.timeout(DEADLINE_SECONDS):
        for found in await asyncio.gather(*scans):
            assert sorted(found.column("id").to_pylist()) == list(range(500))
    await db.drop_table("t.wide")


async def test_a_scan_that_is_dropped_in_the_middle_frees_its_places(table: AsyncTable) -> None:
    for _ in range(10):
        async for batch in table.scan(fetch_max_bytes=SMALL):
            assert batch.num_rows
            break
        gc.collect()
    await no_scanners(table)


async def test_scans_with_a_limit_leave_nothing_open(table: AsyncTable) -> None:
    for _ in range(10):
        found = await table.scan(limit=1, fetch_max_bytes=SMALL).to_arrow()
        assert found.num_rows == 1
    assert await scanner_count(table) == 0


# --- connections that break


@pytest.fixture
async def proxied(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[CuttingProxy, AsyncTidemill]]:
    """A node that clients reach through a proxy only."""
    node_port, proxy_port = free_port(), free_port()
    proxy = CuttingProxy(node_port)
    await proxy.start(proxy_port)
    opening = asyncio.to_thread(
        tidemill.open, listen=f"127.0.0.1:{node_port}", advertised_listener=Address("127.0.0.1", proxy_port)
    )
    node = await opening
    try:
        async with await tidemill.connect_async(f"127.0.0.1:{proxy_port}") as db:
            yield proxy, db
    finally:
        await proxy.close()
        await asyncio.to_thread(node.close)


async def test_every_row_comes_once_although_answers_get_lost_on_the_way(
    proxied: tuple[CuttingProxy, AsyncTidemill],
) -> None:
    proxy, db = proxied
    table = await db.create_table("t.lossy", "id bigint, name string", primary_key=["id"], buckets=3)
    await table.upsert([{"id": number, "name": "x" * 40} for number in range(300)])
    rng = random.Random(7)
    proxy.loses = lambda: rng.random() < 0.1
    async with asyncio.timeout(2 * DEADLINE_SECONDS):
        found = ids([batch async for batch in table.scan(fetch_max_bytes=512)])
    proxy.loses = lambda: False
    assert proxy.lost > 5
    assert sorted(found) == list(range(300))


async def test_a_scanner_survives_the_loss_of_its_connection_at_any_call(
    proxied: tuple[CuttingProxy, AsyncTidemill],
) -> None:
    proxy, db = proxied
    table = await db.create_table("t.cut", "id bigint", primary_key=["id"])
    await table.upsert([{"id": number} for number in range(12)])
    async with table.bucket_scanner(0, fetch_max_bytes=SMALL) as scanner:
        found = []
        while (batch := await scanner.next_batch()) is not None:
            found.append(batch)
            proxy.cut()
    assert len(found) == 3
    assert ids(found) == list(range(12))


# --- isolation


async def test_a_scan_is_the_fold_of_the_log_at_its_offset_while_others_write(
    db: AsyncTidemill, node: EmbeddedNode
) -> None:
    table = await db.create_table(
        "t.busy", "id bigint, version bigint", primary_key=["id"], row_format="json"
    )
    await table.upsert([{"id": number, "version": 0} for number in range(100)])
    stop = asyncio.Event()

    async def write() -> None:
        async with await tidemill.connect_async(node.bootstrap_servers) as other:
            mine = await other.table("t.busy")
            rng, version = random.Random(3), 0
            while not stop.is_set():
                version += 1
                await mine.upsert([{"id": rng.randrange(120), "version": version} for _ in range(5)])
                await mine.delete([rng.randrange(120)])

    writing = asyncio.ensure_future(write())
    seen: list[tuple[int, dict[int, int]]] = []
    for _ in range(5):
        async with table.bucket_scanner(0, fetch_max_bytes=SMALL) as scanner:
            rows: dict[int, int] = {}
            while (batch := await scanner.next_batch()) is not None:
                for row in batch.to_pylist():
                    assert row["id"] not in rows
                    rows[row["id"]] = row["version"]
                await asyncio.sleep(0)
            assert scanner.log_offset is not None
            seen.append((scanner.log_offset, rows))
    stop.set()
    await writing
    # The same from the log: the state behind every offset.
    state: dict[int, int] = {}
    folds: dict[int, dict[int, int]] = {}
    async for batch in table.follow(snapshot=False, from_offsets={("t.busy", 0): 0}, until_now=True):
        for op, row, offset in zip(
            batch.ops.to_pylist(), batch.rows.to_pylist(), batch.offsets.to_pylist(), strict=True
        ):
            if op == "delete":
                state.pop(row["id"], None)
            else:
                state[row["id"]] = row["version"]
            folds[offset + 1] = dict(state)
    assert len({offset for offset, _ in seen}) > 1, "others wrote meanwhile"
    for offset, rows in seen:
        assert rows == folds[offset]
    await db.drop_table("t.busy")


# --- leaders


async def test_a_new_leader_epoch_ends_the_scan_and_it_keeps_failing(
    node: EmbeddedNode, table: AsyncTable, raw: Raw
) -> None:
    opened = await raw.open()
    async with table.bucket_scanner(0, fetch_max_bytes=SMALL) as scanner:
        assert await scanner.next_batch() is not None
        command = BumpLeaderEpochs(name=table.definition.partitions[0].topic, partitions=(0,))
        await asyncio.to_thread(on_node, node, node._node.broker.controller.submit(command))
        assert (await raw.call(opened.scanner_id, 1)).error_code == EXPIRED
        errors: list[TableError] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not errors:
                try:
                    # One batch may be on its way since before.
                    assert await scanner.next_batch() is not None
                except TableError as error:
                    errors.append(error)
        with pytest.raises(TableError) as again:
            await scanner.next_batch()
        assert again.value is errors[0]
        assert again.value.table_code is TableCode.scanner_expired
        assert "new leader epoch" in again.value.message
        assert scanner.state is ScannerState.FAILED
    fenced = await raw.open(leader_epoch=0)
    assert fenced.error_code == ErrorCode.fenced_leader_epoch
    assert (await table.scan().to_arrow()).num_rows == 200


# --- expiry


async def test_an_idle_session_expires_and_keep_alive_keeps_it(
    node: EmbeddedNode, table: AsyncTable, raw: Raw
) -> None:
    broker = node._node.broker
    real, skipped_ms = broker.steady_ms, 0

    def later() -> int:
        return real() + skipped_ms

    broker.steady_ms = later
    try:
        idle, kept = await raw.open(), await raw.open()
        for _ in range(2):
            skipped_ms += 400_000
            alive = await raw.connection.request(
                "ScanKv", {"scanner_id": kept.scanner_id, "keep_alive": True}
            )
            assert alive.error_code == 0
            await asyncio.to_thread(on_node, node, broker.tables.housekeep())
        response = await raw.call(idle.scanner_id, 1)
        assert response.error_code == EXPIRED
        assert "idle for 600000 ms" in response.error_message
        assert (await raw.call(kept.scanner_id, 1)).error_code == 0
        await raw.close(kept.scanner_id)
    finally:
        broker.steady_ms = real


# --- pins


async def test_several_clients_share_a_pin_and_see_the_same_rows(
    node: EmbeddedNode, table: AsyncTable, connect: Callable[[], Coroutine[Any, Any, Raw]]
) -> None:
    pin = await table.pin()
    await table.upsert([{"id": number, "name": "later"} for number in range(100, 300)])
    await table.delete(list(range(50)))

    async def read(bucket: int) -> list[dict[str, Any]]:
        mine = await connect()
        response = await mine.open(bucket, pin_id=pin.pin_id, batch_size_bytes=1 << 20)
        assert response.log_offset == pin.log_offsets[table.definition.partitions[0].topic, bucket]
        return rows_of(response)

    first, second = [await asyncio.gather(read(0), read(1)) for _ in range(2)]
    assert first == second
    rows = sorted(first[0] + first[1], key=lambda row: row["id"])
    assert rows == [{"id": number, "name": f"row {number}"} for number in range(200)]
    await table.release_pin(pin.pin_id)
    late = await (await connect()).open(0, pin_id=pin.pin_id)
    assert late.error_code == TableCode.pin_not_found


async def test_a_scan_goes_on_when_its_pin_is_released(table: AsyncTable) -> None:
    pin = await table.pin()
    async with table.bucket_scanner(0, pin_id=pin.pin_id, fetch_max_bytes=SMALL) as scanner:
        found = [await scanner.next_batch()]
        await table.release_pin(pin.pin_id)
        await table.delete(list(range(200)))
        while (batch := await scanner.next_batch()) is not None:
            found.append(batch)
    assert len(ids(found)) == pin.log_offsets[table.definition.partitions[0].topic, 0]


# --- servers that cannot


async def test_a_server_without_scans_gives_a_plain_error(node: EmbeddedNode, table: AsyncTable) -> None:
    async with Cluster(node.bootstrap_servers) as cluster:
        (leader,) = await cluster.leaders([(table.definition.partitions[0].topic, 0)])
        connection = await cluster.connection(leader, purpose="scan")
        del connection.served[1061]
        scanner = AsyncTable(cluster, table.definition).bucket_scanner(0)
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await scanner.next_batch()
            assert error.value.code is ErrorCode.unsupported_version
            assert error.value.message.startswith("this server cannot scan tables: the node at")
            assert "does not serve ScanKv (API key 1061)" in error.value.message
        assert scanner.state is ScannerState.FAILED
