"""The command line: ``tidemill``."""

from __future__ import annotations

__all__ = ("main",)


def main() -> None:
    """Run the command that the process was called with, and exit with its code."""
    from tidemill.cli.app import app

    app(prog_name="tidemill")
