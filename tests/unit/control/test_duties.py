from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest
from msgspec.structs import replace

from support.control_world import LIMITS, TOPIC_ID, World, directory, duties_of, register
from tidemill.control.commands import (
    PROPOSALS,
    AdmitNode,
    AlterInSync,
    AlterReassignment,
    BumpLeaderEpochs,
    CreatePartitions,
    CreateTopic,
    DeclareFit,
    DeclareUnfit,
    DeleteTopic,
    Election,
    ElectLeaders,
    ForgetDeleted,
    RegisterNode,
    RemoveNode,
    Resign,
    SetClusterId,
    SetNodeTags,
    SettlePartitions,
    SetTopicConfigs,
)
from tidemill.control.image import MetadataDelta, MetadataImage, PartitionImage, TopicPartition
from tidemill.control.planning import plan
from tidemill.control.records import CONTROLLER_KEY, ControllerRecord
from tidemill.control.stores.store import LOST_METADATA
from tidemill.errors import ApiError, ErrorCode


@pytest.fixture
def world() -> World:
    """Three live nodes and a partition on all of them, led by node 1; two must be in sync."""
    world = World(3)
    world.create(1, 2, 3)
    return world


def refusal(world: World, command: object) -> tuple[ErrorCode, str]:
    with pytest.raises(ApiError) as caught:
        world.do(command)  # type: ignore[arg-type]
    return caught.value.code, caught.value.message


def alter(world: World, *isr: int, **changes: object) -> AlterInSync:
    """What the present leader would propose."""
    partition = world.partition()
    fields = {
        "topic_id": TOPIC_ID,
        "index": 0,
        "leader": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "partition_epoch": partition.partition_epoch,
        "isr": isr,
        "node_epochs": {node_id: world.image.node_epoch(node_id) for node_id in isr},
        **changes,
    }
    return AlterInSync(**fields)  # type: ignore[arg-type]


# -- who is live -------------------------------------------------------------------------------------------


def test_a_node_is_live_when_its_session_is_admitted_and_only_as_that_incarnation() -> None:
    world = World()
    world.do(register(1, 5))
    assert not world.image.live(1)
    assert duties_of(world.image) == []
    world.begin_session(1, UUID(int=5))
    assert not world.image.live(1)
    assert duties_of(world.image) == [AdmitNode(node_id=1, incarnation=UUID(int=5))]
    world.settle()
    assert world.image.live(1)
    assert world.image.live_nodes == {1}
    before = world.image
    world.end_session(1)
    assert not world.image.live(1)
    assert MetadataDelta.between(before, world.image).live_changed
    world.start(1)
    assert not world.image.live(1)


def test_on_one_node_every_registered_node_is_live() -> None:
    world = World(replicated=False)
    world.do(register(1, 5))
    assert world.image.live(1)
    assert world.image.live_nodes == {1}
    assert not world.image.live(2)


def test_an_incarnation_that_is_gone_is_not_admitted() -> None:
    world = World(1)
    (admit,) = duties_of(_restarted(world))
    world.end_session(1)
    assert refusal(world, admit)[0] is ErrorCode.stale_broker_epoch


def _restarted(world: World) -> MetadataImage:
    world.end_session(1)
    world.start(1)
    return world.image


# -- leaving and elections ---------------------------------------------------------------------------------


def test_nodes_without_a_session_leave_all_at_once_and_below_the_minimum_they_go_to_elr(world: World) -> None:
    before = world.partition()
    world.end_session(2, 3)
    world.settle()
    after = world.partition()
    assert (after.isr, after.elr, after.min_isr) == ((1,), (2, 3), 2)
    assert (after.leader, after.leader_epoch) == (before.leader, before.leader_epoch)
    assert after.partition_epoch == before.partition_epoch + 1


def test_at_the_minimum_who_leaves_does_not_go_to_elr(world: World) -> None:
    world.end_session(3)
    world.settle()
    assert (world.partition().isr, world.partition().elr) == ((1, 2), ())


def test_the_last_members_stay_and_the_partition_has_no_leader(world: World) -> None:
    world.end_session(1, 2, 3)
    world.settle()
    after = world.partition()
    assert (after.leader, after.leader_epoch) == (-1, 1)
    assert (after.isr, after.elr) == ((1, 2, 3), ())
    world.settle()
    assert world.partition() is after


def test_the_next_live_member_in_the_order_of_replicas_leads_at_a_new_epoch(world: World) -> None:
    world.end_session(1)
    world.settle()
    assert (world.partition().leader, world.partition().leader_epoch) == (2, 1)


