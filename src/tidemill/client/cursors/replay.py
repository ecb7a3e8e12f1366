"""Taking parked records back: from a dead-letter topic to the topic that they came from, each once.

A cursor of its own (``NAME.replay``) reads the letters of one worker. What it sends and its position are one
transaction, so a replay that is interrupted goes on where it was. A dry run only reads that position, and
reads on from there with a cursor that keeps none. A record may have been parked twice,
because parking and the worker's position are two writes; its letters have the same source, and only the
first is taken. Letters of records that were too large to be parked whole stay where they are, and are counted
each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from tidemill.client.cursors.admin import describe_cursor, stored_entries
from tidemill.client.cursors.checkpoints.cluster import where_of
from tidemill.client.cursors.checkpoints.transaction import IN_TRANSACTION, check_transactional_name
from tidemill.client.cursors.opening import check_cursor_name, open_cursor, plan_cursor
from tidemill.client.cursors.records import CursorRecord
from tidemill.client.tables.requests import ask_controller
from tidemill.cursors.checkpoint import check_identity
from tidemill.cursors.errors import CursorNotFound
from tidemill.errors import ApiError, ConfigError, ErrorCode, TableCode, TableError
from tidemill.records.record import Record
from tidemill.share.letters import GROUP_HEADER, LEFT_OUT, Letter, read_letter, redriven_record

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster
    from tidemill.client.cursors.cursor import AsyncCursor, CursorPlan

__all__ = ("Replayed", "check_replayable", "replay")

_BATCH: Final = 500
_END_MS: Final = 1_000
_SUFFIX: Final = ".replay"
#: The sources of letters (topic, partition, offset), and whether the letter has its record.
_Seen: TypeAlias = dict[tuple[str, int, int], bool]


@dataclass(slots=True)
class Replayed:
    """What a replay has sent back, or would send."""

    #: Records that went back, by their topic.
    sent: Counter[str] = field(default_factory=Counter)
    #: The same by the reason for which they were parked.
    reasons: Counter[str] = field(default_factory=Counter)
    #: Letters of records that were parked before.
    parked_twice: int = 0
    #: Records that were too large to be parked whole: their letters do not have them, and are not sent back.
    without_contents: int = 0


def check_replayable(name: str) -> None:
    """Raise ``ConfigError`` if the worker's name cannot be used for the cursor that replays its letters."""
    try:
        check_cursor_name(_replays(name))
        check_transactional_name(_replays(name))
    except ConfigError as error:
        raise ConfigError(
            f"worker {name[:40]!r} cannot park records: 'tidemill cursor replay' needs a cursor that is "
            f"named like the worker, with {_SUFFIX!r} behind it, and {error.message}. Give the worker "
            "another name, or no dead_letter"
        ) from error


def _replays(name: str) -> str:
    """The name of the cursor that replays the letters of a worker."""
    return f"{name}{_SUFFIX}"


async def replay(
    cluster: Cluster,
    name: str,
    letters: str,
    *,
    execute: bool = True,
) -> Replayed:
    """Send the records that worker ``name`` has parked in ``letters`` back to their topics.

    They get a header that names the worker. Every reader of the topic sees them again.
    """
    cursor = await (_open(cluster, name, letters) if execute else _open_to_look(cluster, name, letters))
    try:
        ends = {partition: position.offset for partition, position in cursor.committed.items()}
        seen = await _letters_before(cluster, name, letters, ends)
        plain: dict[str, bool] = {}
        done = Replayed()
        while batch := await cursor.poll_batch(_BATCH, timeout_ms=_END_MS):
            chosen = _choose(batch, seen, done)
            for letter, _ in chosen:
                await _check_source(cluster, letter.topic, plain)
            if execute:
                await _send(cursor, chosen)
            done.sent.update(letter.topic for letter, _ in chosen)
            done.reasons.update(letter.reason for letter, _ in chosen)
        done.without_contents = sum(not is_whole for is_whole in seen.values())
        return done
    finally:
        await cursor.close()


async def _open(cluster: Cluster, name: str, letters: str) -> AsyncCursor:
    """The cursor over the letters of a worker that keeps its position."""
    return await open_cursor(cluster, await _plan(cluster, name, letters, stored=True))


