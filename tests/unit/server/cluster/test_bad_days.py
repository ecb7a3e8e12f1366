"""What a cluster does on bad days, on three whole nodes in one process.

Nodes that must not join are in ``tests/system/test_cluster_membership.py``, bad disks of nodes that start in
``test_bad_disks.py``.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest

from support.memory_store import MemoryStore
from support.product_cluster import ProductCluster
from support.sim_node import ProcessStore, SimDirectory
from support.store_copy import copy_at_same_revisions
from support.virtual_loop import current_loop, run_virtual
from tidemill.control import node_planning
from tidemill.control.commands import CreateTopic, Resign
from tidemill.control.records import CLUSTER_KEY, ClusterRecord, alive_key, encode
from tidemill.control.stores.store import MetadataWentBack, Put, Txn
from tidemill.errors import ApiError, ErrorCode, SyncFailed
from tidemill.records.record import Record, build_batch
from tidemill.server.cluster.membership import Membership

NONE = ErrorCode.none
#: Keys that are bound to leases.
_LEASED = ("alive/", "controller")
Story = Callable[[ProductCluster], Awaitable[None]]


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop, with a topic ``t`` of one partition on all nodes."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t", partitions=1)
                await story(cluster)

        run_virtual(main, seed=1)

    del test.__wrapped__
    return test


async def write(cluster: ProductCluster, value: str = "x", acks: int = -1) -> ErrorCode:
    """Write one batch at the leader that all nodes know; gives the answer."""
    await cluster.until(lambda: cluster.leader("t") != -1)
    records = build_batch([Record(None, value.encode(), 0)])
    data = {"name": "t", "partition_data": [{"index": 0, "records": records}]}
    body = {"transactional_id": None, "acks": acks, "timeout": 10_000, "topic_data": [data]}
    answer = await cluster.ask(cluster.leader("t"), "Produce", 9, **body)
    return ErrorCode(answer.responses[0].partition_responses[0].error_code)


async def write_until_taken(cluster: ProductCluster) -> None:
    while await write(cluster) is not NONE:  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.1)


def membership(cluster: ProductCluster, node_id: int) -> Membership:
    found = cluster.nodes[node_id].node.membership
    assert found is not None
    return found


def in_sync(cluster: ProductCluster) -> set[int]:
    return {*cluster.broker(cluster.some_id).image.topics["t"].partitions[0].isr}


# --- settings that do not fit together


@on_three_nodes
async def test_nodes_with_and_without_tls_that_register_at_the_same_time_do_not_both_stay(
    cluster: ProductCluster,
) -> None:
    await cluster.kill(3)
    await cluster.until(lambda: 3 not in cluster.broker(1).image.alive)
    with pytest.MonkeyPatch.context() as patched:
        # Its registration has not seen the others, and theirs did not see it.
        patched.setattr(node_planning, "check_cluster_tls", lambda *_: None)
        patched.setattr(Membership, "_uses_tls", True)
        with pytest.raises(ApiError, match="uses TLS between nodes") as caught:
            await cluster.start(3)
    await cluster.kill(3)
    assert caught.value.code is ErrorCode.invalid_config
    await cluster.until(lambda: 3 not in cluster.broker(1).image.alive)


# --- clocks


@on_three_nodes
async def test_a_clock_that_is_off_is_said_in_words_and_changes_nothing(cluster: ProductCluster) -> None:
    cluster.nodes[3].wall_ahead_ms = -60_000
    told: list[str] = []

    def is_told() -> bool:
        told[:] = [each for each in membership(cluster, 1).problems() if "clock of node 3" in each]
        return bool(told)

    await cluster.until(is_told)
    assert "60 s behind this node's: set both" in told[0]
    assert await write(cluster) is NONE


# --- disks of nodes that run


@on_three_nodes
async def test_a_leader_whose_sync_has_failed_steps_down_and_the_records_stay(
    cluster: ProductCluster,
) -> None:
    assert await write(cluster, "a") is NONE
    leader = cluster.leader("t")
    cluster.disks[leader].fail_next("sync", ".log", SyncFailed("the disk has failed"))
    await write(cluster, "b")
    await cluster.until(lambda: cluster.leader("t") not in (leader, -1))
    assert leader not in in_sync(cluster), "nobody waits for it"
    await write_until_taken(cluster)
    assert cluster.led("t").high_watermark >= 2


@on_three_nodes
async def test_a_leader_whose_disk_hangs_steps_down_and_comes_back_when_it_goes_on(
    cluster: ProductCluster,
) -> None:
    assert await write(cluster, "a") is NONE
    leader, loop = cluster.leader("t"), current_loop()

    def hang() -> None:
        loop.slept_seconds += 30

    cluster.disks[leader].before_next("sync", ".log", hang)
    began_s = loop.time()
    writing = asyncio.ensure_future(write(cluster, "b"))
    await cluster.until(lambda: cluster.leader("t") not in (leader, -1))
    assert await writing is not NONE
    await write_until_taken(cluster)
    assert loop.time() - began_s < 30, "nobody waits for the disk"
    assert leader not in in_sync(cluster)
    await cluster.until(lambda: len(in_sync(cluster)) == 3)


@on_three_nodes
async def test_a_follower_whose_sync_has_failed_leaves_the_in_sync_set_and_the_leader_goes_on(
    cluster: ProductCluster,
) -> None:
    assert await write(cluster, "a") is NONE
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    leader = cluster.leader("t")
    follower = next(node_id for node_id in cluster.nodes if node_id != leader)
    cluster.disks[follower].fail_next("sync", ".log", SyncFailed("the disk has failed"))
    assert await write(cluster, "b") in (NONE, ErrorCode.request_timed_out)
    await cluster.until(lambda: follower not in in_sync(cluster))
    await write_until_taken(cluster)
    assert cluster.leader("t") == leader


def test_a_follower_with_a_full_disk_warns_once_and_says_how_far_it_is_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @on_three_nodes
    async def story(cluster: ProductCluster) -> None:
        assert await write(cluster, "a") is NONE
        await cluster.until(lambda: len(in_sync(cluster)) == 3)
        leader = cluster.leader("t")
        follower = next(node_id for node_id in cluster.nodes if node_id != leader)
        disk = cluster.disks[follower]
        disk.capacity_bytes = disk.used_bytes
        await write_until_taken(cluster)
        await cluster.until(lambda: follower not in in_sync(cluster))
        await asyncio.sleep(60)
        behind = cluster.broker(follower).find.held(cluster.broker(follower).find.topic("t"), 0)
        assert behind is not None
        assert behind.as_follower.lag == cluster.led("t").high_watermark - behind.log_end_offset > 0
        told = [each for each in caplog.messages if "records of leaders are not taken" in each]
        assert len(told) == 1, told

    story()


@on_three_nodes
async def test_a_follower_that_is_too_slow_leaves_the_in_sync_set_and_comes_back(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    leader = cluster.leader("t")
    follower = next(node_id for node_id in cluster.nodes if node_id != leader)
    cluster.network.cut(f"n{leader}", f"n{follower}")
    writing = asyncio.ensure_future(write_until_taken(cluster))
    await cluster.until(lambda: follower not in in_sync(cluster))
    await writing
    cluster.network.heal()
    await cluster.until(lambda: follower in in_sync(cluster))


# --- etcd


@on_three_nodes
async def test_without_an_answer_of_etcd_records_are_written_and_the_health_says_why(
    cluster: ProductCluster,
) -> None:
    for way in cluster.ways.values():
        way.hang()
    await asyncio.sleep(20)
    assert await write(cluster) is NONE
    problems = membership(cluster, 1).problems()
    assert any("etcd does not answer" in each for each in problems), problems
    for way in cluster.ways.values():
        way.go_on()
    await cluster.until(lambda: not any("etcd" in each for each in membership(cluster, 1).problems()))
    await write_until_taken(cluster)


@on_three_nodes
async def test_an_etcd_that_comes_and_goes_ends_with_every_node_live(cluster: ProductCluster) -> None:
    for _ in range(5):
        for node_id, way in cluster.ways.items():
            way.unavailable = True
            await asyncio.sleep(3 * node_id)
            way.unavailable = False
            await asyncio.sleep(1)
    await cluster.until(lambda: cluster.broker(1).image.live_nodes == {1, 2, 3})
    await write_until_taken(cluster)
    await cluster.until(lambda: len(in_sync(cluster)) == 3)


@on_three_nodes
async def test_a_node_refuses_to_start_with_an_etcd_that_has_lost_its_data(cluster: ProductCluster) -> None:
    await cluster.kill(3)
    cluster.store = MemoryStore()
    assert "belongs to cluster" in await refusal_to_start(cluster, 3)
    assert (await cluster.store.read()) == (0, {}), "nothing was written"


@on_three_nodes
async def test_a_node_that_finds_another_cluster_in_etcd_writes_nothing_to_it(
    cluster: ProductCluster,
) -> None:
    await cluster.kill(3)
    cluster.store = MemoryStore()
    another = encode(ClusterRecord(cluster_id="another", replicated=True, secret=b"s"))
    await cluster.store.commit(Txn(puts=(Put(CLUSTER_KEY, another),)))
    with pytest.raises(ApiError, match="name the right etcd and --set cluster_name") as caught:
        await cluster.start(3)
    await cluster.kill(3)
    assert caught.value.code is ErrorCode.inconsistent_cluster_id
    assert set((await cluster.store.read()).entries) == {CLUSTER_KEY}


async def copy_of(store: MemoryStore, *, revision: int = 0) -> MemoryStore:
    """What a restored backup of the store would be: without leases, at ``revision`` if that is later."""
    stored = await store.read()
    copy = MemoryStore(clock_ms=current_loop().now_ms)
    kept = {key: entry.value for key, entry in stored.entries.items() if not key.startswith(_LEASED)}
    for key, value in kept.items():
        await copy.commit(Txn(puts=(Put(key, value),)))
    key, value = next(iter(kept.items()))
    for _ in range(len(kept), max(stored.revision, revision)):
        await copy.commit(Txn(puts=(Put(key, value),)))
    return copy


async def kill_all(cluster: ProductCluster) -> None:
    for node_id in list(cluster.nodes):
        await cluster.kill(node_id)


async def refusal_to_start(cluster: ProductCluster, node_id: int) -> str:
    with pytest.raises(ApiError) as caught:
        await cluster.start(node_id)
    await cluster.kill(node_id)
    assert caught.value.code is ErrorCode.inconsistent_cluster_id
    assert "etcd has lost data or was restored" in caught.value.message
    return caught.value.message


def edit_identity(cluster: ProductCluster, node_id: int, **changes: object) -> None:
    """Change a node's ``cluster-identity.json`` as with an editor."""
    disk = cluster.disks[node_id]
    edited = json.dumps(json.loads(disk.read_file("cluster-identity.json")) | changes, indent=2) + "\n"
    file = disk.open("cluster-identity.json")
    file.truncate(0)
    file.write(0, [edited.encode()])
    file.sync()
    file.close()


