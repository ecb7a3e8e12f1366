"""Errors of connections and listeners, in words for people.

asyncio puts long words of its own in place of the system's, and errors of name resolution have numbers of
their own, which ``os.strerror`` does not know. Code that connects and code that listens use these words.
"""

from __future__ import annotations

import errno
import os
import socket

from tidemill.config.values import Address
from tidemill.errors import ConfigError

__all__ = ("cannot_listen", "is_unknown_host", "reason_of")


def reason_of(error: OSError) -> str:
    """The reason in the system's words.

    >>> reason_of(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"))
    'Connection refused'
    >>> reason_of(socket.gaierror(-2, "Name or service not known"))
    'Name or service not known'
    """
    if is_unknown_host(error):
        return error.strerror or str(error)
    if type(error).__module__ == "ssl":
        # Its numbers are OpenSSL's own. Importing ssl only to know its errors would load all of OpenSSL.
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__


def is_unknown_host(error: OSError) -> bool:
    """Whether the name of a host could not be turned into an address."""
    return isinstance(error, socket.gaierror)


def cannot_listen(what: str, address: Address, error: OSError, flag: str) -> ConfigError:
    """The error of a listener that could not be opened; ``flag`` is the one that names its address."""
    if is_unknown_host(error):
        return ConfigError(
            f"cannot {what} on {address}: cannot resolve host {address.host!r}: {reason_of(error)}; check "
            f"the spelling, or give an address of this machine with {flag}"
        )
    if error.errno == errno.EADDRINUSE:
        advice = f"another program, perhaps another node, has this port: stop it, or take another with {flag}"
    elif error.errno == errno.EADDRNOTAVAIL:
        advice = f"no network interface of this machine has that address: give one that it has with {flag}"
    else:
        advice = f"choose another address with {flag}"
    return ConfigError(f"cannot {what} on {address}: {reason_of(error)}; {advice}")
