"""Names of jobs and cursors in messages: what clients and coordinators must spell alike."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ("CURSOR_GROUP_PREFIX", "JOB_PREFIX", "AttemptId", "job_key")

CURSOR_GROUP_PREFIX: Final = "__tidemill_cursor:"
"""What the groups and transactional ids of cursors begin with. The offsets of such a group never expire."""
JOB_PREFIX: Final = "__tidemill_job:"
"""What the coordinator's own transactional ids begin with. No client starts a producer with such an id."""


class AttemptId(NamedTuple):
    """The identity of an attempt: its transactional id, and the producer that was started for it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


def job_key(job: str) -> str:
    """The key of a job: its transactional ids begin with it, and its coordinator is chosen by it."""
    return JOB_PREFIX + job
