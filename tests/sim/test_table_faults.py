"""A table on a whole node under random crashes, with its state in dictionaries on a disk that lies.

One seed is one story, on a virtual loop. Writers upsert and delete rows, some in transactions that commit or
abort; readers scan buckets in small pieces and look up keys; somebody takes snapshots and leases and scans
what is under the lease. Meanwhile the power goes in the middle of a storage call, the process is killed, the
disk fills up, an fsync fails. At the end everything heals, and a client of committed data reads the logs.

Invariant 11 must hold: every scan equals the fold of the log up to the scan's offset, every look-up has the
rows of its offset or of a later one, what is leased is there with the offset that it had, and the state comes
to the end of the log.

Replay one with ``run_story(seed)``; a seed gives the same trace every time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support import dict_engine
from support.dict_engine import SimFiles
from support.faulty_storage import FaultyStorage, PowerCut
from support.memory_store import MemoryStore
from support.sim_network import SimNetwork
from support.sim_node import SimNode
from support.table_world import ManualClock, TableWorld, rows_of
from support.virtual_loop import current_loop, run_virtual
from tidemill.client.tables.writer import PreparedRows, prepare_deletes, prepare_upserts
from tidemill.errors import ErrorCode, SyncFailed, TidemillError
from tidemill.net.connection import Connection
from tidemill.records.batch import parse_header
from tidemill.records.columns.build import build_batch_columns
from tidemill.records.control import read_marker
from tidemill.records.record import read_records
from tidemill.tables.definition import TableDefinition
from tidemill.tables.state import folding

SEEDS = 20
SEEDS_PER_TEST = 5
TRACED_SEEDS = 2
STEPS = 30
TABLE = "shop.orders"
BUCKETS = 2
KEYS = [f"k{number}" for number in range(12)]
COLUMNS = "id string, n bigint"
#: Snapshots come often, and the log is read in many pieces.
SETTINGS: dict[str, Any] = {"kv_snapshot_log_bytes": 1024, "kv_check_interval_ms": 300}
PROPERTIES = {"internal.segment.bytes": "4000", "index.interval.bytes": "200"}
LEASE_MS = 30 * 24 * 3_600_000
TRANSACTIONAL = 0x10
#: Longer than blocking work takes in any story.
REST_SECONDS = 5.0
ANSWER_MS = 60_000

Row = dict[str, Any]
State = dict[str, Row]


class Refused(Exception):
    """The node cannot do it now."""


@dataclass(frozen=True)
class Scanned:
    """All rows of a bucket, and the offset that they stand for."""

    bucket: int
    log_offset: int
    rows: State
    how: str


@dataclass(frozen=True)
class LookedUp:
    """What was found under a key, by a state that has at least the log below the offset."""

    bucket: int
    log_offset: int
    key: str
    row: Row | None


@dataclass
class Leased:
    """A lease, and the offset of each bucket's snapshot."""

    lease_id: str
    log_offsets: dict[int, int]


@dataclass
class Log:
    """The committed records of a bucket: (offset, key, row, or None for a deletion)."""

    changes: list[tuple[int, str, Row | None]] = field(default_factory=list)
    end: int = 0

    def fold(self, offset: int) -> State:
        state: State = {}
        for at, key, row in self.changes:
            if at < offset:
                if row is None:
                    state.pop(key, None)
                else:
                    state[key] = row
        return state

    def rows_from(self, offset: int, key: str) -> list[Row | None]:
        """What the key had at the offset, and what it got later."""
        later = [row for at, each, row in self.changes if each == key and at >= offset]
        return [self.fold(offset).get(key), *later]


