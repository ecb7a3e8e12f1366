"""A follower's log under crashes: while it appends what it fetched, and while it cuts its end.

A follower has the log of an old leader. A new one has parted from it somewhere, so the follower cuts its end
there and fetches the rest. The power goes, or the process is killed, in every storage call of the cut in
turn, and in random calls of the appends. A start must find the old log or the cut one, and nothing in
between; what is on the follower's disk behind the cut must be the new leader's; epochs, producers and
transactions must be those of the batches that are there; the high watermark that it finds lies in the log.
Each safeguard is switched off once, and then some
story must break.

Replay a seed with ``Story(seed).run()``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence

import pytest

from support.compacting import batches_of
from support.cutting import truncate_to
from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, StorageError
from tidemill.log import fetched_chunk, truncation
from tidemill.log.epochs import EpochHistory
from tidemill.log.flush import FlushJob
from tidemill.log.log import PartitionLog
from tidemill.log.notes.checkpoint import CheckpointFile
from tidemill.log.offline.inspect import verify
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.recovery import open_log
from tidemill.log.segments.torn import Cut
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.control import Marker
from tidemill.records.record import Record, build_batch

PARTITION = "t-0"
SEEDS = 200
SEEDS_PER_TEST = 10
#: No cut needs more storage calls.
CALLS_MAX = 200

Batches = list[tuple[BatchHeader, bytes]]


class Broken(AssertionError):
    """A story came out wrong."""


def insist(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


class Leader:
    """Makes batches as a leader would, on a disk without faults."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.log, _ = open_log(FaultyStorage(), PARTITION, TopicConfig())

    def write(self, epoch: int, count: int) -> None:
        for _ in range(count):
            producer, log = self.rng.randrange(-1, 3), self.log
            if producer in log.producers.transactions.open and self.rng.random() < 0.4:
                marker = Marker(self.rng.random() < 0.5, epoch)
                log.append_markers([(producer, 0, marker)], epoch, 1)
                continue
            entry = log.producers.get(producer)
            is_open = producer in log.producers.transactions.open
            data = build_batch(
                [Record(None, self.rng.randbytes(self.rng.randrange(40)), self.rng.randrange(100))],
                producer_id=producer,
                producer_epoch=0 if producer >= 0 else -1,
                base_sequence=-1 if producer < 0 else 0 if entry is None else entry.last_sequence + 1,
                attributes=0x10 if producer >= 0 and (is_open or self.rng.random() < 0.5) else 0,
            )
            log.append(data, parse_header(data), epoch, 1)

    def follow(self, batches: Batches) -> None:
        for header, data in batches:
            self.log.append_as_follower(data, header.leader_epoch, 1)

    @property
    def batches(self) -> Batches:
        return list(batches_of(b"".join(self.log.read_batches(0, self.log.end_offset))))


