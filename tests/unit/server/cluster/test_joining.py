"""Whether the live nodes take a node that is about to join."""

from __future__ import annotations

import pytest

from support.cluster_nodes import ClusterNode, identity_of, virtually
from support.sim_network import SimNetwork
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.cluster.joining import greet


def test_a_node_with_another_secret_is_refused_in_words() -> None:
    async def story(network: SimNetwork) -> None:
        member = await ClusterNode(network, 1).start()
        spy = ClusterNode(network, 2, identity=identity_of(2, secret=b"guessed"))
        with pytest.raises(ApiError, match="cluster_secret_file") as caught:
            await greet({1: member.address}, spy.context)
        assert caught.value.code is ErrorCode.sasl_authentication_failed
        await member.stop()

    virtually(story)


def test_one_node_that_takes_it_is_enough_and_silence_refuses_nothing() -> None:
    async def story(network: SimNetwork) -> None:
        member = await ClusterNode(network, 1).start()
        odd = await ClusterNode(network, 3, identity=identity_of(3, secret=b"another")).start()
        joining = ClusterNode(network, 2)
        nobody = ClusterNode(network, 4).address
        await greet({}, joining.context)
        await greet({4: nobody}, joining.context)
        await greet({3: odd.address, 1: member.address, 4: nobody}, joining.context)
        with pytest.raises(ApiError):
            await greet({3: odd.address, 4: nobody}, joining.context)
        await odd.stop()
        await member.stop()

    virtually(story)
