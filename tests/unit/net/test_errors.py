"""Addresses that cannot be resolved, reached or bound are told in words that help."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.errors import ConfigError, NodeUnavailable
from tidemill.net.connection import Connection
from tidemill.server.http import HttpServer
from tidemill.server.node import Node

LOCAL = Address("127.0.0.1", 0)
#: A name that nobody has, by RFC 2606.
NOWHERE = Address("nosuchhost.invalid", 9092)
#: An address for documentation, which no machine has.
FOREIGN = Address("192.0.2.1", 9092)
RESOLVE = r"cannot resolve host 'nosuchhost\.invalid'.*: (?!Unknown error)[A-Z].*; check the spelling"


async def refusal(directory: Path, listen: Address) -> str:
    with pytest.raises(ConfigError) as caught:
        await Node(Settings(data_dir=directory, listen=listen, http=None)).start()
    return caught.value.message


async def test_a_client_is_told_that_the_host_has_no_address() -> None:
    with pytest.raises(NodeUnavailable, match=RESOLVE):
        await Connection.open(NOWHERE)


async def test_a_node_is_told_that_the_host_has_no_address(tmp_path: Path) -> None:
    assert re.search(RESOLVE + ".*--listen", await refusal(tmp_path, NOWHERE))
    node = Node(Settings(data_dir=tmp_path, listen=LOCAL, http=NOWHERE))
    with pytest.raises(ConfigError, match=RESOLVE + ".*--http"):
        await HttpServer(node).start(NOWHERE)


async def test_a_port_in_use_and_an_address_of_another_machine_are_told_apart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = await refusal(tmp_path, Address("127.0.0.1", taken.getsockname()[1]))
    assert "Address already in use; another program, perhaps another node, has this port" in message
    assert "attempting to bind" not in message
    message = await refusal(tmp_path, FOREIGN)
    assert "no network interface of this machine has that address" in message
