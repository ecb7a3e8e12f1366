"""One partition of ``__consumer_offsets`` and the groups that live in it: state inside, shell around."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidemill.control.image import GROUPS_TOPIC
from tidemill.coordination.log import ReplayedMarker
from tidemill.coordination.shards import client_error
from tidemill.coordination.shell import TICK_RETRY_MS, ShardShell, resolve
from tidemill.errors import DiskFull, ErrorCode, TidemillError
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.memory import NO_MEMORY
from tidemill.groups.records import OffsetCommitRecord, decode_record, encode_record
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord
    from tidemill.groups.consumer.draft import GroupDraft
    from tidemill.groups.memory import GroupMemory
    from tidemill.groups.messages import Reply
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.share.heartbeats import Planned
    from tidemill.groups.share.messages import ShareHeartbeatRequest
    from tidemill.groups.topics import Topics

__all__ = ("Shard", "membership_error")


_T = TypeVar("_T")

_Encoded = list[tuple[bytes, bytes | None]]


def membership_error(failure: TidemillError) -> ErrorCode:
    """The error for a member that joins; on a full disk it is one that clients show to the application."""
    return ErrorCode.unknown_server_error if isinstance(failure, DiskFull) else client_error(failure)


class _Draft(Protocol):
    """A change that was worked out apart from the state."""

    @property
    def size_bytes(self) -> int:
        """Estimate of the group's memory once the draft is adopted."""

    def is_current(self) -> bool:
        """Whether the group is unchanged since it was copied for the draft."""

    def adopt(self) -> Iterable[Reply]:
        """Make the draft part of the state."""


