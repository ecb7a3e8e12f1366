"""The shop's generator: its messages add up to its truth, in whatever sequence they come."""

from __future__ import annotations

import json
import random
from collections import Counter
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from events import LATEST, SENDERS, Message, Truth, make_day
from hypothesis import given
from hypothesis import strategies as st

SOME = 3_000


@pytest.fixture(scope="module")
def day() -> tuple[list[Message], Truth]:
    return make_day(SOME, seed=1)


def read(message: Message) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(message.text or "")
    event["time"] = datetime.fromisoformat(event["time"])
    event["amount"] = Decimal(str(event["amount"])).quantize(Decimal("0.01"))
    return event


def fold(messages: list[Message]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """What a simple reader makes of the messages: the orders, and the revenue."""
    orders: dict[str, Any] = {}
    paid: dict[str, dict[str, Any]] = {}
    for event in (read(message) for message in messages if not message.broken):
        if event["kind"] == "payment":
            paid[event["order_id"]] = event
        elif event["version"] > orders.get(event["order_id"], {"version": 0})["version"]:
            orders[event["order_id"]] = event
    revenue: Counter[Any] = Counter()
    for event in paid.values():
        revenue[event["region"], event["time"].replace(second=0, microsecond=0)] += event["amount"]
    kept = {key: event for key, event in orders.items() if event["status"] != "cancelled"}
    return {
        key: (
            event["status"],
            event["amount"],
            event["version"],
            event["time"],
            paid.get(key, {}).get("time"),
        )
        for key, event in kept.items()
    }, dict(revenue)


@given(seed=st.integers(0, 2**32), events=st.integers(1, 300))
def test_messages_in_any_sequence_add_up_to_the_truth(seed: int, events: int) -> None:
    messages, truth = make_day(events, seed)
    random.Random(seed).shuffle(messages)
    orders, revenue = fold(messages)
    columns = ("status", "amount", "version", "updated_at", "paid_at")
    assert orders == {key: tuple(row[name] for name in columns) for key, row in truth.orders.items()}
    assert revenue == {key: row["revenue"] for key, row in truth.revenue.items()}


def test_a_seed_says_all_messages() -> None:
    assert make_day(500, seed=7) == make_day(500, seed=7)
    assert make_day(500, seed=7) != make_day(500, seed=8)


def test_there_are_as_many_messages_as_asked_for(day: tuple[list[Message], Truth]) -> None:
    assert SOME <= len(day[0]) < SOME + 20


def test_messages_come_in_the_sequence_in_which_they_are_sent(day: tuple[list[Message], Truth]) -> None:
    times = [message.sent_at for message in day[0]]
    assert times == sorted(times)


def test_no_message_is_later_than_the_watermark_allows(day: tuple[list[Message], Truth]) -> None:
    for message in day[0]:
        if not message.broken:
            assert message.sent_at - LATEST <= read(message)["time"] <= message.sent_at


def test_broken_messages_are_those_that_the_truth_counts(day: tuple[list[Message], Truth]) -> None:
    messages, truth = day
    assert Counter(message.broken for message in messages if message.broken) == truth.broken


def test_a_day_has_all_that_can_go_wrong(day: tuple[list[Message], Truth]) -> None:
    messages, truth = day
    assert {message.sender for message in messages} == set(SENDERS.values())
    assert min(truth.late, truth.copies, truth.cancelled) > 0
    assert {"not JSON", "wrong type", "unknown kind", "empty message", "missing time"} <= truth.broken.keys()
    paid_first, placed = 0, set()
    for event in (read(message) for message in messages if not message.broken):
        paid_first += event["kind"] == "payment" and event["order_id"] not in placed
        placed.add(event["order_id"])
    assert paid_first > 0
