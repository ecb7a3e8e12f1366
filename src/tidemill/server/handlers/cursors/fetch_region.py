"""FetchRegion: read what is in a cursor's region, and say of everything else why it is passed over.

Committed records only, from the partition's leader. Rules:

- A read is as Fetch's: whole batches, each checked, bounded in each turn of the loop. What takes longer than
  that, the walk over many batches and every filter, is done in a thread.
- Where nothing passes the filter the position moves on: reading goes on for a while in the same request, and
  the answer then says how far it came. So a selective cursor gets few bytes and few answers.
- A request with nothing to read waits for appends, never by polling.
- A position that is not in the log is told with where the log starts and ends, and, if its leader epoch says
  that it is of another log, with where the two part. Damage is told as by Fetch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidemill.coordination.turns import give_way
from tidemill.cursors.position import NO_EPOCH, Reason
from tidemill.cursors.region import FETCHED_PARTITIONS_MAX, HEADERS_MAX, KEY_PREFIX_BYTES_MAX
from tidemill.cursors.walking import BatchFilter, Walked, walk
from tidemill.errors import (
    ApiError,
    DamagedBatch,
    ErrorCode,
    StorageError,
    TableCode,
    TableError,
    TidemillError,
)
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables.definitions import table_handler
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import READ, TOPIC, for_each
from tidemill.server.requests.call import Call

if TYPE_CHECKING:
    from tidemill.control.image import TopicImage

__all__ = ("fetch_region",)

#: What is read of a partition at a time.
_CHUNK_BYTES: Final = 1024 * 1024
#: Chunks that are looked at in the loop itself: they have so few batches that it takes a millisecond or two.
_INLINE_BYTES: Final = 32 * 1024
#: How long a request goes on reading while nothing passes the filter, and once something has.
_SEARCH_SECONDS: Final = 0.5
_GATHER_SECONDS: Final = 0.02
_GATHER_BYTES: Final = 512 * 1024
#: Ranges of skipped offsets from which on an answer is full: each is an object to make and to send.
_RANGES_MAX: Final = 1_000
_WAIT_MS_MAX: Final = 60_000
_PREDICATE_BYTES_MAX: Final = 1024 * 1024
_UNKNOWN: Final = -1
#: Filters over rows that were bound lately, by table, schema and predicate.
_BOUND_MAX: Final = 64


@serves("FetchRegion", for_each(READ, TOPIC), overlaps=True)
@table_handler
async def fetch_region(broker: Broker, call: Call) -> dict[str, Any]:
    """Read some partitions of a region."""
    request = call.request
    _check(request)
    call.authorize(READ, TOPIC, request.topic)
    topic = broker.find.topic(request.topic)
    if request.topic_id is not None and topic.id != request.topic_id:
        raise ApiError(
            ErrorCode.unknown_topic_id,
            f"topic {request.topic!r} has the id {topic.id}, not {request.topic_id}: it was deleted and "
            "created again",
        )
    batch_filter = await _filter(broker, topic, request)
    return {"partitions": await _RegionFetch(broker, call, topic, batch_filter).run()}


def _check(request: Any) -> None:
    """Refuse what is larger than a region can be."""
    count = len(request.partitions)
    if count > FETCHED_PARTITIONS_MAX:
        raise refused(f"{count} partitions, {FETCHED_PARTITIONS_MAX} are the most in one request")
    if len(request.key_prefix or b"") > KEY_PREFIX_BYTES_MAX:
        raise refused(f"a key prefix of {len(request.key_prefix)} bytes, {KEY_PREFIX_BYTES_MAX} are the most")
    if len(request.headers) > HEADERS_MAX:
        raise refused(f"{len(request.headers)} headers to match, {HEADERS_MAX} are the most")
    if len(request.predicate or b"") > _PREDICATE_BYTES_MAX:
        raise refused(f"a filter of {len(request.predicate)} bytes, {_PREDICATE_BYTES_MAX} are the most")


# --- the filter


async def _filter(broker: Broker, topic: TopicImage, request: Any) -> BatchFilter | None:
    if request.key_prefix is None and not request.headers and request.predicate is None:
        return None
    make = partial(_make_filter, broker, topic, request)
    # In a thread: it loads Arrow at its first use, and a predicate can be large.
    return await asyncio.get_running_loop().run_in_executor(broker.workers, make)


def _make_filter(broker: Broker, topic: TopicImage, request: Any) -> BatchFilter:
    from tidemill.cursors.filtering import RegionFilter

    return RegionFilter(
        key_prefix=request.key_prefix,
        headers=[(each.name, each.value) for each in request.headers],
        rows=None if request.predicate is None else _row_filter(broker, topic, request.predicate),
        max_decompressed_bytes=broker.settings.max_decompressed_bytes,
    )


_bound: Final[dict[tuple[Any, ...], Any]] = {}


def _row_filter(broker: Broker, topic: TopicImage, predicate: bytes) -> Any:
    from tidemill.cursors.filtering import RowFilter
    from tidemill.tables.state.service import definition_of

    found = broker.image.table_of_topic(topic.id)
    if found is None:
        raise TableError(
            TableCode.table_not_found,
            f"topic {topic.name!r} is no table's: a filter over columns needs a table",
        )
    table, _ = found
    key = (table.name, table.id, table.created_ms, len(table.schemas), bytes(predicate))
    bound = _bound.get(key)
    if bound is None:
        bound = RowFilter(definition_of(table), bytes(predicate))
        while len(_bound) >= _BOUND_MAX:
            _bound.pop(next(iter(_bound)), None)
        _bound[key] = bound
    return bound


# --- reading


@dataclass(slots=True)
class _Wanted:
    """A partition of the request, and what is found of it."""

    index: int
    start: int
    leader_epoch: int
    current_leader_epoch: int
    found: Walked = field(init=False)
    end_epoch: int = NO_EPOCH
    log_start_offset: int = _UNKNOWN
    last_stable_offset: int = _UNKNOWN
    log_end_offset: int = _UNKNOWN
    diverging: tuple[int, int] = (NO_EPOCH, _UNKNOWN)
    error: TidemillError | None = None

    def __post_init__(self) -> None:
        self.found = Walked(self.start)

    def answer(self) -> dict[str, Any]:
        error = self.error
        found = self.found
        return {
            "partition": self.index,
            "error_code": ErrorCode.none if error is None else error.code,
            "error_message": None if error is None else _message(error),
            "next_offset": found.next_offset,
            "leader_epoch": self.end_epoch,
            "log_start_offset": self.log_start_offset,
            "last_stable_offset": self.last_stable_offset,
            "log_end_offset": self.log_end_offset,
            "diverging_epoch": self.diverging[0],
            "diverging_offset": self.diverging[1],
            "records": b"".join(found.batches) if found.batches else None,
            "skipped": [
                {"first_offset": first, "last_offset": last, "reason": int(reason)}
                for first, last, reason in found.skipped
            ],
            "skipped_dropped": found.skipped_dropped,
        }


def _message(error: TidemillError) -> str:
    if isinstance(error, DamagedBatch):
        return (
            f"offsets {error.first_offset} to {error.next_offset - 1} are damaged and cannot be read: "
            f"{error.reason}"
        )
    # A path of the node's disk is not for its clients.
    return "the log cannot be read" if isinstance(error, StorageError) else error.message[:1_000]


class _RegionFetch:
    """One request, from its first read to its answer."""

    def __init__(
        self, broker: Broker, call: Call, topic: TopicImage, batch_filter: BatchFilter | None
    ) -> None:
        self._broker = broker
        self._call = call
        self._topic = topic
        self._filter = batch_filter
        self._loop = asyncio.get_running_loop()
        self._wanted = [
            _Wanted(each.partition, each.offset, each.leader_epoch, each.current_leader_epoch)
            for each in call.request.partitions
        ]
        answer_bytes_max = broker.budget.answer_bytes_max(call.client.address)
        self._bytes_max = min(
            max(1, call.request.max_bytes), broker.settings.fetch_max_bytes, max(answer_bytes_max, 1)
        )
        self._bytes = 0
        self._ranges = 0
        self._has_failed = False

    async def run(self) -> list[dict[str, Any]]:
        began = self._loop.time()
        deadline = began + min(max(0, self._call.request.max_wait_ms), _WAIT_MS_MAX) / 1000
        while True:
            searching_since = self._loop.time()
            while await self._read_round():
                patience = _GATHER_SECONDS if self._bytes else _SEARCH_SECONDS
                if self._is_full or self._call.is_hurried or self._loop.time() - searching_since > patience:
                    break
            # What was passed over is worth an answer, too: the reader's position goes on.
            is_done = self._has_failed or any(each.found.next_offset > each.start for each in self._wanted)
            if is_done or not self._wanted or self._call.is_hurried or self._loop.time() >= deadline:
                break
            await self._wait(deadline)
        return [each.answer() for each in self._wanted]

    @property
    def _is_full(self) -> bool:
        is_large = self._bytes >= min(self._bytes_max, _GATHER_BYTES)
        return is_large or self._ranges >= _RANGES_MAX or self._has_failed

    async def _read_round(self) -> bool:
        """Read a chunk of every partition; gives whether any had something to read."""
        progressed = False
        for each in self._wanted:
            if each.error is not None or (self._bytes and self._bytes >= self._bytes_max):
                continue
            if self._ranges >= _RANGES_MAX:
                break
            before = each.found.next_offset
            try:
                await self._read(each)
            except TidemillError as error:
                self._refuse(each, error)
            progressed |= each.found.next_offset > before
            await give_way()
        return progressed

    def _partition(self, each: _Wanted) -> Partition:
        # The image is asked each time: another node may lead since the last look.
        topic = self._broker.find.topic_by_id(self._topic.id)
        partition = self._broker.find.partition(topic, each.index, each.current_leader_epoch)
        partition.check_leads()
        return partition

    async def _read(self, each: _Wanted) -> None:
        partition = self._partition(each)
        offset = each.found.next_offset
        if offset == each.start and each.leader_epoch >= 0 and offset >= partition.log_start_offset:
            diverging = partition.divergence(each.leader_epoch, offset)
            if diverging is not None:
                each.diverging = diverging
                raise ApiError(
                    ErrorCode.offset_out_of_range,
                    f"{partition.topic}-{each.index} has no offset {offset} of leader epoch "
                    f"{each.leader_epoch}: what it has of that epoch ends at {diverging[1]}",
                )
        self._note(each, partition)
        limit = min(_CHUNK_BYTES, max(1, self._bytes_max - self._bytes))
        data = partition.read(offset, limit, at_least_one=True, committed=True, budget=ReadBudget())
        upper = each.last_stable_offset
        if not data:
            if offset < upper:
                # Compaction has left nothing up to the end.
                each.found.skip(offset, upper - 1, Reason.COMPACTION)
                self._advance(each, partition, upper)
            return
        aborted = [(entry.first_offset, entry.producer_id) for entry in partition.aborted_in(data)]
        look = partial(walk, data, offset, aborted, self._filter)
        if self._filter is None and len(data) <= _INLINE_BYTES:
            walked = look()
        else:
            walked = await self._loop.run_in_executor(self._broker.workers, look)
        self._take(each, partition, walked)

    def _note(self, each: _Wanted, partition: Partition) -> None:
        each.log_start_offset = partition.log_start_offset
        each.log_end_offset = partition.log_end_offset
        each.last_stable_offset = partition.last_stable_offset
        if each.end_epoch == NO_EPOCH and each.found.next_offset > 0:
            each.end_epoch = partition.epochs.epoch_at(each.found.next_offset - 1)

    def _take(self, each: _Wanted, partition: Partition, walked: Walked) -> None:
        found = each.found
        found.batches += walked.batches
        found.record_count += walked.record_count
        found.skipped += walked.skipped
        found.skipped_dropped += walked.skipped_dropped
        self._ranges += len(walked.skipped)
        self._bytes += walked.size_bytes
        partition.bytes_out += walked.size_bytes
        self._advance(each, partition, walked.next_offset)

    def _advance(self, each: _Wanted, partition: Partition, next_offset: int) -> None:
        each.found.next_offset = next_offset
        each.end_epoch = partition.epochs.epoch_at(next_offset - 1)

    def _refuse(self, each: _Wanted, error: TidemillError) -> None:
        """End the reading of a partition. What was found before is told first, and the error next time."""
        self._has_failed = True
        if each.found.next_offset > each.start:
            return
        each.error = error
        if error.code != ErrorCode.offset_out_of_range:
            return
        try:
            partition = self._partition(each)
        except TidemillError as moved:
            each.error = moved
            return
        is_unknown = each.start > partition.log_end_offset or each.diverging[0] != NO_EPOCH
        if is_unknown and not self._broker.newest.may_answer(partition):
            # Perhaps another node leads by now, and has it.
            each.error = partition.not_leader()
            return
        each.log_start_offset = partition.log_start_offset
        each.log_end_offset = partition.log_end_offset
        each.last_stable_offset = partition.last_stable_offset

    # --- waiting

    async def _wait(self, deadline: float) -> None:
        """Return when there may be something to read, the time is over, or the answer should come now."""
        woken = self._loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        subscribed: list[Partition] = []
        waiting_since = self._loop.time()
        self._call.on_hurry = wake
        try:
            for each in self._wanted:
                partition = self._partition(each)
                partition.subscribe(self, wake)
                subscribed.append(partition)
                if partition.last_stable_offset > each.found.next_offset:
                    wake()  # It came while others were subscribed to.
                await give_way()
            timer = self._loop.call_at(deadline, wake)
            try:
                await woken
            finally:
                timer.cancel()
        except TidemillError:
            return  # The next read tells it.
        finally:
            self._call.on_hurry = None
            self._call.waited_seconds += self._loop.time() - waiting_since
            for partition in subscribed:
                partition.unsubscribe(self)
