"""Each invariant is found broken where it is, and only there."""

from __future__ import annotations

from pathlib import Path

from support.history import History, check

P = "t-0"


def sound() -> History:
    history = History()
    for number, value in enumerate("abc"):
        history.sent(P, value)
        history.acked(P, value, number)
    history.sent(P, "unknown")
    history.seek("drain", P, 0)
    for number, value in enumerate("abc"):
        history.read("drain", P, number, value)
    return history


def broken(history: History) -> set[int]:
    return {violation.invariant for violation in check(history, drain="drain")}


def test_a_sound_history_has_no_violations() -> None:
    assert check(sound(), drain="drain") == []


def test_an_acknowledged_record_that_the_drain_does_not_return_is_lost() -> None:
    history = sound()
    history.sent(P, "d")
    history.acked(P, "d", 3)
    history.read("another", P, 3, "d")
    assert broken(history) == {1}


def test_an_acknowledged_record_at_another_offset_is_lost_where_it_was_promised() -> None:
    history = sound()
    history.sent(P, "d")
    history.acked(P, "d", 3)
    history.read("drain", P, 4, "d")
    assert broken(history) == {1, 5}


def test_deleted_records_need_not_be_drained() -> None:
    history = History()
    history.sent(P, "a")
    history.acked(P, "a", 0)
    history.deleted(P, 1)
    assert broken(history) == set()


def test_two_values_at_one_offset() -> None:
    history = sound()
    history.sent(P, "x")
    history.read("another", P, 1, "x")
    assert broken(history) == {2}


def test_one_value_at_two_offsets() -> None:
    history = sound()
    history.read("drain", P, 3, "a")
    assert broken(history) == {1, 3}


def test_a_refused_record_that_is_read() -> None:
    history = sound()
    history.sent(P, "no")
    history.failed(P, "no")
    history.read("drain", P, 3, "no")
    assert broken(history) == {4}


def test_a_record_that_nobody_sent() -> None:
    history = sound()
    history.read("drain", P, 3, "ghost")
    assert broken(history) == {4}


def test_an_unknown_outcome_may_be_read_or_not() -> None:
    history = sound()
    history.read("drain", P, 3, "unknown")
    assert broken(history) == set()


def test_a_reader_that_passes_over_a_known_record() -> None:
    history = sound()
    history.seek("skipping", P, 0)
    history.read("skipping", P, 0, "a")
    history.read("skipping", P, 2, "c")
    assert broken(history) == {5}


def test_a_reader_that_goes_back_without_having_been_told() -> None:
    history = sound()
    history.read("reader", P, 1, "b")
    history.read("reader", P, 0, "a")
    assert broken(history) == {5}
    history = sound()
    history.read("reader", P, 1, "b")
    history.seek("reader", P, 0)
    history.read("reader", P, 0, "a")
    assert broken(history) == set()


def test_offsets_without_records_may_be_passed_over() -> None:
    history = sound()
    history.sent(P, "z")
    history.read("drain", P, 9, "z")
    assert broken(history) == set()


def test_partitions_are_apart() -> None:
    history = sound()
    history.sent("t-1", "x")
    history.acked("t-1", "x", 0)
    history.read("drain", "t-1", 0, "x")
    assert broken(history) == set()


def with_transactions() -> History:
    """On two partitions: one committed, one aborted, one whose end is unknown, and something without."""
    history = sound()
    history.isolated("committed")
    for partition, offset in ((P, 3), ("t-1", 0)):
        for number, name in enumerate(("good", "bad", "open")):
            history.sent(partition, f"{name} in {partition}", transaction=name)
            history.acked(partition, f"{name} in {partition}", offset + number)
            history.read("drain", partition, offset + number, f"{name} in {partition}")
    history.committed("good")
    history.aborted("bad")
    for number, value in enumerate(("a", "b", "c", f"good in {P}")):
        history.read("committed", P, number, value)
    history.read("committed", "t-1", 0, "good in t-1")
    return history


def broken_for_committed(history: History) -> set[int]:
    return {violation.invariant for violation in check(history, "drain", "committed")}


def without(history: History, reader: str, value: str) -> History:
    return History([event for event in history.events if (event.reader, event.value) != (reader, value)])


def test_a_reader_of_committed_data_does_not_see_what_is_aborted_or_open() -> None:
    assert broken_for_committed(with_transactions()) == set()


def test_an_aborted_record_may_be_read_only_by_those_who_read_everything() -> None:
    history = with_transactions()
    for partition, offset in ((P, 4), ("t-1", 1)):
        history.read("committed", partition, offset, f"bad in {partition}")
    assert broken_for_committed(history) == {4}


def test_an_unknown_transaction_is_visible_as_a_whole_or_not_at_all() -> None:
    history = with_transactions()
    history.read("committed", P, 5, f"open in {P}")
    assert broken_for_committed(history) == {6}
    history.read("committed", "t-1", 2, "open in t-1")
    assert broken_for_committed(history) == set()


def test_what_was_visible_once_must_stay_visible() -> None:
    history = with_transactions()
    history.isolated("live")
    history.read("live", P, 5, f"open in {P}")
    assert broken_for_committed(history) == {6}


def test_a_part_of_a_committed_transaction_that_is_not_visible() -> None:
    assert broken_for_committed(without(with_transactions(), "committed", "good in t-1")) == {1, 6}


def test_a_committed_transaction_of_which_nothing_is_visible() -> None:
    history = without(with_transactions(), "committed", "good in t-1")
    assert broken_for_committed(without(history, "committed", f"good in {P}")) == {1, 6}


def test_a_reader_of_committed_data_that_passes_over_a_committed_record() -> None:
    history = with_transactions()
    history.isolated("skipping")
    history.sent(P, "later")
    for reader in ("drain", "committed"):
        history.read(reader, P, 6, "later")
    history.seek("skipping", P, 4)
    history.read("skipping", P, 6, "later")
    assert broken_for_committed(history) == set()
    history.seek("skipping", P, 3)
    history.read("skipping", P, 6, "later")
    assert broken_for_committed(history) == {5}


def test_everything_of_a_transaction_is_found_by_those_who_read_everything() -> None:
    assert broken_for_committed(without(with_transactions(), "drain", f"bad in {P}")) == {1, 5}


def test_histories_of_several_processes_are_joined(tmp_path: Path) -> None:
    first, second = sound(), History()
    second.sent(P, "x")
    second.read("another", P, 1, "x")
    first.save(tmp_path / "1")
    second.save(tmp_path / "2")
    joined = History()
    joined.load(tmp_path / "1")
    joined.load(tmp_path / "2")
    assert joined.events == first.events + second.events
    assert broken(joined) == {2}
