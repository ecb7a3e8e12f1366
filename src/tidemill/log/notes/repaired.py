"""The mark of a replica that was repaired with loss: what it has is not all that the cluster counts on.

``tidemill log repair`` leaves it in the directory of a partition of a cluster, before it changes anything.
The node then registers the replica as lost, so that nobody elects it, and has it start anew with its leader's
records. The mark goes with the old records; or when an operator has the replica lead as it is.
"""

from __future__ import annotations

from tidemill.log.storage import Storage, write_atomic

__all__ = ("REPAIRED_NAME", "is_repaired", "mark_repaired", "unmark_repaired")

REPAIRED_NAME = "repaired-with-loss"


def mark_repaired(storage: Storage, directory: str) -> None:
    """Note durably that records are missing."""
    write_atomic(storage, f"{directory}/{REPAIRED_NAME}", b"")


def is_repaired(storage: Storage, directory: str) -> bool:
    """Whether the mark is there."""
    return storage.exists(f"{directory}/{REPAIRED_NAME}")


def unmark_repaired(storage: Storage, directory: str) -> None:
    """Remove the mark, if it is there; durable after the next sync of the directory."""
    if is_repaired(storage, directory):
        storage.remove(f"{directory}/{REPAIRED_NAME}")
