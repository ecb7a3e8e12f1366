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
    """

    partitions: int = 50
    max_timeout_ms: int = 900_000
    expiration_ms: int = 7 * 24 * 60 * 60 * 1_000
    end_wait_ms: int = 1_000