def accept_metadata(cluster: ProductCluster, node_id: int) -> None:
    """Do what the refusal says: an operator edits the file."""
    edit_identity(cluster, node_id, seen_revision=0, incarnations=[])


async def assert_without_etcd(cluster: ProductCluster, node_ids: tuple[int, ...] = (1, 2, 3)) -> None:
    """The nodes say that etcd lost data, serve what they have, and write nothing to it."""

    def problems(node_id: int) -> list[str]:
        found = cluster.nodes[node_id].node.problems()
        return [
            each for each in found if "etcd has lost data or was restored. Stop all nodes, restore" in each
        ]

    await cluster.until(lambda: all(len(problems(node_id)) == 1 for node_id in node_ids))
    images = {node_id: cluster.broker(node_id).image for node_id in node_ids}
    assert await write(cluster) is NONE
    # Longer than a session.
    await asyncio.sleep(30)
    assert await write(cluster) is NONE
    for node_id in node_ids:
        with pytest.raises(MetadataWentBack):
            await cluster.run(node_id, cluster.broker(node_id).controller.submit(topic_named("refused")))
        with pytest.raises(MetadataWentBack):
            await cluster.run(node_id, membership(cluster, node_id).proposals.propose(resignation(cluster)))
        (told,) = problems(node_id)
        assert "records are taken and served" in told
        assert not any("runs already" in each for each in cluster.nodes[node_id].node.problems())
        assert cluster.broker(node_id).image is images[node_id]
        assert membership(cluster, node_id).session.serving_until_ms == 0, "its lease proves nothing"
        assert membership(cluster, node_id).elected.epoch is None


