"""A connection against a fake transport, a fake clock and a dispatcher whose answers the test gives."""

from __future__ import annotations

import gc
import time
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.batches import plain_batch
from support.fake_connection import FakeDispatcher, FakeLoop, Peer, filled, make_budget
from tidemill.server.connections.budget import ByteBudget, Stall
from tidemill.server.connections.frame_buffers import FrameBuffers
from tidemill.server.requests.call import Call
from tidemill.wire.encode import encode_request

KIB, MIB = 2**10, 2**20
PRODUCE, FETCH, METADATA = 0, 1, 3


def produce_frame(number: int, value: str = "v", acks: int = -1) -> bytes:
    entry = {"index": 0, "records": plain_batch(value)}
    body = {"acks": acks, "timeout": 1_000, "topic_data": [{"name": "t", "partition_data": [entry]}]}
    return bytes(encode_request(PRODUCE, 3, number, "client", body))


def fetch_frame(number: int) -> bytes:
    body = {"max_wait": 0, "min_bytes": 0, "max_bytes": 0, "topics": []}
    return bytes(encode_request(FETCH, 4, number, "client", body))


def metadata_frame(number: int) -> bytes:
    return bytes(encode_request(METADATA, 1, number, "client", {"topics": []}))


def padded_frame(number: int, size_bytes: int) -> bytes:
    """A Produce request that is ``size_bytes`` long, its length included."""
    size = size_bytes - 200
    frame = produce_frame(number, f"{number:09d}".ljust(size, "x"))
    size += size_bytes - len(frame)
    frame = produce_frame(number, f"{number:09d}".ljust(size, "x"))
    assert len(frame) == size_bytes
    return frame


def answer_at_once(call: Call) -> None:
    call.reply_buffers([(4).to_bytes(4, "big"), call.header.correlation_id.to_bytes(4, "big")])


def greeted(peer: Peer) -> Peer:
    """A client past its first answer, so that large frames are allowed."""
    peer.send(metadata_frame(999))
    peer.dispatcher.answer(999)
    peer.dispatcher.calls.clear()
    peer.transport.sent.clear()
    return peer


# --- what is measured


def test_a_connection_whose_request_needs_code_that_cannot_be_loaded_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(api_key: int) -> None:
        raise ImportError("no such module")

    loop = FakeLoop()
    peer = Peer(loop=loop)
    peer.dispatcher.unloaded.add(FETCH)
    monkeypatch.setattr(peer.dispatcher, "load", fail)
    peer.send(fetch_frame(1))
    loop.run_threads()
    assert (peer.transport.aborted, peer.dispatcher.started) == (True, [])


def test_code_that_is_not_loaded_is_loaded_in_a_thread_and_later_requests_wait_for_it() -> None:
    loop = FakeLoop()
    peer = Peer(loop=loop)
    peer.dispatcher.unloaded.add(FETCH)
    peer.send(fetch_frame(1) + fetch_frame(2))
    assert (peer.dispatcher.started, peer.dispatcher.loaded) == ([], [])
    loop.run_threads()
    assert (peer.dispatcher.started, peer.dispatcher.loaded) == ([1], [FETCH])
    assert peer.dispatcher.calls[0].request.topics == ()
    peer.dispatcher.answer(1)
    assert peer.dispatcher.started == [1, 2]
    peer.send(fetch_frame(3))
    assert peer.dispatcher.started == [1, 2, 3], "from now on they overlap, on the loop"


def test_a_latency_runs_from_the_last_byte_of_a_request_to_its_answer_in_order() -> None:
    peer = Peer()
    frame = produce_frame(1)
    peer.send(frame[:20])
    peer.loop.advance(5)
    peer.send(frame[20:])
    peer.loop.advance(0.2)
    peer.send(fetch_frame(2))
    peer.dispatcher.calls[1].waited_seconds = 0.5
    peer.dispatcher.answer(2, 30)
    peer.loop.advance(0.75)
    assert not peer.dispatcher.traffic.answers, "the answer to the second waits for that to the first"
    peer.dispatcher.answer(1, 40)
    produce, fetch = (peer.dispatcher.traffic.answers[key] for key in (PRODUCE, FETCH))
    assert produce.latency.total_seconds == pytest.approx(0.95)
    assert fetch.latency.total_seconds == pytest.approx(0.75)
    assert peer.dispatcher.traffic.fetch_handling.total_seconds == pytest.approx(0.25)
    assert (produce.request_bytes, produce.response_bytes) == (len(frame), 44)
    assert (fetch.request_bytes, fetch.response_bytes) == (len(fetch_frame(2)), 34)


def test_a_request_that_wants_no_answer_is_measured_too() -> None:
    peer = Peer()
    peer.send(produce_frame(1, acks=0))
    peer.loop.advance(0.1)
    peer.dispatcher.calls[0].no_reply()
    traffic = peer.dispatcher.traffic.answers[PRODUCE]
    assert traffic.latency.total_seconds == pytest.approx(0.1)
    assert traffic.response_bytes == 0


# --- order


