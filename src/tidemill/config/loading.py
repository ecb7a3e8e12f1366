"""Loading of ``Settings`` from flags, environment and file.

For each setting the first of these that names it wins: flag, ``TIDEMILL_*`` variable, toml file, default.
A name that nobody knows is an error: a node that does not start is better than a misspelt limit that is
silently ignored.
"""

from __future__ import annotations

import difflib
import tomllib
from typing import TYPE_CHECKING, Any

from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.topic import check_overrides
from tidemill.config.topic_keys import TOPIC_KEYS
from tidemill.errors import ApiError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ("CONFIG_VARIABLE", "SERVER_VARIABLE", "find_config_file", "load_settings")

#: The variable that names the toml file, as ``--config`` does.
CONFIG_VARIABLE = "TIDEMILL_CONFIG"
#: The variable that tells the command line which node to talk to. It is not a setting of a node.
SERVER_VARIABLE = "TIDEMILL_SERVER"
_FILE_NAME = "tidemill.toml"
#: Settings whose flag has a name of its own; the others are given by ``--set``.
_FLAGS = {"data_dir": "--data", "listen": "--listen", "http": "--http"}
_PREFIX = "TIDEMILL_"

_SETTING_NAMES = {info.name for info in SETTINGS}
_SETTING_OF_VARIABLE = {info.variable: info.name for info in SETTINGS}
_TOPIC_KEY_OF_VARIABLE = {f"{_PREFIX}TOPIC_{name.upper().replace('.', '_')}": name for name in TOPIC_KEYS}


def find_config_file(given: Path | None, environ: Mapping[str, str], directory: Path) -> Path | None:
    """The file to read: the given one, else what ``TIDEMILL_CONFIG`` names, else one in ``directory``."""
    if given is not None:
        return given
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return directory / named
    beside = directory / _FILE_NAME
    return beside if beside.is_file() else None


def load_settings(
    flags: Mapping[str, object | None], environ: Mapping[str, str], file: Path | None = None
) -> Settings:
    """The checked settings. ``flags`` holds values by setting name, None where a flag was not given.

    ``flags["topic"]`` may be a mapping of topic config defaults. ConfigError names the setting, where it came
    from and what is allowed.
    """
    values: dict[str, Any] = {}
    topic: dict[str, str] = {}
    # From the lowest precedence to the highest, so that each overrides the ones before it.
    for given, topic_given, label in (
        _from_file(file),
        _from_environment(environ),
        _from_flags(flags),
    ):
        for info in SETTINGS:
            if info.name in given:
                flag = _FLAGS.get(info.name, f"--set {info.name}")
                values[info.name] = info.read(
                    given[info.name], label.format(flag=flag, variable=info.variable)
                )
        topic |= _topic_defaults(topic_given, label)
    return Settings(**values, topic_defaults=topic)


_Source = tuple[dict[str, object], dict[str, object], str]


def _from_flags(flags: Mapping[str, object | None]) -> _Source:
    given = {name: value for name, value in flags.items() if value is not None}
    topic = _table(given.pop("topic", {}), "the flags")
    for name in given:
        if name not in _SETTING_NAMES:
            raise _unknown("setting", name, {each: each for each in _SETTING_NAMES}, " (from --set)")
    return given, topic, "{flag}"


def _from_environment(environ: Mapping[str, str]) -> _Source:
    given: dict[str, object] = {}
    topic: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable in (CONFIG_VARIABLE, SERVER_VARIABLE):
            continue
        if variable in _SETTING_OF_VARIABLE:
            given[_SETTING_OF_VARIABLE[variable]] = text
        elif variable in _TOPIC_KEY_OF_VARIABLE:
            topic[_TOPIC_KEY_OF_VARIABLE[variable]] = text
        else:
            names = (CONFIG_VARIABLE, SERVER_VARIABLE, *_SETTING_OF_VARIABLE, *_TOPIC_KEY_OF_VARIABLE)
            known = {each.removeprefix(_PREFIX): each for each in names}
            raise _unknown("setting", variable, known, " (from the environment)")
    return given, topic, "variable {variable}"


def _from_file(file: Path | None) -> _Source:
    if file is None:
        return {}, {}, ""
    try:
        given: dict[str, object] = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {file} is not valid toml: {error}") from error
    topic = _table(given.pop("topic", {}), str(file))
    for name in given:
        if name not in _SETTING_NAMES:
            known = {each: each for each in (*_SETTING_NAMES, "topic")}
            raise _unknown("setting", name, known, f" (from {file})")
    # Braces in the path must not be taken for fields of the format.
    return given, topic, f"file {str(file).replace('{', '{{').replace('}', '}}')}"


def _table(value: object, source: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"setting topic (from {source}) must be a table of topic configs,"
            ' for example [topic] with the line "retention.ms" = 3600000'
        )
    return _flattened(value)


def _flattened(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Join nested keys by dots: toml reads ``retention.ms = 1`` as a table inside a table."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _topic_defaults(given: Mapping[str, object], label: str) -> dict[str, str]:
    overrides = {name: _text(value) for name, value in given.items()}
    for name, text in overrides.items():
        try:
            check_overrides({name: text})
        except ApiError as error:
            variable = f"{_PREFIX}TOPIC_{name.upper().replace('.', '_')}"
            source = label.format(flag=f"--set topic.{name}", variable=variable)
            raise ConfigError(f"setting topic (from {source}): {error.message}") from error
    return overrides


def _text(value: object) -> str:
    """A toml value as Kafka writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _unknown(what: str, name: str, known: Mapping[str, str], where: str = "") -> ConfigError:
    """The error for a name that is not among ``known``, which is keyed by the part in which names differ."""
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.6)
    hint = f"did you mean {known[close[0]]}? " if close else ""
    return ConfigError(f"unknown {what} {name[:200]!r}{where}: {hint}'tidemill settings' lists them all")
