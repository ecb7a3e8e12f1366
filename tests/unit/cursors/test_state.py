"""The cursors of a shard: owners, commits, leases, and what people do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cursors.state import CursorsState, Given, Held, Next
from tidemill.cursors.stored import (
    NO_ORIGIN,
    Home,
    StoredCursor,
    StoredPosition,
    StoredRecord,
    decode_record,
    encode_record,
)
from tidemill.errors import ApiError, TableCode, TableError

ABOUT = StoredCursor("t", UUID(int=1), b"region", "topic t", False, 5)
START = Given(0, -1, False, b"")
ORIGIN, OTHER = UUID(int=7), UUID(int=8)


class Shard:
    """A state with its log."""

    def __init__(self) -> None:
        self.log: list[StoredRecord] = []
        self.state = CursorsState(self._append)
        self.fails = False

    def _append(self, records: Sequence[StoredRecord]) -> None:
        if self.fails:
            raise TableError(TableCode.state_not_ready, "no")
        # As through the log: what was written is what is replayed.
        for record in records:
            assert decode_record(*encode_record(*record)) == record
        self.log += records

    def take(
        self, owner: str, now_ms: int = 0, *, force: bool = False, partitions: int = 1
    ) -> dict[int, Held]:
        starts = dict.fromkeys(range(partitions), START)
        return self.state.take(
            "c", ABOUT, starts, owner=owner, lease_ms=100, force=force, origin=ORIGIN, now_ms=now_ms
        )

    def commit(self, epoch: int, before: int, after: int, partition: int = 0) -> None:
        self.state.commit("c", {partition: Next(epoch, before, Given(after, 1, True, b""))}, 50)

    def replayed(self, now_ms: int = 0) -> CursorsState:
        """A state that was loaded from the log."""
        loaded = CursorsState(self._append)
        for record in self.log:
            loaded.replay(*record)
        loaded.begin_leases(now_ms)
        return loaded


def code(caught: pytest.ExceptionInfo[TableError]) -> TableCode:
    return caught.value.table_code


def test_taking_over_raises_the_epoch_and_keeps_the_position() -> None:
    shard = Shard()
    assert shard.take("a")[0].position.epoch == 1
    shard.commit(1, 0, 7)
    taken = shard.take("b", force=True)[0].position
    assert (taken.epoch, taken.offset, taken.owner) == (2, 7, "b")


def test_an_older_epoch_cannot_commit_or_keep() -> None:
    shard = Shard()
    shard.take("a")
    shard.take("b", force=True)
    with pytest.raises(TableError) as caught:
        shard.commit(1, 0, 7)
    assert code(caught) is TableCode.cursor_fenced
    with pytest.raises(TableError) as caught:
        shard.state.keep("c", {0: 1}, lease_ms=100, release=False, now_ms=0)
    assert code(caught) is TableCode.cursor_fenced


def test_an_owner_that_is_alive_is_not_taken_over_without_force() -> None:
    shard = Shard()
    shard.take("a")
    with pytest.raises(TableError) as caught:
        shard.take("b", 99)
    assert code(caught) is TableCode.cursor_in_use
    assert shard.take("a", 99)[0].position.epoch == 2
    assert shard.take("b", 199)[0].position.epoch == 3


def test_a_sign_of_life_prolongs_the_lease_and_a_release_ends_it() -> None:
    shard = Shard()
    shard.take("a")
    shard.state.keep("c", {0: 1}, lease_ms=100, release=False, now_ms=90)
    with pytest.raises(TableError):
        shard.take("b", 150)
    shard.state.keep("c", {0: 1}, lease_ms=100, release=True, now_ms=150)
    assert shard.take("b", 150)[0].position.owner == "b"


def test_a_commit_goes_on_from_the_stored_position_only() -> None:
    shard = Shard()
    shard.take("a")
    shard.commit(1, 0, 7)
    shard.commit(1, 0, 7)  # The same again: its answer was lost.
    with pytest.raises(TableError) as caught:
        shard.commit(1, 0, 9)
    assert code(caught) is TableCode.cursor_moved
    shard.commit(1, 7, 9)


def test_a_commit_of_several_partitions_counts_whole_or_not_at_all() -> None:
    shard = Shard()
    shard.take("a", partitions=2)
    step = Next(1, 0, Given(5, 1, True, b""))
    with pytest.raises(TableError):
        shard.state.commit("c", {0: step, 1: step._replace(previous_offset=3)}, 0)
    _, held = shard.state.describe("c", 0)
    assert held[0].position.offset == 0


def test_another_region_is_refused() -> None:
    shard = Shard()
    shard.take("a")
    other = StoredCursor("t", UUID(int=1), b"other", "topic t, keys from b'x'", False, 5)
    with pytest.raises(TableError, match="another region: topic t, not topic t, keys") as caught:
        shard.state.take("c", other, {0: START}, owner="a", lease_ms=1, force=True, origin=ORIGIN, now_ms=0)
    assert code(caught) is TableCode.cursor_region_mismatch


def test_setting_a_position_fences_the_owner() -> None:
    shard = Shard()
    shard.take("a")
    target = {0: Given(40, -1, False, b"")}
    with pytest.raises(TableError) as caught:
        shard.state.alter("c", paused=None, positions=target, force=False, origin=ORIGIN, now_ms=10)
    assert code(caught) is TableCode.cursor_in_use
    shard.state.alter("c", paused=None, positions=target, force=True, origin=OTHER, now_ms=10)
    with pytest.raises(TableError) as caught:
        shard.commit(1, 0, 7)
    assert code(caught) is TableCode.cursor_fenced
    # Nobody owns it then, so nobody is waited for.
    assert shard.take("b", 10)[0].position.offset == 40


def test_a_position_has_the_origin_of_when_it_was_set_and_says_whether_it_has_moved_since() -> None:
    shard = Shard()
    assert shard.take("a")[0].position.origin == ORIGIN
    shard.commit(1, 0, 7)
    taken = shard.take("b", force=True)[0].position
    assert (taken.origin, taken.moved) == (ORIGIN, True)
    target = {0: Given(7, 1, True, b"")}
    shard.state.alter("c", paused=None, positions=target, force=True, origin=OTHER, now_ms=10)
    taken = shard.take("b")[0].position
    assert (taken.origin, taken.moved, taken.offset) == (OTHER, False, 7)


def test_a_cursor_that_is_kept_elsewhere_is_refused() -> None:
    shard = Shard()
    shard.take("a")
    about = replace(ABOUT, home=Home.TRANSACTIONS)
    with pytest.raises(TableError, match="in the cluster, not in its transactions") as caught:
        shard.state.take("c", about, {0: START}, owner="a", lease_ms=1, force=True, origin=ORIGIN, now_ms=0)
    assert code(caught) is TableCode.cursor_region_mismatch


def test_after_loading_owners_are_taken_to_be_alive_for_their_lease() -> None:
    shard = Shard()
    shard.take("a", partitions=2)
    shard.state.keep("c", {1: 1}, lease_ms=100, release=True, now_ms=5)
    loaded = shard.replayed(now_ms=1_000)
    _, held = loaded.describe("c", 1_050)
    # The one that was given up is free at once.
    assert {each: held[each].lease_left_ms for each in held} == {0: 50, 1: 0}


#: As the first version has written them.
_FIRST_CURSOR = (
    "0000000163",
    "000002740000000000000000000000000000000107726567696f6e08746f706963207401000000000000000500",
)
_FIRST_POSITION = (
    "000100016300000003",
    "0000000000000000000200000000000001f40000000401020507686f73743a31000000000000000900",
)


def test_records_of_the_first_version_can_be_read() -> None:
    decoded = [decode_record(*map(bytes.fromhex, each)) for each in (_FIRST_CURSOR, _FIRST_POSITION)]
    assert decoded == [
        ("c", None, StoredCursor("t", UUID(int=1), b"region", "topic t", True, 5, Home.UNKNOWN)),
        ("c", 3, StoredPosition(2, 500, 4, True, b"\x05", "host:1", 9)),
    ]


@pytest.mark.parametrize("home", [Home.CLUSTER, Home.TRANSACTIONS])
def test_a_cursor_of_the_first_version_can_be_either_in_the_cluster_or_in_transactions(home: Home) -> None:
    shard = Shard()
    for each in (_FIRST_CURSOR, _FIRST_POSITION):
        record = decode_record(*map(bytes.fromhex, each))
        assert record is not None
        shard.state.replay(*record)
    shard.log = []

    def take(home: Home) -> StoredPosition:
        about = replace(ABOUT, home=home)
        starts = {3: START}
        return shard.state.take(
            "c", about, starts, owner="a", lease_ms=1, force=False, origin=ORIGIN, now_ms=99
        )[3].position

    with pytest.raises(TableError, match="in the cluster or in its transactions, not in a file"):
        take(Home.FILE)
    taken = take(home)
    assert (taken.epoch, taken.offset, taken.origin) == (3, 500, NO_ORIGIN)
    # From then on it is known, and everything else is as it was.
    about, _ = shard.state.describe("c", 0)
    assert (about.home, about.paused, about.created_ms) == (home, True, 5)
    other = Home.TRANSACTIONS if home is Home.CLUSTER else Home.CLUSTER
    with pytest.raises(TableError):
        take(other)


def test_an_owner_of_before_the_cursor_was_deleted_is_fenced() -> None:
    shard = Shard()
    before = shard.take("a", now_ms=1_000)[0].position.epoch
    assert shard.state.delete_some("c", force=True, now_ms=1_001)
    shard.take("b", now_ms=1_002)
    with pytest.raises(TableError) as caught:
        shard.commit(before, 0, 7)
    assert code(caught) is TableCode.cursor_fenced


def test_a_position_that_was_set_has_no_owner_who_is_alive() -> None:
    shard = Shard()
    shard.take("a")
    target = {0: Given(7, 1, True, b"")}
    shard.state.alter("c", paused=None, positions=target, force=True, origin=OTHER, now_ms=10)
    assert shard.state.describe("c", 10)[1][0].lease_left_ms == 0


def test_pausing_is_told_with_every_sign_of_life() -> None:
    shard = Shard()
    shard.take("a")
    shard.state.alter("c", paused=True, positions={}, force=False, origin=ORIGIN, now_ms=10)
    assert shard.state.keep("c", {0: 1}, lease_ms=100, release=False, now_ms=10)
    shard.state.alter("c", paused=False, positions={}, force=False, origin=ORIGIN, now_ms=10)
    assert not shard.state.keep("c", {0: 1}, lease_ms=100, release=False, now_ms=10)


def test_a_deleted_cursor_is_gone_from_the_log_too() -> None:
    shard = Shard()
    shard.take("a", partitions=3)
    with pytest.raises(TableError):
        shard.state.delete_some("c", force=False, now_ms=10)
    assert shard.state.delete_some("c", force=False, now_ms=200)
    for state in (shard.state, shard.replayed()):
        assert state.names() == []
        with pytest.raises(TableError) as caught:
            state.describe("c", 0)
        assert code(caught) is TableCode.cursor_not_found


def test_a_wide_cursor_is_deleted_in_parts_and_what_is_left_can_be_deleted_again() -> None:
    shard = Shard()
    shard.take("a", partitions=501)
    assert not shard.state.delete_some("c", force=True, now_ms=10)
    left = shard.replayed()
    assert list(left.describe("c", 0)[1]) == [500]
    with pytest.raises(TableError) as caught:
        shard.commit(1, 0, 7)
    assert code(caught) is TableCode.cursor_fenced
    assert left.delete_some("c", force=False, now_ms=200)  # Its lease has ended.
    assert left.names() == []


def test_names_are_listed_in_parts() -> None:
    shard = Shard()
    for name, partitions in (("wide", 1_500), ("small", 1), ("smaller", 0), ("other", 2_000), ("last", 1)):
        starts = dict.fromkeys(range(partitions), START)
        shard.state.take(name, ABOUT, starts, owner="a", lease_ms=100, force=False, origin=ORIGIN, now_ms=0)
    assert shard.state.names() == [["wide"], ["small", "smaller", "other"], ["last"]]
    found = shard.state.listing(["small", "gone", "last"], "t", 0)
    assert [name for name, _, _ in found] == ["small", "last"]
    assert shard.state.listing(["small"], "another topic", 0) == []


def test_a_failed_append_changes_nothing() -> None:
    shard = Shard()
    shard.take("a")
    shard.fails = True
    with pytest.raises(TableError):
        shard.commit(1, 0, 7)
    assert shard.state.describe("c", 0)[1][0].position.offset == 0


def test_what_is_too_large_is_refused() -> None:
    shard = Shard()
    for name, lease_ms, start in (
        ("", 10, START),
        ("x" * 250, 10, START),
        ("c", 0, START),
        ("c", 1, Given(-1, 0, False, b"")),
    ):
        with pytest.raises(ApiError):
            shard.state.take(
                name,
                ABOUT,
                {0: start},
                owner="a",
                lease_ms=lease_ms,
                force=False,
                origin=ORIGIN,
                now_ms=0,
            )


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.sampled_from("ab"), st.booleans()),
            st.tuples(st.just("commit"), st.integers(-2, 1), st.integers(0, 5)),
        ),
        max_size=20,
    )
)
def test_only_the_newest_owner_moves_the_position_and_the_log_says_the_same(
    steps: list[tuple[str, ...]],
) -> None:
    shard = Shard()
    epoch, offset = 0, 0
    for now_ms, (what, who, how) in enumerate(steps):
        try:
            if what == "take":
                taken = shard.take(who, now_ms * 60, force=bool(how))[0].position.epoch
                assert taken > epoch
                epoch = taken
            else:
                # An epoch of before, the newest, or one that there is not yet.
                shard.commit(epoch + int(who), offset, offset + int(how))
                assert int(who) == 0
                offset += int(how)
        except TableError as error:
            assert what == "take" or int(who) or not epoch, error
    if epoch:
        for state in (shard.state, shard.replayed()):
            position = state.describe("c", 0)[1][0].position
            assert (position.epoch, position.offset) == (epoch, offset)


def test_a_position_with_finished_offsets_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="as they are written"):
        StoredPosition(1, 0, 0, True, b"\0", "", 0)
