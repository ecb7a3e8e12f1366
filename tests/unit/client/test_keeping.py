"""Signs of life, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.virtual_loop import current_loop, run_virtual
from tidemill.client.keeping import keep_alive
from tidemill.errors import NodeUnavailable


def signs(*failures: Exception) -> list[float]:
    """When signs were given in a minute, at intervals of ten seconds; the first ones fail."""

    async def main() -> list[float]:
        loop, given, left = current_loop(), list[float](), list(failures)

        async def sign() -> None:
            given.append(round(loop.time()))
            if left:
                raise left.pop(0)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(keep_alive(10, sign), 61)
        return given

    return run_virtual(main, seed=1)


def test_a_sign_is_given_at_each_interval_until_the_task_is_cancelled() -> None:
    assert signs() == [10, 20, 30, 40, 50, 60]


def test_a_sign_that_fails_is_given_again_at_the_next_interval() -> None:
    assert signs(NodeUnavailable("no node there"), ConnectionResetError()) == [10, 20, 30, 40, 50, 60]


def test_a_mistake_in_the_code_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        signs(ZeroDivisionError())
