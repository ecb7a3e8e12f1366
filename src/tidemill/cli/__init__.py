"""The command line: ``tidemill``."""

from __future__ import annotations

import sys

__all__ = ("main",)


def main() -> None:
    """Run the command that the process was called with, and exit with its code."""
    from tidemill.cli.app import make_app

    make_app(sys.argv[1:])(prog_name="tidemill")
