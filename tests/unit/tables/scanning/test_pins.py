"""Pins: views with several users, and when they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.fair_shares import NOBODY, Client
from tidemill.errors import TableCode, TableError
from tidemill.tables.scanning.pins import UNUSED_MS, Pin, Pins, SharedView
from tidemill.tables.scanning.sessions import BucketKey

BUCKETS = tuple(BucketKey(7, 0, number) for number in range(2))


class Views:
    """Makes views, and knows which of them were closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def make(self, name: str) -> SharedView:
        return SharedView(name, 40, lambda: self.closed.append(name))

    def pin(self, name: str, *, idle_ms: int = 1_000, now_ms: int = 0, client: Client = NOBODY) -> Pin:
        views = {bucket: self.make(f"{name}/{bucket.bucket}") for bucket in BUCKETS}
        return Pin(name, 7, views, dict.fromkeys(BUCKETS, 3), {}, idle_ms, now_ms, client)


@pytest.fixture
def views() -> Views:
    return Views()


@pytest.fixture
def pins() -> Pins:
    return Pins(2)


def refusal(attempt: Callable[[], object]) -> TableError:
    with pytest.raises(TableError) as error:
        attempt()
    return error.value


@given(st.integers(0, 8))
def test_the_last_user_of_a_view_closes_it_and_nobody_else_does(sharers: int) -> None:
    views = Views()
    view = views.make("it")
    for _ in range(sharers):
        assert view.share() is view
    for _ in range(sharers):
        view.release()
        assert views.closed == []
    view.release()
    assert views.closed == ["it"]


def test_several_tasks_get_the_same_pin(pins: Pins, views: Views) -> None:
    pin = views.pin("one")
    pins.add(pin)
    assert pins.get("one", 1) is pins.get("one", 2) is pin


def test_a_pin_that_never_was_is_not_found(pins: Pins) -> None:
    error = refusal(lambda: pins.get("made up", 0))
    assert error.table_code is TableCode.pin_not_found
    assert not error.retriable
    assert "start the scan again" in error.message


def test_a_pin_that_nobody_uses_expires_and_lets_go_of_its_views(pins: Pins, views: Views) -> None:
    pins.add(views.pin("short", idle_ms=500))
    pins.add(views.pin("long", idle_ms=1_000))
    pins.sweep(499)
    assert len(pins) == 2
    pins.sweep(500)
    assert views.closed == ["short/0", "short/1"]
    assert refusal(lambda: pins.get("short", 500)).table_code is TableCode.pin_not_found
    pins.get("long", 999)
    pins.sweep(1_998)
    assert len(pins) == 1
    pins.sweep(1_999)
    assert len(pins) == 0


def test_a_released_pin_is_gone_and_releasing_it_twice_is_fine(pins: Pins, views: Views) -> None:
    pins.add(views.pin("one"))
    pins.release("one")
    pins.release("one")
    pins.release("made up")
    assert views.closed == ["one/0", "one/1"]
    assert refusal(lambda: pins.get("one", 0)).table_code is TableCode.pin_not_found


def test_a_view_that_a_session_reads_outlives_its_pin(pins: Pins, views: Views) -> None:
    pin = views.pin("one")
    pins.add(pin)
    shared = pin.views[BUCKETS[1]].share()
    pins.release("one")
    assert views.closed == ["one/0"]
    shared.release()
    assert views.closed == ["one/0", "one/1"]


def test_no_more_pins_than_there_is_room_for(pins: Pins, views: Views) -> None:
    for name in ("one", "two"):
        pins.check_capacity(0)
        pins.add(views.pin(name))
    error = refusal(lambda: pins.check_capacity(UNUSED_MS - 1))
    assert error.table_code is TableCode.too_many_pins
    assert error.retriable
    pins.release("one")
    pins.check_capacity(0)


def test_the_pin_that_was_unused_for_longest_makes_room(pins: Pins, views: Views) -> None:
    for name in ("one", "two"):
        pins.add(views.pin(name))
    pins.get("one", 5)
    pins.check_capacity(UNUSED_MS)
    assert views.closed == ["two/0", "two/1"]
    pins.get("one", UNUSED_MS)


def test_a_client_over_its_share_loses_a_pin_of_its_own_that_is_unused(views: Views) -> None:
    pins = Pins(8)
    hog, other = Client("10.0.0.1", 1), Client("10.0.0.2", 2)
    pins.check_capacity(0, other)
    pins.add(views.pin("other", client=other))
    for number in range(5):
        pins.check_capacity(1, hog)
        pins.add(views.pin(f"hog {number}", now_ms=1, client=hog))
    assert "this connection holds 5 of them" in refusal(lambda: pins.check_capacity(1, hog)).message
    pins.check_capacity(1 + UNUSED_MS, hog)
    assert views.closed == ["hog 0/0", "hog 0/1"], "not the other's, which is unused for longer"


def test_with_all_places_taken_the_client_that_holds_most_makes_room(views: Views) -> None:
    pins = Pins(3)
    pins.add(views.pin("one", client=Client("a", 1)))
    pins.add(views.pin("two", now_ms=5, client=Client("b", 2)))
    pins.add(views.pin("three", now_ms=6, client=Client("b", 3)))
    pins.check_capacity(6 + UNUSED_MS, Client("c", 4))
    assert views.closed == ["two/0", "two/1"]


def test_a_bucket_that_goes_takes_with_it_the_pins_that_hold_it(pins: Pins, views: Views) -> None:
    whole = views.pin("whole")
    part = views.pin("part")
    del part.views[BUCKETS[0]]
    pins.add(whole)
    pins.add(part)
    pins.end_bucket(BUCKETS[0])
    assert views.closed == ["whole/0", "whole/1"]
    assert pins.get("part", 0) is part


def test_an_id_that_somebody_relies_on_is_not_given_to_another_pin(pins: Pins, views: Views) -> None:
    pins.check_unused("one")
    pins.add(views.pin("one"))
    assert refusal(lambda: pins.check_unused("one")).table_code is TableCode.invalid_scan_request
    pins.release("one")
    pins.check_unused("one")
