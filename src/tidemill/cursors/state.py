"""The cursors of one shard: taken over, committed, paused, reset and deleted. Pure.

Every change follows one pattern: what is asked is checked, records are appended, and ``replay`` makes them
part of the state; loading calls the same ``replay``. If ``append`` raises, nothing has changed.

- Taking over raises the epoch of a partition. Only its newest epoch can commit. The first epoch is the time
  at which a position is begun: an owner of before the cursor was deleted has none of a later one's epochs.
- A commit names the position that it goes on from. One that finds its own result is a repeated one, and fine.
- Leases say who has given a sign of life lately. They are in memory only: what protects the positions is the
  epoch. Once the log is loaded everybody who has not given a cursor up has a lease anew (``begin_leases``):
  its signs of life may have gone to another coordinator until now.
- A position that is set, by its first owner or by ``alter``, gets a new origin. An owner that keeps a newer
  position elsewhere, in transactions, keeps the origin with it, and so sees that the position was set since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from tidemill.cursors.region import IDENTITY_BYTES_MAX
from tidemill.cursors.stored import Home, StoredCursor, StoredPosition, StoredRecord
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError

__all__ = ("CURSOR_PARTITIONS_MAX", "NAME_CHARACTERS_MAX", "CursorsState", "Given", "Held", "Next")

NAME_CHARACTERS_MAX: Final = 249
#: Partitions in one request: what is done for each is done in one turn of the event loop.
CURSOR_PARTITIONS_MAX: Final = 500
#: Cursors and partitions that are described in one turn of the event loop, and then one more cursor.
_LISTED_AT_ONCE: Final = 1_000
_SHOWN_CHARACTERS_MAX: Final = 1_000
_LEASE_MS_MAX: Final = 600_000
#: The lease of owners of whom it is not known how long theirs is.
_LEASE_MS_DEFAULT: Final = 10_000


_HOMES: Final = {
    Home.CLUSTER: "in the cluster",
    Home.TRANSACTIONS: "in its transactions",
    Home.FILE: "in a file",
    Home.DATABASE: "in a database",
    Home.UNKNOWN: "in the cluster or in its transactions",
}


class Given(NamedTuple):
    """A position that a client gives: where to begin, or where to set a cursor to."""

    offset: int
    leader_epoch: int
    started: bool
    finished: bytes


class Next(NamedTuple):
    """A commit in one partition: the owner's epoch, the offset that it goes on from, and the new position."""

    epoch: int
    previous_offset: int
    position: Given


class Held(NamedTuple):
    """A partition of a cursor, and for how much longer its owner is taken to be alive."""

    position: StoredPosition
    lease_left_ms: int


@dataclass(slots=True)
class _Cursor:
    about: StoredCursor | None = None
    positions: dict[int, StoredPosition] = field(default_factory=dict)
    #: By partition: until when its owner is taken to be alive, once it has given a sign of life here.
    leases: dict[int, int] = field(default_factory=dict)