def test_suspects_and_nodes_that_are_taken_out_lead_only_if_there_is_nobody_else(world: World) -> None:
    world.end_session(1)
    world.settle(suspects=frozenset({2}))
    assert world.partition().leader == 3
    world = World(3)
    world.create(1, 2, 3)
    world.do(SetNodeTags(node_id=2, tags=("TEMPORARY_OFFLINE",)))
    world.end_session(1)
    world.settle(suspects=frozenset({3}))
    assert world.partition().leader == 2


def test_a_member_of_elr_leads_when_nobody_in_sync_is_left(world: World) -> None:
    world.end_session(2)
    world.end_session(3)
    world.settle()
    world.end_session(1)
    world.settle()
    assert (world.partition().leader, world.partition().isr, world.partition().elr) == (-1, (1,), (2, 3))
    world.start(3, clean_of=world.image.nodes[3].incarnation)
    world.settle()
    after = world.partition()
    assert (after.leader, after.isr, after.elr) == (3, (3,), (1, 2))


def test_the_change_that_reaches_the_minimum_again_empties_elr(world: World) -> None:
    world.end_session(2, 3)
    world.settle()
    world.start(3, clean_of=world.image.nodes[3].incarnation)
    world.settle()
    assert world.partition().elr == (2, 3)
    world.do(alter(world, 1, 3))
    assert (world.partition().isr, world.partition().elr) == ((1, 3), ())


@pytest.mark.parametrize(("minimum", "elr"), [("1", ()), ("3", (2, 3))])
def test_lowering_the_minimum_empties_elr_and_raising_it_does_not(
    world: World, minimum: str, elr: tuple[int, ...]
) -> None:
    world.end_session(2, 3)
    world.settle()
    world.do(SetTopicConfigs(name="t", configs={"min.insync.replicas": minimum}))
    world.settle()
    assert (world.partition().min_isr, world.partition().elr) == (int(minimum), elr)
    if minimum == "3":
        world.do(SetTopicConfigs(name="t", configs={}))
        world.settle()
        assert (world.partition().min_isr, world.partition().elr) == (2, ())


def test_the_minimum_is_two_from_three_replicas_on_and_never_more_than_there_are() -> None:
    world = World(3)
    world.create(1, name="one")
    world.create(1, 2, name="two")
    world.create(1, 2, 3, name="three")
    world.create(1, 2, name="asked", min_insync_replicas="5")
    found = {name: topic.partitions[0].min_isr for name, topic in world.image.topics.items()}
    assert found == {"one": 1, "two": 1, "three": 2, "asked": 2}
    world.do(CreatePartitions(name="asked", new_count=2))
    assert world.partition(1, "asked").min_isr == 2


# -- coming back -------------------------------------------------------------------------------------------


def test_a_new_incarnation_leads_again_only_at_a_higher_epoch_also_as_the_last_member() -> None:
    world = World(1)
    world.create(1)
    world.end_session(1)
    world.start(1, clean_of=world.image.nodes[1].incarnation)
    world.do(duties_of(world.image)[0])
    assert (world.partition().leader, world.partition().leader_epoch) == (-1, 1)
    assert not world.image.live(1)
    world.settle()
    assert (world.partition().leader, world.partition().leader_epoch, world.partition().isr) == (1, 2, (1,))


def test_after_an_unclean_stop_a_node_leaves_where_another_can_lead_and_stays_where_it_is_the_last() -> None:
    world = World(2)
    world.create(1, 2, name="both")
    world.create(2, name="alone")
    world.end_session(2)
    world.start(2)
    world.settle()
    assert world.partition(name="both").isr == (1,)
    assert (world.partition(name="alone").isr, world.partition(name="alone").leader) == ((2,), 2)


def test_an_unclean_node_keeps_no_place_in_elr_and_a_clean_one_does(world: World) -> None:
    world.end_session(2, 3)
    world.settle()
    world.start(2)
    world.start(3, clean_of=world.image.nodes[3].incarnation)
    world.settle()
    assert world.partition().elr == (3,)


def test_a_clean_note_counts_only_for_the_incarnation_that_was_registered_last(world: World) -> None:
    first = world.image.nodes[3].incarnation
    world.end_session(3)
    second = world.start(3, clean_of=first)
    cleans = [world.image.nodes[3].clean]
    for note in (first, second):
        world.settle()
        world.end_session(3)
        world.start(3, clean_of=note)
        cleans.append(world.image.nodes[3].clean)
    assert cleans == [True, False, False]


def test_unclean_nodes_are_admitted_one_at_a_time_after_the_clean_ones(world: World) -> None:
    world.end_session(1, 2, 3)
    world.settle()
    world.start(1)
    world.start(2)
    world.start(3, clean_of=world.image.nodes[3].incarnation)
    assert [each for each in duties_of(world.image) if isinstance(each, AdmitNode)] == [
        AdmitNode(node_id=3, incarnation=world.image.nodes[3].incarnation)
    ]
    world.settle()
    # What the clean one has counts, not what the others may have lost.
    assert (world.partition().leader, world.partition().isr, world.partition().elr) == (3, (3,), ())
    assert world.image.live_nodes == {1, 2, 3}