def test_answers_leave_in_the_order_of_the_requests() -> None:
    peer = Peer()
    peer.send(produce_frame(1) + fetch_frame(2) + produce_frame(3))
    assert peer.dispatcher.started == [1, 2, 3]
    peer.dispatcher.answer(3)
    peer.dispatcher.answer(2)
    assert peer.answered == []
    peer.dispatcher.answer(1)
    assert peer.answered == [1, 2, 3]


def test_thousands_of_requests_in_one_packet_are_started_a_few_milliseconds_at_a_time() -> None:
    def answer_slowly(call: Call) -> None:
        time.sleep(0.000_5)
        answer_at_once(call)

    peer = Peer(FakeDispatcher(answer_slowly))
    turns = peer.loop.next_turn = []
    peer.send(b"".join(map(metadata_frame, range(500))))
    assert len(peer.dispatcher.started) < 50
    assert not peer.transport.is_reading()
    while turns:
        before = len(peer.dispatcher.started)
        turns.pop()()
        assert len(peer.dispatcher.started) - before < 50
        assert len(turns) <= 1
    assert peer.answered == list(range(500))
    assert peer.transport.is_reading()
    assert peer.budget.used_bytes == 0


def test_no_more_requests_are_started_than_the_limit_however_many_arrive_at_once() -> None:
    peer = Peer(max_in_flight_requests_per_connection=10)
    peer.send(b"".join(map(produce_frame, range(200))) + produce_frame(200)[:30])
    assert peer.dispatcher.started == list(range(10))
    assert not peer.transport.is_reading()
    assert peer.budget.used_bytes > 190 * len(produce_frame(0)), "what has arrived is counted"
    for number in range(200):
        peer.dispatcher.answer(number)
        assert len(peer.dispatcher.started) == min(200, number + 11)
    peer.send(produce_frame(200)[30:])
    peer.dispatcher.answer(200)
    assert peer.answered == list(range(201))
    assert peer.budget.used_bytes == 0


def test_any_other_request_waits_for_all_before_it_and_holds_up_all_behind_it() -> None:
    peer = Peer()
    peer.send(produce_frame(1) + metadata_frame(2) + fetch_frame(3) + fetch_frame(4) + metadata_frame(5))
    assert peer.dispatcher.started == [1]
    peer.dispatcher.answer(1)
    assert peer.dispatcher.started == [1, 2]
    peer.dispatcher.answer(2)
    assert peer.dispatcher.started == [1, 2, 3, 4]
    peer.dispatcher.answer(4)
    assert peer.dispatcher.started == [1, 2, 3, 4]
    peer.dispatcher.answer(3)
    assert peer.dispatcher.started == [1, 2, 3, 4, 5]
    assert peer.answered == [1, 2, 3, 4]


def test_a_request_that_wants_no_answer_takes_its_turn_and_sends_nothing() -> None:
    peer = Peer()
    peer.send(produce_frame(1) + produce_frame(2, acks=0) + metadata_frame(3))
    peer.dispatcher.calls[1].no_reply()
    peer.dispatcher.answer(1)
    assert peer.dispatcher.started == [1, 2, 3]
    assert peer.answered == [1]


def test_requests_answered_while_they_start_do_not_nest() -> None:
    depths: list[int] = []
    depth = 0

    def nested(call: Call) -> None:
        nonlocal depth
        depth += 1
        depths.append(depth)
        answer_at_once(call)
        depth -= 1

    peer = Peer(FakeDispatcher(nested), max_in_flight_requests_per_connection=10_000)
    peer.send(b"".join(metadata_frame(number) for number in range(2_000)))
    assert peer.answered == list(range(2_000))
    assert set(depths) == {1}


# --- frames

SIZES = st.lists(st.sampled_from((0, 30_000, 70_000, 200_000)), min_size=1, max_size=4)


@given(SIZES, st.data())
def test_any_split_of_the_bytes_gives_the_same_requests(sizes: list[int], data: st.DataObject) -> None:
    frames = [
        padded_frame(number, size) if size else metadata_frame(number) for number, size in enumerate(sizes)
    ]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    seen: list[tuple[int, bytes]] = []

    def look(call: Call) -> None:
        seen.append((call.header.correlation_id, records_of(call)))
        answer_at_once(call)

    buffers = FrameBuffers(size_bytes=64 * KIB, keep=2, scratch_bytes=4 * KIB)
    peer = Peer(FakeDispatcher(look), buffers=buffers)
    for start, end in pairwise([0, *cuts, len(stream)]):
        peer.send(stream[start:end])
    assert [number for number, _ in seen] == list(range(len(sizes)))
    for frame, (_, records) in zip(frames, seen, strict=True):
        assert records in frame
        assert len(records) > len(frame) - 100 or not records
    assert peer.budget.used_bytes == 0


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 7])
def test_bytes_may_trickle_in(chunk_bytes: int) -> None:
    peer = Peer(FakeDispatcher(answer_at_once))
    peer.send(metadata_frame(1) + produce_frame(2) + padded_frame(3, 21_000), chunk_bytes)
    assert peer.answered == [1, 2, 3]
    assert peer.budget.used_bytes == 0


