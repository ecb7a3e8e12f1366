"""Which errors are waited out, for how long, and that one shell awaits it all by the loop's clock."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TableCode, TableError, TidemillError
from tidemill.net.retry import RetryPolicy, is_transient, retry

LOST = NodeUnavailable("gone")


@pytest.mark.parametrize(
    "error",
    [
        NodeUnavailable("gone"),
        ApiError(ErrorCode.not_leader_or_follower, ""),
        ApiError(ErrorCode.coordinator_load_in_progress, ""),
    ],
)
def test_moves_and_lost_connections_are_waited_out(error: TidemillError) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "code",
    [ErrorCode.unknown_topic_or_partition, ErrorCode.kafka_storage_error, ErrorCode.invalid_config],
)
def test_missing_topics_broken_disks_and_refusals_are_reported_at_once(code: ErrorCode) -> None:
    assert not is_transient(ApiError(code, ""))


def test_codes_of_tables_say_themselves_whether_they_pass() -> None:
    assert is_transient(TableError(TableCode.state_not_ready, ""))
    assert not is_transient(TableError(TableCode.table_not_found, ""))


# --- the policy


@given(
    first=st.integers(0, 500),
    longest=st.integers(0, 2_000),
    failures=st.integers(1, 200),
    jitter=st.floats(0, 1),
)
def test_pauses_double_up_to_the_longest_and_lose_at_most_half(
    first: int, longest: int, failures: int, jitter: float
) -> None:
    policy = RetryPolicy(10_000, first, longest)
    pause = policy.pause_seconds(LOST, failures, 0.0, jitter)
    whole = min(longest, first * 2 ** (failures - 1)) / 1000
    assert pause is not None
    assert whole / 2 - 1e-9 <= pause <= whole + 1e-9


def test_a_pause_that_would_end_after_the_deadline_is_not_begun() -> None:
    policy = RetryPolicy(1_000, 100, 100)
    assert policy.pause_seconds(LOST, 1, 0.9) == pytest.approx(0.1)
    assert policy.pause_seconds(LOST, 1, 0.901) is None


def test_what_does_not_pass_is_reported_at_once() -> None:
    refused = ApiError(ErrorCode.invalid_config, "")
    assert RetryPolicy(1_000).pause_seconds(refused, 1, 0.0) is None


# --- the shell


class Attempts:
    """Fails with these errors, one after the other, and then gives their number."""

    def __init__(self, *errors: TidemillError) -> None:
        self._errors = list(errors)
        self.count = 0

    async def __call__(self) -> int:
        self.count += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.count


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, by a clock that moves with them."""
    made: list[float] = []
    loop_time = asyncio.BaseEventLoop.time

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: loop_time(loop) + sum(made))
    return made


async def test_it_is_tried_until_it_succeeds(pauses: list[float]) -> None:
    stale: list[int] = []
    attempts = Attempts(LOST, LOST, LOST)
    policy = RetryPolicy(60_000, 100, 250)
    done = await retry(attempts, policy, before_next=lambda: stale.append(1), jitter=lambda: 0.0)
    assert (done, len(stale)) == (4, 3)
    assert pauses == [0.1, 0.2, 0.25]


async def test_the_last_error_is_raised_when_the_time_is_over(pauses: list[float]) -> None:
    attempts = Attempts(*[NodeUnavailable(f"try {number}") for number in range(50)])
    with pytest.raises(NodeUnavailable, match="try 10"):
        await retry(attempts, RetryPolicy(1_050, 100, 100), jitter=lambda: 0.0)
    assert attempts.count == 11
    assert sum(pauses) == pytest.approx(1.0)


async def test_a_refusal_is_raised_as_it_is(pauses: list[float]) -> None:
    attempts = Attempts(LOST, ApiError(ErrorCode.invalid_config, "no"), LOST)
    with pytest.raises(ApiError, match="no"):
        await retry(attempts, RetryPolicy(1_000))
    assert (attempts.count, len(pauses)) == (2, 1)


async def test_the_last_error_is_raised_after_the_most_failures_however_long_that_takes(
    pauses: list[float],
) -> None:
    attempts = Attempts(*[NodeUnavailable(f"try {number}") for number in range(50)])
    with pytest.raises(NodeUnavailable, match="try 2"):
        await retry(attempts, RetryPolicy(None, 100_000, 100_000, failures_max=3), jitter=lambda: 0.0)
    assert (attempts.count, pauses) == (3, [100.0, 100.0])


async def test_only_the_codes_that_a_policy_names_are_tried_again(pauses: list[float]) -> None:
    policy = RetryPolicy(1_000, transient=frozenset({ErrorCode.unknown_topic_or_partition}))
    attempts = Attempts(ApiError(ErrorCode.unknown_topic_or_partition, "late"), LOST)
    with pytest.raises(type(LOST)):
        await retry(attempts, policy)
    assert (attempts.count, len(pauses)) == (2, 1)


async def test_a_clock_of_ones_own_makes_the_pauses(pauses: list[float]) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await retry(Attempts(LOST), RetryPolicy(1_000, 100, 100), jitter=lambda: 0.0, sleep=sleep)
    assert (slept, pauses) == ([0.1], [])
