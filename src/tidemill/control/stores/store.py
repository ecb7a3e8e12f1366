"""The ``MetadataStore`` protocol: the few things that the control plane asks of its storage engine.

Rules that every implementation obeys (they are etcd's, so that etcd can be one):

- A store has one revision number. Every transaction that changes a key raises it by at least one; it never
  goes back.
- A key is printable ASCII. It has a value and the revision that last wrote it (``mod_revision``); 0 means
  absent.
- A transaction is all or nothing, and durable when ``commit`` returns. It is guarded by compared revisions.
- Success and ``MetadataConflict`` are certain. A store on other machines cannot always know: a request that
  was sent and got no answer may have been done, or may still be done a little later. Then ``commit`` and
  ``revoke`` raise ``OutcomeUnknown``: read again and plan again. ``StoreUnavailable`` means that nothing was
  written, or, from the other calls, that asking again does no harm.
- The limits below are checked before anything happens.
- A watch delivers whole transactions in revision order, none lost, none twice. A watch that would have to
  skip something because the history is gone ends with ``RevisionCompacted``. A watch outlives a store that is
  unavailable: it goes on where it was.
- Reads and commits are linearizable: none is at a lower revision than anything that was seen before it began.
  A store of which that is not true has lost data, or an older copy of it was restored: ``MetadataWentBack``.
- A key that is bound to a store lease disappears, as one change, when the lease expires or is revoked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidemill.errors import ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping

__all__ = (
    "ACCEPT_METADATA",
    "KEY_BYTES_MAX",
    "LOST_METADATA",
    "REQUEST_BYTES_MAX",
    "RESTORE_METADATA",
    "TXN_OPERATIONS_MAX",
    "VALUE_BYTES_MAX",
    "Change",
    "ChangeBatch",
    "Compare",
    "Entry",
    "MetadataStore",
    "MetadataWentBack",
    "OutcomeUnknown",
    "Put",
    "RevisionCompacted",
    "StoreClosed",
    "StoreLeaseNotFound",
    "StoreUnavailable",
    "StoredKeys",
    "TransactionTooLarge",
    "Txn",
    "check_txn",
    "request_bytes",
)

TXN_OPERATIONS_MAX = 128
"""Limit of compares + puts + deletes. etcd allows 128 in each list; the sum is the careful reading."""

VALUE_BYTES_MAX = 1024 * 1024
REQUEST_BYTES_MAX = 1408 * 1024
"""Limit of a whole transaction. etcd's is 1536 KiB; what is left is for the cluster's prefix of every key."""

KEY_BYTES_MAX = 512

RESTORE_METADATA = (
    "etcd has lost data or was restored. Stop all nodes, restore etcd's newest copy, and start them again"
)
ACCEPT_METADATA = (
    "if what etcd has is to count, stop all nodes, set seen_revision to 0 and incarnations to [] in"
    " cluster-identity.json on every node, and start them again"
)
LOST_METADATA = f"{RESTORE_METADATA}; or, {ACCEPT_METADATA}"
"""What an operator is told wherever metadata turns out to be older than what was seen of it."""

_OPERATION_OVERHEAD_BYTES = 32
_KEY = re.compile(rf"[\x21-\x7e]{{1,{KEY_BYTES_MAX}}}")


class TransactionTooLarge(TidemillError):
    """A transaction that is over one of the limits of this module. Nothing was written."""

    code = ErrorCode.policy_violation


class RevisionCompacted(TidemillError):
    """The asked revision is older than the history that the store keeps: read everything again."""


class MetadataWentBack(TidemillError):
    """The store is no later state of what was seen of it: it has lost data, or an old copy was restored."""

    code = ErrorCode.inconsistent_cluster_id

    def __init__(self, what: str) -> None:
        """``what`` says how that was noticed."""
        super().__init__(f"{what}: {LOST_METADATA}")


class StoreLeaseNotFound(TidemillError):
    """The store lease does not exist, has expired or was revoked; the keys bound to it are gone."""


class StoreClosed(TidemillError):
    """The store was closed, here or by a failure that it reported before."""

    code = ErrorCode.broker_not_available


class StoreUnavailable(TidemillError):
    """The store cannot be reached or does not answer. Nothing was written; call again later."""

    code = ErrorCode.request_timed_out


class OutcomeUnknown(TidemillError):
    """A write was sent and no answer came: it was done, or not, or will be. Read again and plan again."""

    code = ErrorCode.request_timed_out


class Entry(NamedTuple):
    """A key's value and the revision that wrote it last."""

    value: bytes
    mod_revision: int


class StoredKeys(NamedTuple):
    """All keys under a prefix as they were at one revision."""

    revision: int
    entries: Mapping[str, Entry]


class Change(NamedTuple):
    """One key of a transaction. ``value`` is None if the key was deleted."""

    key: str
    value: bytes | None


