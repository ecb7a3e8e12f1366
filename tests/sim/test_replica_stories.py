"""Three or five replicas under crashes, cuts and lost messages: nothing acknowledged is lost or doubled.

The partitions, fetchers and leader services are the product's own; store and controller are a model
(``support.sim_cluster``). Producers write to whoever believes to lead. Processes are killed, lose power or
their disk, stop in an orderly way, are cut off from each other in one direction or both, and from the
metadata. In the end everything is healed. What must hold:

- every acknowledged record is in the log of every replica, at its offset;
- below the high watermarks that any replica ever had there is one value for each offset;
- a leader's answer about the end is never below one of a leader before it;
- all replicas are in sync again, and equal.

Each safeguard is switched off once, and then some story must break. Replay a seed with ``run_story(seed)``;
``TIDEMILL_REPLICA_SEEDS`` sets how many are run.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from contextlib import suppress
from functools import partial

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.sim_cluster import ReplicaNode, SimMessages, SimMetadata
from support.virtual_loop import current_loop, run_virtual
from tidemill.errors import ApiError, StorageError, TidemillError
from tidemill.log.log import PartitionLog
from tidemill.records.record import read_records
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.replication.rules.following import FollowingState
from tidemill.replication.rules.in_sync import InSyncReplicas
from tidemill.replication.rules.state import Role

SEEDS = int(os.environ.get("TIDEMILL_REPLICA_SEEDS", "40"))
SEEDS_PER_TEST = 10
PARTITIONS = 2
STEPS = 60


class Broken(AssertionError):
    """A story came out wrong."""


def insist(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class Story:
    """One cluster, its producers, and what they were told."""

    def __init__(self, seed: int) -> None:
        self.loop = current_loop()
        self.rng = random.Random(seed)
        self.ids = tuple(range(1, self.rng.choice((3, 3, 5)) + 1))
        self.messages = SimMessages(self.loop)
        self.metadata = SimMetadata(self.loop, self.ids, PARTITIONS, self.rng.choice((1, 2, 2)))
        self.metadata.lost_share = self.rng.choice((0.0, 0.3))
        self.metadata.seconds_max = self.rng.choice((0.01, 1.0))
        self.nodes: dict[int, ReplicaNode] = {}
        #: What the next process of a dead node finds.
        self.disks: dict[int, FaultyStorage] = {}
        self.acknowledged: dict[tuple[int, int], str] = {}
        self.committed: dict[tuple[int, int], str] = {}
        #: By partition and leader epoch: the ends that leaders have told.
        self.ends: dict[tuple[int, int], list[int]] = {}
        self.checked: dict[Partition, int] = {}
        self.watermarks: dict[Partition, int] = {}
        self.written = 0
        #: By partition: everything below was deleted, and a client was told so.
        self.starts: dict[int, int] = {}

    # --- nodes

    async def start(self, node_id: int, *, clean: bool = False, lost: bool = False) -> None:
        storage = self.disks.pop(node_id, None) or FaultyStorage(random.Random(self.rng.random()))
        node = ReplicaNode(node_id, storage, self.messages, self.metadata)
        node.node_epoch = self.metadata.register(node_id, clean=clean, lost=lost)
        await node.start()
        self.nodes[node_id] = node

    async def kill(self, node_id: int, *, power_loss: bool) -> None:
        self.disks[node_id] = await self.nodes.pop(node_id).crash(power_loss=power_loss)
        if self.rng.random() < 0.7:
            self.metadata.expire(node_id)

    async def restart(self, node_id: int) -> None:
        if self.rng.random() < 0.2 and self.may_lose(node_id):
            del self.disks[node_id]
            await self.start(node_id, lost=True)
        else:
            await self.start(node_id)

    def may_lose(self, node_id: int) -> bool:
        """Whether another replica has everything that is committed."""
        return all({*record.isr, *record.elr} - {node_id} for record in self.metadata.records)

    async def restart_orderly(self, node_id: int) -> None:
        self.disks[node_id] = await self.nodes.pop(node_id).stop()
        await self.start(node_id, clean=True)

    # --- what happens

    async def run(self) -> None:
        for node_id in self.ids:
            await self.start(node_id, clean=True)
        await asyncio.sleep(2)
        for _ in range(STEPS):
            await self.step()
            self.check()
        await self.heal()

    async def step(self) -> None:
        rng, live = self.rng, sorted(self.nodes)
        for _ in range(rng.randrange(4)):
            self.produce(rng.randrange(PARTITIONS))
        what = rng.random()
        if what < 0.3:
            await self.trouble_processes(what, live)
        elif what < 0.7:
            await self.trouble_ways(what, live)
        await asyncio.sleep(rng.choice((0.01, 0.3, 1, 6)) * rng.random())

    async def trouble_processes(self, what: float, live: list[int]) -> None:
        rng = self.rng
        if what < 0.08 and len(live) > 1:
            await self.kill(rng.choice(live), power_loss=rng.random() < 0.6)
        elif what < 0.22 and self.disks:
            await self.restart(rng.choice(sorted(self.disks)))
        elif what < 0.26 and live:
            await self.restart_orderly(rng.choice(live))
        elif what < 0.29 and live:
            # The partition stops, its node says that it is unfit, and is restarted some time.
            self.nodes[rng.choice(live)].storage.fail_next("sync", ".log")

    async def trouble_ways(self, what: float, live: list[int]) -> None:
        rng = self.rng
        if what < 0.36:
            source, target = rng.sample(self.ids, 2)
            self.messages.cuts |= {(source, target)} | ({(target, source)} if rng.random() < 0.5 else set())
        elif what < 0.46:
            self.messages.cuts.clear()
            self.metadata.heal()
        elif what < 0.52:
            self.metadata.cut_off.add(rng.choice(self.ids))
        elif what < 0.56 and live:
            # A node that cannot reach the metadata loses its lease, and does not know it.
            node_id = rng.choice(live)
            self.metadata.cut_off.add(node_id)
            self.metadata.expire(node_id)
        elif what < 0.62:
            self.messages.drop_share = rng.choice((0.0, 0.1, 0.4))
            self.messages.slow_share = rng.choice((0.0, 0.1, 0.3))
        elif what < 0.68:
            for node_id in live:
                if node_id not in self.metadata.live and node_id not in self.metadata.cut_off:
                    await self.restart_orderly(node_id)
        elif what < 0.70:
            self.delete(rng.randrange(PARTITIONS))

    def delete(self, index: int) -> None:
        """Delete records as a client would, at one of those who believe to lead."""
        for node in self.nodes.values():
            partition = node.partition(index)
            if partition is not None and self.leads(node, index) and partition.has_reached_epoch_start:
                start = self.rng.randint(partition.log_start_offset, partition.high_watermark)
                with suppress(StorageError):
                    partition.discard(partition.delete_records(start))
                partition.as_leader.when_start_durable(start, partial(self.deleted, index, start))
                return

    def deleted(self, index: int, start: int, error: TidemillError | None) -> None:
        if error is None:
            self.starts[index] = max(start, self.starts.get(index, 0))

    def produce(self, index: int) -> None:
        """Write to one of those who believe to lead."""
        leaders = [node for node in self.nodes.values() if self.leads(node, index)]
        if not leaders:
            return
        node = self.rng.choice(leaders)
        partition = node.partition(index)
        assert partition is not None
        self.written += 1
        value = f"{self.written}"
        try:
            if self.rng.random() < 0.8:
                partition.as_leader.check_enough_replicas()
            offset = node.process.context.copy().run(
                partition.append, plain_batch(value), int(self.loop.time() * 1000)
            )
        except (ApiError, StorageError):
            return

        def answered(error: TidemillError | None) -> None:
            if error is None:
                self.acknowledged[index, offset.base_offset] = value

        partition.when_acknowledged(offset.last_offset + 1, answered)

    @staticmethod
    def leads(node: ReplicaNode, index: int) -> bool:
        partition = node.partition(index)
        return partition is not None and partition.role is Role.LEADER

    # --- what must hold

    def check(self) -> None:
        for node in self.nodes.values():
            for index in range(PARTITIONS):
                partition = node.partition(index)
                if partition is not None and partition.failure is None:
                    self.check_partition(partition)

    def check_partition(self, partition: Partition) -> None:
        index, watermark = partition.index, partition.high_watermark
        insist(watermark >= self.watermarks.get(partition, 0), "a high watermark went back")
        self.watermarks[partition] = watermark
        log = partition.local_log
        insist(watermark <= log.end_offset, "a high watermark is above the log end")
        insist(log.durable_offset <= log.end_offset, "more is durable than there is")
        if not log.is_truncating:
            for offset, value in values(log, self.checked.get(partition, 0), watermark):
                known = self.committed.setdefault((index, offset), value)
                insist(known == value, f"two values at {index}:{offset}: {known} and {value}")
            self.checked[partition] = watermark
        if partition.role is Role.LEADER and partition.has_reached_epoch_start:
            told = self.ends.setdefault((index, partition.leader_epoch), [])
            told.append(partition.latest_offset(committed=False))

    async def heal(self) -> None:
        self.messages.cuts.clear()
        self.metadata.heal()
        self.messages.drop_share = self.messages.slow_share = self.metadata.lost_share = 0.0
        self.metadata.seconds_max = 0.01
        for _ in range(200):
            for node_id in self.ids:
                if node_id not in self.nodes:
                    await self.start(node_id)
                elif node_id not in self.metadata.live:
                    await self.restart_orderly(node_id)
            await asyncio.sleep(1)
            self.check()
            if all(self.is_whole(index) for index in range(PARTITIONS)):
                break
        else:
            raise Broken(f"the cluster does not become whole: {self.metadata.records} {self.facts()}")
        self.check_end()

    def facts(self) -> list[tuple[int, int, int, int, int]]:
        """(node, partition, log start, log end, high watermark) of every replica."""
        found = []
        for node in self.nodes.values():
            for index in range(PARTITIONS):
                each = node.partition(index)
                if each is not None:
                    offsets = each.log_start_offset, each.log_end_offset, each.high_watermark
                    found.append((node.node_id, index, *offsets))
        return found

    def is_whole(self, index: int) -> bool:
        """Whether every replica is in sync, has everything, and has deleted what its leader has."""
        record = self.metadata.records[index]
        found = {node.node_id: node.partition(index) for node in self.nodes.values()}
        leader = found.get(record.leader)
        if set(record.isr) != set(self.ids) or leader is None:
            return False
        end = leader.log_end_offset
        return all(
            each is not None
            and (each.log_end_offset, each.high_watermark, each.local_log.durable_offset) == (end, end, end)
            and each.log_start_offset >= leader.log_start_offset
            for each in found.values()
        )

    def check_end(self) -> None:
        for index in range(PARTITIONS):
            self.check_logs(index)
        for (index, epoch), told in self.ends.items():
            for (other, newer), later in self.ends.items():
                if other == index and newer > epoch:
                    insist(max(told) <= min(later), "the end that a leader tells went back")

    def check_logs(self, index: int) -> None:
        leader = self.nodes[self.metadata.records[index].leader].partition(index)
        assert leader is not None
        final = dict(values(leader.local_log, 0, leader.log_end_offset))
        insist(len(set(final.values())) == len(final), "a record is there twice")
        for node in self.nodes.values():
            partition = node.partition(index)
            assert partition is not None
            start = partition.log_start_offset
            insist(start >= self.starts.get(index, 0), "deleted records are there again")
            # Who has led before may have deleted more than the others have heard of.
            found = dict(values(partition.local_log, start, partition.log_end_offset))
            expected = {offset: value for offset, value in final.items() if offset >= start}
            insist(found == expected, "replicas differ")
        for what, said in (("acknowledged", self.acknowledged), ("committed", self.committed)):
            for (where, offset), value in said.items():
                if where == index and offset >= leader.log_start_offset:
                    insist(final.get(offset) == value, f"{what} {value} is not at {index}:{offset}")


def values(log: PartitionLog, start: int, end: int) -> list[tuple[int, str]]:
    """(offset, value) of the records from one offset to another, as far as they are not deleted."""
    start = max(start, log.log_start_offset)
    return [
        (record.offset, (record.value or b"").decode())
        for batch in log.read_batches(start, end)
        for record in read_records(batch)
        if start <= record.offset < end
    ]


def run_story(seed: int) -> Story:
    async def main() -> Story:
        story = Story(seed)
        await story.run()
        return story

    return run_virtual(main, seed=seed)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_nothing_acknowledged_is_lost_or_doubled(first: int) -> None:
    acknowledged = 0
    for seed in range(first, min(SEEDS, first + SEEDS_PER_TEST)):
        acknowledged += len(run_story(seed).acknowledged)
    assert acknowledged > 100, "the stories write too little to say anything"


# --- ablations


def _without_proposed_leavers(self: InSyncReplicas) -> set[int]:
    found = _holding_back(self)
    return found if self._proposal is None else found & set(self._proposal.isr)


_holding_back = InSyncReplicas.holding_back


def _cut_beside_flushes(self: PartitionLog) -> None:
    self._check_writable()
    self._cut_torn()


def _lead_again_at_the_same_epoch(self: SimMetadata, node_id: int, **facts: bool) -> int:
    led = {index for index, record in enumerate(self.records) if record.leader == node_id}
    if facts.get("lost") or not led:
        return _register(self, node_id, **facts)
    self._next_epoch += 1
    self.node_epochs[node_id] = self._next_epoch
    self.live.add(node_id)
    return self._next_epoch


_register = SimMetadata.register


def _take_any_record(self: InSyncReplicas, assignment: PartitionAssignment) -> None:
    _take(self, assignment)
    self.has_enough = True


_take = InSyncReplicas._take

Patches = list[tuple[object, str, object]]

#: A seed whose story has broken, how it must break, and what is patched; other seeds are tried if it does not
#: any more. The controller is a model here (``SimMetadata``), so "who has lost its disk stays in sync" and "a
#: node leads again at its old epoch" switch off rules of the model. The product's controller has the same
#: rules switched off in ``tests/unit/control/test_insync_model.py``, and a node its own part of the second
#: one in ``test_whole_cluster.py``.
ABLATIONS: dict[str, tuple[int, str, Patches]] = {
    "a shrink counts before it is committed": (
        20,
        "two values at",
        [(InSyncReplicas, "holding_back", _without_proposed_leavers)],
    ),
    "proposed members do not count": (
        137,
        "two values at",
        [(InSyncReplicas, "proposed_additions", lambda self: frozenset())],
    ),
    "a follower takes a high watermark above its end": (
        2,
        "a high watermark is above the log end",
        [(FollowingState, "high_watermark", lambda self, told, end: told if self.is_matched else None)],
    ),
    "a follower takes a high watermark before its log was matched": (
        22,
        "two values at",
        [(FollowingState, "high_watermark", lambda self, told, end: min(told, end))],
    ),
    "the cut does not wait for flushes": (
        62,
        "more is durable than there is",
        [
            (PartitionLog, "_check_can_truncate", _cut_beside_flushes),
            (Partition, "when_not_flushing", lambda self, call: call()),
        ],
    ),
    "who has lost its disk stays in sync": (
        3,
        "acknowledged .* is not at",
        [(SimMetadata, "without_lost", lambda self, record, node: record)],
    ),
    "a node leads again at its old epoch": (
        17,
        "two values at",
        [(SimMetadata, "register", _lead_again_at_the_same_epoch)],
    ),
    "commits go on below the minimum": (9, "two values at", [(InSyncReplicas, "_take", _take_any_record)]),
}


def stories_break(first_seed: int, how: str) -> bool:
    """Whether one of the stories breaks in the way that is expected."""
    for seed in (first_seed, *range(400)):
        try:
            run_story(seed)
        except Broken as error:
            if re.match(how, str(error)):
                return True
        except (AssertionError, StorageError, ApiError, RuntimeError):
            # What comes of a violation that nobody has looked for proves nothing.
            continue
    return False


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_each_safeguard_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seed, how, patches = ABLATIONS[name]
    run_story(seed)
    for where, attribute, instead in patches:
        monkeypatch.setattr(where, attribute, instead)
    assert stories_break(seed, how)
