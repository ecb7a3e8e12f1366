"""One partition of ``__consumer_offsets`` and the groups that live in it: state inside, shell around."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from tidemill.coordination.log import ReplayedMarker
from tidemill.coordination.shell import ShardShell, resolve
from tidemill.groups.records import decode_record, encode_record
from tidemill.groups.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord
    from tidemill.errors import ErrorCode
    from tidemill.groups.messages import Reply
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import Topics

__all__ = ("GROUPS_TOPIC", "Shard")

GROUPS_TOPIC = "__consumer_offsets"

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Shard(ShardShell):
    """The shell of ``ShardState``. Keys are group ids."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        settings: GroupSettings,
        clock: Clock,
        on_stop: Callable[[Shard], None],
        topics: Topics | None = None,
    ) -> None:
        super().__init__(GROUPS_TOPIC, partition, log, clock, on_stop)
        self.state = ShardState(settings, self._append, topics)

    async def request(
        self, group_id: str, handler: Callable[[asyncio.Future[_T], int], Iterable[Reply]]
    ) -> _T:
        """Run a handler that answers through replies; returns the body of the reply to its token.

        If the caller is cancelled while it waits, the group still answers, to nobody.
        """
        token: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.call_now(group_id, lambda now_ms: self.send(handler(token, now_ms)))
        return await token

    def send(self, replies: Iterable[Reply]) -> None:
        """Answer the requests that these replies are for, once that is durable."""
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
        """``producer``: id and epoch if the records are part of its transaction."""
        encoded = [encode_record(record) for record in records]
        if producer is None:
            self._note_appended(self.log.append(encoded))
        else:
            self._note_appended(self.log.append_transactional(encoded, *producer))

    def _replay(self, entry: ReplayedRecord | ReplayedMarker, now_ms: int) -> None:
        if isinstance(entry, ReplayedMarker):
            self.state.replay_marker(entry.producer_id, commit=entry.commit)
            return
        record = decode_record(entry.key, entry.value)
        if record is None:
            _logger.warning(
                "%s-%d at offset %d: skipped a record whose kind is unknown to this version",
                self.topic,
                self.partition,
                entry.offset,
            )
        else:
            self.state.replay(record, now_ms, entry.producer_id)

    def _loaded(self, now_ms: int) -> Iterable[str]:
        self.state.start(now_ms)
        return self.state.groups

    def _next_deadline_ms(self, key: str) -> int | None:
        group = self.state.groups.get(key)
        return None if group is None else group.next_deadline_ms()

    def _tick(self, key: str, now_ms: int) -> None:
        self.send(self.state.tick(key, now_ms))

    def _die(self, code: ErrorCode) -> None:
        for reply in self.state.die(code):
            assert isinstance(reply.token, asyncio.Future), reply
            resolve(reply.token, reply.body)
