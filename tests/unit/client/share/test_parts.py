"""The pure parts of a share consumer: outbox, session, holdings, decoding."""

from __future__ import annotations

import doctest
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tidemill.client.producing import values
from tidemill.client.share import outbox, pace, record
from tidemill.client.share.decoding import take_records
from tidemill.client.share.group_configs import named_configs
from tidemill.client.share.outbox import Outbox, Way
from tidemill.client.share.record import Acknowledge, Settlement
from tidemill.client.share.session import ShareSession, Step
from tidemill.errors import ConfigError, ErrorCode
from tidemill.records.record import Record, build_batch

ACCEPT, RELEASE = Settlement(Acknowledge.ACCEPT), Settlement(Acknowledge.RELEASE)
RENEW, LATER = Settlement(Acknowledge.RENEW), Settlement(Acknowledge.RELEASE, delay_ms=5)
T0, T1 = ("t", 0), ("t", 1)


@pytest.mark.parametrize("module", [outbox, pace, record, values])
def test_the_examples_in_docstrings_do_what_they_say(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


# --- outbox


def test_renewals_delays_and_the_rest_travel_apart() -> None:
    box = Outbox()
    box.put(T0, 1, ACCEPT)
    box.put(T0, 2, LATER)
    box.put(T0, 3, RENEW)
    ways = []
    while (parcel := box.take()) is not None:
        ways.append(parcel.way)
    assert ways == [Way.RENEW, Way.SETTLE, Way.ACKNOWLEDGE]
    assert not box


def test_settling_a_record_takes_back_its_renewal() -> None:
    box = Outbox()
    box.put(T0, 3, RENEW)
    box.put(T0, 3, ACCEPT)
    parcel = box.take()
    assert parcel is not None
    assert parcel.way is Way.ACKNOWLEDGE
    assert box.take() is None


def test_a_part_that_was_rolled_back_is_halved_until_the_culprit_stands_alone() -> None:
    box = Outbox()
    for offset in range(8):
        box.put(T0, offset, ACCEPT)
    box.put(T1, 0, ACCEPT)
    done: set[tuple[tuple[str, int], int]] = set()
    bad: set[tuple[tuple[str, int], int]] = set()
    requests = 0
    while (parcel := box.take()) is not None:
        requests += 1
        errors = {
            place: ErrorCode.invalid_record_state
            if any(entry.first_offset == 5 and place == T0 for entry in entries)
            else ErrorCode.none
            for place, entries in parcel.parts.items()
        }
        for outcome in box.answered(parcel, errors):
            (done if outcome.error == ErrorCode.none else bad).add(
                (outcome.partition, outcome.entry.first_offset)
            )
    assert bad == {(T0, 5)}
    assert done == {(T0, offset) for offset in range(8) if offset != 5} | {(T1, 0)}
    assert requests <= 8


def test_what_was_not_answered_is_said_again_and_what_a_new_leader_took_is_not() -> None:
    box = Outbox()
    box.put(T0, 1, ACCEPT)
    box.put(T1, 1, ACCEPT)
    parcel = box.take()
    assert parcel is not None
    outcomes = box.answered(parcel, {T0: ErrorCode.not_leader_or_follower})
    assert [(each.partition, each.error) for each in outcomes] == [(T0, ErrorCode.not_leader_or_follower)]
    again = box.take()
    assert again is not None
    assert list(again.parts) == [T1]


def test_a_request_has_a_bounded_number_of_entries() -> None:
    box = Outbox()
    for offset in range(10_000):
        box.put(T0, offset, ACCEPT)
    sizes = []
    while (parcel := box.take()) is not None:
        sizes.append(len(parcel.parts[T0]))
    assert sum(sizes) == 10_000
    assert max(sizes) <= 4_000


# --- session


def test_a_session_names_what_came_and_went_and_counts_its_requests() -> None:
    this = ShareSession()
    assert not ShareSession().is_open
    assert this.fetch({T0}) == Step(0, frozenset({T0}), frozenset())
    assert this.acknowledge() == 1
    assert this.is_open
    assert this.fetch({T1}) == Step(2, frozenset({T1}), frozenset({T0}))
    this._epoch = 2**31 - 1
    assert this.acknowledge() == 2**31 - 1
    assert this.acknowledge() == 1


# --- decoding


def acquired(*ranges: tuple[int, int]) -> list[Any]:
    return [SimpleNamespace(first_offset=low, last_offset=high, delivery_count=1) for low, high in ranges]


def test_only_records_that_were_handed_out_are_taken() -> None:
    data = build_batch([Record(None, b"%d" % n) for n in range(10)], base_offset=5)
    taken = take_records(data, acquired((6, 7), (10, 10)), T0)
    assert [handed.record.offset for handed in taken.records] == [6, 7, 10]
    assert taken.gaps == []


def test_offsets_without_records_are_gaps_and_offsets_behind_the_answer_are_not() -> None:
    data = build_batch([Record(None, b"a")], base_offset=5) + build_batch([Record(None, b"b")], base_offset=8)
    taken = take_records(data, acquired((4, 8), (9, 9), (11, 12)), T0)
    assert [handed.record.offset for handed in taken.records] == [5, 8]
    assert taken.gaps == [(4, 4), (6, 7)]
    # Whether there are records is not known: they must be released, not archived.
    assert taken.unread == [(9, 9), (11, 12)]


def test_records_that_cannot_be_decoded_are_named_with_the_reason() -> None:
    good = build_batch([Record(None, b"a")], base_offset=0)
    bad = bytearray(build_batch([Record(None, b"b"), Record(None, b"c")], base_offset=1))
    bad[57:61] = (3).to_bytes(4, "big")  # One record more than there are.
    from crc32c import crc32c

    bad[17:21] = crc32c(bytes(bad[21:])).to_bytes(4, "big")
    taken = take_records(good + bytes(bad), acquired((0, 2)), T0)
    assert [handed.record.offset for handed in taken.records] == [0]
    assert [(low, high) for low, high, _ in taken.undecodable] == [(1, 2)]
    assert taken.gaps == []


# --- configs


def test_configs_have_kafkas_names() -> None:
    assert named_configs(start=3600, lock=20, retry_backoff=1, retry_backoff_max=60, order="key") == {
        "share.auto.offset.reset": "by_duration:PT3600S",
        "share.record.lock.duration.ms": "20000",
        "tidemill.share.retry.backoff.ms": "1000",
        "tidemill.share.retry.backoff.kind": "exponential",
        "tidemill.share.retry.backoff.max.ms": "60000",
        "tidemill.share.order": "key",
    }
    with pytest.raises(ConfigError, match="give both"):
        named_configs(retry_backoff_max=60)
