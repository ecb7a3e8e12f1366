"""Bytes under way: limits of one connection and of all, in the order of asking, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidemill.cluster.byte_limit import ByteLimit, ByteShare

TOTAL, OF_ONE, CONNECTIONS = 100, 60, 4


class Reader:
    """A connection with frames to read."""

    def __init__(self, limit: ByteLimit, order: list[Reader]) -> None:
        self.share = ByteShare(limit, OF_ONE, self.go_on)
        self.frames: list[int] = []
        self.held: list[int] = []
        self.is_held = False
        self._order = order

    def go_on(self) -> None:
        while self.frames and not self.is_held and self.share.take_if_admitted(self.frames[0]):
            self.held.append(self.frames.pop(0))
            self._order.append(self)


class Readers(RuleBasedStateMachine):
    """Connections that read, answer, stop and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = ByteLimit(TOTAL)
        self.order: list[Reader] = []
        self.readers = [Reader(self.limit, self.order) for _ in range(CONNECTIONS)]

    @rule(which=st.integers(0, CONNECTIONS - 1), size=st.integers(1, 150))
    def arrives(self, which: int, size: int) -> None:
        self.readers[which].frames.append(size)
        self.readers[which].go_on()

    @rule(which=st.integers(0, CONNECTIONS - 1))
    def is_answered(self, which: int) -> None:
        reader = self.readers[which]
        if reader.held:
            answer = 5
            reader.share.take(answer)
            reader.share.give_back(reader.held.pop(0) + answer)

    @rule(which=st.integers(0, CONNECTIONS - 1))
    def stops_or_goes_on(self, which: int) -> None:
        reader = self.readers[which]
        reader.is_held = not reader.is_held
        if reader.is_held:
            reader.share.wait_no_more()
        else:
            reader.go_on()

    @rule(which=st.integers(0, CONNECTIONS - 1))
    def ends(self, which: int) -> None:
        old = self.readers[which]
        self.readers[which] = Reader(self.limit, self.order)
        old.frames.clear()
        old.share.close()
        old.share.give_back(7)  # A request that is over later.

    @invariant()
    def counts_are_right(self) -> None:
        assert self.limit.used_bytes == sum(sum(reader.held) for reader in self.readers)
        assert all(reader.share.held_bytes == sum(reader.held) for reader in self.readers)

    @invariant()
    def limits_hold_but_for_one_large_frame(self) -> None:
        assert self.limit.used_bytes <= TOTAL or sum(len(reader.held) for reader in self.readers) == 1
        assert all(sum(reader.held) <= OF_ONE or len(reader.held) == 1 for reader in self.readers)

    @invariant()
    def somebody_goes_on(self) -> None:
        waiting = [reader for reader in self.readers if reader.frames and not reader.is_held]
        assert not waiting or any(reader.held for reader in self.readers), (
            "all wait, and nobody holds anything"
        )

    def teardown(self) -> None:
        for reader in self.readers:
            reader.is_held = False
            reader.go_on()
        while any(reader.held for reader in self.readers):
            for reader in self.readers:
                if reader.held:
                    reader.share.give_back(reader.held.pop(0))
        assert not any(reader.frames for reader in self.readers), "everything was read in the end"


TestReaders = Readers.TestCase


def test_nobody_overtakes_a_large_frame_that_waits() -> None:
    limit, order = ByteLimit(TOTAL), list[Reader]()
    first, large, small = (Reader(limit, order) for _ in range(3))
    for reader, size in ((first, 50), (large, 60), (small, 10)):
        reader.frames.append(size)
        reader.go_on()
    assert order == [first]
    first.share.give_back(50)
    assert order == [first, large, small]
