from __future__ import annotations

import pytest

from tidemill.kv.resources import KvResources


@pytest.fixture
def resources() -> KvResources:
    return KvResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20)


@pytest.fixture
def small_resources() -> KvResources:
    """With memtables so small that a few hundred rows make files, and a few thousand make compactions."""
    return KvResources(
        block_cache_bytes=1 << 20,
        write_buffer_bytes=8 << 20,
        store_buffer_bytes=16 << 10,
        open_files_per_store=20,
    )
