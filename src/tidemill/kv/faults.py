"""What RocksDB and the operating system report, in Tidemill's own errors. The only place that translates.

rocksdict raises a bare ``Exception`` whose text is RocksDB's status, so the text decides:

    no space, quota                       DiskFull
    corruption, a checksum, a lost file   CorruptData, with the file and the position if the text has them
    anything else                         StorageError

Errors that say that our own code is wrong (``TypeError``, ``ValueError``, ``KeyError``) pass unchanged.
"""

from __future__ import annotations

import errno
import re
from types import TracebackType

from rocksdict import DbClosedError

from tidemill.errors import CorruptData, DiskFull, StorageError, SyncFailed

__all__ = ("Translated", "is_stall", "translate")

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ROOM_TEXT = re.compile(r"no space left|disk quota exceeded|max(imum)? allowed space", re.IGNORECASE)
#: A file that the database's own list names and that is gone is damage, like bytes that do not check out.
_DAMAGE_TEXT = re.compile(r"corruption|checksum|mismatch|\bbad\b|truncated|no such file", re.IGNORECASE)
_PLACE_TEXT = re.compile(r"(?P<path>/\S+?\.(?:sst|log)|/\S*?MANIFEST-\d+)(?:\W+offset (?P<offset>\d+))?")
_IN_USE_TEXT = re.compile(r"lock hold by|while lock file|no locks available", re.IGNORECASE)
_STALL_TEXT = "write stall"


def is_stall(error: Exception) -> bool:
    """Whether a write was refused because flushes or compactions are behind; nothing was written."""
    return _STALL_TEXT in str(error).lower()


def translate(error: Exception, action: str, path: str) -> Exception:
    """The error to raise in the place of ``error``; the same one if it is not about storage.

    >>> translate(Exception("IO error: No space left on device: While appending"), "write to", "/d").name
    'KAFKA_STORAGE_ERROR'
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError):
        return _translate_os(error, action, path)
    if isinstance(error, DbClosedError):
        return StorageError(f"cannot {action} {path}: it is closed; open it again")
    if type(error) is not Exception:
        return error
    # RocksDB breaks some messages over lines.
    text = " ".join(str(error).split())
    if _NO_ROOM_TEXT.search(text):
        return DiskFull(f"cannot {action} {path}: {text}; free some space and retry")
    if _IN_USE_TEXT.search(text):
        return StorageError(
            f"cannot {action} {path}: it is open already, here or in another process ({text})"
        )
    if _DAMAGE_TEXT.search(text):
        place = _PLACE_TEXT.search(text)
        return CorruptData(
            f"cannot {action} {path}: {text}",
            path=place["path"] if place else path,
            position=int(place["offset"] or 0) if place else 0,
        )
    return StorageError(f"cannot {action} {path}: {text}")


def _translate_os(error: OSError, action: str, path: str) -> StorageError:
    message = f"cannot {action} {path}: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        return DiskFull(f"{message}; free some space and retry")
    if action.startswith("sync"):
        return SyncFailed(message)
    return StorageError(message)


class Translated:
    """A context that turns what is raised in it into Tidemill's errors. May be entered many times.

    >>> with Translated("read", "/data/live"):
    ...     raise Exception("Corruption: block checksum mismatch in /data/live/000008.sst offset 4095 size 9")
    Traceback (most recent call last):
    tidemill.errors.CorruptData: cannot read ... (/data/live/000008.sst at byte 4095)
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: str) -> None:
        self._action = action
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            translated = translate(error, self._action, self._path)
            if translated is not error:
                raise translated from error
