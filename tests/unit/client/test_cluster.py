"""What a client is told about a cluster, and whom it asks and believes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tidemill.client.cluster import Cluster
from tidemill.config.values import Address
from tidemill.errors import ConfigError, ErrorCode, NodeUnavailable

A, B, C = Address("a", 1), Address("b", 2), Address("c", 3)
TOPIC_ID = UUID(int=7)


async def test_bootstrap_takes_several_addresses_and_refuses_nonsense() -> None:
    assert [address.port for address in Cluster("a:1,[::1]:2").bootstrap] == [1, 2]
    with pytest.raises(ConfigError, match="host:port"):
        Cluster("nowhere")


class Pool:
    """Connections to nodes that are there; each answers with its own address."""

    def __init__(self, *there: Address) -> None:
        self._there = there

    async def get(self, address: Address, purpose: str = "") -> Any:
        if address not in self._there:
            raise NodeUnavailable(f"{address} is not there")
        return SimpleNamespace(address=address)

    async def get_any(self, addresses: Iterable[Address], purpose: str = "") -> Any:
        for address in addresses:
            if address in self._there:
                return await self.get(address)
        raise NodeUnavailable("nobody is there")


def cluster_of(*there: Address) -> Cluster:
    cluster = Cluster("a:1,b:2")
    cluster._pool = Pool(*there)  # type: ignore[assignment]
    return cluster


async def asked(cluster: Cluster) -> Address:
    return (await cluster.bootstrap_connection()).address


async def test_the_same_node_is_asked_until_a_failure_and_then_another() -> None:
    cluster = cluster_of(A, B)
    assert [await asked(cluster) for _ in range(2)] == [A, A]
    cluster.forget()
    assert await asked(cluster) == B
    cluster.forget()
    assert await asked(cluster) == A


async def test_a_node_that_the_metadata_names_is_asked_before_an_address_that_may_be_of_nobody() -> None:
    cluster = cluster_of(A, B, C)
    cluster.nodes = {1: A, 3: C}
    assert await asked(cluster) == A
    cluster.forget()
    assert await asked(cluster) == C


async def test_a_node_is_asked_again_if_no_other_answers() -> None:
    cluster = cluster_of(A)
    assert await asked(cluster) == A
    cluster.forget()
    assert await asked(cluster) == A
    alone = Cluster("a:1")
    alone._pool = Pool(A)  # type: ignore[assignment]
    assert await asked(alone) == A
    alone.forget()
    assert await asked(alone) == A


def told(*leaders: tuple[int, int], topic_id: UUID = TOPIC_ID) -> Any:
    """A Metadata answer: (leader, leader epoch) of each partition of the topic t."""
    partitions = [
        SimpleNamespace(
            partition_index=index,
            leader_id=leader,
            leader_epoch=epoch,
            replica_nodes=[1, 2],
            isr_nodes=[1, 2],
            offline_replicas=[],
        )
        for index, (leader, epoch) in enumerate(leaders)
    ]
    topic = SimpleNamespace(
        name="t", topic_id=topic_id, is_internal=False, error_code=ErrorCode.none, partitions=partitions
    )
    return SimpleNamespace(cluster_id="x", controller_id=1, brokers=[], topics=[topic])


class Hanging(Pool):
    """Node A is there and gives no answer to Metadata; B does."""

    was_connected = True

    def __init__(self) -> None:
        super().__init__(A, B)
        self.waited_ms: list[int] = []

    async def get(self, address: Address, purpose: str = "") -> Any:
        async def request(name: str, body: Any, *, versions: Any, timeout_ms: int) -> Any:
            if address == A:
                self.waited_ms.append(timeout_ms)
                raise NodeUnavailable(f"{name} was not answered within {timeout_ms} ms")
            return told((2, 5))

        return SimpleNamespace(address=address, request=request)


async def test_a_node_that_hangs_leaves_time_to_ask_another() -> None:
    cluster, pool = Cluster("a:1,b:2"), Hanging()
    cluster._pool = pool  # type: ignore[assignment]
    await cluster.topic("t")
    assert leaders_of(cluster) == [2]
    assert sum(pool.waited_ms) <= cluster.timeout_ms / 2


def leaders_of(cluster: Cluster) -> list[int]:
    return [each.leader for each in cluster._topics["t"].partitions]


async def test_a_node_that_names_an_older_leader_is_not_believed_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster("a:1")
    cluster._take_metadata(told((1, 5), (2, 5)), complete=False)
    cluster._take_metadata(told((2, 6), (2, 5)), complete=False)
    cluster._take_metadata(told((1, 5), (1, 7)), complete=True)
    assert leaders_of(cluster) == [2, 1], "of each partition the newest"
    cluster._take_metadata(told((1, 5), (2, 5), topic_id=UUID(int=8)), complete=False)
    assert leaders_of(cluster) == [1, 2], "another topic has epochs of its own"

    cluster._take_metadata(told((2, 6), (2, 6), topic_id=UUID(int=8)), complete=False)
    loop = asyncio.get_running_loop()
    later = loop.time() + 100
    monkeypatch.setattr(loop, "time", lambda: later)
    cluster._take_metadata(told((1, 5), (2, 5), topic_id=UUID(int=8)), complete=False)
    assert leaders_of(cluster) == [1, 2], "metadata may have been restored from a backup"
