"""The cursors that a cluster keeps, for people: listed, described, paused, reset and deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.cluster import (
    Mark,
    ask_coordinator,
    parts_of,
    position_body,
    where_of,
)
from tidemill.client.cursors.checkpoints.group_offsets import GroupOffsets
from tidemill.client.cursors.cursor import Start, names_offsets, resolve_starts
from tidemill.client.cursors.lag import Lag, PartitionLag, measure_lag
from tidemill.cursors.checkpoint import Entry, unpack_finished
from tidemill.cursors.errors import CursorInUse, CursorNotFound
from tidemill.cursors.position import Position
from tidemill.cursors.stored import NO_ORIGIN, Home
from tidemill.errors import ApiError, ConfigError, ErrorCode, TableCode, TableError
from tidemill.net.answers import checked

__all__ = (
    "CursorInfo",
    "CursorPartition",
    "add_partitions",
    "cursor_lag",
    "delete_cursor",
    "describe_cursor",
    "list_cursors",
    "pause_cursor",
    "plan_reset",
    "reset_cursor",
    "stored_entries",
)


@dataclass(frozen=True, slots=True)
class CursorPartition:
    """Where a cursor stands in a partition, and who owns it. ``alive`` says whether the owner is.

    ``mark`` tells a position that was set from one that is older than what is kept elsewhere.
    """

    partition: int
    position: Position
    finished: tuple[int, ...]
    epoch: int
    owner: str
    alive: bool
    committed_ms: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor that the cluster keeps. ``region`` says in words what it reads, ``identity`` in bytes.

    Unless its ``home`` is the cluster, its positions may be older than those that count.
    """

    name: str
    topic: str
    topic_id: UUID
    region: str
    paused: bool
    created_ms: int
    identity: bytes
    home: Home
    partitions: tuple[CursorPartition, ...]

    @property
    def is_position_kept(self) -> bool:
        """Whether the position is the cluster's, and not in a file or database of the owner's."""
        return self.home not in (Home.FILE, Home.DATABASE)

    @property
    def positions(self) -> dict[int, Position]:
        return {each.partition: each.position for each in self.partitions}

    @property
    def owners(self) -> list[str]:
        """Names of the owners whose lease has not ended."""
        return sorted({each.owner for each in self.partitions if each.alive})

    @property
    def committed_ms(self) -> int:
        """When a position of the cursor was last stored, in milliseconds; -1 if it has none."""
        return max((each.committed_ms for each in self.partitions), default=-1)


async def list_cursors(cluster: Cluster, topic: str | None = None) -> list[CursorInfo]:
    """The cursors of all nodes, or those over one topic, by name."""

    async def ask() -> list[CursorInfo]:
        await cluster.all_topics()
        found: dict[str, CursorInfo] = {}
        shards: set[int] = set()
        shard_count = 0
        for node_id in sorted(cluster.nodes):
            answer = await (await cluster.connection(node_id)).request("ListCursors", {"topic": topic})
            checked(answer, f"listing the cursors of node {node_id}")
            found |= {cursor.name: _info(cursor) for cursor in answer.cursors}
            shards.update(answer.shards)
            shard_count = max(shard_count, answer.shard_count)
        if len(shards) < shard_count:
            raise ApiError(
                ErrorCode.coordinator_not_available,
                f"{shard_count - len(shards)} of {shard_count} partitions of __cursors have no coordinator "
                "now; try again soon, or look at 'tidemill cluster status'",
            )
        return [found[name] for name in sorted(found)]

    return await cluster.retrying(ask)


async def describe_cursor(cluster: Cluster, name: str) -> CursorInfo:
    """Describe the cursor of that name. Raises ``CursorNotFound``."""
    return _info((await _ask(cluster, name, "DescribeCursor", {"name": name})).cursor)


async def cursor_lag(cluster: Cluster, info: CursorInfo) -> Lag:
    """How far a cursor's stored position is behind.

    A cursor whose topic is gone has a ``problem`` in each partition: it stays until somebody deletes it.
    """
    try:
        topic_id = (await cluster.topic(info.topic)).topic_id
        if topic_id == info.topic_id:
            return await measure_lag(cluster, info.topic, info.topic_id, info.positions)
        problem = f"topic {info.topic!r} was deleted and created again"
    except ApiError as error:
        if error.code not in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
            raise
        problem = f"topic {info.topic!r} was deleted"
    partitions = {
        each: PartitionLag(position.offset, position.offset, 0, 0.0, problem)
        for each, position in info.positions.items()
    }
    return Lag(0, 0.0, partitions)


async def pause_cursor(cluster: Cluster, name: str, *, paused: bool) -> CursorInfo:
    """Have a cursor deliver nothing until it is resumed, or resume it. Its owner hears of it in a moment."""
    body = {"name": name, "paused": int(paused), "force": False, "partitions": []}
    return _info((await _ask(cluster, name, "AlterCursor", body)).cursor)


