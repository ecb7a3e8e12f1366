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
    from tidemill.client.sync_client import Tidemill as Tidemill
    from tidemill.client.sync_client import connect as connect
    from tidemill.client.sync_table import Follow as Follow
    from tidemill.client.sync_table import Scan as Scan
    from tidemill.client.sync_table import Table as Table
    from tidemill.client.sync_table import TableLease as TableLease
    from tidemill.client.tables.table import AsyncTable as AsyncTable
    from tidemill.embedded.node import EmbeddedNode as EmbeddedNode
    from tidemill.embedded.node import open_node as open  # noqa: A004 - used as tidemill.open
    from tidemill.errors import ConnectionClosed as ConnectionClosed
    from tidemill.errors import NodeUnavailable as NodeUnavailable
    from tidemill.errors import TableCode as TableCode
    from tidemill.errors import TableError as TableError
    from tidemill.errors import TidemillError as TidemillError

__all__ = (
    "AsyncTable",
    "AsyncTidemill",
    "ConnectionClosed",
    "EmbeddedNode",
    "Follow",
    "NodeUnavailable",
    "Scan",
    "Table",
    "TableCode",
    "TableError",
    "TableLease",
    "Tidemill",
    "TidemillError",
    "__version__",
    "connect",
    "connect_async",
    "open",
)

__version__ = "0.1.0"

#: Parts of the package that users import, and find among its names once they have.
_SUBPACKAGES = ("errors", "spark", "testing")

#: Public name → (module, name there).
_LAZY = {
    "AsyncTable": ("tidemill.client.tables.table", "AsyncTable"),
    "AsyncTidemill": ("tidemill.client.async_client", "AsyncTidemill"),
    "ConnectionClosed": ("tidemill.errors", "ConnectionClosed"),
    "EmbeddedNode": ("tidemill.embedded.node", "EmbeddedNode"),
    "Follow": ("tidemill.client.sync_table", "Follow"),
    "NodeUnavailable": ("tidemill.errors", "NodeUnavailable"),
    "Scan": ("tidemill.client.sync_table", "Scan"),
    "Table": ("tidemill.client.sync_table", "Table"),
    "TableCode": ("tidemill.errors", "TableCode"),
    "TableError": ("tidemill.errors", "TableError"),
    "TableLease": ("tidemill.client.sync_table", "TableLease"),
    "Tidemill": ("tidemill.client.sync_client", "Tidemill"),
    "TidemillError": ("tidemill.errors", "TidemillError"),
    "connect": ("tidemill.client.sync_client", "connect"),
    "connect_async": ("tidemill.client.async_client", "connect_async"),
    "open": ("tidemill.embedded.node", "open_node"),
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
