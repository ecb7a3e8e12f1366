"""Handlers of share groups."""

from __future__ import annotations

# The handlers reach it through the broker, and are loaded in a thread: it comes along.
import tidemill.server.share.node_share  # noqa: F401
