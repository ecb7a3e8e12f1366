"""Checkpoints in bytes: versioned, checksummed, and bound to a cursor's name and region. Pure.

A checkpoint holds one entry for each partition: the fencing epoch of its owner, the position, and the offsets
above it that are finished already. The bytes are

    "TMCURSOR"   version (u16)   length of the body (u32)   body   CRC-32C of everything before (u32)

A changed or missing byte is noticed: ``decode`` gives what ``encode`` was given, or raises.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tidemill.cursors.errors import CheckpointCorrupt, CheckpointRegionMismatch
from tidemill.cursors.fields import FieldReader, FieldWriter
from tidemill.cursors.position import FINISHED_AHEAD_MAX, Position
from tidemill.cursors.region import Region
from tidemill.records.checksum import crc32c

__all__ = (
    "CHECKPOINT_BYTES_MAX",
    "Checkpoint",
    "Entry",
    "check_finished",
    "check_identity",
    "pack_finished",
    "unpack_finished",
)

_MAGIC: Final = b"TMCURSOR"
_VERSION: Final = 1
_HEAD: Final = struct.Struct(">8sHI")
_CHECKSUM: Final = struct.Struct(">I")
#: No checkpoint is larger; a file that is was not written by a cursor.
CHECKPOINT_BYTES_MAX: Final = 64 * 1024 * 1024


class Entry(NamedTuple):
    """The checkpoint of one partition."""

    epoch: int
    position: Position
    finished: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of a cursor: its name, its region's identity, and the entries of some partitions."""

    name: str
    identity: bytes
    entries: Mapping[int, Entry]

    def encode(self) -> bytes:
        out = FieldWriter().text(self.name).data(self.identity)

        def write(item: tuple[int, Entry]) -> None:
            partition, (epoch, position, finished) = item
            out.number(partition).number(epoch)
            out.signed(position.offset).signed(position.leader_epoch).flag(position.started)
            out.data(pack_finished(position.offset, finished))

        out.sequence(sorted(self.entries.items()), write)
        body = out.done()
        data = _HEAD.pack(_MAGIC, _VERSION, len(body)) + body
        return data + _CHECKSUM.pack(crc32c(data))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Checkpoint:
        """The checkpoint in ``data``. Raises ``CheckpointCorrupt``, which names it by ``where``."""
        try:
            return cls._decode(data)
        except (ValueError, struct.error) as error:
            raise CheckpointCorrupt(
                f"the checkpoint cannot be used: {error}; restore it, or delete it to begin anew",
                where=where,
                stored=f"{len(data)} bytes",
                expected=f"a checkpoint of version {_VERSION} with a checksum that fits",
            ) from error

    @classmethod
    def _decode(cls, data: bytes) -> Checkpoint:
        magic, version, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("it does not begin as a checkpoint does")
        end = _HEAD.size + length
        if len(data) != end + _CHECKSUM.size:
            raise ValueError(f"it has {len(data)} bytes instead of {end + _CHECKSUM.size}")
        if _CHECKSUM.unpack_from(data, end)[0] != crc32c(data[:end]):
            raise ValueError("its checksum does not fit its bytes")
        if version != _VERSION:
            raise ValueError(f"it is of version {version}, written by a newer program")
        read = FieldReader(data[_HEAD.size : end])
        name, identity = read.text(), read.data()

        def entry() -> tuple[int, Entry]:
            partition, epoch = read.number(), read.number()
            position = Position(read.signed(), read.signed(), read.flag())
            return partition, Entry(epoch, position, unpack_finished(position.offset, read.data()))

        entries = dict(read.sequence(entry))
        read.end()
        return cls(name, identity, entries)

    def check(self, name: str, region: Region, where: str) -> None:
        """Raise ``CheckpointRegionMismatch`` unless it is of this cursor and this region."""
        if self.name != name:
            raise CheckpointRegionMismatch(
                "the checkpoint is of another cursor", where=where, stored=self.name, expected=name
            )
        check_identity(self.identity, region, where)


def check_identity(stored: bytes, region: Region, where: str) -> None:
    """Raise ``CheckpointRegionMismatch`` unless ``stored`` is the identity of ``region``."""
    if stored == region.identity():
        return
    try:
        found: object = Region.from_identity(stored)
        differs = f": {found.differences(region)}" if isinstance(found, Region) else ""
    except ValueError:
        found, differs = f"an identity of {len(stored)} bytes", ""
    raise CheckpointRegionMismatch(
        f"the checkpoint is of another region{differs}; give this cursor another name, or delete the other",
        where=where,
        stored=found,
        expected=region,
    )


def pack_finished(offset: int, finished: Iterable[int]) -> bytes:
    """Finished offsets from ``offset`` on as a bitmap, its last byte not zero; empty if there are none."""
    bits = 0
    for each in finished:
        if not 0 <= each - offset < FINISHED_AHEAD_MAX:
            raise ValueError(f"offset {each} is not within {FINISHED_AHEAD_MAX} of {offset}")
        bits |= 1 << (each - offset)
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def check_finished(data: bytes) -> None:
    """Raise ``ValueError`` for a bitmap that is too long, or not the shortest."""
    if len(data) * 8 > FINISHED_AHEAD_MAX or (data and not data[-1]):
        raise ValueError(f"finished offsets of {len(data)} bytes are not as they are written")


def unpack_finished(offset: int, data: bytes) -> tuple[int, ...]:
    """The offsets in a bitmap. Raises ``ValueError`` for one that ``check_finished`` refuses."""
    check_finished(data)
    bits = int.from_bytes(data, "little")
    return tuple(offset + index for index in range(bits.bit_length()) if bits >> index & 1)
