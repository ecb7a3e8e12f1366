from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.consumer.group import Deadlines

steps = st.lists(
    st.tuples(
        st.sampled_from(["set", "set_if_absent", "cancel", "due"]), st.sampled_from("abc"), st.integers(0, 9)
    )
)


@given(steps)
def test_deadlines_are_due_in_order_and_never_late(history: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, int] = {}
    for action, key, time_ms in history:
        if action == "set":
            deadlines.set(key, time_ms)
            model[key] = time_ms
        elif action == "set_if_absent":
            deadlines.set_if_absent(key, time_ms)
            model.setdefault(key, time_ms)
        elif action == "cancel":
            deadlines.cancel(key)
            model.pop(key, None)
        else:
            due = deadlines.due(time_ms)
            assert sorted(due) == sorted(each for each, at_ms in model.items() if at_ms <= time_ms)
            assert [model[each] for each in due] == sorted(model[each] for each in due)
            assert deadlines.next_ms == min(model.values(), default=None)
        assert {each for each in "abc" if each in deadlines} == model.keys()
        if model:
            assert deadlines.next_ms is not None
            assert deadlines.next_ms <= min(model.values())
