"""The row of the transaction coordinator: transactional ids and jobs, in ``__transaction_state``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidemill.control.image import TRANSACTIONS_TOPIC
from tidemill.coordination.metrics import gauge
from tidemill.server.coordinators.registry import CoordinatorRow
from tidemill.server.requests.authorization import TRANSACTIONAL_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.coordination.log import LogAccess
    from tidemill.server.broker.bundle import Broker
    from tidemill.transactions.coordinator import TransactionCoordinator

__all__ = ("TRANSACTIONS",)

_HOUR_MS = 3_600_000
#: A publication of many attempts says the same of each: compressed, it fits ``max.message.bytes``.
_COMPRESS_ABOVE_BYTES = 64 * 1024


def _make(broker: Broker, logs: LogAccess) -> TransactionCoordinator:
    from tidemill.server.coordinators.transaction_partitions import (
        LocalTransactionPartitions,
        NodeTransactionPartitions,
    )
    from tidemill.transactions.coordinator import TransactionCoordinator
    from tidemill.transactions.settings import TransactionSettings

    settings = TransactionSettings(
        max_timeout_ms=broker.settings.transaction_max_timeout_ms,
        expiration_ms=broker.settings.transactional_id_expiration_ms,
        publication_retention_ms=broker.settings.job_publication_retention_ms,
    )
    local = LocalTransactionPartitions.of(broker)

    async def ask_node(node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
        # How other nodes are asked is known later.
        return await broker.ask_node(node_id, api, version, body)

    return TransactionCoordinator(
        logs,
        NodeTransactionPartitions(local, broker.find, broker.node_id, ask_node),
        settings,
        broker.clock,
        broker.producer_ids.next,
    )


TRANSACTIONS: Final = CoordinatorRow(
    name="transactions",
    topic=TRANSACTIONS_TOPIC,
    key_type=1,
    resource=TRANSACTIONAL_ID,
    partitions=lambda settings: settings.transactions_topic_partitions,
    make=_make,
    modules=("tidemill.transactions.coordinator", "tidemill.server.coordinators.transaction_partitions"),
    expire_interval_ms=_HOUR_MS,
    compress_above_bytes=_COMPRESS_ABOVE_BYTES,
    metrics=(
        gauge(
            "tidemill_transactions_open",
            "Transactions under way.",
            lambda transactions: transactions.open_count(),
        ),
    ),
)
