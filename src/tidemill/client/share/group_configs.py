"""Configs of a share group as Python programs name them, and how they come into force.

Rules:

- A config that a program names is set if the group has none of its own. If it has another one, the program is
  refused: the group would not behave as the program says, and others may rely on how it does.
  ``configure_share`` changes it for all members.
- Defaults of this client differ from Kafka's where a work queue expects so. They are set only if the group
  has none of its own, and a server that refuses them is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from tidemill.client.arguments import full_name, millis, shown, whole
from tidemill.client.cluster import Cluster
from tidemill.config.group_keys import DEAD_LETTER_TOPIC
from tidemill.errors import ApiError, ConfigError, ErrorCode
from tidemill.net.answers import check

__all__ = (
    "SHARE_DEFAULTS",
    "WORKER_DEFAULTS",
    "GroupConfigs",
    "OnDead",
    "Order",
    "ShareStart",
    "group_overrides",
    "named_configs",
    "set_group_configs",
)

_log = logging.getLogger(__name__)

ShareStart = Literal["earliest", "latest"] | float
"""Where a new group begins: at the first record, at the next one, or so many seconds ago."""
Order = Literal["none", "key"]
OnDead = Literal["continue", "block"]

_GROUP_RESOURCE: Final = 32
_GROUP_SOURCE: Final = 8
_SET: Final = 0

LIMIT: Final = "share.delivery.count.limit"
START: Final = "share.auto.offset.reset"
BACKOFF: Final = "tidemill.share.retry.backoff.ms"
BACKOFF_KIND: Final = "tidemill.share.retry.backoff.kind"
BACKOFF_MAX: Final = "tidemill.share.retry.backoff.max.ms"
#: Tasks that were written before the first consumer started are tasks too.
SHARE_DEFAULTS: Final[Mapping[str, str]] = {START: "earliest"}
#: A handler that fails must not use up a record's deliveries within a moment.
WORKER_DEFAULTS: Final[Mapping[str, str]] = {
    **SHARE_DEFAULTS,
    BACKOFF: "1000",
    BACKOFF_KIND: "exponential",
    BACKOFF_MAX: "600000",
}


@dataclass(frozen=True, slots=True)
class GroupConfigs:
    """Configs that a program names, and defaults of this client, by Kafka's names."""

    named: Mapping[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)

    async def apply(self, cluster: Cluster, group: str) -> int | None:
        """Bring them into force. Raises ``ConfigError`` if the group has another one than was named.

        Gives the group's delivery limit; None if it has none of its own.
        """
        try:
            current = await group_overrides(cluster, group)
        except ApiError as error:
            if self.named:
                raise
            _log.info("group %r keeps the server's defaults: %s", group, error.message)
            return None
        self._refuse_others(group, current)
        missing = {name: value for name, value in self.named.items() if name not in current}
        if missing:
            await set_group_configs(cluster, group, missing)
        await self._apply_defaults(cluster, group, {*current, *self.named})
        limit = {**current, **self.named}.get(LIMIT)
        return None if limit is None else int(limit)

    async def _apply_defaults(self, cluster: Cluster, group: str, known: set[str]) -> None:
        # A backoff belongs together: one that is given in part is not completed by defaults.
        has_backoff = any(_is_backoff(name) for name in known)
        missing = {
            name: value
            for name, value in self.defaults.items()
            if name not in known and not (has_backoff and _is_backoff(name))
        }
        # Other servers know Kafka's names only.
        for configs in (missing, {START: missing[START]} if START in missing else {}):
            if not configs:
                return
            try:
                await set_group_configs(cluster, group, configs)
            except (ApiError, ConfigError) as error:
                _log.info("group %r keeps the server's defaults: %s", group, error.message)
            else:
                return

    def _refuse_others(self, group: str, current: Mapping[str, str]) -> None:
        for name, value in self.named.items():
            if current.get(name, value) != value:
                raise ConfigError(
                    f"group {group!r} has {name}={current[name]}, this program asks for {value}; leave it "
                    f"out here, or change it for all members with configure_share({group!r}, …)"
                )


