"""Translation of what the operating system reports into Tidemill's own errors."""

from __future__ import annotations

from types import TracebackType

from tidemill.errors import DiskFull, StorageError, SyncFailed

__all__ = ("Translated",)


class Translated:
    """A context that turns what is raised in it into Tidemill's errors. May be entered many times.

    An engine has a subclass, which knows what its library raises.
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
            translated = self.translate(error, self._action, self._path)
            if translated is not error:
                raise translated from error

    @staticmethod
    def translate(error: Exception, action: str, path: str) -> Exception:
        """The error to raise instead of ``error``; the same one if it is not about storage."""
        if not isinstance(error, OSError):
            return error
        message = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in DiskFull.ERRNOS:
            return DiskFull(f"{message}; free some space and retry")
        if action.startswith("sync"):
            return SyncFailed(message)
        return StorageError(message)
