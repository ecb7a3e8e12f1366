"""The commands of ``tidemill cluster``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.cli.cluster.upgrade import upgrade
from tidemill.cli.session import command

if TYPE_CHECKING:
    import typer

__all__ = ("register",)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "upgrade")(upgrade)
