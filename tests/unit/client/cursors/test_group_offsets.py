"""Positions beside the offsets of a group: what was stored comes back, and nothing else is taken for one."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.group_offsets import GroupOffsets
from tidemill.cursors.checkpoint import Checkpoint, Entry
from tidemill.cursors.errors import CheckpointCorrupt, CheckpointRegionMismatch
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region

TOPIC_ID = uuid4()
ORIGIN = UUID(int=5)
ENTRY = Entry(0, Position(17, 2, True), (18, 20))


class Coordinator:
    """Stands for the cluster: answers OffsetFetch with one partition."""

    def __init__(self, offset: int, metadata: str) -> None:
        self._committed = SimpleNamespace(
            partition_index=0, error_code=0, committed_offset=offset, metadata=metadata
        )

    async def to_coordinator(self, *_: Any, **__: Any) -> Any:
        topic = SimpleNamespace(partitions=[self._committed])
        return SimpleNamespace(groups=[SimpleNamespace(error_code=0, topics=[topic])])

    async def retrying(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        return await ask()


def offsets(metadata: str = "", *, name: str = "billing", topic: str = "orders") -> GroupOffsets:
    """The offsets of a cursor, of which this is stored."""
    cluster = cast(Cluster, Coordinator(ENTRY.position.offset, metadata))
    identity = Region(topic, TOPIC_ID).identity()
    return GroupOffsets(cluster, name, topic, identity, where=f"cursor {name!r}")


def stored(**cursor: str) -> str:
    """What a cursor has stored beside its offset."""
    return str(offsets(**cursor).body(0, ENTRY, ORIGIN)["committed_metadata"])


async def test_what_was_stored_comes_back() -> None:
    assert await offsets(stored()).read({0: ORIGIN}) == {0: ENTRY}
    # Of before the position was set from outside.
    assert await offsets(stored()).read({0: UUID(int=6)}) == {}


async def test_with_any_byte_flipped_it_is_refused_or_the_same() -> None:
    whole = stored()
    for at in range(len(whole)):
        for flip in range(1, 0x80):
            broken = f"{whole[:at]}{chr(ord(whole[at]) ^ flip)}{whole[at + 1 :]}"
            try:
                assert await offsets(broken).read({0: ORIGIN}) == {0: ENTRY}
            except CheckpointCorrupt as error:
                assert error.where == "cursor 'billing'"
                assert error.stored
                assert error.expected


async def test_with_any_bit_of_the_checkpoint_flipped_it_is_refused() -> None:
    whole = base64.b64decode(stored())
    for at in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            with pytest.raises(CheckpointCorrupt):
                await offsets(base64.b64encode(broken).decode()).read({0: ORIGIN})


async def test_what_was_cut_off_is_refused() -> None:
    whole = stored()
    for size in range(len(whole)):
        with pytest.raises(CheckpointCorrupt):
            await offsets(whole[:size]).read({0: ORIGIN})


async def test_a_position_of_another_cursor_or_region_is_told_with_what_was_expected() -> None:
    with pytest.raises(CheckpointRegionMismatch, match=r"another cursor.*stored: audit; expected: billing"):
        await offsets(stored(name="audit")).read({0: ORIGIN})
    with pytest.raises(
        CheckpointRegionMismatch, match=r"another region.*stored: a region with the digest \w+.*topic orders"
    ):
        await offsets(stored(topic="payments")).read({0: ORIGIN})


async def test_what_is_no_checkpoint_is_told_with_what_was_expected() -> None:
    with pytest.raises(CheckpointCorrupt, match=r"stored: '\?\?'; expected: a checkpoint in base64"):
        await offsets("??").read({0: ORIGIN})
    identity = b"of another length"
    broken = base64.b64encode(Checkpoint("billing", identity, {0: ENTRY}).encode()).decode()
    with pytest.raises(CheckpointCorrupt, match="17 bytes; expected: 32 or 48 bytes"):
        await offsets(broken).read({0: ORIGIN})
