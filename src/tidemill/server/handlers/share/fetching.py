"""ShareFetch: hand records of share groups to their members, and take acknowledgements on the way.

A request that finds nothing waits, up to its limit, without polling: appends wake it, and so do releases and
locks and delays that end. Acknowledgements are begun before the fetch, and the answer waits for both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Final
from uuid import UUID

from tidemill.coordination.share_state import SharePartitionKey
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.server.broker import Broker
from tidemill.server.handlers.records.current_leaders import CurrentLeaders
from tidemill.server.handlers.share.acknowledging import (
    NO_TOPIC_ID,
    Asked,
    Outcome,
    acknowledge_all,
    check_size,
    leader_of,
)
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import GROUP, READ, TOPIC, for_each, for_one
from tidemill.server.requests.call import Call
from tidemill.server.share.led_partition import FetchLimits, LedSharePartition, ShareRecords
from tidemill.share.sessions import FINAL_EPOCH, INITIAL_EPOCH, SessionKey, SessionPartition, ShareSession
from tidemill.wire.hot import SharePartitionData, encode_share_fetch_response
from tidemill.wire.requests import ms

__all__ = ("share_fetch",)

_RECORD_LIMIT: Final = 1
_MEMBER_ID_CHARS_MAX: Final = 255

logger = logging.getLogger(__name__)


@serves("ShareFetch", for_one(READ, GROUP, "group_id"), for_each(READ, TOPIC), overlaps=True)
def share_fetch(broker: Broker, call: Call) -> None:
    """Handle one ShareFetch request; the answer is sent later."""
    call.start_task(_answer(broker, call)).add_done_callback(lambda task: _ended(call, task))


def _ended(call: Call, task: asyncio.Task[None]) -> None:
    if task.cancelled():
        call.abort()
    elif (error := task.exception()) is not None:
        logger.error("a ShareFetch failed", exc_info=error)
        call.abort()


async def _answer(broker: Broker, call: Call) -> None:
    try:
        fetch = _ShareFetch(broker, call)
        await fetch.run()
    except ApiError as error:
        call.reply_buffers(
            encode_share_fetch_response(call.header.correlation_id, error.code, error.message, 0, [])
        )


class _ShareFetch:
    """One ShareFetch request, from its session to its answer. Raises ``ApiError`` if it is refused."""

    def __init__(self, broker: Broker, call: Call) -> None:
        self._broker = broker
        self._call = call
        self._share = broker.share
        request = call.request
        self._key = SessionKey(request.group_id or "", request.member_id or "")
        self._epoch: int = request.share_session_epoch
        self._is_renewal = bool(call.field("is_renew_ack", False))
        check_size(request.topics)
        self._asked = [
            Asked(topic.topic_id or NO_TOPIC_ID, entry.partition_index, entry.acknowledgement_batches)
            for topic in request.topics
            for entry in topic.partitions
        ]
        self._fetched: dict[SessionPartition, ShareRecords | TidemillError] = {}
        self._found: dict[SessionPartition, LedSharePartition] = {}
        #: What wakes the request while it waits.
        self._subscribed: dict[SessionPartition, LedSharePartition] = {}
        #: Partitions that may have something since they were looked at.
        self._due: dict[SessionPartition, None] = {}
        self._woken: asyncio.Future[None] | None = None
        self._is_late = False
        self._check()
        self._session = self._begin_session()

    def _check(self) -> None:
        """Raise ``ApiError`` if the request cannot mean anything."""
        request = self._call.request
        if (
            not self._key.group_id
            or not self._key.member_id
            or len(self._key.member_id) > _MEMBER_ID_CHARS_MAX
        ):
            raise ApiError(ErrorCode.invalid_request, "a ShareFetch names its group and its member")
        limits = (ms(request.max_wait), request.min_bytes, request.max_bytes, request.max_records)
        if self._is_renewal and any(limits):
            raise ApiError(
                ErrorCode.invalid_request,
                "a ShareFetch that renews locks fetches nothing: its wait, bytes and records must be 0",
            )
        if self._epoch == INITIAL_EPOCH and any(each.batches for each in self._asked):
            raise ApiError(
                ErrorCode.invalid_request,
                "the request that opens a share session cannot acknowledge anything",
            )

    def _begin_session(self) -> ShareSession:
        request, share = self._call.request, self._share
        if self._epoch == FINAL_EPOCH:
            return share.sessions.find(self._key)
        if self._epoch == INITIAL_EPOCH:
            session = share.open_session(self._key, self._call.client.connection)
        else:
            session = share.sessions.resume(self._key, self._epoch)
        forgotten = [
            SessionPartition(topic.topic_id or NO_TOPIC_ID, index)
            for topic in request.forgotten_topics_data
            for index in topic.partitions
        ]
        wanted = [SessionPartition(each.topic_id, each.partition) for each in self._asked]
        share.sessions.update(session, wanted, forgotten)
        return session

    async def run(self) -> None:
        acknowledging = self._begin_acknowledging()
        if self._epoch != FINAL_EPOCH and not self._is_renewal:
            await self._fetch()
        outcomes = await acknowledging if acknowledging is not None else []
        if self._epoch == FINAL_EPOCH:
            self._share.close_session(self._key)
        await self._reply(outcomes)

    def _begin_acknowledging(self) -> asyncio.Task[list[Outcome]] | None:
        asked = [each for each in self._asked if each.batches]
        if not asked:
            return None
        return self._call.start_task(
            acknowledge_all(self._broker, self._call, self._key, asked, renews=self._is_renewal)
        )

    # --- fetching

    async def _fetch(self) -> None:
        request, loop = self._call.request, asyncio.get_running_loop()
        if self._asked and any(each.batches for each in self._asked):
            # What is released on the way is handed out again, and locks that are given up make room.
            await asyncio.sleep(0)
        began = loop.time()
        waits = request.min_bytes > 0 and request.max_records > 0
        deadline = began + (ms(request.max_wait) / 1_000 if waits else 0)
        await self._acquire(self._session.in_turn())
        if not self._is_over() and loop.time() < deadline:
            await self._wait_and_acquire(deadline)
        self._call.waited_seconds = loop.time() - began

    def _is_over(self) -> bool:
        """Whether the request is answered now."""
        return bool(self._fetched) or self._is_late or self._call.is_hurried or self._session.is_closed

    async def _acquire(self, partitions: Iterable[SessionPartition]) -> None:
        """Try partitions of the session in turn, until the limits of the request are reached."""
        request = self._call.request
        answer_bytes_max = self._broker.budget.answer_bytes_max(self._call.client.address)
        bytes_left = min(
            max(0, request.max_bytes), self._broker.settings.fetch_max_bytes, max(1, answer_bytes_max)
        )
        records_left = request.max_records
        exact = self._call.field("share_acquire_mode", 0) == _RECORD_LIMIT
        turn = ReadBudget()
        for wanted in partitions:
            if self._call.is_hurried:
                return
            try:
                if self._fetched and (records_left <= 0 or bytes_left <= 0):
                    return
                led = await self._find(wanted)
                if records_left <= 0:
                    await give_way()
                    continue
                limits = FetchLimits(bytes_left, records_left, max(1, request.batch_size), exact)
                # The client may have gone while the state was read: then nobody would hold the records.
                if self._session.is_closed:
                    return
                given = led.acquire(self._key.member_id, limits, turn, at_least_one=not self._fetched)
            except TidemillError as error:
                self._fetched[wanted] = error
                await give_way()
                continue
            if given.record_count:
                self._fetched[wanted] = given
                bytes_left -= given.size_bytes
                records_left -= given.record_count
            await give_way()

    async def _find(self, wanted: SessionPartition) -> LedSharePartition:
        if self._call.authorizer is not None:
            topic = self._broker.find.topic_by_id(wanted.topic_id)
            self._call.authorize(READ, TOPIC, topic.name)
        key = SharePartitionKey(self._key.group_id, wanted.topic_id, wanted.partition)
        led = self._share.loaded(key)
        if led is None:
            led = await self._share.find(key)
        self._found[wanted] = led
        if led.machine.wants_records:
            await led.look_ahead()
        return led

    async def _wait_and_acquire(self, deadline: float) -> None:
        """Wait until there are records, the time is over, or the client is gone."""
        timer = asyncio.get_running_loop().call_at(deadline, self._time_is_over)
        self._call.on_hurry = self._wake
        try:
            # Before the next look, so that nothing comes in between unnoticed.
            self._subscribe(self._found)
            due, self._due = list(self._found), {}
            while True:
                await self._acquire(due)
                self._subscribe(due)
                if self._is_over():
                    return
                if not self._due:
                    self._woken = asyncio.get_running_loop().create_future()
                    await self._woken
                    self._woken = None
                due, self._due = list(self._due), {}
        finally:
            timer.cancel()
            self._call.on_hurry = None
            for wanted in list(self._subscribed):
                self._unsubscribe(wanted)

    def _subscribe(self, partitions: Iterable[SessionPartition]) -> None:
        """Be woken by these partitions; those whose share partition is another one by now are due again."""
        for wanted in partitions:
            led = self._found.get(wanted)
            if led is None or self._subscribed.get(wanted) is led:
                continue
            self._unsubscribe(wanted)
            wake = partial(self._wake_for, wanted)
            led.subscribe(self, wake)
            led.partition.subscribe(self, wake)
            self._subscribed[wanted] = led
            self._due[wanted] = None

    def _unsubscribe(self, wanted: SessionPartition) -> None:
        led = self._subscribed.pop(wanted, None)
        if led is not None:
            led.unsubscribe(self)
            led.partition.unsubscribe(self)

    def _time_is_over(self) -> None:
        # Not asked of the clock again: a timer may come a fraction early.
        self._is_late = True
        self._wake()

    def _wake_for(self, wanted: SessionPartition) -> None:
        self._due[wanted] = None
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # --- the answer

    async def _reply(self, outcomes: Iterable[Outcome]) -> None:
        leaders = CurrentLeaders(self._broker)
        acknowledged = {
            SessionPartition(each.asked.topic_id, each.asked.partition): each for each in outcomes
        }
        named = dict.fromkeys([*self._fetched, *acknowledged])
        if self._epoch == INITIAL_EPOCH:
            named |= dict.fromkeys(self._session.partitions)
        topics: dict[UUID, list[SharePartitionData]] = {}
        for partition in named:
            data = self._data(partition, acknowledged.get(partition), leaders)
            topics.setdefault(partition.topic_id, []).append(data)
            await give_way()
        lock_ms = self._broker.group_config(self._key.group_id).share_record_lock_duration_ms
        self._call.reply_buffers(
            encode_share_fetch_response(
                self._call.header.correlation_id,
                ErrorCode.none,
                None,
                lock_ms,
                list(topics.items()),
                leaders.endpoints,
            )
        )

    def _data(
        self, partition: SessionPartition, outcome: Outcome | None, leaders: CurrentLeaders
    ) -> SharePartitionData:
        fetched = self._fetched.get(partition)
        error = fetched if isinstance(fetched, TidemillError) else None
        code = ErrorCode.none if error is None else error.code
        acknowledge_code = ErrorCode.none if outcome is None else outcome.code
        if isinstance(fetched, ShareRecords):
            # Not the metadata's epoch: a fencing token must not be that of a later leader.
            leader = self._broker.node_id, fetched.leader_epoch
        else:
            leader = leader_of(self._broker, leaders, partition, int(code) or int(acknowledge_code))
        return SharePartitionData(
            partition.partition,
            code,
            None if error is None else error.message,
            acknowledge_code,
            None if outcome is None else outcome.message,
            leader,
            fetched.records if isinstance(fetched, ShareRecords) else (),
            fetched.acquired if isinstance(fetched, ShareRecords) else (),
        )
