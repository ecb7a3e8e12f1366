"""Settings of the transaction coordinator, with Kafka's defaults and, in the docstring, Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("TransactionSettings",)


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """Limits and times. All times are in milliseconds.

    Attributes:
        partitions: ``transaction.state.log.num.partitions``; must not change while the topic exists.
        max_timeout_ms: ``transaction.max.timeout.ms``: the longest timeout that a producer may ask for.
        expiration_ms: ``transactional.id.expiration.ms``: how long an id that nobody uses is remembered.
        end_wait_ms: how long the answer to EndTxn waits for the markers, so that what is committed is
            visible when the producer hears of it. A decision is final without them.
        publication_wait_ms: the same for the answer to PublishAttempts.
        publication_retention_ms: how long after a job's last publication it is remembered.
        attempts_max: the most attempts of one publication.
        slots_max: the most attempts that a job may have at a time, those that others left behind included.
        publication_bytes_max: the most bytes that the records of one publication may have, before they are
            compressed.
    """

    partitions: int = 50
    max_timeout_ms: int = 900_000
    expiration_ms: int = 7 * 24 * 60 * 60 * 1_000
    end_wait_ms: int = 1_000
    publication_wait_ms: int = 10_000
    publication_retention_ms: int = 90 * 24 * 60 * 60 * 1_000
    attempts_max: int = 1_000
    slots_max: int = 2_000
    publication_bytes_max: int = 64 * 1024 * 1024
