"""Whole clusters of three and five nodes under faults, in virtual time: nothing acknowledged is lost.

One seed is one story. Idempotent producers, readers, a committer of offsets and an operator who creates and
deletes topics go on while nodes are killed (and lose what was not synced), stopped, paused, cut off from each
other in one direction or both, lose their way to the metadata store, their lease, room on their disk, an
fsync, or the whole disk. Then everything is healed, and what is there is compared with what clients saw:

- invariants 1 to 6 of ``support.history`` over what clients were told;
- the committed offset of a group is never older than one that was acknowledged before the question;
- one leader for each epoch of a partition; the high watermarks that clients are told never go back;
- below the high watermarks that any replica ever had, one value for each offset; in the end equal replicas;
- in a compacted topic, the newest acknowledged record of each key, or one behind it;
- every node sees the same metadata at the same revision;
- all of this within a bounded time after the last fault, with every replica in sync again.

Answers like NOT_LEADER, AFTER_APPEND and no answer at all mean that the outcome is unknown.

Safeguards that are switched off here, and must be missed: see ``ABLATIONS``. Others need schedules that whole
clusters rarely come to; they are switched off closer to the code:

- a shrink that counts before it is committed, proposed members, the follower's rules for the high watermark,
  the cut that waits for flushes, the old epoch, the minimum: ``tests/sim/test_replica_stories.py``;
- the start of the epoch, the matched end, the floor of compaction, unknown outcomes of proposals:
  ``tests/unit/replication/test_replica_rules.py``;
- clean notes, elr and its end, lost replicas, a restarted disk in doubt: ``tests/unit/control/
  test_insync_model.py``; a controller that lost its lease: ``tests/unit/control/test_cluster_controller.py``;
- the cut where histories part: ``tests/sim/test_replica_faults.py``.

Replay one with ``run_story(seed)``; ``CLUSTER_STORY_SEEDS`` sets how many are run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import sha256
from typing import Any

import pytest

from support.cluster_clients import ClusterClient, Committer, IdempotentProducer, LooseProducer, Reader
from support.history import History, check
from support.virtual_loop import current_loop, run_virtual
from support.whole_cluster import WholeCluster
from tidemill.config.values import Address
from tidemill.control.image import MetadataImage
from tidemill.errors import ErrorCode, SyncFailed, TidemillError
from tidemill.records.record import read_records
from tidemill.replication.coordinator_log import PartitionCoordinatorLog
from tidemill.replication.in_sync import InSyncReplicas
from tidemill.replication.partition import Partition
from tidemill.replication.state import Role

SEEDS = int(os.environ.get("CLUSTER_STORY_SEEDS", "20"))
SEEDS_PER_TEST = 10
STEPS = 25
TOPIC, LATEST, PARTITIONS = "orders", "latest", 2
SMALL_SEGMENTS = {"internal.segment.bytes": "2000", "index.interval.bytes": "200"}
COMPACTED = {
    **SMALL_SEGMENTS,
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "internal.segment.bytes": "600",
}
#: From the last fault until everything must be well.
HEALED_WITHIN_SECONDS = 180
FIRST_PRODUCER_ID = 1_000_000


class Broken(AssertionError):
    """A story came out wrong."""


def insist(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class ClusterStory:
    """One cluster, its clients, and what they were told."""

    steps = STEPS

    def __init__(self, seed: int) -> None:
        self.loop = current_loop()
        self.rng = rng = random.Random(seed)
        self.history = History()
        self.cluster = WholeCluster(rng, 5 if seed % 5 == 4 else 3, compaction_check_interval_ms=2_000)
        addresses = [Address(self.cluster.host(node_id), 9092) for node_id in self.cluster.ids]
        self.client = client = ClusterClient(self.cluster.network, rng, addresses)
        self.newest_acked: dict[str, tuple[int, str]] = {}
        self.producers = [
            IdempotentProducer(client, self.history, TOPIC, number % PARTITIONS, FIRST_PRODUCER_ID + number)
            for number in range(3)
        ]
        self.producers.append(
            IdempotentProducer(
                client,
                History(),
                LATEST,
                0,
                FIRST_PRODUCER_ID + 9,
                keys=3,
                on_acked=self._note_newest,
            )
        )
        self.loose = LooseProducer(client, self.history, TOPIC, 0, "loose")
        self.readers = [
            Reader(client, self.history, name, TOPIC, partition, isolated=isolated, knows_epochs=not is_old)
            for partition in range(PARTITIONS)
            for name, isolated, is_old in (
                ("live", False, False),
                ("live committed", True, False),
                ("old client", False, True),
            )
        ]
        self.committer = Committer(client, "workers", TOPIC)
        self.observer = Observer(self.cluster)
        self.tasks: list[asyncio.Task[None]] = []
        #: Topics by what the operator was told; None if that is not known.
        self.exists: dict[str, bool | None] = {}
        self.disk_was_lost = False
        self.faults = 0
        self.waits_for = ""

    def _note_newest(self, key: str, value: str, offset: int) -> None:
        if offset > self.newest_acked.get(key, (-1, ""))[0]:
            self.newest_acked[key] = (offset, value)

    # --- the course of a story

    async def run(self) -> None:
        await self.cluster.start_all()
        for name, partitions, configs in ((TOPIC, PARTITIONS, SMALL_SEGMENTS), (LATEST, 1, COMPACTED)):
            while not await self.create(name, partitions, configs):
                await self.client.pause()
        await self.client.refresh()
        clients: list[Any] = [*self.producers, self.loose, *self.readers, self.committer]
        for each in clients:
            self.start(each.run())
        self.start(self.observe())
        for _ in range(self.steps):
            await self.step()
        await self.heal()
        for each in clients:
            each.is_closing = True
        await self.drain()
        self.check()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    async def observe(self) -> None:
        while True:
            await asyncio.sleep(0.4)
            self.observer.look()

    async def step(self) -> None:
        rng, cluster = self.rng, self.cluster
        await asyncio.sleep(rng.choice((0.1, 1, 4, 9)) * rng.random())
        down = [node_id for node_id in cluster.ids if node_id not in cluster.nodes]
        if down and rng.random() < 0.4:
            cluster.start(rng.choice(down))
            return
        await rng.choice(self.FAULTS)(self)

    async def kill(self) -> None:
        if up := sorted(self.cluster.nodes):
            self.faults += 1
            power_loss = self.rng.random() < 0.7
            await self.cluster.kill(
                self.rng.choice(up), power_loss=power_loss, silently=power_loss and self.rng.random() < 0.5
            )

    async def stop(self) -> None:
        if up := sorted(self.cluster.started):
            node_id = self.rng.choice(up)
            self.cluster.nodes[node_id].process.go_on()
            await self.cluster.stop(node_id)

    async def pause(self) -> None:
        if up := sorted(self.cluster.started):
            self.faults += 1
            process = self.cluster.nodes[self.rng.choice(up)].process
            process.pause()
            self.loop.call_later(self.rng.choice((0.5, 3, 12)) * self.rng.random(), process.go_on)

    async def cut(self) -> None:
        self.faults += 1
        hosts = [self.cluster.host(node_id) for node_id in self.cluster.ids]
        source = self.rng.choice(hosts)
        # One from one other, or from all others; clients are others, too.
        others = [host for host in (*hosts, "client") if host != source]
        for target in others if self.rng.random() < 0.4 else [self.rng.choice(others)]:
            way = self.rng.random()
            if way < 0.7:
                self.cluster.network.cut(source, target)
            if way > 0.3:
                self.cluster.network.cut(target, source)

    async def mend(self) -> None:
        self.cluster.network.heal()
        for way in self.cluster.ways.values():
            way.unavailable = False
            way.go_on()

    async def trouble_store(self) -> None:
        self.faults += 1
        way = self.cluster.ways[self.rng.choice(self.cluster.ids)]
        match self.rng.randrange(4):
            case 0:
                way.hang()
            case 1:
                way.unavailable = True
            case 2:
                way.lost_replies += 1
            case _:
                way.lost_commits += 1

    async def end_lease(self) -> None:
        self.faults += 1
        await self.cluster.end_lease(self.rng.choice(self.cluster.ids))

    async def trouble_disk(self) -> None:
        self.faults += 1
        disk = self.cluster.disks[self.rng.choice(self.cluster.ids)]
        if self.rng.random() < 0.5:
            disk.capacity_bytes = (
                None if disk.capacity_bytes else disk.used_bytes + self.rng.randint(0, 3_000)
            )
        else:
            disk.fail_next("sync", "", SyncFailed("a failed fsync"))

    async def lose_disk(self) -> None:
        """Once, and only when every replica is in sync: others have everything then."""
        image = await self.stored_image()
        whole = all(
            len(each.isr) == len(each.replicas)
            for topic in image.topics.values()
            for each in topic.partitions
        )
        if self.disk_was_lost or not whole:
            return
        self.disk_was_lost = True
        self.faults += 1
        node_id = self.rng.choice(self.cluster.ids)
        if node_id in self.cluster.nodes:
            await self.cluster.kill(node_id, power_loss=True)
        self.cluster.lose_disk(node_id)

    async def operate(self) -> None:
        """An operator creates a topic, or deletes one."""
        known = sorted(name for name, there in self.exists.items() if there and name not in (TOPIC, LATEST))
        if known and self.rng.random() < 0.5:
            self.start(self.delete(self.rng.choice(known)))
        else:
            self.start(self.create_more(f"more-{len(self.exists)}"))

    FAULTS: tuple[Callable[[ClusterStory], Awaitable[None]], ...] = (
        *(kill, kill, kill, stop, pause, cut, cut, mend, mend, mend, trouble_store, trouble_store),
        *(end_lease, trouble_disk, lose_disk, operate, operate),
    )

    async def create(self, name: str, partitions: int, configs: dict[str, str]) -> bool:
        self.exists.setdefault(name, None)
        wanted = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 3,
            "assignments": [],
            "configs": [{"name": key, "value": value} for key, value in configs.items()],
        }
        try:
            answer = await self.client.ask_any("CreateTopics", {"topics": [wanted], "timeout": 3_000}, 5)
        except TidemillError:
            return False
        code = answer.topics[0].error_code
        if code in (ErrorCode.none, ErrorCode.topic_already_exists):
            self.exists[name] = True
        return code in (ErrorCode.none, ErrorCode.topic_already_exists)

    async def create_more(self, name: str) -> None:
        await self.create(name, 1, {})

    async def delete(self, name: str) -> None:
        self.exists[name] = None
        body = {"topic_names": [name], "timeout": 3_000}
        try:
            answer = await self.client.ask_any("DeleteTopics", body, 4)
        except TidemillError:
            return
        if answer.responses[0].error_code == ErrorCode.none:
            self.exists[name] = False

    # --- healing

    async def stored_image(self) -> MetadataImage:
        return MetadataImage.from_stored(await self.cluster.store.read())

    async def heal(self) -> None:
        self.cluster.heal()
        for node_id in self.cluster.ids:
            if node_id not in self.cluster.nodes:
                self.cluster.start(node_id)

    async def restart_stopped(self) -> None:
        """An operator restarts nodes with stopped partitions."""
        cluster = self.cluster
        for node_id in cluster.ids:
            await cluster.wait_started(node_id)
            if any(cluster.nodes[node_id].broker.replicas.stopped()):
                await cluster.kill(node_id, power_loss=False)
                cluster.start(node_id)
                await cluster.wait_started(node_id)

    async def drain(self) -> None:
        try:
            async with asyncio.timeout(HEALED_WITHIN_SECONDS):
                await self._drain()
        except TimeoutError:
            raise Broken(f"waits for {self.waits_for}: {await self.explain()}") from None

    async def _drain(self) -> None:
        self.waits_for = "nodes to start"
        await self.restart_stopped()
        self.waits_for = "producers"
        writing = asyncio.gather(*self.tasks[: len(self.producers)])
        while not writing.done():
            await self.client.pause()
            await self.restart_stopped()
        await writing
        self.waits_for = "replicas"
        while not await self.is_whole():
            await self.client.pause()
            await self.restart_stopped()
        self.drains = [
            Reader(self.client, self.history, name, TOPIC, partition, isolated=isolated)
            for partition in range(PARTITIONS)
            for name, isolated in (("drain", False), ("drain committed", True))
        ]
        self.newest = Reader(self.client, History(), "drain", LATEST, 0)
        self.waits_for = "readers"
        for reader in (*self.drains, self.newest):
            while not await reader.drain():
                await self.client.pause()
        self.waits_for = "the coordinator of the group"
        while not await self.committer.fetch():
            await self.client.pause()
        for task in self.tasks:
            task.cancel()
        for task, result in zip(
            self.tasks, await asyncio.gather(*self.tasks, return_exceptions=True), strict=True
        ):
            if isinstance(result, Exception):
                raise Broken(f"{task} failed") from result

    async def is_whole(self) -> bool:
        """Whether every replica is in sync, has a leader, and ends where the others do."""
        image = await self.stored_image()
        if image.deleted_topics:
            return False
        for topic in image.topics.values():
            if any(each.leader == -1 or {*each.isr} != {*each.replicas} for each in topic.partitions):
                return False
            ends: dict[int, set[int]] = {index: set() for index in range(len(topic.partitions))}
            held = self.cluster.partitions(topic.name)
            if len(held) != sum(len(each.replicas) for each in topic.partitions):
                return False
            for _, each in held:
                ends[each.index] |= {each.log_end_offset, each.high_watermark}
            if any(len(found) != 1 for found in ends.values()):
                return False
        return True

    async def explain(self) -> str:
        """What is not well."""
        image = await self.stored_image()
        told = [
            f"{topic.name}-{index}: {each}"
            for topic in image.topics.values()
            for index, each in enumerate(topic.partitions)
        ]
        told += [f"deleted: {image.deleted_topics}"]
        for node_id in self.cluster.ids:
            if node_id in self.cluster.started:
                told.append(f"node {node_id}: {self.cluster.nodes[node_id].node.problems()}")
                replicas = self.cluster.nodes[node_id].broker.replicas
                told += [
                    f"  {each!r} {each.role} end {each.log_end_offset} hw {each.high_watermark}"
                    for each in replicas
                ]
            else:
                told.append(f"node {node_id} has not started")
        told += [f"coordinator of the group: {self.committer.refusal}"]
        told += self.cluster.refusals[-3:]
        told += [f"{each.name}: {each.unacked}" for each in self.producers if each.unacked]
        return "\n".join(told)

    # --- what must hold

    def check(self) -> None:
        insist(not self.client.strange, f"clients saw what nobody should see: {self.client.strange}")
        violations = check(self.history, "drain", "drain committed")
        insist(not violations, f"{violations[:5]}")
        insist(not self.committer.violations, f"{self.committer.violations}")
        found = {key: (offset, value) for offset, key, value in self.newest.records}
        for key, (offset, value) in self.newest_acked.items():
            newer = found.get(key, (-1, ""))
            insist(newer[0] >= offset, f"{value} of {key} was acknowledged at {offset}, and {newer} is left")
            insist(newer[0] > offset or newer[1] == value, f"{key} at {offset} was {value}, and is {newer}")
        self.observer.look()
        self.observer.check_end()
        names = set(self.cluster.nodes[1].broker.image.topics)
        for name, there in self.exists.items():
            insist(there is None or there == (name in names), f"{name} exists, or not: {there}, {names}")


class Observer:
    """Looks into nodes from time to time: roles, epochs, high watermarks, values, metadata."""

    def __init__(self, cluster: WholeCluster) -> None:
        self.cluster = cluster
        self.leaders: dict[tuple[Any, int, int], int] = {}
        self.epochs: dict[tuple[Any, int], tuple[int, int]] = {}
        self.committed: dict[tuple[Any, int, int], str] = {}
        self.watermarks: dict[Partition, int] = {}
        self.images: dict[int, str] = {}
        self.revisions: dict[Any, int] = {}

    def look(self) -> None:
        """Look at all nodes now."""
        for node_id in sorted(self.cluster.started):
            node = self.cluster.nodes[node_id]
            self._look_at_image(node, node.broker.image)
            for partition in node.broker.replicas:
                if partition.failure is None:
                    self._look_at_partition(node_id, partition)

    def _look_at_image(self, node: Any, image: MetadataImage) -> None:
        insist(self.revisions.get(node, 0) <= image.revision, "a node's metadata went back")
        if self.revisions.get(node) == image.revision:
            return
        self.revisions[node] = image.revision
        told = []
        for name, topic in sorted(image.topics.items()):
            told.append(f"{name} {topic.id} {topic.partitions}")
            for index, each in enumerate(topic.partitions):
                place = (topic.id, index)
                if each.leader != -1:
                    first = self.leaders.setdefault((*place, each.leader_epoch), each.leader)
                    insist(
                        first == each.leader, f"{name}-{index} has two leaders at epoch {each.leader_epoch}"
                    )
        told += [f"{sorted(image.alive.items())} {sorted(image.admitted.items())} {image.controller}"]
        seen = sha256("\n".join(told).encode()).hexdigest()
        insist(
            self.images.setdefault(image.revision, seen) == seen,
            f"two nodes see other metadata at revision {image.revision}",
        )

    def _look_at_partition(self, node_id: int, partition: Partition) -> None:
        place = (partition.topic_id, partition.index)
        if partition.role is Role.LEADER:
            first = self.leaders.setdefault((*place, partition.leader_epoch), node_id)
            insist(first == node_id, f"{partition!r} has two leaders at epoch {partition.leader_epoch}")
        log, watermark = partition.local_log, partition.high_watermark
        before = self.watermarks.get(partition, 0)
        # A follower that is far behind begins anew, and nobody reads from it meanwhile.
        insist(
            watermark >= before or partition.role is not Role.LEADER,
            f"a high watermark of {partition!r} went back on node {node_id}",
        )
        insist(watermark <= log.end_offset, f"the high watermark of {partition!r} is above its end")
        if log.is_truncating:
            return
        self.watermarks[partition] = watermark
        start = max(before, log.log_start_offset)
        for batch in log.read_batches(start, watermark) if start < watermark else ():
            for record in read_records(batch):
                if start <= record.offset < watermark:
                    value = repr((record.key, record.value))
                    known = self.committed.setdefault((*place, record.offset), value)
                    what = f"{value} at {record.offset} of {partition!r}, and there was {known}"
                    insist(known == value, f"node {node_id} has {what}")

    def check_end(self) -> None:
        """Read all replicas again from the start: wherever two hold a record, it is the same."""
        self.watermarks.clear()
        self.look()


def run_story(seed: int) -> ClusterStory:
    """Tell one story. Raises ``Broken`` if something does not hold."""

    async def tell() -> ClusterStory:
        story = ClusterStory(seed)
        await story.run()
        return story

    return run_virtual(tell, seed=seed)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_no_fault_loses_doubles_or_reorders_anything(first: int) -> None:
    acknowledged = faults = 0
    for seed in range(first, min(SEEDS, first + SEEDS_PER_TEST)):
        try:
            story = run_story(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        acknowledged += sum(1 for _ in story.history.of("acked"))
        faults += story.faults
    assert acknowledged > 20 * SEEDS_PER_TEST, "the stories write too little to say anything"
    assert faults > 3 * SEEDS_PER_TEST


# --- ablations


def _commit_alone(self: InSyncReplicas, own_durable: int) -> int:
    return own_durable


Patches = list[tuple[object, str, object]]

#: What is patched, and a seed whose story has broken then; others are tried if it does not any more.
ABLATIONS: dict[str, tuple[int, Patches]] = {
    "a leader commits alone": (2, [(InSyncReplicas, "least", _commit_alone)]),
    "a coordinator replays up to the high watermark": (
        0,
        [
            (
                PartitionCoordinatorLog,
                "end_offset",
                property(lambda self: self._partition.high_watermark),
            )
        ],
    ),
    "a new leader tells what it has": (7, [(Partition, "has_reached_epoch_start", True)]),
}


def stories_break(first_seed: int, tries: int = 12) -> bool:
    for seed in (first_seed, *range(tries)):
        try:
            run_story(seed)
        except (AssertionError, RuntimeError, TidemillError):
            return True
    return False


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_each_safeguard_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seed, patches = ABLATIONS[name]
    for where, attribute, instead in patches:
        monkeypatch.setattr(where, attribute, instead)
    assert stories_break(seed)


if __name__ == "__main__":
    import logging
    import sys

    logging.basicConfig(level=logging.INFO)
    run_story(int(sys.argv[1]))
