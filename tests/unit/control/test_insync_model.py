"""A replica that may be elected has every committed record, whatever happens in whatever order.

A small model of one partition: nodes crash, stop, lose their sessions, come back with their disk, with losses
or with another disk, see the metadata late, and propose in-sync sets that arrive late. Records are committed
as rule 1 of the design says: whoever believes to be the leader needs all of the in-sync set that it knows,
and those whose joining it has proposed. Disks are full, hang or fail: a replica whose storage has failed
answers nobody until its process restarts, and nobody knows what it has.

Each safeguard is switched off once. Then the same walks must go wrong, for the reason that it is there.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.control_world import World, directory, duties_of, register
from tidemill.control import duties as duties_module
from tidemill.control import insync, node_planning, partition_planning
from tidemill.control.commands import (
    AdmitNode,
    AlterInSync,
    AlterReassignment,
    DeclareFit,
    DeclareUnfit,
    Election,
    ElectLeaders,
    Resign,
    SetTopicConfigs,
)
from tidemill.control.image import PartitionImage
from tidemill.errors import ApiError, ErrorCode

NODES = (1, 2, 3, 4)
#: Walks at random, with and without the safeguards.
SEEDS = range(400)
#: Why a replica has less than was committed.
BEHIND, UNCLEAN, LOST, FAILED = "it was behind", "an unclean stop", "a lost disk", "a failed disk"


class LostRecords(AssertionError):
    """A replica that may be elected has not every committed record."""


class Model:
    """One partition of a cluster of four nodes, with the records that each node has."""

    def __init__(self) -> None:
        self.world = World(len(NODES))
        self.world.create(1, 2, 3)
        self.committed = 0
        self.data = dict.fromkeys(NODES, 0)
        #: How the records of a node were lost, until it has copied them again.
        self.lost_by: dict[int, str] = {}
        #: Nodes whose storage has failed, until their processes end.
        self.failed: set[int] = set()
        #: The node epoch under which a leader epoch was led.
        self.led: dict[int, int] = {}
        #: Nodes that came back after an unclean stop and have not been compared with a leader since.
        self.in_doubt: set[int] = set()
        self.directories = {node: node for node in NODES}
        self.next_directory = 100
        #: Nodes whose process runs, with their node epoch; it may run on without a session.
        self.running = {node: self.world.image.node_epoch(node) for node in NODES}
        self.notes: dict[int, UUID | None] = dict.fromkeys(NODES)
        #: What each process knows: the partition, and whether itself is live.
        self.views: dict[int, tuple[PartitionImage, bool]] = {}
        #: Members that a leader has proposed, with the partition epoch of the proposal.
        self.proposed: dict[int, list[tuple[int, frozenset[int]]]] = {}
        self.in_flight: list[AlterInSync | DeclareUnfit] = []
        for node in NODES:
            self.see(node)

    @property
    def partition(self) -> PartitionImage:
        return self.world.partition()

    # -- what nodes do -------------------------------------------------------------------------------------

    def see(self, node: int, _: int = 0) -> None:
        if node in self.running:
            self.views[node] = (self.partition, self.world.image.live(node))
            if node in self.proposed:
                epoch = self.partition.partition_epoch
                self.proposed[node] = [each for each in self.proposed[node] if each[0] == epoch]

    def crash(self, node: int, _: int = 0) -> None:
        self._end(node)

    def stop_cleanly(self, node: int, _: int = 0) -> None:
        if node in self.running and node in self.world.image.alive:
            # A log that has stopped cannot be closed in an orderly way.
            self.notes[node] = None if node in self.failed else self.world.image.alive[node]
            self.world.end_session(node)
            self._end(node)

    def expire(self, node: int, _: int = 0) -> None:
        """The lease is over, whether the process runs or not."""
        self.world.end_session(node)

    def start(self, node: int, fate: int) -> None:
        """Come back: with the disk as it was, with losses or another disk, or die before the session."""
        if node in self.running and node not in self.world.image.alive:
            # Its session was lost: the process registers again.
            self._end(node)
        if node in self.running or node in self.world.image.alive:
            return
        lost: tuple[tuple[UUID, int], ...] = ()
        if fate in (3, 5):
            self._lose(node, LOST)
            lost = ((self.world.image.topics["t"].id, 0),)
        if fate in (4, 6):
            self._lose(node, LOST)
            self.next_directory += 1
            self.directories[node] = self.next_directory
        self.world.last_incarnation += 1
        incarnation = self.world.last_incarnation
        self.world.do(
            register(
                node,
                incarnation,
                directory_id=directory(self.directories[node]),
                clean_of=self.notes[node],
                lost=lost,
                replace_directory=True,
            )
        )
        self.notes[node] = None
        if not self.world.image.nodes[node].clean:
            self.in_doubt.add(node)
        if fate in (5, 6, 7):
            return
        self.running[node] = self.world.image.node_epoch(node)
        self.world.begin_session(node, UUID(int=incarnation))

    def _end(self, node: int) -> None:
        self.running.pop(node, None)
        self.views.pop(node, None)
        self.proposed.pop(node, None)
        self.failed.discard(node)

    def _lose(self, node: int, how: str) -> None:
        self.data[node] = 0
        self.lost_by[node] = how

    def _copy(self, node: int, count: int) -> None:
        self.data[node] = count
        self.lost_by.pop(node, None)

    def commit(self, node: int, _: int = 0) -> None:
        """Commit one more record, as some leader believes that it may."""
        leader = self._leader_from(node)
        if leader is None:
            return
        known = self.views[leader][0]
        members = {*known.isr}.union(*(added for _, added in self.proposed.get(leader, [])))
        if len(known.isr) >= known.min_isr and all(self._follows(node, leader) for node in members):
            self.committed += 1
            for node in members:
                self._copy(node, self.committed)

    def catch_up(self, node: int, _: int = 0) -> None:
        if node in self.views and node not in self.failed:
            leader = self.views[node][0].leader
            if self._leads(leader) and self._same_epoch(node, leader):
                self._copy(node, self.data[leader])
                self.in_doubt.discard(node)

    def propose(self, node: int, choice: int) -> None:
        """Propose an in-sync set; who joins has caught up. It arrives later."""
        leader = self._leader_from(node)
        if leader is None:
            return
        known = self.views[leader][0]
        wanted = {leader} | {node for node in known.replicas if choice >> node & 1}
        joining = {node for node in wanted - {*known.isr} if self._follows(node, leader)}
        isr = (wanted & {*known.isr}) | joining
        self.proposed.setdefault(leader, []).append((known.partition_epoch, frozenset(joining)))
        self.in_flight.append(
            AlterInSync(
                topic_id=self.world.image.topics["t"].id,
                index=0,
                leader=leader,
                leader_epoch=known.leader_epoch,
                partition_epoch=known.partition_epoch,
                isr=tuple(sorted(isr)),
                node_epochs={node: self.running[node] for node in isr if node in self.running},
            )
        )

    def resign(self, leader: int, _: int = 0) -> None:
        if self._leads(leader):
            epoch, topic_id = self.views[leader][0].leader_epoch, self.world.image.topics["t"].id
            self.do(Resign(topic_id=topic_id, index=0, node_id=leader, leader_epoch=epoch), leader)

    def declare_unfit(self, node: int, choice: int) -> None:
        """The disk of a node is full, hangs or fails; the controller hears of it now, or later."""
        if node not in self.views:
            return
        if choice % 4 == 1:
            self.failed.add(node)
        command = DeclareUnfit(
            topic_id=self.world.image.topics["t"].id,
            index=0,
            node_id=node,
            node_epoch=self.running[node],
            leader_epoch=self.views[node][0].leader_epoch,
            failed=node in self.failed,
        )
        if choice % 8 < 4:
            self._tell_unfit(command)
        else:
            self.in_flight.append(command)

    def _tell_unfit(self, command: DeclareUnfit) -> None:
        node = command.node_id
        if self.do(command, node) and command.failed and self.partition.leader not in (node, -1):
            # Nobody may count on what is on its disk any more.
            self._lose(node, FAILED)
            self.check()

    def declare_fit(self, node: int, _: int = 0) -> None:
        if node in self.views and node not in self.failed:
            self.do(DeclareFit(topic_id=self.world.image.topics["t"].id, index=0, node_id=node))

    def _leader_from(self, first: int) -> int | None:
        """A node that believes to be the leader: there may be several, and the search begins at ``first``."""
        order = (*NODES[first - 1 :], *NODES[: first - 1])
        return next((node for node in order if self._leads(node)), None)

    def _leads(self, node: int) -> bool:
        """Whether the node answers as the leader; one whose storage has failed does not."""
        if node not in self.views or node in self.failed:
            return False
        known, is_live = self.views[node]
        return is_live and known.leader == node

    def _same_epoch(self, node: int, leader: int) -> bool:
        return self.views[node][0].leader_epoch == self.views[leader][0].leader_epoch

    def _follows(self, node: int, leader: int) -> bool:
        """Whether the node is up, at the leader's epoch, and known to have all that the leader has."""
        return (
            node in self.views
            and node not in self.in_doubt | self.failed
            and self._same_epoch(node, leader)
            and self.data[node] == self.data[leader]
        )

    # -- what others do ------------------------------------------------------------------------------------

    def deliver(self, choice: int, _: int = 0) -> None:
        if self.in_flight:
            command = self.in_flight.pop(choice % len(self.in_flight))
            if isinstance(command, DeclareUnfit):
                self._tell_unfit(command)
            else:
                self.do(command)

    def duty(self, choice: int, suspect: int) -> None:
        """The controller does one of the things that it has to do."""
        found = duties_of(self.world.image, frozenset({suspect % 9}))
        if found:
            self.do(found[choice % len(found)])

    def configure(self, choice: int, _: int = 0) -> None:
        self.do(SetTopicConfigs(name="t", configs={"min.insync.replicas": str(choice % 3 + 1)}))

    def move(self, choice: int, order: int) -> None:
        target = [node for node in NODES if choice >> node & 1]
        if target:
            turn = order % len(target)
            self.do(AlterReassignment(name="t", index=0, replicas=(*target[turn:], *target[:turn])))

    def calm(self, _: int = 0, __: int = 0) -> None:
        """All goes well for a while: duties are done, disks are well, and followers catch up and join."""
        for node in NODES:
            self.declare_fit(node)
        for _ in range(20):
            found = duties_of(self.world.image)
            if not found:
                break
            self.do(found[0])
        for node in NODES:
            self.see(node)
        for node in NODES:
            self.catch_up(node)
        self.in_flight.clear()
        if self._leads(self.partition.leader):
            self.propose(self.partition.leader, 31)
        self.deliver(0)
        for node in NODES:
            self.see(node)

    def elect_uncleanly(self, leader: int, _: int = 0) -> None:
        """An operator gives up what the others have."""
        if any(self._leads(node) for node in NODES) or not self.world.image.live(leader):
            return
        if leader in self.failed:
            return
        command = ElectLeaders(name="t", partitions=(0,), election=Election.UNCLEAN, leader=leader)
        if self.world.do(command)[0] is ErrorCode.none:
            self.committed = self.data[leader]
            self.data = {node: min(count, self.committed) for node, count in self.data.items()}

    def cancel(self, _: int = 0, __: int = 0) -> None:
        self.do(AlterReassignment(name="t", index=0, replicas=None))

    def prefer(self, _: int = 0, __: int = 0) -> None:
        self.do(ElectLeaders(name="t", partitions=(0,)))

    def do(self, command: Any, resigning: int | None = None) -> bool:
        """Do a command, and check what it has changed. False if it was refused."""
        before, image = self.partition, self.world.image
        if isinstance(command, AdmitNode) and not image.nodes[command.node_id].clean:
            # A disk after an unclean stop is trusted only where there is nobody better.
            others = {*before.isr} - {command.node_id} - {*before.unfit}
            if command.node_id in self.in_doubt and any(image.live(node) for node in others):
                self._lose(command.node_id, UNCLEAN)
            self.in_doubt.discard(command.node_id)
        try:
            self.world.do(command)
        except ApiError:
            return False
        self._check_change(before, self.partition, resigning)
        self.check()
        return True

    def _check_change(self, before: PartitionImage, after: PartitionImage, resigning: int | None) -> None:
        assert after.leader_epoch - before.leader_epoch == (
            before.leader != after.leader or before.leader_epoch != after.leader_epoch
        )
        assert after.partition_epoch - before.partition_epoch == (after != before)
        if before.leader != after.leader and self.world.image.live(before.leader):
            assert before.leader == resigning, "leadership was taken from a node whose session lives"
        if after.leader not in (before.leader, -1):
            assert after.leader not in before.unfit, "a replica leads that has said that it is unfit"

    def check(self) -> None:
        partition, image = self.partition, self.world.image
        if image.live(partition.leader):
            node_epoch = image.node_epoch(partition.leader)
            known = self.led.setdefault(partition.leader_epoch, node_epoch)
            assert known == node_epoch, "another incarnation leads at the same epoch"
        assert partition.leader == -1 or partition.leader in partition.isr
        assert {*partition.isr, *partition.elr, *partition.unfit} <= {*partition.replicas}
        assert not {*partition.isr} & {*partition.elr}
        assert {*partition.adding, *partition.removing} <= {*partition.replicas}
        for node in (*partition.isr, *partition.elr):
            is_admitted = image.admitted.get(node) == image.nodes[node].incarnation
            if is_admitted and self.data[node] < self.committed:
                what = "leads" if node == partition.leader else "is in sync"
                if node in partition.elr:
                    what = "is eligible"
                raise LostRecords(
                    f"{what} despite: {self.lost_by.get(node, BEHIND)}; node {node} has {self.data[node]}"
                    f" of {self.committed}: {partition}"
                )

    def check_at_rest(self) -> None:
        """After all duties: whoever runs is live, and the partition is led if it can be."""
        for _ in range(100):
            found = duties_of(self.world.image)
            if not found:
                break
            self.do(found[0])
        else:
            raise AssertionError("the duties have no end")
        partition, image = self.partition, self.world.image
        assert image.live_nodes == {*image.alive}
        if partition.leader == -1:
            could = {*partition.isr, *partition.elr} - {*partition.unfit}
            assert not could & image.live_nodes
        else:
            assert image.live_nodes >= {*partition.isr}


