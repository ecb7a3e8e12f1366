"""A cluster under faults, in virtual time, and what must hold whatever its clients do.

``ClusterStory`` has the cluster, the faults and the healing. Its ``users`` are those who use the cluster (see
``support.cluster_users``): each has tasks that go on through the faults, comes to an end once all is healed,
and is checked then. A story:

1. the nodes start, the users begin;
2. ``STEPS`` times something happens: a fault, a mended fault, a started node, or an operator's work;
3. everything is healed, and the nodes are started;
4. within a bounded time every replica is in sync, and every user has come to an end;
5. the checks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import sha256
from typing import Any, Protocol

from support.cluster_clients import PASSING, ClusterClient
from support.virtual_loop import current_loop
from support.whole_cluster import WholeCluster
from tidemill.config.values import Address
from tidemill.control.image import MetadataImage
from tidemill.errors import ErrorCode, SyncFailed, TidemillError
from tidemill.log.log import PartitionLog
from tidemill.records.batch import parse_header
from tidemill.records.record import read_records
from tidemill.replication.partition import Partition
from tidemill.replication.rules.state import Role

__all__ = ("Broken", "ClusterStory", "Observer", "User", "insist", "newest_records")

STEPS = 25
#: From the last fault until everything must be well.
HEALED_WITHIN_SECONDS = 180
#: After that a session is over, whatever the rates of clocks.
_SESSION_OVER_SECONDS = 15.0
#: What an operator may be told of a move or an election.
_REFUSED_MOVES = PASSING | {
    ErrorCode.broker_not_available,
    ErrorCode.election_not_needed,
    ErrorCode.eligible_leaders_not_available,
    ErrorCode.invalid_replica_assignment,
    ErrorCode.no_reassignment_in_progress,
    ErrorCode.not_controller,
    ErrorCode.preferred_leader_not_available,
    ErrorCode.reassignment_in_progress,
}


class Broken(AssertionError):
    """A story came out wrong."""


def insist(condition: bool, what: str) -> None:
    """Break the story unless the condition holds."""
    if not condition:
        raise Broken(what)


class User(Protocol):
    """Somebody who uses the cluster."""

    async def prepare(self, story: ClusterStory) -> None:
        """Create what it needs, before the first fault."""

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on through all faults; it ends some time after ``close``, or is cancelled at the end."""

    def close(self) -> None:
        """All is healed: begin nothing new."""

    def observe(self) -> None:
        """Look into the nodes, from time to time; break the story if something does not hold."""

    @property
    def at_rest(self) -> bool:
        """Whether nothing is open, behind ``close``."""

    async def drain(self) -> bool:
        """Read what is there in the end. False if it has to be tried again."""

    def check(self) -> None:
        """Break the story if something does not hold."""


