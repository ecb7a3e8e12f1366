"""Every API is thrown at a node at its largest, or there is a reason why no request of it is large.

What is thrown is read in the sources of the requests: to make one, a node must run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support import hostile, hostile_admin, hostile_readers, hostile_state
from tidemill.wire.apis import APIS_BY_NAME, NODES_ONLY

MODULES = (hostile, hostile_readers, hostile_admin, hostile_state)
THROWN: dict[str, Callable[[hostile.Address], hostile.Throw]] = {
    **hostile.HOSTILE,
    **hostile_readers.HOSTILE_READERS,
    **hostile_readers.HOSTILE_READERS_OF_MANY,
    **hostile_admin.HOSTILE_ADMIN,
    **hostile_state.HOSTILE_STATE,
}


def functions() -> Iterator[ast.FunctionDef]:
    for module in MODULES:
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
        yield from (each for each in tree.body if isinstance(each, ast.FunctionDef))


def apis_of(function: ast.FunctionDef) -> set[str]:
    """The APIs that a function's return statements name first."""
    returned = (each.value for each in ast.walk(function) if isinstance(each, ast.Return))
    first = (each.elts[0] for each in returned if isinstance(each, ast.Tuple))
    return {str(each.value) for each in first if isinstance(each, ast.Constant)}


@cache
def apis_thrown() -> set[str]:
    """The APIs of all requests in the lists, also if a helper makes them."""
    by_name = {each.name: each for each in functions()}
    found: set[str] = set()
    for name in THROWN:
        function = by_name[name]
        called = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
        apis = apis_of(function)
        for helper in called & by_name.keys() if not apis else ():
            apis |= apis_of(by_name[helper])
        assert apis, f"{name} names no API"
        found |= apis
    return found


@pytest.mark.parametrize("name", APIS_BY_NAME)
def test_every_api_is_thrown_at_its_largest_or_is_small_for_a_reason(name: str) -> None:
    is_small = name in hostile_admin.SMALL
    assert (name in apis_thrown()) != is_small, (
        "an API needs a request in tests/support/hostile*.py that is as large as its limits allow, or a "
        "reason in SMALL why there is none"
    )


def test_reasons_are_given_for_what_there_is() -> None:
    assert hostile_admin.SMALL.keys() | apis_thrown() == APIS_BY_NAME.keys()
    by_nodes = {name for name, reason in hostile_admin.SMALL.items() if reason.startswith("only nodes")}
    assert by_nodes == {name for name, api in APIS_BY_NAME.items() if api.key in NODES_ONLY}


def test_every_request_is_in_a_list() -> None:
    takes_an_address = {
        each.name
        for each in functions()
        if [argument.arg for argument in each.args.args] == ["address"]
        and isinstance(each.returns, ast.Name)
        and each.returns.id == "Throw"
    }
    assert takes_an_address <= THROWN.keys()
