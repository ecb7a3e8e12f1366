"""How fast the machine is that the tests run on, for limits that are set in processor time.

A limit such as "no turn of the loop takes more than 20 ms" holds on the machine that it was measured on. On
one with slower cores the same work takes longer, and nothing is wrong with it.
"""

from __future__ import annotations

import struct
import time
import zlib

__all__ = ("slowness",)

#: What ``_work`` takes on the machine that the limits were set on.
_REFERENCE_SECONDS = 0.003_3
_ATTEMPTS = 5


def slowness() -> float:
    """How many times longer than there the same work takes here now; at least 1."""
    return max(1.0, min(_work_seconds() for _ in range(_ATTEMPTS)) / _REFERENCE_SECONDS)


def _work_seconds() -> float:
    began = time.thread_time()
    _work()
    return time.thread_time() - began


def _work() -> int:
    """What handlers do most: small objects, dictionaries, bytes, and checksums of them."""
    total = 0
    for number in range(20_000):
        entry = {"index": b"%d" % number, "records": struct.pack(">iq", number, total)}
        total += zlib.crc32(entry["records"]) & 0xFF
    return total
