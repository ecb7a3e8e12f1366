"""Translation of what RocksDB reports into Tidemill's own errors.

rocksdict raises a bare ``Exception`` whose text is RocksDB's status, so the text decides:

    no space, quota                       DiskFull
    corruption, a checksum, a lost file   CorruptData, with the file and the position if the text has them
    anything else                         StorageError

Errors that say that our own code is wrong (``TypeError``, ``ValueError``, ``KeyError``) pass unchanged.
"""

from __future__ import annotations

import re

from rocksdict import DbClosedError

from tidemill.errors import CorruptData, DiskFull, StorageError
from tidemill.kv.contract import WriteStalled
from tidemill.kv.faults import Translated

__all__ = ("RocksTranslated", "translate")

_NO_ROOM_TEXT = re.compile(r"no space left|disk quota exceeded|max(imum)? allowed space", re.IGNORECASE)
#: A file that the database's own list names and that is gone is damage, like bytes that do not check out.
_DAMAGE_TEXT = re.compile(r"corruption|checksum|mismatch|\bbad\b|truncated|no such file", re.IGNORECASE)
_POSITION_TEXT = re.compile(r"(?P<path>/\S+?\.(?:sst|log)|/\S*?MANIFEST-\d+)(?:\W+offset (?P<offset>\d+))?")
_IN_USE_TEXT = re.compile(r"lock hold by|while lock file|no locks available", re.IGNORECASE)
_STALL_TEXT = "write stall"


def translate(error: Exception, action: str, path: str) -> Exception:
    """The error to raise instead of ``error``; the same one if it is not about storage.

    >>> translate(Exception("IO error: No space left on device: While appending"), "write to", "/d").name
    'KAFKA_STORAGE_ERROR'
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        return Translated.translate(error, action, path)
    if isinstance(error, DbClosedError):
        return StorageError(f"cannot {action} {path}: it is closed; open it again")
    if type(error) is not Exception:
        return error
    # RocksDB breaks some messages over lines.
    text = " ".join(str(error).split())
    if _STALL_TEXT in text.lower():
        return WriteStalled(
            f"cannot {action} {path}: its flushes and compactions are behind; the disk is too slow for it"
        )
    if _NO_ROOM_TEXT.search(text):
        return DiskFull(f"cannot {action} {path}: {text}; free some space and retry")
    if _IN_USE_TEXT.search(text):
        return StorageError(
            f"cannot {action} {path}: it is open already, here or in another process ({text})"
        )
    if _DAMAGE_TEXT.search(text):
        found = _POSITION_TEXT.search(text)
        return CorruptData(
            f"cannot {action} {path}: {text}",
            path=found["path"] if found else path,
            position=int(found["offset"] or 0) if found else 0,
        )
    return StorageError(f"cannot {action} {path}: {text}")


class RocksTranslated(Translated):
    """A context that turns errors of RocksDB, and of the system, into Tidemill's.

    >>> with RocksTranslated("read", "/data/live"):
    ...     raise Exception("Corruption: block checksum mismatch in /data/live/000008.sst offset 4095 size 9")
    Traceback (most recent call last):
    tidemill.errors.CorruptData: cannot read ... (/data/live/000008.sst at byte 4095)
    """

    __slots__ = ()

    translate = staticmethod(translate)
