"""Methods of the async client for callers that do not await: each signature and docstring stands once.

    class Table(Blocking[AsyncTable]):
        upsert = blocking(AsyncTable.upsert)
        scan = wrapping(AsyncTable.scan, Scan)

``upsert`` then has the parameters of ``AsyncTable.upsert``, to type checkers and to ``help``, and gives what
that gives when it is awaited.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, cast

from tidemill.client.process_bound import Unpicklable

if TYPE_CHECKING:
    from tidemill.client.sync_client import Tidemill

__all__ = ("PLAIN_NAMES", "Blocking", "blocking", "blocking_as", "returning_self", "wrapping")

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Given = TypeVar("_Given")
_Kind = TypeVar("_Kind")
_Self = TypeVar("_Self")
_Awaited = TypeVar("_Awaited", bound=Unpicklable)

#: Classes of the async client, and their names in the blocking one.
PLAIN_NAMES: Final[Mapping[str, str]] = {
    "AsyncCursor": "Cursor",
    "AsyncCursorTransaction": "CursorTransaction",
    "AsyncFollow": "Follow",
    "AsyncLease": "TableLease",
    "AsyncScan": "Scan",
    "AsyncShare": "Share",
    "AsyncShareTransaction": "ShareTransaction",
    "AsyncTable": "Table",
    "AsyncTidemill": "Tidemill",
    "AsyncWorker": "Worker",
    "AsyncBucketScanner": "BucketScanner",
}
_ASYNC_NAME: Final = re.compile(rf"\b({'|'.join(PLAIN_NAMES)})\b")


class Blocking(Unpicklable, Generic[_Awaited]):
    """Wraps an object of the async client for callers that block."""

    def __init__(self, db: Tidemill, awaited: _Awaited) -> None:
        self._db = db
        self._awaited = awaited

    def __repr__(self) -> str:
        return repr(self._awaited)

    def _instead_of_a_pickle(self) -> str:
        return self._awaited._instead_of_a_pickle()


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Any, _P], _T]:
    """The blocking form of an async method."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # Read first, because it opens a connection that is not open yet.
        awaited = self._awaited
        return cast(_T, self._db.run(method(awaited, *args, **kwargs)))

    _present(call, method)
    return call


def blocking_as(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _Given]],
    kind: Callable[[Any, _Given], _Kind],
) -> Callable[Concatenate[Any, _P], _Kind]:
    """The blocking form of an async method whose result is wrapped as a ``kind``."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Kind:
        awaited = self._awaited
        return kind(self._db, self._db.run(method(awaited, *args, **kwargs)))

    _present(call, method)
    return call


def wrapping(
    method: Callable[Concatenate[Any, _P], _Given], kind: Callable[[Any, _Given], _Kind]
) -> Callable[Concatenate[Any, _P], _Kind]:
    """The form of a method that does not await and whose result is wrapped as a ``kind``."""

    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _Kind:
        return kind(self._db, method(self._awaited, *args, **kwargs))

    _present(call, method)
    return call


def returning_self(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[_Self, _P], _Self]:
    """The blocking form of an async method that returns its own object."""

    def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _Self:
        blocked: Any = self
        blocked._db.run(method(blocked._awaited, *args, **kwargs))
        return self

    _present(call, method)
    return call


def _present(call: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Give ``call`` the name, docstring and signature of ``method``, with the names of this client."""
    functools.update_wrapper(call, method)
    signature = inspect.signature(method)
    parameters = [each.replace(annotation=_plain(each.annotation)) for each in signature.parameters.values()]
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=_plain(signature.return_annotation)
    )
    owner, _, name = call.__qualname__.rpartition(".")
    call.__qualname__ = f"{_plain(owner)}.{name}"


def _plain(annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    return _ASYNC_NAME.sub(lambda match: PLAIN_NAMES[match[1]], annotation)
