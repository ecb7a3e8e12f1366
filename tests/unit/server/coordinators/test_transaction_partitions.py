"""Markers to partitions of other nodes: what is sent, and what an answer means."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.server.coordinators import transaction_partitions
from tidemill.server.coordinators.transaction_partitions import (
    LocalTransactionPartitions,
    NodeTransactionPartitions,
)
from tidemill.transactions.messages import Producer, TopicPartition, TransactionEnd

HERE, THERE, NOBODY = 1, 2, -1
LEADERS = {("t", 0): HERE, ("t", 1): THERE, ("t", 2): THERE, ("u", 0): NOBODY}


def marker(producer_id: int) -> TransactionEnd:
    return TransactionEnd(Producer(producer_id, 0), commit=True, coordinator_epoch=7)


class Other:
    """The other node: answers with ``codes``, by producer and partition."""

    def __init__(self) -> None:
        self.codes: dict[tuple[int, TopicPartition], ErrorCode] = {}
        self.asked: list[Mapping[str, Any]] = []
        self.is_reachable = True

    async def ask(self, node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
        assert (node_id, api) == (THERE, "WriteTxnMarkers")
        if not self.is_reachable:
            raise NodeUnavailable("gone")
        self.asked.append(body)
        return SimpleNamespace(
            markers=[
                SimpleNamespace(
                    topics=[
                        SimpleNamespace(
                            name=topic["name"],
                            partitions=[
                                SimpleNamespace(
                                    partition_index=index,
                                    error_code=self.codes.get(
                                        (each["producer_id"], (topic["name"], index)), ErrorCode.none
                                    ),
                                )
                                for index in topic["partition_indexes"]
                            ],
                        )
                        for topic in each["topics"]
                    ]
                )
                for each in body["markers"]
            ]
        )


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def partitions(other: Other) -> NodeTransactionPartitions:
    topics = {
        name: SimpleNamespace(
            partitions=[SimpleNamespace(leader=LEADERS[place]) for place in LEADERS if place[0] == name]
        )
        for name in ("t", "u")
    }
    find = SimpleNamespace(image=SimpleNamespace(topics=topics))
    local = SimpleNamespace(allow_writes=None, together=None)
    return NodeTransactionPartitions(
        cast("LocalTransactionPartitions", local), cast("Any", find), HERE, other.ask
    )


def test_partitions_are_grouped_by_their_leader(partitions: NodeTransactionPartitions) -> None:
    gone = ("t", 3)
    assert partitions.by_leader([*LEADERS, gone]) == (
        [("t", 0), gone],
        [[("t", 1), ("t", 2)], [("u", 0)]],
    )


async def test_one_request_has_all_markers_for_a_node(
    partitions: NodeTransactionPartitions, other: Other
) -> None:
    markers = {("t", 1): [marker(5), marker(6)], ("t", 2): [marker(5)]}
    assert await partitions.write(markers) == {}
    (body,) = other.asked
    assert [(each["producer_id"], each["topics"]) for each in body["markers"]] == [
        (5, [{"name": "t", "partition_indexes": [1, 2]}]),
        (6, [{"name": "t", "partition_indexes": [1]}]),
    ]


async def test_very_many_markers_go_in_several_requests_and_those_of_a_partition_in_one(
    partitions: NodeTransactionPartitions, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_partitions, "MARKERS_MAX", 2)
    markers = {("t", 1): [marker(5), marker(6), marker(7)], ("t", 2): [marker(5)]}
    assert await partitions.write(markers) == {}
    assert [len(body["markers"]) for body in other.asked] == [3, 1]


async def test_what_the_other_node_does_not_know_may_come_to_it_later(
    partitions: NodeTransactionPartitions, other: Other
) -> None:
    other.codes[5, ("t", 1)] = ErrorCode.unknown_topic_or_partition
    failures = await partitions.write({("t", 1): [marker(5)], ("t", 2): [marker(5)]})
    assert {place: error.code for place, error in failures.items()} == {
        ("t", 1): ErrorCode.not_leader_or_follower
    }


@pytest.mark.parametrize("first", [5, 6])
async def test_the_error_that_must_be_tried_again_counts_for_more_than_one_of_an_old_epoch(
    partitions: NodeTransactionPartitions, other: Other, first: int
) -> None:
    other.codes[first, ("t", 1)] = ErrorCode.invalid_producer_epoch
    failures = await partitions.write({("t", 1): [marker(5), marker(6)]})
    assert failures["t", 1].code is ErrorCode.invalid_producer_epoch
    other.codes[11 - first, ("t", 1)] = ErrorCode.not_leader_or_follower
    failures = await partitions.write({("t", 1): [marker(5), marker(6)]})
    assert failures["t", 1].code is ErrorCode.not_leader_or_follower


async def test_a_leader_that_is_not_there_is_an_error_of_each_partition(
    partitions: NodeTransactionPartitions, other: Other
) -> None:
    other.is_reachable = False
    failures = await partitions.write({("t", 1): [marker(5)], ("t", 2): [marker(5)]})
    assert set(failures) == {("t", 1), ("t", 2)}
    failures = await partitions.write({("u", 0): [marker(5)]})
    assert failures["u", 0].code is ErrorCode.leader_not_available