ACTIONS: tuple[Callable[[Model, int, int], None], ...] = (
    *[Model.calm] * 5,
    Model.elect_uncleanly,
    *[Model.see] * 4,
    *[Model.catch_up] * 3,
    *[Model.commit] * 10,
    *[Model.duty] * 6,
    *[Model.start] * 10,
    *[Model.propose] * 2,
    *[Model.deliver] * 3,
    *[Model.crash] * 2,
    *[Model.stop_cleanly] * 2,
    *[Model.expire] * 3,
    Model.resign,
    *[Model.declare_unfit] * 2,
    Model.declare_fit,
    *[Model.configure] * 2,
    Model.move,
    Model.cancel,
    Model.prefer,
)
STEPS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(1, 4), st.integers(0, 31)), min_size=20, max_size=150
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whoever_may_be_elected_has_every_committed_record(steps: Any) -> None:
    model = Model()
    for action, node, choice in steps:
        action(model, node, choice)
        model.check()
    model.check_at_rest()


def walk(seed: int, steps: int = 400) -> None:
    chance = random.Random(seed)
    model = Model()
    for _ in range(steps):
        chance.choice(ACTIONS)(model, chance.randint(1, 4), chance.randint(0, 31))
        model.check()
    model.check_at_rest()


def test_long_walks_lose_nothing() -> None:
    """The walks that each ablation below is looked for with: it is not the model that loses records."""
    for seed in SEEDS:
        walk(seed)


