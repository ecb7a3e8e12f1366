"""Properties of a table: their names and values, and which of them are configs of its topics.

Names: those of Tidemill's tables (below), every config of a Kafka topic, and ``user.…`` for whatever its
owner wants to keep beside it. Anything else is refused: a misspelt property must not be silently without
effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidemill.config.settings import Settings
from tidemill.config.topic import check_overrides
from tidemill.errors import ApiError, TableCode, TableError

__all__ = ("TABLE_PROPERTIES", "TableProperties", "topic_configs")

_USER_PREFIX: Final = "user."
_VALUE_CHARACTERS_MAX: Final = 10_000
_NUMBER_CHARACTERS_MAX: Final = 100
#: Tables are compacted by default: then any state can be built again from the log alone.
_KEYED_DEFAULTS: Final = {"cleanup.policy": "compact"}

TABLE_PROPERTIES: Final[dict[str, str]] = {
    "snapshot.interval.ms": "How long after a snapshot the next one is taken, if the table was written to.",
    "snapshot.log.bytes": "How much the log of a bucket may grow before the next snapshot is taken.",
}


@dataclass(frozen=True, slots=True)
class TableProperties:
    """The effective properties of a table."""

    snapshot_interval_ms: int
    snapshot_log_bytes: int

    @classmethod
    def of(cls, properties: Mapping[str, str], settings: Settings) -> TableProperties:
        return cls(
            _number(properties, "snapshot.interval.ms", settings.kv_snapshot_interval_ms),
            _number(properties, "snapshot.log.bytes", settings.kv_snapshot_log_bytes),
        )


def topic_configs(properties: Mapping[str, str], settings: Settings, *, keyed: bool) -> dict[str, str]:
    """Check all properties of a table; gives the configs of its topics.

    Raises ``TableError`` or ``ApiError``.
    """
    configs = dict(_KEYED_DEFAULTS) if keyed else {}
    for name, value in properties.items():
        if len(value) > _VALUE_CHARACTERS_MAX:
            raise TableError(
                TableCode.invalid_schema, f"the value of property {name!r} has {len(value)} characters"
            )
        if name in TABLE_PROPERTIES:
            _number(properties, name, 1)
        elif not name.startswith(_USER_PREFIX):
            configs[name] = value
    try:
        check_overrides(configs, settings.topic_defaults)
    except ApiError as error:
        raise ApiError(
            error.code,
            f"{error.message}. A table takes topic configs, {', '.join(TABLE_PROPERTIES)}, and names that "
            "start with "
            f"'{_USER_PREFIX}'",
        ) from error
    return configs


def _number(properties: Mapping[str, str], name: str, default: int) -> int:
    text = properties.get(name)
    if text is None:
        return default
    # The length first, because Python refuses numbers of thousands of digits.
    fits = len(text) <= _NUMBER_CHARACTERS_MAX and text.isascii() and text.isdigit()
    if not (fits and 0 < int(text) < 2**63):
        raise TableError(
            TableCode.invalid_schema,
            f"property {name} must be a whole number above 0 and below 2^63, not {text[:40]!r}",
        )
    return int(text)