def records_of(call: Call) -> bytes:
    if call.header.api_key != PRODUCE:
        return b""
    return bytes(call.request.topic_data[0].partition_data[0].records)


@pytest.mark.parametrize("length", [0, -1, 7, -(2**31), 100 * MIB + 1, 2**31 - 1])
def test_a_length_that_no_request_can_have_closes_the_connection(length: int) -> None:
    peer = greeted(Peer())
    peer.send(length.to_bytes(4, "big", signed=True) + b"\0\3")
    assert peer.transport.aborted
    assert peer.dispatcher.calls == []
    assert peer.budget.used_bytes == 0


def test_requests_in_front_of_bad_bytes_leave_nothing_behind() -> None:
    peer = Peer()
    peer.send(produce_frame(1) + (0).to_bytes(4, "big"))
    assert peer.transport.aborted
    assert peer.budget.used_bytes == 0


def test_a_body_that_does_not_decode_closes_the_connection() -> None:
    peer = Peer()
    broken = metadata_frame(1)[4:] + b"too much"
    peer.send(len(broken).to_bytes(4, "big") + broken)
    assert peer.transport.aborted
    assert peer.budget.used_bytes == 0


def test_a_client_without_an_answer_yet_may_send_only_a_small_frame() -> None:
    limit = 512 * KIB
    too_large = Peer(max_first_frame_bytes=limit)
    too_large.send((limit + 1).to_bytes(4, "big"))
    assert too_large.transport.aborted

    largest = Peer(max_first_frame_bytes=limit)
    largest.send(padded_frame(1, limit + 4))
    assert largest.dispatcher.started == [1]
    largest.send((limit + 1).to_bytes(4, "big"))
    assert largest.transport.aborted, "there is no answer yet"

    answered = greeted(Peer(max_first_frame_bytes=limit))
    answered.send(padded_frame(2, limit + 5))
    assert answered.dispatcher.started == [2]


def test_memory_is_taken_for_what_arrives_and_not_for_what_is_claimed() -> None:
    peer = greeted(Peer())
    peer.send((90 * MIB).to_bytes(4, "big") + b"\0\0\0\3\0\0\0\1\0\0")
    assert peer.budget.used_bytes < 2 * MIB
    peer.send(bytes(3 * MIB))
    assert peer.budget.used_bytes < 7 * MIB
    peer.lose()
    assert peer.budget.used_bytes == 0


# --- the budget


def test_without_room_nothing_more_is_read_until_bytes_are_given_back() -> None:
    budget = make_budget(8 * MIB, MIB)
    busy = filled(budget, 7 * MIB)
    waiting = greeted(Peer(budget=budget))
    waiting.send(padded_frame(2, 800_000))
    assert not waiting.transport.is_reading()
    assert waiting.dispatcher.started == []
    assert budget.used_bytes <= 7 * MIB + 256 * KIB
    busy.give_back(MIB)
    assert waiting.transport.is_reading()
    waiting.deliver()
    assert waiting.dispatcher.started == [2]
    assert records_of(waiting.dispatcher.calls[0]) in padded_frame(2, 800_000)


def test_small_requests_are_read_and_answered_while_large_ones_wait_for_memory() -> None:
    budget = make_budget(8 * MIB, MIB)
    filled(budget, 7 * MIB)
    large, small = greeted(Peer(budget=budget)), greeted(Peer(budget=budget))
    large.send(padded_frame(1, 800_000))
    assert not large.transport.reading
    for number in range(100):
        small.send(padded_frame(number, 50_000), chunk_bytes=7_000)
        small.dispatcher.answer(number)
    assert small.answered == list(range(100))
    assert not large.transport.reading


def test_connections_of_an_address_get_room_in_the_order_in_which_they_asked() -> None:
    budget = make_budget(8 * MIB, MIB)
    busy = filled(budget, 7 * MIB)
    first, second = greeted(Peer(budget=budget)), greeted(Peer(budget=budget))
    first.send(padded_frame(2, 900_000))
    second.send(padded_frame(3, 300_000))
    assert not first.transport.is_reading()
    assert not second.transport.is_reading()
    busy.give_back(MIB)
    assert (first.transport.is_reading(), second.transport.is_reading()) == (True, False)
    first.deliver()
    first.dispatcher.answer(2)
    assert second.transport.is_reading()
    second.deliver()
    assert second.dispatcher.started == [3]


