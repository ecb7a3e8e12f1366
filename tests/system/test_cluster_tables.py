"""Tables over three real nodes and a real etcd: readers equal a dictionary, also across a ``kill -9``."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

import tidemill
from support.etcd import NO_ETCD, has_etcd
from support.processes import wait_until
from support.real_cluster import RealCluster
from support.real_tables import Follower, Model, as_dict
from tidemill.client.async_client import AsyncTidemill
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.table_scan import AsyncScan
from tidemill.config.values import parse_address
from tidemill.errors import TableError
from tidemill.net.connection import Connection

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

BUCKETS = 6
KEYS = 300
SOON = 120.0
#: One test waits for the end of a session.
_SESSION_MS = 10_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with RealCluster(tmp_path_factory.mktemp("cluster"), session_timeout_ms=_SESSION_MS) as running:
        yield running


@pytest.fixture(autouse=True)
def show_logs(cluster: RealCluster) -> Iterator[None]:
    """The nodes' last words are part of what pytest shows of a test that fails."""
    yield
    print(cluster.logs())  # noqa: T201


@asynccontextmanager
async def connected(cluster: RealCluster) -> AsyncIterator[AsyncTidemill]:
    async with await tidemill.connect_async(cluster.bootstrap_servers, timeout_ms=120_000) as client:
        yield client


async def created(client: AsyncTidemill) -> AsyncTable:
    """A new table. Those of other tests are gone, so that every test sees one."""
    await client.create_database("shop", if_not_exists=True)
    for each in await client.tables():
        await (await client.table(each.name)).drop()
    return await client.create_table(
        "shop.stock", "item bigint not null, amount bigint", primary_key="item", buckets=BUCKETS
    )


