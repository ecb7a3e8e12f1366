"""The region of a cursor: which records it reads, and the identity that its checkpoints are bound to.

A region is a topic, some or all of its partitions, and a filter: the beginning of the key, headers, and for a
table a predicate over its columns. Its identity is bytes from which the region can be read back, so two
different regions never have the same identity. Whatever can be written in two ways (the order of partitions,
of headers) is put into one order first.

>>> region = Region("orders", UUID(int=1), partitions=(2, 0), key_prefix=b"eu-")
>>> Region.from_identity(region.identity()) == region
True
>>> str(region)
"topic orders, partitions 0 and 2, keys from b'eu-'"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tidemill.cursors.fields import FieldReader, FieldWriter
from tidemill.errors import ConfigError

__all__ = (
    "FETCHED_PARTITIONS_MAX",
    "HEADERS_MAX",
    "IDENTITY_BYTES_MAX",
    "KEY_PREFIX_BYTES_MAX",
    "PARTITIONS_MAX",
    "Region",
    "header_match",
    "key_prefix_of",
)

_VERSION: Final = 1
#: Limits of a region, which its server checks as well.
KEY_PREFIX_BYTES_MAX: Final = 4_096
HEADERS_MAX: Final = 32
HEADER_BYTES_MAX: Final = 4_096
PARTITIONS_MAX: Final = 10_000
#: Partitions in one FetchRegion: the answer is made in one turn of the node's event loop.
FETCHED_PARTITIONS_MAX: Final = 1_000
IDENTITY_BYTES_MAX: Final = 512 * 1024

HeaderMatch = tuple[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Region:
    """The records that a cursor reads.

    Attributes:
        topic: the topic's name, also for a table.
        topic_id: tells a topic from a later one of the same name.
        partitions: in order; None: all, also those that are added later.
        key_prefix: bytes that the key begins with; None: any key or none.
        headers: pairs in order; for each, the record has a header of that name and value.
        where: an encoded predicate over the columns of a table; None: every row.
    """

    topic: str
    topic_id: UUID
    partitions: tuple[int, ...] | None = None
    key_prefix: bytes | None = None
    headers: tuple[HeaderMatch, ...] = ()
    where: bytes | None = None

    def __post_init__(self) -> None:
        if self.partitions is not None:
            object.__setattr__(self, "partitions", _partitions(self.partitions))
        object.__setattr__(self, "headers", tuple(sorted(set(self.headers), key=_header_order)))
        self._check()

    def _check(self) -> None:
        if self.key_prefix is not None:
            if not self.key_prefix:
                raise ConfigError("an empty key prefix lets every key pass: leave it out")
            if len(self.key_prefix) > KEY_PREFIX_BYTES_MAX:
                raise ConfigError(
                    f"a key prefix of {len(self.key_prefix)} bytes, {KEY_PREFIX_BYTES_MAX} are the most"
                )
        if len(self.headers) > HEADERS_MAX:
            raise ConfigError(f"{len(self.headers)} headers to match, {HEADERS_MAX} are the most")
        for name, value in self.headers:
            if len(name.encode()) + len(value or b"") > HEADER_BYTES_MAX:
                raise ConfigError(
                    f"header {name[:40]!r} and its value have more than {HEADER_BYTES_MAX} bytes"
                )

    @property
    def is_filtered(self) -> bool:
        """Whether some records of its partitions may not be in it."""
        return self.key_prefix is not None or bool(self.headers) or self.where is not None

    def has_partition(self, partition: int) -> bool:
        return self.partitions is None or partition in self.partitions

    def identity(self) -> bytes:
        """The canonical bytes of the region."""
        out = FieldWriter().number(_VERSION)
        out.text(self.topic).raw(self.topic_id.bytes)
        out.optional(self.partitions, lambda numbers: out.sequence(numbers, out.number))
        out.optional(self.key_prefix, out.data)
        out.sequence(self.headers, lambda header: out.text(header[0]).optional(header[1], out.data))
        out.optional(self.where, out.data)
        return out.done()

    @classmethod
    def from_identity(cls, identity: bytes) -> Region:
        """The region with this identity. Raises ``ValueError`` for bytes that no region has."""
        read = FieldReader(identity)
        if (version := read.number()) != _VERSION:
            raise ValueError(f"an identity of version {version}, this program knows version {_VERSION}")
        topic, topic_id = read.text(), UUID(bytes=read.raw(16))
        partitions = read.optional(lambda: tuple(read.sequence(read.number)))
        key_prefix = read.optional(read.data)
        headers = tuple(read.sequence(lambda: (read.text(), read.optional(read.data))))
        where = read.optional(read.data)
        read.end()
        try:
            region = cls(topic, topic_id, partitions, key_prefix, headers, where)
        except ConfigError as error:
            raise ValueError(error.message) from error
        if region.identity() != identity:
            raise ValueError("the identity is not spelt canonically")
        return region

    def __str__(self) -> str:
        parts = [f"topic {self.topic}"]
        if self.partitions is not None:
            names = [str(each) for each in self.partitions]
            listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
            parts.append(f"partition{'s' if len(names) > 1 else ''} {listed}")
        if self.key_prefix is not None:
            parts.append(f"keys from {self.key_prefix!r}")
        parts += [f"header {name} = {value!r}" for name, value in self.headers]
        if self.where is not None:
            parts.append(f"where of {len(self.where)} bytes")
        return ", ".join(parts)

    def differences(self, other: Region) -> str:
        """In words, what ``other`` has where this one has something else."""
        fields = ("topic", "topic_id", "partitions", "key_prefix", "headers", "where")
        return "; ".join(
            f"{name} {getattr(self, name)!r}, not {getattr(other, name)!r}"
            for name in fields
            if getattr(self, name) != getattr(other, name)
        )


def key_prefix_of(prefix: bytes | str | None) -> bytes | None:
    """A caller's key prefix as bytes; text is UTF-8."""
    if prefix is None or isinstance(prefix, bytes):
        return prefix
    if isinstance(prefix, str):
        return prefix.encode()
    raise ConfigError(f"a key prefix is bytes or text, not {prefix!r}")


def header_match(headers: Mapping[str, bytes | str | None] | None) -> tuple[HeaderMatch, ...]:
    """A caller's headers to match as pairs; text is UTF-8, None is a header without a value.

    >>> header_match({"type": "order"})
    (('type', b'order'),)
    """
    found: list[HeaderMatch] = []
    if headers is not None and not isinstance(headers, Mapping):
        raise ConfigError(f"headers are values by name, as in {{'type': 'order'}}, not {headers!r}")
    for name, value in (headers or {}).items():
        if not isinstance(name, str):
            raise ConfigError(f"a header's name is text, not {name!r}")
        if not isinstance(value, bytes | str | None):
            raise ConfigError(f"header {name!r} is matched by text or bytes, not {value!r}")
        found.append((name, value.encode() if isinstance(value, str) else value))
    return tuple(found)


def _partitions(numbers: Iterable[int]) -> tuple[int, ...]:
    found = tuple(sorted(set(numbers)))
    if not found:
        raise ConfigError("a region has at least one partition; leave them out for all")
    if found[0] < 0 or len(found) > PARTITIONS_MAX:
        raise ConfigError(
            f"partitions are numbers from 0, at most {PARTITIONS_MAX} of them, not {found[0]} …"
        )
    return found


def _header_order(header: HeaderMatch) -> tuple[str, bool, bytes]:
    name, value = header
    return name, value is not None, value or b""
