"""Removing the files of what was deleted, in a thread: large files take long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from tidemill.log.segments.segment import Segment
    from tidemill.replication.log_work.compactor import Compactor
    from tidemill.replication.partition import Partition
    from tidemill.replication.replicas import Replicas

__all__ = ("FileRemoval",)

logger = logging.getLogger(__name__)


class FileRemoval:
    """Removes files of deleted topics and old segments in one thread. Failures are logged."""

    def __init__(self, replicas: Replicas, compactor: Compactor, thread: Executor) -> None:
        self._replicas = replicas
        self._compactor = compactor
        self._thread = thread

    def remove_topic(self, topic: str, topic_id: UUID) -> Future[None]:
        """Remove a deleted topic's files, once the compactor no longer uses them."""
        return self._submit(self._remove_topic, topic, topic_id)

    def _remove_topic(self, topic: str, topic_id: UUID) -> None:
        self._compactor.wait_until_off(topic_id)
        self._replicas.remove_files(topic, topic_id)

    def remove_partition(self, topic: str, topic_id: UUID, index: int) -> Future[None]:
        """Remove the files of a partition that has moved away, once the compactor no longer uses them."""
        return self._submit(self._remove_partition, topic, topic_id, index)

    def _remove_partition(self, topic: str, topic_id: UUID, index: int) -> None:
        self._compactor.wait_until_off(topic_id)
        self._replicas.remove_partition(topic, topic_id, index)

    def discard(self, partition: Partition, segments: list[Segment]) -> None:
        """Remove old segments that are not part of their log any more."""
        self._replicas.damage.forget_below(partition.topic_id, partition.index, partition.log_start_offset)
        if segments:
            self._submit(partition.discard, segments)

    def _submit(self, remove: Callable[..., None], *what: object) -> Future[None]:
        done = self._thread.submit(remove, *what)
        done.add_done_callback(_report_failure)
        return done

    def close(self) -> None:
        """Wait until everything that was asked for is removed."""
        self._thread.shutdown(wait=True)


def _report_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("old files could not be removed: %s", error)
