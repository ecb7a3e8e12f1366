"""Cutting the end of a log in one go: what a follower does in three steps, with a thread in between."""

from __future__ import annotations

from tidemill.errors import StorageError
from tidemill.log.log import PartitionLog
from tidemill.log.segments.torn import Cut
from tidemill.log.truncation import TruncationJob

__all__ = ("start_anew_at", "truncate_to")


def truncate_to(log: PartitionLog, offset: int, now_ms: int) -> list[Cut]:
    """Cut everything from the batch that holds ``offset`` on, durably; returns what was taken off."""
    return _carry_out(log, log.begin_truncation(offset, now_ms))


def start_anew_at(log: PartitionLog, offset: int, now_ms: int) -> list[Cut]:
    """Cut everything, durably, and go on with an empty log at ``offset``."""
    return _carry_out(log, log.begin_starting_anew(offset, now_ms))


def _carry_out(log: PartitionLog, job: TruncationJob | None) -> list[Cut]:
    if job is None:
        return []
    try:
        job.run()
    except StorageError as error:
        log.truncation_failed(job, error)
        raise
    log.finish_truncation(job)
    return job.cuts
