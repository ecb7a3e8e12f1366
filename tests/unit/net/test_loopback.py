"""Which addresses only this machine can reach."""

from __future__ import annotations

import pytest

from tidemill.net.loopback import is_loopback


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.255.0.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_addresses_are_this_machine_only(ip: str) -> None:
    assert is_loopback(ip)


@pytest.mark.parametrize(
    "ip",
    [
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "192.168.1.5",
        "172.17.0.2",
        "203.0.113.9",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
    ],
)
def test_every_other_address_can_be_reached_from_elsewhere(ip: str) -> None:
    assert not is_loopback(ip)
