"""Two replicas of one partition against two lists of batches.

One replica leads and appends, the other fetches chunks of any size. Leadership changes hands at a higher
epoch, also to a replica that lacks records, and the old leader cuts what the new one does not have: by the
histories of epochs alone, as replicas will. In between logs are flushed, rolled, compacted below the high
watermark and opened again in every way that loses nothing. After every step each log must hold the
batches of its list, and know the epochs, producers and transactions that a fold over that list gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.compacting import batches_of, clean, consume, flush, fold, keyed
from support.cutting import start_anew_at, truncate_to
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.log.log import PartitionLog
from tidemill.log.offline.inspect import verify
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.recovery import open_log
from tidemill.log.segments.index import IndexCache
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader, parse_header
from tidemill.records.control import Marker
from tidemill.records.record import Record, build_batch, read_records

DIRECTORY = "t-0"
PRODUCERS = 3

#: Keys, timestamp, producer (-1: none), and whether it is part of a transaction.
Sent = tuple[list[str], int, int, bool]
BATCHES = st.lists(
    st.tuples(
        st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
        st.integers(0, 100),
        st.integers(-1, PRODUCERS - 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@dataclass
class Replica:
    """A log, and the list that it must agree with."""

    config: TopicConfig
    storage: FaultyStorage = field(default_factory=lambda: FaultyStorage(random.Random(0)))
    #: Header and bytes of every batch, as its leader stamped them.
    batches: list[tuple[BatchHeader, bytes]] = field(default_factory=list)
    #: Compaction was at work in this log, or in the one that it was fetched from.
    thinned: bool = False
    #: The high watermark that the log was told last, or that it found at its start.
    noted: int | None = None
    log: PartitionLog = field(init=False)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.log, report = open_log(self.storage, DIRECTORY, self.config, IndexCache(max_bytes=1))
        assert not report.cuts
        found = self.log.high_watermark_checkpoint
        assert found is None or (self.noted is not None and found <= self.noted)
        self.noted = found

    def note_high_watermark(self, offset: int) -> None:
        self.log.note_high_watermark(offset)
        self.noted = offset

    @property
    def end_offset(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else 0

    def epochs(self) -> list[tuple[int, int]]:
        entries: list[tuple[int, int]] = []
        for header, _ in self.batches:
            if not entries or entries[-1][0] < header.leader_epoch:
                entries.append((header.leader_epoch, header.base_offset))
        return entries

    def folded(self) -> ProducerStates:
        states = ProducerStates()
        for header, data in self.batches:

            def read_batch(data: bytes = data) -> bytes:
                return data

            states.replay(header, read_batch, 0)
        return states

    def note_appended(self, base_offset: int) -> None:
        """Take what the leader has just appended into the list."""
        data = b"".join(self.log.read_batches(base_offset, self.log.end_offset))
        self.batches.extend(batches_of(data))


def records_of(batches: list[tuple[BatchHeader, bytes]]) -> Iterator[tuple[int, Record]]:
    return ((record.offset, record) for _, data in batches for record in read_records(data))


def producers_of(states: ProducerStates) -> dict[int, Any]:
    """Everything but the time of the last append, which is the node's own."""
    return {
        producer_id: (entry.epoch, entry.last_sequence, entry.coordinator_epoch, list(entry.batches))
        for producer_id, entry in states
    }


