"""Finding keys that no version of a message has.

The encoder ignores keys of other versions, so a misspelt key would silently become a default on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any

from kio.schema.index import schema_name_map
from kio.static.constants import EntityType

from tidemill.wire import encode
from tidemill.wire.apis import APIS, request_class, response_class
from tidemill.wire.schema import EntityClass, fields_of

__all__ = ("refuse_typos", "typos")

_Tree = dict[str, "_Tree"]
"""Field name to the fields below it (none for a primitive), over all versions."""


def refuse_typos(on: bool) -> None:
    """Whether every encoded body of this process is searched, and refused if it has a misspelt key."""
    encode._steps = _checked_steps if on else _steps  # type: ignore[assignment]


_steps: Any = encode._steps


def _checked_steps(entity: EntityClass) -> tuple[Any, ...]:
    """The steps that write a message, after one that searches its body; nested structures are part of it."""
    if entity.__type__ is EntityType.nested:
        return tuple(_steps(entity))
    return (lambda body, _: _refuse(entity, body), *_steps(entity))


def _refuse(entity: EntityClass, body: Mapping[str, Any]) -> None:
    if unknown := typos(entity, body):
        raise TypeError(f"no version of {entity.__name__} has {', '.join(unknown)}")


def typos(entity: EntityClass, body: Mapping[str, Any]) -> list[str]:
    """The paths of the keys in ``body`` that no served version of the message ``entity`` has.

    >>> from tidemill.wire.apis import response_class
    >>> typos(response_class(12, 4), {"error_code": 0, "throttle_time_ms": 0})
    ['throttle_time_ms']
    """
    found: list[str] = []
    _search(_tree(entity), body, "", found)
    return found


def _search(tree: _Tree, body: Mapping[str, Any], path: str, found: list[str]) -> None:
    for key, value in body.items():
        below = tree.get(key)
        if below is None:
            found.append(path + key)
        elif isinstance(value, Mapping):
            _search(below, value, f"{path}{key}.", found)
        elif below and isinstance(value, (list, tuple)):
            for item in value:
                _search(below, item, f"{path}{key}.", found)


@cache
def _tree(entity: EntityClass) -> _Tree:
    tree: _Tree = {}
    for version in _versions_of(entity):
        _merge(tree, version)
    return tree


def _merge(tree: _Tree, entity: EntityClass) -> None:
    for spec in fields_of(entity):
        below = tree.setdefault(spec.name, {})
        if spec.struct is not None:
            _merge(below, spec.struct)


def _versions_of(entity: EntityClass) -> list[EntityClass]:
    if entity.__type__ is EntityType.nested:
        return [entity]
    api = APIS.get(getattr(entity, "__api_key__", -1))
    if api is not None:
        load = request_class if entity.__type__ is EntityType.request else response_class
        return [load(api.key, version) for version in api.versions]
    schema = entity.__module__.split(".")[2]
    return [resolve_name(paths[entity.__type__]) for paths in schema_name_map[schema].values()]
