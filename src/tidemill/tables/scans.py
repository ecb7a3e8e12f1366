"""Look-ups, scans and pins of a node: the sessions' state machine with real state behind it.

A scan reads a pin, a leased snapshot, or the state of its own moment. It is bound to the leader epoch that it
was opened under. A session takes one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from tidemill.control.table_images import LeasedSnapshot
from tidemill.coordination.moments import MomentGate
from tidemill.coordination.shares import Client
from tidemill.errors import CorruptData, StorageError, TableCode, TableError
from tidemill.kv.engine import KvReader, open_read_only
from tidemill.kv.view import KvView
from tidemill.tables.bucket import Bucket
from tidemill.tables.definition import TableDefinition
from tidemill.tables.pins import Pin, Pins, SharedView
from tidemill.tables.predicate import bind, decode
from tidemill.tables.reading import ScanShape, check_columns, look_up, pack_batches, read_batch
from tidemill.tables.scanners import BucketKey, ScanLimits, ScanSession, ScanSessions
from tidemill.tables.service import TableService

__all__ = ("LookedUp", "OpenScan", "ScanAnswer", "Scans")

_T = TypeVar("_T")

_KEYS_MAX = 100_000
_PIN_IDLE_MS_MAX = 3_600_000


@dataclass(frozen=True, slots=True)
class OpenScan:
    """What a scan is opened with. ``limit`` 0 means all rows."""

    bucket: BucketKey
    leader_epoch: int = -1
    pin_id: str | None = None
    lease_id: str | None = None
    limit: int = 0
    columns: tuple[str, ...] = ()
    predicate: bytes | None = None
    start_key: bytes | None = None
    end_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """The answer to one call. ``scanner_id`` is None when there is nothing to go on with."""

    scanner_id: bytes | None
    has_more: bool
    records: pa.Buffer | None
    next_key: bytes | None = None
    #: The log offset that the scanned state stands for; in the answer to the first call.
    log_offset: int = -1


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Rows by key, and the offset up to which the log was in the state."""

    log_offset: int
    records: pa.Buffer | None


@dataclass(slots=True)
class _Reader:
    """What a session reads, and its turn."""

    table: TableDefinition
    shape: ScanShape
    view: SharedView
    turn: asyncio.Lock
    pin_id: str | None
    lease_id: str | None


