"""A random story of two tables on a node in another process, told step by step against dicts.

One table has rows in JSON, which Kafka's clients write, the other one rows of our own format, which our
client writes; transactions of a Kafka client write both. Between the writes the node is stopped, killed and
started again, its state is damaged, snapshots and leases come and go, and compaction runs all the time. At
check points both tables must equal their models, and what their logs hold.

A story is repeated by its seed, as far as the two of them go: the steps are the same, the moments are not.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from support.processes import ClientProcess, NodeProcess
from support.table_damage import DAMAGES
from support.table_model import Change, Filter, Row, TableModel, check_table
from support.table_nodes import by_key
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.client.tables.values import Lease
from tidemill.errors import TableError

__all__ = ("PROPERTIES", "SETTINGS", "Story")

#: Small caches and buffers, so that state is read from disk; snapshots and compaction all the time.
SETTINGS: dict[str, Any] = {
    "kv_block_cache_bytes": 1 << 20,
    "kv_write_buffer_bytes": 1 << 20,
    "kv_snapshot_log_bytes": 20_000,
    "kv_check_interval_ms": 200,
    "compaction_check_interval_ms": 200,
}
PROPERTIES = {
    "internal.segment.bytes": "10000",
    "max.message.bytes": "5000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
_REGIONS = ("", "eu", "us", "é\0")
_WORDS = ("red", "green", "blue", None)


@dataclass(slots=True)
class _Held:
    """A lease, and what must be found under it."""

    lease: Lease
    states: dict[tuple[Any, ...], Row]


class Story:
    """A story over tables. ``db`` writes; ``reader`` never does, so it never waits for writes of its own."""

    def __init__(
        self, seed: int, node: NodeProcess, kafka: ClientProcess, db: Tidemill, reader: Tidemill
    ) -> None:
        self.rng = random.Random(seed)
        self.told: list[str] = []
        self.compactions = 0.0
        self._node, self._kafka, self._db = node, kafka, db
        self._transactions = 0
        self._open: str | None = None
        self._leases: list[_Held] = []
        self._columns_added = 0
        options: dict[str, Any] = {"buckets": 3, "properties": PROPERTIES}
        self.json = db.create_table(
            "story.json", "id string, n bigint, word string", primary_key="id", row_format="json", **options
        )
        self.row = db.create_table(
            "story.row", "region string, n int, word string, x double", primary_key=["region", "n"], **options
        )
        self.json_reader, self.row_reader = reader.table("story.json"), reader.table("story.row")
        self.json_model = TableModel(["id", "n", "word"], ("id",))
        self.row_model = TableModel(["region", "n", "word", "x"], ("region", "n"))

    def tell(self, steps: int) -> None:
        """Some steps, and a check after every few and at the end."""
        acts: list[tuple[Callable[[], str], int]] = [
            (self.upsert, 8),
            (self.delete, 4),
            (self.write_json, 8),
            (self.transact, 8),
            (self.open_transaction, 3),
            (self.take_snapshot, 3),
            (self.take_lease, 2),
            (self.end_lease, 1),
            (self.add_column, 1),
            (self.restart, 2),
            (self.damage, 3),
        ]
        for number in range(steps):
            act = self.rng.choices([act for act, _ in acts], [weight for _, weight in acts])[0]
            self.told.append(f"{number}: {act()}")
            if self.rng.random() < 0.25:
                self.check()
        self.check()

    # --- writing

    def upsert(self) -> str:
        changes = self._row_changes(self.rng.choice([1, 5, 50, 300]))
        rows = [change.row for change in changes if change.row is not None]
        given = pa.Table.from_pylist(rows, self.row.schema) if self.rng.random() < 0.5 else rows
        self.row.upsert(given)
        self.row_model.write([change for change in changes if change.row is not None])
        return f"{len(rows)} rows upserted"

    def delete(self) -> str:
        keys = self._some_row_keys(self.rng.choice([1, 10, 50]))
        self.row.delete(keys)
        self.row_model.write([Change(key, None) for key in keys])
        return f"{len(keys)} rows deleted"

    def write_json(self) -> str:
        changes = self._json_changes(self.rng.choice([1, 5, 50, 200]))
        errors = self._kafka.call("write", topic="story.json", changes=[_json_sent(each) for each in changes])
        assert set(errors) <= {None}, errors
        self.json_model.write(changes)
        return f"{len(changes)} JSON rows written"

    def transact(self) -> str:
        name, commit = self._next_transaction(), self.rng.random() < 0.6
        self._begin(name, "commit" if commit else "abort")
        for model in (self.json_model, self.row_model):
            model.end(name, commit=commit)
        return f"{name} {'committed' if commit else 'aborted'}"

    def open_transaction(self) -> str:
        """Left open: nothing behind it can be seen until it has come to its end."""
        if self._open is not None:
            return self.end_transaction()
        self._open = self._next_transaction()
        self._begin(self._open, "open")
        return f"{self._open} left open"

    def end_transaction(self) -> str:
        name, self._open = self._open, None
        assert name is not None
        commit = self.rng.random() < 0.6
        self._kafka.call("finish", transactional_id="open", end="commit" if commit else "abort")
        for model in (self.json_model, self.row_model):
            model.end(name, commit=commit)
        return f"{name} {'committed' if commit else 'aborted'} at last"

    def _begin(self, name: str, end: str) -> None:
        count = self.rng.choice([1, 8, 8, 8, 1_000])
        json_changes, row_changes = self._json_changes(count), self._row_changes(count)
        self._kafka.call(
            "transact",
            transactional_id="open" if end == "open" else "quick",
            parts=[
                ("story.json", [_json_sent(change) for change in json_changes]),
                ("story.row", self._rows_sent(row_changes)),
            ],
            end=end,
        )
        self.json_model.write(json_changes, name)
        self.row_model.write(row_changes, name)

    def _next_transaction(self) -> str:
        self._transactions += 1
        return f"transaction {self._transactions}"

    # --- what happens to the node

    def take_snapshot(self) -> str:
        table = self.rng.choice([self.json, self.row])
        table.create_snapshot()
        return f"snapshots of {table.name}"

    def take_lease(self) -> str:
        """A lease, and what it holds: that is known if nothing is open and everything was seen."""
        if self._open is not None or len(self._leases) == 2:
            return "no lease"
        lease = self.row.lease(duration_ms=600_000, fresh=True).acquire()
        self._leases.append(_Held(lease, self.row_model.state))
        return "leased"

    def end_lease(self) -> str:
        if not self._leases:
            return "no lease to end"
        held = self._leases.pop()
        self._check_lease(held)
        self._release(held)
        return "lease released"

    def _release(self, held: _Held) -> None:
        self._db.release_lease(held.lease.lease_id)

    def add_column(self) -> str:
        if self._open is not None or self._columns_added == 2:
            return "no column added"
        self._columns_added += 1
        name = f"more{self._columns_added}"
        for table, model in ((self.json, self.json_model), (self.row, self.row_model)):
            model.end("", commit=True)
            table.alter(add_columns=f"{name} bigint")
            model.add_column(name)
        for held in self._leases:
            held.states = {key: {**row, name: None} for key, row in held.states.items()}
        return f"column {name} added"

    def restart(self) -> str:
        how = self.rng.choice(["kill", "kill", "stop"])
        self._end_of_life(how)
        if self.rng.random() < 0.2:
            # Once more, while it recovers.
            self._node.start()
            self._node.kill()
        self._node.start()
        return f"{how} and start"

    def damage(self) -> str:
        how = self.rng.choice(["kill", "stop"])
        self._end_of_life(how)
        damage = self.rng.choice(DAMAGES)
        state = self._node.data_dir / "kv"
        state.mkdir(exist_ok=True)
        done = damage(self.rng, state)
        self._node.start()
        # Table files are shared with snapshots. What is under a lease now is the truth, or an error.
        for held in self._leases:
            with contextlib.suppress(TableError):
                self._check_lease(held)
            self._release(held)
        self._leases.clear()
        return f"{how}, {done}, start"

    def _end_of_life(self, how: str) -> None:
        self.compactions += self._node.metric("tidemill_compaction_runs_total")
        getattr(self._node, how)()

    # --- checking

    def check(self) -> None:
        """Both tables equal their models, and what their logs hold."""
        if self._open is not None:
            # Rows stand for what is stable, and so do the logs of a reader of committed data.
            for table in (self.json_reader, self.row_reader):
                self._check_log(table.refresh())
            self.told.append(self.end_transaction())
        for table, model, filters in (
            (self.json_reader, self.json_model, _JSON_FILTERS),
            (self.row_reader, self.row_model, _ROW_FILTERS),
        ):
            table.refresh()
            missing = [("nobody",)] if model is self.json_model else [("nobody", 1), ("eu", -1)]
            check_table(table, model, self.rng, filters, missing)
            self._check_log(table)
        # The writer sees what it wrote.
        for key in self._some_row_keys(3):
            assert self.row.lookup(key) == self.row_model.state.get(key)
        for held in self._leases:
            self._check_lease(held)
        self.told.append("checked")

    def _check_log(self, table: Table) -> None:
        """A scan is the fold of the log, as another client reads it, up to the scan's offsets."""
        scan = table.scan()
        rows = by_key(scan.to_arrow().to_pylist(), table.primary_key)
        log = self._kafka.call("fold", topic=table.name, partitions=3)
        assert log["ends"] == [scan.log_offsets[table.name, bucket] for bucket in range(3)]
        assert set(log["state"]) == {_key_text(key) for key in rows}
        if table is self.json_reader:
            for (key,), row in rows.items():
                read = json.loads(base64.b64decode(log["state"][key]))
                assert {name: read.get(name) for name in row} == row

    def _check_lease(self, held: _Held) -> None:
        found = self.row.scan(lease=held.lease).to_arrow().to_pylist()
        assert {(row["region"], row["n"]): row for row in found} == held.states

    # --- random changes

    def _json_changes(self, count: int) -> list[Change]:
        changes = []
        for _ in range(count):
            key = f"k{self.rng.randrange(60)}"
            row: Row | None = {"id": key, "n": self.rng.randrange(-50, 50), "word": self.rng.choice(_WORDS)}
            assert row is not None
            if self._columns_added and self.rng.random() < 0.5:
                row["more1"] = self.rng.randrange(10)
            changes.append(Change((key,), None if self.rng.random() < 0.25 else row))
        return changes

    def _row_changes(self, count: int) -> list[Change]:
        changes = []
        for key in self._some_row_keys(count):
            row: Row = {
                "region": key[0],
                "n": key[1],
                "word": self.rng.choice(_WORDS),
                "x": self.rng.choice([None, 0.1, self.rng.random()]),
            }
            if self._columns_added:
                row["more1"] = self.rng.randrange(10)
            changes.append(Change(key, None if self.rng.random() < 0.2 else row))
        return changes

    def _some_row_keys(self, count: int) -> list[tuple[str, int]]:
        return [(self.rng.choice(_REGIONS), self.rng.randrange(100)) for _ in range(count)]

    def _rows_sent(self, changes: list[Change]) -> list[tuple[str, str | None]]:
        """Changes in our own row format, for a Kafka client that only sends bytes."""
        sent: list[tuple[str, str | None]] = []
        for change in changes:
            value = None
            if change.row is not None:
                batch = pa.RecordBatch.from_pylist([change.row], self.row.schema)
                value = base64.b64encode(self.row.definition.format.from_batch(batch)[0].as_py()).decode()
            sent.append((_key_text(change.key), value))
        return sent


def _key_text(key: tuple[Any, ...]) -> str:
    return json.dumps(list(key), separators=(",", ":"), ensure_ascii=False) if len(key) > 1 else str(key[0])


def _json_sent(change: Change) -> tuple[str, Row | None]:
    return str(change.key[0]), change.row


_JSON_FILTERS = (
    Filter("n >= 0 AND word = 'red'", lambda row: row["n"] >= 0 and row["word"] == "red"),
    Filter("id LIKE 'k1%' OR word IS NULL", lambda row: row["id"].startswith("k1") or row["word"] is None),
)
_ROW_FILTERS = (
    Filter("region = 'eu' AND n BETWEEN 20 AND 60", lambda r: r["region"] == "eu" and 20 <= r["n"] <= 60),
    Filter("x < 0.5", lambda row: row["x"] is not None and row["x"] < 0.5),
    Filter(
        "word IN ('red', 'blue') AND n > 50", lambda row: row["word"] in ("red", "blue") and row["n"] > 50
    ),
)
