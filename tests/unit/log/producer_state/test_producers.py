"""Producer states against a model that remembers everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.batches import make_batch
from tidemill.errors import ApiError, ErrorCode
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.records.batch import BatchHeader, parse_header

_TEMPLATE = parse_header(make_batch("x")[0])


def header(producer_id: int, epoch: int, sequence: int, count: int) -> BatchHeader:
    return _TEMPLATE._replace(
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        last_offset_delta=count - 1,
        record_count=count,
    )


class ProducerModel(RuleBasedStateMachine):
    """Every batch that was accepted, per producer; what to answer is read off that list."""

    def __init__(self) -> None:
        super().__init__()
        self.states = ProducerStates()
        #: producer -> (epoch, [(base sequence, count, offset)])
        self.model: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
        self.next_offset = 0
        self.forgetful = False

    def expected(self, batch: BatchHeader) -> ErrorCode | int | None:
        """An error, the offset of the earlier copy, or None if it is to be appended."""
        known = self.model.get(batch.producer_id)
        if known is None:
            strange = batch.base_sequence != 0 and not self.forgetful
            return ErrorCode.out_of_order_sequence_number if strange else None
        epoch, batches = known
        if batch.producer_epoch != epoch:
            if batch.producer_epoch < epoch:
                return ErrorCode.invalid_producer_epoch
            return ErrorCode.out_of_order_sequence_number if batch.base_sequence != 0 else None
        for sequence, count, offset in batches[-5:]:
            if (sequence, count) == (batch.base_sequence, batch.record_count):
                return offset
        sequence, count, _ = batches[-1]
        follows = batch.base_sequence == (sequence + count) % 2**31
        return None if follows else ErrorCode.out_of_order_sequence_number

    def send(self, batch: BatchHeader) -> None:
        expected = self.expected(batch)
        if isinstance(expected, ErrorCode):
            before = self.states.to_bytes()
            with pytest.raises(ApiError) as caught:
                self.states.check(batch)
            assert caught.value.code == expected
            assert self.states.to_bytes() == before
            return
        known = self.states.check(batch)
        assert (known.base_offset if known else None) == expected
        if known is None:
            self.states.record(batch, self.next_offset, now_ms=self.next_offset)
            epoch, batches = self.model.get(batch.producer_id, (-1, []))
            if epoch != batch.producer_epoch:
                batches = []
            batches = [*batches, (batch.base_sequence, batch.record_count, self.next_offset)]
            self.model[batch.producer_id] = (batch.producer_epoch, batches)
            self.next_offset += batch.record_count

    @rule(
        producer=st.integers(0, 2),
        epoch=st.integers(0, 2),
        sequence=st.integers(0, 12),
        count=st.integers(1, 4),
    )
    def send_anything(self, producer: int, epoch: int, sequence: int, count: int) -> None:
        self.send(header(producer, epoch, sequence, count))

    @precondition(lambda self: self.model)
    @rule(pick=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def send_next(self, pick: random.Random, count: int) -> None:
        producer, (epoch, batches) = pick.choice(sorted(self.model.items()))
        sequence, size, _ = batches[-1]
        self.send(header(producer, epoch, (sequence + size) % 2**31, count))

    @precondition(lambda self: self.model)
    @rule(pick=st.randoms(use_true_random=False))
    def send_again(self, pick: random.Random) -> None:
        producer, (epoch, batches) = pick.choice(sorted(self.model.items()))
        sequence, count, _ = pick.choice(batches[-7:])
        self.send(header(producer, epoch, sequence, count))

    @precondition(lambda self: self.forgetful)
    @rule(producer=st.integers(5, 6))
    def a_stranger_begins_just_before_the_wrap(self, producer: int) -> None:
        if producer not in self.model:
            self.send(header(producer, 0, 2**31 - 2, 2))

    @rule(ago=st.integers(0, 30))
    def expire(self, ago: int) -> None:
        limit = self.next_offset - ago
        gone = [key for key, (_, batches) in self.model.items() if batches[-1][2] < limit]
        assert self.states.expire(limit) == len(gone)
        for key in gone:
            del self.model[key]
        self.forgetful = self.forgetful or bool(gone)

    @rule()
    def restart(self) -> None:
        self.states = ProducerStates.from_bytes(self.states.to_bytes())

    @invariant()
    def same_producers(self) -> None:
        assert {producer for producer, _ in self.states} == set(self.model)
        assert self.states.forgetful == self.forgetful


TestProducerModel = ProducerModel.TestCase


def test_the_sequence_wraps_from_its_largest_value_to_zero() -> None:
    states = ProducerStates()
    states.forgetful = True
    last = 2**31 - 1
    states.record(header(1, 0, last - 1, 2), 0, 0)
    assert states.check(header(1, 0, 0, 3)) is None
    states.record(header(1, 0, 0, 3), 2, 0)
    known = states.check(header(1, 0, last - 1, 2))
    assert known is not None
    assert known.base_offset == 0


def test_a_batch_across_the_wrap_is_recognised_when_it_is_sent_again() -> None:
    states = ProducerStates()
    states.record(header(1, 0, 2**31 - 2, 5), 10, 0)
    known = states.check(header(1, 0, 2**31 - 2, 5))
    assert known is not None
    assert (known.base_offset, known.last_sequence) == (10, 2)
    assert states.check(header(1, 0, 3, 1)) is None


def test_the_sixth_last_batch_is_out_of_order() -> None:
    states = ProducerStates()
    for sequence in range(6):
        states.record(header(1, 0, sequence, 1), sequence, 0)
    assert states.check(header(1, 0, 1, 1)) is not None
    with pytest.raises(ApiError) as caught:
        states.check(header(1, 0, 0, 1))
    assert caught.value.code == ErrorCode.out_of_order_sequence_number
