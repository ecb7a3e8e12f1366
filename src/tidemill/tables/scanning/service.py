"""Look-ups, scans and pins of a node: the state machine of sessions with real state behind it.

A scan reads a pin, a leased snapshot, or a view taken when it is opened. It is bound to the leader epoch that
it was opened under. A session takes one call at a time. A scan that was lost with its node goes on at another
one, which builds the state at the scan's offset again from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa

from tidemill.control.tables.images import LeasedSnapshot
from tidemill.coordination.fair_shares import Client
from tidemill.coordination.metrics import Metric, gauge
from tidemill.coordination.moments import MomentGate
from tidemill.coordination.turns import give_way
from tidemill.errors import CorruptData, StorageError, TableCode, TableError
from tidemill.kv.contract import KvView
from tidemill.kv.snapshots import SnapshotInfo
from tidemill.tables.definition import TableDefinition
from tidemill.tables.predicates.predicate import bind, decode
from tidemill.tables.scanning.pins import Pin, Pins, SharedView
from tidemill.tables.scanning.reading import ScanShape, check_columns, look_up, pack_batches, read_batch
from tidemill.tables.scanning.sessions import BucketKey, ScanLimits, ScanSession, ScanSessions
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.rebuilding import ANY_NODE, check_history
from tidemill.tables.state.service import TableService

__all__ = ("SCAN_METRICS", "LookedUp", "OpenScan", "ScanAnswer", "ScanService")

_T = TypeVar("_T")

_KEYS_MAX = 100_000
_PIN_IDLE_MS_MAX = 3_600_000
_PIN_ID_BYTES = 12
_PIN_ID = re.compile(rf"[0-9a-f]{{{2 * _PIN_ID_BYTES}}}")


@dataclass(frozen=True, slots=True)
class OpenScan:
    """The arguments of a scan. ``limit`` 0 means all rows.

    ``log_offset`` and ``log_epoch``: the state at that offset, below which that epoch wrote the last record.
    """

    bucket: BucketKey
    leader_epoch: int = -1
    pin_id: str | None = None
    lease_id: str | None = None
    limit: int = 0
    columns: tuple[str, ...] = ()
    predicate: bytes | None = None
    start_key: bytes | None = None
    end_key: bytes | None = None
    log_offset: int = -1
    log_epoch: int = -1

    @property
    def snapshot_name(self) -> str | None:
        """What the snapshot that is read is called in messages; None if a view or a pin is read."""
        if self.lease_id is not None:
            return f"under lease {self.lease_id!r}"
        return None if self.log_offset < 0 else f"at offset {self.log_offset}"


@dataclass(frozen=True, slots=True)
class ScanAnswer:
    """The answer to one call of a scan. ``scanner_id`` is None if there is nothing to go on with."""

    scanner_id: bytes | None
    has_more: bool
    records: pa.Buffer | None
    next_key: bytes | None = None
    #: The log offset of the scanned state; only in the answer to the first call.
    log_offset: int = -1


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The result of a look-up: rows, and the log offset of the state that they are from."""

    log_offset: int
    records: pa.Buffer | None


@dataclass(slots=True)
class _Reader:
    """What a session reads, and the lock by which its calls take turns."""

    table: TableDefinition
    shape: ScanShape
    view: SharedView
    turn: asyncio.Lock
    pin_id: str | None
    #: Of the snapshot that is read, in messages; None if there is none.
    snapshot_name: str | None


