"""The node's memory for requests and answers: who gets it, who waits, who has to give way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidemill.server.connections.budget import Account, BudgetLimits, ByteBudget, Stall

MIB = 2**20


class Client:
    """A connection: grows its frame by doubling, as the real one does, and remembers what it was told."""

    def __init__(self, budget: ByteBudget, address: str = "a") -> None:
        self.account: Account = budget.open(address, self)
        self.unwritten = 0
        self.told: list[Stall] = []

    def unwritten_bytes(self) -> int:
        return self.unwritten

    def give_way(self, why: Stall) -> None:
        self.told.append(why)

    def begin(self, frame_bytes: int, arrived: int = 0) -> None:
        whole = self.account.begin_frame(frame_bytes)
        size = frame_bytes if whole else min(frame_bytes, max(16, 2 * arrived))
        if not self.account.reserve(size):
            self.account.reserve_arrived(arrived)
            self.account.wait(size - arrived, lambda: None)

    def grow(self) -> bool:
        """Fill what is reserved and ask for as much again; True if the frame is complete."""
        account = self.account
        assert not account.is_waiting
        if account.reading_bytes == account.frame_bytes:
            account.frame_complete()
            return True
        count = min(account.frame_bytes, 2 * max(8, account.reading_bytes)) - account.reading_bytes
        account.moved_bytes += count
        if not account.reserve(count):
            account.wait(count, lambda: None)
        return False

    def read(self, frame_bytes: int) -> bool:
        """Read a whole frame; False if it has to wait on the way."""
        self.begin(frame_bytes)
        while not self.account.is_waiting:
            if self.grow():
                return True
        return False

    def answer(self) -> None:
        self.account.give_back(self.account.held_bytes)


def budget_of(total: int = 1_000, frame: int = 100, small: int = 10, **limits: float) -> ByteBudget:
    return ByteBudget(BudgetLimits(total, frame, small, **limits))


@pytest.mark.parametrize(
    ("total", "frame", "parts"),
    [
        (512 * MIB, 100 * MIB, (448, 348, 174, 448, 512)),
        (100 * MIB, 100 * MIB, (100, 50, 25, 150, 112)),
        (32 * MIB, 4 * MIB, (28, 24, 12, 28, 32)),
    ],
)
def test_the_parts_of_a_budget(total: int, frame: int, parts: tuple[int, ...]) -> None:
    limits = BudgetLimits(total, frame)
    found = (
        limits.large_bytes,
        limits.shared_bytes,
        limits.address_bytes,
        limits.leader_bytes,
        limits.small_limit_bytes,
    )
    assert tuple(size // MIB for size in found) == parts


@pytest.mark.parametrize("total", [100, 150, 1_000])
def test_a_lone_client_can_send_the_largest_frame(total: int) -> None:
    client = Client(budget_of(total))
    for _ in range(3):
        assert client.read(100)
        client.answer()


def test_connections_that_hold_little_have_a_reserve() -> None:
    budget = budget_of()
    hogs = [Client(budget, address) for address in "abcdefghijklmnopqrst"]
    for hog in hogs:
        hog.read(100)
    assert budget.used_bytes <= budget.limits.large_bytes
    assert budget.waiting
    small = [Client(budget, "a") for _ in range(12)]
    for client in small:
        assert client.read(10)
    assert budget.used_bytes <= 1_000


def test_one_address_gets_its_share_and_one_frame_and_leaves_the_rest_to_others() -> None:
    budget = budget_of()
    limits = budget.limits
    hogs = [Client(budget) for _ in range(20)]
    for hog in hogs:
        hog.read(100)
    assert limits.address_bytes // 2 < budget.used_bytes <= limits.address_bytes + limits.frame_bytes
    others = [Client(budget, "b") for _ in range(3)]
    assert all(other.read(100) for other in others)


def test_of_those_who_wait_the_address_that_holds_least_is_served_first() -> None:
    budget = budget_of()
    filler = Client(budget, "filler")
    filler.account.take(875)
    longest, rich, poor = (Client(budget, address) for address in ("longest", "rich", "poor"))
    rich.account.take(150)
    for client in (longest, rich, poor):
        client.begin(40)
    assert budget.waiting == 3
    filler.account.give_back(260)
    assert not longest.account.is_waiting, "there is a part for who waits longest"
    assert budget.waiting == 2
    filler.account.give_back(7)
    assert (rich.account.is_waiting, poor.account.is_waiting) == (True, False)
    filler.account.close()
    assert budget.waiting == 0


def test_half_read_frames_come_to_their_end_one_after_the_other() -> None:
    budget = budget_of(total=100)
    clients = [Client(budget) for _ in range(4)]
    for client in clients:
        client.begin(90, arrived=10)
    done = 0
    for _ in range(100):
        for client in clients:
            if client.account.frame_bytes and not client.account.is_waiting and client.grow():
                client.answer()
                done += 1
    assert done == len(clients)
    assert budget.used_bytes == 0


def test_whoever_leaves_gives_everything_back_and_is_not_served() -> None:
    budget = budget_of()
    filler = Client(budget, "filler")
    filler.account.take(900)
    leaving, staying = Client(budget), Client(budget)
    for client in (leaving, staying):
        client.begin(50, arrived=7)
    leaving.account.close()
    leaving.account.close()
    assert budget.used_bytes == 907
    filler.account.close()
    assert not staying.account.is_waiting
    staying.account.close()
    assert budget.used_bytes == 0
    assert not budget._addresses


def test_giving_back_more_than_was_taken_is_found() -> None:
    account = Client(budget_of()).account
    account.take(5)
    with pytest.raises(AssertionError, match="more bytes"):
        account.give_back(6)


def test_an_answer_has_room_within_the_share_of_its_address() -> None:
    budget = budget_of()
    limits = budget.limits
    assert budget.answer_bytes_max("a") == limits.address_bytes
    client = Client(budget)
    client.account.take(100)
    assert budget.answer_bytes_max("a") == limits.address_bytes - 100
    for address in "bcdefgh":
        Client(budget, address).account.take(100)
    assert budget.answer_bytes_max("z") == max(0, limits.shared_bytes - 800)
    client.account.take(limits.address_bytes)
    assert budget.answer_bytes_max("a") == 0


# --- giving way


def contended() -> tuple[ByteBudget, list[Client], Client]:
    """Two large frames under way, and one that waits for room."""
    budget = budget_of(stall_seconds=5, frame_seconds=60, answer_seconds=600)
    readers = [Client(budget, address) for address in "ab"]
    for reader in readers:
        reader.begin(90, arrived=30)
        assert not reader.account.is_waiting
    Client(budget, "filler").account.take(755)
    waiting = Client(budget, "c")
    waiting.begin(100)
    assert waiting.account.is_waiting
    return budget, readers, waiting


def names(budget: ByteBudget, now: float) -> list[tuple[str, Stall]]:
    return [(budget._accounts[account], why) for account, why in budget.stalled(now)]


def test_frames_that_stall_give_way_after_a_while_and_no_sooner() -> None:
    budget, readers, _ = contended()
    for second in range(5):
        assert Stall.FRAME not in {why for _, why in budget.stalled(second)}
    readers[1].account.moved_bytes += 60
    assert ("a", Stall.FRAME) in names(budget, 5)
    assert ("b", Stall.FRAME) not in names(budget, 5.5)


def test_a_trickle_is_no_progress() -> None:
    budget, readers, _ = contended()
    for second in range(5):
        budget.stalled(second)
        readers[0].account.moved_bytes += 1
        readers[1].account.moved_bytes += 2
    found = names(budget, 5)
    assert ("a", Stall.FRAME) in found, "90 bytes in 60 s would be 7.5 in 5 s"
    assert ("b", Stall.FRAME) not in found


def test_nobody_gives_way_while_nobody_waits() -> None:
    budget = budget_of()
    Client(budget).begin(90, arrived=30)
    assert [budget.stalled(second) for second in (0, 5, 10, 60)] == [[]] * 4


def test_the_time_of_a_stall_counts_from_when_somebody_waits() -> None:
    budget, _, waiting = contended()
    budget.stalled(0)
    waiting.account.close()
    budget.stalled(4)
    Client(budget, "d").begin(100)
    assert budget.waiting
    assert not {why for _, why in budget.stalled(6)} & {Stall.FRAME}


def test_no_more_give_way_than_are_needed_and_the_largest_first() -> None:
    budget = budget_of(stall_seconds=5)
    sizes = {"a": 190, "b": 150, "c": 170, "d": 180, "e": 160}
    for address, size in sizes.items():
        client = Client(budget, address)
        client.account.take(size)
        client.unwritten = size
    Client(budget, "w").read(100)
    assert budget.waiting
    budget.stalled(0)
    assert names(budget, 5) == [("a", Stall.ANSWERS)]


def test_as_many_of_an_address_give_way_as_bring_it_into_its_share() -> None:
    budget = budget_of(stall_seconds=5)
    for number in range(12):
        client = Client(budget, "a")
        client.account.take(50 + number)
        client.unwritten = 50 + number
    waiting = Client(budget, "a")
    waiting.begin(40)
    waited = waiting.account.is_waiting
    budget.stalled(0)
    for account, why in budget.stalled(5):
        assert why is Stall.ANSWERS
        account.close()
    assert (waited, waiting.account.is_waiting) == (True, False)
    assert budget.used_bytes > 200


def test_nobody_gives_way_to_an_address_that_has_used_up_its_own_share() -> None:
    budget = budget_of(stall_seconds=5)
    slow = Client(budget, "slow")
    slow.begin(90, arrived=40)
    hogs = [Client(budget, "hog") for _ in range(10)]
    for hog in hogs:
        hog.read(100)
    assert any(hog.account.is_waiting for hog in hogs)
    for second in range(30):
        assert "slow" not in dict(names(budget, second))


def test_small_holders_are_left_alone_unless_somebody_small_waits() -> None:
    budget = budget_of(stall_seconds=5)
    filler = Client(budget, "filler")
    filler.account.take(880)
    trickling = Client(budget, "t")
    trickling.begin(9)
    Client(budget, "w").read(100)
    budget.stalled(0)
    assert ("t", Stall.FRAME) not in names(budget, 5)
    filler.account.take(120)
    Client(budget, "s").read(10)
    budget.stalled(6)
    assert ("t", Stall.FRAME) in names(budget, 11)


def test_a_frame_that_begins_late_has_its_time_too() -> None:
    budget, readers, _ = contended()
    budget.stalled(0)
    for reader in readers:
        reader.account.frame_complete()
        reader.account.begin_frame(90)
    assert not {why for _, why in budget.stalled(5)} & {Stall.FRAME}
    assert ("a", Stall.FRAME) in names(budget, 10)


def test_answers_that_come_meanwhile_do_not_excuse_a_stalled_frame() -> None:
    budget, readers, _ = contended()
    for second in range(5):
        readers[0].unwritten = second % 2
        budget.stalled(second)
    assert "a" in dict(names(budget, 5))


def test_answers_that_are_read_are_progress() -> None:
    budget = budget_of(stall_seconds=5, answer_seconds=600)
    client = Client(budget, "a")
    client.account.take(900)
    client.account.moved_bytes = client.unwritten = 900
    Client(budget, "w").read(100)
    budget.stalled(0)
    client.unwritten = 890
    assert names(budget, 5) == []
    assert names(budget, 10) == [("a", Stall.ANSWERS)]


# --- everything at once


class AnyUse(RuleBasedStateMachine):
    """Clients of three addresses read frames, hold requests, take answers and go away."""

    LIMITS = BudgetLimits(1_000, 400, 20, stall_seconds=5)

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(self.LIMITS)
        self.clients = [Client(self.budget, "abc"[number % 3]) for number in range(9)]
        self.arrived = 0
        self.now = 0.0

    @rule(number=st.integers(0, 8), size=st.integers(1, 400), arrived=st.integers(0, 20))
    def begin(self, number: int, size: int, arrived: int) -> None:
        client = self.clients[number]
        if not client.account.frame_bytes and not client.account.is_waiting:
            client.begin(size, min(size, arrived))

    @rule(number=st.integers(0, 8))
    def grow(self, number: int) -> None:
        account = self.clients[number].account
        if account.frame_bytes and not account.is_waiting:
            self.clients[number].grow()

    @rule(number=st.integers(0, 8), size=st.integers(1, 30))
    def answer(self, number: int, size: int) -> None:
        client = self.clients[number]
        client.answer()
        client.account.take(size)
        client.account.give_back(size)

    @rule(number=st.integers(0, 8))
    def reconnect(self, number: int) -> None:
        self.clients[number].account.close()
        self.clients[number] = Client(self.budget, "abc"[number % 3])

    @precondition(lambda self: self.budget.waiting)
    @rule()
    def time_passes(self) -> None:
        self.now += 1
        for account, why in self.budget.stalled(self.now):
            if why is not Stall.REQUESTS:
                account.owner.give_way(why)
                account.close()
                number = next(n for n, client in enumerate(self.clients) if client.account is account)
                self.clients[number] = Client(self.budget, "abc"[number % 3])

    @invariant()
    def the_sums_are_right(self) -> None:
        accounts = [client.account for client in self.clients]
        assert self.budget.used_bytes == sum(account.total_bytes for account in accounts)
        assert self.budget.waiting == sum(account.is_waiting for account in accounts)
        assert self.budget._uncounted == sum(account._uncounted for account in accounts)
        for address in "abc":
            group = self.budget._addresses[address]
            mine = [account for account in accounts if account._address is group]
            assert group.held_bytes == sum(account.total_bytes for account in mine)

    @invariant()
    def the_limit_holds_but_for_what_arrived_before_there_was_room(self) -> None:
        limits = self.LIMITS
        counted = self.budget.used_bytes - self.budget._uncounted
        assert counted <= max(limits.leader_bytes, limits.small_limit_bytes)
        large = sum(client.account.total_bytes for client in self.clients if not client.account.is_small)
        assert large - self.budget._uncounted <= limits.leader_bytes
        assert self.budget._uncounted <= 9 * 20

    @invariant()
    def a_small_frame_waits_only_while_the_reserve_is_used_up(self) -> None:
        free = self.LIMITS.small_limit_bytes - (self.budget.used_bytes - self.budget._uncounted)
        for client in self.clients:
            if client.account.is_waiting and client.account.is_small:
                assert free < self.LIMITS.small_bytes

    def teardown(self) -> None:
        """Clients that send and nodes that answer: every frame comes to its end."""
        for _ in range(200):
            for client in self.clients:
                if client.account.frame_bytes and not client.account.is_waiting:
                    client.grow()
                client.answer()
        assert self.budget.waiting == 0
        assert not any(client.account.frame_bytes for client in self.clients)
        for client in self.clients:
            client.answer()
        assert self.budget.used_bytes == 0
        for client in self.clients:
            client.account.close()
        assert not self.budget._addresses


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(400, 1_000))
def test_frames_of_any_sizes_that_all_begin_at_once_are_all_read(sizes: list[int], total: int) -> None:
    budget = ByteBudget(BudgetLimits(total, 400, 20))
    clients = [Client(budget, "ab"[number % 2]) for number in range(len(sizes))]
    for client, size in zip(clients, sizes, strict=True):
        client.begin(size, arrived=1)
    for _ in range(12 * len(sizes)):
        for client in clients:
            if client.account.frame_bytes and not client.account.is_waiting and client.grow():
                client.answer()
    assert not any(client.account.frame_bytes for client in clients)
    assert budget.used_bytes == 0
