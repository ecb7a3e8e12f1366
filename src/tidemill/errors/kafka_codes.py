"""``ErrorCode``, Kafka's own table of codes, from kio.

kio imports hypothesis wherever that is installed, and registers a strategy for each of its types, which takes
longer than everything else that a client loads. Only generated values of kio's types need it, and nobody here
makes those. So the module of kio that does it is loaded here, before any other of kio, while hypothesis looks
as if it were not installed. Afterwards it can be imported as ever, and a process that has it already is left
alone. The part of kio that is loaded in that moment takes a millisecond or two; another thread that imports
hypothesis just then is told that it is missing.

Importing ``tidemill.errors`` is enough; what imports kio imports that first.
"""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ("ErrorCode",)


def _load_types_without_hypothesis() -> None:
    if "hypothesis" in sys.modules:
        return
    # None is Python's own mark of a module that must not be found.
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import_module("kio.static.primitive")
    finally:
        del sys.modules["hypothesis"]


_load_types_without_hypothesis()

from kio.schema.errors import ErrorCode  # noqa: E402 - after its types
