"""The APIs that a node serves: one row each, beside its handler.

``wire.apis`` has the half of a row that clients need, too: key, name, versions, messages. ``@serves`` above a
handler completes it: who handles it, whether requests of one connection may overlap, what permissions it
needs. Rules:

- Every API of the wire has exactly one handler, in a module of ``server.handlers``; ``served_apis`` finds
  them and refuses to start with one too few. A second one is refused where it is declared.
- A handler that is a coroutine function runs in a task and returns the body of the answer. A plain function
  runs at once, and answers through its call, then or later: Produce and Fetch, which are called most.
- Modules of handlers must not load Arrow or RocksDB: a node without tables starts without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidemill.server import handlers
from tidemill.wire.apis import APIS, APIS_BY_NAME, Api

if TYPE_CHECKING:
    from tidemill.server.broker import Broker
    from tidemill.server.requests.authorization import Permission
    from tidemill.server.requests.call import Call

    Handler = Callable[[Broker, Call], Any]

__all__ = ("ServedApi", "served_apis", "serves")

H = TypeVar("H", bound="Handler")


@dataclass(frozen=True, slots=True)
class ServedApi:
    """An API and what a node does with its requests."""

    api: Api
    handler: Handler
    in_task: bool
    """Whether the handler is a coroutine function, whose result is the body of the answer."""
    overlaps: bool
    """Whether requests of one connection may run beside each other; others wait for all before them."""
    permissions: tuple[Permission, ...]


_rows: Final[dict[int, ServedApi]] = {}


def serves(name: str, *permissions: Permission, overlaps: bool = False) -> Callable[[H], H]:
    """Declare the decorated function to be the handler of the API ``name``."""
    api = APIS_BY_NAME.get(name)
    if api is None:
        raise LookupError(f"there is no API {name!r} in tidemill.wire.apis: add its row there")

    def declare(handler: H) -> H:
        if api.key in _rows:
            raise ValueError(f"API {name} has two handlers: {_rows[api.key].handler} and {handler}")
        _rows[api.key] = ServedApi(api, handler, inspect.iscoroutinefunction(handler), overlaps, permissions)
        return handler

    return declare


def served_apis() -> dict[int, ServedApi]:
    """Every row by API key. Loads all handlers; raises if an API of the wire has none."""
    _load_handlers()
    without = [api.name for key, api in APIS.items() if key not in _rows]
    if without:
        raise LookupError(f"no handler in tidemill.server.handlers serves {', '.join(without)}")
    return _rows


@cache
def _load_handlers() -> None:
    for module in walk_packages(handlers.__path__, f"{handlers.__name__}."):
        import_module(module.name)
