"""A damaged log: verify names the damage, open_log refuses, repair makes it usable, the rest is readable."""

from __future__ import annotations

import random

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.errors import CorruptData, StorageError
from tidemill.log.log import PartitionLog
from tidemill.log.offline.inspect import Problem, ProblemKind, dump, verify
from tidemill.log.offline.repair import DamageTreatment, apply_repair, plan_repair
from tidemill.log.recovery import open_log
from tidemill.records.batch import parse_header
from tidemill.records.record import read_records

DIRECTORY = "t-0"
CONFIG = TopicConfig(segment_bytes=500, index_interval_bytes=150)
SKIP, TRUNCATE = DamageTreatment.SKIP, DamageTreatment.TRUNCATE


def filled(batches: int = 20, *, close: bool = False) -> FaultyStorage:
    """A log of ``batches`` batches of two records each, over several segments, all durable."""
    storage = FaultyStorage(random.Random(1))
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    for number in range(batches):
        values = (f"v{2 * number}", f"v{2 * number + 1}")
        data, header = make_batch(*values, timestamp_ms=number + 1, producer=(7, 0, 2 * number))
        log.append(data, header, number // 8, 1000 + number)
    flush(log)
    if close:
        log.close()
        return storage
    log.abandon()
    return storage.crash(power_loss=False)


def flush(log: PartitionLog) -> None:
    job = log.begin_flush()
    assert job is not None
    job.run()
    log.finish_flush(job)


def segment_path(base: int) -> str:
    return f"{DIRECTORY}/{base:020d}.log"


def bases(storage: FaultyStorage) -> list[int]:
    return [int(name[:20]) for name in storage.list_dir(DIRECTORY) if name.endswith(".log")]


def positions(storage: FaultyStorage, base: int) -> list[int]:
    found = dump(storage, DIRECTORY, from_offset=base)
    return [batch.position for batch in found if batch.segment == segment_path(base)]


def values(log: PartitionLog) -> dict[int, str]:
    return {
        record.offset: (record.value or b"").decode()
        for batch in log.read_batches(log.log_start_offset, log.durable_offset)
        for record in read_records(batch)
    }


def everything(last: int = 40) -> dict[int, str]:
    return {offset: f"v{offset}" for offset in range(last)}


def data_problems(storage: FaultyStorage) -> list[Problem]:
    return [problem for problem in verify(storage, DIRECTORY).problems if problem.kind is ProblemKind.DATA]


@pytest.mark.parametrize("close", [True, False])
def test_a_sound_log_has_no_problems_and_an_empty_plan(close: bool) -> None:
    storage = filled(close=close)
    seen: list[tuple[str, int, int]] = []
    report = verify(storage, DIRECTORY, lambda *progress: seen.append(progress))
    assert report.ok
    assert (report.batches, report.records, report.end_offset) == (20, 40, 40)
    assert report.segments == len(seen) == len(bases(storage)) > 2
    assert seen[-1][1] == seen[-1][2] == report.size_bytes
    plan = plan_repair(storage, DIRECTORY)
    assert plan.is_empty
    assert plan.describe() == ["nothing to repair"]


def test_dump_shows_headers_and_records_of_the_asked_range() -> None:
    storage = filled()
    batches = list(dump(storage, DIRECTORY, records=True, from_offset=5, to_offset=11))
    assert [batch.header.base_offset for batch in batches if batch.header] == [4, 6, 8, 10]
    assert [record.value for batch in batches for record in batch.records][:2] == [b"v4", b"v5"]
    assert all(not batch.records for batch in dump(storage, DIRECTORY))


def flip_in_batch(storage: FaultyStorage, base: int, number: int) -> int:
    position = positions(storage, base)[number]
    storage.flip_bit(segment_path(base), position + 70)
    return position


def test_dump_goes_on_behind_damage() -> None:
    storage = filled()
    position = flip_in_batch(storage, 0, 1)
    batches = list(dump(storage, DIRECTORY))
    assert [batch.header.base_offset for batch in batches if batch.header] == [0, *range(4, 40, 2)]
    (damaged,) = [batch for batch in batches if batch.header is None]
    assert (damaged.segment, damaged.position, damaged.problem) == (
        segment_path(0),
        position,
        "the checksum does not fit the bytes",
    )


def test_verify_names_file_position_and_offsets_of_a_damaged_batch_in_a_sealed_segment() -> None:
    storage = filled()
    base = bases(storage)[1]
    position = flip_in_batch(storage, base, 1)
    (problem,) = data_problems(storage)
    assert (problem.path, problem.position) == (segment_path(base), position)
    assert (problem.first_offset, problem.next_offset) == (base + 2, base + 4)


def test_skipping_a_damaged_batch_keeps_everything_behind_it_and_every_offset() -> None:
    storage = filled()
    base = bases(storage)[-1]
    original = storage.read_file(segment_path(base))
    position = flip_in_batch(storage, base, 0)
    damaged = storage.read_file(segment_path(base))
    size = parse_header(original, position).size_bytes
    with pytest.raises(CorruptData) as caught:
        open_log(storage, DIRECTORY, CONFIG)
    assert (caught.value.path, caught.value.position) == (segment_path(base), position)
    plan = plan_repair(storage, DIRECTORY)
    assert (plan.offsets_lost, plan.bytes_put_aside) == (2, size)
    kept = apply_repair(plan)
    assert damaged[position : position + size] in [storage.read_file(path) for path in kept]
    assert verify(storage, DIRECTORY).ok
    log, report = open_log(storage, DIRECTORY, CONFIG)
    assert not report.cuts
    assert log.end_offset == 40
    assert values(log) == {o: v for o, v in everything().items() if o not in (base, base + 1)}
    data, header = make_batch("next", producer=(7, 0, 40))
    assert log.append(data, header, 9, 2000).base_offset == 40


def test_truncating_at_damage_ends_the_log_there_and_keeps_the_rest_beside() -> None:
    storage = filled()
    second = bases(storage)[1]
    position = flip_in_batch(storage, second, 1)
    rest = storage.read_file(segment_path(second))[position:]
    followers = {base: storage.read_file(segment_path(base)) for base in bases(storage)[2:]}
    plan = plan_repair(storage, DIRECTORY, TRUNCATE)
    assert plan.offsets_lost == 40 - (second + 2)
    kept = [storage.read_file(path) for path in apply_repair(plan)]
    assert rest in kept
    assert all(content in kept for content in followers.values())
    assert verify(storage, DIRECTORY).ok
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert values(log) == everything(second + 2)
    data, header = make_batch("next", producer=(7, 0, second + 2))
    assert log.append(data, header, 9, 2000).base_offset == second + 2


@pytest.mark.parametrize("treatment", list(DamageTreatment))
def test_a_missing_middle_segment(treatment: DamageTreatment) -> None:
    storage = filled()
    first, lost, behind, *_ = bases(storage)
    storage.remove(segment_path(lost))
    with pytest.raises(CorruptData, match=f"offsets {lost} … {behind - 1} are missing"):
        open_log(storage, DIRECTORY, CONFIG)
    (problem,) = data_problems(storage)
    assert (problem.path, problem.first_offset, problem.next_offset) == (segment_path(first), lost, behind)
    apply_repair(plan_repair(storage, DIRECTORY, treatment))
    assert verify(storage, DIRECTORY).ok
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    if treatment is SKIP:
        assert values(log) == {o: v for o, v in everything().items() if not lost <= o < behind}
    else:
        assert values(log) == everything(lost)


def test_a_missing_first_segment_moves_the_log_start() -> None:
    storage = filled()
    first, second, *_ = bases(storage)
    storage.remove(segment_path(first))
    with pytest.raises(CorruptData, match=f"offsets 0 … {second - 1} are missing"):
        open_log(storage, DIRECTORY, CONFIG)
    plan = plan_repair(storage, DIRECTORY)
    assert plan.offsets_lost == second
    apply_repair(plan)
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert log.log_start_offset == second
    assert values(log) == {o: v for o, v in everything().items() if o >= second}


@pytest.mark.parametrize("treatment", list(DamageTreatment))
def test_a_missing_end_keeps_its_offsets_only_when_skipping(treatment: DamageTreatment) -> None:
    storage = filled()
    last = bases(storage)[-1]
    storage.remove(segment_path(last))
    with pytest.raises(CorruptData, match="but 40 was durable"):
        open_log(storage, DIRECTORY, CONFIG)
    apply_repair(plan_repair(storage, DIRECTORY, treatment))
    assert verify(storage, DIRECTORY).ok
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert values(log) == everything(last)
    assert log.end_offset == (40 if treatment is SKIP else last)


@pytest.mark.parametrize("remove", [True, False])
def test_a_lost_checkpoint_is_rebuilt(remove: bool) -> None:
    storage = filled()
    path = f"{DIRECTORY}/checkpoint"
    if remove:
        storage.remove(path)
    else:
        for slot in range(3):
            if len(storage.read_file(path)) > slot * 4096 + 20:
                storage.flip_bit(path, slot * 4096 + 20)
    with pytest.raises(CorruptData, match="log repair"):
        open_log(storage, DIRECTORY, CONFIG)
    assert ProblemKind.CHECKPOINT in {problem.kind for problem in verify(storage, DIRECTORY).problems}
    apply_repair(plan_repair(storage, DIRECTORY))
    assert verify(storage, DIRECTORY).ok
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert values(log) == everything()


def test_without_a_checkpoint_a_torn_tail_is_put_aside() -> None:
    storage = filled()
    storage.remove(f"{DIRECTORY}/checkpoint")
    base = bases(storage)[-1]
    file = storage.open(segment_path(base))
    file.write(file.size(), [b"half a batch"])
    kept = apply_repair(plan_repair(storage, DIRECTORY))
    assert b"half a batch" in [storage.read_file(path) for path in kept]
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert values(log) == everything()


@pytest.mark.parametrize("ending", [".index", ".producers", "leader-epochs"])
def test_damaged_derived_files_are_named_and_rebuilt(ending: str) -> None:
    storage = filled()
    path = next(f"{DIRECTORY}/{name}" for name in storage.list_dir(DIRECTORY) if name.endswith(ending))
    storage.flip_bit(path, 14)
    (problem,) = verify(storage, DIRECTORY).problems
    assert (problem.kind, problem.path) == (ProblemKind.DERIVED, path)
    kept = apply_repair(plan_repair(storage, DIRECTORY))
    assert [name.startswith(path) for name in kept] == [True]
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    assert values(log) == everything()
    assert log.epochs.entries == ((0, 0), (1, 16), (2, 32))
    log.close()
    assert verify(storage, DIRECTORY).ok


def test_verify_compares_derived_files_with_the_log_even_if_their_checksums_are_right() -> None:
    storage = filled()
    names = storage.list_dir(DIRECTORY)
    indexes = [f"{DIRECTORY}/{name}" for name in names if name.endswith(".index")]
    snapshots = [f"{DIRECTORY}/{name}" for name in names if name.endswith(".producers")]
    for first, second in (indexes[:2], snapshots[:2]):
        content = storage.read_file(first)
        file = storage.open(second)
        file.truncate(0)
        file.write(0, [content])
    problems = verify(storage, DIRECTORY).problems
    assert {problem.path for problem in problems} >= {snapshots[1]}
    assert {problem.kind for problem in problems} == {ProblemKind.DERIVED}


def test_bytes_above_the_recovery_point_are_torn_and_left_to_recovery() -> None:
    storage = filled()
    base = bases(storage)[-1]
    file = storage.open(segment_path(base))
    size = file.size()
    file.write(size, [b"x" * 100])
    (problem,) = verify(storage, DIRECTORY).problems
    assert (problem.kind, problem.path, problem.position) == (ProblemKind.TORN, segment_path(base), size)
    assert plan_repair(storage, DIRECTORY).is_empty
    log, report = open_log(storage, DIRECTORY, CONFIG)
    assert [(cut.path, cut.position, cut.size_bytes) for cut in report.cuts] == [
        (segment_path(base), size, 100)
    ]
    assert values(log) == everything()
    assert verify(storage, DIRECTORY).kept_aside == [report.cuts[0].kept_in]


def test_a_plan_is_not_applied_to_a_log_that_has_changed_since() -> None:
    storage = filled()
    flip_in_batch(storage, bases(storage)[-1], 0)
    plan = plan_repair(storage, DIRECTORY)
    flip_in_batch(storage, bases(storage)[0], 0)
    with pytest.raises(StorageError, match="plan it again"):
        apply_repair(plan)


def test_planning_and_verifying_change_nothing() -> None:
    storage = filled()
    flip_in_batch(storage, bases(storage)[-1], 0)
    before = {name: storage.read_file(f"{DIRECTORY}/{name}") for name in storage.list_dir(DIRECTORY)}
    for treatment in DamageTreatment:
        plan_repair(storage, DIRECTORY, treatment).describe()
    assert before == {name: storage.read_file(f"{DIRECTORY}/{name}") for name in storage.list_dir(DIRECTORY)}


@pytest.mark.parametrize("seed", range(60))
def test_any_bit_flip_in_a_segment_is_found_and_costs_one_batch_when_skipped(seed: int) -> None:
    rng = random.Random(seed)
    storage = filled()
    base = rng.choice(bases(storage))
    content = storage.read_file(segment_path(base))
    position = rng.randrange(len(content))
    starts = [start for start in positions(storage, base) if start <= position]
    if 12 <= position - starts[-1] < 16:
        return  # The leader epoch: nothing protects it.
    storage.flip_bit(segment_path(base), position, rng.randrange(8))
    assert data_problems(storage)
    plan = plan_repair(storage, DIRECTORY)
    apply_repair(plan)
    assert verify(storage, DIRECTORY).ok
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    lost = parse_header(content, starts[-1]).base_offset
    assert log.end_offset == 40
    assert values(log) == {o: v for o, v in everything().items() if o not in (lost, lost + 1)}
