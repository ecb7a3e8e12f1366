"""Random appends, flushes, transactions and elections: all waiters are answered once, nothing goes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.leadership import change_in_sync, follower_flushed, led
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, SyncFailed, TidemillError
from tidemill.log.flush import FlushJob
from tidemill.log.recovery import open_log
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.replication.rules.state import Role

NOW = 1_000_000
NODES = st.sets(st.integers(2, 3))
TRANSACTIONAL = 0x10


class Waiting:
    """Somebody who waits for an offset, and what came of it."""

    def __init__(self, offset: int, *, committed: bool) -> None:
        self.offset = offset
        self.committed = committed
        self.answers: list[TidemillError | None] = []


class Machine(RuleBasedStateMachine):
    """The test is the flusher, the metadata and the followers."""

    def __init__(self) -> None:
        super().__init__()
        log, _ = open_log(FaultyStorage(), "logs/t/0", TopicConfig())
        self.partition = Partition(
            "t",
            UUID(int=1),
            0,
            log,
            request_flush=lambda partition: None,
            max_decompressed_bytes=10**6,
            assignment=led(0),
        )
        self.leads, self.failed = True, False
        self.followers: set[int] = set()
        #: What each replica of this epoch has said, also one that has left the in-sync set.
        self.progress: dict[int, int] = {}
        self.job: FlushJob | None = None
        self.waiting: list[Waiting] = []
        self.open: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.seen = (0, 0)
        self.told: list[int] = []

    # --- what happens

    @rule(count=st.integers(1, 3))
    def append(self, count: int) -> None:
        batch = plain_batch(*map(str, range(count)))
        if self.leads and not self.failed:
            end = self.partition.log_end_offset
            assert self.partition.append(batch, NOW).base_offset == end
        else:
            self._refused(partial(self.partition.append, batch, NOW))

    def _refused(self, call: Callable[[], object]) -> None:
        end = self.partition.log_end_offset
        try:
            call()
        except SyncFailed:
            assert self.failed
        except ApiError as error:
            assert error.code == ErrorCode.not_leader_or_follower
            assert not self.leads
        else:
            raise AssertionError("it was taken")
        assert self.partition.log_end_offset == end

    @precondition(lambda self: self.leads and not self.failed)
    @rule(producer=st.integers(1, 2))
    def write_in_transaction(self, producer: int) -> None:
        self.partition.begin_transaction(producer, 0)
        sequence = self.sequences.get(producer, 0)
        batch = build_batch(
            [Record(b"k", b"v", timestamp_ms=NOW)],
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        offset = self.partition.append(batch, NOW).base_offset
        self.sequences[producer] = sequence + 1
        self.open.setdefault(producer, offset)

    @precondition(lambda self: self.leads and not self.failed and self.open)
    @rule(commit=st.booleans())
    def end_transaction(self, commit: bool) -> None:
        producer = min(self.open)
        del self.open[producer]
        self.partition.write_marker(producer, 0, commit=commit, coordinator_epoch=0, now_ms=NOW)

    @rule(ahead=st.integers(-3, 2), committed=st.booleans())
    def wait(self, ahead: int, committed: bool) -> None:
        waiting = Waiting(max(0, self.partition.log_end_offset + ahead), committed=committed)
        self.waiting.append(waiting)
        wait = self.partition.when_committed if committed else self.partition.when_durable
        wait(waiting.offset, partial(self._answered, waiting))

    def _answered(self, waiting: Waiting, error: TidemillError | None) -> None:
        waiting.answers.append(error)
        partition = self.partition
        reached = partition.high_watermark if waiting.committed else partition.local_log.durable_offset
        if error is None:
            assert reached >= waiting.offset

    @precondition(lambda self: self.job is None)
    @rule()
    def begin_flush(self) -> None:
        self.job = self.partition.begin_flush()

    @precondition(lambda self: self.job is not None)
    @rule()
    def end_flush(self) -> None:
        job, self.job = self.job, None
        assert job is not None
        job.run()
        self.partition.flushed(job)

    @precondition(lambda self: self.job is None)
    @rule()
    def flush(self) -> None:
        self.begin_flush()
        if self.job is not None:
            self.end_flush()

    @precondition(lambda self: not self.failed and len(self.waiting) > 12)
    @rule()
    def fail(self) -> None:
        self.failed = True
        self.partition.flush_failed(SyncFailed("on purpose"))

    @rule(node=st.integers(2, 3), behind=st.integers(0, 4))
    def report(self, node: int, behind: int) -> None:
        offset = max(0, self.partition.log_end_offset - behind)
        if node in self.progress:
            self.progress[node] = max(self.progress[node], offset)
        follower_flushed(self.partition, node, offset)

    @precondition(lambda self: self.leads and not self.failed)
    @rule(nodes=NODES)
    def change_in_sync(self, nodes: set[int]) -> None:
        self.followers = {*nodes}
        for node in nodes:
            self.progress.setdefault(node, 0)
        change_in_sync(self.partition, nodes)

    @rule(nodes=NODES)
    def lead(self, nodes: set[int]) -> None:
        self.leads, self.followers = True, set() if self.failed else {*nodes}
        self.progress = dict.fromkeys(self.followers, 0)
        self.partition.become_leader(led(self.partition.leader_epoch + 1, nodes))

    @precondition(lambda self: self.leads)
    @rule()
    def lose(self) -> None:
        self.partition.depend("shard", lambda: self.told.append(self.partition.leader_epoch))
        before = len(self.told)
        self.leads, self.followers, self.progress = False, set(), {}
        self.partition.become_follower(self.partition.leader_epoch + 1)
        assert self.told[before:] == [self.partition.leader_epoch], "told once"

    @rule(epochs=st.integers(0, 2))
    def hear_of_an_old_election(self, epochs: int) -> None:
        self.partition.become_follower(self.partition.leader_epoch - epochs)
        self.partition.become_leader(led(self.partition.leader_epoch - epochs))

    # --- what is always so

    @invariant()
    def offsets_are_in_order_and_do_not_go_back(self) -> None:
        partition = self.partition
        watermark, stable = partition.high_watermark, partition.last_stable_offset
        assert partition.log_start_offset <= stable <= watermark <= partition.log_end_offset
        assert watermark >= self.seen[0]
        assert stable >= self.seen[1]
        if watermark > self.seen[0]:
            reached = [self.progress[node] for node in self.followers]
            assert watermark <= min([partition.local_log.durable_offset, *reached])
        assert stable <= min([watermark, *self.open.values()])
        self.seen = watermark, stable

    @invariant()
    def the_role_is_what_was_told(self) -> None:
        expected = Role.OFFLINE if self.failed else Role.LEADER if self.leads else Role.FOLLOWER
        assert self.partition.role is expected

    @invariant()
    def nobody_is_answered_twice_or_forgotten(self) -> None:
        partition = self.partition
        for waiting in self.waiting:
            reached = partition.high_watermark if waiting.committed else partition.local_log.durable_offset
            assert len(waiting.answers) <= 1
            if not self.leads or self.failed or reached >= waiting.offset:
                assert waiting.answers, "it is known, and was not told"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150)
