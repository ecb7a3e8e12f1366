"""A shop in one table: create it, fill it, ask it, watch it change, and keep it as it was.

What it does, in a few seconds:

1. opens a node inside this process and creates a table with a primary key;
2. upserts rows from a polars frame, a pandas frame and dicts, and deletes one;
3. looks rows up by key, and scans the table with a filter that runs on the server;
4. reads the whole table as of one moment, then the changes after it, each once and in order;
5. leases a snapshot: the table as it was, while the present one goes on.

Run it with ``python examples/tables.py``; with ``--server 127.0.0.1:9092`` it uses a node of yours, where it
creates and drops the table ``example.orders``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

import pandas as pd
import polars as pl
from rich.console import Console
from rich.table import Table as Grid

import tidemill

TABLE = "example.orders"
COLUMNS = "id bigint, region string, item string, amount double"
REGIONS = ("eu", "us", "asia", "africa")
ITEMS = ("apple", "pear", "plum", "quince")
ORDERS = 10_000
BAR_CHARACTERS = 30

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", metavar="HOST:PORT", help="a node that runs; default: one in here")
    server = parser.parse_args().server
    with tidemill.connect(server) if server else tidemill.open() as db:
        orders = create(db)
        fill(orders)
        ask(orders)
        is_same = watch(orders)
        keep(orders)
        orders.drop()
    return 0 if is_same else 1


def create(db: tidemill.Tidemill) -> tidemill.Table:
    db.drop_table(TABLE, if_exists=True)
    orders = db.create_table(TABLE, COLUMNS, primary_key=["id"], buckets=4, comment="what was sold")
    console.print(f"[bold]1.[/] created {orders}", soft_wrap=True)
    return orders


def fill(orders: tidemill.Table) -> None:
    """Rows from wherever they are. A row takes the place of the one with the same key."""
    rng = random.Random(42)
    ids = range(ORDERS)
    bulk = pl.DataFrame(
        {
            "id": ids,
            "region": [rng.choice(REGIONS) for _ in ids],
            "item": [rng.choice(ITEMS) for _ in ids],
            "amount": [rng.randint(1, 400) / 4 for _ in ids],
        }
    )
    written = orders.upsert(bulk)
    orders.upsert(pd.DataFrame({"id": [7], "region": ["eu"], "item": ["melon"], "amount": [99.0]}))
    orders.upsert([{"id": 8, "region": "us", "item": "grape"}, {"id": 9, "region": "eu", "item": "fig"}])
    orders.delete([3])
    console.print(f"[bold]2.[/] wrote {written.rows:,} rows, changed three, deleted one; all are on disk")


def ask(orders: tidemill.Table) -> None:
    console.print("[bold]3.[/] by key, and by filter")
    console.print(f"   order 7: {orders.lookup(7)}")
    console.print(f"   order 3: {orders.lookup(3)}")
    large = orders.scan(columns=["region", "amount"], where="amount > 90 AND region IN ('eu', 'us')")
    grid = Grid(title="   Large orders", title_justify="left")
    for name in ("region", "orders", "revenue"):
        grid.add_column(name, justify="left" if name == "region" else "right")
    grouped = pl.DataFrame(large).group_by("region").agg(pl.len(), pl.sum("amount")).sort("region")
    for region, count, revenue in grouped.iter_rows():
        grid.add_row(region, f"{count:,}", f"{revenue:,.2f}")
    console.print(grid)


def watch(orders: tidemill.Table) -> bool:
    """The table as of one moment, and then what happened since: nothing is missed, nothing comes twice."""
    scan = orders.scan(columns=["id", "region"])
    regions = {row["id"]: row["region"] for batch in scan for row in batch.to_pylist()}
    orders.upsert([{"id": 1, "region": "africa"}, {"id": ORDERS, "region": "africa", "item": "date"}])
    orders.delete([2])
    changes = 0
    for batch in orders.follow(snapshot=False, from_offsets=scan.log_offsets, until_now=True):
        for change in batch:
            changes += 1
            if change.op == "delete":
                del regions[change.row["id"]]
            else:
                regions[change.row["id"]] = change.row["region"]
    is_same = len(regions) == orders.scan().count()
    console.print(
        f"[bold]4.[/] read it whole, then {changes} changes: {'the same' if is_same else 'NOT the same'}"
    )
    counts = Counter(regions.values())
    for region, count in sorted(counts.items()):
        console.print(f"   {region:<7} {'█' * (BAR_CHARACTERS * count // max(counts.values()))} {count:,}")
    return is_same


def keep(orders: tidemill.Table) -> None:
    with orders.lease(holder="examples/tables.py", fresh=True) as lease:
        orders.delete(range(ORDERS // 2))
        then, now = orders.scan(lease=lease).count(), orders.scan().count()
        console.print(f"[bold]5.[/] half of it deleted: {now:,} rows now, {then:,} in the leased snapshot")


if __name__ == "__main__":
    sys.exit(main())