class Client:
    """A connection to whatever process of the node is there, and the requests that the story makes."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._connection: Connection | None = None

    async def ask(self, api: str, version: int, **body: Any) -> Any:
        """The answer; ``Refused`` if there is none."""
        try:
            if self._connection is None or self._connection.failed:
                self._connection = await Connection.open(
                    self.story.node.node.address, transport=self.story.network.transport("client")
                )
            return await self._connection.request(
                api, body, versions=(version, version), timeout_ms=ANSWER_MS
            )
        except (TidemillError, OSError) as error:
            raise Refused(str(error)) from error

    async def done(self, api: str, version: int = 0, **body: Any) -> Any:
        answer = await self.ask(api, version, **body)
        if answer.error_code:
            raise Refused(f"{api}: {answer.error_code} {getattr(answer, 'error_message', '')}")
        return answer

    async def produce(self, bucket: int, records: bytes, transactional_id: str | None = None) -> int:
        part = {"name": TABLE, "partition_data": [{"index": bucket, "records": records}]}
        answer = await self.ask(
            "Produce", 9, transactional_id=transactional_id, acks=-1, timeout=60_000, topic_data=[part]
        )
        result = answer.responses[0].partition_responses[0]
        if result.error_code:
            raise Refused(f"Produce: {result.error_code} {result.error_message}")
        return int(result.base_offset)

    async def scan(self, bucket: int, how: str, size: int, **more: Any) -> Scanned:
        """A whole bucket, call by call."""
        table = self.story.table
        answer = await self.done(
            "ScanKv",
            scanner_id=None,
            table_id=table.table_id,
            partition_id=table.partitions[0].id,
            bucket=bucket,
            leader_epoch=-1,
            limit=0,
            columns=(),
            call_sequence=0,
            batch_size_bytes=size,
            **more,
        )
        log_offset, rows, sequence = answer.log_offset, rows_of(answer), 0
        while answer.has_more:
            sequence += 1
            answer = await self.done(
                "ScanKv", scanner_id=answer.scanner_id, call_sequence=sequence, batch_size_bytes=size
            )
            rows += rows_of(answer)
        found = {row["id"]: row for row in rows}
        assert len(found) == len(rows), "a key comes twice"
        return Scanned(bucket, log_offset, found, how)

    async def look_up(self, key: str) -> LookedUp:
        table = self.story.table
        (bucket,) = _parts(prepare_deletes(table, table.keys.columns_from([key])))
        answer = await self.done(
            "LookupKv",
            table_id=table.table_id,
            partition_id=table.partitions[0].id,
            bucket=bucket,
            leader_epoch=-1,
            keys=table.keys.state_keys(table.keys.columns_from([key])).to_pylist(),
            columns=(),
            min_offset=-1,
            max_wait_ms=5_000,
        )
        found = [{name: row[name] for name in ("id", "n")} for row in rows_of(answer)]
        return LookedUp(bucket, answer.log_offset, key, found[0] if found else None)


class Transaction:
    """The requests of one transaction, made by a producer that was initialized for it."""

    def __init__(self, client: Client, transactional_id: str) -> None:
        self._client = client
        self._id = transactional_id
        self._producer = (-1, -1)
        self._sequences: dict[int, int] = {}

    async def begin(self) -> None:
        answer = await self._client.done(
            "InitProducerId",
            4,
            transactional_id=self._id,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        self._producer = answer.producer_id, answer.producer_epoch

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "transactional_id": self._id,
            "producer_id": self._producer[0],
            "producer_epoch": self._producer[1],
        }

    async def write(self, bucket: int, keys: Any, values: Any) -> None:
        added = {f"v3_and_below_{name}": value for name, value in self._identity.items()}
        added["v3_and_below_topics"] = [{"name": TABLE, "partitions": [bucket]}]
        answer = await self._client.ask("AddPartitionsToTxn", 3, **added)
        (topic,) = answer.results_by_topic_v3_and_below
        if topic.results_by_partition[0].partition_error_code:
            raise Refused("AddPartitionsToTxn")
        sequence = self._sequences.get(bucket, 0)
        records = build_batch_columns(
            keys,
            values,
            timestamp_ms=self._client.story.node.now_ms,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        self._sequences[bucket] = sequence + len(values)
        await self._client.produce(bucket, records, self._id)

    async def end(self, *, commit: bool) -> None:
        await self._client.done("EndTxn", 3, **self._identity, committed=commit)


class Story:
    """One seed. Made and run on a virtual loop."""

    def __init__(self, seed: int) -> None:
        self.loop = current_loop()
        self.rng = random.Random(seed)
        self.network = SimNetwork(self.loop)
        self.store = MemoryStore(clock_ms=self.loop.now_ms)
        self.storage = FaultyStorage(self.rng)
        self.storage.on_call = lambda call, path: self.loop.note(f"{call} {path}")
        self.node: SimNode
        self.table: TableDefinition
        self.scans: list[Scanned] = []
        self.look_ups: list[LookedUp] = []
        self.leases: list[Leased] = []
        #: What was acknowledged: (bucket, offset, key).
        self.acknowledged: list[tuple[int, int, str]] = []
        self.committed = 0
        self.crashes = 0
        self._made = 0
        self._ends = False

    async def run(self) -> None:
        await self._start()
        await self._create_table()
        actors = [
            asyncio.create_task(self._act(work))
            for work in (self._write, self._transact, self._read, self._read, self._lease)
        ]
        for _ in range(STEPS):
            await self._step()
        self._ends = True
        self.storage.capacity_bytes = None
        await self._restart()
        await asyncio.gather(*actors)
        await self._heal_and_check()

    # -- the node

    async def _start(self) -> None:
        while True:
            self.node = SimNode(self.storage, self.store, self.network, **SETTINGS)
            try:
                await self.node.start()
            except PowerCut:
                pass
            except Exception:
                if not self.storage.power_is_cut:
                    raise
            if not self.storage.power_is_cut:
                return
            await self.node.crash()
            self.storage = self.storage.crash()

    async def _restart(self) -> None:
        self.crashes += 1
        await self.node.crash()
        self.storage = self.storage.crash(power_loss=self.rng.random() < 0.7)
        await self._start()

    async def _create_table(self) -> None:
        connection = await Connection.open(self.node.node.address, transport=self.network.transport("client"))

        async def ask(_: Any, api: str, version: int, **body: Any) -> Any:
            return await connection.request(api, body, versions=(version, version))

        world = TableWorld(self.node.broker, ask, ManualClock())
        self.table = await world.create(
            TABLE, COLUMNS, primary_key=("id",), buckets=BUCKETS, row_format="json", properties=PROPERTIES
        )
        await connection.close()

    async def _step(self) -> None:
        rng, action = self.rng, self.rng.random()
        await asyncio.sleep(rng.random())
        if action < 0.15:
            await self._restart()
        elif action < 0.40:
            self.storage.cut_power_after(rng.randint(1, 60))
        elif action < 0.50:
            full = self.storage.used_bytes + rng.randint(0, 2_000)
            self.storage.capacity_bytes = None if self.storage.capacity_bytes else full
        elif action < 0.60:
            self.storage.fail_next("sync", rng.choice(("", "kv/")), SyncFailed("a failed fsync"))
        # An operator makes room on a disk that is full, and restarts a node that has stopped partitions.
        if rng.random() < 0.3:
            self.storage.capacity_bytes = None
        await asyncio.sleep(rng.random())
        failed = any(partition.local_log.failure for partition in self.node.broker.replicas)
        if self.storage.power_is_cut or failed:
            await self._restart()

    # -- those who use it

    async def _act(self, work: Callable[[Client], Awaitable[None]]) -> None:
        client = Client(self)
        while not self._ends:
            try:
                await work(client)
            except Refused:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2 * self.rng.random() ** 2)

    def _changes(self) -> dict[int, tuple[Any, Any]]:
        """Some upserts, or some deletions: keys and values by bucket."""
        keys = self.rng.sample(KEYS, self.rng.randint(1, 4))
        if self.rng.random() < 0.3:
            return _parts(prepare_deletes(self.table, self.table.keys.columns_from(keys)))
        rows = []
        for key in keys:
            self._made += 1
            rows.append({"id": key, "n": self._made})
        (prepared,) = prepare_upserts(self.table, pa.Table.from_pylist(rows, self.table.schema))
        return _parts(prepared)

    async def _write(self, client: Client) -> None:
        for bucket, (keys, values) in self._changes().items():
            records = build_batch_columns(keys, values, timestamp_ms=self.node.now_ms)
            base = await client.produce(bucket, records)
            for number, key in enumerate(keys.to_pylist()):
                self.acknowledged.append((bucket, base + number, key.decode()))

    async def _transact(self, client: Client) -> None:
        transaction = Transaction(client, "writer")
        await transaction.begin()
        for _ in range(self.rng.randint(1, 3)):
            for bucket, (keys, values) in self._changes().items():
                await transaction.write(bucket, keys, values)
            await asyncio.sleep(0.1 * self.rng.random())
        commit = self.rng.random() < 0.6
        await transaction.end(commit=commit)
        self.committed += commit

    async def _read(self, client: Client) -> None:
        if self.rng.random() < 0.5:
            self.look_ups.append(await client.look_up(self.rng.choice(KEYS)))
            return
        size = self.rng.choice((1, 100, 100_000))
        self.scans.append(await client.scan(self.rng.randrange(BUCKETS), "live", size))

    async def _lease(self, client: Client) -> None:
        action = self.rng.random()
        if action < 0.3:
            await client.done("CreateSnapshot", table=TABLE)
        elif action < 0.6 and len(self.leases) < 4:
            fresh = self.rng.random() < 0.5
            answer = await client.done(
                "AcquireLease", table=TABLE, lease_id=None, holder="sim", duration_ms=LEASE_MS, fresh=fresh
            )
            offsets = {each.bucket: each.log_offset for each in answer.lease.snapshots}
            self.leases.append(Leased(answer.lease.lease_id, offsets))
        elif action < 0.7 and self.leases:
            # Whether it is released is not known if there is no answer.
            held = self.leases.pop(self.rng.randrange(len(self.leases)))
            await client.done("ReleaseLease", lease_id=held.lease_id)
        elif self.leases:
            held = self.rng.choice(self.leases)
            self.scans.append(await self._scan_leased(client, held, self.rng.randrange(BUCKETS)))

    async def _scan_leased(self, client: Client, held: Leased, bucket: int) -> Scanned:
        found = await client.scan(bucket, "lease", 100, lease_id=held.lease_id)
        assert found.log_offset == held.log_offsets[bucket], "a lease moves"
        return found

    # -- the end

    async def _heal_and_check(self) -> None:
        client = Client(self)
        await asyncio.sleep(REST_SECONDS)
        # Ends what its last self has left open.
        await self._eventually(Transaction(client, "writer").begin)
        logs = [await self._read_log(client, bucket) for bucket in range(BUCKETS)]
        for bucket, log in enumerate(logs):
            last = await self._eventually(partial(client.scan, bucket, "last", 100))
            assert last.log_offset == log.end, "the state does not come to the end of the log"
            self.scans.append(last)
            for held in self.leases:
                leased = partial(self._scan_leased, client, held, bucket)
                self.scans.append(await self._eventually(leased))
        self._check(logs)
        await self.node.stop()

    async def _eventually(self, work: Callable[[], Awaitable[Any]]) -> Any:
        refusals: list[Refused] = []
        while len(refusals) < 50:
            try:
                return await work()
            except Refused as error:
                refusals.append(error)
            await asyncio.sleep(1)
        raise AssertionError(f"it does not heal: {refusals[-1]}")

    async def _read_log(self, client: Client, bucket: int) -> Log:
        log = Log()
        while True:
            wanted = {"partition": bucket, "fetch_offset": log.end, "partition_max_bytes": 1_000}
            answer = await client.ask(
                "Fetch",
                11,
                max_wait=0,
                min_bytes=0,
                max_bytes=1_000_000,
                isolation_level=1,
                topics=[{"topic": TABLE, "partitions": [wanted]}],
            )
            result = answer.responses[0].partitions[0]
            assert result.error_code == ErrorCode.none, result
            if not result.records:
                assert result.high_watermark == log.end, "a transaction is open"
                return log
            _take(log, result)

    def _check(self, logs: list[Log]) -> None:
        written = [{(at, key) for at, key, _ in log.changes} for log in logs]
        for bucket, offset, key in self.acknowledged:
            assert (offset, key) in written[bucket], f"{key} at {offset} of bucket {bucket} is lost"
        for scan in self.scans:
            assert scan.rows == logs[scan.bucket].fold(scan.log_offset), scan
        for found in self.look_ups:
            assert found.row in logs[found.bucket].rows_from(found.log_offset, found.key), found


def _parts(prepared: PreparedRows) -> dict[int, tuple[Any, Any]]:
    return {bucket: (keys, values) for (_, bucket), (keys, values, *_) in prepared.parts.items()}


def _take(log: Log, result: Any) -> None:
    """Fold what a reader of committed data takes of an answer."""
    aborted = sorted((each.first_offset, each.producer_id) for each in result.aborted_transactions or ())
    left_out: set[int] = set()
    data = result.records
    while len(data) > 61 and (header := parse_header(data)).size_bytes <= len(data):
        batch, data = data[: header.size_bytes], data[header.size_bytes :]
        while aborted and aborted[0][0] <= header.last_offset:
            left_out.add(aborted.pop(0)[1])
        if header.is_control:
            marker = read_marker(batch)
            if marker is not None and not marker.commit:
                left_out.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in left_out):
            for record in read_records(batch):
                assert record.key is not None
                row = None if record.value is None else json.loads(record.value)
                log.changes.append((record.offset, record.key.decode(), row))
        log.end = header.next_offset


def run_story(seed: int) -> Story:
    """The story of a seed, which fails where it breaks what must hold."""

    async def tell() -> Story:
        story = Story(seed)
        await story.run()
        return story

    return run_virtual(tell, seed=seed)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, SEEDS_PER_TEST))
def test_the_state_is_the_fold_of_the_log_through_every_crash(first_seed: int) -> None:
    crashes = committed = scans = leased = look_ups = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        story = run_story(seed)
        crashes += story.crashes
        committed += story.committed
        scans += sum(bool(scan.rows) for scan in story.scans)
        leased += sum(scan.how == "lease" and bool(scan.rows) for scan in story.scans)
        look_ups += sum(found.row is not None for found in story.look_ups)
    told = crashes, committed, scans, leased, look_ups
    assert min(told) >= SEEDS_PER_TEST, f"the stories have too little of something to show anything: {told}"


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = [run_story(seed).loop.trace for seed in range(TRACED_SEEDS)]
    assert traces == [run_story(seed).loop.trace for seed in range(TRACED_SEEDS)]
    assert len({repr(trace) for trace in traces}) == TRACED_SEEDS
    assert any("kv/" in what for _, what in traces[0])


# -- ablations


@contextmanager
def caught() -> Iterator[None]:
    """Some seed must break."""
    yield
    for seed in range(40):
        try:
            run_story(seed)
        except AssertionError:
            return
    pytest.fail("nobody has noticed")


def test_an_offset_without_the_last_row_of_its_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a flush that tears a write, as an engine must not."""
    real = dict_engine._pack_table

    def torn(identity: bytes, applied_offset: int, leader_epoch: int, rows: dict[bytes, bytes]) -> bytes:
        return real(identity, applied_offset, leader_epoch, dict(list(rows.items())[:-1]))

    with caught():
        monkeypatch.setattr(dict_engine, "_pack_table", torn)


def test_an_offset_that_is_not_written_with_its_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: the offset is on disk one write before the rows that it speaks of."""
    real, before = dict_engine._pack_table, dict[bytes, dict[bytes, bytes]]()

    def late(identity: bytes, applied_offset: int, leader_epoch: int, rows: dict[bytes, bytes]) -> bytes:
        older = before.get(identity, {})
        before[identity] = dict(rows)
        return real(identity, applied_offset, leader_epoch, older)

    with caught():
        monkeypatch.setattr(dict_engine, "_pack_table", late)


def test_folding_what_was_aborted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: the state is not the read_committed fold."""
    with caught():
        monkeypatch.setattr(folding, "_is_aborted", lambda header, aborted: False)


def test_a_snapshot_whose_files_are_not_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a lease of a snapshot that a power loss takes away."""
    real = SimFiles.sync

    def sync(files: SimFiles, path: Path) -> None:
        if "snapshots" not in path.parts:
            real(files, path)

    with caught():
        monkeypatch.setattr(SimFiles, "sync", sync)


if __name__ == "__main__":
    import sys

    run_story(int(sys.argv[1]))
