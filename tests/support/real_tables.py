"""Tables of a real cluster: what a table must hold, who follows it, and a load that checks both."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import tidemill
from support.processes import wait_until
from tidemill.client.async_client import AsyncTidemill
from tidemill.client.tables.table import AsyncTable
from tidemill.errors import TidemillError

__all__ = ("Follower", "Model", "TableLoad", "as_dict")

SOON = 180.0
_KEYS = 200
_BUCKETS = 3
_T = TypeVar("_T")


class Model:
    """What a table must hold: rows that were written through it. Amounts of an item only ever rise."""

    def __init__(self, table: AsyncTable) -> None:
        self.table = table
        self.rows: dict[int, int] = {}
        self._written = 0

    async def upsert(self, items: list[int]) -> None:
        self._written += 1
        rows = dict.fromkeys(items, self._written)
        await self.table.upsert([{"item": item, "amount": amount} for item, amount in rows.items()])
        self.rows |= rows

    async def delete(self, items: list[int]) -> None:
        await self.table.delete(items)
        for item in items:
            self.rows.pop(item, None)


def as_dict(rows: Any) -> dict[int, int]:
    found = {row["item"]: row["amount"] for row in rows.to_pylist()}
    assert len(found) == rows.num_rows, "no row is there twice"
    return found


class Follower:
    """Follows a table in another task; ``rows`` is what its changes add up to."""

    def __init__(self, table: AsyncTable) -> None:
        self._table = table
        self._seen: set[tuple[int, int]] = set()
        self.rows: dict[int, int] = {}
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for batch in self._table.follow():
            for change in batch:
                if change.op != "snapshot":
                    assert (change.bucket, change.offset) not in self._seen, "a change comes once"
                    self._seen.add((change.bucket, change.offset))
                if change.op == "delete":
                    del self.rows[change.row["item"]]
                else:
                    self.rows[change.row["item"]] = change.row["amount"]
            self._news.set()

    async def has(self, wanted: dict[int, int]) -> None:
        """Wait until the changes add up to that."""
        async with asyncio.timeout(SOON):
            while self.rows != wanted:
                self._news.clear()
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait([news, self._task], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if self._task.done():
                    self._task.result()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class TableLoad(threading.Thread):
    """Upserts rows without pause, looks some up, and follows the table; a context manager.

    No look-up goes back behind an acknowledged write, the change feed has every change once, and in the end
    the table holds what was written.
    """

    def __init__(self, servers: str) -> None:
        super().__init__(name="table load", daemon=True)
        self._servers = servers
        self._end = threading.Event()
        self._rng = random.Random(3)
        self._failure: BaseException | None = None
        self.topic = ""
        self.acked = 0
        self.looked_up = 0

    def __enter__(self) -> TableLoad:
        self.start()
        wait_until(lambda: self.topic or self._failure, "the table is there", SOON)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self.join()

    def wait_for_acks(self, more: int) -> None:
        """Wait until that many more writes are acknowledged, and as many look-ups answered."""
        wanted = self.acked + more, self.looked_up + more

        def are_there() -> bool:
            if self._failure is not None:
                raise self._failure
            return self.acked >= wanted[0] and self.looked_up >= wanted[1]

        wait_until(are_there, f"{more} writes and look-ups of a table are answered", SOON)

    def check(self) -> None:
        """End the load, and raise what was wrong."""
        self._end.set()
        self.join()
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self._failure = error

    async def _work(self) -> None:
        async with self._connected() as client, self._connected() as other:
            await client.create_database("campaign", if_not_exists=True)
            table = await client.create_table(
                "campaign.stock", "item bigint not null, amount bigint", primary_key="item", buckets=_BUCKETS
            )
            model, reading = Model(table), await other.table("campaign.stock")
            await self._certain(lambda: model.upsert([*range(_KEYS)]))
            follower = Follower(reading)
            self.topic = table.definition.partitions[0].topic
            while not self._end.is_set():
                items = self._rng.sample(range(_KEYS), 5)
                await self._certain(lambda items=items: model.upsert(items))  # type: ignore[misc]
                self.acked += 1
                await self._look_up(reading, model.rows)
            await follower.has(model.rows)
            await follower.stop()
            assert as_dict(await self._certain(lambda: table.scan().to_arrow())) == model.rows

    async def _look_up(self, table: AsyncTable, rows: dict[int, int]) -> None:
        item = self._rng.randrange(_KEYS)
        row = await self._certain(lambda: table.lookup(item))
        assert row is not None, f"row {item} was acknowledged and is gone"
        assert row["amount"] == rows[item], f"row {item} was acknowledged as {rows[item]} and is {row}"
        self.looked_up += 1

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncTidemill]:
        async with await tidemill.connect_async(self._servers, timeout_ms=120_000) as client:
            yield client

    async def _certain(self, action: Callable[[], Awaitable[_T]]) -> _T:
        """Try until it is done, as long as the error is one that passes."""
        deadline = time.monotonic() + SOON
        while True:
            try:
                return await action()
            except TidemillError as error:
                if not error.retriable or time.monotonic() > deadline:
                    raise
