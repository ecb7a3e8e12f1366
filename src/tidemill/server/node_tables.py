"""The tables of a node as the handlers use them: the services of ``tables``, and what goes between them and
requests.

Loaded when the node meets its first table, because Arrow and RocksDB take longer to load than a node to
start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa

from tidemill.control.table_images import TableImage
from tidemill.errors import StorageError, TableCode, TableError, TidemillError
from tidemill.kv.engine import KvStore
from tidemill.kv.snapshots import BrokenSnapshot, SnapshotInfo
from tidemill.server.broker import Broker
from tidemill.tables.bucket import Bucket
from tidemill.tables.changes import Changes
from tidemill.tables.definition import pack_bucket_map, pack_schema, unpack_schema
from tidemill.tables.formats import make_format
from tidemill.tables.keys import KeyCodec, check_key_columns, default_key_format
from tidemill.tables.leases import Leases
from tidemill.tables.partition_values import check_partition_column
from tidemill.tables.properties import topic_configs
from tidemill.tables.rehearsal import rehearse
from tidemill.tables.routing import BucketMap
from tidemill.tables.scanners import BucketKey
from tidemill.tables.scans import OpenScan, Scans
from tidemill.tables.service import TableService
from tidemill.tables.snapshot_keeping import snapshots_of_one_moment
from tidemill.tables.splitting import Piece, SplitLimits, Splitting
from tidemill.tables.types import normalise_schema
from tidemill.wire.apis import APIS
from tidemill.wire.requests import load_messages

__all__ = ("NodeTables",)

logger = logging.getLogger(__name__)

_ROW_FORMATS = ("row", "json", "raw")
_KEY_FORMATS = ("raw", "json")
#: Before a schema is read; what a table may have of it is decided with the metadata.
_SCHEMA_BYTES_MAX = 1024 * 1024
#: How many buckets are opened before the node is ready, and how long that may take.
_PREPARED_BUCKETS_MAX = 64
_PREPARED_BUCKETS_MS = 2_000
#: In the data directory, for the time of the rehearsal.
_REHEARSAL_DIRECTORY = "rehearsal"
#: Kafka's APIs that a client of tables begins with.
_FIRST_APIS = ("Produce", "Metadata", "FindCoordinator", "ApiVersions", "InitProducerId")
#: Rows of a bucket are counted up to here, and estimated beyond.
_COUNTED_ROWS_MAX = 1_000
_COUNTED_BYTES_MAX = 1024 * 1024


class NodeTables:
    """One per node that has tables."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.service = TableService(broker)
        self.scans = Scans(self.service)
        self.splitting = Splitting(self.scans)
        self.leases = Leases(self.service)

    async def prepare(self) -> None:
        """Load and open before the first request what it would have to wait for.

        Bounded: what is not open by then is opened at its first use, as it is if this fails.
        """
        settings = self._broker.settings
        directory = settings.data_dir / _REHEARSAL_DIRECTORY
        work = partial(rehearse, directory, self.service.resources, settings.max_decompressed_bytes)
        try:
            await self._in_thread(work)
        except (StorageError, OSError) as error:
            logger.warning("tables are not prepared before their first use: %s", error)
        except Exception:
            # Whatever it is: a node that could not rehearse serves what it can.
            logger.exception("tables are not prepared before their first use")
        await asyncio.to_thread(_load_messages)
        # A log or a table that is damaged is told where it is opened.
        opening = [
            self.service.ready_bucket(key, max_wait_ms=_PREPARED_BUCKETS_MS)
            for key in islice(self._bucket_keys(), _PREPARED_BUCKETS_MAX)
        ]
        await asyncio.gather(*opening, return_exceptions=True)

    def _bucket_keys(self) -> Iterator[BucketKey]:
        """Of all tables that have state, but for those that are damaged."""
        for name, image in sorted(self._broker.image.tables.items()):
            with contextlib.suppress(TidemillError):
                if image.primary_key:
                    yield from self.service.bucket_keys(self.service.named(name))

    async def housekeep(self) -> None:
        """Everything that is looked at from time to time."""
        self.scans.sweep()
        await self.leases.expire()
        await self.service.take_due_snapshots()

    async def close(self) -> None:
        await self.service.close()

    def rows_appended(
        self, table_id: int, partition_id: int, bucket: int, base_offset: int, changes: Changes
    ) -> None:
        """A batch whose rows were checked is in the log."""
        self.service.appended(BucketKey(table_id, partition_id, bucket), base_offset, changes)

    # --- requests

    @staticmethod
    def bucket_key(request: Any, table_id: int | None = None) -> BucketKey:
        """The bucket that a request names."""
        return BucketKey(
            request.table_id if table_id is None else table_id, request.partition_id, request.bucket
        )

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

    # --- definitions

    def plan_table(
        self,
        *,
        name: str,
        schema: bytes,
        primary_key: tuple[str, ...],
        buckets: int,
        boundaries: tuple[bytes, ...],
        row_format: str | None,
        key_format: str | None,
        partition_column: str | None,
        properties: dict[str, str],
    ) -> dict[str, Any]:
        """The fields of a ``CreateTable``. Raises ``TableError`` for a table that cannot be."""
        columns = _schema_from_client(schema)
        row_format = row_format or "row"
        key_format = key_format or default_key_format(primary_key)
        _check_choice("row format", row_format, _ROW_FORMATS)
        _check_choice("key format", key_format, _KEY_FORMATS)
        if primary_key:
            check_key_columns(columns, primary_key)
            # What cannot be read and written is found now, not at the first row.
            KeyCodec(columns, primary_key, key_format)
        make_format(row_format, {0: columns}, 0, primary_key)
        if partition_column is not None:
            check_partition_column(columns, partition_column, primary_key)
        bucket_map = _routing(buckets, boundaries, primary_key)
        return {
            "schema": pack_schema(columns),
            "primary_key": primary_key,
            "buckets": bucket_map.buckets,
            "bucket_map": pack_bucket_map(bucket_map),
            "row_format": row_format,
            "key_format": key_format,
            "partition_column": partition_column,
            "properties": properties,
            "topic_configs": self.topic_configs(properties, keyed=bool(primary_key)),
        }

    def topic_configs(self, properties: Mapping[str, str], *, keyed: bool) -> dict[str, str]:
        """The configs that the topics of a table with these properties have."""
        return topic_configs(properties, self._broker.settings, keyed=keyed)

    def widened_schema(self, table: TableImage, added: bytes) -> bytes:
        """The schema of ``table`` with more columns at its end, which must be nullable."""
        old, columns = unpack_schema(table.schemas[-1]), _schema_from_client(added)
        rigid = [field.name for field in columns if not field.nullable]
        if rigid:
            raise TableError(
                TableCode.invalid_schema,
                f"column {rigid[0]!r} cannot be added as NOT NULL: rows that are there already have no "
                "value for it",
            )
        widened = normalise_schema(pa.schema([*old, *columns]))
        make_format(table.row_format, {0: old, 1: widened}, 1, table.primary_key)
        return pack_schema(widened)

    # --- what they tell of themselves

    async def stats(self, table_name: str) -> list[dict[str, Any]]:
        """Numbers of every bucket; of those with a problem, the problem."""
        table = self.service.named(table_name)
        return [
            await self._bucket_stats(key, keyed=table.has_primary_key)
            for key in self.service.bucket_keys(table)
        ]

    async def _bucket_stats(self, key: BucketKey, *, keyed: bool) -> dict[str, Any]:
        stats: dict[str, Any] = {
            "partition_id": key.partition_id,
            "bucket": key.bucket,
            "snapshot_offset": -1,
        }
        try:
            log = self.service.log(key)
            stats |= {
                "log_start_offset": log.log_start_offset,
                "log_end_offset": log.high_watermark,
                "log_bytes": log.log.size_bytes,
                "row_count": log.high_watermark - log.log_start_offset,
                "applied_offset": -1,
            }
            if keyed:
                stats |= await self._state_stats(key)
        except TidemillError as error:
            stats["problem"] = str(error)
        return stats

    async def _state_stats(self, key: BucketKey) -> dict[str, Any]:
        bucket = await self.service.ready_bucket(key)
        snapshots = await self._in_thread(bucket.snapshots.list)
        store = bucket.store
        return {
            "row_count": await self._in_thread(partial(_row_count, store)),
            "state_bytes": await self._in_thread(store.size_bytes),
            "applied_offset": store.applied_offset,
            "snapshot_count": len(snapshots),
            "snapshot_offset": snapshots[-1].log_offset if snapshots else -1,
            "scanner_count": self.scans.sessions.count(key),
        }

    async def list_snapshots(self, table_name: str) -> list[dict[str, Any]]:
        """Every snapshot of a table; those that do not check out with what is wrong with them."""
        table = self.service.keyed(self.service.named(table_name).table_id)
        found = []
        for key in self.service.bucket_keys(table):
            bucket = self.service.bucket(key)
            found += [_snapshot(key, each) for each in await self._in_thread(bucket.snapshots.list)]
            found += [
                {
                    "partition_id": key.partition_id,
                    "bucket": key.bucket,
                    "snapshot_id": -1,
                    "problem": problem,
                }
                for problem in map(_problem, await self._in_thread(bucket.snapshots.broken))
            ]
        return found

    async def create_snapshots(self, table_name: str) -> list[dict[str, Any]]:
        """Take a snapshot of every bucket, all of one moment."""
        table = self.service.keyed(self.service.named(table_name).table_id)
        buckets: list[Bucket] = [
            await self.service.ready_bucket(key) for key in self.service.bucket_keys(table)
        ]
        taken = await snapshots_of_one_moment(buckets, self._broker.moments)
        for bucket in buckets:
            await self.service.keeper.prune(bucket)
        return [_snapshot(bucket.key, info) for bucket, info in zip(buckets, taken, strict=True)]

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.service.threads, partial(work))


