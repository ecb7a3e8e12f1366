"""The runtime of a node: everything that it takes from the machine it runs on.

The default is the real machine. A simulation gives its own time, ids, disk and network, and then the same
``Node`` runs without threads, files and sockets. The event loop is the one that the node is started on.
Parts of a node get the piece they need, not the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.config.settings import Settings
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import MetadataStore
from tidemill.coordination.clock import Clock, LoopClock, boot_clock_ms, wall_clock_ms
from tidemill.coordination.ids import Ids, RandomIds
from tidemill.coordination.pools import Pools, thread_pool
from tidemill.errors import DiskFull
from tidemill.log.pace import MakePace, Pace
from tidemill.log.storage import LocalStorage, Storage
from tidemill.net.transport import TcpTransport, Transport
from tidemill.server.disk.data_directory import DataDirectory
from tidemill.server.disk.space import DiskSpace

if TYPE_CHECKING:
    from tidemill.kv.contract import KvEngine, KvLimits, MakeKvEngine

__all__ = ("Runtime", "open_metadata", "rocks_engine")


def rocks_engine(limits: KvLimits, give_up_reserve: Callable[[DiskFull], bool]) -> KvEngine:
    """RocksDB, loaded now: a node without tables goes without it."""
    from tidemill.kv.rocks.engine import make_engine

    return make_engine(limits, give_up_reserve)


def open_metadata(settings: Settings, path: Path, pools: Pools) -> MetadataStore:
    """The cluster's etcd, if the settings name one; else SQLite in a file."""
    if settings.cluster is None:
        return SqliteStore(path, pools)
    # gRPC is loaded only by a node of a cluster.
    from tidemill.server.cluster.etcd import open_etcd

    return open_etcd(settings)


@dataclass(frozen=True)
class Runtime:
    """Clocks, ids, executors, disk, metadata store and network of a node."""

    #: The time of day, for timestamps. It jumps when somebody sets the clock.
    wall_ms: Callable[[], int] = wall_clock_ms
    #: Makes the clock for intervals and timers, which starts at the time of day and goes on evenly.
    steady_clock: Callable[[Callable[[], int]], Clock] = LoopClock
    #: The clock of leases: even, and it goes on while the machine sleeps, because the leases do.
    session_ms: Callable[[], int] = boot_clock_ms
    ids: Ids = field(default_factory=RandomIds)
    #: Makes the executors of blocking work.
    pools: Pools = thread_pool
    #: Makes the throttles of worker threads, which keep to a rate by sleeping.
    pace: MakePace = Pace
    #: The data directory with its lock, and the space on its disk with a reserve of so many bytes.
    directory: Callable[[Path], DataDirectory] = DataDirectory
    disk_space: Callable[[Path, int], DiskSpace] = DiskSpace.with_reserve
    #: The files of logs below the data directory; the callback is told of writes that find no space.
    storage: Callable[[Path, Callable[[DiskFull], None]], Storage] = LocalStorage
    #: Keeps the state of tables; made when the node meets its first table.
    #: The callback is asked for more room on a full disk.
    kv_engine: MakeKvEngine = rocks_engine
    #: Opens the metadata; the path is where a store in a file has it, and its blocking work runs in a pool.
    metadata_store: Callable[[Settings, Path, Pools], MetadataStore] = open_metadata
    transport: Transport = field(default_factory=TcpTransport)