def test_lost_replicas_leave_both_sets_even_as_the_last() -> None:
    world = World(2)
    world.create(1, 2)
    world.create(2, name="whole")
    world.end_session(1, 2)
    world.settle()
    world.start(1, lost=((TOPIC_ID, 0),), clean_of=world.image.nodes[1].incarnation)
    world.settle()
    assert (world.partition().isr, world.partition().leader) == ((2,), -1)
    world.start(2, lost=((TOPIC_ID, 0),))
    world.settle()
    assert (world.partition().isr, world.partition().elr, world.partition().leader) == ((), (), -1)
    assert world.partition(name="whole").leader == 2
    assert world.image.live_nodes == {1, 2}


def test_a_new_directory_leaves_all_sets_even_as_the_last(world: World) -> None:
    world.create(3, name="alone")
    world.end_session(2, 3)
    world.settle()
    world.start(3, directory_id=directory(30), replace_directory=True)
    world.settle()
    assert world.partition().elr == (2,)
    assert (world.partition(name="alone").isr, world.partition(name="alone").leader) == ((), -1)


def test_what_a_registration_says_of_the_disk_stays_said_until_it_is_admitted(world: World) -> None:
    world.create(3, name="alone")
    world.end_session(3)
    lost = ((TOPIC_ID, 0),)
    world.do(register(3, 50, directory_id=directory(30), replace_directory=True, lost=lost))
    world.do(register(3, 51, directory_id=directory(30), clean_of=UUID(int=50)))
    node = world.image.nodes[3]
    assert (node.new_directory, node.lost, node.clean) == (True, lost, False)
    world.begin_session(3, UUID(int=51))
    world.settle()
    assert world.partition(name="alone").isr == ()
    world.end_session(3)
    world.start(3, directory_id=directory(30), clean_of=UUID(int=51))
    node = world.image.nodes[3]
    assert (node.new_directory, node.lost, node.clean) == (False, (), True)


# -- refused registrations ---------------------------------------------------------------------------------


def test_two_nodes_of_one_name_are_refused_while_the_session_of_the_first_lives(world: World) -> None:
    code, message = refusal(world, register(3, 99))
    assert code is ErrorCode.duplicate_broker_registration
    assert "runs already" in message
    world.do(register(3, 3))
    world.end_session(3)
    world.do(register(3, 99))


def test_another_directory_is_refused_unless_an_operator_says_so(world: World) -> None:
    world.end_session(3)
    code, message = refusal(world, register(3, 99, directory_id=directory(30)))
    assert code is ErrorCode.duplicate_broker_registration
    assert "--replace-directory" in message
    world.do(register(3, 99, directory_id=directory(30), replace_directory=True))


def test_a_node_that_had_no_directory_id_yet_gets_one() -> None:
    world = World()
    world.do(register(1, 1, directory_id=None))
    world.do(register(1, 2))
    assert world.image.nodes[1].directory_id == directory(1)
    assert not world.image.nodes[1].new_directory


def test_a_copied_directory_is_refused_while_the_node_that_has_it_runs(world: World) -> None:
    copied = register(4, 99, directory_id=directory(2))
    code, message = refusal(world, copied)
    assert code is ErrorCode.duplicate_broker_registration
    assert "copied" in message
    world.end_session(2)
    world.do(copied)


def test_nodes_with_and_without_tls_between_them_do_not_run_at_the_same_time() -> None:
    world = World()
    world.start(1, cluster_tls=True)
    world.start(2, cluster_tls=True)
    code, message = refusal(world, register(3, 99, cluster_tls=False))
    assert code is ErrorCode.invalid_config
    assert "this node does not use TLS between nodes (cluster_tls_ca" in message
    assert "node 'n1', which runs, does" in message
    assert "stop all nodes first" in message
    world.end_session(1, 2)
    world.start(3, cluster_tls=False)
    _, message = refusal(world, register(1, 100, cluster_tls=True))
    assert "this node uses TLS between nodes" in message
    assert "node 'n3', which runs, does not" in message


def test_of_a_node_of_an_older_release_it_is_not_known_whether_it_uses_tls_between_nodes() -> None:
    world = World()
    world.start(1)
    assert world.image.nodes[1].cluster_tls is None
    world.start(2, cluster_tls=True)
    world.do(register(1, 1, rack="b"))


