"""Work in threads: what a caller that is cancelled leaves behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tidemill.coordination.pools import run_to_end


def test_a_cancelled_caller_waits_for_the_end_and_an_error_is_not_reported_as_forgotten() -> None:
    reported: list[dict[str, Any]] = []
    begun, may_end = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        may_end.wait(120)
        raise OSError("a failed fsync")

    async def cancel_the_caller() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        with ThreadPoolExecutor(1) as threads:
            caller = asyncio.create_task(run_to_end(threads, fail))
            assert await asyncio.to_thread(begun.wait, 120)
            caller.cancel()
            await asyncio.wait([caller], timeout=0.01)
            assert not caller.done(), "the work goes on"
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await caller

    asyncio.run(cancel_the_caller())
    # asyncio reports such an error when its future goes away.
    gc.collect()
    assert reported == []


async def test_a_caller_gets_the_result_or_the_error() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert await run_to_end(threads, lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await run_to_end(threads, lambda: 1 // 0)