class ChangeBatch(NamedTuple):
    """One whole transaction. ``changes`` is sorted by key and names each key once."""

    revision: int
    changes: tuple[Change, ...]


class Compare(NamedTuple):
    """A guard of a transaction: ``key`` must have been written last at ``mod_revision`` (0: is absent)."""

    key: str
    mod_revision: int


class Put(NamedTuple):
    """Write ``key``. A ``lease_id`` other than 0 binds it to that store lease; 0 unbinds it."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Txn:
    """Guards and writes that are committed together. It writes (puts or deletes) a key at most once."""

    compares: tuple[Compare, ...] = ()
    puts: tuple[Put, ...] = ()
    deletes: tuple[str, ...] = ()


class MetadataStore(Protocol):
    """A durable, watchable map of keys to values. The rules are at the top of this module."""

    async def read(self, prefix: str = "", *, revision: int | None = None) -> StoredKeys:
        """All keys that start with ``prefix``, now or as of ``revision``.

        Raises ``RevisionCompacted`` if the history does not reach back that far, and ``ValueError`` for a
        revision that does not exist yet.
        """
        ...

    async def commit(self, txn: Txn) -> int:
        """Commit and return the revision. Durable on return.

        The revision stays as it was if the transaction changed nothing (it only compared, or deleted absent
        keys). Raises ``MetadataConflict`` if a compare fails, ``TransactionTooLarge`` over a limit and
        ``StoreLeaseNotFound`` for a put with a lease that is gone; in all three cases nothing was written.
        Raises ``OutcomeUnknown`` if it may have been written.
        """
        ...

    def watch(self, from_revision: int) -> AsyncGenerator[ChangeBatch]:
        """Every transaction with a revision of at least ``from_revision``, for as long as the store is open.

        Raises ``RevisionCompacted`` when a transaction that it should deliver is gone from the history, and
        ``MetadataWentBack`` if ``from_revision`` is more than one above the store's revision: the caller has
        seen the revision before it.
        """
        ...

    async def compact(self, revision: int) -> None:
        """Forget the history before ``revision``, but no key. The store may do so by itself, too.

        Afterwards, reads of revisions before it and watches from it or before raise ``RevisionCompacted``.
        What is compacted already stays so. Raises ``ValueError`` for a revision that does not exist yet.
        """
        ...

    async def grant_lease(self, ttl_ms: int) -> int:
        """Grant a store lease that lives for ``ttl_ms`` unless it is kept alive; gives its id (never 0).

        A store may round the time up.
        """
        ...

    async def keep_alive(self, lease_id: int) -> None:
        """Renew the store lease for its time to live. Raises ``StoreLeaseNotFound`` if it is gone."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End the store lease and delete its keys. Raises ``StoreLeaseNotFound`` if it is gone.

        Raises ``OutcomeUnknown`` if it may have been ended.
        """
        ...

    async def close(self) -> None:
        """Release everything. Watches end; later calls raise ``StoreClosed``. May be called twice."""
        ...


def request_bytes(operations: Iterable[tuple[str, int]]) -> int:
    """Size of a request of (key, value size) operations, a little over what etcd would count."""
    return sum(len(key) + value_bytes + _OPERATION_OVERHEAD_BYTES for key, value_bytes in operations)


def check_txn(txn: Txn) -> None:
    """Raise ``TransactionTooLarge`` over a limit, ``ValueError`` for a transaction that has no meaning."""
    operations = len(txn.compares) + len(txn.puts) + len(txn.deletes)
    if operations > TXN_OPERATIONS_MAX:
        raise TransactionTooLarge(
            f"a metadata transaction of {operations} operations is over the limit of {TXN_OPERATIONS_MAX};"
            " split it into several"
        )
    written = [put.key for put in txn.puts] + list(txn.deletes)
    if len(set(written)) != len(written):
        raise ValueError("a metadata transaction writes the same key twice; keep the last write only")
    for key in written + [compare.key for compare in txn.compares]:
        if not _KEY.fullmatch(key):
            raise ValueError(
                f"metadata key {key[:80]!r} is not 1 to {KEY_BYTES_MAX} printable ASCII characters"
            )
    for put in txn.puts:
        if len(put.value) > VALUE_BYTES_MAX:
            raise TransactionTooLarge(
                f"the value of metadata key {put.key!r} has {len(put.value)} bytes, over the limit of"
                f" {VALUE_BYTES_MAX}; store less under one key"
            )
    sizes = [(put.key, len(put.value)) for put in txn.puts]
    sizes += [(key, 0) for key in txn.deletes] + [(compare.key, 0) for compare in txn.compares]
    total_bytes = request_bytes(sizes)
    if total_bytes > REQUEST_BYTES_MAX:
        raise TransactionTooLarge(
            f"a metadata transaction of {total_bytes} bytes is over the limit of {REQUEST_BYTES_MAX};"
            " split it into several"
        )
