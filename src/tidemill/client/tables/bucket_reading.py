"""One bucket of a scan, read on from another node if its node is gone and the rows there are the same.

- The rows of a leased snapshot are the same on every node: the scan goes on behind the last key.
- Of a pin, another node knows nothing. A bucket of which no row was given yet may be read there as it is
  then. Otherwise the node builds the state at the pin's offset again from the log, and the scan goes on.
- If the log does not have that state any more, the other rows cannot be had: that is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pyarrow as pa

from tidemill.client.cluster import Cluster
from tidemill.client.tables.bucket_scanner import AsyncBucketScanner, BucketScan
from tidemill.errors import TableCode, TableError, TidemillError

__all__ = ("LOST", "LOST_MAX", "BucketReading", "cannot_go_on")

#: Errors for a scan that the server no longer has, and how often it is begun again then without a row.
LOST: Final = frozenset({TableCode.pin_not_found, TableCode.scanner_expired, TableCode.unknown_scanner_id})
LOST_MAX: Final = 5


def cannot_go_on(error: TableError) -> TableError:
    """The error of a scan that is lost, with what to do about it."""
    return TableError(
        error.table_code,
        f"{error.message}; the node that served the scan was restarted, or has failed, and the rest of the "
        "same rows cannot be had any more. Start the scan again, or use to_arrow() or count(), which do that "
        "by themselves; a scan of a lease (with table.lease() as lease: table.scan(lease=lease)) goes on",
        index=error.index,
    )


class BucketReading:
    """The rows of one bucket, by one scanner after the other.

    ``may_go_on`` says whether a scan of a pin goes on without its node. ``later``: a bucket of which no row
    was given may then be read as of a later moment than its pin's.
    """

    def __init__(
        self,
        cluster: Cluster,
        scan: BucketScan,
        fetch_max_bytes: int,
        *,
        may_go_on: Callable[[], bool],
        later: bool,
    ) -> None:
        self._cluster = cluster
        self._scan = scan
        self._fetch_max_bytes = fetch_max_bytes
        self._may_go_on = may_go_on
        self._later = later
        self._rows_given = 0
        #: Where a scan goes on behind the last row that was given.
        self._next_key: bytes | None = None
        self._lost_count = 0
        #: Why the state at the pin's offset is asked for, of another node; None if it is not.
        self._lost: TableError | None = None
        self._scanner = self._opened(scan)

    def _opened(self, scan: BucketScan) -> AsyncBucketScanner:
        return AsyncBucketScanner(self._cluster, scan, fetch_max_bytes=self._fetch_max_bytes)

    @property
    def topic_partition(self) -> tuple[str, int]:
        """Topic and number of the bucket."""
        return self._scan.topic, self._scan.bucket

    @property
    def log_offset(self) -> int | None:
        """The log offset that the rows stand for; None before the first answer."""
        return self._scanner.log_offset

    async def next_batch(self) -> pa.RecordBatch | None:
        """The next rows, or None at the end. Raises ``TidemillError``."""
        while True:
            try:
                batch = await self._scanner.next_batch()
            except TableError as error:
                await self._begin_again(error)
                continue
            if batch is not None:
                self._rows_given += batch.num_rows
                self._next_key = self._scanner.next_key
                self._lost_count = 0
            return batch

    async def _begin_again(self, error: TableError) -> None:
        if error.table_code is TableCode.snapshot_not_found and self._lost is not None:
            raise cannot_go_on(self._lost) from error
        if error.table_code not in LOST:
            raise error
        scan = self._rest()
        self._lost_count += 1
        if scan is None or self._lost_count > LOST_MAX:
            raise cannot_go_on(error)
        await self._scanner.close()
        self._lost = error if scan.is_at_offset else None
        self._scanner = self._opened(scan)

    def _rest(self) -> BucketScan | None:
        """Choose the scan that gives the rows which are missing; None if there is none."""
        scan = self._scan
        if scan.lease_id is None:
            if not self._may_go_on():
                return None
            if self._later and not self._rows_given:
                # From now on, because its rows are of another moment than the pin.
                self._scan = replace(scan, pin_id=None, log_offset=-1, log_epoch=-1)
                return self._scan
            if scan.log_offset != 0 and scan.log_epoch < 0:
                return None  # Not known, as by a node of an older version.
            scan = replace(scan, pin_id=None)
        if self._next_key is None:
            return scan
        limit = scan.limit - self._rows_given if scan.limit else 0
        return replace(scan, start_key=self._next_key, limit=limit)

    async def keep_alive(self) -> None:
        """Tell the server that the scan is still needed, so that it does not expire."""
        with contextlib.suppress(TidemillError, OSError):
            await self._scanner.keep_alive()

    async def close(self) -> None:
        """Close the scanner, also on the server if it can be reached."""
        await self._scanner.close()
