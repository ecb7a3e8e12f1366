"""What a bucket does at its start when there is no state on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tidemill.errors import TableCode, TableError
from tidemill.kv.engine import KvResources
from tidemill.tables.bucket import Bucket
from tidemill.tables.scanners import BucketKey


def empty_log(*, first_offset: int) -> Any:
    """A log that had records up to ``first_offset``, all of which were deleted."""
    return SimpleNamespace(
        topic="shop.orders",
        index=0,
        topic_id=UUID(int=7),
        log=SimpleNamespace(failure=None, size_bytes=0),
        config=SimpleNamespace(compacts=True, deletes=True),
        log_start_offset=first_offset,
        high_watermark=first_offset,
        last_stable_offset=first_offset,
        subscribe=lambda key, wake: None,
        unsubscribe=lambda key: None,
    )


@asynccontextmanager
async def opened(directory: Path, log: Any) -> AsyncIterator[Bucket]:
    no_table: Callable[[], Any] = pytest.fail
    resources = KvResources(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)
    with ThreadPoolExecutor(1) as threads:
        bucket = Bucket(
            BucketKey(1, 0, 0),
            no_table,
            log,
            directory,
            resources,
            threads,
            lambda: 0,
            lambda: 0,
            max_decompressed_bytes=1,
        )
        bucket.start()
        yield bucket
        await bucket.close()


async def test_a_log_from_its_first_record_on_is_enough(tmp_path: Path) -> None:
    async with opened(tmp_path / "bucket", empty_log(first_offset=0)) as bucket:
        await bucket.ready(0, 30)
        assert bucket.applied_offset == 0


async def test_a_log_whose_first_records_were_deleted_is_not_taken_for_the_whole_table(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "bucket", empty_log(first_offset=5)) as bucket:
        with pytest.raises(TableError, match="cannot be rebuilt") as caught:
            await bucket.ready(0, 30)
        assert caught.value.table_code is TableCode.state_damaged