class ClusterStory:
    """One cluster, its users, and what happens to them."""

    steps = STEPS

    def __init__(self, seed: int, users: Sequence[User], *, size: int = 3, **settings: Any) -> None:
        self.loop = current_loop()
        self.rng = rng = random.Random(seed)
        self.cluster = WholeCluster(rng, size, **{"compaction_check_interval_ms": 2_000, **settings})
        addresses = [Address(self.cluster.host(node_id), 9092) for node_id in self.cluster.ids]
        self.client = ClusterClient(self.cluster.network, rng, addresses)
        self.users = users
        self.observer = Observer(self.cluster)
        self.tasks: list[asyncio.Task[None]] = []
        #: Topics by what the operator was told; None if that is not known.
        self.exists: dict[str, bool | None] = {}
        #: Topics of the users, which the operator leaves alone.
        self.kept: set[str] = set()
        self.disk_lost_at = -_SESSION_OVER_SECONDS
        self.faults = self.moves = 0
        self.waits_for = ""

    # --- the course of a story

    async def run(self) -> None:
        await self.begin()
        for _ in range(self.steps):
            await self.step()
        await self.end()

    async def begin(self) -> None:
        """The nodes start, and the users begin."""
        await self.cluster.start_all()
        for user in self.users:
            await user.prepare(self)
        await self.client.refresh()
        for user in self.users:
            for work in user.tasks():
                self.start(work)
        self.start(self.observe())

    async def end(self) -> None:
        """Everything is healed and must come to rest; then it is checked."""
        await self.heal()
        for user in self.users:
            user.close()
        await self.drain()
        self.check()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(self.loop.create_task(work))

    async def observe(self) -> None:
        while True:
            await asyncio.sleep(0.4)
            self.observer.look()
            for user in self.users:
                user.observe()

    async def step(self) -> None:
        rng, cluster = self.rng, self.cluster
        await asyncio.sleep(rng.choice((0.1, 1, 4, 9)) * rng.random())
        down = [node_id for node_id in cluster.ids if node_id not in cluster.nodes]
        if down and rng.random() < 0.4:
            cluster.start(rng.choice(down))
            return
        await rng.choice(self.FAULTS)(self)

    # --- faults

    @property
    def _can_afford_a_kill(self) -> bool:
        """Not for a while after a lost disk.

        While the session of its node lives, that is taken to have everything. Whoever crashes meanwhile, or
        whose disk fails, leaves the in-sync set, so several of that would leave no replica that is known to
        have everything.
        """
        return self.loop.now > self.disk_lost_at + _SESSION_OVER_SECONDS

    async def kill(self) -> None:
        if self._can_afford_a_kill and (up := sorted(self.cluster.nodes)):
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
            way.slow_seconds_max = 0.0
            way.go_on()

    async def trouble_store(self) -> None:
        self.faults += 1
        way = self.cluster.ways[self.rng.choice(self.cluster.ids)]
        match self.rng.randrange(5):
            case 0:
                way.hang()
            case 1:
                way.unavailable = True
            case 2:
                way.lost_replies += 1
            case 3:
                way.slow_seconds_max = self.rng.choice((0.5, 3.0))
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
        elif self._can_afford_a_kill:
            disk.fail_next("sync", "", SyncFailed("a failed fsync"))

    async def lose_disk(self) -> None:
        """Once, and only when every replica is in sync and nobody starts: others have everything then."""
        image = await self.stored_image()
        whole = {*self.cluster.ids} == self.cluster.started == image.live_nodes and all(
            len(each.isr) == len(each.replicas) and len(each.replicas) > 1
            for topic in image.topics.values()
            for each in topic.partitions
        )
        if self.disk_lost_at > 0 or not whole:
            return
        self.disk_lost_at = self.loop.now
        self.faults += 1
        node_id = self.rng.choice(self.cluster.ids)
        if node_id in self.cluster.nodes:
            await self.cluster.kill(node_id, power_loss=True)
        self.cluster.lose_disk(node_id)

    # --- an operator

    async def operate(self) -> None:
        """An operator creates a topic, or deletes one."""
        known = sorted(name for name, there in self.exists.items() if there and name not in self.kept)
        if known and self.rng.random() < 0.5:
            self.start(self.delete(self.rng.choice(known)))
        else:
            self.start(self.create_more(f"more-{len(self.exists)}"))

    async def move(self) -> None:
        """An operator moves replicas or leaderships, or drains a node; nobody waits for the end of it."""
        self.moves += 1
        match self.rng.randrange(4):
            case 0:
                self.start(self.reassign())
            case 1:
                self.start(self.cancel_moves())
            case 2:
                self.start(self.elect_preferred())
            case _:
                self.start(self.drain_node(self.rng.choice(self.cluster.ids)))

    async def reassign(self) -> None:
        """Move one partition to other nodes, or have another one lead it."""
        image = await self.stored_image()
        topic = image.topics[self.rng.choice(sorted(image.topics))]
        index = self.rng.randrange(len(topic.partitions))
        count = 2 if self.rng.random() < 0.2 else 3
        target = self.rng.sample(self.cluster.ids, count)
        await self.alter_reassignments([(topic.name, index, target)])

    async def cancel_moves(self) -> None:
        image = await self.stored_image()
        moving = [
            (topic.name, index, None)
            for topic in image.topics.values()
            for index, each in enumerate(topic.partitions)
            if each.adding or each.removing
        ]
        await self.alter_reassignments(moving)

    async def drain_node(self, node_id: int) -> None:
        """Take every leadership from a node, and its replicas where another node has room for them."""
        image, wanted = await self.stored_image(), []
        for topic in image.topics.values():
            for index, each in enumerate(topic.partitions):
                others = [other for other in each.replicas if other != node_id]
                free = [other for other in self.cluster.ids if other not in each.replicas]
                if node_id in each.replicas and others:
                    wanted.append((topic.name, index, [*others, *(free[:1] or [node_id])]))
        await self.alter_reassignments(wanted)

    async def alter_reassignments(self, wanted: Sequence[tuple[str, int, list[int] | None]]) -> None:
        topics = [
            {"name": name, "partitions": [{"partition_index": index, "replicas": target}]}
            for name, index, target in wanted
        ]
        try:
            answer = await self.client.ask_any(
                "AlterPartitionReassignments", {"timeout": 3_000, "topics": topics}, 0
            )
        except TidemillError:
            return
        codes = {each.error_code for topic in answer.responses for each in topic.partitions}
        self._note_codes("a move", {*codes, answer.error_code})

    async def elect_preferred(self) -> None:
        body = {"election_type": 0, "topic_partitions": None, "timeout": 3_000}
        try:
            answer = await self.client.ask_any("ElectLeaders", body, 2)
        except TidemillError:
            return
        results = answer.replica_election_results
        codes = {each.error_code for topic in results for each in topic.partition_result}
        self._note_codes("an election", {*codes, answer.error_code})

    def _note_codes(self, what: str, codes: set[int]) -> None:
        for code in sorted(codes - {ErrorCode.none} - _REFUSED_MOVES):
            self.client.note_strange(f"{what} got {ErrorCode(code).name}")

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

    async def create_kept(self, name: str, partitions: int, configs: dict[str, str]) -> None:
        """Create a topic of a user, however often it must be tried."""
        self.kept.add(name)
        while not await self.create(name, partitions, configs):
            await self.client.pause()

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

    FAULTS: tuple[Callable[[ClusterStory], Awaitable[None]], ...] = (
        *(kill, kill, kill, stop, pause, cut, cut, mend, mend, mend, trouble_store, trouble_store),
        *(end_lease, trouble_disk, lose_disk, operate, move, move),
    )

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
        self.waits_for = "those who write"
        while not all(user.at_rest for user in self.users):
            await self._go_on()
        self.waits_for = "replicas"
        while not await self.is_whole():
            await self._go_on()
        self.waits_for = "those who read"
        for user in self.users:
            while not await user.drain():
                await self._go_on()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self._check_tasks()

    async def _go_on(self) -> None:
        self._check_tasks()
        await self.client.pause()
        await self.restart_stopped()

    def _check_tasks(self) -> None:
        for task in self.tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise Broken(f"{task} failed: {error}") from error

    async def is_whole(self) -> bool:
        """Whether every replica is in sync, has a leader, and ends where the others do; nothing moves."""
        image = await self.stored_image()
        if image.deleted_topics:
            return False
        for topic in image.topics.values():
            if any(
                each.leader == -1 or {*each.isr} != {*each.replicas} or each.adding or each.removing
                for each in topic.partitions
            ):
                return False
            held = self.cluster.partitions(topic.name)
            if len(held) != sum(len(each.replicas) for each in topic.partitions):
                return False
            ends: dict[int, set[int]] = {index: set() for index in range(len(topic.partitions))}
            for _, each in held:
                ends[each.index] |= {each.log_end_offset, each.high_watermark, each.last_stable_offset}
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
                    f"  {each!r} {each.role} end {each.log_end_offset} hw {each.high_watermark} "
                    f"lso {each.last_stable_offset}"
                    for each in replicas
                ]
            else:
                told.append(f"node {node_id} has not started")
        told += self.cluster.refusals[-3:]
        told += [f"{user}" for user in self.users]
        return "\n".join(told)

    # --- what must hold

    def check(self) -> None:
        insist(not self.client.strange, f"clients saw what nobody should see: {self.client.strange[:5]}")
        insist(not self.cluster.store.violations, f"{self.cluster.store.violations[:3]}")
        self.observer.look()
        for user in self.users:
            user.check()
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
        """Read all replicas again from the start: wherever two hold a record, it is the same.

        So is the newest record of each key, whatever each replica has compacted.
        """
        self.watermarks.clear()
        self.look()
        folds: dict[tuple[Any, int], dict[bytes, tuple[int, bytes]]] = {}
        for node_id in sorted(self.cluster.started):
            for partition in self.cluster.nodes[node_id].broker.replicas:
                fold = newest_records(partition.local_log)
                first = folds.setdefault((partition.topic_id, partition.index), fold)
                differ = sorted(key for key in {*first, *fold} if first.get(key) != fold.get(key))
                insist(
                    not differ,
                    f"{partition!r} of node {node_id} differs at keys {differ[:3]}: "
                    f"{[(first.get(key), fold.get(key)) for key in differ[:3]]}",
                )


def newest_records(log: PartitionLog, end: int | None = None) -> dict[bytes, tuple[int, bytes]]:
    """The newest record of each key, without those whose newest is a deletion, and without markers.

    With ``end`` only what is below that offset counts.
    """
    newest: dict[bytes, tuple[int, bytes]] = {}
    end = log.end_offset if end is None else end
    if log.log_start_offset >= end:
        return newest
    for batch in log.read_batches(log.log_start_offset, end):
        if parse_header(batch).is_control:
            continue
        for record in read_records(batch):
            if record.offset >= end:
                break
            if record.key is not None and record.value is None:
                newest.pop(record.key, None)
            elif record.key is not None and record.value is not None:
                newest[record.key] = (record.offset, record.value)
    return newest
