"""The epoch history against the plain list of which epoch wrote which offset."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.log.epochs import EpochHistory

#: For each batch: how far the epoch rises before it, and how many offsets it takes.
BATCHES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=12)


def built(batches: list[tuple[int, int]]) -> tuple[EpochHistory, list[int]]:
    """A history, and the epoch of every offset."""
    history, epoch = EpochHistory(), 0
    epochs: list[int] = []
    for rise, size in batches:
        epoch += rise
        news = history.assign(epoch, len(epochs))
        assert news == (not epochs or epochs[-1] < epoch)
        epochs += [epoch] * size
    return history, epochs


@given(BATCHES, st.integers(-1, 25))
def test_questions_are_answered_as_the_list_would(batches: list[tuple[int, int]], epoch: int) -> None:
    history, epochs = built(batches)
    for offset, wrote in enumerate(epochs):
        assert history.epoch_at(offset) == wrote
    assert history.latest_epoch == (epochs[-1] if epochs else -1)
    answer = history.end_offset_for(epoch, len(epochs))
    if not epochs or epoch < 0 or epoch > epochs[-1]:
        assert answer == (-1, -1)
    else:
        below = [wrote for wrote in epochs if wrote <= epoch]
        assert answer == (max(below, default=epoch), len(below))


@given(BATCHES, st.integers(0, 60))
def test_truncating_the_end_forgets_what_was_written_behind_it(
    batches: list[tuple[int, int]], end: int
) -> None:
    history, epochs = built(batches)
    history.truncate_end(end)
    assert [history.epoch_at(offset) for offset in range(min(end, len(epochs)))] == epochs[:end]
    assert history.latest_epoch == max(epochs[:end], default=-1)


@given(BATCHES, st.integers(0, 60))
def test_truncating_the_start_keeps_the_epoch_that_covers_it(
    batches: list[tuple[int, int]], start: int
) -> None:
    history, epochs = built(batches)
    start = min(start, len(epochs))
    history.truncate_start(start)
    assert [history.epoch_at(offset) for offset in range(start, len(epochs))] == epochs[start:]
    assert all(offset >= start for _, offset in history.entries)


@given(BATCHES)
def test_round_trip_through_bytes(batches: list[tuple[int, int]]) -> None:
    history, _ = built(batches)
    assert EpochHistory.from_bytes(history.to_bytes()).entries == history.entries


def test_an_epoch_older_than_all_known_ended_where_the_oldest_begins() -> None:
    history = EpochHistory([(3, 100), (5, 200)])
    assert history.end_offset_for(1, 300) == (1, 100)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 8), st.integers(1, 4)), max_size=10
    )
)
def test_two_logs_part_where_the_first_of_them_ends_an_epoch_that_both_have(
    elections: list[tuple[int, int, int, int]],
) -> None:
    """Three replicas: at an election one takes a beginning of another's log, leads, and writes."""
    replicas: list[list[int]] = [[], [], []]
    for epoch, (leader, like, kept, written) in enumerate(elections):
        replicas[leader] = replicas[like][:kept] + [epoch] * written
    histories = [EpochHistory() for _ in replicas]
    for history, epochs in zip(histories, replicas, strict=True):
        for offset, epoch in enumerate(epochs):
            history.assign(epoch, offset)
    for mine, other in permutations(range(len(replicas)), 2):
        equal = 0
        for one, another in zip(replicas[mine], replicas[other], strict=False):
            if one != another:
                break
            equal += 1
        for offset in range(1, len(replicas[other]) + 1):
            parted = histories[mine].parted_from(histories[other], len(replicas[mine]), offset)
            assert parted == min(equal, offset)


def test_an_older_epoch_changes_nothing() -> None:
    history = EpochHistory([(3, 100)])
    assert not history.assign(2, 150)
    assert history.entries == ((3, 100),)
