"""Errors of cursors: each says which cursor, what is stored and what was expected.

The tree, below ``ApiError``::

    CursorError
    ├── CheckpointRegionMismatch   the checkpoint is of another region
    ├── CheckpointCorrupt          the checkpoint does not check out, or is of a newer version
    ├── CheckpointAheadOfLog       the position is behind the log's end: the log has lost records
    ├── CheckpointBelowLogStart    retention has deleted records that were not read yet
    ├── CheckpointDiverged         the log was cut below the position, and has grown again
    ├── CheckpointWriteFailed      the position could not be stored; what was delivered is not committed
    ├── CursorFenced               another process has taken the cursor over
    ├── CursorMoved                the stored position is not where this batch begins
    ├── CursorInUse                another process owns the cursor
    ├── CursorNotFound             no cursor of that name is kept by the cluster
    └── NoOpenTransaction          a commit into a database without an open transaction
"""

from __future__ import annotations

from tidemill.errors import ApiError, ErrorCode

__all__ = (
    "CheckpointAheadOfLog",
    "CheckpointBelowLogStart",
    "CheckpointCorrupt",
    "CheckpointDiverged",
    "CheckpointRegionMismatch",
    "CheckpointWriteFailed",
    "CursorError",
    "CursorFenced",
    "CursorInUse",
    "CursorMoved",
    "CursorNotFound",
    "NoOpenTransaction",
)


class CursorError(ApiError):
    """Base of the errors of cursors.

    ``where`` names the checkpoint: a path, or the cursor's name and where that is kept. ``stored`` is what
    was found there, ``expected`` what should have been; both in words, or None where that makes no sense.
    """

    kafka_code = ErrorCode.invalid_request

    def __init__(self, message: str, *, where: str, stored: object = None, expected: object = None) -> None:
        details = "" if stored is None and expected is None else f" (stored: {stored}; expected: {expected})"
        super().__init__(self.kafka_code, f"{where}: {message}{details}")
        self.where = where
        self.stored = stored
        self.expected = expected


class CheckpointRegionMismatch(CursorError):
    """The checkpoint is of another region: another topic, other partitions, or another filter."""


class CheckpointCorrupt(CursorError):
    """The checkpoint does not check out: its bytes are damaged, cut short, or of a newer version."""

    kafka_code = ErrorCode.corrupt_message


class CheckpointAheadOfLog(CursorError):
    """The position is above the end of the log: records that were delivered are not in it any more."""

    kafka_code = ErrorCode.offset_out_of_range


class CheckpointBelowLogStart(CursorError):
    """The position is below the start of the log: records were deleted before they were delivered."""

    kafka_code = ErrorCode.offset_out_of_range


class CheckpointDiverged(CursorError):
    """The log was cut below the position and has grown again: other records have these offsets now."""

    kafka_code = ErrorCode.offset_out_of_range


class CheckpointWriteFailed(CursorError):
    """The position could not be stored. What was delivered since the last commit comes again."""

    kafka_code = ErrorCode.kafka_storage_error


class CursorFenced(CursorError):
    """Another process has taken the cursor over. This one must be opened again to go on."""

    kafka_code = ErrorCode.fenced_member_epoch


class CursorMoved(CursorError):
    """The stored position is not the one that this batch begins at.

    The transaction of the last commit was rolled back, or somebody has reset the cursor. The cursor has gone
    to the stored position: what comes next is what follows it.
    """

    kafka_code = ErrorCode.invalid_commit_offset_size


class CursorInUse(CursorError):
    """Another process owns the cursor, and has given a sign of life recently."""

    kafka_code = ErrorCode.rebalance_in_progress


class CursorNotFound(CursorError):
    """The cluster keeps no cursor of that name."""

    kafka_code = ErrorCode.group_id_not_found


class NoOpenTransaction(CursorError):
    """The position was to be stored in a database, outside of a transaction of the caller."""

    kafka_code = ErrorCode.invalid_txn_state
