"""A table of a simulated cluster: those who write it, those who read it, and what must hold.

Writers upsert and delete rows, some in transactions; readers look rows up and scan buckets piece by piece,
at whoever the metadata calls the leader. A scan of a pin goes on at the next leader. What must hold
(invariant 11, and rule 12 of the cluster):

- every scan equals the read_committed fold of the log up to the scan's offset;
- every look-up has the row of its offset, or of a later one;
- no look-up and no scan goes back behind an answer that was there before it was asked, nor behind an
  acknowledged write, unless a transaction may be open;
- the state of each replica that folds comes to the end of the log, and those states are equal.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from support.cluster_clients import PASSING, ClusterClient, Reader, produce
from support.cluster_story import ClusterStory, insist
from support.cluster_transactions import LostPlace, TransactionSteps
from support.history import History
from support.sim_node import START_MS
from support.table_world import rows_of
from tidemill.client.tables.creating import creation_body
from tidemill.client.tables.requests import definition_from
from tidemill.client.tables.writer import PreparedRows, prepare_deletes, prepare_upserts
from tidemill.errors import ErrorCode, TidemillError
from tidemill.records.columns.build import build_batch_columns
from tidemill.records.record import Record
from tidemill.tables.definition import TableDefinition

__all__ = ("KEYS", "SETTINGS", "Refused", "Row", "Seen", "TableUsers", "deletes", "upserts")

TABLE, BUCKETS = "shop.stock", 2
KEYS = [f"k{number}" for number in range(10)]
#: Snapshots come often; without one nothing is compacted.
SETTINGS = {"kv_snapshot_log_bytes": 1024, "kv_check_interval_ms": 1_000}
#: Nothing is compacted, so that the log tells in the end what the state was at any offset.
PROPERTIES = {
    "internal.segment.bytes": "4000",
    "index.interval.bytes": "200",
    "min.compaction.lag.ms": "100000000",
}
#: Records and deletions stay long enough to be seen, and not much longer.
COMPACTED = {
    "min.compaction.lag.ms": "5000",
    "internal.segment.bytes": "1000",
    "index.interval.bytes": "200",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "3000",
}
#: The leader and one standby fold.
_FOLDS = 2

Row = dict[str, Any]
State = dict[str, Row]


class Refused(Exception):
    """Nobody can do it now."""


@dataclass(frozen=True)
class Seen:
    """What a reader was told: a row or a bucket, by a state that has at least the log below the offset."""

    what: str
    bucket: int
    log_offset: int
    #: What the state had to have at least, when the question was asked.
    at_least: int
    key: str | None
    rows: State


@dataclass
class Log:
    """The committed records of a bucket: (offset, key, row, or None for a deletion)."""

    changes: list[tuple[int, str, Row | None]] = field(default_factory=list)

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


class TableUsers:
    """One table with two buckets.

    ``with_transactions``: some of what is written is in transactions. ``compacted``: its logs are compacted,
    and what they had is known from who looked into them all the time; not together with transactions.
    """

    def __init__(
        self, pace: float = 1.0, *, with_transactions: bool = False, compacted: bool = False
    ) -> None:
        assert not (with_transactions and compacted)
        self.pace = pace
        self.with_transactions = with_transactions
        self.compacted = compacted
        self.seen: list[Seen] = []
        #: What was acknowledged outside of transactions: (bucket, offset, key).
        self.acknowledged_rows: list[tuple[int, int, str]] = []
        #: What everybody who asks from now on must see, by bucket.
        self.known = dict.fromkeys(range(BUCKETS), 0)
        self.committed = 0
        #: Answers to scans that have gone on after a refusal.
        self.went_on = 0
        self.is_closing = False
        self.refusal = ""
        self._made = 0
        self._busy = 0

    # --- the course of things

    async def prepare(self, story: ClusterStory) -> None:
        self.story, self.client, self.rng = story, story.client, story.client.rng
        #: Who reads may not have heard of what writers know, for instance of a new leader.
        self.reading = [story.client.another() for _ in range(2)]
        body = creation_body(
            TABLE,
            "id string, n bigint",
            primary_key=("id",),
            buckets=BUCKETS,
            boundaries=(),
            partition_by=None,
            row_format="json",
            key_format=None,
        )
        properties = COMPACTED if self.compacted else PROPERTIES
        body["properties"] = [{"key": key, "value": value} for key, value in properties.items()]
        await self._until_done("CreateTable", {**body, "comment": None, "if_not_exists": True})
        described = await self._until_done("DescribeTable", {"name": TABLE})
        self.table: TableDefinition = definition_from(described.table)
        self.topic = self.table.partitions[0].topic
        self.steps = TransactionSteps(self.client, "table-writer", is_v2=True)
        self.drains = [
            Reader(self.client, History(), "drain", self.topic, bucket, isolated=True)
            for bucket in range(BUCKETS)
        ]

    async def _until_done(self, api: str, body: dict[str, Any]) -> Any:
        while True:
            try:
                answer = await self.client.ask_any(api, body, 0)
                if answer.error_code == ErrorCode.none:
                    return answer
                self.refusal = f"{api}: {answer.error_code} {answer.error_message}"
            except TidemillError as error:
                self.refusal = f"{api}: {error}"
            await self.client.pause()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        works: list[Callable[[], Awaitable[None]]] = [
            self._write,
            *(partial(self._read, client) for client in self.reading),
        ]
        if self.with_transactions:
            works.append(self._transact)
        return [self._act(work) for work in works]

    async def _act(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self.is_closing:
            self._busy += 1
            try:
                await work()
            except (Refused, LostPlace) as error:
                self.refusal = str(error)
                await self.client.pause()
            finally:
                self._busy -= 1
            await asyncio.sleep(self.pace * self.rng.choice((0.02, 0.3, 1.0)) * self.rng.random())

    def close(self) -> None:
        self.is_closing = True

    def observe(self) -> None:
        pass

    @property
    def at_rest(self) -> bool:
        return not self._busy

    # --- writing

    def _changes(self) -> dict[int, tuple[Any, Any]]:
        """Some upserts, or some deletions: keys and values by bucket."""
        keys = self.rng.sample(KEYS, self.rng.randint(1, 4))
        if self.rng.random() < 0.3:
            return deletes(self.table, keys)
        rows = []
        for key in keys:
            self._made += 1
            rows.append({"id": key, "n": self._made})
        return upserts(self.table, rows)

    async def _write(self) -> None:
        for bucket, (keys, values) in sorted(self._changes().items()):
            batch = build_batch_columns(keys, values, timestamp_ms=START_MS + self.story.loop.now_ms())
            try:
                address, _ = await self.client.leader(self.topic, bucket)
            except TidemillError as error:
                raise Refused(str(error)) from error
            code, base = await produce(self.client, address, self.topic, bucket, batch)
            if code is not ErrorCode.none:
                self._refused(bucket, "Produce", code)
            for number, key in enumerate(keys.to_pylist()):
                self.acknowledged_rows.append((bucket, base + number, key.decode()))
            if not self.with_transactions:
                self._must_see(bucket, base + len(keys))

    def _must_see(self, bucket: int, offset: int) -> None:
        self.known[bucket] = max(self.known[bucket], offset)

    def _refused(self, bucket: int, what: str, code: int | None) -> None:
        self.client.forget(self.topic, bucket)
        name = "no answer" if code is None else ErrorCode(code).name
        if code is not None and code not in PASSING:
            self.client.note_strange(f"{what} of {self.topic}-{bucket} got {name}")
        raise Refused(f"{what}: {name}")

    async def _transact(self) -> None:
        steps = self.steps
        try:
            if steps.producer is None:
                await steps.initialize()
            steps.begin()
            for _ in range(self.rng.randint(1, 2)):
                for bucket, (keys, values) in sorted(self._changes().items()):
                    place = (self.topic, bucket)
                    pairs = zip(keys.to_pylist(), values.to_pylist(), strict=True)
                    records = [Record(key, value, 1_000) for key, value in pairs]
                    await steps.produce(place, steps.batch(place, records))
                await asyncio.sleep(self.rng.choice((0.0, 0.3)) * self.rng.random())
            commit = self.rng.random() < 0.6
            await steps.end(commit=commit)
            self.committed += commit
        except LostPlace:
            steps.producer = None
            raise

    # --- reading

    async def _ask(self, client: ClusterClient, bucket: int, api: str, body: dict[str, Any]) -> Any:
        """The answer of the bucket's leader; ``Refused`` if there is none, or it is an error."""
        try:
            address, _ = await client.leader(self.topic, bucket)
            answer = await client.ask(address, api, body, 0)
        except TidemillError as error:
            client.forget(self.topic, bucket)
            raise Refused(f"{api}: {error}") from error
        if answer.error_code:
            client.forget(self.topic, bucket)
            raise Refused(f"{api}: {answer.error_code} {answer.error_message}")
        return answer

    async def _read(self, client: ClusterClient) -> None:
        what = self.rng.random()
        if what < 0.7:
            self._note(await self.look_up(client, self.rng.choice(KEYS)))
        elif what < 0.8:
            self._note(await self.scan_pinned(client, self.rng.randrange(BUCKETS)))
        else:
            size = self.rng.choice((1, 100, 100_000))
            self._note(await self.scan(client, self.rng.randrange(BUCKETS), size))

    def _note(self, seen: Seen) -> None:
        self.seen.append(seen)
        self._must_see(seen.bucket, seen.log_offset)

    def _where(self, bucket: int) -> dict[str, Any]:
        return {
            "table_id": self.table.table_id,
            "partition_id": self.table.partitions[0].id,
            "bucket": bucket,
            "leader_epoch": -1,
            "columns": (),
        }

    async def look_up(self, client: ClusterClient, key: str) -> Seen:
        keys = self.table.keys
        (bucket,) = deletes(self.table, [key])
        at_least = self.known[bucket]
        answer = await self._ask(
            client,
            bucket,
            "LookupKv",
            {
                **self._where(bucket),
                "keys": keys.state_keys(keys.columns_from([key])).to_pylist(),
                "min_offset": -1,
                "max_wait_ms": 1_000,
            },
        )
        found = {row["id"]: {"id": row["id"], "n": row["n"]} for row in rows_of(answer)}
        return Seen("look-up", bucket, answer.log_offset, at_least, key, found)

    async def scan(self, client: ClusterClient, bucket: int, size: int) -> Seen:
        """A whole bucket, call by call."""
        at_least = self.known[bucket]
        answer = await self._ask(
            client,
            bucket,
            "ScanKv",
            {
                **self._where(bucket),
                "scanner_id": None,
                "limit": 0,
                "call_sequence": 0,
                "batch_size_bytes": size,
            },
        )
        log_offset, rows, sequence = answer.log_offset, rows_of(answer), 0
        while answer.has_more:
            sequence += 1
            more = {
                "scanner_id": answer.scanner_id,
                "call_sequence": sequence,
                "batch_size_bytes": size,
            }
            answer = await self._ask(client, bucket, "ScanKv", more)
            rows += rows_of(answer)
        found = {row["id"]: row for row in rows}
        insist(len(found) == len(rows), f"a key comes twice in a scan of bucket {bucket}")
        return Seen("scan", bucket, log_offset, at_least, None, found)

    async def scan_pinned(self, client: ClusterClient, bucket: int) -> Seen:
        """A whole bucket as of a pin, row by row, at one node after the other if it must be."""
        at_least = self.known[bucket]
        (pinned,) = (await self._ask(client, bucket, "PinTable", self._pin(bucket))).buckets
        at = {"log_offset": pinned.log_offset, "log_epoch": pinned.log_epoch}
        rows: list[Row] = []
        start_key, has_more, failures = b"", True, 0
        while has_more:
            body = {
                **self._where(bucket),
                **at,
                "scanner_id": None,
                "limit": 2,
                "start_key": start_key,
                "call_sequence": 0,
                "batch_size_bytes": 1,
            }
            try:
                answer = await self._ask(client, bucket, "ScanKv", body)
            except Refused:
                failures += 1
                if failures > 10:
                    raise
                await client.pause()
                continue
            insist(answer.log_offset == pinned.log_offset, f"a scan at {at} is at {answer.log_offset}")
            rows += rows_of(answer)
            start_key, has_more = answer.next_key or b"", answer.next_key is not None
            self.went_on += failures > 0
            if answer.scanner_id is not None:
                await self._close(client, bucket, answer.scanner_id)
        found = {row["id"]: row for row in rows}
        insist(len(found) == len(rows), f"a key comes twice in a scan of bucket {bucket}")
        return Seen("scan of a pin", bucket, pinned.log_offset, at_least, None, found)

    async def _close(self, client: ClusterClient, bucket: int, scanner_id: Any) -> None:
        with contextlib.suppress(Refused):
            await self._ask(client, bucket, "ScanKv", {"scanner_id": scanner_id, "close": True})

    def _pin(self, bucket: int) -> dict[str, Any]:
        partition_id = self.table.partitions[0].id
        named = [{"partition_id": partition_id, "bucket": bucket}]
        return {
            "table_id": self.table.table_id,
            "min_offsets": (),
            "max_wait_ms": 1_000,
            "idle_ms": 1_000,
            "buckets": named,
        }

    # --- the end

    async def drain(self) -> bool:
        for reader in self.drains:
            if not await reader.drain():
                return False
        try:
            self.last = [await self.scan(self.client, bucket, 100) for bucket in range(BUCKETS)]
        except Refused as error:
            self.refusal = str(error)
            return False
        return self._all_have_folded()

    def _folds(self, bucket: int) -> list[Any]:
        """The state of a bucket on each node that keeps one."""
        cluster, found = self.story.cluster, []
        for node_id in cluster.ids:
            tables = cluster.nodes[node_id].broker.tables.loaded
            if tables is not None:
                service = tables.service
                found += [
                    each._store
                    for each in (*service._buckets.values(), *service._standbys.values())
                    if each.key.bucket == bucket and each._store is not None
                ]
        return found

    def _all_have_folded(self) -> bool:
        for bucket in range(BUCKETS):
            ends = [store.applied_offset for store in self._folds(bucket)]
            if {*ends} != {self.drains[bucket].position} or len(ends) < _FOLDS:
                self.refusal = (
                    f"folds of bucket {bucket} at {ends}, the end is {self.drains[bucket].position}"
                )
                return False
        return True

    def check(self) -> None:
        logs = [
            self._observed(bucket) if self.compacted else Log([_change(each) for each in reader.records])
            for bucket, reader in enumerate(self.drains)
        ]
        written = [{(at, key) for at, key, _ in log.changes} for log in logs]
        for bucket, offset, key in self.acknowledged_rows:
            insist((offset, key) in written[bucket], f"{key} at {offset} of bucket {bucket} is lost")
        for seen in (*self.seen, *self.last):
            log = logs[seen.bucket]
            insist(seen.log_offset >= seen.at_least, f"an answer went back: {seen}")
            if seen.key is None:
                expected = log.fold(seen.log_offset)
                insist(seen.rows == expected, f"{seen} is not the fold of the log: {expected}")
            else:
                possible = log.rows_from(seen.log_offset, seen.key)
                insist(seen.rows.get(seen.key) in possible, f"{seen} is none of {possible}")
        for bucket in range(BUCKETS):
            folds = self._folds(bucket)
            for store in folds[1:]:
                insist(store._rows == folds[0]._rows, f"the folds of bucket {bucket} differ")

    def _observed(self, bucket: int) -> Log:
        """Everything that any node has ever had below its high watermark."""
        topic_id = self.story.cluster.nodes[1].broker.image.topics[self.topic].id
        observed = self.story.observer.committed.items()
        records = sorted(
            (offset, *ast.literal_eval(value))
            for (topic, index, offset), value in observed
            if (topic, index) == (topic_id, bucket)
        )
        return Log([_change((at, key.decode(), (value or b"").decode())) for at, key, value in records])

    @property
    def acknowledged(self) -> int:
        return len(self.acknowledged_rows) + self.committed

    def __repr__(self) -> str:
        return f"table {self._busy} busy, {self.refusal}, {self.steps.doing}"


def upserts(table: TableDefinition, rows: list[Row]) -> dict[int, tuple[Any, Any]]:
    """Keys and values of rows, by bucket."""
    (prepared,) = prepare_upserts(table, pa.Table.from_pylist(rows, table.schema))
    return _parts(prepared)


def deletes(table: TableDefinition, keys: list[str]) -> dict[int, tuple[Any, Any]]:
    """Keys and values of deletions, by bucket."""
    return _parts(prepare_deletes(table, table.keys.columns_from(keys)))


def _parts(prepared: PreparedRows) -> dict[int, tuple[Any, Any]]:
    return {bucket: (keys, values) for (_, bucket), (keys, values, *_) in prepared.parts.items()}


def _change(record: tuple[int, str, str]) -> tuple[int, str, Row | None]:
    offset, key, value = record
    return offset, key, json.loads(value) if value else None