def test_half_read_frames_do_not_wait_for_each_other_for_ever() -> None:
    budget = make_budget(3 * MIB, 3 * MIB)
    peers = [greeted(Peer(budget=budget)) for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.send(padded_frame(number, 2 * MIB + 500_000)[:800_000])
    assert [peer.dispatcher.started for peer in peers] == [[], [], []]
    for number, peer in enumerate(peers):
        peer.send(padded_frame(number, 2 * MIB + 500_000)[800_000:])
    for _ in peers:
        for number, peer in enumerate(peers):
            peer.deliver()
            if peer.dispatcher.started and not peer.answered:
                peer.dispatcher.answer(number)
    assert [peer.answered for peer in peers] == [[0], [1], [2]]
    assert budget.used_bytes == 0


def test_a_connection_that_goes_away_while_it_waits_holds_nobody_up() -> None:
    budget = make_budget(8 * MIB, MIB)
    busy = filled(budget, 7 * MIB)
    gone, next_one = greeted(Peer(budget=budget)), greeted(Peer(budget=budget))
    gone.send(padded_frame(2, 900_000))
    next_one.send(padded_frame(3, 600_000))
    gone.lose()
    busy.close()
    next_one.deliver()
    assert next_one.dispatcher.started == [3]
    next_one.dispatcher.answer(3)
    assert budget.used_bytes == 0


def test_a_connection_that_goes_away_as_the_only_one_takes_nothing_more() -> None:
    budget = make_budget(8 * MIB, MIB)
    busy = filled(budget, 7 * MIB)
    gone = greeted(Peer(budget=budget))
    gone.send(padded_frame(2, 700_000))
    assert not gone.transport.reading
    gone.lose()
    busy.close()
    assert budget.used_bytes == 0


def test_many_small_requests_stop_the_reading_too() -> None:
    budget = make_budget(800 * KIB, 100 * KIB)
    peer = Peer(budget=budget)
    for number in range(20):
        peer.send(padded_frame(number, 30_000))
    assert not peer.transport.reading
    assert budget.used_bytes < 400 * KIB
    for number in range(20):
        peer.dispatcher.answer(number)
        peer.deliver()
    assert peer.answered == list(range(20))
    assert budget.used_bytes == 0


def test_one_connection_is_not_read_further_ahead_than_16_mib_and_one_frame() -> None:
    peer = greeted(Peer())
    for number in range(40):
        peer.send(padded_frame(number, MIB))
    assert not peer.transport.reading
    assert peer.budget.used_bytes <= 17 * MIB
    for number in range(40):
        peer.dispatcher.answer(number)
        peer.deliver()
    assert peer.answered == list(range(40))


def test_trickling_connections_cost_little_more_than_what_they_have_sent() -> None:
    budget = make_budget(512 * MIB, 100 * MIB)
    peers = [greeted(Peer(budget=budget)) for _ in range(300)]
    for peer in peers:
        peer.send((90 * MIB).to_bytes(4, "big") + b"\0\0\0\3\0\0\0\1\0\0" + bytes(8_000))
    assert budget.used_bytes <= 300 * 16 * KIB
    assert sum(len(peer.connection._frame or b"") for peer in peers) <= 300 * 16 * KIB


# --- clients that hold memory while others wait


STALL_SECONDS = 5.0


def tick(budget: ByteBudget, peers: list[Peer], seconds: int) -> None:
    """Let time pass for all, one second after the other, as a node does."""
    for _ in range(seconds):
        for loop in {id(peer.loop): peer.loop for peer in peers}.values():
            loop.advance(1)
        for account, why in budget.stalled(peers[0].loop.time()):
            account.owner.give_way(why)
        for peer in peers:
            peer.deliver()


def stalled_peers(budget: ByteBudget, loop: FakeLoop, count: int) -> list[Peer]:
    """Clients that declare 9 MiB each, send as much of it as is read, and then fall silent."""
    peers = [greeted(Peer(budget=budget, loop=loop)) for _ in range(count)]
    for peer in peers:
        peer.send((9 * MIB).to_bytes(4, "big") + b"\0\0\0\3\0\0\0\1\0\0" + bytes(8 * MIB))
    return peers


def test_eight_stalled_large_frames_hold_up_no_small_request_and_give_way_to_large_ones() -> None:
    budget, loop = make_budget(51 * MIB, 10 * MIB, stall_seconds=STALL_SECONDS), FakeLoop()
    attackers = stalled_peers(budget, loop, 8)
    assert budget.used_bytes <= 51 * MIB
    assert any(not peer.transport.reading for peer in attackers), "the memory for large frames is used up"
    other = greeted(Peer(budget=budget, loop=loop))
    for number in range(50):
        other.send(produce_frame(number))
        other.dispatcher.answer(number)
    assert other.answered == list(range(50))
    # A large one of the same address waits until the first of them has given way, and no longer.
    other.send(padded_frame(50, 900_000))
    tick(budget, [other, *attackers], 7)
    assert other.dispatcher.started[-1] == 50
    closed = [peer for peer in attackers if peer.transport.aborted]
    assert closed
    assert {why for peer in closed for why in peer.dispatcher.closing_reasons} == {Stall.FRAME.value}


def test_large_requests_of_another_address_do_not_wait_for_those_of_one() -> None:
    budget, loop = make_budget(51 * MIB, 10 * MIB), FakeLoop()
    stalled_peers(budget, loop, 8)
    other = greeted(Peer(budget=budget, loop=loop, host="10.0.0.2"))
    for number in range(5):
        other.send(padded_frame(number, 900_000))
        other.dispatcher.answer(number)
    assert other.answered == list(range(5))


def test_a_frame_that_only_trickles_gives_way_too_and_one_that_gets_on_does_not() -> None:
    budget, loop = make_budget(40 * MIB, 10 * MIB, stall_seconds=STALL_SECONDS), FakeLoop()
    filled(budget, 25 * MIB - 10)
    header = b"\0\0\0\3\0\0\0\1\0\0"
    slow, quick = (greeted(Peer(budget=budget, loop=loop, host=host)) for host in ("10.0.0.1", "10.0.0.2"))
    for peer in (slow, quick):
        peer.send((9 * MIB).to_bytes(4, "big") + header + bytes(MIB))
    waiting = greeted(Peer(budget=budget, loop=loop, host="10.0.0.3"))
    waiting.send((9 * MIB).to_bytes(4, "big") + header + bytes(8 * MIB))
    for _ in range(8):
        slow.send(b"x")
        quick.send(bytes(300 * KIB))
        tick(budget, [slow, quick, waiting], 1)
    assert slow.transport.aborted
    assert not quick.transport.aborted


def test_a_slow_frame_is_left_alone_while_nobody_waits() -> None:
    budget, loop = make_budget(51 * MIB, 10 * MIB, stall_seconds=STALL_SECONDS), FakeLoop()
    (slow,) = stalled_peers(budget, loop, 1)
    tick(budget, [slow], 50)
    assert not slow.transport.aborted


def test_a_client_that_does_not_read_its_answers_gives_way_while_others_wait() -> None:
    budget, loop = make_budget(51 * MIB, 10 * MIB, stall_seconds=STALL_SECONDS), FakeLoop()
    deaf = [greeted(Peer(budget=budget, loop=loop, host=f"10.0.1.{number}")) for number in range(5)]
    for peer in deaf:
        peer.transport.takes_writes = False
        peer.send(fetch_frame(1))
        peer.dispatcher.answer(1, 10 * MIB)
    other = greeted(Peer(budget=budget, loop=loop))
    other.send(padded_frame(1, 900_000))
    assert not other.transport.reading
    tick(budget, [other, *deaf], 7)
    assert other.dispatcher.started == [1]
    assert any(peer.dispatcher.closing_reasons == [Stall.ANSWERS.value] for peer in deaf)


def test_long_polls_of_a_client_that_holds_much_are_answered_while_others_wait() -> None:
    budget, loop = make_budget(51 * MIB, 10 * MIB, stall_seconds=STALL_SECONDS), FakeLoop()
    filled(budget, 44 * MIB)
    poller, other = (greeted(Peer(budget=budget, loop=loop)) for _ in range(2))
    poller.send(fetch_frame(1) + padded_frame(2, 200_000))
    hurried: list[int] = []
    for call in poller.dispatcher.calls:
        call.on_hurry = lambda: hurried.append(1)
    other.send(padded_frame(1, 900_000))
    assert not other.transport.reading
    tick(budget, [other, poller], 7)
    assert hurried
    assert not poller.transport.aborted


def test_answers_that_wait_behind_a_slow_one_are_counted_and_no_more_requests_start() -> None:
    peer = greeted(Peer())
    peer.send(b"".join(fetch_frame(number) for number in range(10)))
    assert peer.dispatcher.started == list(range(10))
    for number in range(1, 4):
        peer.dispatcher.answer(number, 10 * MIB)
    assert peer.budget.used_bytes > 30 * MIB
    peer.send(fetch_frame(10))
    assert peer.dispatcher.started == list(range(10)), "30 MiB of answers wait to be sent"
    for number in (0, *range(4, 10)):
        peer.dispatcher.answer(number)
    peer.deliver()
    peer.dispatcher.answer(10)
    assert peer.answered == list(range(11))
    assert peer.budget.used_bytes == 0


def test_a_connection_with_too_many_requests_under_way_is_not_read() -> None:
    peer = Peer(max_in_flight_requests_per_connection=3)
    peer.send(fetch_frame(1) + fetch_frame(2), 100)
    assert peer.transport.is_reading()
    peer.send(fetch_frame(3))
    assert not peer.transport.is_reading()
    peer.dispatcher.answer(2)
    assert not peer.transport.is_reading()
    peer.dispatcher.answer(1)
    assert peer.transport.is_reading()


# --- a client that does not read


def test_no_request_starts_while_a_client_does_not_take_its_answers() -> None:
    peer = Peer()
    peer.transport.takes_writes = False
    peer.send(fetch_frame(1) + fetch_frame(2) + metadata_frame(3))
    peer.dispatcher.answer(1, 100_000)
    assert not peer.transport.is_reading()
    peer.dispatcher.answer(2, 100_000)
    assert peer.dispatcher.started == [1, 2]
    assert peer.budget.used_bytes > 200_000
    peer.take_answers()
    assert peer.dispatcher.started == [1, 2, 3]
    assert peer.transport.is_reading()
    assert peer.answered == [1, 2]
    peer.dispatcher.answer(3)
    assert peer.budget.used_bytes == 0


# --- deadlines


def test_a_new_connection_has_to_say_something() -> None:
    peer = Peer(handshake_deadline_ms=10_000)
    peer.loop.advance(9.9)
    assert not peer.transport.aborted
    peer.loop.advance(0.2)
    assert peer.transport.aborted


def test_the_first_request_must_be_complete_within_the_handshake_deadline() -> None:
    peer = Peer(handshake_deadline_ms=10_000, frame_deadline_ms=60_000)
    for byte in metadata_frame(1)[:20]:
        peer.send(bytes([byte]))
        peer.loop.advance(0.4)
    assert not peer.transport.aborted
    peer.loop.advance(2.1)
    assert peer.transport.aborted


@pytest.mark.parametrize("arrived_bytes", [1, 3, 4, 12])
def test_a_frame_has_a_deadline_from_its_first_byte_on(arrived_bytes: int) -> None:
    peer = greeted(Peer(frame_deadline_ms=60_000))
    peer.send(metadata_frame(1)[:arrived_bytes])
    peer.loop.advance(59.9)
    assert not peer.transport.aborted
    peer.loop.advance(0.2)
    assert peer.transport.aborted


def test_every_frame_has_a_deadline_of_its_own() -> None:
    """Reads that always end within a length: no frame inherits the time of the one before."""
    peer = greeted(Peer(FakeDispatcher(), frame_deadline_ms=60_000))
    stream = b"".join(fetch_frame(number) for number in range(5))
    size = len(fetch_frame(0))
    peer.send(stream[:2])
    for number in range(4):
        peer.loop.advance(20)
        peer.send(stream[2 + number * size : 2 + (number + 1) * size])
    assert not peer.transport.aborted
    assert peer.dispatcher.started == [0, 1, 2, 3]


def test_requests_of_a_client_that_is_gone_are_counted_while_they_are_worked_on() -> None:
    peer = greeted(Peer())
    frames = [padded_frame(number, MIB) for number in range(3)]
    peer.send(b"".join(frames))
    for call in peer.dispatcher.calls[:2]:
        call.keep_frame()
    peer.lose()
    assert peer.budget.used_bytes == 2 * (MIB - 4), "the third is not in use any more"
    peer.dispatcher.answer(2)
    assert peer.budget.used_bytes == 2 * (MIB - 4)
    peer.dispatcher.answer(0)
    assert peer.budget.used_bytes == MIB - 4
    peer.dispatcher.calls[1].abort()
    assert peer.budget.used_bytes == 0
    assert not peer.budget._accounts


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_request_that_is_over_does_not_wait_for_the_garbage_collector(is_gone: bool) -> None:
    peer = greeted(Peer())
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Call) for each in gc.get_objects())
        for number in range(5):
            peer.send(padded_frame(number, 100 * KIB))
            peer.dispatcher.calls[number].keep_frame()
        if is_gone:
            peer.lose()
        for number in range(5):
            peer.dispatcher.answer(number)
        peer.dispatcher.calls.clear()
        assert sum(isinstance(each, Call) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_request_without_an_answer_does_not_wait_for_the_garbage_collector_either() -> None:
    peer = greeted(Peer())
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Call) for each in gc.get_objects())
        peer.send(padded_frame(0, 100 * KIB))
        peer.dispatcher.calls.pop().abort()
        peer.lose()
        assert sum(isinstance(each, Call) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_request_that_was_given_up_is_not_counted_when_its_client_is_gone() -> None:
    peer = greeted(Peer())
    peer.send(padded_frame(1, MIB))
    peer.dispatcher.calls[0].keep_frame()
    peer.dispatcher.calls[0].abort()
    peer.lose()
    assert peer.budget.used_bytes == 0


@pytest.mark.parametrize("first_bytes", [4, 5, 6, 100])
def test_only_produce_may_send_more_than_16_mib(first_bytes: int) -> None:
    size = 17 * MIB
    for frame, is_taken in ((metadata_frame(1), False), (fetch_frame(1), False), (produce_frame(1), True)):
        peer = greeted(Peer())
        announced = size.to_bytes(4, "big") + frame[4:] + bytes(100_000)
        peer.send(announced[:first_bytes])
        peer.send(announced[first_bytes:])
        assert peer.transport.aborted is not is_taken
        if not is_taken:
            assert "all but Produce" in peer.dispatcher.closing_reasons[0]


def test_a_frame_that_has_begun_is_read_to_its_end_however_many_requests_are_under_way() -> None:
    peer = greeted(Peer(frame_deadline_ms=1_000, max_in_flight_requests_per_connection=1))
    peer.send(fetch_frame(1) + fetch_frame(2)[:10])
    assert peer.transport.is_reading()
    peer.send(fetch_frame(2)[10:] + fetch_frame(3))
    assert not peer.transport.is_reading()
    peer.loop.advance(30)
    assert not peer.transport.aborted
    for number in (1, 2, 3):
        peer.dispatcher.answer(number)
        peer.deliver()
    assert peer.answered == [1, 2, 3]


def test_a_late_frame_is_forgiven_while_the_node_itself_does_not_read() -> None:
    peer = greeted(Peer(frame_deadline_ms=1_000))
    peer.transport.takes_writes = False
    peer.send(fetch_frame(1) + fetch_frame(2)[:10])
    peer.dispatcher.answer(1, 100_000)
    assert not peer.transport.reading
    peer.loop.advance(30)
    assert not peer.transport.aborted
    peer.take_answers()
    peer.loop.advance(1.1)
    assert peer.transport.aborted


def test_a_client_that_waits_for_room_is_not_late_but_is_not_waited_for_for_ever() -> None:
    budget = make_budget(8 * MIB, MIB)
    filled(budget, 7 * MIB)
    waiting = greeted(Peer(budget=budget, frame_deadline_ms=1_000, idle_timeout_ms=100_000))
    waiting.send(padded_frame(2, 900_000))
    waiting.loop.advance(50)
    assert not waiting.transport.aborted
    waiting.loop.advance(52)
    assert waiting.transport.aborted


def test_a_silent_connection_is_closed_after_the_idle_timeout() -> None:
    peer = greeted(Peer(idle_timeout_ms=600_000))
    peer.loop.advance(599)
    peer.send(metadata_frame(1))
    peer.dispatcher.answer(1)
    peer.loop.advance(599)
    assert not peer.transport.aborted
    peer.loop.advance(2)
    assert peer.transport.aborted


def test_a_connection_is_not_idle_while_a_request_of_it_runs() -> None:
    peer = greeted(Peer(idle_timeout_ms=600_000))
    peer.send(fetch_frame(1))
    peer.loop.advance(3_600)
    assert not peer.transport.aborted
    peer.dispatcher.answer(1)
    peer.loop.advance(599)
    assert not peer.transport.aborted
    peer.loop.advance(2)
    assert peer.transport.aborted


def test_a_lost_connection_leaves_no_timer() -> None:
    peer = greeted(Peer())
    peer.send(metadata_frame(1)[:5])
    peer.lose()
    assert peer.loop.armed == 0


# --- buffers


@given(st.data())
def test_a_buffer_is_not_used_again_while_a_request_needs_it(data: st.DataObject) -> None:
    """Two clients send large frames, some of which wait behind others; each request sees its own records."""
    buffers = FrameBuffers(size_bytes=64 * KIB, keep=2, scratch_bytes=4 * KIB)
    seen: list[tuple[int, bytes]] = []
    dispatchers = [
        FakeDispatcher(lambda call: seen.append((call.header.correlation_id, records_of(call))))
    ] * 2
    peers = [Peer(dispatcher, buffers=buffers) for dispatcher in dispatchers]
    streams = []
    expected: dict[int, bytes] = {}
    for client in range(2):
        frames = []
        for number in range(3):
            correlation_id = client * 10 + number
            size = data.draw(st.sampled_from((17_000, 40_000, 90_000)))
            expected[correlation_id] = padded_frame(correlation_id, size)
            frames += [expected[correlation_id], metadata_frame(100 + correlation_id)]
        streams.append(b"".join(frames))
    while any(streams):
        client = data.draw(st.sampled_from([number for number in range(2) if streams[number]]))
        count = data.draw(st.sampled_from((3_000, 50_000, 200_000)))
        peers[client].send(streams[client][:count])
        streams[client] = streams[client][count:]
        if data.draw(st.booleans()):
            answer_all(dispatchers[0])
    while len(seen) < 12:
        answer_all(dispatchers[0])
        for peer in peers:
            peer.deliver()
    for correlation_id, records in seen:
        if correlation_id < 100:
            assert records in expected[correlation_id]
            assert len(records) > len(expected[correlation_id]) - 100


def answer_all(dispatcher: FakeDispatcher) -> None:
    for call in list(dispatcher.calls):
        dispatcher.calls.remove(call)
        answer_at_once(call)


# --- closing


def test_close_when_answered_waits_for_the_answers_and_starts_nothing_more() -> None:
    peer = Peer()
    peer.send(fetch_frame(1) + fetch_frame(2) + metadata_frame(3))
    peer.connection.close_when_answered()
    assert not peer.transport.reading
    peer.dispatcher.answer(1)
    assert not peer.transport.is_closing()
    peer.dispatcher.answer(2)
    assert peer.transport.is_closing()
    assert not peer.transport.aborted
    assert peer.answered == [1, 2]
    assert peer.dispatcher.started == [1, 2]
    peer.lose()
    assert peer.budget.used_bytes == 0


def test_close_when_answered_closes_an_idle_connection_at_once() -> None:
    peer = greeted(Peer())
    peer.connection.close_when_answered()
    assert peer.transport.closing


@pytest.mark.parametrize("way", ["close_when_answered", "connection_lost"])
def test_requests_that_wait_for_something_are_told_to_hurry(way: str) -> None:
    peer = Peer()
    peer.send(fetch_frame(1) + fetch_frame(2))
    hurried: list[int] = []
    for number, call in enumerate(peer.dispatcher.calls, 1):
        call.on_hurry = partial(hurried.append, number)
    peer.dispatcher.answer(2)
    arguments: tuple[Any, ...] = (None,) if way == "connection_lost" else ()
    getattr(peer.connection, way)(*arguments)
    assert hurried == [1], "the second has its answer"


def test_an_answer_to_a_client_that_is_gone_is_dropped() -> None:
    peer = Peer()
    peer.send(fetch_frame(1))
    peer.lose()
    peer.dispatcher.answer(1)
    assert peer.budget.used_bytes == 0
    assert peer.dispatcher.closed_connections == [peer.connection]


def test_a_connection_too_many_is_closed_at_once() -> None:
    dispatcher = FakeDispatcher()
    dispatcher.lets_in = False
    peer = Peer(dispatcher)
    assert peer.transport.aborted
    peer.lose()
    assert peer.loop.armed == 0


# --- everything at once


class AnyStory(RuleBasedStateMachine):
    """Three clients share a small budget and do whatever they like; nothing is lost, reordered or leaked."""

    LIMIT = 300 * KIB
    small_bytes = 24 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.loop = FakeLoop()
        self.budget = make_budget(self.LIMIT, 256 * KIB, small_bytes=self.small_bytes)
        self.buffers = FrameBuffers(size_bytes=64 * KIB, keep=2, scratch_bytes=8 * KIB)
        self.peers = [self.connect(host) for host in (1, 1, 2)]
        self.sent: list[list[int]] = [[], [], []]
        #: Numbers of the calls that were answered.
        self.given: list[set[int]] = [set(), set(), set()]
        self.numbers = 1

    def connect(self, host: int) -> Peer:
        return Peer(
            loop=self.loop,
            budget=self.budget,
            buffers=self.buffers,
            max_first_frame_bytes=256 * KIB,
            max_frame_bytes=256 * KIB,
            max_in_flight_requests_per_connection=4,
            host=f"10.0.0.{host}",
        )

    @rule(
        client=st.integers(0, 2),
        size=st.sampled_from((0, 0, 20_000, 60_000, 200_000)),
        chunk=st.sampled_from((977, 50_000, 10**6)),
    )
    def send(self, client: int, size: int, chunk: int) -> None:
        number, self.numbers = self.numbers, self.numbers + 1
        self.sent[client].append(number)
        frame = padded_frame(number, size) if size else metadata_frame(number)
        self.peers[client].send(frame, chunk)

    @rule(client=st.integers(0, 2), newest=st.booleans())
    def answer(self, client: int, newest: bool) -> None:
        calls = self.peers[client].dispatcher.calls
        open_calls = [call for call in calls if call.header.correlation_id not in self.given[client]]
        if open_calls:
            call = open_calls[-1 if newest else 0]
            self.given[client].add(call.header.correlation_id)
            self.peers[client].dispatcher.answer(call.header.correlation_id, 5_000)
            for peer in self.peers:
                peer.deliver()

    @rule(client=st.integers(0, 2), takes=st.booleans())
    def read_or_not(self, client: int, takes: bool) -> None:
        peer = self.peers[client]
        if takes:
            peer.take_answers()
            peer.deliver()
        elif not peer.transport.unsent:
            peer.transport.takes_writes = False

    @rule(client=st.integers(0, 2))
    def reconnect(self, client: int) -> None:
        self.peers[client].lose()
        self.peers[client] = self.connect(1 + client // 2)
        self.sent[client] = []
        self.given[client] = set()
        for peer in self.peers:
            peer.deliver()

    @precondition(lambda self: self.numbers > 1)
    @rule(client=st.integers(0, 2))
    def send_rubbish(self, client: int) -> None:
        peer = self.peers[client]
        if not peer.transport.arrived and peer.connection._frame is None:
            peer.send(b"\xff\xff\xff\xff")
            self.reconnect(client)

    @invariant()
    def requests_start_and_are_answered_in_order(self) -> None:
        for peer, sent in zip(self.peers, self.sent, strict=True):
            assert peer.dispatcher.started == sent[: len(peer.dispatcher.started)]
            assert peer.answered == sent[: len(peer.answered)]

    @invariant()
    def the_budget_is_never_far_over_its_limit(self) -> None:
        # Over the limit may be: answers, and what was read before the reading was stopped.
        over = 128 * KIB + 3 * (4 * 5_004 + 2 * 60_000)
        assert self.budget.used_bytes <= self.LIMIT + over

    def teardown(self) -> None:
        for _ in range(200):
            for client, peer in enumerate(self.peers):
                peer.take_answers()
                peer.deliver()
                self.answer(client, newest=False)
        for peer, sent in zip(self.peers, self.sent, strict=True):
            assert peer.answered == sent, "everything comes to an end once clients read and answers are given"
        assert self.budget.used_bytes == 0
        for peer in self.peers:
            peer.lose()
        assert self.budget.used_bytes == 0


TestAnyStory = AnyStory.TestCase
TestAnyStory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
