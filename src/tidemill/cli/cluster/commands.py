"""The commands of ``tidemill cluster``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.cli.cluster import inspect
from tidemill.cli.cluster.elect import elect
from tidemill.cli.cluster.moves import drain, reassign, remove
from tidemill.cli.cluster.throttle import throttle
from tidemill.cli.cluster.upgrade import upgrade
from tidemill.cli.session import command

if TYPE_CHECKING:
    import typer

__all__ = ("register",)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "status", epilog=inspect.STATUS_EPILOG)(inspect.status)
    command(app, "nodes")(inspect.nodes)
    command(app, "partitions")(inspect.partitions)
    command(app, "controller")(inspect.controller)
    command(app, "elect")(elect)
    command(app, "reassign")(reassign)
    command(app, "throttle")(throttle)
    command(app, "drain")(drain)
    command(app, "remove")(remove)
    command(app, "upgrade")(upgrade)