def test_a_node_that_has_seen_more_than_the_store_has_is_refused(world: World) -> None:
    world.end_session(3)
    ahead = register(3, 99, seen_revision=world.image.revision + 1)
    code, message = refusal(world, ahead)
    assert code is ErrorCode.inconsistent_cluster_id
    assert LOST_METADATA in message, "the same words as everywhere, which lose no data"
    world.do(register(3, 99, seen_revision=world.image.revision))


def test_a_directory_that_does_not_know_the_last_registration_is_refused_unless_an_operator_says_so(
    world: World,
) -> None:
    world.create(3, name="alone")
    world.end_session(3)
    old = (UUID(int=2), UUID(int=1))
    code, message = refusal(world, register(3, 99, known_as=old))
    assert code is ErrorCode.duplicate_broker_registration
    assert "restored" in message
    assert "--replace-directory" in message
    world.start(3, known_as=old, replace_directory=True)
    world.settle()
    placed = world.partition(name="alone")
    assert (placed.isr, placed.elr, placed.leader) == ((), (), -1), "what it has may not be all"


def test_a_directory_that_knows_the_last_registration_or_is_of_an_older_release_is_taken(
    world: World,
) -> None:
    last = world.image.nodes[3].incarnation
    world.end_session(3)
    world.do(register(3, 99, known_as=(UUID(int=98), last)))
    world.do(register(3, 100, known_as=(UUID(int=99), UUID(int=100))))
    world.do(register(3, 101))
    assert not world.image.nodes[3].new_directory


def test_registering_the_same_incarnation_again_changes_nothing(world: World) -> None:
    before = world.image
    world.do(register(3, 3))
    assert world.image is before


# -- proposals of leaders ----------------------------------------------------------------------------------


def test_a_leader_shrinks_and_grows_the_in_sync_set(world: World) -> None:
    epoch = world.image.node_epoch(3)
    assert world.do(alter(world, 1, 2)).isr == (1, 2)
    grown = world.do(alter(world, 3, 2, 1))
    assert (grown.isr, grown.partition_epoch, grown.leader_epoch) == ((1, 2, 3), 2, 0)
    assert world.image.node_epoch(3) == epoch


def test_a_proposal_whose_result_is_in_place_is_done(world: World) -> None:
    proposal = alter(world, 1, 2)
    world.do(proposal)
    before = world.image
    assert world.do(proposal).partition_epoch == 1
    assert world.image is before


def test_a_proposal_of_the_present_set_ends_an_older_one_whose_outcome_nobody_knows(world: World) -> None:
    world.do(alter(world, 1, 2))
    older = alter(world, 1, 2, 3)
    before = world.partition()
    after = world.do(alter(world, 1, 2))
    assert after.isr == before.isr
    assert after.partition_epoch == before.partition_epoch + 1, "the leader hears of it, as of any change"
    assert refusal(world, older)[0] is ErrorCode.invalid_update_version


def test_proposals_that_are_refused(world: World) -> None:
    world.do(alter(world, 1, 2))
    world.end_session(3)
    epochs = {3: world.image.node_epoch(3)}
    assert refusal(world, alter(world, 1, partition_epoch=0))[0] is ErrorCode.invalid_update_version
    assert refusal(world, alter(world, 1, leader_epoch=1))[0] is ErrorCode.fenced_leader_epoch
    assert refusal(world, alter(world, 2, leader=2))[0] is ErrorCode.fenced_leader_epoch
    assert refusal(world, alter(world, 2))[0] is ErrorCode.invalid_request
    assert refusal(world, alter(world, 1, 9))[0] is ErrorCode.invalid_request
    assert refusal(world, alter(world, 1, 2, 3))[0] is ErrorCode.ineligible_replica
    assert refusal(world, alter(world, 1, topic_id=UUID(int=1)))[0] is ErrorCode.unknown_topic_id
    assert refusal(world, alter(world, 1, index=1))[0] is ErrorCode.unknown_topic_or_partition
    world.start(3)
    world.settle()
    # It is live again, but another incarnation than the one that had caught up.
    assert refusal(world, alter(world, 1, 2, 3, node_epochs=epochs))[0] is ErrorCode.ineligible_replica
    world.do(alter(world, 1, 2, 3))
    world.end_session(1)
    assert refusal(world, alter(world, 1))[0] is ErrorCode.stale_broker_epoch


def test_what_decides_about_a_new_member_guards_the_change(world: World) -> None:
    world.do(alter(world, 1, 2))
    planned = plan(world.image, alter(world, 1, 2, 3), LIMITS)
    assert {"nodes/3", "alive/3"} < planned.guards.keys()
    world.end_session(3)
    world.start(3)
    (admit,) = (each for each in duties_of(world.image) if isinstance(each, AdmitNode))
    assert {"nodes/3", "alive/3", "admitted/3"} == plan(world.image, admit, LIMITS).guards.keys()


