"""The tables of a node as the handlers use them: the services of ``tables``, made and closed as one.

Nothing imports this module before ``LazyTables`` does: it loads Arrow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from tidemill.coordination.turns import in_slices
from tidemill.errors import ApiError, ErrorCode, StorageError, TidemillError
from tidemill.kv.contract import KvEngine
from tidemill.server.broker import Broker
from tidemill.server.requests.api_table import load
from tidemill.server.tables.definitions import TableDefinitions
from tidemill.server.tables.statistics import TableStatistics, snapshot_body
from tidemill.tables.scanning.service import SCAN_METRICS, OpenScan, ScanService
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.scanning.splitting import Piece, SplitLimits, Splitting
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.changes import Changes
from tidemill.tables.state.leases import Leases
from tidemill.tables.state.metrics import STATE_METRICS, measure_tables
from tidemill.tables.state.rehearsal import rehearse
from tidemill.tables.state.service import TableService
from tidemill.tables.state.snapshot_keeping import snapshots_of_one_moment
from tidemill.wire.apis import APIS, TABLES
from tidemill.wire.requests import load_messages

__all__ = ("NodeTables",)

logger = logging.getLogger(__name__)

#: How many buckets are opened before the node is ready, and how long that may take.
_PREPARED_BUCKETS_MAX = 64
_PREPARED_BUCKETS_MS = 2_000
#: As many as a table can have buckets on one node.
_NAMED_BUCKETS_MAX = 30_000
#: The directory of the rehearsal, below the data directory; it is removed afterwards.
_REHEARSAL_DIRECTORY = "rehearsal"
#: Kafka's APIs that a client of tables begins with.
_FIRST_APIS = ("Produce", "Metadata", "FindCoordinator", "ApiVersions", "InitProducerId")


class NodeTables:
    """The services of tables of a node that has tables."""

    def __init__(self, broker: Broker, engine: KvEngine) -> None:
        self._broker = broker
        self.definitions = TableDefinitions(broker.settings)
        self.service = TableService(broker, engine)
        self.scans = ScanService(self.service)
        self.splitting = Splitting(self.scans, broker.steady_ms)
        self.leases = Leases(self.service)
        self.statistics = TableStatistics(self.service, self.scans)
        broker.metrics.register(self.scans, SCAN_METRICS)
        broker.metrics.register_measured(partial(measure_tables, self.service), STATE_METRICS)

    async def prepare(self) -> None:
        """Load code and open buckets before the first request would have to wait for that.

        Bounded: what is not open by then is opened at its first use, as it is if this fails.
        """
        settings = self._broker.settings
        directory = settings.data_dir / _REHEARSAL_DIRECTORY
        work = partial(rehearse, directory, self.service.engine, settings.max_decompressed_bytes)
        try:
            await self._in_thread(work)
        except StorageError as error:
            logger.warning("tables are not prepared before their first use: %s", error)
        except Exception:
            # Any error: a node that could not rehearse serves nevertheless.
            logger.exception("tables are not prepared before their first use")
        await asyncio.to_thread(_load_requests)
        # A damaged log or table is reported when it is opened.
        opening = [
            self.service.ready_bucket(key, max_wait_ms=_PREPARED_BUCKETS_MS)
            for key in islice(self._bucket_keys(), _PREPARED_BUCKETS_MAX)
        ]
        await asyncio.gather(*opening, return_exceptions=True)

    def _bucket_keys(self) -> Iterator[BucketKey]:
        """The buckets that this node leads of all tables that have state, without damaged ones."""
        for name, image in sorted(self._broker.image.tables.items()):
            with contextlib.suppress(TidemillError):
                if image.primary_key:
                    yield from self.service.led_keys(self.service.named(name))

    async def housekeep(self) -> None:
        """Do the chores of all services of tables."""
        self.scans.sweep()
        await self.leases.expire()
        if self._broker.disk.growth_refusal is None:
            await self.service.take_due_snapshots()

    async def close(self) -> None:
        await self.service.close()

    def rows_appended(
        self, table_id: int, partition_id: int, bucket: int, base_offset: int, changes: Changes
    ) -> None:
        """Tell the services that a batch with checked rows is in the log."""
        self.service.appended(BucketKey(table_id, partition_id, bucket), base_offset, changes)

    # --- requests

    @staticmethod
    def bucket_key(request: Any, table_id: int | None = None) -> BucketKey:
        """The bucket that a request names."""
        return BucketKey(
            request.table_id if table_id is None else table_id, request.partition_id, request.bucket
        )

    async def named_buckets(self, request: Any, table_id: int) -> list[BucketKey]:
        """The buckets that a request names; none if it is about the whole table. Works in short turns."""
        if len(request.buckets) > _NAMED_BUCKETS_MAX:
            raise ApiError(
                ErrorCode.invalid_request,
                f"{len(request.buckets)} buckets in one request, {_NAMED_BUCKETS_MAX} are the most",
            )
        return await in_slices(self.bucket_key(each, table_id) for each in request.buckets)

    def open_scan(self, request: Any) -> OpenScan:
        """The scan that a request opens."""
        return OpenScan(
            bucket=self.bucket_key(request),
            leader_epoch=request.leader_epoch,
            pin_id=request.pin_id,
            lease_id=request.lease_id,
            limit=request.limit,
            columns=tuple(request.columns),
            predicate=request.predicate,
            start_key=request.start_key,
            end_key=request.end_key,
            log_offset=request.log_offset,
            log_epoch=request.log_epoch,
        )

    async def split(self, request: Any) -> list[Piece]:
        """The pieces that a request asks for."""
        scan = OpenScan(
            bucket=self.bucket_key(request),
            leader_epoch=request.leader_epoch,
            pin_id=request.pin_id,
            lease_id=request.lease_id,
            start_key=request.start_key,
            end_key=request.end_key,
        )
        limits = SplitLimits(request.max_rows, request.max_bytes, request.max_pieces)
        return await self.splitting.split(scan, limits)

    async def create_snapshots(
        self, table_name: str, named: Sequence[BucketKey] = ()
    ) -> list[dict[str, Any]]:
        """Take a snapshot of every bucket, or of the named ones, all of one moment."""
        refusal = self._broker.disk.growth_refusal
        if refusal is not None:
            raise refusal
        table = self.service.keyed(self.service.named(table_name).table_id)
        buckets: list[Bucket] = [
            await self.service.ready_bucket(key) for key in self.service.chosen_keys(table, named)
        ]
        taken = await snapshots_of_one_moment(buckets, self._broker.moments)
        for bucket in buckets:
            await self.service.keeper.prune(bucket)
        return [snapshot_body(bucket.key, info) for bucket, info in zip(buckets, taken, strict=True)]

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.service.threads, partial(work))


def _load_requests() -> None:
    """Load handlers and messages of what clients of tables ask for."""
    for api in APIS.values():
        if api.schema == TABLES or api.name in _FIRST_APIS:
            load(api.key)
            load_messages(api)
