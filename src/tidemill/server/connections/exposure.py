"""Exposure of a node: only this machine can reach it, unless ``allow_unauthenticated`` is set.

A node has no TLS, no authentication and no ACLs: every client may read, write and delete everything.
So it listens on loopback addresses (127.0.0.0/8, ::1, and names that mean nothing else), and refuses any
other until its owner has said that the network is trusted. That holds for Kafka's listener and for HTTP
alike: metrics name topics and groups. Nodes of a cluster prove a secret to each other.
"""

from __future__ import annotations

import asyncio
import logging

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.errors import ConfigError
from tidemill.net.loopback import only_loopback

__all__ = ("check_exposure", "exposed_listeners")

logger = logging.getLogger(__name__)

_WHAT_IT_MEANS = (
    "there is no TLS, authentication or ACL yet, so whoever reaches it can read, change and delete everything"
)


async def check_exposure(settings: Settings) -> None:
    """Refuse with ConfigError to listen beyond this machine without ``allow_unauthenticated``; else warn."""
    exposed = await asyncio.to_thread(exposed_listeners, settings)
    if not exposed:
        return
    shown = " and ".join(f"{address} ({name})" for name, address in exposed)
    if not settings.allow_unauthenticated:
        raise ConfigError(
            f"refused to listen on {shown}: other machines could connect, and {_WHAT_IT_MEANS}. Listen on "
            "127.0.0.1; or, if only trusted machines can reach this one, start it with "
            "--allow-unauthenticated (setting allow_unauthenticated)"
        )
    logger.warning("listening on %s for other machines without authentication: %s", shown, _WHAT_IT_MEANS)


def exposed_listeners(settings: Settings) -> list[tuple[str, Address]]:
    """(setting, address) of the listeners that other machines could reach. Blocks while it resolves names."""
    listeners = (("listen", settings.listen), ("http", settings.http))
    return [
        (name, address) for name, address in listeners if address and not only_loopback(address, f"--{name}")
    ]
