"""Parsers of settings as people write them: addresses, sizes, durations, yes and no.

Every parser takes text and raises ValueError, whose message says what is allowed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = (
    "GIB",
    "KIB",
    "MIB",
    "Address",
    "TopicPartition",
    "parse_address",
    "parse_flag",
    "parse_size",
    "parse_whole",
    "time_unit_ms",
)

TopicPartition = tuple[str, int]
"""A partition by its topic's name and its number."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_TIME_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1_000,
    "second": 1_000,
    "m": 60_000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
    "w": 7 * 86_400_000,
    "week": 7 * 86_400_000,
}

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_SIZE = re.compile(r"([0-9]{1,19})\s*([A-Za-z]{0,3})")
_WHOLE = re.compile(r"-?[0-9]{1,19}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")


class Address(NamedTuple):
    """A host and a port. An IPv6 host is kept without its brackets; port 0 is any free port.

    >>> str(Address("::1", 9092))
    '[::1]:9092'
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """The address in a text ``host:port``, with an IPv6 host in brackets; port 0 to 65535.

    >>> parse_address("[::1]:9092")
    Address(host='::1', port=9092)
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    well_formed = (":" in host and _IPV6.fullmatch(host)) if bracketed else _HOST.fullmatch(host)
    if not (colon and well_formed and re.fullmatch(r"[0-9]{1,5}", port) and int(port) <= 65535):
        raise ValueError("host:port, for example 127.0.0.1:9092 or [::1]:9092, with a port from 0 to 65535")
    return Address(host, int(port))


def parse_size(text: str) -> int:
    """The bytes in a text: a whole number, alone or with a unit.

    >>> parse_size("512 MiB")
    536870912
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("a number of bytes, for example 1048576, 512 KiB, 100 MiB or 2 GB")
    return int(match[1]) * unit


def parse_whole(text: str) -> int:
    """The whole number in a text of decimal digits."""
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError("a whole number")
    return int(text)


def parse_flag(text: str) -> bool:
    """The truth value in a text: true or false, yes or no, on or off, 1 or 0."""
    value = _WORDS.get(text.strip().lower())
    if value is None:
        raise ValueError("true or false")
    return value


def time_unit_ms(word: str) -> int | None:
    """How many milliseconds a unit of time has; None for a word that is none.

    >>> time_unit_ms("ms"), time_unit_ms("minutes"), time_unit_ms("parsecs")
    (1, 60000, None)
    """
    return _TIME_UNITS_MS.get(word) or _TIME_UNITS_MS.get(word.removesuffix("s"))
