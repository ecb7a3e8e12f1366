"""Requests about a table whose buckets several nodes lead: who is asked what, and what a failure leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.client.cluster import Cluster
from tidemill.client.tables.leaders import ask_leaders
from tidemill.client.tables.pinning import pin_once, release_pin
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.net.retry import RetryPolicy, retry
from tidemill.tables.definition import TableDefinition

TABLE = cast(
    TableDefinition,
    SimpleNamespace(
        name="shop.stock", table_id=7, buckets=3, partitions=[SimpleNamespace(id=0, topic="shop.stock")]
    ),
)


class FakeNode:
    """Answers as a node that has these pins and leads these buckets."""

    def __init__(self, world: FakeCluster, node_id: int) -> None:
        self.world = world
        self.node_id = node_id
        self.pins: dict[str, list[int]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def request(self, name: str, body: dict[str, Any], **options: Any) -> Any:
        self.asked.append((name, body))
        named = [each["bucket"] for each in body.get("buckets", ())]
        answer = SimpleNamespace(error_code=0, error_message=None, expires_in_ms=1_000, node_id=self.node_id)
        answer.buckets = [SimpleNamespace(partition_id=0, bucket=bucket, log_offset=9) for bucket in named]
        if any(self.world.really_led[bucket] != self.node_id for bucket in named):
            answer.error_code = ErrorCode.not_leader_or_follower
        elif name == "PinTable":
            answer.pin_id = body.get("pin_id") or "made here"
            self.pins[answer.pin_id] = named
        elif name == "ReleasePin" and body["keep_alive"] and body["pin_id"] not in self.pins:
            answer.error_code = TableCode.pin_not_found
        elif name == "ReleasePin" and not body["keep_alive"]:
            self.pins.pop(body["pin_id"], None)
        return answer


class FakeCluster:
    """As much of ``Cluster`` as is used here. ``led`` is what the client knows, until it asks again."""

    timeout_ms = 1_000

    def __init__(self, led: list[int], really_led: list[int] | None = None) -> None:
        self.led = led
        self.really_led = really_led or led
        self.fakes = {node_id: FakeNode(self, node_id) for node_id in (1, 2)}
        self.nodes = dict.fromkeys(set(self.really_led))

    async def know_nodes(self) -> None:
        """They are known."""

    async def leaders(self, places: Any) -> dict[int, list[tuple[str, int]]]:
        found: dict[int, list[tuple[str, int]]] = {}
        for topic, bucket in places:
            found.setdefault(self.led[bucket], []).append((topic, bucket))
        return found

    async def connection(self, node_id: int, purpose: str) -> FakeNode:
        return self.fakes[node_id]

    async def to_any(self, name: str, body: dict[str, Any]) -> Any:
        return await self.fakes[1].request(name, body)

    async def retrying(self, action: Any) -> Any:
        def ask_again() -> None:
            self.led = self.really_led

        return await retry(action, RetryPolicy(10_000, 1, 1), before_next=ask_again)


def usable(fake: FakeCluster) -> Cluster:
    return cast(Cluster, fake)


async def test_a_table_on_several_nodes_is_pinned_on_each_under_one_id() -> None:
    fake = FakeCluster([1, 2, 1])
    answers = await pin_once(usable(fake), TABLE, {(0, 1): 5, (0, 2): 6}, 0)
    assert answers.keys() == {1, 2}
    (pin_id,) = {answer.pin_id for answer in answers.values()}
    assert len(bytes.fromhex(pin_id)) == 12
    assert [fake.fakes[node].pins for node in (1, 2)] == [{pin_id: [0, 2]}, {pin_id: [1]}]
    waited = {node: body["min_offsets"] for node in (1, 2) for _, body in fake.fakes[node].asked}
    assert waited == {
        1: [{"partition_id": 0, "bucket": 2, "offset": 6}],
        2: [{"partition_id": 0, "bucket": 1, "offset": 5}],
    }
    await release_pin(usable(fake), pin_id, [1, 2], "it", keep_alive=False)
    assert [fake.fakes[node].pins for node in (1, 2)] == [{}, {}]


async def test_a_single_node_is_asked_as_ever() -> None:
    fake = FakeCluster([1, 1, 1])
    answers = await pin_once(usable(fake), TABLE, {}, 0)
    assert answers[1].pin_id == "made here"
    ((_, body),) = fake.fakes[1].asked
    assert body.keys() == {"table_id", "min_offsets", "max_wait_ms", "idle_ms"}
    await release_pin(usable(fake), "made here", (), "it", keep_alive=True)


async def test_if_one_node_refuses_the_pins_of_the_others_are_released() -> None:
    fake = FakeCluster([1, 2, 1], really_led=[1, 1, 2])
    with pytest.raises(ApiError) as caught:
        await pin_once(usable(fake), TABLE, {}, 0)
    assert caught.value.code == ErrorCode.not_leader_or_follower
    assert [fake.fakes[node].pins for node in (1, 2)] == [{}, {}]


async def test_a_pin_is_kept_alive_on_all_its_nodes_or_is_lost() -> None:
    fake = FakeCluster([1, 2, 1])
    (pin_id,) = {each.pin_id for each in (await pin_once(usable(fake), TABLE, {}, 0)).values()}
    del fake.fakes[2].pins[pin_id]
    with pytest.raises(TableError) as caught:
        await release_pin(usable(fake), pin_id, [1, 2], "it", keep_alive=True)
    assert caught.value.table_code is TableCode.pin_not_found
    # Whoever does not know its nodes asks all: those that never had it are no news.
    await release_pin(usable(fake), pin_id, (), "it", keep_alive=True)
    fake.fakes[1].pins.clear()
    with pytest.raises(TableError):
        await release_pin(usable(fake), pin_id, (), "it", keep_alive=True)


async def test_leaders_are_asked_again_when_one_of_them_has_changed() -> None:
    fake = FakeCluster([1, 2, 1], really_led=[1, 1, 2])
    answers = await ask_leaders(usable(fake), TABLE, "TableStats", {"table": "shop.stock"}, "it")
    found = {each.node_id: [bucket.bucket for bucket in each.buckets] for each in answers}
    assert found == {1: [0, 1], 2: [2]}
