"""A ``MetadataStore`` in memory, with the semantics of the durable ones.

For simulations: the object stands for storage, so it survives the crash of the simulated nodes that use it.
Every call is done when it returns, in one step and without a thread, so a seeded scheduler stays in control.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from tidemill.control.stores.local import LocalStore, check_watchable, monotonic_ms
from tidemill.control.stores.store import Change, ChangeBatch, Entry, RevisionCompacted, StoredKeys, Txn
from tidemill.errors import MetadataConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ("MemoryStore",)


class MemoryStore(LocalStore):
    """A ``MetadataStore`` in memory. Watches can start ``history_revisions`` transactions back."""

    def __init__(self, *, history_revisions: int = 1_000, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        super().__init__(_MemoryEngine(history_revisions), clock_ms)


class _Version(NamedTuple):
    mod_revision: int
    value: bytes | None
    lease_id: int


class _MemoryEngine:
    """Keys and their history in memory.

    Invariant: a key's versions rise in revision, and the oldest is at or before the compacted revision unless
    the key did not exist then; ``_batches[i]`` has revision ``_compacted + 1 + i``.
    """

    def __init__(self, history_revisions: int) -> None:
        self._history_revisions = history_revisions
        self._revision = 0
        self._compacted = 0
        self._versions: dict[str, list[_Version]] = {}
        self._batches: list[ChangeBatch] = []

    def read(self, prefix: str, revision: int | None) -> StoredKeys:
        at = self._revision if revision is None else revision
        if at < self._compacted:
            raise RevisionCompacted(f"metadata revision {at} is gone; the oldest kept is {self._compacted}")
        if at > self._revision:
            raise ValueError(f"metadata revision {at} does not exist yet; the newest is {self._revision}")
        entries: dict[str, Entry] = {}
        for key in sorted(self._versions):
            if not key.startswith(prefix):
                continue
            for version in reversed(self._versions[key]):
                if version.mod_revision <= at:
                    if version.value is not None:
                        entries[key] = Entry(version.value, version.mod_revision)
                    break
        return StoredKeys(at, entries)

    def commit(self, txn: Txn) -> int:
        for compare in txn.compares:
            found = self._mod_revision(compare.key)
            if found != compare.mod_revision:
                raise MetadataConflict(
                    f"metadata key {compare.key!r} is at revision {found}, not {compare.mod_revision};"
                    " read it again and retry"
                )
        writes = {put.key: _Version(self._revision + 1, put.value, put.lease_id) for put in txn.puts}
        for key in txn.deletes:
            if self._mod_revision(key):
                writes[key] = _Version(self._revision + 1, None, 0)
        return self._write(writes)

    def history(self, from_revision: int, batches_max: int) -> Sequence[ChangeBatch]:
        if from_revision <= self._compacted:
            raise RevisionCompacted(
                f"the metadata history before revision {self._compacted + 1} is gone and a watch asked for"
                f" {from_revision}; read everything again and watch from there"
            )
        check_watchable(from_revision, self._revision)
        start = bisect_left(self._batches, from_revision, key=lambda batch: batch.revision)
        return self._batches[start : start + batches_max]

    def compact(self, revision: int) -> None:
        if revision > self._revision:
            raise ValueError(
                f"metadata revision {revision} does not exist yet; the newest is {self._revision}"
            )
        if revision > self._compacted:
            self._compact(revision)

    def keys_of_lease(self, lease_id: int) -> Sequence[str]:
        return sorted(key for key, versions in self._versions.items() if versions[-1].lease_id == lease_id)

    def delete_keys(self, keys: Sequence[str]) -> None:
        self._write({key: _Version(self._revision + 1, None, 0) for key in keys})

    def close(self) -> None:
        """Do nothing: memory needs no closing."""

    def _mod_revision(self, key: str) -> int:
        versions = self._versions.get(key)
        return versions[-1].mod_revision if versions and versions[-1].value is not None else 0

    def _write(self, writes: dict[str, _Version]) -> int:
        if not writes:
            return self._revision
        self._revision += 1
        for key, version in writes.items():
            self._versions.setdefault(key, []).append(version)
        changes = tuple(Change(key, writes[key].value) for key in sorted(writes))
        self._batches.append(ChangeBatch(self._revision, changes))
        # In strides, so that the cost of a commit does not grow with the history.
        if len(self._batches) >= 2 * self._history_revisions:
            self._compact(self._revision - self._history_revisions)
        return self._revision

    def _compact(self, revision: int) -> None:
        gone = revision - self._compacted
        for key in {change.key for batch in self._batches[:gone] for change in batch.changes}:
            versions = self._versions[key]
            superseded = max(i for i, version in enumerate(versions) if version.mod_revision <= revision)
            kept = versions[superseded:]
            if kept[0].value is None:
                kept = kept[1:]
            if kept:
                self._versions[key] = kept
            else:
                del self._versions[key]
        del self._batches[:gone]
        self._compacted = revision
