"""Where ids and tokens come from: random ones on a real node, seeded ones in a simulation."""

from __future__ import annotations

import os
import uuid
from typing import Protocol

__all__ = ("Ids", "RandomIds")


class Ids(Protocol):
    """A source of ids that nobody else has, and of tokens that nobody can guess."""

    def uuid(self) -> uuid.UUID:
        """A new id, for instance of a topic."""

    def token(self, size_bytes: int) -> bytes:
        """A random token of that size, for instance a scanner id that only its client knows."""


class RandomIds:
    """Ids and tokens from the operating system's random numbers."""

    def uuid(self) -> uuid.UUID:
        return uuid.uuid4()

    def token(self, size_bytes: int) -> bytes:
        # Not ``secrets.token_bytes``, which does the same: importing it loads hashlib, almost a mebibyte.
        return os.urandom(size_bytes)