class Story:
    """One follower, an old leader's batches, and a new leader's."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        first = Leader(rng)
        first.write(0, rng.randrange(2, 8))
        first.write(1, rng.randrange(1, 8))
        common = first.batches
        # The old leader's tail has several epochs; the new one may have written more of epoch 1 before.
        first.write(2, rng.randrange(1, 8))
        first.write(3, rng.randrange(1, 6))
        second = Leader(rng)
        second.follow(common)
        second.write(1, rng.randrange(6))
        second.write(4, rng.randrange(1, 8))
        self.old, self.new, self.common = first.batches, second.batches, common
        self.parted_at = common[-1][0].next_offset
        self.config = TopicConfig(segment_bytes=rng.choice((200, 400, 900)), index_interval_bytes=100)
        self.storage = FaultyStorage(rng)
        self.log = self.open()

    def open(self) -> PartitionLog:
        try:
            return open_log(self.storage, PARTITION, self.config)[0]
        except StorageError as error:
            raise Broken(f"the log does not open: {error}") from error

    def restart(self, *, power_loss: bool) -> None:
        self.storage = self.storage.crash(power_loss=power_loss)
        self.log = self.open()

    # --- the parts of a story

    def run(self, cut_after: int | None = None, *, power_loss: bool = True) -> bool:
        """The whole story, the power going ``cut_after`` calls into the cut; False if it has fewer."""
        self.fetch(self.old)
        self.flush_beside_a_cut()
        cut_was_hit = self.truncate(cut_after, power_loss=power_loss)
        self.fetch_with_crashes()
        self.check(self.new, exact=True)
        self.log.close()
        insist(not verify(self.storage, PARTITION).problems, "the files do not check out")
        return cut_was_hit

    def fetch(self, batches: Batches) -> None:
        """Append what is missing, in chunks."""
        while missing := [batch for batch in batches if batch[0].base_offset >= self.log.end_offset]:
            taken = missing[: self.rng.randrange(1, 6)]
            job = self.log.begin_flush() if self.rng.random() < 0.4 else None
            self.log.append_as_follower(b"".join(data for _, data in taken), 4, 1)
            # This may be above what the flush makes durable.
            self.note_high_watermark()
            self.run_flush(job)

    def flush(self) -> None:
        self.run_flush(self.log.begin_flush())

    def run_flush(self, job: FlushJob | None) -> None:
        if job is not None:
            job.run()
            self.log.finish_flush(job)

    def note_high_watermark(self) -> None:
        """The leader says that more is committed; an unclean election may take that back."""
        noted = self.log.high_watermark_checkpoint or 0
        self.log.note_high_watermark(self.rng.randint(noted, max(noted, self.log.end_offset)))

    def flush_beside_a_cut(self) -> None:
        """Somebody wants to cut while a flush is under way; whether that is refused shows later."""
        job = self.log.begin_flush()
        with contextlib.suppress(StorageError):
            if job is not None:
                truncate_to(self.log, self.parted_at, 1)
        self.run_flush(job)

    def truncate(self, cut_after: int | None, *, power_loss: bool) -> bool:
        hit = False
        if cut_after is not None:
            self.storage.cut_power_after(cut_after)
        try:
            truncate_to(self.log, self.parted_at, 1)
            self.storage.cut_power_after(CALLS_MAX * 100)
        except PowerCut:
            hit = True
            self.restart(power_loss=power_loss)
            self.check_old_or_cut()
            truncate_to(self.log, self.parted_at, 1)
        self.check(self.common, exact=True)
        self.check_kept()
        return hit

    def fetch_with_crashes(self) -> None:
        """Fetch from the new leader while power goes and processes die; what was flushed must stay."""
        durable = self.log.durable_offset
        for _ in range(6):
            self.storage.cut_power_after(self.rng.randrange(40))
            try:
                self.fetch(self.new)
                self.flush()
            except PowerCut:
                durable = max(durable, self.log.durable_offset)
            self.restart(power_loss=self.rng.random() < 0.7)
            self.check(self.new, exact=False)
            insist(self.log.end_offset >= durable, "something durable is gone")
        self.fetch(self.new)
        self.flush()

    # --- what must hold

    @property
    def stored(self) -> Batches:
        return list(batches_of(b"".join(self.log.read_batches(0, self.log.end_offset))))

    def check_old_or_cut(self) -> None:
        stored = self.stored
        insist(stored in (self.old, self.common), "neither the old log nor the cut one")
        self.check(stored, exact=True)

    def check(self, batches: Batches, *, exact: bool) -> None:
        stored = self.stored
        insist(stored == batches[: len(stored)], "batches that are not the leader's")
        insist(not exact or len(stored) == len(batches), "batches are missing")
        states, epochs = ProducerStates(), EpochHistory()
        for header, data in stored:

            def read_batch(data: bytes = data) -> bytes:
                return data

            states.replay(header, read_batch, 1)
            epochs.assign(header.leader_epoch, header.base_offset)
        noted = self.log.high_watermark_checkpoint
        insist(noted is None or noted <= self.log.end_offset, "the high watermark is above the log end")
        insist(self.log.epochs.entries == epochs.entries, "another history of epochs")
        insist(_facts(self.log.producers) == _facts(states), "other producers or transactions")

    def check_kept(self) -> None:
        """The bytes of every batch that was cut are in the files beside."""
        names = [name for name in self.storage.list_dir(PARTITION) if ".cut-" in name]
        kept = [self.storage.read_file(f"{PARTITION}/{name}") for name in names]
        for _, data in self.old[len(self.common) :]:
            insist(any(data in content for content in kept), "cut bytes are gone")


def _facts(states: ProducerStates) -> object:
    entries = {
        producer_id: (entry.epoch, entry.last_sequence, entry.coordinator_epoch, list(entry.batches))
        for producer_id, entry in states
    }
    transactions = states.transactions
    return entries, transactions.open, transactions.aborted_between(0, 2**62)


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_a_crash_in_any_call_of_the_cut_leaves_the_old_log_or_the_cut_one(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        # Every call of one story would take long, so each seed looks at every tenth, from another one on.
        for call in range(seed % 10, CALLS_MAX, 10):
            if not Story(seed).run(call, power_loss=seed % 3 > 0):
                break
        else:
            pytest.fail("the cut has more calls than are tried")


def test_every_single_call_of_a_few_cuts() -> None:
    for seed in (1, 2, 3):
        for power_loss in (True, False):
            calls = 0
            while Story(seed).run(calls, power_loss=power_loss):
                calls += 1
            assert calls > 20


# --- ablations


def stories_break(seeds: int = 30, calls_max: int = 70) -> list[str]:
    """What goes wrong in some seeds; the power goes in every seventh of the cut's first calls."""
    broken = []
    for seed in range(seeds):
        for call in range(seed % 7, calls_max, 7) or (None,):
            try:
                if not Story(seed).run(call, power_loss=seed % 3 > 0):
                    break
            except (Broken, ApiError, StorageError) as error:
                broken.append(str(error))
    return broken