async def _open_to_look(cluster: Cluster, name: str, letters: str) -> AsyncCursor:
    """A cursor that keeps no position, and begins where the one stands that does."""
    plan = await _plan(cluster, name, letters, stored=False)
    with contextlib.suppress(CursorNotFound):
        info = await describe_cursor(cluster, _replays(name))
        check_identity(info.identity, plan.region, where_of(info.name))
        stored = await stored_entries(cluster, info)
        positions = {partition: entry.position for partition, entry in stored.items()}
        plan = dataclasses.replace(plan, starts={**plan.starts, **positions})
    return await open_cursor(cluster, plan)


async def _plan(cluster: Cluster, name: str, letters: str, *, stored: bool) -> CursorPlan:
    return await plan_cursor(
        cluster,
        _replays(name) if stored else None,
        letters,
        partitions=None,
        key_prefix=None,
        headers={GROUP_HEADER: name},
        where=None,
        start="earliest",
        checkpoint=IN_TRANSACTION if stored else None,
        own=None,
        take_over=False,
        lease_ms=10_000,
        gaps_kept=0,
    )


async def _letters_before(cluster: Cluster, name: str, letters: str, ends: Mapping[int, int]) -> _Seen:
    """The sources of the letters below ``ends``: earlier replays have taken them, or passed over them."""
    seen: _Seen = {}
    if not any(ends.values()):
        return seen
    earlier = await open_cursor(cluster, await _plan(cluster, name, letters, stored=False))
    try:
        # An empty poll is no end: a node may be slow, and a letter that is not seen would be sent twice.
        while any(position.offset < ends.get(each, 0) for each, position in earlier.positions.items()):
            for record in await earlier.poll_batch(_BATCH, timeout_ms=_END_MS):
                if record.offset < ends.get(record.partition, 0) and isinstance(record, CursorRecord):
                    letter = read_letter(record.headers)
                    if letter is not None:
                        seen[_source(letter)] = seen.get(_source(letter), False) or _is_whole(record)
    finally:
        await earlier.close()
    return seen


def _source(letter: Letter) -> tuple[str, int, int]:
    return letter.topic, letter.partition, letter.offset


def _is_whole(record: CursorRecord) -> bool:
    """Whether a letter has the contents of its record."""
    return all(name != LEFT_OUT for name, _ in record.headers)


def _choose(batch: list[Any], seen: _Seen, done: Replayed) -> list[tuple[Letter, Record]]:
    """Choose the letters of a batch to send back. A record that was parked twice goes back once."""
    chosen: list[tuple[Letter, Record]] = []
    for record in batch:
        letter = read_letter(record.headers)
        if letter is None:
            continue
        source, is_whole = _source(letter), _is_whole(record)
        if source in seen and (seen[source] or not is_whole):
            done.parked_twice += 1
            continue
        seen[source] = is_whole
        if is_whole:
            plain = Record(record.key, record.value, record.timestamp_ms, record.headers)
            chosen.append((letter, redriven_record(plain, letter)))
    return chosen


async def _send(cursor: AsyncCursor, chosen: list[tuple[Letter, Record]]) -> None:
    async with cursor.transaction() as transaction:
        for letter, record in chosen:
            await transaction.send(
                letter.topic,
                record.value,
                key=record.key,
                headers=record.headers,
                partition=letter.partition,
            )


async def _check_source(cluster: Cluster, topic: str, plain: dict[str, bool]) -> None:
    """Raise an error for a topic to which nothing can go back.

    ``ConfigError`` if it is a table's: an old row would replace a newer one. ``ApiError`` if it is gone: it
    must not come into being again by what is written to it.
    """
    if topic not in plain:
        try:
            await cluster.topic(topic)
        except ApiError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
            raise ApiError(
                error.code,
                f"there are letters of topic {topic!r}, which does not exist any more: create it, and they "
                "go back there; or delete the letters up to these (tidemill topic trim)",
            ) from error
        try:
            await ask_controller(cluster, "DescribeTable", {"name": topic}, f"describing {topic!r}")
            plain[topic] = False
        except TableError as error:
            if error.table_code != TableCode.table_not_found:
                raise
            plain[topic] = True
    if not plain[topic]:
        raise ConfigError(
            f"{topic!r} is a table: a change that is sent again would replace a newer row. Read the letters "
            "with a cursor, and write what is still right"
        )
