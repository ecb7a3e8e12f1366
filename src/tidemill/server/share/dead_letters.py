"""Writes dead letters: the copy of a record in the dead-letter topic, and the end of the record, as one.

When a member rejects a record, or its deliveries are used up, the share partition first stores ARCHIVING, the
note that a letter is due. Then this module writes, in one transaction,

1. the letter to the dead-letter topic, whichever node leads that, and
2. ARCHIVED to the state of the share partition, at its coordinator.

The transactional id is the share partition's. The leader of the data partition is the only one who uses it: a
new leader starts the producer anew, which fences the last one and decides what that one left open. Only then
it reads the state again, and writes letters of those records only whose end is not in it. So each record has
one letter that committed readers see, wherever a crash came:

| the leader fails | what is there | what the next leader does |
| --- | --- | --- |
| after ARCHIVING was stored | no letter | writes it |
| after its producer was started | no letter | starts the producer anew, writes it |
| after the copy was written | a copy in an open transaction | aborts that, writes another one |
| after the end was written, too | both in an open transaction | aborts both, writes both again |
| after the commit was decided | the coordinator carries it out | waits for that, finds ARCHIVED: nothing |
| after the commit, before it was noted here | both | finds ARCHIVED: nothing |

If a leader does not know that it is the last one, its transaction was aborted, or its write to the state is
refused because a later leader has read that. A finished record never becomes unfinished (``share.state``), so
a late write of ARCHIVING does no harm either.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidemill.config.group_keys import DEAD_LETTER_TOPIC
from tidemill.config.topic import TopicConfig
from tidemill.coordination.share_state import DeliveryState, SharePartitionKey, ShareState, StateBatch
from tidemill.coordination.turns import pause_after
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header
from tidemill.records.record import Record, read_records
from tidemill.server.coordinators.internal_producer import InternalProducer
from tidemill.share.letters import SHARE_PREFIX, Letter, letter_record
from tidemill.share.state.batches import FINISHED

if TYPE_CHECKING:
    from tidemill.control.image import TopicImage
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker
    from tidemill.share.partition.values import DueLetter

__all__ = ("NodeDeadLetters", "transactional_id_of")

logger = logging.getLogger(__name__)

#: Letters of one transaction.
_RECORDS_MAX: Final = 200
_BYTES_MAX: Final = 512 * 1024
#: What a letter has beside the contents of its record, at most: header names, numbers, names of topic and
#: group. Reasons are counted apart.
_OVERHEAD_BYTES: Final = 1_024
_READ_BYTES: Final = 256 * 1024
#: A batch that may unpack to more is decoded in a thread.
_QUICK_BYTES: Final = 32 * 1024
#: Share partitions whose producers are kept.
_WRITERS_MAX: Final = 10_000
_ID_CHARACTERS_MAX: Final = 1_000
#: Letters that are made ready in one turn of the event loop.
_LETTERS_PER_TURN: Final = 20


def transactional_id_of(key: SharePartitionKey) -> str:
    """The transactional id under which the dead letters of a share partition are written."""
    name = str(key)
    if len(name) > _ID_CHARACTERS_MAX:
        name = hashlib.sha256(name.encode()).hexdigest()
    return SHARE_PREFIX + name


class NodeDeadLetters:
    """The ``DeadLetters`` of a node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._writers: dict[SharePartitionKey, _Writer] = {}

    async def take_over(self, key: SharePartitionKey, leader_epoch: int) -> None:
        """Decide what an earlier leader left open: after that the state has its outcome.

        Raises ``ApiError`` if that could not be done; it ends by itself after a while.
        """
        await self._writer(key, leader_epoch).begin()

    async def write(self, key: SharePartitionKey, leader_epoch: int, letters: Sequence[DueLetter]) -> None:
        """Write the letters of records whose state is ARCHIVING. Returns when they are committed.

        Raises ``ApiError`` if they are not, or if that is not known: then the same ones are asked for again,
        also by a later leader.
        """
        await self._writer(key, leader_epoch).write(letters)

    def _writer(self, key: SharePartitionKey, leader_epoch: int) -> _Writer:
        writer = self._writers.pop(key, None)
        if writer is None or writer.leader_epoch != leader_epoch:
            writer = _Writer(self._broker, key, leader_epoch)
            while len(self._writers) >= _WRITERS_MAX:
                self._writers.pop(next(iter(self._writers)))
        self._writers[key] = writer
        return writer


@dataclass(slots=True)
class _Chunk:
    """Dead letters and the ends of their records that are written in one transaction."""

    bytes_max: int
    letters: list[Record] = field(default_factory=list)
    ended: list[StateBatch] = field(default_factory=list)
    size_bytes: int = 0

    def has_room(self, letter: Record) -> bool:
        """Whether one more letter fits."""
        return len(self.letters) < _RECORDS_MAX and self.size_bytes + _size_bytes(letter) <= self.bytes_max

    def add(self, letter: Record) -> None:
        """Add a dead letter; ``has_room`` has said that it fits."""
        self.letters.append(letter)
        self.size_bytes += _size_bytes(letter)