def is_found_by_walking(how: str) -> bool:
    """Whether one of the walks goes wrong in this way."""
    for seed in SEEDS:
        try:
            walk(seed)
        except AssertionError as error:
            if str(error).startswith(how):
                return True
    return False


def _admit_at_once(*, leaders: bool, image: Any, busy: Any) -> list[AdmitNode]:
    """Admit those that lead, or those that do not, before they have left anything; others as it must be."""
    led = {each.leader for topic in image.topics.values() for each in topic.partitions}
    at_once = [
        AdmitNode(node_id=node.id, incarnation=node.incarnation)
        for node in duties_module.not_admitted(image)
        if image.alive.get(node.id) == node.incarnation and (node.id in led) is leaders
    ]
    return at_once or _admissions(image, busy)


_admissions = duties_module._admissions


def _admit_followers_at_once(image: Any, busy: Any) -> list[AdmitNode]:
    return _admit_at_once(leaders=False, image=image, busy=busy)


def _admit_leaders_at_once(image: Any, busy: Any) -> list[AdmitNode]:
    return _admit_at_once(leaders=True, image=image, busy=busy)


def _keep_elr(partition: PartitionImage, isr: Any, **options: Any) -> PartitionImage:
    changed = _with_in_sync(partition, isr, **options)
    kept = {*changed.elr, *partition.elr} - {*changed.isr} - options.get("forfeits", frozenset())
    return replace(changed, elr=insync.in_order(changed, kept))


