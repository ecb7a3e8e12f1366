"""Deadlines by key, with a cheap lower bound of the next one."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ("Deadlines",)

K = TypeVar("K")


class Deadlines(Generic[K]):
    """``next_ms`` may be early, because a deadline that moves does not recompute it; it is never late."""

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._earliest_ms: int | None = None

    def __contains__(self, key: object) -> bool:
        return key in self._at

    def set(self, key: K, at_ms: int) -> None:
        """Let ``key`` be due at ``at_ms``, whatever was set before."""
        self._at[key] = at_ms
        if self._earliest_ms is None or at_ms < self._earliest_ms:
            self._earliest_ms = at_ms

    def set_if_absent(self, key: K, at_ms: int) -> None:
        """Like ``set``, unless there is a deadline already."""
        if key not in self._at:
            self.set(key, at_ms)

    def cancel(self, key: K) -> None:
        """Forget a deadline, if there is one."""
        self._at.pop(key, None)
        if not self._at:
            self._earliest_ms = None

    @property
    def next_ms(self) -> int | None:
        """When ``due`` is needed next."""
        return self._earliest_ms

    def due(self, now_ms: int) -> list[K]:
        """The keys that are due, the longest overdue first. They stay until they are cancelled or set."""
        found = sorted((at_ms, index) for index, at_ms in enumerate(self._at.values()) if at_ms <= now_ms)
        keys = list(self._at)
        self._earliest_ms = min(self._at.values(), default=None)
        return [keys[index] for _, index in found]
