"""Each default of a coordinator stands in one place: in the node's settings."""

from __future__ import annotations

from tidemill.config.settings import Settings
from tidemill.groups.settings import GroupSettings
from tidemill.server.coordinators.groups import _settings
from tidemill.transactions.settings import TransactionSettings


def test_groups_without_settings_are_those_of_a_node_without_settings() -> None:
    assert GroupSettings() == _settings(Settings())


def test_transactions_without_settings_are_those_of_a_node_without_settings() -> None:
    node, transactions = Settings(), TransactionSettings()
    assert transactions.max_timeout_ms == node.transaction_max_timeout_ms
    assert transactions.expiration_ms == node.transactional_id_expiration_ms
    assert transactions.publication_retention_ms == node.job_publication_retention_ms
