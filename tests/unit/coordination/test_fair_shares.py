from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.fair_shares import Client, Shares


def fill(shares: Shares, *clients: Client) -> None:
    """Let the clients take places in turn until none gets another."""
    while takers := [client for client in clients if shares.refusal(client) is None]:
        for client in takers:
            if shares.refusal(client) is None:
                shares.take(client)


def test_one_connection_leaves_places_to_others_of_its_address_and_to_other_addresses() -> None:
    shares = Shares(100)
    fill(shares, Client("a", 1))
    assert len(shares) == 57
    fill(shares, *(Client("a", number) for number in range(2, 50)))
    assert len(shares) == 75
    assert shares.refusal(Client("a", 99)) == "the connections of a hold 75 of them"
    fill(shares, Client("b", 1))
    assert shares.of_address("b") >= 10
    assert shares.refusal(Client("c", 1)) is None


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_of_a_few_places_one_client_may_take_all(limit: int) -> None:
    shares = Shares(limit)
    fill(shares, Client("a", 1))
    assert len(shares) == limit
    assert shares.refusal(Client("b", 1)) == f"all {limit} are taken"


@given(st.integers(8, 200), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=400))
def test_whatever_three_addresses_take_a_fourth_finds_a_place(
    limit: int, wishes: list[tuple[str, int]]
) -> None:
    shares = Shares(limit)
    held: Counter[Client] = Counter()
    for address, connection in wishes:
        client = Client(address, connection)
        if shares.refusal(client) is None:
            shares.take(client)
            held[client] += 1
    assert len(shares) == held.total() <= limit
    if limit >= 20:
        assert shares.refusal(Client("d", 1)) is None
    for client, count in held.items():
        for _ in range(count):
            shares.give_back(client)
    assert len(shares) == 0
    assert shares.of_address("a") == 0


def test_giving_back_more_than_was_taken_is_found() -> None:
    with pytest.raises(AssertionError, match="more was given back"):
        Shares(3).give_back(Client("a", 1))