def _is_backoff(name: str) -> bool:
    return name in (BACKOFF, BACKOFF_KIND, BACKOFF_MAX)


def named_configs(
    *,
    start: ShareStart | None = None,
    lock: float | None = None,
    max_deliveries: int | None = None,
    retry_backoff: float | None = None,
    retry_backoff_max: float | None = None,
    order: Order | None = None,
    on_dead: OnDead | None = None,
    dead_letter: str | None = None,
    read_committed: bool | None = None,
    deliver_at: bool | None = None,
    max_waiting: int | None = None,
) -> dict[str, str]:
    """Python's names for the configs of a share group as Kafka's names and values."""
    for name, value, words in (
        ("order", order, get_args(Order)),
        ("on_dead", on_dead, get_args(OnDead)),
        ("read_committed", read_committed, (True, False)),
        ("deliver_at", deliver_at, (True, False)),
    ):
        if value is not None and value not in words:
            raise ConfigError(f"{name} is {' or '.join(map(repr, words))}, not {shown(value)}")
    if dead_letter is not None:
        full_name("dead_letter, the topic of dead records,", dead_letter)
    found: dict[str, Any] = {
        START: None if start is None else _start(start),
        "share.record.lock.duration.ms": None if lock is None else millis("lock", lock),
        LIMIT: None if max_deliveries is None else whole("max_deliveries", max_deliveries, least=1),
        BACKOFF: None if retry_backoff is None else millis("retry_backoff", retry_backoff),
        BACKOFF_KIND: None
        if retry_backoff is None
        else "fixed"
        if retry_backoff_max is None
        else "exponential",
        BACKOFF_MAX: None if retry_backoff_max is None else millis("retry_backoff_max", retry_backoff_max),
        "tidemill.share.order": order,
        "tidemill.share.on.dead": on_dead,
        DEAD_LETTER_TOPIC: dead_letter,
        "share.isolation.level": _isolation(read_committed),
        "tidemill.share.deliver.at.enable": None if deliver_at is None else str(deliver_at).lower(),
        "tidemill.share.max.waiting.records": None
        if max_waiting is None
        else whole("max_waiting", max_waiting, least=1),
    }
    if retry_backoff_max is not None and retry_backoff is None:
        raise ConfigError("retry_backoff_max is the cap of retry_backoff: give both")
    return {name: str(value) for name, value in found.items() if value is not None}


def _start(start: ShareStart) -> str:
    if isinstance(start, str):
        if start not in ("earliest", "latest"):
            raise ConfigError(f"start is 'earliest', 'latest' or so many seconds ago, not {shown(start)}")
        return start
    seconds, rest_ms = divmod(millis("start", start), 1000)
    part = f".{rest_ms:03}".rstrip("0") if rest_ms else ""
    return f"by_duration:PT{seconds}{part}S"


def _isolation(read_committed: bool | None) -> str | None:
    if read_committed is None:
        return None
    return "read_committed" if read_committed else "read_uncommitted"


async def group_overrides(cluster: Cluster, group: str) -> dict[str, str]:
    """The configs that were set for the group itself, by name."""
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configuration_keys": None}

    async def ask() -> dict[str, str]:
        (result,) = (await cluster.to_any("DescribeConfigs", {"resources": [resource]})).results
        check(result.error_code, result.error_message, f"the configs of group {group!r}")
        return {each.name: each.value or "" for each in result.configs if each.config_source == _GROUP_SOURCE}

    return await cluster.retrying(ask)


async def set_group_configs(cluster: Cluster, group: str, configs: Mapping[str, str]) -> None:
    """Set configs of a group, all of them or none."""
    changes = [{"name": name, "config_operation": _SET, "value": value} for name, value in configs.items()]
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configs": changes}

    async def ask() -> None:
        body = {"resources": [resource], "validate_only": False}
        (result,) = (await cluster.to_controller("IncrementalAlterConfigs", body)).responses
        if result.error_code == ErrorCode.invalid_config:
            raise ConfigError(result.error_message or f"group {group!r} does not take {dict(configs)}")
        check(result.error_code, result.error_message, f"configuring group {group!r}")

    await cluster.retrying(ask)
