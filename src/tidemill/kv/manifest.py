"""The manifest of a snapshot: the file ``tidemill-snapshot.json`` in its directory, which lists its files.

One line that says how many bytes follow and their CRC-32C, then JSON with the name, size and CRC-32C of every
file. A reader gets exactly what was written, or ``CorruptData``.
"""

from __future__ import annotations

import msgspec

from tidemill.errors import CorruptData
from tidemill.records.checksum import crc32c

__all__ = ("MANIFEST_NAME", "MANIFEST_VERSION", "FileEntry", "Manifest", "pack_manifest", "unpack_manifest")

MANIFEST_NAME = "tidemill-snapshot.json"
MANIFEST_VERSION = 1
_MAGIC = b"tidemill-snapshot"


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a snapshot."""

    name: str
    size_bytes: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True):
    """What a snapshot consists of, and which state it is. ``identity`` is that of the store, in hex."""

    version: int
    snapshot_id: int
    identity: str
    log_offset: int
    created_ms: int
    files: tuple[FileEntry, ...]
    #: The leader epoch that wrote the last record below ``log_offset``; -1 if it is not known.
    leader_epoch: int = -1


#: Made at import, because msgspec completes a class while it makes its first decoder: another thread that
#: decodes meanwhile would crash the process.
_DECODER = msgspec.json.Decoder(Manifest)


def pack_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest as the content of its file."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return b"%s %d %08x\n%s" % (_MAGIC, len(body), crc32c(body), body)


def unpack_manifest(data: bytes, path: str) -> Manifest:
    """Decode a manifest; ``path`` is for the error message."""
    head, _, body = data.partition(b"\n")
    if head != b"%s %d %08x" % (_MAGIC, len(body), crc32c(body)):
        raise CorruptData("the manifest of the snapshot does not check out", path=path, position=0)
    try:
        manifest = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptData(
            f"the manifest of the snapshot is not one: {error}", path=path, position=0
        ) from error
    if manifest.version != MANIFEST_VERSION:
        raise CorruptData(
            f"the manifest has version {manifest.version}, this program knows {MANIFEST_VERSION}",
            path=path,
            position=0,
        )
    if any("/" in entry.name or entry.name in ("", ".", "..") for entry in manifest.files):
        raise CorruptData("the manifest names a file outside of the snapshot", path=path, position=0)
    return manifest
