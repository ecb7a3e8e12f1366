"""The coordinator of cursors: which shard a name lives in, and what is asked of it.

Everything raises ``TidemillError`` with the code that a client is told. An answer leaves only after its
records are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tidemill.control.image import CURSORS_TOPIC
from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.shards import Shards, client_error
from tidemill.coordination.shell import ShardShell
from tidemill.coordination.turns import give_way, in_slices, sorted_in_slices
from tidemill.cursors.state import CursorsState, Given, Held, Next
from tidemill.cursors.stored import decode_record, encode_record
from tidemill.errors import ApiError, ErrorCode, TableError, TidemillError

if TYPE_CHECKING:
    from uuid import UUID

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, LogAccess, ReplayedRecord
    from tidemill.cursors.stored import StoredCursor, StoredRecord

__all__ = ("CursorCoordinator", "Listed")

_T = TypeVar("_T")


class Listed(NamedTuple):
    """Cursors, by name, and the partitions of ``__cursors`` that were looked at: those that a node leads."""

    cursors: list[tuple[str, StoredCursor, dict[int, Held]]]
    shards: list[int]


class CursorShard(ShardShell):
    """The shell of ``CursorsState``. Keys are names of cursors; none has a deadline."""

    def __init__(
        self, partition: int, log: CoordinatorLog, clock: Clock, on_stop: Callable[[CursorShard], None]
    ) -> None:
        super().__init__(CURSORS_TOPIC, partition, log, clock, on_stop)
        self.state = CursorsState(self._append)

    def _append(self, records: Sequence[StoredRecord]) -> None:
        self._note_appended(self.log.append([encode_record(*record) for record in records]))

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        record = decode_record(entry.key, entry.value)
        if record is not None:
            self.state.replay(*record)
        return record is not None

    def _loaded(self, now_ms: int) -> Iterable[str]:
        self.state.begin_leases(now_ms)
        return ()

    def _next_deadline_ms(self, key: str) -> int | None:
        return None

    def _tick(self, key: str, now_ms: int) -> None:
        pass

    def _die(self, code: ErrorCode) -> None:
        pass


class CursorCoordinator(Coordinator[CursorShard]):
    """The cursors of the partitions of ``__cursors`` that this node leads."""

    def __init__(self, logs: LogAccess, clock: Clock) -> None:
        super().__init__(
            Shards(
                CURSORS_TOPIC,
                logs,
                clock,
                lambda partition, log, on_stop: CursorShard(partition, log, clock, on_stop),
            )
        )
        self._clock = clock

    async def expire(self) -> None:
        """Nothing expires: a position is kept until somebody deletes its cursor."""

    async def take(
        self,
        name: str,
        about: StoredCursor,
        starts: Mapping[int, Given],
        *,
        owner: str,
        lease_ms: int,
        force: bool,
        origin: UUID,
    ) -> tuple[bool, dict[int, Held]]:
        """Become the owner of partitions; gives whether the cursor is paused, and what is stored."""

        def handler(state: CursorsState, now_ms: int) -> tuple[bool, dict[int, Held]]:
            taken = state.take(
                name,
                about,
                starts,
                owner=owner,
                lease_ms=lease_ms,
                force=force,
                origin=origin,
                now_ms=now_ms,
            )
            return state.describe(name, now_ms)[0].paused, taken

        return await self._call(name, handler)

    async def commit(self, name: str, steps: Mapping[int, Next]) -> tuple[bool, dict[int, Held]]:
        """Store positions; gives whether the cursor is paused, and what is stored."""
        return await self._call(name, lambda state, now_ms: state.commit(name, steps, now_ms))

    async def keep(self, name: str, epochs: Mapping[int, int], *, lease_ms: int, release: bool) -> bool:
        """Give a sign of life of an owner; gives whether the cursor is paused."""
        return await self._call(
            name,
            lambda state, now_ms: state.keep(name, epochs, lease_ms=lease_ms, release=release, now_ms=now_ms),
        )

    async def alter(
        self,
        name: str,
        *,
        paused: bool | None,
        positions: Mapping[int, Given],
        force: bool,
        origin: UUID,
    ) -> tuple[StoredCursor, dict[int, Held]]:
        """Pause, resume or set a cursor; gives it as it is then."""

        def handler(state: CursorsState, now_ms: int) -> tuple[StoredCursor, dict[int, Held]]:
            state.alter(name, paused=paused, positions=positions, force=force, origin=origin, now_ms=now_ms)
            return state.describe(name, now_ms)

        return await self._call(name, handler)

    async def delete(self, name: str, *, force: bool) -> None:
        """Forget a cursor, a part of its partitions at a time. If that is cut off, it can be repeated."""
        while not await self._call(
            name, lambda state, now_ms: state.delete_some(name, force=force, now_ms=now_ms)
        ):
            await give_way()

    async def describe(self, name: str) -> tuple[StoredCursor, dict[int, Held]]:
        """A cursor as it is now."""
        return await self._call(name, lambda state, now_ms: state.describe(name, now_ms))

    async def listing(self, topic: str | None = None) -> Listed:
        """The cursors of all shards of this node, by name. Raises if a shard could not be read."""
        found: dict[str, tuple[str, StoredCursor, dict[int, Held]]] = {}
        shards, failures = await self._shards.all()
        try:
            for shard in shards:
                # Few at a time: nothing limits how many cursors there are. An empty shard is asked, too: that
                # tells whether this node still leads it.
                for some in shard.state.names() or [[]]:
                    listed = await shard.call(None, partial(shard.state.listing, some, topic))
                    found.update((each[0], each) for each in listed)
                    await give_way()
        except TidemillError as failure:
            failures.append(failure)
        if failures:
            raise _for_client(failures[0])
        ordered = await in_slices(found[name] for name in await sorted_in_slices(tuple(found)))
        return Listed(ordered, [shard.partition for shard in shards])

    def passed(self) -> dict[str, int]:
        """By cursor, how many offsets its commits have passed since its shard was loaded here."""
        return {name: count for shard in self._shards.loaded() for name, count in shard.state.passed.items()}

    async def _call(self, name: str, handler: Callable[[CursorsState, int], _T]) -> _T:
        try:
            shard = await self._shards.of(name)
            return await shard.call(name, lambda now_ms: handler(shard.state, now_ms))
        except TableError:
            raise
        except TidemillError as failure:
            raise _for_client(failure) from failure


def _for_client(failure: TidemillError) -> TidemillError:
    return ApiError(client_error(failure), failure.message)