def _everybody_to_elr(partition: PartitionImage, isr: Any, **options: Any) -> PartitionImage:
    """Whoever leaves is taken to have everything still, also at or above the minimum.

    As it should, a change that adds a member and reaches the minimum empties elr.
    """
    changed = _with_in_sync(partition, isr, **options)
    if {*changed.isr} - {*partition.isr}:
        return changed
    left = {*partition.isr, *partition.elr} - {*changed.isr} - options.get("forfeits", frozenset())
    return replace(changed, elr=insync.in_order(changed, left))


def _keep_the_failed(partition: PartitionImage, isr: Any, **options: Any) -> PartitionImage:
    """In place of ``with_in_sync`` for declarations of unfit replicas: nobody forfeits anything."""
    return _with_in_sync(partition, isr)


_with_in_sync = insync.with_in_sync


def _elect_anybody(partition: PartitionImage, live: Any, *rest: Any, **options: Any) -> PartitionImage:
    chosen = insync.candidate(partition, partition.replicas, live)
    if chosen is None:
        return insync.elected(partition, live, *rest, **options)
    return insync.led_by(replace(partition, isr=(chosen,), elr=()), chosen)


def _forget_what_was_said(command: Any, image: Any) -> Any:
    pretended = dataclasses.replace(
        image, admitted={node: each.incarnation for node, each in image.nodes.items()}
    )
    return _registered(command, pretended)