class CursorsState:
    """The cursors of one shard. ``append`` puts records into the log, or raises and leaves it as it was."""

    def __init__(self, append: Callable[[Sequence[StoredRecord]], None]) -> None:
        self._append = append
        self._cursors: dict[str, _Cursor] = {}
        #: When the log was loaded, from which on the leases of earlier owners count.
        self._loaded_ms: int | None = None
        #: By name, how many offsets commits have passed since this state was made.
        self.passed: dict[str, int] = {}

    def replay(self, name: str, partition: int | None, value: StoredCursor | StoredPosition | None) -> None:
        """Make a record that is in the log part of the state."""
        cursor = self._cursors.setdefault(name, _Cursor())
        if partition is None:
            assert not isinstance(value, StoredPosition), name
            cursor.about = value
        elif value is None:
            cursor.positions.pop(partition, None)
            cursor.leases.pop(partition, None)
        else:
            assert isinstance(value, StoredPosition), name
            cursor.positions[partition] = value
        if cursor.about is None and not cursor.positions:
            del self._cursors[name]

    def begin_leases(self, now_ms: int) -> None:
        """Take every owner to be alive for as long as its lease lasts: after the log was loaded."""
        self._loaded_ms = now_ms

    def _lease_left_ms(self, cursor: _Cursor, partition: int, now_ms: int) -> int:
        """For how much longer the owner of a partition is taken to be alive; 0 if nobody owns it."""
        stored = cursor.positions.get(partition)
        if stored is None or not stored.owner:
            return 0
        until_ms = cursor.leases.get(partition)
        if until_ms is None:
            # Worked out when it is asked for: nothing limits how many cursors are loaded at a time.
            if self._loaded_ms is None:
                return 0
            until_ms = self._loaded_ms + (stored.lease_ms or _LEASE_MS_DEFAULT)
        return max(0, until_ms - now_ms)

    def _write(self, records: Sequence[StoredRecord]) -> None:
        if records:
            self._append(records)
            for record in records:
                self.replay(*record)

    # --- owners

    def take(
        self,
        name: str,
        about: StoredCursor,
        starts: Mapping[int, Given],
        *,
        owner: str,
        lease_ms: int,
        force: bool,
        origin: UUID,
        now_ms: int,
    ) -> dict[int, Held]:
        """Become the owner of partitions: with a higher epoch, at the stored position or at the start.

        ``origin`` becomes that of positions that are new. Raises if the cursor is of another region or kept
        elsewhere, or is owned by somebody else who is alive.
        """
        _check_sizes(name, about, starts, lease_ms)
        cursor = self._cursors.get(name, _Cursor())
        if cursor.about is not None and cursor.about.region != about.region:
            raise TableError(
                TableCode.cursor_region_mismatch,
                f"cursor {name!r} is kept for another region: {cursor.about.shown}, not {about.shown}",
            )
        if cursor.about is not None and not _is_same_home(cursor.about.home, about.home):
            raise TableError(
                TableCode.cursor_region_mismatch,
                f"cursor {name!r} keeps its position {_HOMES[cursor.about.home]}, not {_HOMES[about.home]}",
            )
        if not force:
            self._check_free(name, cursor, starts, owner, now_ms)
        records: list[StoredRecord] = []
        if cursor.about is None:
            records.append((name, None, about))
        elif cursor.about.home is not about.home:
            records.append((name, None, replace(cursor.about, home=about.home)))
        for partition, start in starts.items():
            stored = cursor.positions.get(partition)
            if stored is None:
                taken = StoredPosition(max(1, now_ms), *start, owner, now_ms, lease_ms, origin)
            else:
                taken = replace(stored, epoch=stored.epoch + 1, owner=owner, lease_ms=lease_ms)
            records.append((name, partition, taken))
        self._write(records)
        cursor = self._cursors[name]
        cursor.leases.update(dict.fromkeys(starts, now_ms + lease_ms))
        return {partition: Held(cursor.positions[partition], lease_ms) for partition in starts}

    def _check_free(
        self, name: str, cursor: _Cursor, starts: Mapping[int, Given], owner: str, now_ms: int
    ) -> None:
        for partition in starts:
            left_ms = self._lease_left_ms(cursor, partition, now_ms)
            if left_ms > 0 and (holder := cursor.positions[partition].owner) != owner:
                raise TableError(
                    TableCode.cursor_in_use,
                    f"cursor {name!r}, partition {partition}, is owned by {holder}, whose lease lasts "
                    f"for another {left_ms} ms",
                )

    def keep(
        self, name: str, epochs: Mapping[int, int], *, lease_ms: int, release: bool, now_ms: int
    ) -> bool:
        """Give a sign of life, or give partitions up; gives whether the cursor is paused."""
        cursor = self._found(name)
        held = {each: self._check_epoch(name, cursor, each, epoch) for each, epoch in epochs.items()}
        if release:
            # Written to the log, so that the next coordinator does not wait for this lease either.
            owned = ((each, stored) for each, stored in held.items() if stored.owner)
            self._write([(name, each, replace(stored, owner="")) for each, stored in owned])
        for partition in epochs:
            cursor.leases[partition] = now_ms if release else now_ms + min(lease_ms, _LEASE_MS_MAX)
        return cursor.about is not None and cursor.about.paused

    def commit(self, name: str, steps: Mapping[int, Next], now_ms: int) -> tuple[bool, dict[int, Held]]:
        """Store positions; gives whether the cursor is paused, and what is stored now.

        All of them or none. Raises CURSOR_FENCED for an epoch that is not the newest, and CURSOR_MOVED if a
        stored position is not the one to go on from.
        """
        cursor = self._found(name)
        records: list[StoredRecord] = []
        passed = 0
        for partition, step in steps.items():
            stored = self._check_epoch(name, cursor, partition, step.epoch)
            position = replace(stored, **step.position._asdict(), committed_ms=now_ms, moved=True)
            if replace(stored, committed_ms=now_ms) == position:
                continue  # It was asked for before, and the answer was lost.
            if stored.offset != step.previous_offset:
                raise TableError(
                    TableCode.cursor_moved,
                    f"cursor {name!r}, partition {partition}, is at offset {stored.offset}, not at "
                    f"{step.previous_offset}",
                )
            records.append((name, partition, position))
            passed += max(0, position.offset - stored.offset)
        self._write(records)
        self.passed[name] = self.passed.get(name, 0) + passed
        paused = cursor.about is not None and cursor.about.paused
        return paused, {each: self._held(cursor, each, now_ms) for each in steps}

    def _check_epoch(self, name: str, cursor: _Cursor, partition: int, epoch: int) -> StoredPosition:
        stored = cursor.positions.get(partition)
        if stored is None or stored.epoch != epoch:
            newest = "nobody" if stored is None else f"{stored.owner} with epoch {stored.epoch}"
            raise TableError(
                TableCode.cursor_fenced,
                f"cursor {name!r}, partition {partition}, was taken over: it is owned by {newest}, not by "
                f"epoch {epoch}",
            )
        return stored

    # --- people

    def alter(
        self,
        name: str,
        *,
        paused: bool | None,
        positions: Mapping[int, Given],
        force: bool,
        origin: UUID,
        now_ms: int,
    ) -> None:
        """Pause or resume a cursor, or set its position, which fences its owner.

        A cursor whose owner is alive is set only with ``force``. ``origin`` becomes that of what is set.
        """
        cursor = self._found(name)
        assert cursor.about is not None
        records: list[StoredRecord] = []
        if paused is not None and paused != cursor.about.paused:
            records.append((name, None, replace(cursor.about, paused=paused)))
        unknown = set(positions) - set(cursor.positions)
        if unknown:
            raise ApiError(
                ErrorCode.unknown_topic_or_partition, f"cursor {name!r} has no partition {min(unknown)}"
            )
        if positions and cursor.about.home in (Home.FILE, Home.DATABASE):
            raise _refused(
                f"cursor {name!r} keeps its position {_HOMES[cursor.about.home]}: open it and seek "
                "(if its log does not have the position, with if_lost), or delete the position there to "
                "begin anew"
            )
        if positions and not force:
            self._check_free(name, cursor, positions, "", now_ms)
        for partition, given in positions.items():
            epoch = cursor.positions[partition].epoch + 1
            records.append((name, partition, StoredPosition(epoch, *given, "", now_ms, origin=origin)))
        self._write(records)

    def delete_some(self, name: str, *, force: bool, now_ms: int) -> bool:
        """Forget some partitions of a cursor, with the last of them the cursor; gives whether that is done.

        One whose owner is alive is forgotten only with ``force``.
        """
        cursor = self._found(name)
        if not force:
            free: dict[int, Given] = dict.fromkeys(cursor.positions, Given(0, -1, False, b""))
            self._check_free(name, cursor, free, "", now_ms)
        some: list[StoredRecord] = [
            (name, partition, None) for partition in islice(cursor.positions, CURSOR_PARTITIONS_MAX)
        ]
        if len(some) == len(cursor.positions):
            self._write([*some, (name, None, None)])
            self.passed.pop(name, None)
            return True
        self._write(some)
        return False

    def describe(self, name: str, now_ms: int) -> tuple[StoredCursor, dict[int, Held]]:
        """A cursor as it is now."""
        cursor = self._found(name)
        assert cursor.about is not None
        return cursor.about, {each: self._held(cursor, each, now_ms) for each in sorted(cursor.positions)}

    def names(self) -> list[list[str]]:
        """The names of the cursors of this shard, in parts that have about a thousand partitions each."""
        parts: list[list[str]] = []
        room = 0
        for name, cursor in self._cursors.items():
            if room <= 0:
                parts.append([])
                room = _LISTED_AT_ONCE
            parts[-1].append(name)
            room -= 1 + len(cursor.positions)
        return parts

    def listing(
        self, names: Iterable[str], topic: str | None, now_ms: int
    ) -> list[tuple[str, StoredCursor, dict[int, Held]]]:
        """The named cursors that exist, with their positions; with ``topic``, only those that read it."""
        found = []
        for name in names:
            cursor = self._cursors.get(name)
            if cursor is not None and cursor.about is not None and topic in (None, cursor.about.topic):
                found.append((name, *self.describe(name, now_ms)))
        return found

    def _held(self, cursor: _Cursor, partition: int, now_ms: int) -> Held:
        return Held(cursor.positions[partition], self._lease_left_ms(cursor, partition, now_ms))

    def _found(self, name: str) -> _Cursor:
        cursor = self._cursors.get(name)
        if cursor is None or cursor.about is None:
            raise TableError(TableCode.cursor_not_found, f"no cursor {name!r} is kept here")
        return cursor


def _is_same_home(stored: Home, given: Home) -> bool:
    """Whether a cursor that is opened as one with its position in ``given`` is the one that is stored."""
    if stored is Home.UNKNOWN:
        return given in (Home.CLUSTER, Home.TRANSACTIONS)
    return stored is given


def _check_sizes(name: str, about: StoredCursor, starts: Mapping[int, Given], lease_ms: int) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise _refused(f"a cursor's name is 1 to {NAME_CHARACTERS_MAX} printable characters")
    if len(about.region) > IDENTITY_BYTES_MAX or len(about.shown) > _SHOWN_CHARACTERS_MAX:
        raise _refused(f"a region is described by at most {IDENTITY_BYTES_MAX} bytes")
    if not 0 < lease_ms <= _LEASE_MS_MAX:
        raise _refused(f"a lease lasts for 1 to {_LEASE_MS_MAX} ms, not {lease_ms}")
    if any(partition < 0 or start.offset < 0 for partition, start in starts.items()):
        raise _refused("partitions and offsets are numbers from 0")


def _refused(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, message)
