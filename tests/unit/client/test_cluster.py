"""What a client is told about a cluster."""

from __future__ import annotations

import pytest

from tidemill.client.cluster import Cluster
from tidemill.errors import ConfigError


async def test_bootstrap_takes_several_addresses_and_refuses_nonsense() -> None:
    assert [address.port for address in Cluster("a:1,[::1]:2").bootstrap] == [1, 2]
    with pytest.raises(ConfigError, match="host:port"):
        Cluster("nowhere")