class Scans:
    """See the module."""

    def __init__(self, service: TableService) -> None:
        self._service = service
        settings = service.host.settings
        self._max_bytes = settings.scan_max_bytes
        self.sessions = ScanSessions(
            ScanLimits(settings.scan_sessions_per_bucket, settings.scan_sessions, settings.scan_idle_ms)
        )
        self.pins = Pins(settings.scan_pins)
        self._idle_ms = settings.scan_idle_ms
        service.on_bucket_ends.append(self._end_bucket)

    # --- look-ups

    async def look_up(
        self,
        key: BucketKey,
        leader_epoch: int,
        keys: Sequence[bytes],
        columns: Sequence[str],
        min_offset: int,
        max_wait_ms: int,
        max_bytes: int,
    ) -> LookedUp:
        """The rows of ``keys``, which are state keys; ``max_bytes`` of them at most."""
        table = self._service.keyed(key.table_id)
        check_columns(table, columns)
        if len(keys) > _KEYS_MAX:
            raise TableError(
                TableCode.invalid_scan_request, f"{len(keys)} keys in one look-up, {_KEYS_MAX} are the most"
            )
        log = self._service.log(key)
        log.check_leader_epoch(leader_epoch)
        # What was acknowledged before the look-up is seen by it, also while the state is still behind.
        wanted = max(min_offset, log.last_stable_offset)
        bucket = await self._service.ready_bucket(key, wanted, max_wait_ms)
        offset = bucket.applied_offset
        find_table = partial(self._service.keyed, key.table_id)
        max_bytes = min(max_bytes, self._max_bytes)
        work = partial(_look_up, find_table, bucket.store, keys, list(columns) or None, max_bytes)
        try:
            return LookedUp(offset, await self._read(bucket, work))
        except TableError as error:
            if error.table_code != TableCode.scanner_expired:
                raise
            # A look-up has nothing to lose: it can just be asked again.
            raise TableError(TableCode.state_not_ready, error.message) from error

    # --- pins

    async def pin(
        self,
        table_id: int,
        min_offsets: dict[BucketKey, int],
        max_wait_ms: int,
        idle_ms: int,
        client: Client,
    ) -> Pin:
        """Hold the state of all buckets still that this node leads."""
        table = self._service.keyed(table_id)
        self.pins.check_room(self._service.host.steady_ms(), client)
        views: dict[BucketKey, SharedView] = {}
        epochs: dict[BucketKey, int] = {}
        try:
            # The logs first: they are what can be refused.
            for key in self._service.bucket_keys(table):
                epochs[key] = self._service.log(key).leader_epoch
            buckets = await asyncio.gather(
                *(self._service.ready_bucket(key, min_offsets.get(key, -1), max_wait_ms) for key in epochs)
            )
            taken = await _all_views(buckets, self._service.host.moments)
            for key, (view, log_offset) in zip(epochs, taken, strict=True):
                views[key] = SharedView(view, log_offset, view.close)
            now_ms = self._service.host.steady_ms()
            idle_ms = min(idle_ms, _PIN_IDLE_MS_MAX) if idle_ms > 0 else self._idle_ms
            pin = Pin(secrets.token_hex(12), table_id, views, epochs, idle_ms, now_ms, client)
            self.pins.check_room(now_ms, client)
        except BaseException:
            for shared in views.values():
                shared.release()
            raise
        self.pins.add(pin)
        return pin

    def keep_pin(self, pin_id: str) -> None:
        """Say that a pin is still needed."""
        self.pins.get(pin_id, self._service.host.steady_ms())

    async def _view(self, bucket: Bucket) -> SharedView:
        view, log_offset = await bucket.view()
        return SharedView(view, log_offset, view.close)

    # --- sessions

    async def open(self, scan: OpenScan, sequence: int, batch_bytes: int, client: Client) -> ScanAnswer:
        """The first call of a scan: its session, unless everything is in this answer, and the first batch."""
        table = self._service.keyed(scan.bucket.table_id)
        # In a thread: a filter can be large.
        shape = await self._in_thread(partial(_shape, table, scan))
        max_bytes = self._effective_bytes(batch_bytes)
        if sequence != 0:
            raise TableError(TableCode.invalid_scan_request, f"a scan is opened by call 0, not {sequence}")
        if scan.limit < 0:
            raise TableError(TableCode.invalid_scan_request, f"a scan cannot give {scan.limit} rows")
        self._service.log(scan.bucket).check_leader_epoch(scan.leader_epoch)
        self.sessions.check_room(scan.bucket, client)
        view = await self._view_of(scan)
        try:
            # Found again: the rows may be of a schema that the table got meanwhile.
            newest = self._service.keyed(scan.bucket.table_id)
            if newest is not table:
                table, shape = newest, await self._in_thread(partial(_shape, newest, scan))
        except BaseException:
            view.release()
            raise
        reader = _Reader(table, shape, view, asyncio.Lock(), scan.pin_id, scan.lease_id)
        session = ScanSession(
            secrets.token_bytes(16),
            scan.bucket,
            reader,
            self._service.host.steady_ms(),
            next_start=scan.start_key or b"",
            rows_left=scan.limit or None,
            client=client,
        )
        try:
            self.sessions.open(session)
            answer = await self._call(session, 0, max_bytes)
        except BaseException:
            self.sessions.close(session.id)
            _let_go(session)
            raise
        if not answer.has_more and answer.records is None:
            # Nothing to give, so nothing that could get lost on the way.
            self._close(session.id)
            return ScanAnswer(None, False, None, None, view.log_offset)
        return ScanAnswer(session.id, answer.has_more, answer.records, answer.next_key, view.log_offset)

    async def go_on(self, scanner_id: bytes, sequence: int, batch_bytes: int) -> ScanAnswer:
        """Another call of a scan, or the last one again."""
        session = self.sessions.get(scanner_id, self._service.host.steady_ms())
        return await self._call(session, sequence, self._effective_bytes(batch_bytes))

    def keep_alive(self, scanner_id: bytes) -> None:
        """Say that a scan is still needed."""
        self._touch_pin(self.sessions.get(scanner_id, self._service.host.steady_ms()))

    def close(self, scanner_id: bytes) -> None:
        """End a scan. One that has ended, or never was, is fine."""
        self._close(scanner_id)

    async def walk(self, scan: OpenScan, step: Callable[[Any], bool]) -> None:
        """Call ``step`` with the view that ``scan`` would read, in a thread, as long as it returns True.

        A step is short: others who read the view wait for it.
        """
        self._service.keyed(scan.bucket.table_id)
        self._service.log(scan.bucket).check_leader_epoch(scan.leader_epoch)
        view = await self._view_of(scan)
        try:
            work = partial(step, view.view)
            while await self._read_from(scan, work):
                if scan.pin_id is not None:
                    # It may be gone, which this share of its view outlives.
                    with contextlib.suppress(TableError):
                        self.keep_pin(scan.pin_id)
        finally:
            view.release()

    async def _read_from(self, scan: OpenScan, work: Callable[[], _T]) -> _T:
        bucket = self._service.bucket(scan.bucket)
        if scan.lease_id is None:
            return await self._read(bucket, work)
        return await self._read_leased(bucket, scan.lease_id, work)

    async def _call(self, session: ScanSession, sequence: int, max_bytes: int) -> ScanAnswer:
        reader: _Reader = session.resource
        async with reader.turn:
            if session.resource is None:
                # Closed while this call waited for its turn.
                self.sessions.get(session.id, self._service.host.steady_ms())
                raise TableError(TableCode.unknown_scanner_id, "the scan was closed")
            self._touch_pin(session)
            plan = session.plan(sequence)
            work = partial(_read_packed, reader.table, reader.view.view, reader.shape, plan, max_bytes)
            bucket = self._service.bucket(session.bucket)
            view = reader.view.share()
            try:
                read, records = await (
                    self._read(bucket, work)
                    if reader.lease_id is None
                    else self._read_leased(bucket, reader.lease_id, work)
                )
            finally:
                view.release()
            session.advance(plan, read.next_key, read.rows)
            for lingered in self.sessions.answered(session):
                _let_go(lingered)
            session.used_ms = self._service.host.steady_ms()
            return ScanAnswer(session.id, session.next_start is not None, records, session.next_start)

    def _touch_pin(self, session: ScanSession) -> None:
        reader: _Reader | None = session.resource
        if reader is not None and reader.pin_id is not None:
            try:
                self.keep_pin(reader.pin_id)
            except TableError:
                # The session has its own share of the view, and goes on.
                reader.pin_id = None

    def _effective_bytes(self, batch_bytes: int) -> int:
        if batch_bytes < 1:
            raise TableError(TableCode.invalid_scan_request, f"a batch cannot have {batch_bytes} bytes")
        return min(batch_bytes, self._max_bytes)

    async def _view_of(self, scan: OpenScan) -> SharedView:
        if scan.lease_id is not None:
            return await self._leased_view(scan.bucket, scan.lease_id)
        if scan.pin_id is None:
            return await self._view(await self._service.ready_bucket(scan.bucket))
        pin = self.pins.get(scan.pin_id, self._service.host.steady_ms())
        view = pin.views.get(scan.bucket)
        if view is None:
            raise TableError(
                TableCode.invalid_scan_request,
                f"the pin does not hold bucket {scan.bucket.bucket} of that table",
            )
        return view.share()

    async def _leased_view(self, key: BucketKey, lease_id: str) -> SharedView:
        lease = self._service.host.image.leases.get(lease_id)
        if lease is None or lease.expires_at_ms <= self._service.host.steady_ms():
            raise TableError(
                TableCode.lease_not_found, f"there is no lease {lease_id!r}; it may have expired"
            )
        for held in lease.snapshots:
            if lease.table_id == key.table_id and (held.partition_id, held.bucket) == key[1:]:
                return await self._snapshot_view(self._service.bucket(key), lease_id, held)
        raise TableError(
            TableCode.snapshot_not_found,
            f"lease {lease_id!r} holds no snapshot of bucket {key.bucket} of that table",
        )

    async def _snapshot_view(self, bucket: Bucket, lease_id: str, held: LeasedSnapshot) -> SharedView:
        """The snapshot opened for reading. Its files stay until it is closed, also if the lease ends."""
        keeper = self._service.keeper
        keeper.keep(bucket.key, held.snapshot_id)
        try:
            work = partial(self._open_snapshot, bucket, held.snapshot_id)
            reader = await self._read_leased(bucket, lease_id, work)
        except BaseException:
            keeper.let_go(bucket.key, held.snapshot_id)
            raise

        def close() -> None:
            try:
                # Closing a database takes its time.
                closing = asyncio.get_running_loop().run_in_executor(self._service.threads, reader.close)
                closing.add_done_callback(lambda _: keeper.let_go(bucket.key, held.snapshot_id))
            except RuntimeError:  # The threads are gone: the node stops.
                reader.close()

        return SharedView(reader, held.log_offset, close)

    def _open_snapshot(self, bucket: Bucket, snapshot_id: int) -> KvReader:
        for info in bucket.snapshots.list():
            if info.snapshot_id == snapshot_id:
                return open_read_only(info.path, self._service.resources, info.identity)
        raise TableError(
            TableCode.snapshot_not_found,
            f"the leased snapshot {snapshot_id} of {bucket.name} is not usable any more",
        )

    # --- endings

    def sweep(self) -> None:
        """End what has been idle for too long."""
        now_ms = self._service.host.steady_ms()
        for session in self.sessions.sweep(now_ms):
            _let_go(session)
        self.pins.sweep(now_ms)

    def _close(self, scanner_id: bytes) -> None:
        session = self.sessions.close(scanner_id)
        if session is not None:
            _let_go(session)

    def _end_bucket(self, key: BucketKey, why: str) -> None:
        for session in self.sessions.end_bucket(key, why, self._service.host.steady_ms()):
            _let_go(session)
        self.pins.end_bucket(key)

    async def _read_leased(self, bucket: Bucket, lease_id: str, work: Callable[[], _T]) -> _T:
        """Read a snapshot: what is wrong with it says nothing about the present state."""
        try:
            return await self._in_thread(work)
        except StorageError as error:
            raise TableError(
                TableCode.snapshot_not_found,
                f"the snapshot of {bucket.name} under lease {lease_id!r} cannot be read: {error}",
            ) from error

    async def _read(self, bucket: Bucket, work: Callable[[], _T]) -> _T:
        try:
            return await self._in_thread(work)
        except CorruptData as error:
            await bucket.give_up_state(error)
            raise TableError(
                TableCode.state_damaged,
                f"the state of {bucket.name} does not check out, it is built again: {error}",
            ) from error
        except StorageError as error:
            raise TableError(
                TableCode.scanner_expired, f"the state of {bucket.name} went away: {error}"
            ) from error

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._service.threads, work)


