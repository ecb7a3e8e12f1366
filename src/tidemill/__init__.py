"""Tidemill: a streaming table store for Python and Spark.

>>> import tidemill
>>> with tidemill.open() as db:      # a node inside this process; tidemill.connect("host:port") for others
...     orders = db.create_table("shop.orders", "id bigint, item string", primary_key=["id"])
...     _ = orders.upsert({"id": 1, "item": "apple"})
...     orders.lookup(1)
{'id': 1, 'item': 'apple'}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.client.async_client import AsyncTidemill as AsyncTidemill
    from tidemill.client.async_client import connect_async as connect_async
    from tidemill.client.cursors.checkpoints.transaction import IN_TRANSACTION as IN_TRANSACTION
    from tidemill.client.cursors.cursor import AsyncCursor as AsyncCursor
    from tidemill.client.cursors.records import CursorRecord as CursorRecord
    from tidemill.client.cursors.records import CursorRow as CursorRow
    from tidemill.client.cursors.sync_cursor import Cursor as Cursor
    from tidemill.client.share.consumer import AsyncShare as AsyncShare
    from tidemill.client.share.record import FencingToken as FencingToken
    from tidemill.client.share.record import ShareRecord as ShareRecord
    from tidemill.client.sync_client import Tidemill as Tidemill
    from tidemill.client.sync_client import connect as connect
    from tidemill.client.sync_share import Share as Share
    from tidemill.client.sync_table import Follow as Follow
    from tidemill.client.sync_table import Scan as Scan
    from tidemill.client.sync_table import Table as Table
    from tidemill.client.sync_table import TableLease as TableLease
    from tidemill.client.sync_worker import Worker as Worker
    from tidemill.client.sync_worker import run_workers as run_workers
    from tidemill.client.tables.table import AsyncTable as AsyncTable
    from tidemill.client.workers.ordered import Action as Action
    from tidemill.client.workers.ordered import Ordered as Ordered
    from tidemill.client.workers.ordered import WorkerFailed as WorkerFailed
    from tidemill.client.workers.outcomes import Reject as Reject
    from tidemill.client.workers.outcomes import Retry as Retry
    from tidemill.client.workers.worker import AsyncWorker as AsyncWorker
    from tidemill.cursors.errors import CheckpointAheadOfLog as CheckpointAheadOfLog
    from tidemill.cursors.errors import CheckpointBelowLogStart as CheckpointBelowLogStart
    from tidemill.cursors.errors import CheckpointCorrupt as CheckpointCorrupt
    from tidemill.cursors.errors import CheckpointDiverged as CheckpointDiverged
    from tidemill.cursors.errors import CheckpointRegionMismatch as CheckpointRegionMismatch
    from tidemill.cursors.errors import CheckpointWriteFailed as CheckpointWriteFailed
    from tidemill.cursors.errors import CursorError as CursorError
    from tidemill.cursors.errors import CursorFenced as CursorFenced
    from tidemill.cursors.errors import CursorInUse as CursorInUse
    from tidemill.cursors.errors import CursorMoved as CursorMoved
    from tidemill.cursors.errors import CursorNotFound as CursorNotFound
    from tidemill.cursors.errors import NoOpenTransaction as NoOpenTransaction
    from tidemill.cursors.restarts import Bounded as Bounded
    from tidemill.cursors.restarts import Once as Once
    from tidemill.embedded.node import EmbeddedNode as EmbeddedNode
    from tidemill.embedded.node import open_node as open  # noqa: A004 - used as tidemill.open
    from tidemill.errors import ApiError as ApiError
    from tidemill.errors import ConfigError as ConfigError
    from tidemill.errors import ConnectionClosed as ConnectionClosed
    from tidemill.errors import NodeUnavailable as NodeUnavailable
    from tidemill.errors import TableCode as TableCode
    from tidemill.errors import TableError as TableError
    from tidemill.errors import TidemillError as TidemillError

__all__ = (
    "IN_TRANSACTION",
    "Action",
    "ApiError",
    "AsyncCursor",
    "AsyncShare",
    "AsyncTable",
    "AsyncTidemill",
    "AsyncWorker",
    "Bounded",
    "CheckpointAheadOfLog",
    "CheckpointBelowLogStart",
    "CheckpointCorrupt",
    "CheckpointDiverged",
    "CheckpointRegionMismatch",
    "CheckpointWriteFailed",
    "ConfigError",
    "ConnectionClosed",
    "Cursor",
    "CursorError",
    "CursorFenced",
    "CursorInUse",
    "CursorMoved",
    "CursorNotFound",
    "CursorRecord",
    "CursorRow",
    "EmbeddedNode",
    "FencingToken",
    "Follow",
    "NoOpenTransaction",
    "NodeUnavailable",
    "Once",
    "Ordered",
    "Reject",
    "Retry",
    "Scan",
    "Share",
    "ShareRecord",
    "Table",
    "TableCode",
    "TableError",
    "TableLease",
    "Tidemill",
    "TidemillError",
    "Worker",
    "WorkerFailed",
    "__version__",
    "connect",
    "connect_async",
    "open",
    "run_workers",
)

__version__ = "0.1.0"

#: Parts of the package that users import, and find among its names once they have.
_SUBPACKAGES = ("errors", "spark", "testing")

#: Public name → (module, name there).
_LAZY = {
    "Action": ("tidemill.client.workers.ordered", "Action"),
    "Bounded": ("tidemill.cursors.restarts", "Bounded"),
    "Once": ("tidemill.cursors.restarts", "Once"),
    "Ordered": ("tidemill.client.workers.ordered", "Ordered"),
    "WorkerFailed": ("tidemill.client.workers.ordered", "WorkerFailed"),
    "ApiError": ("tidemill.errors", "ApiError"),
    "AsyncCursor": ("tidemill.client.cursors.cursor", "AsyncCursor"),
    "AsyncShare": ("tidemill.client.share.consumer", "AsyncShare"),
    "AsyncTable": ("tidemill.client.tables.table", "AsyncTable"),
    "AsyncTidemill": ("tidemill.client.async_client", "AsyncTidemill"),
    "AsyncWorker": ("tidemill.client.workers.worker", "AsyncWorker"),
    "CheckpointAheadOfLog": ("tidemill.cursors.errors", "CheckpointAheadOfLog"),
    "CheckpointBelowLogStart": ("tidemill.cursors.errors", "CheckpointBelowLogStart"),
    "CheckpointCorrupt": ("tidemill.cursors.errors", "CheckpointCorrupt"),
    "CheckpointDiverged": ("tidemill.cursors.errors", "CheckpointDiverged"),
    "CheckpointRegionMismatch": ("tidemill.cursors.errors", "CheckpointRegionMismatch"),
    "CheckpointWriteFailed": ("tidemill.cursors.errors", "CheckpointWriteFailed"),
    "ConfigError": ("tidemill.errors", "ConfigError"),
    "ConnectionClosed": ("tidemill.errors", "ConnectionClosed"),
    "Cursor": ("tidemill.client.cursors.sync_cursor", "Cursor"),
    "CursorError": ("tidemill.cursors.errors", "CursorError"),
    "CursorFenced": ("tidemill.cursors.errors", "CursorFenced"),
    "CursorInUse": ("tidemill.cursors.errors", "CursorInUse"),
    "CursorMoved": ("tidemill.cursors.errors", "CursorMoved"),
    "CursorNotFound": ("tidemill.cursors.errors", "CursorNotFound"),
    "CursorRecord": ("tidemill.client.cursors.records", "CursorRecord"),
    "CursorRow": ("tidemill.client.cursors.records", "CursorRow"),
    "EmbeddedNode": ("tidemill.embedded.node", "EmbeddedNode"),
    "FencingToken": ("tidemill.client.share.record", "FencingToken"),
    "Follow": ("tidemill.client.sync_table", "Follow"),
    "IN_TRANSACTION": ("tidemill.client.cursors.checkpoints.transaction", "IN_TRANSACTION"),
    "NoOpenTransaction": ("tidemill.cursors.errors", "NoOpenTransaction"),
    "NodeUnavailable": ("tidemill.errors", "NodeUnavailable"),
    "Reject": ("tidemill.client.workers.outcomes", "Reject"),
    "Retry": ("tidemill.client.workers.outcomes", "Retry"),
    "Scan": ("tidemill.client.sync_table", "Scan"),
    "Share": ("tidemill.client.sync_share", "Share"),
    "ShareRecord": ("tidemill.client.share.record", "ShareRecord"),
    "Table": ("tidemill.client.sync_table", "Table"),
    "TableCode": ("tidemill.errors", "TableCode"),
    "TableError": ("tidemill.errors", "TableError"),
    "TableLease": ("tidemill.client.sync_table", "TableLease"),
    "Tidemill": ("tidemill.client.sync_client", "Tidemill"),
    "TidemillError": ("tidemill.errors", "TidemillError"),
    "Worker": ("tidemill.client.sync_worker", "Worker"),
    "connect": ("tidemill.client.sync_client", "connect"),
    "connect_async": ("tidemill.client.async_client", "connect_async"),
    "open": ("tidemill.embedded.node", "open_node"),
    "run_workers": ("tidemill.client.sync_worker", "run_workers"),
}

if not TYPE_CHECKING:
    # Type checkers are not shown it: with it they would take every misspelt name for one that may be there.
    def __getattr__(name: str) -> object:
        # Loaded at first use, so that the command line answers at once.
        if name in _LAZY:
            from importlib import import_module

            module, attribute = _LAZY[name]
            return getattr(import_module(module), attribute)
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What completion offers: the public names, loaded or not, and what every module has.
    present = (name for name in globals() if name.startswith("__") or name in _SUBPACKAGES)
    return sorted({*__all__, *present})
