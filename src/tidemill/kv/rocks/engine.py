"""RocksDB as the engine of a node: opens stores, all with the same resources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.errors import DiskFull
from tidemill.kv.contract import KvLimits
from tidemill.kv.files import Files
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksReader, RocksStore, open_read_only

__all__ = ("RocksEngine", "make_engine")


class RocksEngine:
    """``KvEngine`` by RocksDB: all stores share one cache and one memory budget."""

    def __init__(self, resources: RocksResources, files: Files | None = None) -> None:
        self.resources = resources
        self.files = files or Files()

    @property
    def give_up_reserve(self) -> Callable[[DiskFull], bool]:
        return self.resources.give_up_reserve

    @property
    def compactions_paused(self) -> bool:
        return self.resources.compactions_paused

    @compactions_paused.setter
    def compactions_paused(self, paused: bool) -> None:
        self.resources.compactions_paused = paused

    def tell_stores_of_pause(self) -> None:
        self.resources.tell_stores_of_pause()

    def open(self, path: str | Path, identity: bytes, *, first_offset: int = 0) -> RocksStore:
        return RocksStore.open(path, self.resources, identity, first_offset=first_offset)

    def open_read_only(self, path: str | Path, identity: bytes | None = None) -> RocksReader:
        return open_read_only(path, self.resources, identity)


def make_engine(limits: KvLimits, give_up_reserve: Callable[[DiskFull], bool]) -> RocksEngine:
    """The engine of a node."""
    return RocksEngine(
        RocksResources(
            block_cache_bytes=limits.block_cache_bytes,
            write_buffer_bytes=limits.write_buffer_bytes,
            give_up_reserve=give_up_reserve,
        )
    )
