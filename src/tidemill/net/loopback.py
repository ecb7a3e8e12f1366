"""Addresses that only this machine can reach: what listens without authentication listens there."""

from __future__ import annotations

import ipaddress
import socket

from tidemill.config.values import Address
from tidemill.net.errors import cannot_listen

__all__ = ("is_loopback", "only_loopback")


def is_loopback(ip: str) -> bool:
    """Whether an IP address is one of this machine's loopback addresses.

    >>> is_loopback("127.0.0.5"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("10.0.0.1")
    (True, True, False, False)
    """
    parsed = ipaddress.ip_address(ip)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def only_loopback(address: Address, option: str) -> bool:
    """Whether only this machine could reach a listener on ``address``. Blocks while it resolves a name.

    Raises ``ConfigError``, which names the command line's ``option``, if the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_listen("listen", address, error, option) from error
    return all(is_loopback(str(sockaddr[0])) for *_, sockaddr in found)
