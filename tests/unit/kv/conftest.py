from __future__ import annotations

import pytest

from tidemill.kv.rocks.resources import RocksResources


@pytest.fixture
def resources() -> RocksResources:
    return RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20)


@pytest.fixture
def small_resources() -> RocksResources:
    """With memtables so small that a few hundred rows make files, and a few thousand make compactions."""
    return RocksResources(
        block_cache_bytes=1 << 20,
        write_buffer_bytes=8 << 20,
        store_buffer_bytes=16 << 10,
        open_files_per_store=20,
    )
