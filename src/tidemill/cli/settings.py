"""``tidemill settings``: every setting of a node, its value, and where that comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tidemill.cli.session import Session, command
from tidemill.cli.up import ConfigOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.config.settings import Settings

__all__ = ("register",)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "settings")(settings)


def settings(session: Session, config: ConfigOption = None) -> None:
    """Show the settings that 'tidemill up' would use here, and where each comes from.

    If one of them cannot be used, it is named at the end, the defaults are shown, and the exit code is 1.
    """
    from tidemill.config.loading import find_config_file, load_settings
    from tidemill.config.settings import Settings
    from tidemill.errors import ConfigError

    file = find_config_file(config, os.environ, Path.cwd())
    try:
        loaded = load_settings({}, os.environ, file)
    except ConfigError:
        # Shown nevertheless, because messages about a wrong setting send people here.
        _show(session, Settings(), {}, None)
        raise
    _show(session, loaded, os.environ, file)


def _show(session: Session, loaded: Settings, environ: Mapping[str, str], file: Path | None) -> None:
    from tidemill.cli.output import Table, show
    from tidemill.config.settings import SETTINGS

    in_file = _named_in(file)
    value: list[dict[str, Any]] = [
        {
            "name": info.name,
            "value": _plain(getattr(loaded, info.name)),
            "source": _source(info.name, info.variable, environ, in_file, file),
            "default": info.default_text,
            "variable": info.variable,
            "allowed": info.allowed,
            "purpose": info.spec.doc,
        }
        for info in SETTINGS
    ]
    value += [
        {
            "name": f"topic.{name}",
            "value": text,
            "source": "environment or file",
            "purpose": "A topic default.",
        }
        for name, text in sorted(loaded.topic_defaults.items())
    ]
    rows = [(entry["name"], entry["value"], entry["source"], entry["purpose"]) for entry in value]
    show(session, value, Table(("setting", "value", "from", "purpose"), rows))


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, bool | int) else str(value)


def _named_in(file: Path | None) -> frozenset[str]:
    import tomllib

    return frozenset() if file is None else frozenset(tomllib.loads(file.read_text("utf-8")))


def _source(
    name: str, variable: str, environ: Mapping[str, str], in_file: frozenset[str], file: Path | None
) -> str:
    if variable in environ:
        return variable
    return f"{file}" if name in in_file else "default"
