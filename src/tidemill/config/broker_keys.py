"""Configs of a node that can be changed while it runs: the table of names, and the check of changes.

They are kept in the cluster's metadata, of one node or as the default of all. What is in force on a node is
its own value, else the default of the cluster, else the node's setting (``BrokerKey.setting``). All other
settings of a node come from its flags, variables and file, and need a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tidemill.config.topic import AlterOp, altered_configs
from tidemill.config.topic_keys import LONG_MAX, ConfigKey, ConfigKind
from tidemill.errors import ApiError, ErrorCode

__all__ = (
    "BROKER_KEYS",
    "FOLLOWER_RATE",
    "LEADER_RATE",
    "BrokerKey",
    "apply_broker_changes",
    "check_broker_overrides",
    "rate_in_force",
)

LEADER_RATE: Final = "leader.replication.throttled.rate"
FOLLOWER_RATE: Final = "follower.replication.throttled.rate"
#: kafka-reassign-partitions removes this one together with the others, whether it was set or not.
_LOG_DIRS_RATE: Final = "replica.alter.log.dirs.io.max.bytes.per.second"


@dataclass(frozen=True, slots=True)
class BrokerKey:
    """One dynamic config of a node, and the setting that stands behind it, of which 0 is no limit."""

    key: ConfigKey
    setting: str | None = None


def _rate(name: str, doc: str) -> ConfigKey:
    return ConfigKey(name, ConfigKind.LONG, str(LONG_MAX), doc, minimum=1, of="broker")


#: Every dynamic config of a node by name, in alphabetical order.
BROKER_KEYS: Final[Mapping[str, BrokerKey]] = {
    FOLLOWER_RATE: BrokerKey(
        _rate(
            FOLLOWER_RATE,
            "How many bytes in a second a node fetches for its replicas that a move adds, or that"
            " follower.replication.throttled.replicas of their topic names. Those in sync do not count.",
        )
    ),
    LEADER_RATE: BrokerKey(
        _rate(
            LEADER_RATE,
            "How many bytes in a second a node sends, as their leader, to replicas that a move adds, or whose"
            " topic names this leader in leader.replication.throttled.replicas. Those in sync do not count.",
        ),
        "move_bytes_per_second",
    ),
}


def rate_in_force(
    name: str, node_id: int, stored: Mapping[int | None, Mapping[str, str]], setting: int = 0
) -> int:
    """The value of a rate on a node, in bytes per second; 0 is no limit.

    ``stored`` is what the metadata has, by node, and under None the default of the cluster.

    >>> stored = {None: {LEADER_RATE: "500"}, 2: {LEADER_RATE: "100"}}
    >>> [rate_in_force(LEADER_RATE, node_id, stored, setting=7) for node_id in (1, 2)]
    [500, 100]
    >>> rate_in_force(LEADER_RATE, 1, {}, setting=7)
    7
    """
    for configs in (stored.get(node_id), stored.get(None)):
        text = None if configs is None else configs.get(name)
        if text is not None:
            rate = int(text)
            return 0 if rate == LONG_MAX else rate
    return setting


def check_broker_overrides(overrides: Mapping[str, str]) -> None:
    """Raise ApiError unless every name is one that can be changed, and every value is allowed."""
    for name, text in overrides.items():
        _key_called(name).parse(text)


def apply_broker_changes(
    current: Mapping[str, str], changes: Sequence[tuple[str, int, str | None]]
) -> dict[str, str]:
    """The configs after the changes ``(name, op, value)``, checked as a whole."""
    for name, op, _ in changes:
        if op != AlterOp.DELETE or name != _LOG_DIRS_RATE:
            _key_called(name)
    altered = altered_configs("broker", _key_called, current, changes)
    check_broker_overrides(altered)
    return altered


def _key_called(name: str) -> ConfigKey:
    known = BROKER_KEYS.get(name)
    if known is None:
        raise ApiError(
            ErrorCode.invalid_request,
            f"{name[:200]!r} of a node is not changed over the protocol: settings come from flags, TIDEMILL_*"
            " variables and tidemill.toml; change them there and restart the node. Only"
            f" {' and '.join(BROKER_KEYS)} can be changed while it runs",
        )
    return known.key