class Iteration:
    """An iteration over a scan, which a test lets go on step by step."""

    def __init__(self, scan: AsyncScan) -> None:
        self._batches = scan.batches()
        self.rows: dict[int, int] = {}

    async def begin(self) -> None:
        self._take(await anext(self._batches))

    async def rest(self) -> TableError | None:
        """Read on to the end, or to an error that says what to do."""
        try:
            async for batch in self._batches:
                self._take(batch)
        except TableError as error:
            return error
        return None

    def _take(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            assert row["item"] not in self.rows, "no row comes twice"
            self.rows[row["item"]] = row["amount"]


async def check_all_readers(model: Model) -> None:
    table, rows = model.table, model.rows
    assert as_dict(await table.scan().to_arrow()) == rows
    assert await table.count() == len(rows)
    assert await table.count("amount > 3") == sum(amount > 3 for amount in rows.values())
    some = [*range(0, KEYS, 7)]
    assert as_dict(await table.lookup(some)) == {item: rows[item] for item in some if item in rows}
    for item in some[:5]:
        assert as_dict(await table.lookup_prefix(item)) == ({item: rows[item]} if item in rows else {})
    assert [row["item"] for row in (await table.head(5)).to_pylist()] == sorted(rows)[:5]


def folding_nodes(cluster: RealCluster) -> set[int]:
    """On how many nodes there is state, for each bucket."""
    found = Counter(path.parent.name for node in cluster for path in node.data_dir.glob("kv/*/live"))
    return {found[name] for name in found} if len(found) == BUCKETS else set()


async def test_a_table_over_three_nodes_is_one_table(cluster: RealCluster) -> None:
    async with connected(cluster) as client:
        table = await created(client)
        topic = table.definition.partitions[0].topic
        model = Model(table)
        rng = random.Random(1)
        for _ in range(6):
            await model.upsert(rng.sample(range(KEYS), 60))
            await model.delete(rng.sample(range(KEYS), 10))
        leaders = {each.leader for each in cluster.partitions(topic).values()}
        assert len(leaders) == 3, "every node leads some of the buckets"
        await check_all_readers(model)
        await asyncio.to_thread(
            wait_until, lambda: folding_nodes(cluster) == {2}, "the leader of each bucket and a standby fold"
        )
        pin = await table.pin()
        assert len(pin.log_offsets) == BUCKETS
        assert set(pin.nodes) == leaders
        await table.release_pin(pin.pin_id, keep_alive=True, nodes=pin.nodes)
        await table.release_pin(pin.pin_id)
        with pytest.raises(TableError):
            await table.release_pin(pin.pin_id, keep_alive=True)

        stats = await table.stats()
        assert [each.bucket for each in stats] == [*range(BUCKETS)]
        assert [each.problem for each in stats] == [None] * BUCKETS
        assert sum(each.row_count for each in stats) == len(model.rows)
        assert [each.bucket for each in await table.create_snapshot()] == [*range(BUCKETS)]
        assert {each.bucket for each in await table.snapshots()} == {*range(BUCKETS)}

        async with table.lease(fresh=True) as lease:
            frozen = dict(model.rows)
            assert len(lease.log_offsets) == BUCKETS
            await model.upsert([*range(KEYS)])
            assert as_dict(await table.scan(lease=lease).to_arrow()) == frozen
            (listed,) = await table.leases()
            assert listed.log_offsets == lease.log_offsets
        follower = Follower(table)
        await follower.has(model.rows)
        await model.delete([1, 2, 3])
        await follower.has(model.rows)
        await follower.stop()
        await table.drop()
        assert await client.tables() == []


async def test_a_killed_node_takes_nothing_with_it_and_nobody_sees_an_older_row(cluster: RealCluster) -> None:
    async with connected(cluster) as client, connected(cluster) as other:
        model = Model(await created(client))
        topic = model.table.definition.partitions[0].topic
        await model.upsert([*range(KEYS)])
        lease = model.table.lease(fresh=True)
        await lease.acquire()
        frozen = dict(model.rows)
        reading = await other.table("shop.stock")
        follower = Follower(reading)
        await follower.has(frozen)

        over = asyncio.Event()
        rng = random.Random(2)

        async def write() -> None:
            while not over.is_set():
                await model.upsert(rng.sample(range(KEYS), 5))

        async def look() -> None:
            while not over.is_set():
                item = rng.randrange(KEYS)
                known = model.rows[item]
                row = await reading.lookup(item)
                assert row is not None, "an acknowledged row is there"
                assert row["amount"] >= known, "a look-up never goes back"

        working = [asyncio.create_task(write()), asyncio.create_task(look()), asyncio.create_task(look())]
        victim = await asyncio.to_thread(cluster.leader, topic)
        # Small batches, one bucket after the other: much is still to come when the node dies.
        by_lease = Iteration(reading.scan(lease=lease, fetch_max_bytes=200, parallel=1))
        by_pin = Iteration(reading.scan(fetch_max_bytes=200, parallel=1))
        await by_lease.begin()
        await by_pin.begin()
        await model.upsert([0])
        await asyncio.to_thread(victim.kill)
        await asyncio.to_thread(cluster.wait_for_leaders, topic, victim)
        assert await by_lease.rest() is None
        assert by_lease.rows == frozen, "the same rows, each once, behind a pause"
        assert await by_pin.rest() is None, "also where a bucket was half read on the node that died"
        assert by_pin.rows.keys() == frozen.keys()
        assert all(amount >= frozen[item] for item, amount in by_pin.rows.items())
        written = len(model.rows), max(model.rows.values())
        async with asyncio.timeout(SOON):
            while max(model.rows.values()) < written[1] + 20:
                assert not any(each.done() for each in working), [each for each in working if each.done()]
                await asyncio.wait(working, timeout=0.05)
        over.set()
        await asyncio.gather(*working)

        await check_all_readers(model)
        await follower.has(model.rows)
        await follower.stop()
        leased = as_dict(await model.table.scan(lease=lease).to_arrow())
        assert leased == frozen, "the new leaders have no snapshot of it, and build it again"
        await lease.release()
        await asyncio.to_thread(victim.start)
        await asyncio.to_thread(cluster.wait_in_sync, topic, 3)
        await model.upsert([*range(KEYS)])
        await check_all_readers(model)


async def test_a_leader_that_was_deposed_while_it_hung_answers_no_look_up(
    cluster: RealCluster,
) -> None:
    async with connected(cluster) as client:
        model = Model(await created(client))
        await model.upsert([*range(KEYS)])
        table = model.table
        keys = table.definition.keys
        columns = keys.columns_from([7])
        (bucket,) = table.definition.bucket_map.route(keys.canonical(columns), keys.state_keys(columns))
        topic = table.definition.partitions[0].topic
        old = await asyncio.to_thread(cluster.leader, topic, int(bucket))
        body = {
            "table_id": table.definition.table_id,
            "partition_id": 0,
            "bucket": int(bucket),
            "leader_epoch": -1,
            "keys": keys.state_keys(columns).to_pylist(),
            "columns": ["amount"],
            "min_offset": -1,
            "max_wait_ms": 1_000,
        }
        direct = await Connection.open(parse_address(old.server), client_id="direct")
        try:
            assert (await direct.request("LookupKv", body)).error_code == 0
            old.pause()
            await asyncio.to_thread(cluster.wait_for_leaders, topic, old)
            await model.upsert([7])
            # It lies in the old leader's socket when that goes on, and is among the first that it sees.
            asked = asyncio.create_task(direct.request("LookupKv", body))
            await asyncio.wait([asked], timeout=0.2)
            old.resume()
            answer = await asked
            assert answer.error_code != 0, "its state is older than what others have seen"
        finally:
            await direct.close()
        await check_all_readers(model)
