"""Tidemill: a streaming table store for Python and Spark.

>>> import tidemill
>>> with tidemill.open() as db:      # a node inside this process; tidemill.connect("host:port") for others
...     orders = db.create_table("shop.orders", "id bigint, item string", primary_key=["id"])
...     _ = orders.upsert({"id": 1, "item": "apple"})
...     orders.lookup(1)
{'id': 1, 'item': 'apple'}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.client.connecting import AsyncTidemill as AsyncTidemill
    from tidemill.client.connecting import connect_async as connect_async
    from tidemill.client.embedded import EmbeddedNode as EmbeddedNode
    from tidemill.client.embedded import open_node as open  # noqa: A004 - used as tidemill.open
    from tidemill.client.sync import Table as Table
    from tidemill.client.sync import Tidemill as Tidemill
    from tidemill.client.sync import connect as connect
    from tidemill.errors import TableCode as TableCode
    from tidemill.errors import TableError as TableError
    from tidemill.errors import TidemillError as TidemillError

__all__ = (
    "AsyncTidemill",
    "EmbeddedNode",
    "Table",
    "TableCode",
    "TableError",
    "Tidemill",
    "TidemillError",
    "__version__",
    "connect",
    "connect_async",
    "open",
)

__version__ = "0.1.0"

#: Public name → (module, name there).
_LAZY = {
    "AsyncTidemill": ("tidemill.client.connecting", "AsyncTidemill"),
    "EmbeddedNode": ("tidemill.client.embedded", "EmbeddedNode"),
    "Table": ("tidemill.client.sync", "Table"),
    "TableCode": ("tidemill.errors", "TableCode"),
    "TableError": ("tidemill.errors", "TableError"),
    "Tidemill": ("tidemill.client.sync", "Tidemill"),
    "TidemillError": ("tidemill.errors", "TidemillError"),
    "connect": ("tidemill.client.sync", "connect"),
    "connect_async": ("tidemill.client.connecting", "connect_async"),
    "open": ("tidemill.client.embedded", "open_node"),
}


def __getattr__(name: str) -> Any:
    # Loaded at first use, so that the command line answers at once.
    if name in _LAZY:
        from importlib import import_module

        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