def _load_messages() -> None:
    for api in APIS.values():
        if not api.schema or api.name in _FIRST_APIS:
            load_messages(api)


def _row_count(store: KvStore) -> int:
    """How many rows there are. RocksDB's estimate also has its own few keys and what was overwritten lately,
    which is nothing beside many rows and nonsense beside a few.
    """
    estimate = store.count_estimate()
    if estimate > _COUNTED_ROWS_MAX:
        return estimate
    with store.snapshot() as view:
        rows = view.read(b"", None, _COUNTED_BYTES_MAX, _COUNTED_ROWS_MAX)
    return len(rows.keys) if rows.next_start is None else max(len(rows.keys), estimate)


def _problem(broken: BrokenSnapshot) -> str:
    return f"{broken.path.name}: {broken.reason}"


def _snapshot(key: BucketKey, info: SnapshotInfo) -> dict[str, Any]:
    return {
        "partition_id": key.partition_id,
        "bucket": key.bucket,
        "snapshot_id": info.snapshot_id,
        "log_offset": info.log_offset,
        "created_ms": info.created_ms,
        "size_bytes": info.size_bytes,
        "problem": None,
    }


def _schema_from_client(data: bytes) -> pa.Schema:
    if len(data) > _SCHEMA_BYTES_MAX:
        raise TableError(
            TableCode.invalid_schema, f"a schema of {len(data)} bytes, {_SCHEMA_BYTES_MAX} are the most"
        )
    try:
        # Looked at all over: Arrow itself takes names that are not UTF-8.
        return normalise_schema(unpack_schema(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TableError(
            TableCode.invalid_schema, f"the schema is not an Arrow IPC schema: {error}"
        ) from error


def _check_choice(what: str, given: str, choices: Sequence[str]) -> None:
    if given not in choices:
        raise TableError(
            TableCode.invalid_schema, f"there is no {what} {given!r}; choose one of {', '.join(choices)}"
        )


def _routing(buckets: int, boundaries: tuple[bytes, ...], primary_key: tuple[str, ...]) -> BucketMap:
    if not boundaries:
        return BucketMap.hashed(max(buckets, 1))
    if not primary_key:
        raise TableError(
            TableCode.invalid_schema, "a table without a primary key cannot be routed by ranges of keys"
        )
    if buckets > 0 and buckets != len(boundaries) + 1:
        raise TableError(
            TableCode.invalid_schema,
            f"{len(boundaries)} boundaries make {len(boundaries) + 1} buckets, not {buckets}; leave the "
            "number out",
        )
    return BucketMap.ranged(boundaries)
