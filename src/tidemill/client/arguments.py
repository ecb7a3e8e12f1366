"""Checks of the arguments that programs pass; a wrong one is a ``ConfigError`` that says what is allowed.

>>> whole("concurrency", 0, least=1)
Traceback (most recent call last):
tidemill.errors.ConfigError: concurrency is a whole number of at least 1, not 0
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from tidemill.errors import ConfigError

__all__ = (
    "Named",
    "chosen_partitions",
    "flag",
    "full_name",
    "millis",
    "names",
    "optional_text",
    "shown",
    "text",
    "topic_names",
    "values_by_name",
    "whole",
)

_SHOWN_CHARACTERS_MAX: Final = 60


class Named(Protocol):
    """A table, as far as its topic goes."""

    @property
    def name(self) -> str: ...


def shown(value: object) -> str:
    """A wrong value for a message: short, whatever it is.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…"
    """
    found = repr(value)
    return found if len(found) <= _SHOWN_CHARACTERS_MAX else f"{found[:_SHOWN_CHARACTERS_MAX]}…"


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """``value`` as an int from ``least`` to ``most``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is a whole number {allowed}, not {shown(value)}")
    return number


def millis(name: str, seconds: Any) -> int:
    """A number of seconds as whole milliseconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 2**53:
        raise ConfigError(f"{name} is a number of seconds of at least 0, not {shown(seconds)}")
    return round(seconds * 1000)


def flag(name: str, value: Any) -> bool:
    """``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is True or False, not {shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    """``value`` if it is text, which may be empty."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is text, not {shown(value)}")
    return value


def optional_text(name: str, value: Any) -> str | None:
    """``value`` if it is text or None."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} is text or None, not {shown(value)}")
    return value


def names(name: str, value: Any) -> list[str]:
    """A list of names, which may be empty; one name stands for a list of it."""
    found = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"{name} is a name or a list of names, not {shown(value)}")
    return found


def values_by_name(name: str, value: Any) -> Mapping[str, Any]:
    """Values by name; None stands for none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is values by name, as in {{'user.owner': 'ann'}}, not {shown(value)}")
    for each in value:
        text(f"a name in {name}", each)
    return value


def full_name(what: str, name: Any) -> str:
    """A name that is text and not empty."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} is text of at least one character, not {shown(name)}")
    return name


def topic_names(topic: Any) -> tuple[str, ...]:
    """The topics that a caller means: a name, a table, or several of them."""
    several = (
        isinstance(topic, Iterable) and not isinstance(topic, str | bytes) and not hasattr(topic, "name")
    )
    names = tuple(getattr(each, "name", each) for each in (topic if several else (topic,)))
    if not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigError(f"a topic is its name, a table, or a list of them, not {shown(topic)}")
    return names


def chosen_partitions(name: str, numbers: Any) -> tuple[int, ...]:
    """Numbers of partitions, in order, each once."""
    try:
        found = None if isinstance(numbers, str | bytes) else {operator.index(each) for each in numbers}
    except TypeError:
        found = None
    if found == set():
        raise ConfigError(f"{name} names no partition: there is nothing to read")
    if found is None or min(found) < 0:
        raise ConfigError(f"{name} is a list of partitions like [0, 2], not {shown(numbers)}")
    return tuple(sorted(found))
