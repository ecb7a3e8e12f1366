"""Copies of metadata stores, as a backup that is put back would be."""

from __future__ import annotations

from collections.abc import Callable

from support.memory_store import MemoryStore
from tidemill.control.stores.local import monotonic_ms
from tidemill.control.stores.store import MetadataStore, Put, Txn

__all__ = ("FILLER", "copy_at_same_revisions")

#: Writes a key that is none of the image's.
FILLER = Txn(puts=(Put("filler", b""),))


async def copy_at_same_revisions(
    store: MetadataStore, *, clock_ms: Callable[[], int] = monotonic_ms
) -> MemoryStore:
    """A store with the same keys at the same revisions, without leases."""
    copy, stored = MemoryStore(clock_ms=clock_ms), await store.read()
    for revision in range(1, stored.revision + 1):
        puts = [
            Put(key, entry.value) for key, entry in stored.entries.items() if entry.mod_revision == revision
        ]
        await copy.commit(Txn(puts=tuple(puts) or FILLER.puts))
    return copy
