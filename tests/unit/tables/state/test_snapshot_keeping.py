"""Snapshots that somebody reads are kept, and looked at again when nobody does any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidemill.control.image import MetadataImage
from tidemill.kv.snapshots import SnapshotStore
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
