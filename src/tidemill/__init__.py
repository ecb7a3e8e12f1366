"""Tidemill: a streaming table store for Python and Spark.

>>> import tidemill
>>> with tidemill.open() as node:                 # a Kafka-compatible node inside this process
...     kind = type(node.bootstrap_servers).__name__
>>> kind
'str'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.client.embedded import EmbeddedNode as EmbeddedNode
    from tidemill.client.embedded import open_node as open  # noqa: A004 - used as tidemill.open

__all__ = ("EmbeddedNode", "__version__", "open")

__version__ = "0.1.0"

_LAZY = {"open": "open_node", "EmbeddedNode": "EmbeddedNode"}


def __getattr__(name: str) -> Any:
    # The server is loaded at first use, so that the command line answers at once.
    if name in _LAZY:
        from tidemill.client import embedded

        return getattr(embedded, _LAZY[name])
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
