"""Snapshots that somebody reads are kept, and looked at again when nobody does any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidemill.control.image import MetadataImage
from tidemill.control.sharedmap import SharedMap
from tidemill.control.tables.images import Catalog, LeasedOffsets
from tidemill.kv.snapshots import SnapshotStore
from tidemill.log.compaction.policy import NO_FLOOR
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.snapshot_keeping import SnapshotKeeper

ONE, OTHER = BucketKey(1, 0, 0), BucketKey(1, 0, 1)


def test_a_bucket_is_pruned_once_when_the_last_reader_of_a_snapshot_has_gone() -> None:
    with ThreadPoolExecutor(1) as threads:
        keeper = SnapshotKeeper(MetadataImage, lambda *_: SnapshotStore(Path()), threads, 2)
        keeper.keep(ONE, 7)
        keeper.keep(ONE, 7)
        keeper.keep(OTHER, 7)
        keeper.let_go(ONE, 7)
        assert keeper.take_let_go() == set()
        keeper.let_go(ONE, 7)
        assert keeper.take_let_go() == {ONE}
        assert keeper.take_let_go() == set()
        keeper.keep(OTHER, 8)
        keeper.let_go(OTHER, 7)
        keeper.let_go(OTHER, 8)
        assert keeper.take_let_go() == {OTHER}


def test_a_leased_floor_is_looked_up_and_not_searched_for_in_all_leases() -> None:
    """Each answer to a follower asks for it."""
    offsets = SharedMap[int, LeasedOffsets]().update({1: {(0, 0): (5, 8)}})
    image = MetadataImage(catalog=Catalog(leased_offsets=offsets))
    with ThreadPoolExecutor(1) as threads:
        keeper = SnapshotKeeper(lambda: image, lambda *_: SnapshotStore(Path()), threads, 2)
        assert (keeper.leased_floor(ONE), keeper.leased_floor(OTHER)) == (5, NO_FLOOR)
