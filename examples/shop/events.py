"""Half an hour in a shop: the messages that it sends, and the truth that they add up to.

- An order is placed, perhaps corrected or cancelled, paid, packed and shipped. Every change is one event
  with the whole order as it is then, and with a ``version`` that counts up. A payment is an event too.
- Messages come as they do in life: most at once, some late, some twice, some broken.
- The same seed gives the same messages. The truth is taken from the lives of the orders and not from the
  messages, so that a pipeline that reads the messages can be checked against it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

OPENING = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)
OPEN_MINUTES = 30
LATE_SECONDS, COPY_SECONDS = 180, 120
LATEST = timedelta(seconds=LATE_SECONDS + COPY_SECONDS)
"""No message, and no copy of one, is sent longer after its event: the pipeline's watermark relies on it."""

LATE_SHARE, COPY_SHARE, BROKEN_SHARE = 0.06, 0.03, 0.01
CORRECTED_SHARE, CANCELLED_SHARE, PAID_SHARE, PACKED_SHARE, SHIPPED_SHARE = 0.15, 0.10, 0.95, 0.8, 0.7

#: Where customers are: how many of them, and when they come (two numbers that shape a beta distribution).
REGIONS = {"africa": (15, 1.2, 1.2), "americas": (30, 5, 2), "asia": (30, 2, 5), "europe": (25, 4, 4)}

#: The system that sends each kind of event. Every system is a Kafka producer of its own.
SENDERS = {"order": "web shop", "payment": "payment provider", "update": "warehouse"}

Event = dict[str, Any]


class Message(NamedTuple):
    """What is sent. ``broken`` says why no pipeline can use it, and is empty if it is good."""

    sent_at: datetime
    sender: str
    order_id: str
    text: str | None
    broken: str = ""


@dataclass
class Truth:
    """What the results must be, row by row."""

    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By order id: every order that was not cancelled, as it is in the end."""
    revenue: dict[tuple[str, datetime], dict[str, Any]] = field(default_factory=dict)
    """By region and minute: what was paid."""
    cancelled: int = 0
    late: int = 0
    copies: int = 0
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, life: list[Event]) -> None:
        """Count one order, from all that happened to it."""
        paid_at = None
        for event in life:
            if event["kind"] == "payment":
                paid_at = event["time"]
                self._add_payment(event)
        last = max((event for event in life if "version" in event), key=lambda event: event["version"])
        if last["status"] == "cancelled":
            self.cancelled += 1
            return
        names = ("order_id", "region", "status", "amount", "version")
        row = {name: last[name] for name in names}
        self.orders[last["order_id"]] = row | {"updated_at": last["time"], "paid_at": paid_at}

    def _add_payment(self, event: Event) -> None:
        minute = event["time"].replace(second=0, microsecond=0)
        row = self.revenue.setdefault(
            (event["region"], minute),
            {"region": event["region"], "minute": minute, "payments": 0, "revenue": Decimal(0)},
        )
        row["payments"] += 1
        row["revenue"] += event["amount"]


def make_day(events: int, seed: int) -> tuple[list[Message], Truth]:
    """At least ``events`` messages in the order in which they are sent; the last order's are all there."""
    rng = random.Random(seed)
    truth = Truth()
    messages: list[Message] = []
    number = 0
    while len(messages) < events:
        number += 1
        life = live(f"o{number:07}", rng)
        truth.add(life)
        for event in life:
            messages += send(event, rng, truth)
    messages.sort(key=lambda message: message.sent_at)
    return messages, truth


def live(order_id: str, rng: random.Random) -> list[Event]:
    """All that happens to one order."""
    region, now = _customer(rng)
    amount = Decimal(rng.randint(500, 20_000)) / 100
    life: list[Event] = []

    def happen(kind: str, status: str | None = None) -> None:
        event = {"event_id": f"{order_id}-{len(life) + 1}", "kind": kind, "order_id": order_id, "time": now}
        event |= {"region": region, "amount": amount}
        if status is not None:
            event |= {"status": status, "version": len(life) + 1}
        life.append(event)

    happen("order", "placed")
    if rng.random() < CORRECTED_SHARE:
        now = _later(now, rng)
        amount += Decimal(rng.randint(-400, 400)) / 100
        happen("update", "placed")
    if rng.random() < CANCELLED_SHARE:
        now = _later(now, rng)
        happen("update", "cancelled")
        return life
    steps = (
        ("payment", None, PAID_SHARE),
        ("update", "packed", PACKED_SHARE),
        ("update", "shipped", SHIPPED_SHARE),
    )
    for kind, status, share in steps:
        if rng.random() >= share:
            break
        now = _later(now, rng)
        happen(kind, status)
    return life


def send(event: Event, rng: random.Random, truth: Truth) -> list[Message]:
    """One event as messages: perhaps late, perhaps twice, perhaps with a broken one beside it."""
    sender, order_id, sent_at = SENDERS[event["kind"]], event["order_id"], event["time"]
    if rng.random() < LATE_SHARE:
        truth.late += 1
        sent_at += timedelta(seconds=rng.uniform(10, LATE_SECONDS))
    messages = [Message(sent_at, sender, order_id, _text(event))]
    if rng.random() < COPY_SHARE:
        truth.copies += 1
        copied_at = sent_at + timedelta(seconds=rng.uniform(0, COPY_SECONDS))
        messages.append(messages[0]._replace(sent_at=copied_at))
    if rng.random() < BROKEN_SHARE:
        reason, text = rng.choice(BREAKAGES)(event, rng)
        truth.broken[reason] += 1
        messages.append(Message(sent_at, sender, order_id, text, broken=reason))
    return messages


def _customer(rng: random.Random) -> tuple[str, datetime]:
    """A region, and the moment of an order from there."""
    (region,) = rng.choices(list(REGIONS), weights=[weight for weight, *_ in REGIONS.values()])
    _, early, late = REGIONS[region]
    return region, OPENING + timedelta(milliseconds=int(OPEN_MINUTES * 60_000 * rng.betavariate(early, late)))


def _later(now: datetime, rng: random.Random) -> datetime:
    return now + timedelta(milliseconds=rng.randint(500, 40_000))


def _text(event: Event) -> str:
    time = event["time"].isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(event | {"time": time, "amount": float(event["amount"])})


# --- ways in which a message can be broken: the reason that the pipeline must find, and the text


def _empty(event: Event, rng: random.Random) -> tuple[str, str | None]:
    return "empty message", None


def _cut_off(event: Event, rng: random.Random) -> tuple[str, str]:
    text = _text(event)
    return "not JSON", text[: rng.randrange(1, len(text) - 1)]


def _wrong_type(event: Event, rng: random.Random) -> tuple[str, str]:
    wrong = json.loads(_text(event)) | rng.choice(
        ({"amount": "a lot"}, {"time": "yesterday"}, {"amount": [1, 2]})
    )
    return "wrong type", json.dumps(wrong)


def _missing_field(event: Event, rng: random.Random) -> tuple[str, str]:
    name = rng.choice(("event_id", "order_id", "time", "region", "amount"))
    left = {key: value for key, value in json.loads(_text(event)).items() if key != name}
    return f"missing {name}", json.dumps(left)


def _unknown_kind(event: Event, rng: random.Random) -> tuple[str, str]:
    return "unknown kind", json.dumps(json.loads(_text(event)) | {"kind": rng.choice(("gift", "refund", ""))})


BREAKAGES: tuple[Callable[[Event, random.Random], tuple[str, str | None]], ...] = (
    _empty,
    _cut_off,
    _wrong_type,
    _missing_field,
    _unknown_kind,
)