class ReplicaModel(RuleBasedStateMachine):
    """``leader`` and ``follower`` are numbers of replicas."""

    @initialize(segment_bytes=st.sampled_from((400, 900, 3000)), interval=st.sampled_from((1, 150, 4096)))
    def begin(self, segment_bytes: int, interval: int) -> None:
        config = TopicConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            cleanup_policy=frozenset({"compact"}),
            min_cleanable_dirty_ratio=0.0,
        )
        self.replicas = [Replica(config), Replica(config)]
        self.leader, self.epoch, self.now_ms = 0, 0, 1000
        self.epochs_of_producers = [0] * PRODUCERS
        self.committed = 0
        self.matched = True
        self.append([(["a", "b"], 5, 0, True), (["c"], 9, 1, False)])

    @property
    def leading(self) -> Replica:
        return self.replicas[self.leader]

    @property
    def following(self) -> Replica:
        return self.replicas[1 - self.leader]

    # --- the leader

    @rule(batches=BATCHES)
    def append(self, batches: list[Sent]) -> None:
        for keys, timestamp, producer, transactional in batches:
            end = self.leading.end_offset
            records = [keyed(key, f"{end}-{number}", timestamp) for number, key in enumerate(keys)]
            self.now_ms += 1
            self._append(records, producer, transactional and producer >= 0)

    def _append(self, records: list[Record], producer: int, transactional: bool) -> None:
        log, epoch, sequence = self.leading.log, -1, -1
        if producer >= 0:
            epoch = self.epochs_of_producers[producer]
            entry = log.producers.get(producer)
            if entry is not None and entry.epoch > epoch:
                epoch = self.epochs_of_producers[producer] = entry.epoch
            sequence = entry.last_sequence + 1 if entry is not None and entry.epoch == epoch else 0
            transactional = transactional or producer in log.producers.transactions.open
        data = build_batch(
            records,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=0x10 if transactional else 0,
        )
        appended = log.append(data, parse_header(data), self.epoch, self.now_ms)
        assert not appended.duplicate
        self.leading.note_appended(appended.base_offset)

    @rule(producer=st.integers(0, PRODUCERS - 1), commit=st.booleans(), bump=st.booleans())
    def end_transaction(self, producer: int, commit: bool, bump: bool) -> None:
        log = self.leading.log
        if producer not in log.producers.transactions.open:
            return
        entry = log.producers.get(producer)
        assert entry is not None
        epoch = entry.epoch + bump
        self.epochs_of_producers[producer] = epoch
        ends = [(producer, epoch, Marker(commit, self.epoch))]
        self.leading.note_appended(log.append_markers(ends, self.epoch, self.now_ms).base_offset)

    # --- the follower

    @precondition(lambda self: self.matched)
    @rule(sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=8))
    def replicate(self, sizes: list[int]) -> None:
        leader, follower = self.leading, self.following
        for max_bytes in sizes:
            chunk = leader.log.read(follower.log.end_offset, max_bytes, leader.log.end_offset)
            before = follower.end_offset
            appended = follower.log.append_as_follower(chunk, self.epoch, self.now_ms)
            assert (appended is None) == (not chunk)
            if appended is not None:
                follower.batches += [
                    batch
                    for batch in leader.batches
                    if before <= batch[0].base_offset <= appended.last_offset
                ]
                follower.thinned = follower.thinned or leader.thinned

    @precondition(lambda self: self.matched)
    @rule(catch_up=st.booleans())
    def commit(self, catch_up: bool) -> None:
        """Both replicas flush: what both have is committed."""
        if catch_up:
            self.replicate([100_000])
        for replica in self.replicas:
            flush(replica.log)
        self.committed = max(self.committed, min(replica.log.durable_offset for replica in self.replicas))
        for replica in self.replicas:
            replica.note_high_watermark(self.committed)

    # --- leadership

    @precondition(lambda self: self.following.end_offset >= self.committed)
    @rule(batches=BATCHES)
    def fail_over(self, batches: list[Sent]) -> None:
        """The other one leads, at a new epoch, also if it has not cut yet what it alone has."""
        self.leader = 1 - self.leader
        self.epoch += 1
        self.matched = False
        self.append(batches)

    @precondition(lambda self: not self.matched)
    @rule()
    def truncate(self) -> None:
        """Cut where the histories part: the leader says where an epoch ended, until it is one of both."""
        leader, log = self.leading.log, self.following.log
        self.matched = not log.epochs.entries
        while not self.matched:
            latest = log.epochs.latest_epoch
            epoch, end = leader.epochs.end_offset_for(latest, leader.end_offset)
            self.matched, before = epoch == latest, log.end_offset
            self._cut(end if self.matched else log.epochs.end_offset_for(epoch, log.end_offset)[1])
            assert self.matched or log.end_offset < before
            self.matched = self.matched or not log.epochs.entries

    def _cut(self, offset: int) -> None:
        follower = self.following
        assert offset >= self.committed, "what is committed is never cut"
        kept = [batch for batch in follower.batches if batch[0].last_offset < offset]
        cuts = truncate_to(follower.log, offset, self.now_ms)
        assert bool(cuts) == (len(kept) < len(follower.batches))
        follower.batches = kept
        assert follower.log.high_watermark_checkpoint == follower.noted, "what is committed was not cut"
        assert [name for name in follower.storage.list_dir(DIRECTORY) if ".cut-" in name] or not cuts

    @precondition(lambda self: self.matched and not self.committed)
    @rule()
    def follow_from_nothing(self) -> None:
        start_anew_at(self.following.log, 0, self.now_ms)
        self.following.batches, self.following.thinned = [], False

    # --- every replica

    @rule(number=st.integers(0, 1))
    def flush(self, number: int) -> None:
        flush(self.replicas[number].log)

    @rule(number=st.integers(0, 1))
    def roll(self, number: int) -> None:
        if self.replicas[number].log.segments:
            self.replicas[number].log.roll()

    @rule(number=st.integers(0, 1), in_order=st.booleans())
    def restart(self, number: int, in_order: bool) -> None:
        replica = self.replicas[number]
        noted, is_written = replica.noted, bool(replica.log.segments)
        if in_order:
            replica.log.close()
        else:
            replica.storage = replica.storage.crash(power_loss=False)
        replica.open()
        assert not in_order or not is_written or replica.noted == noted

    @rule(number=st.integers(0, 1))
    def compact(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.log.segments:
            replica.log.roll()
        flush(replica.log)
        if clean(replica.log, self.now_ms, high_watermark=min(self.committed, replica.log.durable_offset)):
            replica.thinned = True

    # --- what must hold

    @invariant()
    def logs_agree_with_their_lists(self) -> None:
        for replica in getattr(self, "replicas", ()):
            log, folded = replica.log, replica.folded()
            assert log.end_offset == replica.end_offset
            assert log.high_watermark_checkpoint == replica.noted
            assert replica.noted is None or replica.noted <= log.end_offset
            assert list(log.epochs.entries) == replica.epochs()
            assert producers_of(log.producers) == producers_of(folded)
            assert log.producers.transactions.open == folded.transactions.open
            assert log.last_stable_offset(log.end_offset) == folded.transactions.last_stable_offset(
                replica.end_offset
            )
            stored = list(batches_of(b"".join(log.read_batches(0, log.end_offset))))
            if not replica.thinned:
                assert stored == replica.batches
                assert log.producers.transactions.aborted_between(0, 2**62) == (
                    folded.transactions.aborted_between(0, 2**62)
                )
            expected = {
                record.offset: record for _, batch in replica.batches for record in read_records(batch)
            }
            for _, batch in stored:
                for record in read_records(batch):
                    assert record == expected[record.offset]
            for segment in log.segments:
                headers = [header for header, _ in stored if segment.base_offset <= header.base_offset]
                headers = [header for header in headers if header.base_offset < segment.next_offset]
                largest = max((header.max_timestamp for header in headers), default=NO_TIMESTAMP)
                assert segment.max_timestamp == largest

    def teardown(self) -> None:
        for replica in getattr(self, "replicas", ()):
            flush(replica.log)
            folded = fold(consume(replica.log, committed=True))
            replica.log.close()
            assert not verify(replica.storage, DIRECTORY).problems
            whole = Replica(TopicConfig())
            for header, data in replica.batches:
                whole.log.append_as_follower(data, header.leader_epoch, 0)
            flush(whole.log)
            assert folded == fold(consume(whole.log, committed=True))


TestReplicaModel = ReplicaModel.TestCase
TestReplicaModel.settings = settings(settings(), max_examples=50, stateful_step_count=40)
