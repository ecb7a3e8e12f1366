"""Ranges of records with one state say of every record what was said of it last."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.share_state import DeliveryState, StateBatch
from tidemill.share.state.batches import FINISHED, change, finished_count, trim

STATES = st.sampled_from([DeliveryState.AVAILABLE, DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED])


@st.composite
def changes(draw: st.DrawFn) -> StateBatch:
    first = draw(st.integers(0, 30))
    return StateBatch(first, first + draw(st.integers(0, 8)), draw(STATES), draw(st.integers(1, 2)))


def by_record(batches: list[StateBatch]) -> dict[int, tuple[DeliveryState, int]]:
    return {
        offset: (each.state, each.delivery_count)
        for each in batches
        for offset in range(each.first_offset, each.last_offset + 1)
    }


@given(st.lists(changes(), max_size=30), st.integers(0, 40))
def test_the_last_change_of_each_record_counts_until_it_is_finished(
    history: list[StateBatch], start_offset: int
) -> None:
    batches: list[StateBatch] = []
    model: dict[int, tuple[DeliveryState, int]] = {}
    for each in history:
        change(batches, each)
        for offset, said in by_record([each]).items():
            if each.state in FINISHED or model.get(offset, said)[0] not in FINISHED:
                model[offset] = said
        assert by_record(batches) == model
        assert all(one.last_offset < two.first_offset for one, two in pairwise(batches)), "sorted, disjoint"
        assert all(
            one.last_offset + 1 < two.first_offset or one[2:] != two[2:] for one, two in pairwise(batches)
        ), "joined where they touch"
        assert finished_count(batches) == sum(state in FINISHED for state, _ in model.values())
    trim(batches, start_offset)
    assert by_record(batches) == {offset: said for offset, said in model.items() if offset >= start_offset}
