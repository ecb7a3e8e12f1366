"""One bucket of a scan whose node is lost: what goes on, what begins again, and what is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pyarrow as pa
import pytest

from tidemill.client.cluster import Cluster
from tidemill.client.tables import bucket_reading
from tidemill.client.tables.bucket_reading import LOST_MAX, BucketReading
from tidemill.client.tables.bucket_scanner import BucketScan
from tidemill.errors import TableCode, TableError

ROWS, PER_BATCH = 6, 2
PINNED = BucketScan(
    table_id=7, partition_id=0, topic="shop.orders", bucket=3, pin_id="p", log_offset=50, log_epoch=4
)
LEASED = replace(PINNED, pin_id=None, lease_id="l")


class Server:
    """A bucket of the numbers 0 … 5, which are higher by ten as of the later moment.

    ``losses``: for each scanner, after how many batches it is lost; the last one is never lost.
    """

    def __init__(self, *losses: int) -> None:
        self.losses = list(losses)
        self.opened: list[BucketScan] = []
        self.code = TableCode.unknown_scanner_id
        #: Whether the log still has what older state is built from.
        self.has_older_state = True

    def scanner(self, cluster: Any, scan: BucketScan, *, fetch_max_bytes: int) -> Scanner:
        self.opened.append(scan)
        return Scanner(self, scan, self.losses.pop(0) if self.losses else None)


class Scanner:
    """Stands for ``AsyncBucketScanner``."""

    def __init__(self, server: Server, scan: BucketScan, lost_after: int | None) -> None:
        self._server, self._scan, self._lost_after = server, scan, lost_after
        self._at = int(scan.start_key or b"0")
        self._end = min(ROWS, self._at + scan.limit) if scan.limit else ROWS
        self._later = 10 if scan.pin_id is None and scan.lease_id is None and scan.log_offset < 0 else 0
        self.log_offset: int | None = None
        self.next_key: bytes | None = None
        self.is_closed = False

    async def next_batch(self) -> pa.RecordBatch | None:
        if self._scan.is_at_offset and not self._server.has_older_state:
            raise TableError(TableCode.snapshot_not_found, "the log is compacted")
        if self._lost_after == 0:
            raise TableError(self._server.code, "this node knows of no such scan")
        if self._lost_after is not None:
            self._lost_after -= 1
        if self._at >= self._end:
            return None
        numbers = [self._later + number for number in range(self._at, min(self._end, self._at + PER_BATCH))]
        self._at += len(numbers)
        self.log_offset = 50 + self._later
        self.next_key = b"%d" % self._at if self._at < self._end else None
        return pa.record_batch([pa.array(numbers)], names=["id"])

    async def keep_alive(self) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def read(
        server: Server, scan: BucketScan, *, goes_on: bool = True, later: bool = True
    ) -> list[int]:
        monkeypatch.setattr(bucket_reading, "AsyncBucketScanner", server.scanner)
        reading = BucketReading(cast(Cluster, None), scan, 1_000, may_go_on=lambda: goes_on, later=later)
        found: list[int] = []
        while (batch := await reading.next_batch()) is not None:
            found += batch.column(0).to_pylist()
        read.offset = reading.log_offset  # type: ignore[attr-defined]
        return found

    return read


@pytest.mark.parametrize("losses", [(0,), (1,), (2,), (1, 1), (1, 0, 0, 1), (0, 0, 2)])
async def test_a_leased_snapshot_goes_on_behind_the_last_key(read: Any, losses: tuple[int, ...]) -> None:
    server = Server(*losses)
    assert await read(server, LEASED) == [0, 1, 2, 3, 4, 5]
    assert {scan.lease_id for scan in server.opened} == {"l"}


async def test_a_limit_holds_for_all_scanners_of_a_bucket_together(read: Any) -> None:
    assert await read(Server(1), replace(LEASED, limit=3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "code", [TableCode.pin_not_found, TableCode.scanner_expired, TableCode.unknown_scanner_id]
)
async def test_a_pinned_bucket_of_which_no_row_was_given_is_read_as_of_a_later_moment(
    read: Any, code: TableCode
) -> None:
    server = Server(0)
    server.code = code
    assert await read(server, PINNED) == [10, 11, 12, 13, 14, 15]
    assert read.offset == 60, "the offset is that of the rows"
    assert [scan.pin_id for scan in server.opened] == ["p", None]


@pytest.mark.parametrize("losses", [(1,), (2,), (1, 1), (1, 0, 1)])
async def test_a_pinned_bucket_goes_on_at_its_offset_behind_the_last_key(
    read: Any, losses: tuple[int, ...]
) -> None:
    server = Server(*losses)
    assert await read(server, PINNED) == [0, 1, 2, 3, 4, 5]
    assert read.offset == 50
    assert {(scan.pin_id, scan.log_offset, scan.log_epoch) for scan in server.opened[1:]} == {(None, 50, 4)}


@pytest.mark.parametrize("scan", [PINNED, replace(PINNED, log_epoch=-1)])
async def test_a_pinned_bucket_whose_other_rows_are_gone_is_an_error_that_says_what_to_do(
    read: Any, scan: BucketScan
) -> None:
    server = Server(1)
    server.has_older_state = False
    with pytest.raises(TableError, match="Start the scan again") as caught:
        await read(server, scan)
    assert "lease" in caught.value.message
    assert caught.value.table_code == TableCode.unknown_scanner_id


async def test_a_bucket_that_was_begun_as_of_a_later_moment_does_not_go_on_as_of_the_pins(read: Any) -> None:
    with pytest.raises(TableError, match="Start the scan again"):
        await read(Server(0, 1), PINNED)


async def test_where_all_buckets_are_of_one_moment_none_is_read_as_of_a_later_one(read: Any) -> None:
    assert await read(Server(0), PINNED, later=False) == [0, 1, 2, 3, 4, 5]


async def test_a_scan_that_may_not_go_on_is_an_error(read: Any) -> None:
    with pytest.raises(TableError):
        await read(Server(0), PINNED, goes_on=False)


async def test_a_scan_that_is_lost_again_and_again_is_given_up(read: Any) -> None:
    server = Server(*[0] * 100)
    with pytest.raises(TableError):
        await read(server, LEASED)
    assert len(server.opened) == LOST_MAX + 1


async def test_other_errors_are_not_taken_for_a_lost_node(read: Any) -> None:
    server = Server(0)
    server.code = TableCode.invalid_scan_request
    with pytest.raises(TableError, match=r"knows of no such scan$"):
        await read(server, LEASED)
    assert len(server.opened) == 1
