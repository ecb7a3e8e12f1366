"""Random histories of one group against a model that only knows what each client was told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.consumer_groups import FakeTopics
from support.group_invariants import check_groups
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.classic.group import ClassicGroup, GroupState
from tidemill.groups.messages import (
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    OffsetCommitRequest,
    OffsetToCommit,
    Reply,
    SyncReply,
    SyncRequest,
)
from tidemill.groups.records import GroupRecord, decode_record, encode_record
from tidemill.groups.settings import GroupSettings
from tidemill.groups.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Sequence


SETTINGS = GroupSettings(
    max_size=4, initial_rebalance_delay_ms=500, new_member_join_timeout_ms=4_000, min_session_timeout_ms=1_000
)
PROTOCOLS = {
    "plain": (JoinProtocol("range", b"1"), JoinProtocol("sticky", b"1")),
    "swapped": (JoinProtocol("sticky", b"1"), JoinProtocol("range", b"1")),
    "other": (JoinProtocol("range", b"2"),),
    "topics": (JoinProtocol("range", bytes.fromhex("0000 00000001 0001 74 ffffffff")),),
}


class GroupHistories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[bytes, bytes | None]] = []
        self.disk_full = False
        self.state = ShardState(SETTINGS, self.append, FakeTopics())
        self.now_ms = 1_000
        self.counter = 0
        self.open_tokens: dict[str, tuple[str, str, str | None]] = {}
        self.known_ids: dict[str, str | None] = {}
        self.generation_of: dict[str, int] = {}
        self.leader_of: dict[int, str] = {}
        self.assigned: dict[int, dict[str, bytes]] = {}
        self.synced: dict[str, tuple[int, bytes]] = {}
        self.committed: dict[tuple[str, int], int] = {}

    # -- the world around the group --------------------------------------------------------------------

    def append(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        assert producer is None, "no rule commits offsets in a transaction"
        if self.disk_full:
            raise DiskFull("no room")
        self.log += [encode_record(record) for record in records]

    def token(self, kind: str, member_id: str, instance_id: str | None) -> str:
        self.counter += 1
        name = f"{kind}-{self.counter}"
        self.open_tokens[name] = (kind, member_id, instance_id)
        return name

    def take(self, replies: tuple[Reply, ...]) -> None:
        for reply in replies:
            kind, member_id, instance_id = self.open_tokens.pop(str(reply.token))
            if isinstance(reply.body, JoinReply):
                assert kind == "join"
                self.on_join_reply(reply.body, instance_id)
            else:
                assert kind == "sync"
                self.on_sync_reply(reply.body, member_id)

    def on_join_reply(self, reply: JoinReply, instance_id: str | None) -> None:
        if reply.error is ErrorCode.member_id_required:
            self.known_ids[reply.member_id] = None
        if reply.error is not ErrorCode.none:
            return
        self.known_ids[reply.member_id] = instance_id
        assert reply.generation >= self.generation_of.get(reply.member_id, 0)
        self.generation_of[reply.member_id] = reply.generation
        if reply.leader == reply.member_id:
            self.leader_of[reply.generation] = reply.member_id
            assert reply.member_id in {member.member_id for member in reply.members}
            static = [member.instance_id for member in reply.members if member.instance_id is not None]
            assert len(static) == len(set(static))
        else:
            assert reply.members == ()

    def on_sync_reply(self, reply: SyncReply, member_id: str) -> None:
        if reply.error is ErrorCode.none:
            group = self.group
            assert group is not None
            assert self.generation_of[member_id] == group.generation
            self.synced[member_id] = (group.generation, reply.assignment)

    def attempt(self, act: Any) -> Any:
        """Run a handler; with a full disk it happens not at all or without needing the disk."""
        before = self.snapshot()
        tokens = dict(self.open_tokens)
        try:
            return act()
        except DiskFull:
            assert self.snapshot() == before
            self.open_tokens = tokens
            return None

    @property
    def group(self) -> ClassicGroup | None:
        group = self.state.groups.get("g")
        assert group is None or isinstance(group, ClassicGroup)
        return group

    def snapshot(self) -> Any:
        group = self.group
        view = (
            None if group is None else (group.describe(), group.generation, group._joining, group._deadlines)
        )
        return repr(view), list(self.state.offsets.of("g")), len(self.log)

    # -- what clients do -------------------------------------------------------------------------------

    @initialize(instances=st.lists(st.sampled_from([None, "s1", "s2", "s3"]), max_size=4))
    def some_members_form_a_group(self, instances: list[str | None]) -> None:
        for instance in instances:
            protocols = PROTOCOLS["plain"]
            self.send_join(JoinRequest("g", "", "consumer", protocols, 6_000, 4_000, instance, version=3))
        self.time_passes(2_000)

    @rule(
        version=st.sampled_from([3, 4, 8, 9]),
        instance=st.sampled_from([None, None, "s1", "s2"]),
        protocols=st.sampled_from(sorted(PROTOCOLS)),
        session_ms=st.sampled_from([3_000, 6_000]),
        rebalance_ms=st.sampled_from([2_000, 4_000, -1, 0]),
        data=st.data(),
    )
    def join(
        self,
        version: int,
        instance: str | None,
        protocols: str,
        session_ms: int,
        rebalance_ms: int,
        data: Any,
    ) -> None:
        member_id = data.draw(st.sampled_from(["", *sorted(self.known_ids)[-4:], "nobody"]))
        if member_id in self.known_ids:
            instance = data.draw(st.sampled_from([self.known_ids[member_id], instance]))
        request = JoinRequest(
            "g",
            member_id,
            "consumer",
            PROTOCOLS[protocols],
            session_ms,
            rebalance_ms,
            instance,
            version=version,
        )

        self.send_join(request)

    def send_join(self, request: JoinRequest) -> None:
        def act() -> None:
            token = self.token("join", request.member_id, request.instance_id)
            self.take(self.state.join(request, token, f"id{self.counter}", self.now_ms))

        self.attempt(act)

    def group_in(self, *states: GroupState) -> ClassicGroup | None:
        group = self.group
        return group if group is not None and group.state in states else None

    @precondition(lambda self: self.group_in(GroupState.PREPARING_REBALANCE, GroupState.EMPTY))
    @rule(data=st.data())
    def everybody_joins_again(self, data: Any) -> None:
        """What well-behaved clients do in a rebalance, and how the initial delay ends."""
        group = self.group
        assert group is not None
        absent = [m for m in group._roster.members if m.member_id not in group._joining]
        for member in data.draw(st.permutations(absent)):
            if member.member_id in group._roster:
                self.send_join(
                    JoinRequest(
                        "g", member.member_id, "consumer", member.protocols, 6_000, 4_000, member.instance_id
                    )
                )
        for member_id in sorted(group._pending_join):
            self.send_join(JoinRequest("g", member_id, "consumer", PROTOCOLS["plain"], 6_000, 4_000))
        self.time_passes(500)

    @precondition(lambda self: self.group_in(GroupState.COMPLETING_REBALANCE))
    @rule(data=st.data())
    def everybody_syncs(self, data: Any) -> None:
        group = self.group
        assert group is not None
        for member in data.draw(st.permutations(group._roster.members)):
            if member.member_id in self.generation_of:
                self.send_sync(member.member_id, self.generation_of[member.member_id])

    @precondition(lambda self: self.generation_of)
    @rule(data=st.data(), lag=st.sampled_from([0, 0, 0, 1]))
    def sync(self, data: Any, lag: int) -> None:
        member_id = data.draw(st.sampled_from(sorted(self.generation_of)))
        self.send_sync(member_id, self.generation_of[member_id] - lag)

    def send_sync(self, member_id: str, generation: int) -> None:
        group = self.state.groups.get("g")
        assignments = {each: f"{each}@{generation}@{self.counter}".encode() for each in self.generation_of}
        request = SyncRequest("g", member_id, generation, assignments, self.known_ids.get(member_id))
        decides = group is not None and group.state is GroupState.COMPLETING_REBALANCE

        def act() -> None:
            token = self.token("sync", member_id, None)
            replies = self.state.sync(request, token, self.now_ms)
            if decides and group is not None and group.state is GroupState.STABLE:
                assert generation not in self.assigned, "a generation is assigned twice"
                assert member_id == group._roster.leader
                self.assigned[generation] = assignments
            self.take(replies)

        self.attempt(act)

    @precondition(lambda self: self.generation_of)
    @rule(data=st.data())
    def heartbeat(self, data: Any) -> None:
        member_id = data.draw(st.sampled_from(sorted(self.generation_of)))
        generation = self.generation_of[member_id]
        error = self.state.heartbeat(HeartbeatRequest("g", member_id, generation), self.now_ms)
        group = self.group
        if error is ErrorCode.none:
            assert group is not None
            assert generation == group.generation
            assert group.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE)

    @precondition(lambda self: self.known_ids)
    @rule(data=st.data(), by_instance=st.booleans())
    def leave(self, data: Any, by_instance: bool) -> None:
        members = data.draw(st.lists(st.sampled_from(sorted(self.known_ids)), min_size=1, max_size=3))
        leaving = [
            LeavingMember("" if by_instance and self.known_ids[each] else each, self.known_ids[each])
            for each in members
        ]
        self.attempt(lambda: self.take(self.state.leave("g", leaving, self.now_ms)[1]))

    @rule(data=st.data(), partition=st.integers(0, 2), offset=st.integers(0, 100))
    def commit(self, data: Any, partition: int, offset: int) -> None:
        member_id = data.draw(st.sampled_from(["", *sorted(self.generation_of)]))
        generation = self.generation_of.get(member_id, -1)
        request = OffsetCommitRequest("g", [OffsetToCommit("t", partition, offset)], generation, member_id)
        results = self.attempt(lambda: self.state.commit_offsets(request, self.now_ms))
        if results == {("t", partition): ErrorCode.none}:
            self.committed["t", partition] = offset

    @rule(duration_ms=st.sampled_from([100, 600, 2_500, 7_000]))
    def time_passes(self, duration_ms: int) -> None:
        end_ms = self.now_ms + duration_ms
        for _ in range(1_000):
            group = self.state.groups.get("g")
            deadline_ms = None if group is None else group.next_deadline_ms()
            if deadline_ms is None or deadline_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            if self.disk_full:
                self.attempt(lambda: self.take(self.state.tick("g", self.now_ms)))
                self.now_ms += 100
                if self.now_ms >= end_ms:
                    break
            else:
                self.take(self.state.tick("g", self.now_ms))
        else:
            raise AssertionError("time does not pass")
        self.now_ms = max(self.now_ms, end_ms)

    @rule(really=st.sampled_from([False, False, False, True]))
    def group_is_deleted(self, really: bool) -> None:
        if really and self.attempt(lambda: self.state.delete_group("g", self.now_ms)) is ErrorCode.none:
            self.committed.clear()
            self.forget_generations()

    @rule(full=st.sampled_from([False, False, True]))
    def disk_fills_or_empties(self, full: bool) -> None:
        self.disk_full = full

    @precondition(lambda self: self.log)
    @rule(really=st.sampled_from([False, True]))
    def node_restarts(self, really: bool) -> None:
        if not really:
            return
        self.state = self.replayed()
        list(self.state.start(self.now_ms))
        self.open_tokens.clear()
        self.forget_generations()

    def forget_generations(self) -> None:
        """Generations that were not persisted are counted again, so what was said of them no longer binds."""
        group = self.group
        reached = 0 if group is None else group.generation
        self.generation_of = {m: g for m, g in self.generation_of.items() if g <= reached}
        for told in (self.leader_of, self.assigned):
            for generation in [each for each in told if each > reached]:
                del told[generation]
        self.synced = {m: (g, part) for m, (g, part) in self.synced.items() if g <= reached}

    # -- what must hold --------------------------------------------------------------------------------

    def replayed(self) -> ShardState:
        state = ShardState(SETTINGS, self.append, FakeTopics())
        for key, value in self.log:
            record = decode_record(key, value)
            assert record is not None
            state.replay(record, self.now_ms)
        return state

    @invariant()
    def state_is_valid(self) -> None:
        check_groups(self.state)

    @invariant()
    def every_open_request_is_one_the_group_waits_for(self) -> None:
        group = self.group
        waiting = set() if group is None else {*group._joining.values(), *group._syncing.values()}
        assert waiting == set(self.open_tokens)

    @invariant()
    def every_member_got_what_the_leader_gave_it(self) -> None:
        for member_id, (generation, assignment) in self.synced.items():
            if generation in self.assigned and member_id in self.assigned[generation]:
                assert assignment == self.assigned[generation][member_id]

    @invariant()
    def offsets_are_those_committed(self) -> None:
        held = {(topic, partition): commit.offset for topic, partition, commit in self.state.offsets.of("g")}
        assert held == self.committed

    @invariant()
    def the_log_tells_the_same(self) -> None:
        replayed = self.replayed()
        assert replayed.groups.keys() == self.state.groups.keys()
        assert list(replayed.offsets.of("g")) == list(self.state.offsets.of("g"))
        group = self.group
        if group is not None and group.state in (GroupState.STABLE, GroupState.EMPTY):
            again = replayed.groups["g"]
            assert isinstance(again, ClassicGroup)
            assert again.describe() == group.describe()
            assert (again.generation, again.subscribed_topics) == (group.generation, group.subscribed_topics)
            if group.protocol_type is not None:
                assert again.state_since_ms == group.state_since_ms


TestGroupHistories = pytest.mark.filterwarnings("default")(GroupHistories.TestCase)
TestGroupHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_model_notices_an_assignment_that_is_mixed_up() -> None:
    machine = GroupHistories()
    machine.assigned[1] = {"a": b"mine"}
    machine.synced["a"] = (1, b"yours")
    with pytest.raises(AssertionError):
        machine.every_member_got_what_the_leader_gave_it()


def test_a_full_disk_leaves_every_event_undone() -> None:
    machine = GroupHistories()
    machine.disk_full = True
    request = JoinRequest("g", "", "consumer", PROTOCOLS["plain"], 3_000, 1_000, version=3)
    machine.attempt(lambda: machine.state.join(replace(request), machine.token("join", "", None), "x", 1))
    assert machine.state.groups == {}
    assert machine.open_tokens == {}
