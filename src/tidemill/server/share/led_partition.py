"""The shell of a share partition at the leader of its data: reads the log, writes the state, keeps time.

The state machine is ``share/partition/machine.py``. What happens here and not there:

- The state is loaded by ``kept_state``, which takes out of it what an unclean election has cut off the log.
- One task writes the state while there is something to write; what comes meanwhile goes into the next write.
- A write that was refused leaves the records as they were. One that nobody knows the outcome of is looked up
  before anything else happens. One that was fenced ends this share partition: the next request reads the
  state again.
- Records that a transaction accepts are held until the state shows what became of that. It is read again and
  again while there are such records.
- Fetches that wait are woken by releases, locks and delays that end; by appends they are woken by the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.coordination.share_state import (
    NO_START,
    SharePartitionKey,
    ShareState,
)
from tidemill.coordination.turns import give_way, in_chunks
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.records.batch import parse_header
from tidemill.server.share.kept_state import KeptState
from tidemill.server.share.reading import ReadBatches, chosen, look_at, walk
from tidemill.share.partition.machine import SharePartition
from tidemill.share.partition.policy import SharePolicy

if TYPE_CHECKING:
    from tidemill.config.group_keys import GroupConfig
    from tidemill.coordination.clock import Timer
    from tidemill.replication.partition import Partition
    from tidemill.server.coordinators.persister import Transaction
    from tidemill.server.share.service import ShareService
    from tidemill.share.partition.values import (
        Acknowledgement,
        Acquired,
        DueLetter,
        SeenRecord,
        Settlement,
        StateWrite,
    )

__all__ = ("FetchLimits", "LedSharePartition", "ShareRecords", "policy_of")

_FENCED: Final = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.fenced_state_epoch,
        # The state was deleted with its group.
        ErrorCode.invalid_request,
        ErrorCode.group_id_not_found,
        ErrorCode.unknown_topic_or_partition,
    }
)
#: After these another one leads, or the state is not what it was.
_ENDS_IT: Final = frozenset({ErrorCode.fenced_leader_epoch, ErrorCode.fenced_state_epoch})
_SETTLE_FIRST_MS: Final = 20
_SETTLE_LONGEST_MS: Final = 500
_RETRY_FIRST_MS: Final = 100
_RETRY_LONGEST_MS: Final = 5_000
#: Reads of the log are so large at least: a batch that is read in vain costs less than another read.
_READ_BYTES_MIN: Final = 32 * 1024
#: How much of the log is looked at in one go for keys and delivery times.
_LOOK_BYTES: Final = 128 * 1024
#: Batches with more records or bytes are decoded in a thread, and so are compressed ones: nobody knows how
#: much they unpack to.
_QUICK_RECORDS: Final = 1_000
_QUICK_BYTES: Final = 32 * 1024
_SEEN_AT_ONCE: Final = 500
#: With order per key each record is handed out by itself, so that one fetch gets no more.
_ORDERED_AT_ONCE: Final = 500
#: How often a fetch reads on behind batches that are shown to nobody.
_READS_MAX: Final = 16

logger = logging.getLogger(__name__)


def _may_be_written(error: TidemillError) -> bool:
    """Whether a write that failed may have been carried out, so that the state has to tell."""
    return error.retriable or error.code is ErrorCode.unknown_server_error


class FetchLimits(NamedTuple):
    """Limits of one fetch of one member: bytes and records."""

    max_bytes: int
    max_records: int
    batch_size: int
    #: KIP-1206's record-limit mode.
    exact: bool


class ShareRecords(NamedTuple):
    """Records of one partition that a fetch has acquired for a member."""

    records: list[memoryview]
    acquired: list[Acquired]
    size_bytes: int
    record_count: int
    #: The epoch of the leader that gave them, whatever the metadata says by now: part of the fencing token.
    leader_epoch: int


_NOTHING: Final = ShareRecords([], [], 0, 0, -1)


def policy_of(config: GroupConfig, *, has_dead_letters: bool) -> SharePolicy:
    """What a group's configs ask of its share partitions."""
    return SharePolicy(
        lock_duration_ms=config.share_record_lock_duration_ms,
        delivery_limit=config.share_delivery_count_limit,
        max_record_locks=config.share_partition_max_record_locks,
        renew_enabled=config.share_renew_acknowledge_enable,
        retry_backoff_ms=config.retry_backoff_ms,
        retry_exponential=config.retry_backoff_kind == "exponential",
        retry_backoff_max_ms=config.retry_backoff_max_ms,
        order_by_key=config.order == "key",
        dead_blocks_key=config.on_dead == "block",
        deliver_at=config.deliver_at_enable,
        max_waiting_records=config.max_waiting_records,
        dead_letters=has_dead_letters and bool(config.dead_letter_topic),
    )