_registered = node_planning._registered


#: What goes wrong, and what is patched for that.
ABLATIONS: dict[str, tuple[str, list[tuple[object, str, object]]]] = {
    "unclean nodes leave before they are admitted": (
        f"is in sync despite: {UNCLEAN}",
        [(duties_module, "_admissions", _admit_followers_at_once)],
    ),
    "a registration takes every leadership": (
        "another incarnation leads at the same epoch",
        [(duties_module, "_admissions", _admit_leaders_at_once)],
    ),
    "elr is emptied when the in-sync set is back at the minimum": (
        f"is eligible despite: {BEHIND}",
        [(duties_module, "with_in_sync", _keep_elr), (partition_planning, "with_in_sync", _keep_elr)],
    ),
    "only who leaves below the minimum goes to elr": (
        f"is eligible despite: {BEHIND}",
        [
            (duties_module, "with_in_sync", _everybody_to_elr),
            (partition_planning, "with_in_sync", _everybody_to_elr),
        ],
    ),
    "leaders come from isr and elr": (
        f"leads despite: {BEHIND}",
        [(duties_module, "elected", _elect_anybody), (partition_planning, "elected", _elect_anybody)],
    ),
    "lost replicas and new directories leave": (
        f"is in sync despite: {LOST}",
        [(duties_module.NodeView, "forfeits", lambda *_: frozenset())],
    ),
    "what a registration says stays said until it is admitted": (
        f"is in sync despite: {LOST}",
        [(node_planning, "_registered", _forget_what_was_said)],
    ),
    "replicas whose storage has failed leave": (
        f"is eligible despite: {FAILED}",
        [(partition_planning, "with_in_sync", _keep_the_failed)],
    ),
}


@pytest.mark.parametrize("safeguard", ABLATIONS)
def test_each_safeguard_is_needed(monkeypatch: pytest.MonkeyPatch, safeguard: str) -> None:
    how, patches = ABLATIONS[safeguard]
    for where, name, instead in patches:
        monkeypatch.setattr(where, name, instead)
    assert is_found_by_walking(how)