def resign(world: World) -> PartitionImage:
    leader, epoch = world.partition().leader, world.partition().leader_epoch
    return world.do(Resign(topic_id=TOPIC_ID, index=0, node_id=leader, leader_epoch=epoch))


def unfit(world: World, node_id: int, **fields: Any) -> DeclareUnfit:
    """What a node says of its replica that knows the present record."""
    return DeclareUnfit(
        **{
            "topic_id": TOPIC_ID,
            "index": 0,
            "node_id": node_id,
            "node_epoch": world.image.node_epoch(node_id),
            "leader_epoch": world.partition().leader_epoch,
            **fields,
        }
    )


def test_a_leader_that_resigns_is_followed_by_another_member_or_stays(world: World) -> None:
    after = resign(world)
    assert (after.leader, after.leader_epoch, after.isr) == (2, 1, (1, 2, 3))
    repeated = Resign(topic_id=TOPIC_ID, index=0, node_id=1, leader_epoch=0)
    assert world.do(repeated) == after
    wrong = Resign(topic_id=TOPIC_ID, index=0, node_id=1, leader_epoch=1)
    assert refusal(world, wrong)[0] is ErrorCode.fenced_leader_epoch
    world.end_session(1, 3)
    world.settle()
    assert resign(world).leader == 2


def test_an_unfit_leader_leaves_the_in_sync_set_when_another_one_leads(world: World) -> None:
    after = world.do(unfit(world, 1))
    assert (after.leader, after.isr, after.elr, after.unfit) == (2, (2, 3), (), (1,))


@pytest.mark.parametrize(("failed", "elr"), [(False, (1,)), (True, ())])
def test_an_unfit_leader_is_eligible_below_the_minimum_unless_its_storage_has_failed(
    world: World, failed: bool, elr: tuple[int, ...]
) -> None:
    world.do(alter(world, 1, 2))
    after = world.do(unfit(world, 1, failed=failed))
    assert (after.leader, after.isr, after.elr) == (2, (2,), elr)


def test_an_unfit_leader_does_not_lead_again_until_it_says_so(world: World) -> None:
    world.end_session(2, 3)
    world.settle()
    world.do(unfit(world, 1))
    world.settle()
    stuck = world.partition()
    assert (stuck.leader, stuck.unfit, stuck.isr) == (-1, (1,), (1,))
    world.end_session(1)
    world.start(1)
    world.settle()
    assert world.partition() == stuck, "another session does not make a disk well"
    fit = world.do(DeclareFit(topic_id=TOPIC_ID, index=0, node_id=1))
    assert fit.unfit == ()
    world.settle()
    assert world.partition().leader == 1


def test_an_unfit_leader_is_followed_by_a_member_of_elr(world: World) -> None:
    world.end_session(2, 3)
    world.settle()
    world.start(3, clean_of=world.image.nodes[3].incarnation)
    world.settle()
    after = world.do(unfit(world, 1))
    assert (after.leader, after.isr, after.elr) == (3, (3,), (1, 2))


def test_an_unfit_leader_is_followed_by_the_successor_that_is_wanted(world: World) -> None:
    world.set_partition(replace(world.partition(), successor=3))
    assert world.do(unfit(world, 1)).leader == 3


def test_an_unfit_follower_is_not_elected_until_it_says_that_it_is_fit(world: World) -> None:
    after = world.do(unfit(world, 2))
    assert (after.leader, after.leader_epoch, after.isr, after.unfit) == (1, 0, (1, 2, 3), (2,))
    world.settle()
    assert world.partition() == after
    assert world.do(unfit(world, 2)) == after, "said twice, it changes nothing"
    assert resign(world).leader == 3
    world.end_session(1, 3)
    world.settle()
    stuck = world.partition()
    assert (stuck.leader, {*stuck.isr, *stuck.elr}) == (-1, {1, 2, 3})
    world.do(DeclareFit(topic_id=TOPIC_ID, index=0, node_id=2))
    world.settle()
    assert (world.partition().leader, world.partition().unfit) == (2, ())


def test_an_unfit_follower_can_join_the_in_sync_set_and_cannot_lead(world: World) -> None:
    world.do(alter(world, 1, 2))
    world.do(unfit(world, 3))
    after = world.do(alter(world, 1, 2, 3))
    assert (after.isr, after.unfit) == ((1, 2, 3), (3,))
    world.end_session(1, 2)
    world.settle()
    assert world.partition().leader == -1


def test_a_failed_follower_leaves_the_in_sync_set_and_is_not_eligible(world: World) -> None:
    world.do(alter(world, 1, 2))
    after = world.do(unfit(world, 2, failed=True))
    assert (after.leader, after.leader_epoch, after.isr, after.elr, after.unfit) == (1, 0, (1,), (), (2,))