def _shape(table: TableDefinition, scan: OpenScan) -> ScanShape:
    check_columns(table, scan.columns)
    predicate = None if scan.predicate is None else bind(decode(scan.predicate), table.schema)
    return ScanShape(scan.columns or None, predicate, scan.end_key)


async def _all_views(buckets: Sequence[Bucket], moments: MomentGate) -> list[tuple[KvView, int]]:
    """All views, or none of them. They are asked for in one turn of the loop, and so see one moment, in which
    no transaction over several buckets is half visible.
    """
    wanted: list[asyncio.Future[tuple[KvView, int]]] = []
    try:
        async with moments.still():
            # Only their offsets are decided in here; the state may take its time to get there.
            for bucket in buckets:
                wanted.append(bucket.view())  # noqa: PERF401 - if one refuses, the others must be let go
        return await asyncio.gather(*wanted)
    except BaseException:
        for future in wanted:
            future.add_done_callback(_drop_view)
        raise


def _drop_view(future: asyncio.Future[tuple[KvView, int]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[0].close()


def _let_go(session: ScanSession) -> None:
    reader, session.resource = session.resource, None
    if reader is not None:
        reader.view.release()


def _look_up(
    find_table: Callable[[], TableDefinition],
    store: Any,
    keys: Sequence[bytes],
    columns: list[str] | None,
    max_bytes: int,
) -> Any:
    batch = look_up(find_table, store, keys, columns, max_bytes)
    return None if batch is None else pack_batches([batch])


def _read_packed(table: TableDefinition, view: Any, shape: ScanShape, plan: Any, max_bytes: int) -> Any:
    read = read_batch(table, view, shape, plan, max_bytes)
    return read, pack_batches(read.batches)
