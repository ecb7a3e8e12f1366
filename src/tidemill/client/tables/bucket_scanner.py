"""``AsyncBucketScanner``: the rows of one bucket, batch by batch, through a cursor on the server.

Pending → Active → Done. The first ``next_batch`` opens the cursor; the next request is already under way
while the caller works on the last batch. A request whose answer was lost is repeated, and the server gives
the same batch again. A scanner that has failed keeps failing with the same error: it never looks like the end
of the data.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import pyarrow as pa

from tidemill.client.cluster import Cluster
from tidemill.client.process_bound import Unpicklable
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TableCode, TableError, TidemillError
from tidemill.net.answers import checked
from tidemill.net.retry import RetryPolicy, retry

__all__ = (
    "DEFAULT_FETCH_BYTES",
    "DEFAULT_TIMEOUT_MS",
    "AsyncBucketScanner",
    "BucketScan",
    "ScannerState",
    "read_batches",
)

#: ``scanner_kv_fetch_max_bytes``: the largest batch that is asked for, unless the caller says otherwise.
DEFAULT_FETCH_BYTES: Final = 4 * 1024 * 1024
_FIRST_PAUSE_MS: Final = 25
_LONGEST_PAUSE_MS: Final = 1_000
#: How long a scanner tries what passes by itself.
DEFAULT_TIMEOUT_MS: Final = 120_000
#: How long closing waits for the answer to an open that is under way.
_OPEN_ANSWER_SECONDS: Final = 5.0
#: How long closing waits for the server; it closes by itself what nobody asks for.
_CLOSE_SECONDS: Final = 5.0


class ScannerState(Enum):
    """The states of a scanner."""

    PENDING = "pending"
    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BucketScan:
    """What a scanner reads: a bucket, by its topic and number, and which rows and columns of it.

    ``log_offset`` and ``log_epoch`` are those of the pinned state; without a pin or a lease, of the state to
    read, which the bucket's leader builds again from the log if it must.
    """

    table_id: int
    partition_id: int
    topic: str
    bucket: int
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
    def is_at_offset(self) -> bool:
        """Whether the state at an offset is asked for."""
        return self.pin_id is None and self.lease_id is None and self.log_offset >= 0


class AsyncBucketScanner(Unpicklable):
    """A cursor over the rows of one bucket. Use it in ``async with``: leaving it closes the cursor."""

    def __init__(
        self,
        cluster: Cluster,
        scan: BucketScan,
        *,
        fetch_max_bytes: int = DEFAULT_FETCH_BYTES,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        self._cluster = cluster
        self._scan = scan
        self._fetch_max_bytes = fetch_max_bytes
        self._timeout_ms = timeout_ms
        self._scanner_id: bytes | None = None
        self._sequence = 0
        self._ahead: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        #: Whether a request is on its way, so that the server may have done something that is not known yet.
        self._asking = False
        self.state = ScannerState.PENDING
        #: The log offset that the scanned state stands for; known from the first batch on.
        self.log_offset: int | None = None
        #: The state key at which a scan would go on after the last batch; None before the first and at the
        #: end.
        self.next_key: bytes | None = None

    @property
    def topic_partition(self) -> tuple[str, int]:
        """Topic and number of the bucket."""
        return self._scan.topic, self._scan.bucket

    def __repr__(self) -> str:
        return f"<scanner of bucket {self._scan.bucket} of {self._scan.topic}: {self.state.value}>"

    def _instead_of_a_pickle(self) -> str:
        return (
            f"Open another there, with tidemill.connect({self._cluster.servers!r}) and bucket_scanner(); "
            "start_key=scanner.next_key goes on from here"
        )

    async def __aenter__(self) -> AsyncBucketScanner:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def next_batch(self) -> pa.RecordBatch | None:
        """The next rows, or None at the end. Raises ``TidemillError``; later calls raise it again."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self.state is ScannerState.DONE:
                return None
            try:
                response = await self._answer()
                self._take(response)
                if response.records:
                    return read_batches(response.records)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self.state, self._failure = ScannerState.FAILED, error
                raise

    async def keep_alive(self) -> None:
        """Tell the server that the caller is still at work on the last batch."""
        if self.state is ScannerState.ACTIVE and self._scanner_id is not None:
            await self._retrying({"scanner_id": self._scanner_id, "keep_alive": True})

    async def close(self) -> None:
        """Close the cursor, also on the server if it can be reached. A closed scanner gives no more rows."""
        ahead, self._ahead = self._ahead, None
        scanner_id, self._scanner_id = self._scanner_id, None
        # A node that could not be reached is not asked once more.
        was_open = self.state in (ScannerState.ACTIVE, ScannerState.FAILED) and not isinstance(
            self._failure, NodeUnavailable
        )
        if self.state is not ScannerState.FAILED:
            self.state = ScannerState.DONE
        if ahead is not None:
            if scanner_id is None and (self._asking or ahead.done()):
                # The open is under way: only its answer says which cursor must be closed.
                scanner_id = await _opened_meanwhile(ahead)
                was_open = scanner_id is not None
            ahead.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await ahead
        if scanner_id is not None and was_open:
            # The server closes sessions that nobody uses, so that a failure here keeps one open for a while
            # at most.
            with contextlib.suppress(TidemillError, OSError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._ask({"scanner_id": scanner_id, "close": True})

    # --- requests

    async def _answer(self) -> Any:
        if self._ahead is None:
            self._ahead = self._begin()
        # Shielded: a caller that is cancelled can call again, and finds the answer.
        response = await asyncio.shield(self._ahead)
        self._ahead = None
        return response

    def _take(self, response: Any) -> None:
        if self.state is ScannerState.PENDING:
            self.log_offset = response.log_offset
            if self._scan.is_at_offset and response.log_offset != self._scan.log_offset:
                raise TableError(
                    TableCode.snapshot_not_found,
                    f"a node of an older version leads bucket {self._scan.bucket} of {self._scan.topic}, and "
                    "cannot build older state again",
                )
        self._scanner_id, self.next_key = response.scanner_id, response.next_key
        if response.has_more:
            self.state = ScannerState.ACTIVE
            self._sequence += 1
            self._ahead = self._begin()
        else:
            self.state = ScannerState.DONE

    def _begin(self) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(self._request())
        # Nobody asks for the error of a scanner that was dropped, so it is marked as seen.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _request(self) -> Any:
        if self._scanner_id is not None:
            return await self._retrying(
                {
                    "scanner_id": self._scanner_id,
                    "call_sequence": self._sequence,
                    "batch_size_bytes": self._fetch_max_bytes,
                }
            )
        scan = self._scan
        at = {"log_offset": scan.log_offset, "log_epoch": scan.log_epoch} if scan.is_at_offset else {}
        return await self._retrying(
            {
                **at,
                "scanner_id": None,
                "table_id": scan.table_id,
                "partition_id": scan.partition_id,
                "bucket": scan.bucket,
                "leader_epoch": -1,
                "pin_id": scan.pin_id,
                "lease_id": scan.lease_id,
                "limit": scan.limit,
                "columns": scan.columns,
                "predicate": scan.predicate,
                "start_key": scan.start_key,
                "end_key": scan.end_key,
                "call_sequence": 0,
                "batch_size_bytes": self._fetch_max_bytes,
            }
        )

    async def _retrying(self, body: dict[str, Any]) -> Any:
        what = f"scanning bucket {self._scan.bucket} of {self._scan.topic}"

        async def ask() -> Any:
            return checked(await self._ask(body), what)

        policy = RetryPolicy(self._timeout_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        try:
            return await retry(ask, policy, before_next=self._cluster.forget)
        except TidemillError as error:
            raise _explained(error) from error

    async def _ask(self, body: dict[str, Any]) -> Any:
        (leader,) = await self._cluster.leaders([(self._scan.topic, self._scan.bucket)])
        connection = await self._cluster.connection(leader, purpose="scan")
        self._asking = True
        try:
            return await connection.request("ScanKv", body)
        finally:
            self._asking = False


async def _opened_meanwhile(opening: asyncio.Task[Any]) -> bytes | None:
    """The id of the cursor that an open under way gets; None if it fails, needs none, or takes too long."""
    await asyncio.wait([opening], timeout=_OPEN_ANSWER_SECONDS)
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    response = opening.result()
    scanner_id: bytes | None = response.scanner_id if response.has_more else None
    return scanner_id


def _explained(error: TidemillError) -> TidemillError:
    if error.code == ErrorCode.unsupported_version:
        return ApiError(error.code, f"this server cannot scan tables: {error.message}")
    if isinstance(error, TableError) and error.table_code == TableCode.too_many_scanners:
        return TableError(
            error.table_code,
            f"{error.message}; it was tried until the scan's timeout was over",
            index=error.index,
        )
    return error


def read_batches(data: bytes) -> pa.RecordBatch:
    """The rows of an answer as one batch."""
    table = pa.ipc.open_stream(data).read_all()
    if table.num_rows == 0:
        return pa.RecordBatch.from_pylist([], table.schema)
    batches = table.combine_chunks().to_batches()
    if len(batches) == 1:
        return batches[0]
    raise TableError(
        TableCode.invalid_scan_request, f"a batch of {table.num_rows} rows is too large for one piece"
    )
