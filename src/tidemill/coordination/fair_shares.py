"""Fair shares of a limited resource, such as open scans: no client takes all that is left.

A server cannot tell an honest client from a careless one that never closes what it opens, so what one client
may hold depends on what is free. An address may hold three times as many as are free: alone it gets three
quarters, of two each gets three sevenths, and something is left for the next one. Within an address the same
goes for each connection, so that programs on one machine leave something to each other.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import NamedTuple, TypeVar

__all__ = ("HELD_PER_FREE", "NOBODY", "Client", "Shares", "share_address")

_T = TypeVar("_T")

#: How many a client may hold for each one that is free.
HELD_PER_FREE = 3


class Client(NamedTuple):
    """A client as far as it is known without authentication: its address and its connection."""

    address: str
    connection: int


NOBODY = Client("", 0)


@lru_cache(maxsize=4_096)
def share_address(host: str) -> str:
    """The address that shares are counted by: for IPv6 the network, since a machine has many addresses in it.

    >>> [share_address(host) for host in ("10.0.0.1", "2001:db8::5:17%eth0", "::ffff:10.0.0.1", "a pipe")]
    ['10.0.0.1', '2001:db8::/64', '10.0.0.1', 'a pipe']
    """
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(IPv6Network((address, 64), strict=False))


class Shares:
    """How much of a limited resource each client holds.

    >>> shares, client = Shares(100), Client("10.0.0.1", 1)
    >>> while shares.refusal(client) is None:
    ...     shares.take(client)
    >>> len(shares), shares.refusal(client)
    (57, 'this connection holds 57 of them')
    >>> shares.refusal(Client("10.0.0.1", 2)) is None
    True
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken = 0
        self._by_address: Counter[str] = Counter()
        self._by_client: Counter[Client] = Counter()

    def __len__(self) -> int:
        return self._taken

    def of_address(self, address: str) -> int:
        """How many all connections of an address hold."""
        return self._by_address[address]

    def refusal(self, client: Client) -> str | None:
        """Why the client may not take another one now; None if it may."""
        free = self.limit - self._taken
        address, connection = self._by_address[client.address], self._by_client[client]
        if free <= 0:
            return f"all {self.limit} are taken"
        if address >= HELD_PER_FREE * free:
            return f"the connections of {client.address} hold {address} of them"
        # The most that the address may come to hold, given what other addresses hold.
        most = -(-HELD_PER_FREE * (free + address) // (HELD_PER_FREE + 1))
        if connection >= HELD_PER_FREE * (most - address):
            return f"this connection holds {connection} of them"
        return None

    def take(self, client: Client) -> None:
        self._taken += 1
        self._by_address[client.address] += 1
        self._by_client[client] += 1

    def give_back(self, client: Client) -> None:
        assert self._by_client[client] > 0, "more was given back than taken"
        self._taken -= 1
        _one_less(self._by_address, client.address)
        _one_less(self._by_client, client)


def _one_less(counts: Counter[_T], key: _T) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
