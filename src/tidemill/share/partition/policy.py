"""What a group's configs ask of its share partitions, and the arithmetic that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("SharePolicy",)

#: A group with so small a limit has no attempt to spare for delivering records alone.
_ALONE_LIMIT_MIN = 3


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """The group configs that a share partition obeys; the names are those of docs/share-groups.md."""

    lock_duration_ms: int = 30_000
    delivery_limit: int = 5
    max_record_locks: int = 2_000
    renew_enabled: bool = True
    retry_backoff_ms: int = 0
    retry_exponential: bool = False
    retry_backoff_max_ms: int = 600_000
    #: At most one record of a key is in flight.
    order_by_key: bool = False
    #: A record that died blocks its key; else the next record of the key goes on.
    dead_blocks_key: bool = False
    #: The header ``tidemill-deliver-at`` counts.
    deliver_at: bool = False
    #: How many records may be delayed, blocked by their key or due as dead letters before no new ones are
    #: handed out.
    max_waiting_records: int = 10_000
    #: Records that die become dead letters first.
    dead_letters: bool = False

    @property
    def needs_records(self) -> bool:
        """Whether keys or headers of records decide, so that batches have to be decoded."""
        return self.order_by_key or self.deliver_at

    def backoff_ms(self, delivery_count: int) -> int:
        """How long a record waits that was delivered so often and was not accepted.

        >>> exponential = SharePolicy(retry_backoff_ms=100, retry_exponential=True, retry_backoff_max_ms=350)
        >>> [exponential.backoff_ms(count) for count in (1, 2, 3)], SharePolicy().backoff_ms(1)
        ([100, 200, 350], 0)
        """
        backoff = self.retry_backoff_ms
        if self.retry_exponential and backoff:
            backoff <<= min(max(delivery_count - 1, 0), 40)
        return min(backoff, self.retry_backoff_max_ms)

    def together_max(self, delivery_count: int, batch_records: int) -> int | None:
        """How many records that were delivered so often may be delivered together; None if all may.

        A record that makes its reader fail takes everything with it that was delivered beside it. So from
        half of the limit on a batch shrinks by half with each delivery, and a last attempt is made alone.

        >>> [SharePolicy().together_max(count, 100) for count in range(5)]
        [None, None, None, 50, 1]
        """
        limit = self.delivery_limit
        throttled_from = max(2, (limit + 1) // 2)
        if limit >= _ALONE_LIMIT_MIN and delivery_count >= limit - 1:
            return 1
        if delivery_count < throttled_from:
            return None
        return max(1, batch_records >> (delivery_count - throttled_from + 1))
