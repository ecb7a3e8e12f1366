"""Settings of the transaction coordinator. Those that a node can set have the node's defaults.

``tidemill.config.settings`` holds these defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tidemill.config.settings import Settings

__all__ = ("TransactionSettings",)

_NODE: Final = Settings()


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """Limits and times of transactions. All times are in milliseconds; names in ``code`` are Kafka's.

    Attributes:
        max_timeout_ms: ``transaction.max.timeout.ms``: the longest timeout that a producer may ask for.
        expiration_ms: ``transactional.id.expiration.ms``: how long an id that nobody uses is remembered.
        end_wait_ms: how long the answer to EndTxn waits for the markers, so that what is committed is
            visible when the producer hears of it. A decision is final without them.
        publication_wait_ms: the same for the answer to PublishAttempts.
        publication_retention_ms: how long after a job's last publication it is remembered.
        attempts_max: the most attempts of one publication.
        slots_max: the most attempts that a job may have at a time, those that others left behind included.
        jobs_max: the most jobs of a shard, those included of which only the last publication is remembered.
        publication_bytes_max: the most bytes that the records of one publication may have, before they are
            compressed.
    """

    max_timeout_ms: int = _NODE.transaction_max_timeout_ms
    expiration_ms: int = _NODE.transactional_id_expiration_ms
    end_wait_ms: int = 1_000
    publication_wait_ms: int = 10_000
    publication_retention_ms: int = _NODE.job_publication_retention_ms
    attempts_max: int = 1_000
    slots_max: int = 2_000
    jobs_max: int = 10_000
    publication_bytes_max: int = 64 * 1024 * 1024