def resignation(cluster: ProductCluster) -> Resign:
    topic = cluster.broker(1).image.topics["t"]
    led = topic.partitions[0]
    return Resign(topic_id=topic.id, index=0, node_id=led.leader, leader_epoch=led.leader_epoch)


@on_three_nodes
async def test_an_etcd_that_was_restored_under_running_nodes_is_left_alone_until_an_operator_decides(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    older = await copy_of(cluster.store)
    await cluster.create("lost", partitions=1)
    await write_until_taken(cluster)
    before = (await older.read()).entries
    await cluster.swap_store(older)
    await assert_without_etcd(cluster)
    assert (await older.read()).entries == before
    # When it has passed what they have seen, it is still not what they have seen.
    key, entry = next(iter(before.items()))
    for _ in range(200):
        await older.commit(Txn(puts=(Put(key, entry.value),)))
    await assert_without_etcd(cluster)
    end = cluster.led("t").high_watermark
    await kill_all(cluster)
    for node_id in (1, 2, 3):
        await refusal_to_start(cluster, node_id)
        accept_metadata(cluster, node_id)
    for node_id in (1, 2, 3):
        await cluster.start(node_id)
    await write_until_taken(cluster)
    assert cluster.led("t").high_watermark > end


@on_three_nodes
async def test_an_etcd_that_was_emptied_under_running_nodes_is_left_empty(cluster: ProductCluster) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    empty = MemoryStore(clock_ms=current_loop().now_ms)
    await cluster.swap_store(empty)
    await assert_without_etcd(cluster)
    assert not (await empty.read()).entries


@on_three_nodes
async def test_nodes_stop_in_an_orderly_way_without_waiting_for_an_etcd_that_was_restored(
    cluster: ProductCluster,
) -> None:
    older = await copy_of(cluster.store)
    await cluster.create("lost", partitions=1)
    await cluster.swap_store(older)
    await cluster.until(lambda: all(node.broker.controller.went_back for node in cluster.nodes.values()))
    began_s = current_loop().time()
    for node_id in (1, 2, 3):
        await cluster.nodes[node_id].stop()
    assert current_loop().time() - began_s < 10


@on_three_nodes
async def test_a_node_that_stops_writes_nothing_to_an_etcd_that_was_restored_a_moment_ago(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    older = await copy_at_same_revisions(cluster.store, clock_ms=current_loop().now_ms)
    for name in ("lost", "lost-too", "lost-as-well"):
        await cluster.create(name, partitions=1)
    # The session is in the copy, and so is that of the controller.
    session = membership(cluster, 3).session
    while await older.grant_lease(600_000) < session.lease_id:
        pass
    for key, entry in (await older.read()).entries.items():
        if key == alive_key(3):
            await older.commit(Txn(puts=(Put(key, entry.value, session.lease_id),)))
    before = await older.read()
    assert before.revision < cluster.broker(3).image.revision
    cluster.ways[3].store = ProcessStore(older, cluster.nodes[3].process)
    await cluster.nodes[3].stop()
    assert await older.read() == before


@on_three_nodes
async def test_a_node_that_was_behind_hears_from_the_others_that_etcd_was_restored(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    way = cluster.ways[3]
    way.deaf = way.blind = True
    await cluster.run(1, cluster.broker(1).controller.submit(topic_named("u")))
    # What node 3 knows is true of it: only the others have seen more.
    older = await copy_at_same_revisions(cluster.store, clock_ms=current_loop().now_ms)
    assert cluster.broker(3).image.revision < (await older.read()).revision
    for number in range(30):
        await cluster.run(1, cluster.broker(1).controller.submit(topic_named(f"lost-{number}")))
    # In one step: it hears nothing of the old one.
    way.deaf = way.blind = False
    await cluster.swap_store(older)
    await cluster.until(lambda: cluster.broker(3).controller.went_back is not None)


@on_three_nodes
async def test_a_node_whose_watch_hangs_hears_of_newer_metadata_from_the_others_and_says_so(
    cluster: ProductCluster,
) -> None:
    way = cluster.ways[3]
    way.deaf = way.blind = True
    await cluster.run(1, cluster.broker(1).controller.submit(topic_named("u")))
    await cluster.until(lambda: any("behind revision" in each for each in membership(cluster, 3).problems()))
    assert "u" not in cluster.broker(3).image.topics
    way.blind = False
    await cluster.until(lambda: "u" in cluster.broker(3).image.topics)
    assert way.deaf, "it has read everything"
    await cluster.until(lambda: not any("behind" in each for each in membership(cluster, 3).problems()))


@on_three_nodes
async def test_a_leader_that_has_not_heard_of_a_preferred_election_is_asked_to_resign(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    preferred = cluster.broker(1).image.topics["t"].partitions[0].replicas[0]
    controller = cluster.broker(1).image.controller
    assert controller is not None
    while cluster.leader("t") in (preferred, controller.node_id, -1):
        await cluster.move("t")
    leader = cluster.leader("t")
    way = cluster.ways[leader]
    way.deaf = way.blind = True
    asked = [{"topic": "t", "partitions": [0]}]
    answer = await cluster.ask(
        preferred, "ElectLeaders", 2, election_type=0, topic_partitions=asked, timeout=30_000
    )
    ((result,),) = (each.partition_result for each in answer.replica_election_results)
    assert result.error_code is NONE
    assert cluster.broker(preferred).image.topics["t"].partitions[0].leader == preferred
    way.deaf = way.blind = False


def topic_named(name: str) -> CreateTopic:
    return CreateTopic(name=name, topic_id=uuid4(), partitions=1)


@on_three_nodes
async def test_after_a_crash_of_all_nodes_an_etcd_that_was_restored_is_refused(
    cluster: ProductCluster,
) -> None:
    assert await write(cluster, "a") is NONE
    old = await copy_of(cluster.store)
    await cluster.move("t")
    await write_until_taken(cluster)
    # Longer than the interval in which nodes note what they have seen.
    await asyncio.sleep(10)
    await kill_all(cluster)
    cluster.store = old
    for node_id in (1, 2, 3):
        assert "has seen revision" in await refusal_to_start(cluster, node_id)


@on_three_nodes
async def test_a_log_with_epochs_that_etcd_has_not_given_is_refused_until_an_operator_accepts_that(
    cluster: ProductCluster,
) -> None:
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    assert await write(cluster, "a") is NONE
    before = await copy_of(cluster.store)
    for _ in range(3):
        await cluster.move("t")
        await write_until_taken(cluster)
    end = cluster.led("t").high_watermark
    revision = cluster.broker(1).image.revision
    await kill_all(cluster)
    # It has gone on since it was restored: the revision alone does not tell.
    cluster.store = await copy_of(before, revision=revision + 100)
    for node_id in (1, 2, 3):
        assert "by etcd's history" in await refusal_to_start(cluster, node_id)
        # As an older release has noted what it has seen.
        edit_identity(cluster, node_id, seen_key="")
        assert "has records of leader epoch" in await refusal_to_start(cluster, node_id)
        accept_metadata(cluster, node_id)
    for node_id in (1, 2, 3):
        await cluster.start(node_id)
    await write_until_taken(cluster)
    await cluster.until(lambda: len(in_sync(cluster)) == 3)
    epoch = cluster.broker(1).image.topics["t"].partitions[0].leader_epoch
    assert epoch > 100_000, "epochs that were lost are not given again"
    assert cluster.led("t").high_watermark > end


@on_three_nodes
async def test_a_directory_remembers_few_incarnations_however_often_its_node_starts(
    cluster: ProductCluster,
) -> None:
    for _ in range(5):
        await cluster.kill(3)
        await cluster.until(lambda: 3 not in cluster.broker(1).image.alive)
        await cluster.start(3)
    identity = SimDirectory(cluster.disks[3]).read_identity()
    assert identity is not None
    assert membership(cluster, 3).incarnation in identity.incarnations
    assert len(identity.incarnations) <= 3