class LedSharePartition:
    """A share partition whose data this node leads."""

    def __init__(self, service: ShareService, key: SharePartitionKey, partition: Partition) -> None:
        self._service = service
        self.key = key
        self.partition = partition
        #: The epoch in which the state was read: writes name it.
        self.leader_epoch = partition.leader_epoch
        self._kept = KeptState(service, key, partition)
        self._config = service.config(key.group_id)
        self.machine = SharePartition(self._policy())
        #: Why it is not served any more; None while it is.
        self.ended: TidemillError | None = None
        #: Nobody of the group has a session here: it ends when everything is written.
        self.is_retiring = False
        #: Whether the state is still the one that was read, as far as is known. A group without members may
        #: be deleted, or begin elsewhere.
        self.is_confirmed = True
        self._answers: dict[Settlement, asyncio.Future[TidemillError | None]] = {}
        self._waiting: dict[object, Callable[[], None]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._letters: asyncio.Task[None] | None = None
        self._scanner: asyncio.Task[None] | None = None
        self._settler: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._timer_at = 0
        self._retry_timer: Timer | None = None
        self._failures = 0
        #: Acknowledgements that were taken since the last write began.
        self._unwritten = 0
        #: Writes to the state for transactions that are under way.
        self._accepting = 0
        self._bytes_per_record = 0.0

    def __repr__(self) -> str:
        return f"<share partition {self.name}>"

    @property
    def name(self) -> str:
        return f"{self.key.group_id}:{self.partition.topic}-{self.partition.index}"

    @property
    def committed(self) -> bool:
        """Whether the group reads committed records only."""
        return self._config.share_isolation_level == "read_committed"

    @property
    def lock_duration_ms(self) -> int:
        return self.machine.policy.lock_duration_ms

    def _policy(self) -> SharePolicy:
        return policy_of(self._config, has_dead_letters=self._service.dead_letters is not None)

    # --- life

    async def load(self) -> None:
        """Read the state. Raises ``TidemillError`` if that fails: nothing is served then."""
        self.machine.begin_loading()
        try:
            state, cut = await self._kept.load(self.name)
            start = state.start_offset
            if start == NO_START:
                start = await self._service.reset_offset(self.partition, self._config)
            self._kept.check_leads()
        except TidemillError:
            self.machine.fail()
            raise
        # What is below is gone, and an end that lies below was cut.
        start = max(start, self.partition.log_start_offset)
        self.machine.totals.cut += cut
        lost = self.machine.loaded(state, start, *self._service.times())
        if lost:
            logger.warning(
                "%s: %d records that the group had not finished are gone: the log starts at offset %d now. "
                "Retention or DeleteRecords was faster while nobody read them; retain records for longer "
                "than the group's workers may be down",
                *(self.name, lost, start),
            )
        self.partition.depend(self, self._lost_leadership)
        if state.start_offset == NO_START:
            await self._write_start()
        if self.machine.has_pending:
            self._watch_transactions()
        self._changed()

    async def confirm(self) -> bool:
        """Ask whether the state is still the one that was read; if not, this share partition ends.

        Raises ``TidemillError`` if nobody can tell.
        """
        state_epoch = self.machine.state_epoch
        found = await self._service.persister.read_summary(self.key, self.leader_epoch)
        if self.has_ended():
            return False
        # A state that was deleted and begun anew may have the same epoch: nobody has read that one yet.
        is_same = found.state_epoch == state_epoch and found.leader_epoch == self.leader_epoch
        if not is_same or found.start_offset == NO_START:
            logger.info("%s: its state was begun anew or deleted: reading it again", self.name)
            self.end(ApiError(ErrorCode.fenced_state_epoch, f"{self.name} has another state by now"))
            return False
        self.is_confirmed = True
        return True

    async def _write_start(self) -> None:
        """Write where the group begins: the next leader must not begin elsewhere."""
        write = self.machine.next_write()
        assert write is not None
        try:
            await self._write(write)
        except TidemillError as error:
            self.end(error)
            raise
        if not self.has_ended():
            self.machine.wrote(*self._service.times())

    def has_ended(self) -> bool:
        """Whether it is not served any more."""
        return self.ended is not None

    def _check_served(self) -> None:
        """Raise why it has ended, if it has. It may do so while one who has found it waits for a turn."""
        if self.ended is not None:
            raise self.ended

    def _lost_leadership(self) -> None:
        self.end(self.partition.not_leader())

    def end(self, error: TidemillError) -> None:
        """Serve nothing from now on. Requests that wait get ``error``, or look for another leader."""
        if self.ended is not None:
            return
        self.ended = error
        self.machine.fence()
        self.partition.release(self)
        for timer in (self._timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        for task in (self._letters, self._scanner, self._settler):
            if task is not None:
                task.cancel()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(error)
        self._service.ended(self)
        self._wake()

    def retire(self) -> None:
        """End when everything is written, unless a member comes back before that."""
        self.is_retiring = True
        self._changed()

    # --- waiting

    def subscribe(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` when there may be more to hand out, until ``unsubscribe``."""
        self._waiting[key] = wake

    def unsubscribe(self, key: object) -> None:
        self._waiting.pop(key, None)

    def _wake(self) -> None:
        for wake in list(self._waiting.values()):
            wake()

    # --- handing out

    def refresh(self) -> None:
        """Take what has changed elsewhere: the group's configs, and the start of the log."""
        config = self._service.config(self.key.group_id)
        now_ms, wall_ms = self._service.times()
        if config is not self._config and config != self._config:
            self._config = config
            self.machine.configure(self._policy(), wall_ms)
        log_start = self.partition.log_start_offset
        if log_start > self.machine.start_offset:
            self._log_start_moved(log_start, now_ms, wall_ms)

    def _log_start_moved(self, offset: int, now_ms: int, wall_ms: int) -> None:
        lost = self.machine.log_start_moved(offset, now_ms, wall_ms)
        if lost:
            logger.warning(
                "%s: %d records that waited for their time or key are gone: the log starts at offset %d now. "
                "Retention or DeleteRecords was faster; retain records for longer than they may wait",
                self.name,
                lost,
                offset,
            )
        self._changed()

    def has_records(self) -> bool:
        """Whether ``acquire`` would probably give something, or has to look."""
        machine = self.machine
        upper = self.partition.upper_offset(committed=self.committed)
        if machine.wants_records and machine.scan_offset < upper:
            return True
        position = machine.next_offset()
        return position is not None and position < upper

    def acquire(
        self, member: str, limits: FetchLimits, budget: ReadBudget, *, at_least_one: bool
    ) -> ShareRecords:
        """Give a member records. Raises ``TidemillError`` if the log cannot be read."""
        machine = self.machine
        max_records = limits.max_records
        if machine.policy.order_by_key:
            max_records = min(max_records, _ORDERED_AT_ONCE)
        now_ms, wall_ms = self._service.times()
        if machine.tick(now_ms, wall_ms):
            self._wake()
        for _ in range(_READS_MAX):
            position = machine.next_offset()
            if position is None:
                break
            read = self._read(position, limits, budget, at_least_one=at_least_one)
            if not read.spans:
                break
            acquired = machine.acquire(
                member,
                position,
                read.spans,
                max_records,
                limits.batch_size,
                exact=limits.exact,
                now_ms=now_ms,
                wall_ms=wall_ms,
            )
            if acquired:
                self._follow_up()
                records = chosen(read, acquired)
                size_bytes = sum(map(len, records))
                self.partition.bytes_out += size_bytes
                count = sum(last - first + 1 for first, last, _ in acquired)
                return ShareRecords(records, acquired, size_bytes, count, self.leader_epoch)
            if machine.next_offset() == position:
                break
        self._follow_up()
        return _NOTHING

    def _read(
        self, position: int, limits: FetchLimits, budget: ReadBudget, *, at_least_one: bool
    ) -> ReadBatches:
        """Read about as much as will be handed out: whatever is read is checked, and that takes time."""
        wanted = int(limits.max_records * self._bytes_per_record * 1.1) + _READ_BYTES_MIN
        if not self._bytes_per_record:
            wanted = 2 * _READ_BYTES_MIN
        data = self.partition.read(
            position,
            max(0, min(limits.max_bytes, wanted)),
            at_least_one=at_least_one,
            committed=self.committed,
            budget=budget,
        )
        aborted = self.partition.aborted_in(data) if self.committed and data else ()
        read = walk(data, aborted)
        if read.record_count:
            self._bytes_per_record = len(read.data) / read.record_count
        return read

    # --- keys and delivery times

    async def look_ahead(self) -> None:
        """Look at keys and headers until there is something to hand out, or nothing more to look at."""
        if self._scanner is None:
            self._scanner = asyncio.get_running_loop().create_task(self._scan())
            self._scanner.add_done_callback(self._scanned)
        scanner = self._scanner
        await asyncio.wait([scanner])
        if not scanner.cancelled() and (error := scanner.exception()) is not None:
            raise error

    def _scanned(self, scanner: asyncio.Task[None]) -> None:
        self._scanner = None
        if not scanner.cancelled():
            # Its waiters have got it, if there still are any.
            scanner.exception()

    async def _scan(self) -> None:
        machine = self.machine
        while machine.wants_records and not self.has_ended():
            offset = machine.scan_offset
            upper = self.partition.upper_offset(committed=self.committed)
            if offset >= upper:
                return
            data = self.partition.read(offset, _LOOK_BYTES, at_least_one=True, committed=self.committed)
            aborted = self.partition.aborted_in(data) if self.committed and data else ()
            read = walk(data, aborted)
            if not read.spans:
                return
            await self._see(await self._look_at(read), offset, read.spans[-1].last_offset + 1)
            if machine.scan_offset <= offset:
                return

    async def _see(self, seen: Sequence[SeenRecord], first_offset: int, next_offset: int) -> None:
        """Tell the state machine keys and delivery times of records: some in each turn of the loop."""
        for chunk in in_chunks(seen, _SEEN_AT_ONCE) if seen else [seen]:
            if self.has_ended():
                return
            is_last = not chunk or chunk[-1] is seen[-1]
            behind = next_offset if is_last else chunk[-1].offset + 1
            self.machine.see(chunk, behind, *self._service.times(), first_offset=first_offset)
            first_offset = behind
            self._changed()
            await give_way()

    async def _look_at(self, read: ReadBatches) -> list[SeenRecord]:
        ends = [*read.positions[1:], len(read.data)]
        batches = [
            read.data[start:end]
            for span, start, end in zip(read.spans, read.positions, ends, strict=True)
            if not span.is_hidden
        ]
        max_bytes = self._service.max_decompressed_bytes
        is_small = read.record_count <= _QUICK_RECORDS and len(read.data) <= _QUICK_BYTES
        if is_small and not any(parse_header(batch).codec for batch in batches):
            return look_at(batches, max_bytes)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._service.workers, look_at, batches, max_bytes)

    # --- acknowledging

    def acknowledge(
        self, member: str, acknowledgements: Sequence[Acknowledgement]
    ) -> asyncio.Future[TidemillError | None] | None:
        """Acknowledge records. The outcome, once it is written; None if nothing has to be.

        Raises ``ApiError`` if they cannot be acknowledged.
        """
        self._check_served()
        settlement = self.machine.acknowledge(member, acknowledgements, *self._service.times())
        self._unwritten += len(acknowledgements)
        if not settlement.needs_write:
            self._changed()
            return None
        answer: asyncio.Future[TidemillError | None] = asyncio.get_running_loop().create_future()
        self._answers[settlement] = answer
        self._changed()
        return answer

    def release_members(self, members: Collection[str]) -> None:
        """Give to others what these members hold, because they are gone."""
        if self.machine.release_members(members, *self._service.times()):
            self._changed()

    def _changed(self) -> None:
        """Something may be handed out that could not before."""
        if self.ended is None and self._waiting and self.has_records():
            self._wake()
        self._follow_up()

    def _follow_up(self) -> None:
        """Start whatever follows from a change: a write, dead letters, the next timer."""
        if self.ended is not None:
            return
        has_work = self.machine.may_write or self.is_retiring
        if has_work and self._writer is None and self._retry_timer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_on())
            self._writer.add_done_callback(self._writer_done)
        self._begin_letters()
        self._set_timer()

    def _set_timer(self) -> None:
        now_ms, wall_ms = self._service.times()
        due_ms = self.machine.next_due_ms(now_ms, wall_ms)
        if due_ms is None or (self._timer is not None and self._timer_at <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due_ms
        self._timer = self._service.call_at(due_ms, self._tick)

    def _is_due(self) -> bool:
        """Whether locks or delays have ended that the state machine has not looked at yet."""
        now_ms, wall_ms = self._service.times()
        due_ms = self.machine.next_due_ms(now_ms, wall_ms)
        return due_ms is not None and due_ms <= now_ms

    def _tick(self) -> None:
        self._timer = None
        self.machine.tick(*self._service.times())
        self._changed()

    # --- writing

    async def _write(self, write: StateWrite) -> None:
        await self._service.persister.write_state(
            self.key,
            self.machine.state_epoch,
            self.leader_epoch,
            write.start_offset,
            write.delivery_complete_count,
            write.batches,
            self._kept.position(self.machine.end_offset),
        )
        self._kept.written()

    async def _write_on(self) -> None:
        """The writer: a task while there is something to write."""
        try:
            await self._write_all()
        finally:
            # In the turn in which it has found nothing more to write: whatever comes next needs another one.
            self._writer = None

    async def _write_all(self) -> None:
        machine, turns = self.machine, self._service.turns
        while True:
            weight, self._unwritten = self._unwritten, 0
            await turns.turn(1 + weight)
            if self.has_ended() or (write := machine.next_write()) is None:
                break
            try:
                await self._write(write)
            except TidemillError as error:
                if self.has_ended() or not await self._recovered(error):
                    return
            else:
                self._failures = 0
                await turns.turn(1 + len(write.batches))
                if not self.has_ended():
                    self._answer(machine.wrote(*self._service.times()), None)
                    self._after_write()
        if self.is_retiring and not self.has_ended() and not self._is_busy():
            self.end(ApiError(ErrorCode.not_leader_or_follower, f"{self.name} is not in use any more"))

    def _is_busy(self) -> bool:
        """Whether something is under way that the stored state does not have yet."""
        letters = self.machine.due_letter_count > 0 and self._service.dead_letters is not None
        return bool(self._answers) or self._accepting > 0 or letters or self._is_due()

    def _after_write(self) -> None:
        if self._waiting and self.has_records():
            self._wake()
        self._set_timer()
        self._begin_letters()

    def _begin_letters(self) -> None:
        if self._letters is None and self._service.dead_letters is not None and not self.has_ended():
            letters = self.machine.take_letters()
            if letters:
                self._letters = asyncio.get_running_loop().create_task(self._write_letters(letters))

    def _writer_done(self, writer: asyncio.Task[None]) -> None:
        if writer.cancelled():
            return
        error = writer.exception()
        if error is not None:
            logger.error("%s: writing its state failed", self.name, exc_info=error)
            self.end(
                ApiError(ErrorCode.unknown_server_error, f"the state of {self.name} could not be written")
            )

    def _answer(self, settlements: Sequence[Settlement], error: TidemillError | None) -> None:
        for settlement in settlements:
            answer = self._answers.pop(settlement, None)
            if answer is not None and not answer.done():
                answer.set_result(error)

    async def _recovered(self, error: TidemillError) -> bool:
        """Deal with a write that failed. Whether writing can go on now."""
        if error.code in _FENCED:
            logger.info("%s: another leader or a newer state has taken over: %s", self.name, error)
            self.end(error)
            return False
        self._failures += 1
        if _may_be_written(error):
            was_written = await self._look_up(error)
            if was_written is None:
                return False
            if was_written:
                self._answer(self.machine.wrote(*self._service.times()), None)
                self._after_write()
                return True
        self._answer(self.machine.refused(), error)
        self.machine.tick(*self._service.times())
        self._retry_later()
        return False

    async def _look_up(self, error: TidemillError) -> bool | None:
        """Read the state again, to learn whether a write was carried out. None if this one ends."""
        logger.warning(
            "%s: the outcome of a write is unknown (%s): reading the state again", self.name, error
        )
        self.machine.unsure()
        pause_ms = _RETRY_FIRST_MS
        while not self.has_ended():
            try:
                state = await self._read_again()
            except TidemillError as failure:
                if failure.code in _FENCED:
                    self.end(failure)
                    return None
                # The client need not wait: what it knows is what is known.
                self._fail_all(error)
                await asyncio.sleep(pause_ms / 1_000)
                pause_ms = min(2 * pause_ms, _RETRY_LONGEST_MS)
                continue
            return None if state is None else self.machine.resolve(state)
        return None

    async def _read_again(self) -> ShareState | None:
        """The state as it is now; None if this share partition has ended, also because it is another one.

        Raises ``TidemillError`` if it cannot be read.
        """
        state: ShareState = await self._service.persister.read_state(self.key, self.leader_epoch)
        if self.has_ended():
            return None
        # One that was deleted and begun anew may have the same epoch; but the start never goes back.
        is_same = state.state_epoch == self.machine.state_epoch
        if not is_same or state.start_offset < self.machine.written_start:
            self.end(ApiError(ErrorCode.fenced_state_epoch, f"{self.name} has another state by now"))
            return None
        return state

    def _fail_all(self, error: TidemillError) -> None:
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_result(error)

    def _retry_later(self) -> None:
        """Write again after a pause what did not wait for its write."""
        pause_ms = min(_RETRY_FIRST_MS << min(self._failures, 10), _RETRY_LONGEST_MS)
        if self._retry_timer is None:
            self._retry_timer = self._service.call_at(self._service.times()[0] + pause_ms, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self._changed()

    # --- transactions

    async def accept_in_transaction(
        self, member: str, acknowledgements: Sequence[Acknowledgement], transaction: Transaction
    ) -> TidemillError | None:
        """Accept records when the transaction commits. Gives the error if that will not be.

        Raises ``ApiError`` if they cannot be accepted. After CONCURRENT_TRANSACTIONS the member still holds
        them, and tries again: the end of the producer's transaction before is under way.
        """
        self._check_served()
        machine = self.machine
        pending = machine.accept_in_transaction(
            member, acknowledgements, transaction.producer_id, transaction.producer_epoch
        )
        if not pending.batches:
            return None
        error: TidemillError | None = None
        self._accepting += 1
        try:
            await self._service.write_in_transaction(
                self.key,
                machine.state_epoch,
                self.leader_epoch,
                pending.batches,
                transaction,
                self._kept.position(self.machine.end_offset),
            )
            self._kept.written()
        except TidemillError as failure:
            error = failure
        except BaseException:
            # The request was given up. Whatever became of the write, nobody else would let go of the records.
            self._accepting -= 1
            machine.pending_written(pending)
            self._watch_transactions()
            raise
        self._accepting -= 1
        if self.has_ended():
            return error
        if error is not None and error.code in _ENDS_IT:
            self.end(error)
        elif error is None or (
            _may_be_written(error) and error.code is not ErrorCode.concurrent_transactions
        ):
            # Perhaps it is written: then the transaction decides, and the state will tell.
            machine.pending_written(pending)
            self._watch_transactions()
        else:
            machine.pending_refused(pending)
        self._changed()
        return error

    def _watch_transactions(self) -> None:
        if self._settler is None and not self.has_ended():
            self._settler = asyncio.get_running_loop().create_task(self._settle_pending())

    async def _settle_pending(self) -> None:
        """Read the state until no transaction holds records any more."""
        machine, pause_ms = self.machine, _SETTLE_FIRST_MS
        try:
            while not self.has_ended() and machine.has_pending:
                await asyncio.sleep(pause_ms / 1_000)
                pause_ms = min(2 * pause_ms, _SETTLE_LONGEST_MS)
                number = machine.begin_pending_read()
                try:
                    state = await self._read_again()
                except TidemillError as error:
                    if error.code in _ENDS_IT:
                        self.end(error)
                    continue
                if state is None:
                    return
                machine.settle_pending(state, number, *self._service.times())
                self._changed()
                self._after_write()
        finally:
            self._settler = None

    # --- dead letters

    async def _write_letters(self, letters: Sequence[DueLetter]) -> None:
        pause_ms = _RETRY_FIRST_MS
        writer = self._service.dead_letters
        assert writer is not None
        try:
            while not self.has_ended():
                try:
                    # The writer would take any state that it finds for the one that the records died in.
                    if not await self.confirm():
                        return
                    await writer.write(self.key, self.leader_epoch, letters)
                    break
                except Exception as error:
                    logger.warning(
                        "%s: its dead letters could not be written, trying again: %s",
                        *(self.name, error),
                        exc_info=None if isinstance(error, TidemillError) else error,
                    )
                    await asyncio.sleep(pause_ms / 1_000)
                    pause_ms = min(2 * pause_ms, _RETRY_LONGEST_MS)
            if not self.has_ended():
                for letter in letters:
                    self.machine.letter_written(letter.first_offset, letter.last_offset)
        finally:
            self._letters = None
        self._changed()
