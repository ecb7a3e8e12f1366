"""The description of one setting: how its value is read, checked and shown.

A field of ``Settings`` carries a ``Spec`` in its annotation; ``SettingInfo`` joins it with the field's name
and default, which is all that the loader, ``--help`` and the reference page need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tidemill.config.values import Address, parse_address, parse_flag, parse_size, parse_whole
from tidemill.errors import ConfigError

__all__ = ("Kind", "SettingInfo", "Spec")

_TEXT_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


class Kind(StrEnum):
    """The type of a setting's value."""

    ADDRESS = "address"
    BYTES = "bytes"
    COUNT = "count"
    FLAG = "flag"
    MS = "milliseconds"
    NAME = "name"
    PATH = "path"
    FILE = "file"
    TEXT = "text"


_PLAIN_ALLOWED = {
    Kind.ADDRESS: "host:port, for example 127.0.0.1:9092 or [::1]:9092",
    Kind.FLAG: "true or false",
    Kind.NAME: "1 to 64 letters, digits, dots, dashes or underscores, with a letter or digit at both ends",
    Kind.PATH: "the path of a directory",
    Kind.FILE: "the path of a file",
    Kind.TEXT: "a text of at most 1024 printable characters",
}
_NUMBER_ALLOWED = {
    Kind.BYTES: "a number of bytes, for example 1048576 or 512 MiB,",
    Kind.COUNT: "a whole number",
    Kind.MS: "a whole number of milliseconds",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A setting's kind, its range and what it is for. ``optional``: an empty text means none."""

    kind: Kind
    doc: str
    minimum: int = 0
    maximum: int = 2**63 - 1
    optional: bool = False


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting: its name, its default and its ``Spec``."""

    name: str
    default: object
    spec: Spec

    @property
    def variable(self) -> str:
        """The environment variable that sets the setting."""
        return f"TIDEMILL_{self.name.upper()}"

    @property
    def default_text(self) -> str:
        """The default as people would write it."""
        if self.default is None:
            return ""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words."""
        kind = self.spec.kind
        if kind in _NUMBER_ALLOWED:
            text = f"{_NUMBER_ALLOWED[kind]} of at least {self.spec.minimum}"
            return text if self.spec.maximum == 2**63 - 1 else f"{text} and at most {self.spec.maximum}"
        return _PLAIN_ALLOWED[kind] + (", or empty" if self.spec.optional else "")

    def read(self, raw: object, source: str) -> object:
        """The checked value of ``raw``, which is text or has the right type; ConfigError names ``source``."""
        try:
            value = self._from_text(raw) if isinstance(raw, str) else raw
        except ValueError as error:
            raise self._refused(raw, source) from error
        return self.check(value, source)

    def check(self, value: object, source: str) -> object:
        """``value`` itself if it has this setting's type and range, else ConfigError."""
        if not (value is None and self.spec.optional) and not self._valid(value):
            raise self._refused(value, source)
        return value

    def _from_text(self, text: str) -> object:
        if self.spec.optional and not text.strip():
            return None
        match self.spec.kind:
            case Kind.ADDRESS:
                return parse_address(text)
            case Kind.BYTES:
                return parse_size(text)
            case Kind.COUNT | Kind.MS:
                return parse_whole(text)
            case Kind.FLAG:
                return parse_flag(text)
            case Kind.PATH | Kind.FILE:
                if not text.strip():
                    raise ValueError(self.allowed)
                return Path(text)
            case Kind.NAME | Kind.TEXT:
                return text.strip()

    def _valid(self, value: object) -> bool:
        match self.spec.kind:
            case Kind.ADDRESS:
                return isinstance(value, Address)
            case Kind.FLAG:
                return isinstance(value, bool)
            case Kind.PATH | Kind.FILE:
                return isinstance(value, Path)
            case Kind.TEXT:
                return isinstance(value, str) and 0 < len(value) <= _TEXT_MAX and value.isprintable()
            case Kind.NAME:
                return isinstance(value, str) and _NAME.fullmatch(value) is not None
            case _:
                whole = isinstance(value, int) and not isinstance(value, bool)
                return whole and self.spec.minimum <= value <= self.spec.maximum  # type: ignore[operator]

    def _refused(self, value: object, source: str) -> ConfigError:
        shown = str(value) if isinstance(value, Address | Path) else repr(value)
        return ConfigError(
            f"setting {self.name} (from {source}) cannot be {shown[:200]}: it must be {self.allowed}"
        )
