"""What a node does for its groups when it starts."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic, DeleteTopic, SetGroupConfigs
from tidemill.errors import ErrorCode
from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.node import Node


async def start(directory: Path) -> Node:
    settings = Settings(
        data_dir=directory,
        listen=Address("127.0.0.1", 0),
        http=None,
        offsets_topic_partitions=1,
        group_consumer_heartbeat_interval_ms=700,
    )
    node = Node(settings)
    await node.start()
    return node


async def test_offsets_of_a_topic_whose_deletion_was_cut_off_are_gone_after_a_start(tmp_path: Path) -> None:
    node = await start(tmp_path)
    broker = node.broker
    for name in ("kept", "gone"):
        await broker.controller.submit(CreateTopic(name=name, topic_id=uuid4(), partitions=1, replication=1))
    await broker.coordinators.ensure_topic(GROUPS)
    commit = OffsetCommitRequest("g", [OffsetToCommit("kept", 0, 5), OffsetToCommit("gone", 0, 6)])
    assert set((await broker.groups.commit_offsets(commit)).values()) == {ErrorCode.none}
    # The metadata is changed, and what should follow does not come.
    await broker.controller.submit(DeleteTopic(name="gone", topic_id=broker.find.topic("gone").id))
    assert ("gone", 0) in (await broker.groups.fetch_offsets("g", None)).offsets
    await node.stop()

    again = await start(tmp_path)
    assert list((await again.broker.groups.fetch_offsets("g", None)).offsets) == [("kept", 0)]
    await again.stop()


async def test_a_member_goes_on_in_its_epoch_after_a_restart_and_has_the_nodes_settings(
    tmp_path: Path,
) -> None:
    node = await start(tmp_path)
    await node.broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=2, replication=1))
    await node.broker.coordinators.ensure_topic(GROUPS)
    join = ConsumerHeartbeatRequest(
        "g", "m", 0, topics=frozenset({"t"}), rebalance_timeout_ms=1_000, owned=frozenset()
    )
    joined = await node.broker.groups.consumer_heartbeat(join)
    assert (joined.error, joined.heartbeat_interval_ms) == (ErrorCode.none, 700)
    assert joined.assignment is not None
    assert len(joined.assignment) == 2
    await node.stop()

    again = await start(tmp_path)
    beat = ConsumerHeartbeatRequest("g", "m", joined.member_epoch, owned=joined.assignment)
    stayed = await again.broker.groups.consumer_heartbeat(beat)
    assert (stayed.error, stayed.member_epoch, stayed.assignment) == (
        ErrorCode.none,
        joined.member_epoch,
        None,
    )
    # A config of the group counts from the next heartbeat on.
    own = SetGroupConfigs(group_id="g", configs={"consumer.heartbeat.interval.ms": "900"})
    await again.broker.controller.submit(own)
    assert (await again.broker.groups.consumer_heartbeat(beat)).heartbeat_interval_ms == 900
    await again.stop()