def test_a_failed_replica_is_not_eligible_any_more(world: World) -> None:
    world.do(alter(world, 1))
    assert world.partition().elr == (2, 3)
    after = world.do(unfit(world, 3, failed=True))
    assert (after.isr, after.elr, after.unfit) == ((1,), (2,), (3,))


@pytest.mark.parametrize(("failed", "isr"), [(False, (1, 2, 3)), (True, (2, 3))])
def test_a_leader_that_was_replaced_meanwhile_is_unfit_and_if_it_has_failed_out_of_sync(
    world: World, failed: bool, isr: tuple[int, ...]
) -> None:
    said = unfit(world, 1, failed=failed)
    moved = resign(world)
    after = world.do(said)
    assert (after.leader, after.leader_epoch) == (moved.leader, moved.leader_epoch)
    assert (after.isr, after.unfit) == (isr, (1,))


def test_a_leadership_of_another_epoch_is_not_given_up(world: World) -> None:
    """The node may rely on it: it has not said that it gives it up."""
    said = unfit(world, 1, failed=True)
    resign(world)
    world.do(unfit(world, 2))
    world.do(unfit(world, 3))
    again = world.partition()
    assert again.leader == 1
    after = world.do(said)
    assert (after.leader, after.leader_epoch, after.isr) == (1, again.leader_epoch, again.isr)
    assert after.unfit == (1, 2, 3)


def test_the_last_replica_stays_in_sync_although_its_storage_has_failed(world: World) -> None:
    world.end_session(2, 3)
    world.settle()
    after = world.do(unfit(world, 1, failed=True))
    assert (after.leader, after.isr, after.elr) == (-1, (1,), (2, 3))
    world.start(2, clean_of=world.image.nodes[2].incarnation)
    world.settle()
    assert world.partition().leader == 2
    after = world.do(unfit(world, 1, failed=True))
    assert (after.isr, after.elr) == ((2,), (3,)), "it says so again, and another one leads now"


def test_what_a_process_said_of_its_disk_is_not_true_of_the_next_one(world: World) -> None:
    said = unfit(world, 2, failed=True)
    assert "nodes/2" in plan(world.image, said, LIMITS).guards
    world.end_session(2)
    world.start(2, clean_of=world.image.nodes[2].incarnation)
    world.settle()
    assert refusal(world, said)[0] is ErrorCode.stale_broker_epoch
    assert world.partition().unfit == ()


def test_what_a_node_says_that_holds_no_replica_changes_nothing() -> None:
    world = World(4)
    before = world.create(1, 2, 3).partitions[0]
    assert world.do(unfit(world, 4)) == before


# -- moves -------------------------------------------------------------------------------------------------


def move(world: World, *replicas: int) -> PartitionImage:
    return world.do(AlterReassignment(name="t", index=0, replicas=replicas))


def test_a_move_waits_for_the_new_replicas_and_for_the_leader_to_resign() -> None:
    world = World(4)
    world.create(1, 2)
    begun = move(world, 4, 2, 3)
    assert begun.replicas == (4, 2, 3, 1)
    assert (begun.adding, begun.removing, begun.isr, begun.min_isr) == ((4, 3), (1,), (2, 1), 1)
    world.settle()
    assert world.partition() == begun
    assert move(world, 4, 2, 3) == begun
    world.do(alter(world, 1, 2, 3))
    world.settle()
    assert world.partition().successor == -1
    world.do(alter(world, 1, 2, 3, 4))
    world.settle()
    assert (world.partition().successor, world.partition().leader) == (4, 1)
    assert resign(world).leader == 4
    world.settle()
    done = world.partition()
    assert (done.replicas, done.isr, done.adding, done.removing) == ((4, 2, 3), (4, 2, 3), (), ())
    assert (done.leader, done.leader_epoch, done.min_isr, done.successor) == (4, 1, 2, -1)
    assert world.image.replica_counts == {2: 1, 3: 1, 4: 1}


def test_a_move_is_finished_without_the_leader_if_its_session_is_over() -> None:
    world = World(3)
    world.create(1, 2)
    move(world, 2, 3)
    world.do(alter(world, 1, 2, 3))
    world.end_session(1)
    world.settle()
    assert (world.partition().replicas, world.partition().leader) == ((2, 3), 2)


def test_a_cancelled_move_leaves_the_replicas_that_were_there() -> None:
    world = World(3)
    world.create(1, 2)
    move(world, 3, 1)
    world.do(alter(world, 1, 2, 3))
    cancelled = world.do(AlterReassignment(name="t", index=0, replicas=None))
    assert ({*cancelled.replicas}, {*cancelled.isr}, cancelled.adding) == ({1, 2}, {1, 2}, ())
    code, _ = refusal(world, AlterReassignment(name="t", index=0, replicas=None))
    assert code is ErrorCode.no_reassignment_in_progress