class Shard(ShardShell):
    """The shell of ``ShardState``. Keys are group ids."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        settings: GroupSettings,
        clock: Clock,
        on_stop: Callable[[Shard], None],
        topics: Topics,
        one_draft: asyncio.Lock,
        delete_share_state: Callable[[Shard, str], None],
        member_memory: GroupMemory,
        committed_memory: GroupMemory,
    ) -> None:
        super().__init__(GROUPS_TOPIC, partition, log, clock, on_stop)
        #: All shards share it. One thread is enough: threads that compute take turns with the event loop.
        self._one_draft = one_draft
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._delete_share_state = delete_share_state
        self._member_memory = member_memory
        self._committed_memory = committed_memory
        self.state = ShardState(settings, self._append, topics)

    # -- large groups ----------------------------------------------------------------------------------

    async def on_draft(
        self,
        group_id: str,
        needed: Callable[[], bool],
        event: Callable[[GroupDraft], _T],
        host: str | None = None,
    ) -> tuple[_T] | None:
        """Apply an event to a draft of a group, in a thread; gives its result once that is durable.

        None if a draft is not ``needed`` any more when its turn comes. Then nothing has happened. ``host`` is
        that of a client that asks for memory: then GROUP_MAX_SIZE_REACHED is raised if the group would take
        more than it may have.
        """

        def make(now_ms: int) -> tuple[_Draft, Callable[[], tuple[_T, _Encoded]]]:
            draft = self.state.draft(group_id, now_ms)
            return draft, partial(draft.run, event)

        return await self._work_out(group_id, needed, make, host)

    async def on_share_draft(
        self, request: ShareHeartbeatRequest, needed: Callable[[], bool]
    ) -> Planned | None:
        """Carry out a heartbeat of a large share group, planned in a thread; None if not ``needed``."""

        def make(now_ms: int) -> tuple[_Draft, Callable[[], tuple[Planned, _Encoded]]]:
            draft = self.state.share_draft(request, now_ms)
            return draft, draft.run

        host = request.client_host if request.topics else None
        done = await self._work_out(request.group_id, needed, make, host)
        return None if done is None else done[0]

    async def _work_out(
        self,
        group_id: str,
        needed: Callable[[], bool],
        make: Callable[[int], tuple[_Draft, Callable[[], tuple[_T, _Encoded]]]],
        host: str | None,
    ) -> tuple[_T] | None:
        """Work out a draft in a thread and adopt it. Again, if the group has changed meanwhile."""
        async with self._one_draft:
            while True:
                if self.stopped is not None:
                    raise self.stopped
                if not needed():
                    return None
                draft, run = make(self.clock.now_ms())
                work = partial(self._run_draft, run)
                result, batch = await asyncio.get_running_loop().run_in_executor(None, work)
                if self.call_now(group_id, partial(self._adopt, group_id, draft, batch, host)):
                    break
        await self.barrier()
        if batch is None:
            await self.confirm_newest()
        return (result,)

    def _run_draft(self, run: Callable[[], tuple[_T, _Encoded]]) -> tuple[_T, bytes | None]:
        """The result of a draft, and the batch of its records, if there are any. Runs in a thread."""
        result, records = run()
        return result, self.log.build(records) if records else None

    def _adopt(
        self, group_id: str, draft: _Draft, batch: bytes | None, host: str | None, now_ms: int
    ) -> bool:
        """Replace a group by its draft; False if the group has changed since."""
        del now_ms
        if not draft.is_current():
            return False
        more_bytes = draft.size_bytes - self._member_memory.of_group(self.partition, group_id)
        if host is not None and not self._member_memory.has_capacity(host, more_bytes):
            raise Refused(
                ErrorCode.group_max_size_reached,
                f"{NO_MEMORY}: group {group_id[:200]!r} would take {more_bytes} bytes more",
            )
        if batch is not None:
            self._put(partial(self.log.append_built, batch), may_use_reserve=True)
        self.send(draft.adopt())
        return True

    async def _remove_overdue(self, group_id: str) -> None:
        """Remove the overdue members of a large group."""
        retry_ms = None
        try:
            await self.on_draft(
                group_id,
                lambda: self.state.is_large_consumer_group(group_id),
                lambda draft: draft.handlers.tick(draft.group, draft.now_ms),
            )
        except TidemillError as error:
            if self.stopped is None:
                self._warn_of_tick(group_id, error)
                retry_ms = self.clock.now_ms() + TICK_RETRY_MS
        finally:
            del self._removals[group_id]
            if self.stopped is None:
                if retry_ms is None:
                    self._schedule(group_id)
                else:
                    self._schedule_at(group_id, retry_ms)

    async def close(self) -> None:
        """Stop and wait until nothing of the shard runs any more."""
        removals = tuple(self._removals.values())
        for removal in removals:
            removal.cancel()
        await super().close()
        await asyncio.gather(*removals, return_exceptions=True)

    # -- requests --------------------------------------------------------------------------------------

    async def request(
        self, group_id: str, handler: Callable[[asyncio.Future[_T], int], Iterable[Reply]]
    ) -> _T:
        """Run a handler that answers through replies; returns the body of the reply to its token.

        If the caller is cancelled while it waits, the group still answers, to nobody.
        """
        token: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.call_now(group_id, lambda now_ms: self.send(handler(token, now_ms)))
        reply = await token
        await self.confirm_newest()
        return reply

    async def delete_group(self, group_id: str) -> ErrorCode:
        """DeleteGroups for one group. If it has very many offsets, others have their turn in between."""
        while True:
            code = await self.call(group_id, lambda now_ms: self.state.delete_group(group_id, now_ms))
            if code is not None:
                return code
            await asyncio.sleep(0)

    def send(self, replies: Iterable[Reply]) -> None:
        """Answer the requests that these replies are for, once everything appended so far is committed."""
        for reply in replies:
            assert isinstance(reply.token, asyncio.Future), reply
            self._hold(reply.token, reply.body)

    def complete_transaction(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """End a producer's transaction here: what it had pending is committed or vanishes."""
        self._note_appended(
            self.log.append_marker(
                producer_id, producer_epoch, commit=commit, coordinator_epoch=coordinator_epoch
            )
        )
        self.state.replay_marker(producer_id, commit=commit)

    def _append(self, records: Sequence[GroupRecord], producer: tuple[int, int] | None = None) -> None:
        """Put records into the log; ``producer`` is id and epoch if they are part of its transaction."""
        encoded = [encode_record(record) for record in records]
        if producer is None:
            is_commit = any(isinstance(record, OffsetCommitRecord) for record in records)
            self._put(lambda: self.log.append(encoded), may_use_reserve=not is_commit)
        else:
            self._note_appended(self.log.append_transactional(encoded, *producer))

    def _put(self, append: Callable[[], int], *, may_use_reserve: bool) -> None:
        """Append. On a full disk, what members need to come and go takes the space of the disk's reserve."""
        try:
            self._note_appended(append())
        except DiskFull as error:
            if not may_use_reserve or not self.log.give_up_reserve(error):
                raise
            self._note_appended(append())

    def _replay_marker(self, marker: ReplayedMarker) -> None:
        self.state.replay_marker(marker.producer_id, commit=marker.commit)

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        record = decode_record(entry.key, entry.value)
        if record is not None:
            self.state.replay(record, now_ms, entry.producer_id)
        return record is not None

    def _loaded(self, now_ms: int) -> Iterable[str]:
        yield from self.state.start(now_ms)
        self._note_offsets()

    def _schedule(self, key: str) -> None:
        """Plan what is due in a group, of which something may have changed."""
        super()._schedule(key)
        group = self.state.groups.get(key)
        self._member_memory.note(self.partition, key, {} if group is None else group.bytes_by_host)
        if self.state.offsets.is_resized(key):
            self._committed_memory.note(self.partition, key, self.state.offsets.bytes_by_host(key))

    def call_now(self, key: str | None, handler: Callable[[int], _T]) -> _T:
        """Run a handler whose result may be told before anything is committed."""
        try:
            return super().call_now(key, handler)
        finally:
            if self.stopped is None:
                self._note_offsets()

    def _note_offsets(self) -> None:
        offsets = self.state.offsets
        for group_id in offsets.take_resized():
            self._committed_memory.note(self.partition, group_id, offsets.bytes_by_host(group_id))

    def _next_deadline_ms(self, key: str) -> int | None:
        group = self.state.groups.get(key)
        return None if group is None or key in self._removals else group.next_deadline_ms()

    def _tick(self, key: str, now_ms: int) -> None:
        group = self.state.groups.get(key)
        if (
            isinstance(group, ConsumerGroup)
            and self.state.is_large_consumer_group(key)
            and group.overdue(now_ms)
        ):
            # The task looks at the group again when it has ended.
            self._removals[key] = asyncio.get_running_loop().create_task(self._remove_overdue(key))
        else:
            self.send(self.state.tick(key, now_ms))
        if isinstance(group, ShareGroup) and group.delete_at_ms is not None and group.delete_at_ms <= now_ms:
            group.retry_deletion_later(now_ms)
            self._delete_share_state(self, key)

    def schedule_deletions(self) -> None:
        """Look at the share groups that have state to delete when it is time."""
        for group_id, group in self.state.groups.items():
            if isinstance(group, ShareGroup) and group.delete_at_ms is not None:
                self._schedule(group_id)

    def _die(self, code: ErrorCode) -> None:
        self._member_memory.forget(self.partition)
        self._committed_memory.forget(self.partition)
        for reply in self.state.die(code):
            assert isinstance(reply.token, asyncio.Future), reply
            resolve(reply.token, reply.body)