class ScanService:
    """Look-ups, scans and pins of a node."""

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

    # -- look-ups ------------------------------------------------------------------------------------------

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
        """Look up rows by state keys; the answer has at most ``max_bytes`` of them."""
        table = self._service.keyed(key.table_id)
        check_columns(table, columns)
        if len(keys) > _KEYS_MAX:
            raise TableError(
                TableCode.invalid_scan_request, f"{len(keys)} keys in one look-up, {_KEYS_MAX} are the most"
            )
        log = self._service.log(key, leader_epoch)
        epoch = log.leader_epoch
        # The state may be behind the log: a look-up waits for what was acknowledged before it.
        wanted = max(min_offset, log.last_stable_offset)
        bucket = await self._service.ready_bucket(key, wanted, max_wait_ms)
        bucket.counts.lookups += 1
        offset = bucket.applied_offset
        find_table = partial(self._service.keyed, key.table_id)
        max_bytes = min(max_bytes, self._max_bytes)
        work = partial(_look_up, find_table, bucket.store, keys, list(columns) or None, max_bytes)
        try:
            records = await self._read(bucket, work)
        except TableError as error:
            if error.table_code != TableCode.scanner_expired:
                raise
            # A look-up holds nothing, so the client can simply ask again.
            raise TableError(TableCode.state_not_ready, error.message) from error
        await self._service.confirm_newest({key: epoch})
        return LookedUp(offset, records)

    # -- pins ----------------------------------------------------------------------------------------------

    async def pin(
        self,
        table_id: int,
        min_offsets: dict[BucketKey, int],
        max_wait_ms: int,
        idle_ms: int,
        client: Client,
        *,
        named: Sequence[BucketKey] = (),
        pin_id: str | None = None,
    ) -> Pin:
        """Pin the state of the named buckets of a table, or of all; this node must lead every one of them.

        All of them as of one moment. ``pin_id`` is the client's own choice, for pins on several nodes.
        """
        table = self._service.keyed(table_id)
        pin_id = self._pin_id(pin_id)
        self.pins.check_capacity(self._service.host.steady_ms(), client)
        views: dict[BucketKey, SharedView] = {}
        epochs: dict[BucketKey, int] = {}
        try:
            # The logs first, because a log that this node does not lead refuses the pin.
            for key in self._service.chosen_keys(table, named):
                epochs[key] = self._service.log(key).leader_epoch
                await give_way()
            buckets = await self._service.ready_buckets(
                {key: min_offsets.get(key, -1) for key in epochs}, max_wait_ms
            )
            taken = await _all_views(buckets, self._service.host.moments)
            for key, (view, log_offset) in zip(epochs, taken, strict=True):
                views[key] = SharedView(view, log_offset, view.close)
            log_epochs = {
                bucket.key: bucket.log.epochs.epoch_at(views[bucket.key].log_offset - 1) for bucket in buckets
            }
            now_ms = self._service.host.steady_ms()
            idle_ms = min(idle_ms, _PIN_IDLE_MS_MAX) if idle_ms > 0 else self._idle_ms
            pin = Pin(pin_id, table_id, views, epochs, log_epochs, idle_ms, now_ms, client)
            await self._service.confirm_newest(epochs)
            self.pins.check_unused(pin_id)
            self.pins.check_capacity(now_ms, client)
        except BaseException:
            for shared in views.values():
                shared.release()
            raise
        self.pins.add(pin)
        return pin

    def _pin_id(self, chosen: str | None) -> str:
        if chosen is None:
            return self._service.host.ids.token(_PIN_ID_BYTES).hex()
        if not _PIN_ID.fullmatch(chosen):
            raise TableError(
                TableCode.invalid_scan_request,
                f"the id of a pin is {2 * _PIN_ID_BYTES} random hexadecimal digits, which nobody can guess",
            )
        self.pins.check_unused(chosen)
        return chosen

    def keep_pin(self, pin_id: str) -> None:
        """Keep a pin from expiring."""
        self.pins.get(pin_id, self._service.host.steady_ms())

    async def _view(self, bucket: Bucket) -> SharedView:
        view, log_offset = await bucket.view()
        return SharedView(view, log_offset, view.close)

    # -- sessions ------------------------------------------------------------------------------------------

    async def open(self, scan: OpenScan, sequence: int, batch_bytes: int, client: Client) -> ScanAnswer:
        """Open a scan: gives its first batch, and a session unless that was everything."""
        table = self._service.keyed(scan.bucket.table_id)
        # In a thread, because a filter can be large.
        shape = await self._in_thread(partial(_shape, table, scan))
        max_bytes = self._effective_bytes(batch_bytes)
        if sequence != 0:
            raise TableError(TableCode.invalid_scan_request, f"a scan is opened by call 0, not {sequence}")
        if scan.limit < 0:
            raise TableError(TableCode.invalid_scan_request, f"a scan cannot give {scan.limit} rows")
        epoch = self._service.log(scan.bucket, scan.leader_epoch).leader_epoch
        self.sessions.check_capacity(scan.bucket, client)
        view = await self._view_of(scan)
        try:
            if scan.pin_id is None and scan.snapshot_name is None:
                await self._service.confirm_newest({scan.bucket: epoch})
            # Asked for again, because rows may be of a schema that the table got meanwhile.
            newest = self._service.keyed(scan.bucket.table_id)
            if newest is not table:
                table, shape = newest, await self._in_thread(partial(_shape, newest, scan))
        except BaseException:
            view.release()
            raise
        reader = _Reader(table, shape, view, asyncio.Lock(), scan.pin_id, scan.snapshot_name)
        session = ScanSession(
            self._service.host.ids.token(16),
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
            # An empty answer need not be repeatable: nothing in it can get lost.
            self._close(session.id)
            return ScanAnswer(None, False, None, None, view.log_offset)
        return ScanAnswer(session.id, answer.has_more, answer.records, answer.next_key, view.log_offset)

    async def go_on(self, scanner_id: bytes, sequence: int, batch_bytes: int) -> ScanAnswer:
        """The next batch of a scan, or the last one once more."""
        session = self.sessions.get(scanner_id, self._service.host.steady_ms())
        return await self._call(session, sequence, self._effective_bytes(batch_bytes))

    def keep_alive(self, scanner_id: bytes) -> None:
        """Keep a scan from expiring."""
        self._touch_pin(self.sessions.get(scanner_id, self._service.host.steady_ms()))

    def close(self, scanner_id: bytes) -> None:
        """End a scan. One that has ended, or does not exist, is fine."""
        self._close(scanner_id)

    async def walk(self, scan: OpenScan, step: Callable[[Any], bool]) -> None:
        """Call ``step`` in a thread, with the view that ``scan`` would read, until it returns False.

        Steps must be short, because others who read the view wait for them.
        """
        self._service.keyed(scan.bucket.table_id)
        self._service.log(scan.bucket, scan.leader_epoch)
        view = await self._view_of(scan)
        try:
            work = partial(step, view.view)
            while await self._read_from(scan, work):
                if scan.pin_id is not None:
                    # The pin may be gone; this share of its view outlives it.
                    with contextlib.suppress(TableError):
                        self.keep_pin(scan.pin_id)
        finally:
            view.release()

    async def _read_from(self, scan: OpenScan, work: Callable[[], _T]) -> _T:
        bucket = self._service.bucket(scan.bucket)
        if scan.snapshot_name is None:
            return await self._read(bucket, work)
        return await self._read_snapshot(bucket, scan.snapshot_name, work)

    async def _call(self, session: ScanSession, sequence: int, max_bytes: int) -> ScanAnswer:
        reader: _Reader = session.resource
        async with reader.turn:
            if session.resource is None:
                # The session was closed while this call waited for its turn.
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
                    if reader.snapshot_name is None
                    else self._read_snapshot(bucket, reader.snapshot_name, work)
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
                # The pin is gone. The session has its own share of the view, and goes on.
                reader.pin_id = None

    def _effective_bytes(self, batch_bytes: int) -> int:
        if batch_bytes < 1:
            raise TableError(TableCode.invalid_scan_request, f"a batch cannot have {batch_bytes} bytes")
        return min(batch_bytes, self._max_bytes)

    async def _view_of(self, scan: OpenScan) -> SharedView:
        if scan.log_offset >= 0:
            return await self._view_at(scan)
        if scan.lease_id is not None:
            return await self._leased_view(scan)
        if scan.pin_id is None:
            return await self._view(await self._service.ready_bucket(scan.bucket))
        pin = self.pins.get(scan.pin_id, self._service.host.steady_ms())
        view = pin.views.get(scan.bucket)
        if view is None:
            # A pin of several nodes has one id: the node that held this bucket does not lead it any more.
            is_lost = pin.table_id == scan.bucket.table_id
            raise TableError(
                TableCode.pin_not_found if is_lost else TableCode.invalid_scan_request,
                f"the pin does not hold bucket {scan.bucket.bucket} of that table here; start the scan again",
            )
        return view.share()

    async def _view_at(self, scan: OpenScan) -> SharedView:
        """The state at an offset of the log, which some node has shown before."""
        if scan.pin_id is not None or scan.lease_id is not None:
            raise TableError(
                TableCode.invalid_scan_request, "a scan is of a pin, of a lease, or at an offset: name one"
            )
        if scan.log_epoch < 0 < scan.log_offset:
            raise TableError(
                TableCode.invalid_scan_request,
                f"a scan at offset {scan.log_offset} names the epoch of the record below it (log_epoch)",
            )
        key = scan.bucket
        held = LeasedSnapshot(key.partition_id, key.bucket, -1, scan.log_offset, scan.log_epoch, ANY_NODE)
        return await self._snapshot_view(scan, held)

    async def _leased_view(self, scan: OpenScan) -> SharedView:
        key, lease_id = scan.bucket, scan.lease_id
        assert lease_id is not None
        lease = self._service.host.image.leases.get(lease_id)
        if lease is None or lease.expires_at_ms <= self._service.host.steady_ms():
            raise TableError(
                TableCode.lease_not_found, f"there is no lease {lease_id!r}; it may have expired"
            )
        for held in lease.snapshots:
            if lease.table_id == key.table_id and (held.partition_id, held.bucket) == key[1:]:
                return await self._snapshot_view(scan, held)
        raise TableError(
            TableCode.snapshot_not_found,
            f"lease {lease_id!r} holds no snapshot of bucket {key.bucket} of that table",
        )

    async def _snapshot_view(self, scan: OpenScan, held: LeasedSnapshot) -> SharedView:
        """Open a snapshot for reading. Its files stay until it is closed, also if the lease ends."""
        keeper, bucket, name = self._service.keeper, self._service.bucket(scan.bucket), scan.snapshot_name
        assert name is not None
        check_history(bucket.log, held)
        async with bucket.snapshots_turn:
            # Nobody may remove the snapshot before ``keep``.
            info = await self._read_snapshot(bucket, name, partial(_leased_snapshot, bucket, held))
            if info is None:
                if held.node_id in (-1, self._service.host.settings.node_id):
                    raise TableError(
                        TableCode.snapshot_not_found,
                        f"the leased snapshot {held.snapshot_id} of {bucket.name} is not usable any more",
                    )
                info = await self._service.rebuild_leased(bucket, held)
            keeper.keep(bucket.key, info.snapshot_id)
        try:
            work = partial(self._service.engine.open_read_only, info.path, info.identity)
            reader: KvView = await self._read_snapshot(bucket, name, work)
        except BaseException:
            keeper.let_go(bucket.key, info.snapshot_id)
            raise

        def close() -> None:
            try:
                # In a thread, because closing a database takes time.
                closing = asyncio.get_running_loop().run_in_executor(self._service.threads, reader.close)
                closing.add_done_callback(lambda _: keeper.let_go(bucket.key, info.snapshot_id))
            except RuntimeError:  # The threads are gone: the node stops.
                reader.close()

        return SharedView(reader, held.log_offset, close)

    # -- endings -------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """End sessions and pins that have been idle for too long."""
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

    async def _read_snapshot(self, bucket: Bucket, name: str, work: Callable[[], _T]) -> _T:
        """Read a snapshot. Damage in it says nothing about the present state."""
        try:
            return await self._in_thread(work)
        except StorageError as error:
            raise TableError(
                TableCode.snapshot_not_found,
                f"the snapshot of {bucket.name} {name} cannot be read: {error}",
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


def _leased_snapshot(bucket: Bucket, held: LeasedSnapshot) -> SnapshotInfo | None:
    """This node's snapshot of the leased state; None if it has none.

    Numbers are a node's own. The state of a log at an offset is one and the same, if the epoch is the same.
    """
    for info in bucket.snapshots.list():
        known = -1 not in (info.leader_epoch, held.leader_epoch)
        if info.log_offset == held.log_offset and (not known or info.leader_epoch == held.leader_epoch):
            return info
    return None


def _shape(table: TableDefinition, scan: OpenScan) -> ScanShape:
    check_columns(table, scan.columns)
    predicate = None if scan.predicate is None else bind(decode(scan.predicate), table.schema)
    return ScanShape(scan.columns or None, predicate, scan.end_key)


async def _all_views(buckets: Sequence[Bucket], moments: MomentGate) -> list[tuple[KvView, int]]:
    """The views of all buckets, taken at one moment: no transaction over several buckets is half visible.

    All of them or, with an error, none. They are asked for in one turn of the event loop.
    """
    wanted: list[asyncio.Future[tuple[KvView, int]]] = []
    try:
        async with moments.moment():
            # Only the offsets are decided inside of the moment; the state may get there later.
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


SCAN_METRICS: Final[Sequence[Metric[ScanService]]] = (
    gauge("tidemill_table_scans_open", "Scans that are open.", lambda scans: len(scans.sessions)),
    gauge(
        "tidemill_table_pins",
        "Pins, each of which keeps the state of a table.",
        lambda scans: len(scans.pins),
    ),
)