async def plan_reset(
    cluster: Cluster, info: CursorInfo, to: Start, partitions: Iterable[int] | None = None
) -> dict[int, Position]:
    """The positions that ``reset_cursor`` would set.

    Raises ``ConfigError`` for a cursor that cannot be reset, and for offsets that its log does not have: the
    cursor could not be opened there.
    """
    if not info.is_position_kept:
        raise ConfigError(
            f"cursor {info.name!r} keeps its position in a {info.home.name.lower()}: open it and seek (if "
            "its log does not have the position, with if_lost), or delete the position there to begin anew"
        )
    chosen = list(info.positions) if partitions is None else sorted(set(partitions))
    missing = set(chosen) - set(info.positions)
    if missing:
        raise ConfigError(f"cursor {info.name!r} has no partition {min(missing)}")
    targets = await resolve_starts(cluster, info.topic, chosen, to)
    if names_offsets(to):
        await _check_within(cluster, info.topic, {each: at.offset for each, at in targets.items()})
    return targets


async def _check_within(cluster: Cluster, topic: str, offsets: Mapping[int, int]) -> None:
    """Raise ``ConfigError`` for an offset that the log of its partition does not have."""
    starts = await list_offsets(cluster, {(topic, each): EARLIEST for each in offsets})
    ends = await list_offsets(cluster, {(topic, each): LATEST for each in offsets})
    for partition, offset in offsets.items():
        start, end = starts[topic, partition].offset, ends[topic, partition].offset
        if not start <= offset <= end:
            raise ConfigError(
                f"partition {partition} of {topic!r} has the offsets from {start} to {end}, where the next "
                f"record comes, and not {offset}: choose one of them, 'earliest' or 'latest', or reset one "
                "partition at a time"
            )


async def reset_cursor(
    cluster: Cluster,
    name: str,
    positions: Mapping[int, Position],
    *,
    finished: Mapping[int, Iterable[int]] | None = None,
    force: bool = False,
) -> CursorInfo:
    """Set positions. The owner is fenced; one that is alive only with ``force``.

    Of very many partitions some may be set, and others not, if it fails: set them again.
    """
    answer: Any = None
    for chosen in parts_of(positions):
        body = {
            "name": name,
            "paused": -1,
            "force": force,
            "partitions": [
                position_body(each, positions[each], (finished or {}).get(each, ())) for each in chosen
            ],
        }
        answer = await _ask(cluster, name, "AlterCursor", body)
    return _info(answer.cursor) if answer is not None else await describe_cursor(cluster, name)


async def stored_entries(cluster: Cluster, info: CursorInfo) -> dict[int, Entry]:
    """Where a cursor stands: what its transactions have stored, if it keeps its position there."""
    shown = {each.partition: Entry(each.epoch, each.position, each.finished) for each in info.partitions}
    if info.home not in (Home.TRANSACTIONS, Home.UNKNOWN):
        return shown
    offsets = GroupOffsets(cluster, info.name, info.topic, info.identity, where=where_of(info.name))
    return await offsets.latest(shown, {each.partition: each.mark for each in info.partitions})


async def add_partitions(cluster: Cluster, info: CursorInfo, positions: Mapping[int, Position]) -> None:
    """Have a cursor begin partitions at these positions that it has not begun yet."""
    for chosen in parts_of(positions):
        take = {
            "name": info.name,
            "topic": info.topic,
            "topic_id": info.topic_id,
            "region": info.identity,
            "shown": info.region,
            "owner": "nobody",
            "lease_ms": 1,
            "force": False,
            "home": info.home,
            "partitions": [position_body(each, positions[each]) for each in chosen],
        }
        taken = await _ask(cluster, info.name, "TakeCursor", take)
        owned = [{"partition": each.partition, "epoch": each.epoch} for each in taken.partitions]
        keep = {"name": info.name, "lease_ms": 1, "release": True, "partitions": owned}
        await _ask(cluster, info.name, "KeepCursor", keep)


async def delete_cursor(cluster: Cluster, name: str, *, force: bool = False) -> None:
    """Forget a cursor. One whose owner is alive only with ``force``."""
    await _ask(cluster, name, "DeleteCursor", {"name": name, "force": force})


async def _ask(cluster: Cluster, name: str, api: str, body: dict[str, Any]) -> Any:
    try:
        return await ask_coordinator(cluster, name, api, body)
    except TableError as error:
        if error.table_code == TableCode.cursor_not_found:
            raise CursorNotFound(
                "there is no such cursor; 'tidemill cursor list' shows those that there are",
                where=where_of(name),
            ) from error
        if error.table_code == TableCode.cursor_in_use:
            raise CursorInUse(
                f"{error.message}; stop it first, or add --force", where=where_of(name)
            ) from error
        raise


def _info(cursor: Any) -> CursorInfo:
    return CursorInfo(
        cursor.name,
        cursor.topic,
        cursor.topic_id,
        cursor.shown,
        cursor.paused,
        cursor.created_ms,
        bytes(cursor.region),
        Home(cursor.home),
        tuple(
            CursorPartition(
                each.partition,
                Position(each.offset, each.leader_epoch, each.started),
                unpack_finished(each.offset, bytes(each.finished)),
                each.epoch,
                each.owner,
                each.lease_left_ms > 0,
                each.committed_ms,
                Mark(each.origin or NO_ORIGIN, each.moved),
            )
            for each in cursor.partitions
        ),
    )