def test_a_move_that_is_cancelled_under_an_added_leader_is_turned_round() -> None:
    world = World(3)
    world.create(1, 2)
    move(world, 3, 2)
    world.do(alter(world, 1, 2, 3))
    world.set_partition(replace(world.partition(), leader=3, leader_epoch=1))
    turned = world.do(AlterReassignment(name="t", index=0, replicas=None))
    assert (turned.replicas, turned.adding, turned.removing, turned.leader) == ((2, 1, 3), (), (3,), 3)
    world.settle()
    assert world.partition().successor in (1, 2)
    resign(world)
    world.settle()
    assert {*world.partition().replicas} == {1, 2}


def test_moves_that_are_refused(world: World) -> None:
    for replicas in ((), (1, 1), (1, 9)):
        command = AlterReassignment(name="t", index=0, replicas=replicas)
        assert refusal(world, command)[0] is ErrorCode.invalid_replica_assignment
    world.do(AlterReassignment(name="t", index=0, replicas=(1, 2)))
    other = AlterReassignment(name="t", index=0, replicas=(1, 3))
    assert refusal(world, other)[0] is ErrorCode.reassignment_in_progress


def test_another_order_of_the_same_replicas_is_no_move(world: World) -> None:
    assert move(world, 3, 2, 1).replicas == (3, 2, 1)
    assert (world.partition().adding, world.partition().removing) == ((), ())
    world.settle()
    assert world.partition().leader == 1


# -- elections that somebody asks for ----------------------------------------------------------------------


def test_a_preferred_leader_is_a_wish_that_the_live_leader_obeys_by_resigning(world: World) -> None:
    resign(world)
    prefer = ElectLeaders(name="t", partitions=(0,))
    assert world.do(prefer) == {0: ErrorCode.none}
    assert (world.partition().leader, world.partition().successor) == (2, 1)
    before = world.image
    assert world.do(prefer) == {0: ErrorCode.none}
    assert world.image is before
    assert resign(world).leader == 1
    assert world.partition().successor == -1
    assert world.do(prefer) == {0: ErrorCode.election_not_needed}


def test_a_wish_ends_with_the_wanted_replica(world: World) -> None:
    resign(world)
    world.do(ElectLeaders(name="t", partitions=(0,)))
    world.end_session(1)
    world.settle()
    assert (world.partition().successor, world.partition().leader) == (-1, 2)
    assert world.do(ElectLeaders(name="t", partitions=(0,))) == {0: ErrorCode.preferred_leader_not_available}


def test_an_unclean_election_takes_the_named_live_replica_of_a_partition_without_a_leader(
    world: World,
) -> None:
    def unclean(leader: int | None) -> ErrorCode:
        command = ElectLeaders(name="t", partitions=(0,), election=Election.UNCLEAN, leader=leader, who="me")
        return world.do(command)[0]

    assert unclean(2) is ErrorCode.election_not_needed
    world.do(alter(world, 1))
    world.do(SetTopicConfigs(name="t", configs={"min.insync.replicas": "1"}))
    world.settle()
    world.end_session(1, 3)
    world.settle()
    assert (world.partition().leader, world.partition().isr) == (-1, (1,))
    assert unclean(None) is ErrorCode.eligible_leaders_not_available
    assert unclean(3) is ErrorCode.eligible_leaders_not_available
    assert unclean(2) is ErrorCode.none
    after = world.partition()
    assert (after.leader, after.isr, after.elr) == (2, (2,), ())


# -- deleted topics, tags, removal -------------------------------------------------------------------------


def test_a_deleted_topic_is_remembered_until_every_node_has_removed_its_files(world: World) -> None:
    before = world.image
    world.do(DeleteTopic(name="t"))
    assert world.image.deleted_topics[TOPIC_ID].nodes == (1, 2, 3)
    assert MetadataDelta.between(before, world.image).deleted_topics_changed
    reused = CreateTopic(name="u", topic_id=TOPIC_ID, partitions=1)
    assert refusal(world, reused)[0] is ErrorCode.invalid_request
    for node_id in (1, 3, 3):
        world.do(ForgetDeleted(topic_id=TOPIC_ID, node_id=node_id))
    assert world.image.deleted_topics[TOPIC_ID].nodes == (2,)
    assert duties_of(world.image) == []
    world.end_session(2)
    world.do(RemoveNode(node_id=2))
    world.settle()
    assert not world.image.deleted_topics


def test_a_deleted_topic_of_one_node_leaves_no_record() -> None:
    world = World(replicated=False)
    world.do(register(1, 1))
    world.create(1)
    world.do(DeleteTopic(name="t"))
    assert not world.image.deleted_topics


