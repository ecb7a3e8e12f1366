"""Moved: see ``tidemill.coordination.binary``."""

from tidemill.coordination.binary import *  # noqa: F403
