"""``db.share(…)``: a member of a share group, which takes records one by one and settles each.

Rules:

- Nothing is settled behind its reader's back. A record that was handed out and is not settled stays locked
  for this consumer, however many others are asked for, until its lock ends; closing gives it back.
- Records that wait here for their turn and do not get it go back as if they had not been delivered. While a
  record is here that was delivered often, none are fetched ahead: it may end this process, and the others
  would lose a delivery with it.
- Records that wait here for their turn keep their locks: they are renewed. What was handed out is renewed by
  the program that has it (``record.renew()``), or by the worker that runs its handler.
- ``accept``, ``release`` and ``reject`` are told to the node in the background, whatever thread they come
  from; ``flush`` waits until the node has them on disk, and raises if it did not take some.
- Every node that leads a partition is asked side by side (``link``). Leaders that move are followed, and the
  coordinator too. What passes by itself is tried again for the connection's ``timeout_ms``.
- A record whose lock is gone (its leader moved, its connection was lost, its time was over) comes again, to
  this or another member. Settling it then has no effect, and is counted as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tidemill.client.arguments import shown, whole
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.process_bound import Unpicklable
from tidemill.client.share.decoding import Handed, Taken, take_records
from tidemill.client.share.holdings import Holdings, ShareCounts
from tidemill.client.share.link import NodeLink
from tidemill.client.share.membership import ShareMembership
from tidemill.client.share.outbox import Outcome
from tidemill.client.share.pace import Pace
from tidemill.client.share.record import Acknowledge, Settlement, ShareRecord
from tidemill.client.share.routing import Routing
from tidemill.errors import ApiError, ConfigError, ConnectionClosed, ErrorCode, TableError, TidemillError

if TYPE_CHECKING:
    from tidemill.client.producing.transactional import TransactionalProducer
    from tidemill.client.share.group_configs import GroupConfigs
    from tidemill.client.share.table_rows import TableRows
    from tidemill.client.share.transaction import AsyncShareTransaction

__all__ = ("AsyncShare",)

_log = logging.getLogger(__name__)

_MAX_WAIT_MS: Final = 500
#: Records that may wait here: about the lock limit of a partition, which is the node's bound.
_AHEAD_MAX: Final = 2_000
_TICK_SECONDS: Final = 0.25
_CLOSE_FLUSH_SECONDS: Final = 10.0
_LATE_ANSWER_SECONDS: Final = 1.0
_NEW_PARTITIONS_SECONDS: Final = 2.0
_RENEW: Final = Settlement(Acknowledge.RENEW)
_RELEASE: Final = Settlement(Acknowledge.RELEASE)
_GAP: Final = Settlement(Acknowledge.GAP)


class AsyncShare(Unpicklable):
    """A member of a share group: ``async for record in db.share("emails", "outbox")``.

    It joins the group when the first record is asked for, and leaves it when the loop is left; in an ``async
    with`` statement, at its end. A record that is not settled when the next one is asked for stays locked for
    this member until its lock ends, or until it leaves: then it is delivered again.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: Sequence[str],
        *,
        configs: GroupConfigs | None = None,
        concurrency: int = 0,
        renew_for: float | None = None,
    ) -> None:
        self.cluster = cluster
        self.group = group
        self.topics = tuple(topics)
        self.max_wait_ms = _MAX_WAIT_MS
        self._configs = configs
        #: How many records are worked on side by side; 0: a loop asks for one after the other.
        self._concurrency = concurrency
        #: For how many seconds locks of records in hand are renewed; None: for as long as they are worked on.
        self._renew_for = renew_for
        self._routing = Routing(self)
        self._membership = ShareMembership(cluster, group, self.topics, self._routing.assign)
        self.member_id = self._membership.member_id
        self.topic_ids: dict[str, UUID] = {}
        self.topic_names: dict[UUID, str] = {}
        self._tables: dict[str, TableRows] = {}
        self._holdings = Holdings()
        self._pace = Pace(_AHEAD_MAX)
        #: Records that wait for their turn. Any thread may take from it; None wakes a thread that waits.
        self._ready: SimpleQueue[ShareRecord | None] = SimpleQueue()
        #: What threads have said, for the event loop to pick up.
        self._said: deque[tuple[ShareRecord, Settlement]] = deque()
        self._is_woken = False
        self._waiting = 0
        self._handed_at = 0.0
        #: Nodes that had nothing to hand out when they were last asked.
        self._empty_nodes: set[int] = set()
        self._failure: TidemillError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._starting = asyncio.Lock()
        self._started = False
        self._closed = False
        self._entered = False
        self._giving_back = False
        self._has_failed = asyncio.Event()
        self._available = asyncio.Event()
        self._confirmed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._producer: TransactionalProducer | None = None

    def __repr__(self) -> str:
        return f"<share group {self.group}: {', '.join(self.topics)}{', closed' if self._closed else ''}>"

    def _instead_of_a_pickle(self) -> str:
        opening = f"tidemill.connect({self.cluster.servers!r})"
        return f"Join the group there: {opening}.share({self.group!r}, {list(self.topics)!r})"

    async def __aenter__(self) -> AsyncShare:
        self._entered = True
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncGenerator[ShareRecord]:
        return self.records()

    @property
    def counts(self) -> ShareCounts:
        """What this member has seen and done so far."""
        return self._holdings.counts

    # --- reading

    async def records(self) -> AsyncGenerator[ShareRecord]:
        """Yield records as they come, without an end."""
        try:
            while True:
                yield await self.next()
        finally:
            if not self._entered:
                await self.close()

    async def next(self) -> ShareRecord:
        """The next record; waits until there is one."""
        record = self.take()
        if record is not None:
            return record
        await self.start()
        self._waiting += 1
        try:
            while True:
                self._raise_failure()
                record = self._pop()
                if record is not None:
                    return record
                self._available.clear()
                self._routing.wake()
                await self._available.wait()
        finally:
            self._waiting -= 1

    async def poll(self, max_records: int = 500, *, timeout: float = 1.0) -> list[ShareRecord]:  # noqa: ASYNC109
        """Up to so many records, as soon as there are any; none if none came within ``timeout`` seconds."""
        max_records = whole("max_records", max_records, least=1)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
            raise ConfigError(f"timeout is a number of seconds, not {shown(timeout)}")
        try:
            async with asyncio.timeout(timeout):
                found = [await self.next()]
        except TimeoutError:
            return []
        while len(found) < max_records and (record := self._pop()) is not None:
            found.append(record)
        return found

    def take(self) -> ShareRecord | None:
        """A record that is here already; None if there is none. Any thread may call it."""
        if self._handed_at and not self._concurrency:
            self._pace.note(time.monotonic() - self._handed_at)
        record = self._pop()
        if record is not None and not self._concurrency and self._ready.qsize() * 2 < self._pace.ahead(1):
            self._wake_loop()
        return record

    def take_blocking(self) -> ShareRecord | None:
        """The next record, for a thread that waits for it; None if ``wake_threads`` was called."""
        while True:
            record = self._ready.get()
            if record is None or self._hand_out(record):
                return record

    def wake_threads(self, count: int) -> None:
        """Let so many threads return from ``take_blocking`` with nothing."""
        for _ in range(count):
            self._ready.put(None)

    def give_back(self) -> None:
        """Take no more records, and return those that wait here: somebody else can have them at once."""
        self._giving_back = True
        while (record := self._pop()) is not None:
            record._settle(record._link.giving_back)

    async def until_failed(self) -> TidemillError:
        """Wait for an error that ends this consumer."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    def _pop(self) -> ShareRecord | None:
        try:
            while True:
                record = self._ready.get_nowait()
                if record is not None and self._hand_out(record):
                    return record
        except Empty:
            return None

    def _hand_out(self, record: ShareRecord) -> bool:
        """Give a record to its reader, unless its lock was lost while it waited."""
        if record._lost:
            return False
        record._handed_at = self._handed_at = time.monotonic()
        return True

    # --- settling, from any thread

    def settle(self, record: ShareRecord, settlement: Settlement) -> None:
        """Tell the node what became of a record. Records call it."""
        if self._concurrency:
            self._pace.note(time.monotonic() - record._handed_at)
        self._said.append((record, settlement))
        self._wake_loop()

    def renew(self, record: ShareRecord) -> None:
        """Ask the node for more time for a record. Records call it."""
        self._said.append((record, _RENEW))
        self._wake_loop()

    # --- transactions

    def transaction(self) -> AsyncShareTransaction:
        """A transaction that accepts records and writes, all or nothing. Use it in ``async with``."""
        from tidemill.client.producing.transactional import TransactionalProducer
        from tidemill.client.share.transaction import AsyncShareTransaction

        if self._producer is None:
            # Each member has an id of its own: nobody else goes on with its transactions.
            name = f"share:{self.group}:{self.member_id}"
            self._producer = TransactionalProducer(self.cluster, name)
        return AsyncShareTransaction(self, self._producer)

    def check_held(self, records: Iterable[ShareRecord]) -> None:
        """Raise ``ApiError`` if some of these records are not held any more."""
        self._hear()
        lost = [record for record in records if not self._holdings.holds(record)]
        if lost:
            raise ApiError(
                ErrorCode.invalid_record_state,
                f"group {self.group!r}: the locks of {len(lost)} records had ended, they come again",
            )

    def hand_over(self, records: Sequence[ShareRecord]) -> None:
        """Let go of records that a transaction accepts. Raises ``ApiError`` if some are not held any more."""
        self.check_held(records)
        for record in records:
            self._holdings.let_go(record)

    def leave_locked(self, record: ShareRecord) -> None:
        """Forget a record: nobody gets it before its lock ends, or this member leaves."""
        if self._holdings.holds(record):
            self._holdings.let_go(record)

    def ended_in_transaction(self, records: Sequence[ShareRecord], *, accepted: bool) -> None:
        """Hear what became of records that a transaction was to accept."""
        counts = self._holdings.counts
        if accepted:
            counts.accepted += len(records)
        else:
            counts.lost += len(records)
        self._empty_nodes.clear()
        self._routing.wake()

    def _wake_loop(self) -> None:
        loop = self._loop
        if self._is_woken or loop is None:
            return
        self._is_woken = True
        # After the end of the loop there is nobody to tell.
        with contextlib.suppress(RuntimeError):
            if threading.get_ident() == self._loop_thread:
                loop.call_soon(self._hear)
            else:
                loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        """Carry out the settlements and renewals that other threads have asked for."""
        self._is_woken = False
        while self._said:
            record, settlement = self._said.popleft()
            if settlement is _RENEW:
                self._renew_lock(record)
            elif self._holdings.settle(record):
                record._link.outbox.put((record.topic, record.partition), record.offset, settlement)
        self._check_confirmed()
        self._routing.wake()

    def _renew_lock(self, record: ShareRecord) -> None:
        if record._link.can_renew and self._holdings.renew(record):
            record._link.outbox.put((record.topic, record.partition), record.offset, _RENEW)

    async def lag(self) -> int:
        """How many records of its topics the group has not finished."""
        from tidemill.client.share.lag import group_lag

        return await group_lag(self.cluster, self.group, self._routing.topics)

    async def flush(self) -> None:
        """Wait until the nodes have on disk everything that was settled so far.

        Raises ``ApiError`` INVALID_RECORD_STATE if some of it, since the last ``flush``, was not taken: those
        records were delivered again, or will be.
        """
        while self._said or not self._holdings.is_confirmed:
            self._raise_failure()
            self._confirmed.clear()
            await self._confirmed.wait()
        self._holdings.raise_failures(self.group)

    @property
    def is_drained(self) -> bool:
        """Whether every node said that it has nothing to hand out now, and all that it gave is settled."""
        fetching = {link.node_id for link in self._routing if link.partitions}
        is_settled = not (self._holdings or self._said) and self._holdings.is_confirmed
        return is_settled and bool(fetching) and fetching <= self._empty_nodes

    @property
    def has_no_more(self) -> bool:
        """Whether every node has said, since the last record came, that it has nothing to hand out now."""
        fetching = {link.node_id for link in self._routing if link.partitions}
        return bool(fetching) and fetching <= self._empty_nodes and not self._ready.qsize()

    # --- what links ask and report

    def wanted(self) -> int:
        """How many records a node may be asked for now."""
        if self._closed or self._giving_back or self._failure is not None:
            return 0
        buffered = self._ready.qsize()
        ahead = 0 if self._holdings.has_suspects else self._pace.ahead(self._concurrency or 1)
        if self._concurrency:
            missing = self._concurrency + ahead - len(self._holdings)
        else:
            missing = min(1, self._waiting) + ahead - buffered
        # Small requests cost as much as large ones, unless somebody waits.
        if missing <= 0 or (buffered and missing * 2 < ahead):
            return 0
        fetching = sum(bool(link.partitions) for link in self._routing)
        return -(-missing // max(1, fetching))

    def holds_of(self, link: NodeLink) -> bool:
        """Whether records from this node are held, or wait for its answer."""
        return self._holdings.any_of(link)

    def took(self, link: NodeLink, partition: TopicPartition, part: Any, lock_seconds: float) -> None:
        """Take the records in a node's answer about one partition."""
        try:
            taken = take_records(part.records or b"", part.acquired_records, partition)
        except ApiError as error:
            _log.error("%s; its records are released", error.message)
            for each in part.acquired_records:
                link.outbox.put_range(partition, each.first_offset, each.last_offset, _RELEASE)
            link.wake()
            return
        self._tell_unseen(link, partition, taken)
        # The epoch of the leader that gave them. The metadata's may be that of a later leader.
        epoch = part.current_leader.leader_epoch
        records = [self._record(link, partition, handed, epoch) for handed in taken.records]
        self._holdings.lock_seconds = lock_seconds or self._holdings.lock_seconds
        self._holdings.add(records, asyncio.get_running_loop().time())
        self._empty_nodes.clear()
        rows = self._tables.get(partition[0])
        if rows is None or self._decoded(rows, taken, records):
            self._offer(records)

    def _record(
        self, link: NodeLink, partition: TopicPartition, handed: Handed, leader_epoch: int
    ) -> ShareRecord:
        key, value, timestamp_ms, headers, offset = handed.record
        record = ShareRecord(
            self, *partition, offset, key, value, timestamp_ms, headers, handed.delivery_count, leader_epoch
        )
        record._link = link
        return record

    def _tell_unseen(self, link: NodeLink, partition: TopicPartition, taken: Taken) -> None:
        """Settle the offsets that this member was handed and that give no readable record."""
        for first, last in taken.gaps:
            link.outbox.put_range(partition, first, last, _GAP)
        for first, last in taken.unread:
            link.outbox.put_range(partition, first, last, _RELEASE)
        for first, last, reason in taken.undecodable:
            _log.error(
                "%s-%d: records at offsets %d to %d are rejected, they cannot be decoded: %s",
                *(*partition, first, last, reason),
            )
            why = Settlement(Acknowledge.REJECT, reason=f"the record cannot be decoded: {reason}")
            link.outbox.put_range(partition, first, last, why)
        if link.outbox:
            link.wake()

    def _offer(self, records: Iterable[ShareRecord]) -> None:
        for record in records:
            if self._giving_back:
                record._settle(record._link.giving_back)
            else:
                self._ready.put(record)
        self._available.set()

    def _decoded(self, rows: TableRows, taken: Taken, records: Sequence[ShareRecord]) -> bool:
        """Give records of a table their rows. False if the table's newest schema is asked for first."""
        try:
            rows.give(taken, records)
        except TableError:
            self._spawn(self._decode_newer(rows, taken, records))
            return False
        return True

    async def _decode_newer(self, rows: TableRows, taken: Taken, records: Sequence[ShareRecord]) -> None:
        await rows.renew()
        try:
            rows.give(taken, records)
        except TableError as error:
            _log.error("group %r: rows that cannot be decoded are rejected: %s", self.group, error.message)
            for record in records:
                record.reject(f"the row cannot be decoded: {error.message}")
            return
        self._offer(records)

    def fetched(self, link: NodeLink, was_empty: bool) -> None:
        """Called when a node has answered a fetch, with or without records."""
        if was_empty:
            self._empty_nodes.add(link.node_id)

    def settled(self, outcomes: Sequence[Outcome]) -> None:
        """Called with what became of settlements and renewals."""
        if outcomes:
            self._holdings.answered(outcomes, asyncio.get_running_loop().time())
            # A record that was released can be handed out again.
            self._empty_nodes.clear()
            self._check_confirmed()

    def lost(self, link: NodeLink, partitions: Iterable[TopicPartition] | None, why: str) -> None:
        """Called when the locks of this node's records are gone: those of these partitions, or all."""
        gone = None if partitions is None else set(partitions)
        count = self._holdings.lose(
            lambda record: (
                record._link is link and (gone is None or (record.topic, record.partition) in gone)
            ),
            why,
        )
        if count:
            _log.warning("group %r: the locks of %d records are gone: %s", self.group, count, why)
        self._check_confirmed()
        self._routing.wake()

    def moved(self) -> None:
        """Called when the metadata is stale: other nodes may lead the partitions now."""
        self._routing.moved()

    def failed(self, error: TidemillError) -> None:
        """End this consumer because of an error, which every reader gets."""
        if self._failure is None and not self._closed:
            self._failure = error
            self._has_failed.set()
            self._available.set()
            self._confirmed.set()

    def _check_confirmed(self) -> None:
        if self._holdings.is_confirmed and not self._said:
            self._confirmed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ConnectionClosed(f"{self!r}; open another one with db.share")

    # --- the life of a member

    async def start(self) -> None:
        """Join the group, if that has not happened. The first ``next`` does it by itself."""
        async with self._starting:
            self._raise_failure()
            if self._started:
                return
            self._loop = asyncio.get_running_loop()
            self._loop_thread = threading.get_ident()
            if self._configs is not None:
                limit = await self._configs.apply(self.cluster, self.group)
                if limit is not None:
                    self._holdings.suspect_from = max(2, -(-limit // 2))
            self._routing.topics = self._membership.topics = await self._subscription()
            await self._membership.join()
            for work in (self._membership.stay(), self._routing.run(), self._keep_locks()):
                self._spawn(work)
            if any(rows.is_partitioned for rows in self._tables.values()):
                self._spawn(self._follow_partitions())
            self._started = True

    async def close(self) -> None:
        """Leave the group: what is not settled goes back to it. Closing twice is fine."""
        if self._closed:
            return
        if self._started and self._failure is None:
            self.give_back()
            # The node has handed out what is on its way to here: it goes back, too.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.max_wait_ms / 1000 + _LATE_ANSWER_SECONDS):
                    await asyncio.gather(*(link.fetch_answered() for link in self._routing))
            self._hear()
            # Whatever cannot be told now is delivered again.
            with contextlib.suppress(TidemillError, TimeoutError):
                async with asyncio.timeout(_CLOSE_FLUSH_SECONDS):
                    await self.flush()
        self._closed = True
        self._available.set()
        self._confirmed.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._routing.close()
        self._holdings.lose(lambda record: True, "the consumer was closed")
        await self._membership.leave()

    async def _subscription(self) -> tuple[str, ...]:
        """The topics to read. A table has rows, and may have a topic for each of its partitions."""
        if not any("." in topic for topic in self.topics):
            return self.topics
        from tidemill.client.share.table_rows import table_rows

        tables = await table_rows(self.cluster, self.topics)
        self._tables = {topic: rows for rows in tables.values() for topic in rows.topics}
        return (*(topic for topic in self.topics if topic not in tables), *self._tables)

    async def _follow_partitions(self) -> None:
        """Read the topics of table partitions that come later, too."""
        while True:
            await asyncio.sleep(_NEW_PARTITIONS_SECONDS)
            topics = await self._subscription()
            if set(topics) != set(self._routing.topics):
                self._routing.topics = topics
                self._membership.subscribe(topics)

    async def _keep_locks(self) -> None:
        """Renew what waits here, give up what was not settled in time, and notice connections that broke."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self._holdings.lock_seconds / 10))
            due = self._holdings.due(loop.time(), renew_handed_out=bool(self._concurrency))
            for record in due.to_renew:
                in_hand = time.monotonic() - record._handed_at if record._handed_at else 0.0
                if self._renew_for is None or in_hand < self._renew_for:
                    self._renew_lock(record)
            if due.expired:
                _log.warning(
                    "group %r: %d records were not settled within their lock of %g seconds, they come again; "
                    "call record.renew() during long work, or raise share.record.lock.duration.ms",
                    *(self.group, due.expired, self._holdings.lock_seconds),
                )
            if due.to_renew or due.expired or any(link.is_broken for link in self._routing):
                self._routing.wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._background(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _background(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TidemillError as error:
            self.failed(error)
        except Exception as error:  # noqa: BLE001 - readers get it, as they are the ones who can act
            _log.exception("group %r: the consumer stops", self.group)
            self.failed(TidemillError(f"the share consumer failed: {type(error).__name__}: {error}"))