class _Recent:
    """The records of the batch that was decoded last: those that die together have often come together."""

    def __init__(self) -> None:
        self.first_offset = self.last_offset = -1
        self._records: list[Record] = []

    def take(self, header: BatchHeader, records: list[Record]) -> None:
        """Keep these records, instead of the ones before."""
        self.first_offset, self.last_offset = header.base_offset, header.last_offset
        # Clients write offsets into batches, in whatever order.
        self._records = sorted(records, key=_offset)

    def between(self, first: int, last: int) -> list[Record]:
        """Those of the records that have an offset from the first to the last."""
        low = bisect_left(self._records, first, key=_offset)
        return self._records[low : bisect_right(self._records, last, lo=low, key=_offset)]


def _offset(record: Record) -> int:
    return record.offset


class _Writer:
    """Writes the dead letters of one share partition during one leader epoch."""

    def __init__(self, broker: Broker, key: SharePartitionKey, leader_epoch: int) -> None:
        self._broker = broker
        self._key = key
        self.leader_epoch = leader_epoch
        self._producer = InternalProducer(broker, transactional_id_of(key))
        self._state_epoch = -1
        self._lock = asyncio.Lock()

    async def begin(self) -> None:
        """Start the producer, which decides what an earlier one left open."""
        async with self._lock:
            self._source()
            await self._producer.begin()
            # The next write reads the state, and begins with a producer of its own.
            self._producer.give_up()

    async def write(self, letters: Sequence[DueLetter]) -> None:
        async with self._lock:
            source = self._source()
            target = await self._target(source.topic)
            if target is None:
                return
            try:
                if await self._producer.begin():
                    letters = self._unfinished(await self._read_state(), letters)
                await self._write_all(source, target, letters)
            except BaseException as error:
                # Also when this is cancelled because the node is no longer the leader.
                self._producer.give_up()
                if isinstance(error, TidemillError) and not isinstance(error, ApiError):
                    raise ApiError(error.code, error.message) from error
                raise

    def _source(self) -> Partition:
        """The partition whose records died; raises ``ApiError`` if this leader does not lead it any more."""
        find, key = self._broker.find, self._key
        partition = find.partition(find.topic_by_id(key.topic_id), key.partition)
        if not partition.leads_at(self.leader_epoch):
            raise partition.not_leader()
        return partition

    async def _target(self, source: str) -> TopicImage | None:
        """The dead-letter topic; None if the group has none any more, so that the records just end.

        Raises ``ApiError`` if letters cannot go to it: they stay due.
        """
        broker, group_id = self._broker, self._key.group_id
        name = broker.group_config(group_id).dead_letter_topic
        if not name:
            return None
        if name not in broker.image.topics and broker.settings.auto_create_topics:
            for error in (await broker.catalogue.auto_create([name])).values():
                raise error
        topic = broker.image.topics.get(name)
        if topic is None:
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"there is no topic {name!r} for the dead letters of group {group_id!r}: create it",
            )
        problem = "is the topic that they come from" if name == source else ""
        if topic.internal or broker.image.table_of_topic(topic.id) is not None:
            problem = "belongs to a table or to the nodes themselves"
        if problem:
            raise ApiError(
                ErrorCode.policy_violation,
                f"topic {name!r} cannot take the dead letters of group {group_id!r}: it {problem}. They stay "
                f"due until {DEAD_LETTER_TOPIC} of the group names another topic",
            )
        return topic

    async def _read_state(self) -> ShareState:
        state = await self._broker.persister.read_state(self._key, self.leader_epoch)
        self._state_epoch = state.state_epoch
        return state

    def _unfinished(self, state: ShareState, letters: Sequence[DueLetter]) -> list[DueLetter]:
        """Those parts of the letters whose records are not finished by what is stored."""
        left: list[DueLetter] = []
        done = [
            (each.first_offset, each.last_offset)
            for each in state.batches
            if each.state in FINISHED and each.producer_id == -1
        ]
        if state.start_offset > 0:
            done.insert(0, (0, state.start_offset - 1))
        for letter in letters:
            left += (letter._replace(first_offset=a, last_offset=b) for a, b in _without(letter, done))
        return left

    async def _write_all(self, source: Partition, target: TopicImage, letters: Sequence[DueLetter]) -> None:
        """Write letters, in as many transactions as they need."""
        largest = self._largest_bytes(target)
        chunk, recent = _Chunk(min(_BYTES_MAX, largest)), _Recent()
        for number, due in enumerate(letters):
            await pause_after(number, _LETTERS_PER_TURN)
            first = due.first_offset
            async for record in self._records(source, due.first_offset, due.last_offset, recent):
                letter = self._letter(source, record, due, largest)
                if chunk.letters and not chunk.has_room(letter):
                    if record.offset > first:
                        chunk.ended.append(_ended(first, record.offset - 1, due))
                    await self._write_chunk(target, chunk)
                    chunk, first = _Chunk(chunk.bytes_max), record.offset
                chunk.add(letter)
            chunk.ended.append(_ended(first, due.last_offset, due))
            if len(chunk.ended) >= _RECORDS_MAX:
                await self._write_chunk(target, chunk)
                chunk = _Chunk(chunk.bytes_max)
        if chunk.ended:
            await self._write_chunk(target, chunk)

    def _largest_bytes(self, target: TopicImage) -> int:
        """The most bytes that a letter's key, value and headers may have."""
        config = TopicConfig.from_overrides(target.configs, self._broker.settings.topic_defaults)
        return config.max_message_bytes - _OVERHEAD_BYTES

    def _letter(self, source: Partition, record: Record, due: DueLetter, largest: int) -> Record:
        copy = self._broker.group_config(self._key.group_id).dead_letter_copy_record
        now_ms = self._broker.clock_ms()
        said = Letter(
            self._key.group_id, source.topic, source.index, record.offset, due.delivery_count, due.reason
        )
        letter = letter_record(record, said, copy=copy, now_ms=now_ms)
        if _size_bytes(letter) > largest:
            letter = letter_record(record, said, copy=copy, left_out=True, now_ms=now_ms)
        if _size_bytes(letter) > largest:
            # Its key or its headers are too large. One that the topic refuses would hold up all others.
            letter = letter_record(record, said, copy=False, left_out=True, now_ms=now_ms)
        return letter

    async def _write_chunk(self, target: TopicImage, chunk: _Chunk) -> None:
        """One transaction: these letters, and the end of their records."""
        self._source()
        if chunk.letters:
            index = self._key.partition % len(target.partitions)
            await self._producer.append(target, index, chunk.letters)
        await self._broker.persister.write_in_transaction(
            self._key, self._state_epoch, self.leader_epoch, chunk.ended, self._producer.transaction
        )
        await self._producer.commit()

    async def _records(
        self, source: Partition, first: int, last: int, recent: _Recent
    ) -> AsyncIterator[Record]:
        """The records from the first to the last offset that are still in the log."""
        start = source.log_start_offset
        if start > first:
            logger.warning(
                "%s: records below offset %d are gone before their dead letters were written",
                self._key,
                min(start, last + 1),
            )
        position = max(first, start)
        while position <= last:
            if recent.first_offset <= position <= recent.last_offset:
                for record in recent.between(position, last):
                    yield record
                position = recent.last_offset + 1
                continue
            data = source.read(position, _READ_BYTES, at_least_one=True)
            if not data:
                if source.upper_offset(committed=False) <= last:
                    # They are committed, and a new leader learns of that a little later.
                    raise ApiError(
                        ErrorCode.offset_not_available,
                        f"{self._key}: the records up to offset {last} cannot be read yet",
                    )
                return
            for batch in _batches(data):
                header = parse_header(batch)
                if header.base_offset > last:
                    return
                position = header.last_offset + 1
                if header.is_control:
                    continue
                recent.take(header, await self._decode(batch))
                for record in recent.between(first, last):
                    yield record

    async def _decode(self, batch: memoryview) -> list[Record]:
        limit = self._broker.settings.max_decompressed_bytes
        if len(batch) <= _QUICK_BYTES and not parse_header(batch).codec:
            return list(read_records(batch, limit))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._broker.workers, lambda: list(read_records(bytes(batch), limit))
        )


def _batches(data: memoryview) -> Iterator[memoryview]:
    position = 0
    while position + HEADER_BYTES <= len(data):
        size_bytes = parse_header(data, position).size_bytes
        yield data[position : position + size_bytes]
        position += size_bytes


def _without(letter: DueLetter, done: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The offsets of a letter that lie in none of the ranges, which are sorted."""
    first = letter.first_offset
    for start, end in done:
        if end < first:
            continue
        if start > letter.last_offset:
            break
        if start > first:
            yield first, start - 1
        first = end + 1
    if first <= letter.last_offset:
        yield first, letter.last_offset


def _ended(first: int, last: int, due: DueLetter) -> StateBatch:
    return StateBatch(first, last, DeliveryState.ARCHIVED, due.delivery_count, reason=due.reason)


def _size_bytes(record: Record) -> int:
    headers = sum(len(name) + len(value or b"") + 8 for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers + 32
