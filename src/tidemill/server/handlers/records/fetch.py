"""Fetch: read batches below the high watermark, and wait for more when there are too few.

A position between the high watermark and the log end is a good one that has nothing to read yet; only one
outside of the log is out of range.

Only whole batches leave, and each has been checked. One that is damaged ends what is read of its partition;
at its own offset the answer is CORRUPT_MESSAGE, which clients show to their application. One answer holds no
more than can be read and checked in one turn of the loop.

A consumer that names its rack is sent to an in-sync replica there, if the leader is in another (KIP-392). A
follower serves what it knows to be committed; for other offsets it sends the consumer back to the leader.

A request that has to wait is woken by its partitions, never by polling. Sessions (KIP-227) keep the list of
partitions between requests (``broker/fetch_sessions.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tidemill.coordination.turns import begin_slice, in_slices, slice_is_over
from tidemill.errors import ApiError, ErrorCode, StorageError, TidemillError
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.replication.partition import Partition
from tidemill.replication.rules.state import Role
from tidemill.server.broker import Broker
from tidemill.server.broker.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    FetchSession,
    SessionPartition,
)
from tidemill.server.handlers.records.current_leaders import CurrentLeaders
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import READ, TOPIC, for_each
from tidemill.server.requests.call import Call
from tidemill.wire.hot import FetchPartition, encode_fetch_response
from tidemill.wire.requests import ms

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage, TopicImage

__all__ = ("fetch",)

_TOPIC_ID_MIN_VERSION = 13
_SESSION_MIN_VERSION = 7
_LEADER_MIN_VERSION = 16
_FOLLOWERS_MIN_VERSION = 11
_NO_REPLICA = -1
_READ_COMMITTED = 1
_NOT_KNOWN: Final = -1
_NO_TOPIC_ID = UUID(int=0)
#: Bound once, because every partition compares with them, and ``Role.LEADER`` costs more than the comparison.
_LEADER, _FOLLOWER = Role.LEADER, Role.FOLLOWER
#: A request for more partitions is answered with breaks from the start, so that others have their turn.
_STEPPED_PARTITIONS_MIN = 500
_JOINED_BYTES_MAX = 4_096
#: Partitions of a request that are taken up between two looks at the clock.
_TAKEN_AT_ONCE = 50

logger = logging.getLogger(__name__)


@serves("Fetch", for_each(READ, TOPIC), overlaps=True)
def fetch(broker: Broker, call: Call) -> None:
    """Handle one Fetch request; the answer may be sent later."""
    named = chain(call.request.topics, call.field("forgotten_topics_data", ()))
    partitions = sum(len(topic.partitions) for topic in named)
    _run(_begin(broker, call), partitions, call)


def _run(steps: Iterator[None], partitions: int, call: Call) -> None:
    """Take all steps at once, or with breaks if they are for very many partitions, or take long."""
    if partitions <= _STEPPED_PARTITIONS_MIN:
        begin_slice()
        for _ in steps:
            if slice_is_over():
                break
        else:
            return

    def stepped(task: asyncio.Task[list[None]]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a fetch of %d partitions failed", partitions, exc_info=error)
            call.abort()

    call.start_task(in_slices(steps)).add_done_callback(stepped)


def _begin(broker: Broker, call: Call) -> Iterator[None]:
    by_id = call.version >= _TOPIC_ID_MIN_VERSION
    wanted: list[SessionPartition] = []
    for topic in call.request.topics:
        name = _topic_name(topic, by_id)
        for entry in topic.partitions:
            wanted.append(_wanted(name, entry))
            if len(wanted) % _TAKEN_AT_ONCE == 0:
                yield
    try:
        session, partitions, incremental = yield from _session(broker, call, wanted, by_id)
    except ApiError as error:
        header = call.header
        call.reply_buffers(
            encode_fetch_response(header.api_version, header.correlation_id, error.code, 0, [])
        )
        return
    _Fetch(broker, call, session, partitions, incremental).start()


def _wanted(topic: str | UUID, entry: Any) -> SessionPartition:
    return SessionPartition(
        topic,
        entry.partition,
        entry.fetch_offset,
        entry.partition_max_bytes,
        getattr(entry, "current_leader_epoch", -1),
        getattr(entry, "last_fetched_epoch", -1),
    )


def _topic_name(topic: Any, by_id: bool) -> str | UUID:
    if not by_id:
        return str(topic.topic)
    # The id of all zeros, which is decoded as None, is answered like any other that nobody has.
    return topic.topic_id or _NO_TOPIC_ID


def _session(
    broker: Broker, call: Call, wanted: list[SessionPartition], by_id: bool
) -> Generator[None, None, tuple[FetchSession | None, list[SessionPartition], bool]]:
    """(session or None, partitions to read, whether only changes are answered)."""
    session_id: int = call.field("session_id", 0)
    epoch: int = call.field("session_epoch", FINAL_EPOCH)
    if call.version < _SESSION_MIN_VERSION or epoch == FINAL_EPOCH:
        if session_id:
            broker.fetch_sessions.close(session_id)
        return None, wanted, False
    if epoch == INITIAL_EPOCH:
        broker.fetch_sessions.close(session_id)
        if not wanted:
            return None, wanted, False
        opened = broker.fetch_sessions.open(by_id=by_id)
        if opened is None:
            return None, wanted, False
        yield from opened.update(wanted, ())
        return opened, list(opened.partitions.values()), False
    session = broker.fetch_sessions.resume(session_id, epoch, by_id=by_id)
    forgotten = (
        (_topic_name(topic, by_id), index)
        for topic in call.field("forgotten_topics_data", ())
        for index in topic.partitions
    )
    yield from session.update(wanted, forgotten)
    return session, list(session.partitions.values()), True


class _Fetch:
    """One Fetch request, from its first look at the partitions to its answer."""

    __slots__ = (
        "_answering",
        "_broker",
        "_call",
        "_committed",
        "_incremental",
        "_leaders",
        "_min_bytes",
        "_rack",
        "_session",
        "_subscribed",
        "_timer",
        "_topic",
        "_waiting_since",
        "_wanted",
        "_woken",
    )

    def __init__(
        self,
        broker: Broker,
        call: Call,
        session: FetchSession | None,
        wanted: list[SessionPartition],
        incremental: bool,
    ) -> None:
        self._broker = broker
        self._call = call
        self._session = session
        self._wanted = wanted
        self._incremental = incremental
        self._min_bytes = max(0, call.request.min_bytes)
        self._committed = call.request.isolation_level == _READ_COMMITTED
        #: The consumer's rack, if that says where it should read: this node's is another.
        self._rack = self._foreign_rack()
        self._subscribed: list[Partition] = []
        #: The topic that was looked at last, of which the next partition most likely is, too; its name or id;
        #: and the image that it was found in.
        self._topic: tuple[TopicImage, str | UUID, MetadataImage] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = 0.0
        self._woken = False
        self._answering = False
        self._leaders = CurrentLeaders(broker) if call.version >= _LEADER_MIN_VERSION else None

    def _foreign_rack(self) -> str | None:
        rack: str = self._call.field("rack_id", "")
        if not rack:
            return None
        node = self._broker.image.nodes.get(self._broker.node_id)
        return None if node is None or node.rack in (None, rack) else rack

    def start(self) -> None:
        self._run(self._begin())

    def _run(self, steps: Iterator[None]) -> None:
        _run(steps, len(self._wanted), self._call)

    def _begin(self) -> Iterator[None]:
        max_wait_ms = ms(self._call.request.max_wait)
        if max_wait_ms <= 0 or not self._wanted or (yield from self._is_ready()):
            yield from self._answer_in_steps()
            return
        for wanted in self._wanted:
            with contextlib.suppress(TidemillError):
                partition = self._partition(wanted)
                partition.subscribe(self, self._wake)
                self._subscribed.append(partition)
            yield
        if self._call.is_hurried:
            yield from self._answer_in_steps()
            return
        loop = asyncio.get_running_loop()
        self._waiting_since = loop.time()
        self._timer = loop.call_later(max_wait_ms / 1000, self._answer)
        self._call.on_hurry = self._answer

    def _wake(self) -> None:
        # Many partitions may move in one turn of the loop: look once, at its end.
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._run(self._answer_if_ready())

    def _answer_if_ready(self) -> Iterator[None]:
        ready = yield from self._is_ready()
        self._woken = False
        if self._timer is not None and ready:
            yield from self._answer_in_steps()

    def _partition(self, wanted: SessionPartition) -> Partition:
        if self._call.authorizer is not None:
            self._authorize(wanted)
        if (
            self._topic is not None
            and self._topic[1] is wanted.topic
            and self._topic[2] is self._broker.image
        ):
            topic = self._topic[0]
        else:
            topic = self._find_topic(wanted.topic)
        try:
            partition = self._broker.find.partition(topic, wanted.index, wanted.current_leader_epoch)
            partition.check_leads()
        except ApiError as error:
            if error.code != ErrorCode.not_leader_or_follower or self._call.version < _FOLLOWERS_MIN_VERSION:
                raise
            follower = self._broker.find.follower(topic, wanted.index)
            if follower is None:
                raise
            return follower
        return partition

    def _find_topic(self, name: str | UUID) -> TopicImage:
        find = self._broker.find
        topic = find.topic(name) if isinstance(name, str) else find.topic_by_id(name)
        self._topic = topic, name, self._broker.image
        return topic

    def _closer_replica(self, partition: Partition, offset: int) -> int:
        """An in-sync replica in the consumer's rack that has something for it; -1 if there is none."""
        if self._rack is None or partition.role is not _LEADER or offset >= partition.high_watermark:
            return _NO_REPLICA
        image = self._broker.image
        for node_id in partition.as_leader.in_sync_followers(offset):
            if image.live(node_id) and image.nodes[node_id].rack == self._rack:
                return node_id
        return _NO_REPLICA

    def _authorize(self, wanted: SessionPartition) -> None:
        topic = wanted.topic
        name = topic if isinstance(topic, str) else self._broker.find.topic_by_id(topic).name
        self._call.authorize(READ, TOPIC, name)

    def _is_ready(self) -> Generator[None, None, bool]:
        """Whether an answer now would be useful: enough bytes, or an error that must be told."""
        if self._min_bytes == 0:
            return True
        total = 0
        for wanted in self._wanted:
            try:
                partition = self._partition(wanted)
                _check_position(partition, wanted.fetch_offset)
                if self._diverged(partition, wanted):
                    return True
                if self._closer_replica(partition, wanted.fetch_offset) != _NO_REPLICA:
                    return True
                total += partition.available_bytes(
                    wanted.fetch_offset,
                    committed=self._committed,
                    enough=min(wanted.max_bytes, self._min_bytes),
                )
            except TidemillError:
                return True
            if total >= self._min_bytes:
                return True
            yield
        return False

    def _diverged(self, partition: Partition, wanted: SessionPartition) -> tuple[int, int] | None:
        """(epoch, end offset) if the reader's last epoch and position cannot both be of this log."""
        if wanted.last_fetched_epoch < 0 or partition.role is not _LEADER:
            return None
        return partition.divergence(wanted.last_fetched_epoch, wanted.fetch_offset)

    # --- the answer

    def _answer(self) -> None:
        self._run(self._answer_in_steps())

    def _answer_in_steps(self) -> Iterator[None]:
        if self._answering:
            return
        self._answering = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._call.waited_seconds = asyncio.get_running_loop().time() - self._waiting_since
        for partition in self._subscribed:
            partition.unsubscribe(self)
        self._subscribed.clear()
        topics: dict[str | UUID, list[FetchPartition]] = {}
        yield from self._read_all(topics)
        header = self._call.header
        encode = partial(
            encode_fetch_response,
            header.api_version,
            header.correlation_id,
            ErrorCode.none,
            self._session.session_id if self._session is not None else 0,
            list(topics.items()),
            node_endpoints=() if self._leaders is None else self._leaders.endpoints,
        )
        if len(self._wanted) <= _STEPPED_PARTITIONS_MIN:
            self._call.reply_buffers(encode())
        else:
            loop = asyncio.get_running_loop()
            encoding = loop.run_in_executor(self._broker.workers, lambda: _with_small_ones_joined(encode()))
            encoding.add_done_callback(lambda done: self._call.reply_buffers(done.result()))

    def _read_all(self, topics: dict[str | UUID, list[FetchPartition]]) -> Iterator[None]:
        """Read one partition at each step, and put what is to be answered into ``topics``."""
        answer_bytes_max = self._broker.budget.answer_bytes_max(self._call.client.address)
        bytes_left = min(
            max(0, self._call.request.max_bytes),
            self._broker.settings.fetch_max_bytes,
            max(answer_bytes_max, 1),
        )
        first = True
        turn = ReadBudget()
        for wanted in self._wanted:
            yield
            result = self._read_one(wanted, bytes_left, first, turn)
            size = sum(map(len, result.records))
            bytes_left -= size
            first = first and not size
            if self._incremental and not self._is_news(wanted, result, size):
                continue
            wanted.told_high_watermark = result.high_watermark
            wanted.told_log_start = result.log_start_offset
            topics.setdefault(wanted.topic, []).append(result)
            if self._session is not None and size:
                self._session.served((wanted.topic, wanted.index))

    def _is_news(self, wanted: SessionPartition, result: FetchPartition, size: int) -> bool:
        return (
            size > 0
            or result.error_code != ErrorCode.none
            or result.diverging_epoch is not None
            or result.preferred_read_replica != _NO_REPLICA
            or result.high_watermark != wanted.told_high_watermark
            or result.log_start_offset != wanted.told_log_start
        )

    def _read_one(
        self, wanted: SessionPartition, bytes_left: int, first: bool, turn: ReadBudget
    ) -> FetchPartition:
        try:
            partition = self._partition(wanted)
            diverging = self._diverged(partition, wanted)
            has_rack = self._rack is not None
            closer = self._closer_replica(partition, wanted.fetch_offset) if has_rack else _NO_REPLICA
            records = memoryview(b"")
            if diverging is None:
                limit = min(bytes_left, max(0, wanted.max_bytes))
                if (limit > 0 or first) and closer == _NO_REPLICA:
                    read = partition.read if partition.role is _LEADER else partition.as_follower.read
                    records = read(
                        wanted.fetch_offset,
                        limit,
                        at_least_one=first,
                        committed=self._committed,
                        budget=turn,
                    )
                else:
                    _check_position(partition, wanted.fetch_offset)
        except StorageError as error:
            return FetchPartition(wanted.index, error.code, -1)
        except ApiError as error:
            return self._refused(wanted, error)
        partition.bytes_out += len(records)
        # Before that an earlier leader may have told more, and what is told must not go back.
        is_known = partition.has_reached_epoch_start
        return FetchPartition(
            wanted.index,
            ErrorCode.none,
            partition.high_watermark if is_known else _NOT_KNOWN,
            partition.last_stable_offset if is_known else _NOT_KNOWN,
            partition.log_start_offset,
            aborted_transactions=self._aborted(partition, records),
            preferred_read_replica=closer,
            records=(records,) if records else (),
            diverging_epoch=diverging,
        )

    def _aborted(self, partition: Partition, records: memoryview) -> list[tuple[int, int]] | None:
        """The aborted transactions that a reader of committed data has to leave out of ``records``."""
        if not self._committed:
            return None
        return [(entry.producer_id, entry.first_offset) for entry in partition.aborted_in(records)]

    def _refused(self, wanted: SessionPartition, error: ApiError) -> FetchPartition:
        if error.code != ErrorCode.offset_out_of_range:
            leaders = self._leaders
            leader = None if leaders is None else leaders.of(wanted.topic, wanted.index, error.code)
            return FetchPartition(wanted.index, error.code, -1, current_leader=leader)
        partition = self._partition(wanted)
        if wanted.fetch_offset > partition.log_end_offset and not self._broker.newest.may_answer(partition):
            # Perhaps another node leads by now, and has it. Told "out of range", a consumer begins elsewhere.
            return FetchPartition(wanted.index, ErrorCode.not_leader_or_follower, _NOT_KNOWN)
        return FetchPartition(
            wanted.index,
            error.code,
            partition.high_watermark,
            partition.last_stable_offset,
            partition.log_start_offset,
        )


def _check_position(partition: Partition, offset: int) -> None:
    """Raise ``ApiError`` unless a reader may stand at ``offset``, on a leader or on a follower."""
    if partition.role is _FOLLOWER:
        partition.as_follower.check_position(offset)
    else:
        partition.check_position(offset)


def _with_small_ones_joined(
    buffers: Iterable[bytes | bytearray | memoryview],
) -> list[bytes | bytearray | memoryview]:
    """Join small buffers of an answer: what each costs to send does not depend on its size."""
    joined: list[bytes | bytearray | memoryview] = []
    small = bytearray()
    for buffer in buffers:
        if len(buffer) < _JOINED_BYTES_MAX:
            small += buffer
            continue
        if small:
            joined.append(small)
            small = bytearray()
        joined.append(buffer)
    return [*joined, small] if small else joined