def test_a_node_is_removed_once_it_is_stopped_and_holds_nothing(world: World) -> None:
    assert "runs" in refusal(world, RemoveNode(node_id=3))[1]
    world.do(SetNodeTags(node_id=3, tags=("PERMANENT_OFFLINE",)))
    world.end_session(3)
    world.settle()
    assert "holds 1 replicas: t-0" in refusal(world, RemoveNode(node_id=3))[1]
    world.do(DeleteTopic(name="t"))
    world.do(RemoveNode(node_id=3))
    assert 3 not in world.image.nodes
    assert (world.image.node_tags, 3 in world.image.admitted) == ({}, False)
    world.do(RemoveNode(node_id=3))


def test_tags_keep_the_node_epoch_and_new_replicas_away(world: World) -> None:
    epoch, before = world.image.node_epoch(2), world.image
    world.do(SetNodeTags(node_id=2, tags=("TEMPORARY_OFFLINE",)))
    assert world.image.node_epoch(2) == epoch
    assert MetadataDelta.between(before, world.image).nodes_changed
    topic = world.do(CreateTopic(name="u", topic_id=UUID(int=9), partitions=6, replication=2))
    assert {node_id for p in topic.partitions for node_id in p.replicas} == {1, 3}
    too_many = CreateTopic(name="v", topic_id=UUID(int=8), partitions=1, replication=3)
    assert refusal(world, too_many)[0] is ErrorCode.invalid_replication_factor
    assert refusal(world, SetNodeTags(node_id=9, tags=()))[0] is ErrorCode.broker_id_not_registered


def test_nodes_that_are_down_get_no_place_in_new_in_sync_sets(world: World) -> None:
    world.end_session(1)
    topic = world.create(1, 2, 3, name="new")
    assert (topic.partitions[0].leader, topic.partitions[0].isr) == (2, (2, 3))
    down = CreateTopic(name="v", topic_id=UUID(int=8), assignments=((1,),))
    assert refusal(world, down)[0] is ErrorCode.invalid_replica_assignment


def test_only_a_node_that_is_alone_bumps_epochs_by_itself(world: World) -> None:
    assert refusal(world, BumpLeaderEpochs(name="t", partitions=(0,)))[0] is ErrorCode.invalid_request


def test_a_cluster_becomes_replicated_once_and_for_good() -> None:
    world = World(replicated=False)
    world.do(SetClusterId(cluster_id="c", replicated=True))
    assert world.image.replicated
    world.do(SetClusterId(cluster_id="c"))
    assert world.image.replicated


# -- the image ---------------------------------------------------------------------------------------------


def test_the_controller_of_the_image_has_the_revision_of_its_key_as_its_epoch(world: World) -> None:
    before = world.image
    world.write(**{CONTROLLER_KEY: ControllerRecord(node_id=2, incarnation=UUID(int=2))})
    assert world.image.controller is not None
    assert (world.image.controller.node_id, world.image.controller.epoch) == (2, world.image.revision)
    assert MetadataDelta.between(before, world.image).controller_changed
    world.write(**{CONTROLLER_KEY: None})
    assert world.image.controller is None


def test_the_delta_tells_changes_of_leaders_from_others(world: World) -> None:
    here = (TopicPartition("t", 0),)
    before = world.image
    world.do(alter(world, 1, 2))
    delta = MetadataDelta.between(before, world.image)
    assert (delta.leader_changed, delta.replicas_changed) == ((), here)
    before = world.image
    world.do(alter(world, 1, 2))
    delta = MetadataDelta.between(before, world.image)
    assert (delta.leader_changed, delta.replicas_changed) == ((), here), "the partition epoch has changed"
    before = world.image
    resign(world)
    delta = MetadataDelta.between(before, world.image)
    assert (delta.leader_changed, delta.replicas_changed) == (here, ())
    assert not delta.live_changed


def test_a_chunk_of_a_thousand_partitions_is_settled_in_one_short_step() -> None:
    world = World(3)
    world.create(1, 2, 3, partitions=2_500)
    world.end_session(1)
    found = duties_of(world.image)
    assert [(each.chunk, type(each)) for each in found if isinstance(each, SettlePartitions)] == [
        (0, SettlePartitions),
        (1, SettlePartitions),
        (2, SettlePartitions),
    ]
    assert [world.do(command) for command in found] == [1_000, 1_000, 500]
    assert all(each.leader == 2 for each in world.image.topics["t"].partitions)
    assert duties_of(world.image) == []


def test_commands_can_be_sent_and_read_again() -> None:
    proposal = AlterInSync(
        topic_id=TOPIC_ID, index=0, leader=1, leader_epoch=0, partition_epoch=3, isr=(1,), node_epochs={1: 5}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(proposal), type=PROPOSALS) == proposal
    assert RegisterNode not in PROPOSALS.__args__
