"""Checkpoints that the cluster keeps, in an internal topic, under the cursor's name.

The fencing epoch is there, too: taking over raises it before the position is read, and a commit with an older
one is refused. A lease, kept alive in the background, tells others that the owner is alive: they wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.store import AwaitedStore, StoredElsewhere, begin_added
from tidemill.client.keeping import keep_alive
from tidemill.cursors.checkpoint import Entry, check_identity, pack_finished, unpack_finished
from tidemill.cursors.errors import (
    CheckpointRegionMismatch,
    CursorError,
    CursorFenced,
    CursorInUse,
    CursorNotFound,
)
from tidemill.cursors.machine import Step
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region
from tidemill.cursors.stored import NO_ORIGIN, Home
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError, TidemillError
from tidemill.net.answers import checked

__all__ = ("CURSOR_KEY", "ClusterStore", "ask_coordinator", "parts_of", "position_body", "where_of")

#: FindCoordinator's type of keys that are names of cursors.
CURSOR_KEY: Final = 100
_PARTITIONS_PER_REQUEST: Final = 500
_SIGNS_PER_LEASE: Final = 3
_LOOK_AGAIN_MS: Final = 200


class Mark(NamedTuple):
    """When a position was set, and whether a commit has moved it since."""

    origin: UUID
    moved: bool


class ClusterStore(AwaitedStore):
    """Keeps the positions of one cursor in the cluster.

    ``log_starts`` is given if it reads every partition, also those that are added later: they begin there.
    """

    can_be_reset = True

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        region: Region,
        *,
        take_over: bool,
        lease_ms: int,
        home: Home = Home.CLUSTER,
        owner: str | None = None,
        log_starts: Mapping[int, Position] | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._region = region
        self._force = take_over
        self._lease_ms = lease_ms
        self._home = home
        self._log_starts = log_starts
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"
        self._epochs: dict[int, int] = {}
        #: By partition, for those who keep the position elsewhere.
        self.marks: dict[int, Mark] = {}
        #: By partition: what is stored here, and what is to be with the next sign of life.
        self._stored: dict[int, Position] = {}
        self._to_show: dict[int, Position] = {}
        self._fenced: CursorFenced | None = None
        self._signs: asyncio.Task[None] | None = None
        self.is_paused = False

    @property
    def where(self) -> str:
        return where_of(self._name)

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        entries: dict[int, Entry] = {}
        if self._log_starts is not None and not self._epochs:
            starts = begin_added(starts, await self._known(), self._log_starts)
        for chosen in parts_of(starts):
            answer = await self._take({partition: starts[partition] for partition in chosen})
            self.is_paused = answer.paused
            for each in answer.partitions:
                self._epochs[each.partition] = each.epoch
                self.marks[each.partition] = Mark(each.origin or NO_ORIGIN, each.moved)
                entries[each.partition] = _entry(each)
        self._stored |= {partition: entry.position for partition, entry in entries.items()}
        if self._signs is None:
            self._signs = asyncio.get_running_loop().create_task(self._give_signs())
        return entries

    async def _known(self) -> set[int]:
        """The partitions of which a position is stored."""
        try:
            found = await ask_coordinator(self._cluster, self._name, "DescribeCursor", {"name": self._name})
        except TableError as error:
            if error.table_code != TableCode.cursor_not_found:
                raise
            return set()
        return {each.partition for each in found.cursor.partitions}

    async def _take(self, starts: Mapping[int, Position]) -> Any:
        body = {
            "name": self._name,
            "topic": self._region.topic,
            "topic_id": self._region.topic_id,
            "region": self._region.identity(),
            "shown": str(self._region)[:1_000],
            "owner": self._owner,
            "lease_ms": self._lease_ms,
            "force": self._force,
            "home": self._home,
            "partitions": [position_body(*item) for item in starts.items()],
        }
        loop = asyncio.get_running_loop()
        # As long as the lease of an owner that has died can last.
        deadline = loop.time() + max(self._cluster.timeout_ms, self._lease_ms) / 1000
        while True:
            try:
                return await self._ask("TakeCursor", body)
            except CursorInUse:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_LOOK_AGAIN_MS / 1000)

    async def commit(self, steps: Mapping[int, Step]) -> None:
        self.check()
        for chosen in parts_of(steps):
            partitions = [
                position_body(partition, steps[partition].after, steps[partition].finished)
                | {"epoch": self._epochs[partition], "previous_offset": steps[partition].before.offset}
                for partition in chosen
            ]
            answer = await self._ask("CommitCursor", {"name": self._name, "partitions": partitions})
            self.is_paused = answer.paused

    def check(self) -> None:
        if self._fenced is not None:
            raise self._fenced

    async def close(self) -> None:
        signs, self._signs = self._signs, None
        if signs is None:
            return
        signs.cancel()
        await asyncio.gather(signs, return_exceptions=True)
        # A node that does not answer lets the lease end by itself.
        with contextlib.suppress(TidemillError, OSError):
            await asyncio.wait_for(self._sign(release=True), 2.0)

    async def _give_signs(self) -> None:
        await keep_alive(self._lease_ms / _SIGNS_PER_LEASE / 1000, lambda: self._sign(release=False))

    async def _sign(self, *, release: bool) -> None:
        with contextlib.suppress(TidemillError, OSError):
            await self.show_now()
        await self._keep(release=release)

    # --- for positions that are kept elsewhere

    def show_soon(self, positions: Mapping[int, Position]) -> None:
        """Have these positions shown here, with the next sign of life. From any thread."""
        self._to_show = {**self._to_show, **positions}

    async def show_now(self) -> None:
        """Tell the coordinator the positions that are kept elsewhere and have moved since then."""
        steps = {
            partition: Step(self._stored[partition], position)
            for partition, position in self._to_show.items()
            if self._stored.get(partition, position) != position
        }
        if not steps:
            return
        try:
            await self.commit(steps)
            self._stored |= {partition: step.after for partition, step in steps.items()}
        except StoredElsewhere as error:
            self._stored |= {each: entry.position for each, entry in error.entries.items()}

    # --- requests

    async def _keep(self, *, release: bool) -> None:
        for chosen in parts_of(self._epochs):
            body = {
                "name": self._name,
                "lease_ms": self._lease_ms,
                "release": release,
                "partitions": [{"partition": each, "epoch": self._epochs[each]} for each in chosen],
            }
            try:
                self.is_paused = (await self._ask("KeepCursor", body)).paused
            except CursorFenced as error:
                self._fenced = self._fenced or error

    async def _ask(self, api: str, body: dict[str, Any]) -> Any:
        try:
            return await ask_coordinator(self._cluster, self._name, api, body)
        except TableError as error:
            if error.table_code == TableCode.cursor_fenced:
                self._fenced = CursorFenced(error.message, where=self.where)
                raise self._fenced from error
            if error.table_code == TableCode.cursor_in_use:
                what_to_do = "stop it first, or open the cursor with take_over=True"
                raise CursorInUse(f"{error.message}; {what_to_do}", where=self.where) from error
            if error.table_code == TableCode.cursor_not_found:
                self._fenced = CursorFenced("the cursor was deleted", where=self.where)
                raise self._fenced from error
            if error.table_code in (TableCode.cursor_region_mismatch, TableCode.cursor_moved):
                raise await self._explained(error) from error
            raise

    async def _explained(self, error: TableError) -> CursorError:
        """The error of a cursor that is not as it should be, with what is stored."""
        found = await ask_coordinator(self._cluster, self._name, "DescribeCursor", {"name": self._name})
        if error.table_code == TableCode.cursor_region_mismatch:
            check_identity(bytes(found.cursor.region), self._region, self.where)
            return CheckpointRegionMismatch(
                f"{error.message}: open it as before, or delete it first",
                where=self.where,
                stored=Home(found.cursor.home).name,
                expected=self._home.name,
            )
        entries = {each.partition: _entry(each) for each in found.cursor.partitions}
        stored = {partition: entry.position.offset for partition, entry in entries.items()}
        return StoredElsewhere(
            error.message, entries, where=self.where, stored=stored, expected="where this batch begins"
        )


async def ask_coordinator(cluster: Cluster, name: str, api: str, body: dict[str, Any]) -> Any:
    """Ask the coordinator of a cursor, and ask again what may pass by itself."""

    async def ask() -> Any:
        answer = await cluster.to_coordinator(name, api, body, key_type=CURSOR_KEY)
        return checked(answer, f"asking for cursor {name!r}")

    try:
        return await cluster.retrying(ask)
    except TableError:
        raise
    except ApiError as error:
        if error.code == ErrorCode.group_id_not_found:
            raise CursorNotFound("there is no such cursor", where=where_of(name)) from error
        raise


def where_of(name: str) -> str:
    """A cursor that the cluster keeps, in words."""
    return f"cursor {name!r} (kept by the cluster)"


def position_body(partition: int, position: Position, finished: Iterable[int] = ()) -> dict[str, Any]:
    """A position as requests have it."""
    return {
        "partition": partition,
        "offset": position.offset,
        "leader_epoch": position.leader_epoch,
        "started": position.started,
        "finished": pack_finished(position.offset, finished),
    }


def _entry(each: Any) -> Entry:
    position = Position(each.offset, each.leader_epoch, each.started)
    return Entry(each.epoch, position, unpack_finished(each.offset, bytes(each.finished)))


def parts_of(partitions: Mapping[int, Any]) -> Iterable[list[int]]:
    """The partitions in lists, each for one request."""
    listed = list(partitions)
    for first in range(0, len(listed), _PARTITIONS_PER_REQUEST):
        yield listed[first : first + _PARTITIONS_PER_REQUEST]