def _keep_nothing(storage: object, file: object, path: str, position: int, reason: str) -> Cut:
    return Cut(path, position, 0, "nowhere", reason)


def _nothing(*_: object) -> None:
    return


def _run_without_the_last_sync(job: truncation.TruncationJob) -> None:
    job._replay_producers()
    job.checkpoint.lower(job.offset)
    job._lower_derived()
    job._cut_first()
    job._put_following_aside()
    job._remove_snapshots()


def _cut_beside_flushes(log: PartitionLog) -> None:
    log._check_writable()
    log._cut_torn()


def _as_the_checkpoint_has_it(log: PartitionLog) -> int | None:
    return None if log._checkpoint is None else log._checkpoint.high_watermark


def _never_lower(log: PartitionLog, offset: int) -> None:
    log._high_watermark = max(offset, log._high_watermark or 0)
    if log._checkpoint is not None:
        log._checkpoint.high_watermark = log._high_watermark


@pytest.mark.parametrize(
    ("where", "name", "instead", "breaks"),
    [
        (CheckpointFile, "lower", _nothing, "does not open"),
        (truncation, "keep_tail", _keep_nothing, "cut bytes are gone"),
        (truncation.TruncationJob, "_replay_producers", _nothing, "other producers"),
        (truncation.TruncationJob, "_remove_snapshots", _nothing, "other producers"),
        # Batches are read with the epochs that the history has for them, so a wrong one shows there first.
        (truncation.TruncationJob, "_lower_derived", _nothing, "not the leader's"),
        (truncation.TruncationJob, "_cut_first", _nothing, "neither the old log nor the cut one"),
        (truncation.TruncationJob, "_put_following_aside", _nothing, "cut bytes are gone"),
        (PartitionLog, "_check_can_truncate", _cut_beside_flushes, "the file is closed"),
        (PartitionLog, "note_high_watermark", _never_lower, "above the log end"),
    ],
)
def test_ablation_each_step_of_the_cut_is_needed(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, instead: Callable[..., object], breaks: str
) -> None:
    monkeypatch.setattr(where, name, instead)
    assert [what for what in stories_break() if breaks in what]


#: Where no checksum looks: bytes of the base offset and of the leader epoch.
UNCHECKED = (0, 3, 7, 12, 13)
#: A byte of the timestamps, and the last one of the header.
CHECKED = (30, 60)


@pytest.mark.parametrize(
    ("where", "name", "instead", "breaks"),
    [
        (truncation.TruncationJob, "run", _run_without_the_last_sync, "not the leader's"),
        (PartitionLog, "_found_high_watermark", _as_the_checkpoint_has_it, "above the log end"),
    ],
)
def test_ablation_what_only_later_crashes_show_is_needed(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, instead: Callable[..., object], breaks: str
) -> None:
    monkeypatch.setattr(where, name, instead)
    assert [what for what in stories_break(seeds=400, calls_max=0) if breaks in what]


def damaged_chunk(seed: int, positions: Sequence[int] = UNCHECKED) -> tuple[Story, bytes, bytes]:
    """A chunk, and the same with a bit flipped at one of ``positions`` in a batch."""
    story = Story(seed)
    taken = story.old[:4]
    chunk = b"".join(data for _, data in taken)
    victim = story.rng.randrange(1, len(taken))
    position = sum(len(data) for _, data in taken[:victim])
    damaged = bytearray(chunk)
    damaged[position + story.rng.choice(positions)] ^= 1 << story.rng.randrange(8)
    return story, chunk, bytes(damaged)


@pytest.mark.parametrize("positions", [UNCHECKED, CHECKED])
@pytest.mark.parametrize("seed", range(50))
def test_a_damaged_chunk_is_refused_whole(seed: int, positions: Sequence[int]) -> None:
    story, chunk, damaged = damaged_chunk(seed, positions)
    with pytest.raises(ApiError):
        story.log.append_as_follower(damaged, 4, 1)
    assert story.log.end_offset == 0
    assert not story.storage.list_dir(PARTITION)
    story.log.append_as_follower(chunk, 4, 1)
    story.check(story.old[:4], exact=True)


@pytest.mark.parametrize(
    ("name", "instead", "positions"),
    [
        ("_check_epoch", _nothing, UNCHECKED[3:]),
        ("_check_offset", _nothing, UNCHECKED[:3]),
        ("check_crc", lambda *_: True, CHECKED),
    ],
)
def test_ablation_each_check_of_a_chunk_is_needed(
    monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[..., object], positions: Sequence[int]
) -> None:
    monkeypatch.setattr(fetched_chunk, name, instead)
    wrong = 0
    for seed in range(50):
        story, _, damaged = damaged_chunk(seed, positions)
        try:
            story.log.append_as_follower(damaged, 4, 1)
            story.check(story.old[:4], exact=True)
        except ApiError:
            continue
        except (Broken, StorageError):
            wrong += 1
    assert wrong
