"""Newest answers: until when a leader may say what is newest, by its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tidemill.replication.assignment import PartitionAssignment
from tidemill.replication.partition import Partition
from tidemill.server.cluster.membership import Membership


@pytest.mark.parametrize(
    ("now_ms", "replicas", "may"),
    [
        (4_999, (1, 2, 3), True),
        (5_000, (1, 2, 3), False),
        (9_000, (1, 2), False),
        (9_000, (1,), True),
    ],
)
def test_a_leader_relies_on_its_session_unless_it_is_the_only_replica(
    now_ms: int, replicas: tuple[int, ...], may: bool
) -> None:
    session = SimpleNamespace(serving_until_ms=5_000)
    member = cast(Membership, SimpleNamespace(_steady_ms=lambda: now_ms, session=session))
    assignment = PartitionAssignment(1, 0, replicas, replicas)
    partition = cast(Partition, SimpleNamespace(assignment=assignment))
    assert Membership.may_answer_newest(member, partition) is may


def test_a_partition_without_an_assignment_relies_on_the_session() -> None:
    member = cast(
        Membership, SimpleNamespace(_steady_ms=lambda: 1, session=SimpleNamespace(serving_until_ms=0))
    )
    assert not Membership.may_answer_newest(member, cast(Partition, SimpleNamespace(assignment=None)))
