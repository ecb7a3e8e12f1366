"""The share partitions of a node: found by key, loaded once, dropped when they are no longer its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from tidemill.coordination.share_state import SharePartitionKey
from tidemill.coordination.turns import TurnQueue
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker.time_search import find_time
from tidemill.server.share.led_partition import LedSharePartition
from tidemill.share.partition.values import Totals
from tidemill.share.sessions import SessionKey, ShareSession, ShareSessions

if TYPE_CHECKING:
    from tidemill.config.group_keys import GroupConfig
    from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
    from tidemill.coordination.clock import Timer
    from tidemill.coordination.share_state import LogPosition, Persister, StateBatch
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker
    from tidemill.server.coordinators.persister import NodePersister, Transaction
    from tidemill.share.dead_letters import DeadLetters

__all__ = ("ShareService",)

#: Groups whose totals are kept after their last share partition here has ended; the oldest go first.
_PAST_GROUPS_MAX: Final = 10_000
#: Acknowledgements that are taken, written or settled in one turn, and then those of one more partition.
_RECORDS_PER_TURN: Final = 500


class ShareService:
    """The share partitions whose data this node leads, and the sessions of their members."""

    def __init__(self, broker: Broker, persister: NodePersister) -> None:
        self._broker = broker
        self._persister = persister
        self.persister: Persister = persister
        self.sessions: ShareSessions = ShareSessions(broker.settings.group_share_max_share_sessions)
        #: Lets the work for very many records of many share partitions go on a part at a time.
        self.turns = TurnQueue(_RECORDS_PER_TURN)
        #: Writes dead letters; None: there are none, and records that die are just finished.
        self.dead_letters: DeadLetters | None = None
        self._by_group: dict[str, dict[SharePartitionKey, LedSharePartition]] = {}
        self._loading: dict[SharePartitionKey, asyncio.Task[LedSharePartition]] = {}
        #: What happened in share partitions that have ended since, by group.
        self._past: dict[str, Totals] = {}
        broker.controller.subscribe(self._metadata_changed)

    # --- what share partitions need

    async def write_in_transaction(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        batches: Sequence[StateBatch],
        transaction: Transaction,
        log_position: LogPosition,
    ) -> None:
        """Have a transaction decide on the state of records."""
        await self._persister.write_in_transaction(
            key, state_epoch, leader_epoch, batches, transaction, log_position
        )

    @property
    def workers(self) -> Executor:
        return self._broker.workers

    @property
    def max_decompressed_bytes(self) -> int:
        return self._broker.settings.max_decompressed_bytes

    def config(self, group_id: str) -> GroupConfig:
        return self._broker.group_config(group_id)

    def wall_ms(self) -> int:
        return self._broker.clock_ms()

    def times(self) -> tuple[int, int]:
        """The time of the steady clock, and the time of day."""
        return self._broker.steady_ms(), self._broker.clock_ms()

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Timer:
        return self._broker.clock.call_at(when_ms, callback)

    async def reset_offset(self, partition: Partition, config: GroupConfig) -> int:
        """Where a group begins that has no state of a partition yet."""
        committed = config.share_isolation_level == "read_committed"
        if config.share_auto_offset_reset == "earliest":
            return partition.log_start_offset
        latest = partition.latest_offset(committed=committed)
        back_ms = config.share_reset_duration_ms
        if back_ms is None:
            return latest
        found = await find_time(self._broker, partition, self.wall_ms() - back_ms, latest)
        return latest if found is None else found.offset

    # --- finding

    def __iter__(self) -> Iterator[LedSharePartition]:
        for group in list(self._by_group.values()):
            yield from list(group.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_group.values()))

    def of_group(self, group_id: str) -> list[LedSharePartition]:
        """The share partitions of a group that are loaded here."""
        return list(self._by_group.get(group_id, {}).values())

    def loaded(self, key: SharePartitionKey) -> LedSharePartition | None:
        """The share partition, if it is loaded, confirmed, and this node leads its data. Raises
        ``TidemillError`` if not the latter.
        """
        led = self._kept(key)
        return None if led is None or not led.is_confirmed else led

    def _kept(self, key: SharePartitionKey) -> LedSharePartition | None:
        partition = self._partition(key)
        led = self._by_group.get(key.group_id, {}).get(key)
        if led is None:
            return None
        if led.partition is not partition:
            led.end(partition.not_leader())
            return None
        led.refresh()
        return led

    async def find(self, key: SharePartitionKey) -> LedSharePartition:
        """The share partition; its state is read if it is not loaded. Raises ``TidemillError``."""
        led = self.loaded(key)
        if led is not None:
            return led
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.get_running_loop().create_task(self._load(key))
            self._loading[key] = loading
            loading.add_done_callback(lambda done: self._load_ended(key, done))
        return await asyncio.shield(loading)

    async def _load(self, key: SharePartitionKey) -> LedSharePartition:
        kept = self._kept(key)
        if kept is not None and await kept.confirm():
            return kept
        led = LedSharePartition(self, key, self._partition(key))
        await led.load()
        if led.ended is not None:
            raise led.ended
        self._by_group.setdefault(key.group_id, {})[key] = led
        if not self.sessions.has_group(key.group_id):
            # Now, for requests that describe it: without members it is dropped in a moment.
            with contextlib.suppress(TidemillError):
                await led.look_ahead()
            if not self.sessions.has_group(key.group_id):
                led.retire()
        return led

    def _load_ended(self, key: SharePartitionKey, loading: asyncio.Task[LedSharePartition]) -> None:
        del self._loading[key]
        if not loading.cancelled():
            # It is raised to everybody who waits; perhaps nobody does any more.
            loading.exception()

    def _partition(self, key: SharePartitionKey) -> Partition:
        find = self._broker.find
        topic: TopicImage = find.topic_by_id(key.topic_id)
        partition = find.partition(topic, key.partition)
        partition.check_leads()
        return partition

    def ended(self, led: LedSharePartition) -> None:
        """Forget a share partition that is not served any more."""
        group = self._by_group.get(led.key.group_id)
        if group is None or group.get(led.key) is not led:
            return
        del group[led.key]
        if not group:
            del self._by_group[led.key.group_id]
        past = self._past.pop(led.key.group_id, Totals())
        _add(past, led.machine.totals)
        self._past[led.key.group_id] = past
        while len(self._past) > _PAST_GROUPS_MAX:
            del self._past[next(iter(self._past))]

    def totals(self) -> dict[str, Totals]:
        """What happened to records since the node started, by group."""
        found: dict[str, Totals] = {}
        for group_id, past in self._past.items():
            _add(found.setdefault(group_id, Totals()), past)
        for led in self:
            _add(found.setdefault(led.key.group_id, Totals()), led.machine.totals)
        return found

    # --- sessions

    def open_session(self, key: SessionKey, connection: int) -> ShareSession:
        """Begin a session. Raises ``ApiError`` if there are too many."""
        session = self.sessions.open(key, connection)
        for led in self.of_group(key.group_id):
            led.is_retiring = False
            # The group may have had no members for a while, although one of them kept its session.
            led.is_confirmed = False
        return session

    def close_session(self, key: SessionKey) -> None:
        """End a session: what the member holds goes to others."""
        if self.sessions.close(key) is not None:
            self._release(key.group_id, {key.member_id})

    def _release(self, group_id: str, members: Collection[str]) -> None:
        """Give to others what members without a session held."""
        is_last = not self.sessions.has_group(group_id)
        for led in self.of_group(group_id):
            led.release_members(members)
            if is_last:
                # Without members the state may be changed by others: offsets are reset, groups are deleted.
                led.retire()

    def connection_closed(self, connection: int) -> None:
        """Release what the members of a closed connection hold."""
        gone: dict[str, set[str]] = {}
        for key in self.sessions.of_connection(connection):
            self.sessions.close(key)
            gone.setdefault(key.group_id, set()).add(key.member_id)
        # All members of a group at once: each time all records in flight are looked at.
        for group_id, members in gone.items():
            self._release(group_id, members)

    # --- the node

    async def check_log_starts(self) -> None:
        """Notice that retention has passed records that wait, also where nobody fetches."""
        for led in self:
            led.refresh()
            await asyncio.sleep(0)

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        if not delta.deleted or not self._by_group:
            return
        deleted = {topic.id for topic in delta.deleted}
        for led in self:
            if led.key.topic_id in deleted:
                led.end(ApiError(ErrorCode.unknown_topic_id, f"the topic of {led.name} was deleted"))

    def close(self) -> None:
        """Stop writing state, because the node stops."""
        stopping = TidemillError("the node stops", code=ErrorCode.not_leader_or_follower)
        for loading in list(self._loading.values()):
            loading.cancel()
        for led in self:
            led.end(stopping)


def _add(total: Totals, more: Totals) -> None:
    for each in fields(Totals):
        setattr(total, each.name, getattr(total, each.name) + getattr(more, each.name))
