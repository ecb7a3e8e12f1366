"""Every safeguard of the cluster, switched off once: something must break then.

A safeguard is missed by stories of whole clusters (``STORIES`` here), by a scripted schedule (``RULES`` here,
or the tests below), or by the stories and models of other files: ``S`` is ``tests/sim``, ``R`` is
``tests/unit/replication/test_replica_rules.py``, ``C`` is ``tests/unit/control/test_insync_model.py``, ``U``
is ``tests/unit``. The controller of ``S/test_replica_stories`` is a model of the product's; ``C`` and the
stories of whole clusters have the product's own.

=====================================================================  ===================================
safeguard, by the rule of the design                                   what misses it
=====================================================================  ===================================
1   the high watermark is at most what the committed set has           STORIES, S/test_replica_stories
1   proposed members count for the least durable offset                S/test_replica_stories, R
1   … never for the size of the in-sync set                            RULES
1   a proposal of unknown outcome counts until a newer record comes    RULES
1   nothing is committed below the minimum                             S/test_replica_stories
2   the change that reaches the minimum again empties elr              C, RULES
2   the minimum stands in the record; lowering it empties elr          RULES
2   a new directory leaves isr and elr                                 C; a model: S/test_replica_stories
3   whose lease is over leaves at once                                 RULES
5   logs are cut where their epochs part                               RULES, S/test_replica_faults
5   the cut waits for flushes                                          S/test_replica_stories
6   nothing is reported, no high watermark taken before the match      S/test_replica_stories, R
6   the leader counts no more than what was matched                    R
6   a follower's high watermark is at most its log end                 S/test_replica_stories
8   a registration takes every leadership                              C, S/test_whole_cluster;
                                                                       a model: S/test_replica_stories
8   a clean note counts for the last registration only                 RULES
8   a lost replica leaves isr and elr, even as the last                C
8   one that is missing is registered as lost                          S/test_scripted_disasters
8   … and one that was repaired with loss                              U/server/cluster/test_bad_disks
9   whose disk is full, hangs or has failed is not elected             S/test_unfit_replicas
9   … and leaves isr and elr if it has failed, at whatever epoch       C
9   an unclean election takes the highest (last epoch, end)            S/test_scripted_disasters
10  DeleteRecords waits for the start of every in-sync replica         RULES
10  … and for an in-sync set that has its minimum                      RULES
10  followers keep what the leader's floor names                       RULES
10  who ends below removed tombstones is built again                   RULES
10  a copy of a compacted log tells what is missing from it            RULES
10  compaction stays below the high watermark                          test_compaction_above_…
10  … and below the own last stable offset                             test_compaction_of_open_…
11  state of records that were cut is void                             test_state_of_another_history_…
11  … a snapshot, a lease                                              U/server/tables/test_table_leadership
11  … a cursor                                                         U/client/cursors/test_cut_logs
11  … share state                                                      U/server/handlers/share/
                                                                       test_next_leader
11  … progress of Spark                                                U/spark/reading/test_histories
11  base offset and leader epoch of what is fetched are checked        S/test_replica_faults
12  the serving lease                                                  test_a_deposed_leader_…
12  … of a session that is known to be admitted; not once resigned     unit/…/test_newest_model.py
12  a new leader tells what is newest when its log end is committed    STORIES
12  … and shows state that is folded up to there                       STORIES
    only the controller changes partitions                             test_a_deposed_controller_…
    a coordinator replays to the log end                               STORIES
=====================================================================  ===================================

The tests of rule 11 outside of this file have no ablation of their own: each fails if the product does not
compare with the log's history (``_is_part`` for snapshots, ``check_history`` for leases, ``divergence`` of
partitions for cursors and of share state, ``parted`` for Spark).
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sim.test_cluster_faults import run_story
from support.cluster_clients import ClusterClient, produce
from support.cluster_story import Broken, ClusterStory
from support.cluster_tables import KEYS, Refused, Seen, TableUsers
from support.cluster_users import LATEST, LATEST_PRODUCER, RecordUsers
from support.compacting import consume, keyed, no_pause, swap
from support.control_world import World
from support.dict_engine import DictEngine
from support.faulty_storage import FaultyStorage
from support.virtual_loop import run_virtual
from support.whole_cluster import WholeCluster
from tidemill.config.values import Address
from tidemill.control import controller as controller_module
from tidemill.control import duties, insync, node_planning, partition_planning
from tidemill.control.commands import AlterInSync, RegisterNode
from tidemill.control.draft import Draft
from tidemill.errors import ErrorCode, TidemillError
from tidemill.kv.recovery import recover
from tidemill.log.compaction.cleaner import CleaningRun
from tidemill.log.compaction.runs import cleanable_part, order_cleaning
from tidemill.log.epochs import EpochHistory
from tidemill.log.log import PartitionLog
from tidemill.records.record import build_batch
from tidemill.replication import partition as partition_module
from tidemill.replication.coordinator_log import PartitionCoordinatorLog
from tidemill.replication.follower_side import FollowerSide
from tidemill.replication.partition import Partition
from tidemill.replication.rules.following import FollowingState
from tidemill.replication.rules.in_sync import InSyncReplicas
from tidemill.server.cluster.lapsed_session import LapsedSession
from tidemill.server.cluster.newest_answers import ClusterNewestAnswers
from tidemill.tables.state import bucket as bucket_module
from tidemill.tables.state.bucket import Bucket
from unit.control import test_duties
from unit.replication import test_replica_rules
from unit.replication.test_replica_rules import NOW, A, B, Cluster

Patches = list[tuple[object, str, object]]


# --- stories of whole clusters


def _commit_alone(self: InSyncReplicas, own_durable: int) -> int:
    return own_durable


def _show_at_once(self: Bucket, was_caught_up: bool) -> bool:
    self._is_current = True
    return True


#: The kind of stories, a seed that has broken, how it must break, and what is patched. Other seeds are tried
#: if this one does not any more.
STORIES: dict[str, tuple[str, int, str, Patches]] = {
    "the high watermark is at most what the committed set has": (
        "records",
        10,
        "node . has .* at .*, and there was",
        [(InSyncReplicas, "least", _commit_alone)],
    ),
    "a coordinator replays to the log end": (
        "records",
        6,
        "offset .* was acknowledged, and then .* was found",
        [
            (
                PartitionCoordinatorLog,
                "end_offset",
                property(lambda self: self._partition.high_watermark),
            )
        ],
    ),
    "a new leader tells what is newest when its log end is committed": (
        "records",
        2,
        "was told a high watermark of .* and then",
        [(Partition, "has_reached_epoch_start", True)],
    ),
    "a new leader shows state that is folded": (
        "tables",
        20,
        "an answer went back",
        [(Bucket, "_may_be_shown", _show_at_once), (Partition, "has_reached_epoch_start", True)],
    ),
}


def stories_break(kind: str, first_seed: int, how: str, tries: int = 200) -> bool:
    """Whether one of the stories breaks in the way that is expected."""
    for seed in (first_seed, *range(tries)):
        try:
            run_story(seed, kind)
        except Broken as error:
            if re.search(how, str(error)):
                return True
        except (AssertionError, RuntimeError, TidemillError):
            # What comes of a violation that nobody has looked for proves nothing.
            continue
    return False


@pytest.mark.parametrize("name", STORIES)
def test_ablation_stories_break_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind, seed, how, patches = STORIES[name]
    run_story(seed, kind)
    for where, attribute, instead in patches:
        monkeypatch.setattr(where, attribute, instead)
    assert stories_break(kind, seed, how)


# --- scripted schedules


def _three_nodes() -> World:
    world = World(3)
    world.create(1, 2, 3)
    return world


def _on_three_nodes(schedule: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: schedule(_three_nodes(), *arguments)


def _write_beside_a_proposal() -> None:
    """A record is on two disks, and only one of them is known to be in sync."""
    cluster = Cluster((A, B), isr=(A,), min_isr=2)
    cluster.follow(B, leader=A)
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is not None
    cluster[A].append("a")
    cluster[A].flush()
    cluster.follow(B, leader=A)
    assert cluster[A].offsets == (1, 0), "the proposal may be refused, and then one replica is in sync"


def _count_proposed(self: InSyncReplicas, own_durable: int) -> int | None:
    members = {*self.assignment.isr, *self.proposed_additions()}
    self.has_enough = len(members) >= self.assignment.min_isr
    return _least(self, own_durable)


_least = InSyncReplicas.least


def _forget_the_unknown(self: InSyncReplicas, proposal: Any, *, refused: bool) -> bool:
    return _proposal_ended(self, proposal, refused=True)


_proposal_ended = InSyncReplicas.proposal_ended


def _any_note_is_clean(command: RegisterNode, image: Any) -> Any:
    old = image.nodes.get(command.node_id)
    if old is not None and command.clean_of is not None:
        command = replace(command, clean_of=old.incarnation)
    return _registered(command, image)


_registered = node_planning._registered


def _keep_elr(partition: Any, isr: Any, **options: Any) -> Any:
    changed = _with_in_sync(partition, isr, **options)
    kept = {*changed.elr, *partition.elr} - {*changed.isr}
    return replace(changed, elr=insync.in_order(changed, kept))


_with_in_sync = insync.with_in_sync


def _members_stay(partition: Any, view: Any, forfeits: Any, minimum: Any) -> Any:
    """Only leaders are looked at: who has gone leaves when its leader notices."""
    return partition if partition.leader in view.live else _settled(partition, view, forfeits, minimum)


_settled = duties.settled


def _cut_at_high_watermark(self: FollowerSide, *arguments: Any) -> Any:
    step = _take_answer(self, *arguments)
    return step if step.cut_at is None else step._replace(cut_at=self._partition.high_watermark)


_take_answer = FollowerSide.take_answer


def _without_the_minimum(self: InSyncReplicas, own_log_start: int) -> int:
    return min([own_log_start, *(follower.log_start for follower in self._counted)])


def _own_floor(self: Partition) -> int:
    return self.retention_floor()


def _never_anew(self: FollowingState, answer: Any, **facts: Any) -> Any:
    if answer.diverging is None:
        answer = type(answer)(
            answer.partition,
            answer.high_watermark,
            answer.log_start_offset,
            compaction_floor=answer.compaction_floor,
            removed_below=0,
            records=answer.records,
        )
    return _answered(self, answer, **facts)


_answered = FollowingState.answered

#: What is patched, and the schedule that fails then.
RULES: dict[str, tuple[Patches, Callable[[], None]]] = {
    "proposed members do not count for the size of the set": (
        [(InSyncReplicas, "least", _count_proposed)],
        _write_beside_a_proposal,
    ),
    "a proposal of unknown outcome counts until a newer record comes": (
        [(InSyncReplicas, "proposal_ended", _forget_the_unknown)],
        test_replica_rules.test_a_proposal_of_unknown_outcome_counts_until_a_newer_record_comes,
    ),
    "the change that reaches the minimum again empties elr": (
        [(partition_planning, "with_in_sync", _keep_elr)],
        _on_three_nodes(test_duties.test_the_change_that_reaches_the_minimum_again_empties_elr),
    ),
    "lowering the minimum empties elr": (
        [(duties, "with_in_sync", _keep_elr)],
        _on_three_nodes(test_duties.test_lowering_the_minimum_empties_elr_and_raising_it_does_not, "1", ()),
    ),
    "whose lease is over leaves at once": (
        [(duties, "settled", _members_stay)],
        _on_three_nodes(
            test_duties.test_nodes_without_a_session_leave_all_at_once_and_below_the_minimum_they_go_to_elr
        ),
    ),
    "logs are cut where their epochs part": (
        [(FollowerSide, "take_answer", _cut_at_high_watermark)],
        test_replica_rules.test_a_follower_cuts_its_log_where_the_epochs_part,
    ),
    "a clean note counts for the last registration only": (
        [(node_planning, "_registered", _any_note_is_clean)],
        _on_three_nodes(
            test_duties.test_a_clean_note_counts_only_for_the_incarnation_that_was_registered_last
        ),
    ),
    "DeleteRecords waits for the start of every in-sync replica": (
        [(InSyncReplicas, "least_log_start", lambda self, own_log_start: own_log_start)],
        test_replica_rules.test_records_are_deleted_once_every_in_sync_replica_has_the_start,
    ),
    "DeleteRecords waits for an in-sync set that has its minimum": (
        [(InSyncReplicas, "least_log_start", _without_the_minimum)],
        test_replica_rules.test_no_deletion_is_answered_while_a_replica_outside_of_the_set_can_be_elected,
    ),
    "followers keep what the leader's floor names": (
        [(Partition, "_compaction_floor", _own_floor)],
        test_replica_rules.test_a_follower_compacts_nothing_that_its_leader_wants_kept,
    ),
    "who ends below removed tombstones is built again": (
        [(FollowingState, "answered", _never_anew)],
        test_replica_rules.test_a_log_that_ends_where_tombstones_were_removed_is_built_again_once,
    ),
    "a copy of a compacted log tells what is missing from it": (
        [(PartitionLog, "copied_compacted", lambda self, offset: None)],
        test_replica_rules.test_a_copy_of_a_compacted_log_knows_what_was_removed_and_tells_it_when_it_leads,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_ablation_a_schedule_fails_without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patches, schedule = RULES[name]
    schedule()
    for where, attribute, instead in patches:
        monkeypatch.setattr(where, attribute, instead)
    with pytest.raises(AssertionError):
        schedule()


# --- compaction and the high watermark


def _clean_to_the_end(log: PartitionLog, now_ms: int, *, high_watermark: int, floor_offset: int) -> Any:
    return order_cleaning(log, now_ms, high_watermark=log.end_offset, floor_offset=floor_offset)


def _cleanable_to_the_end(log: PartitionLog, now_ms: int, *, high_watermark: int, floor_offset: int) -> Any:
    return cleanable_part(log, now_ms, high_watermark=log.end_offset, floor_offset=floor_offset)


def compact(partition: Partition) -> None:
    """Compact what the partition says may be compacted now."""
    log = partition.local_log
    while (order := partition.order_cleaning(NOW)) is not None:
        run = CleaningRun(log.storage, order, map_bytes=1 << 20, pace=no_pause())
        run.map_keys()
        while (cleaned := run.next()) is not None:
            swap(log, cleaned)
        run.finish()
        log.first_dirty_offset = run.mapped_to


def values_after_a_fail_over() -> list[str]:
    """What is left on a replica that has compacted while it led, and was cut when another one led.

    The records behind the committed one were never replicated.
    """
    cluster = Cluster((A, B), segment_bytes=100, cleanup_policy={"compact"}, min_cleanable_dirty_ratio=0.0)
    old = cluster[A]

    def write(value: str) -> None:
        old.partition.append(build_batch([keyed("k", value)]), NOW)
        old.flush()

    write("committed")
    cluster.follow(B, leader=A)
    cluster.follow(B, leader=A)
    for value in ("lost", "lost, too", "and this one"):
        write(value)
    assert old.offsets == (4, 1)
    compact(old.partition)
    cluster.elect(B, (A, B))
    cluster.follow(A, leader=B)
    assert cluster[B].values == ["committed"]
    return old.values


def test_compaction_above_the_high_watermark_would_lose_the_newest_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert values_after_a_fail_over() == ["committed"]
    monkeypatch.setattr(partition_module, "order_cleaning", _clean_to_the_end)
    assert values_after_a_fail_over() == [], "the committed record was displaced by one that was cut"


def values_after_an_abort() -> list[bytes | None]:
    """What readers of committed records get from a follower that has compacted beside an open transaction."""
    cluster = Cluster((A, B), segment_bytes=100, cleanup_policy={"compact"}, min_cleanable_dirty_ratio=0.0)
    leader, follower = cluster[A], cluster[B]

    def replicate() -> None:
        leader.flush()
        for _ in range(3):
            cluster.follow(B, leader=A)

    leader.partition.append(build_batch([keyed("k", "committed")]), NOW)
    leader.partition.begin_transaction(7, 0)
    undecided = build_batch(
        [keyed("k", "aborted")], producer_id=7, producer_epoch=0, base_sequence=0, attributes=0x10
    )
    leader.partition.append(undecided, NOW)
    leader.partition.append(build_batch([keyed("other", "x")]), NOW)
    replicate()
    assert follower.offsets == (3, 3)
    compact(follower.partition)
    leader.partition.write_marker(7, 0, commit=False, coordinator_epoch=0, now_ms=NOW)
    replicate()
    log = follower.partition.local_log
    return [record.value for record in consume(log, committed=True) if record.key == b"k"]


def test_compaction_of_open_transactions_would_lose_what_they_do_not_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert values_after_an_abort() == [b"committed"]
    monkeypatch.setattr(partition_module, "order_cleaning", _clean_to_the_high_watermark)
    assert values_after_an_abort() == [], "the committed record was displaced by one that was aborted"


def _clean_to_the_high_watermark(
    log: PartitionLog, now_ms: int, *, high_watermark: int, floor_offset: int
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionLog, "last_stable_offset", lambda self, upper_offset: upper_offset)
        return order_cleaning(log, now_ms, high_watermark=high_watermark, floor_offset=floor_offset)


async def compact_beside_a_cut(seed: int) -> None:
    """A leader that is cut off from its followers takes writes with acks=1, compacts, and is deposed.

    It does not restart: who has restarted is built again behind compacted records.
    """
    story = ClusterStory(seed, [RecordUsers()])
    cluster, client = story.cluster, story.client
    await story.begin()
    await asyncio.sleep(10)
    old = (await story.stored_image()).topics[LATEST].partitions[0].leader
    for other in cluster.ids:
        if other != old:
            cluster.network.cut(cluster.host(old), cluster.host(other))
            cluster.network.cut(cluster.host(other), cluster.host(old))
    address = Address(cluster.host(old), 9092)
    for number in range(40):
        batch = build_batch([keyed(f"k{LATEST_PRODUCER}-{number % 8}", f"lost-{number}")])
        await produce(client, address, LATEST, 0, batch, acks=1)
    await asyncio.sleep(8)
    cluster.network.heal()
    await cluster.end_lease(old)
    await asyncio.sleep(10)
    await story.end()


def test_compaction_above_the_high_watermark_is_missed_by_a_whole_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether the compaction comes before the fail-over is chance: several seeds, of which one is enough.
    seeds = (5, 6, 7)
    run_virtual(lambda: compact_beside_a_cut(seeds[0]), seed=seeds[0])
    monkeypatch.setattr(partition_module, "order_cleaning", _clean_to_the_end)
    monkeypatch.setattr(partition_module, "cleanable_part", _cleanable_to_the_end)
    assert any(_loses_by_compaction(seed) for seed in seeds)


def _loses_by_compaction(seed: int) -> bool:
    try:
        run_virtual(lambda: compact_beside_a_cut(seed), seed=seed)
    except AssertionError as error:
        return "was acknowledged at" in str(error)
    return False


# --- state of records that were cut


def recovered_offset() -> int:
    """How far a state counts whose last records, of epoch 1, an unclean election has replaced."""
    engine = DictEngine(FaultyStorage(), random.Random(1), flush_share=1.0)
    opened = partial(
        recover,
        Path("sim/bucket"),
        engine,
        b"t/0",
        log_start=0,
        log_is_complete=True,
        on_warning=lambda text: None,
    )
    with opened(log_end=10) as store:
        store.write([b"k"], [b"cut"], [], 10, 1)
    history = EpochHistory([(1, 0), (2, 5)])
    with opened(log_end=12, is_of_log=partial(bucket_module._is_part, history, 12)) as store:
        return store.applied_offset


def test_state_of_another_history_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recovered_offset() == 0, "it is built again"
    monkeypatch.setattr(bucket_module, "_is_part", lambda history, end, epoch, offset: offset <= end)
    assert recovered_offset() == 10, "the state has rows of records that were cut"


# --- the serving lease


async def look_up_at_a_deposed_leader(seed: int) -> tuple[Seen | None, int]:
    """What a leader answers that cannot know yet that another one leads; and what was acknowledged there."""
    users = TableUsers()
    story = ClusterStory(seed, [users])
    cluster, client = story.cluster, story.client
    await cluster.start_all()
    await users.prepare(story)
    bucket = (await users.look_up(client, KEYS[0])).bucket
    old = await _leader(story, users, bucket)
    cluster.ways[old].hang()
    async with asyncio.timeout(60):
        while await _leader(story, users, bucket) in (old, -1):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while not any(each[0] == bucket for each in users.acknowledged_rows):
            client.forget(users.topic, bucket)
            with suppress(Refused):
                await users._write()
            await asyncio.sleep(0.1)
    acknowledged = max(offset for where, offset, _ in users.acknowledged_rows if where == bucket)
    address = Address(cluster.host(old), 9092)
    asking = client.another()
    asking._addresses[old] = address
    asking._leaders[users.topic, bucket] = (old, 0)
    try:
        return await users.look_up(asking, KEYS[0]), acknowledged
    except Refused:
        return None, acknowledged


async def _leader(story: ClusterStory, users: TableUsers, bucket: int) -> int:
    return (await story.stored_image()).topics[users.topic].partitions[bucket].leader


async def ask_nobody(lapsed: LapsedSession) -> None:
    """In place of ``LapsedSession.ask_others``: a node that no other one can tell of an election, either."""


def test_a_deposed_leader_answers_no_look_up_because_of_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LapsedSession, "ask_others", ask_nobody)
    told, _ = run_virtual(lambda: look_up_at_a_deposed_leader(1), seed=1)
    assert told is None
    monkeypatch.setattr(ClusterNewestAnswers, "may_answer", lambda self, partition: True)
    told, acknowledged = run_virtual(lambda: look_up_at_a_deposed_leader(1), seed=1)
    assert told is not None
    assert told.log_offset <= acknowledged, "it does not have what another leader has acknowledged"


# --- the controller's compare


async def late_commit_of_a_deposed_controller(seed: int) -> list[str]:
    """A controller's transaction comes to the store when another node is the controller already."""
    cluster = WholeCluster(random.Random(seed), 4)
    await cluster.start_all()
    client = ClusterClient(
        cluster.network, cluster.rng, [Address(cluster.host(each), 9092) for each in cluster.ids]
    )
    image = cluster.nodes[1].broker.image
    assert image.controller is not None
    old = image.controller.node_id
    others = [node_id for node_id in cluster.ids if node_id != old]
    topic = {
        "name": "t",
        "num_partitions": -1,
        "replication_factor": -1,
        "assignments": [{"partition_index": 0, "broker_ids": others}],
        "configs": [],
    }
    answer = await client.ask_any("CreateTopics", {"topics": [topic], "timeout": 5_000}, 5)
    assert answer.topics[0].error_code == ErrorCode.none
    node = cluster.nodes[old]
    async with asyncio.timeout(60):
        while "t" not in node.broker.image.topics:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        cluster.ways[old].hang()
        partition = node.broker.image.topics["t"].partitions[0]
        proposal = AlterInSync(
            topic_id=node.broker.image.topics["t"].id,
            index=0,
            leader=partition.leader,
            leader_epoch=partition.leader_epoch,
            partition_epoch=partition.partition_epoch,
            isr=tuple(others[:2]),
            node_epochs={},
        )
        assert node.node.membership is not None
        submitted = node.process.start(node.node.membership.elected.submit(proposal))
        await cluster.end_lease(old)
        while cluster.nodes[others[0]].broker.image.controller in (None, image.controller):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cluster.ways[old].go_on()
        await asyncio.gather(submitted, return_exceptions=True)
    return cluster.store.violations


def test_a_deposed_controller_changes_nothing_because_of_its_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_virtual(lambda: late_commit_of_a_deposed_controller(1), seed=1) == []
    made = Draft.__init__

    def without_fence(self: Draft, image: Any, limits: Any, fence: Any = None) -> None:
        made(self, image, limits)

    monkeypatch.setattr(Draft, "__init__", without_fence)
    monkeypatch.setattr(controller_module, "_fenced", lambda image, fence: None)
    assert run_virtual(lambda: late_commit_of_a_deposed_controller(1), seed=1) != []
