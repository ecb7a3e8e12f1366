"""The share session with one node: fetches and acknowledgements, over one connection.

Rules:

- One fetch and one acknowledgement are under way at a time. They share the connection, so that they arrive in
  the order of their epochs; a node that lets them overlap carries out an acknowledgement while a fetch waits.
- A fetch takes along what is to be acknowledged. Such a fetch does not wait for records, so that what it says
  is confirmed soon.
- When the connection or the session is lost, so are the locks: the node gives the records to others. What was
  on its way may have arrived; it counts as not settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import UUID

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.share.outbox import Entry, Outbox, Outcome, Parcel, Way, ack_batches, merged
from tidemill.client.share.record import Acknowledge, Settlement
from tidemill.client.share.session import CLOSING_EPOCH, ShareSession
from tidemill.errors import ApiError, ConnectionClosed, ErrorCode, TidemillError
from tidemill.net.answers import check
from tidemill.net.retry import backoff_ms, is_transient

if TYPE_CHECKING:
    from tidemill.net.connection import Connection, Versions
    from tidemill.wire.jobs import AttemptId

__all__ = ("LinkOwner", "NodeLink")

_log = logging.getLogger(__name__)

_VERSIONS: Final[Versions] = (1, 2)
_RENEWING_VERSION: Final = 2
_SETTLE_KEY: Final = 1090
_RETURNING_VERSION: Final = 1
_WAIT_MARGIN_MS: Final = 30_000
_CLOSE_TIMEOUT_MS: Final = 2_000
_FETCH_BYTES_MAX: Final = 16 * 1024 * 1024
#: Below so many records a node is asked for exactly as many; above, whole batches are cheaper for it.
_EXACT_RECORDS: Final = 200
_BATCH_OPTIMIZED: Final = 0
_RECORD_LIMIT: Final = 1
_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000
_RELEASE: Final = Settlement(Acknowledge.RELEASE)
_RELEASE_NOW: Final = Settlement(Acknowledge.RELEASE, delay_ms=0)
_RETURN: Final = Settlement(Acknowledge.RETURN)
#: The session is begun anew after these.
_SESSION_ERRORS: Final = frozenset(
    {
        ErrorCode.share_session_not_found,
        ErrorCode.invalid_share_session_epoch,
        ErrorCode.share_session_limit_reached,
        ErrorCode.unknown_member_id,
        ErrorCode.unknown_server_error,
        ErrorCode.kafka_storage_error,
    }
)
#: Another node leads the partition, or it is gone: the metadata knows more.
_MOVED: Final = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.replica_not_available,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.inconsistent_topic_id,
    }
)


class LinkOwner(Protocol):
    """The consumer, as its links know it."""

    cluster: Cluster
    group: str
    member_id: str
    max_wait_ms: int
    #: Ids of the topics by name, and names by id.
    topic_ids: dict[str, UUID]
    topic_names: dict[UUID, str]

    def wanted(self) -> int:
        """How many records a node may be asked for now."""

    def took(self, link: NodeLink, partition: TopicPartition, part: Any, lock_seconds: float) -> None:
        """Take the records in a node's answer about one partition."""

    def holds_of(self, link: NodeLink) -> bool:
        """Whether records from this node are held, or wait for its answer."""

    def fetched(self, link: NodeLink, was_empty: bool) -> None:
        """Called when a fetch was answered, with or without records."""

    def settled(self, outcomes: Sequence[Outcome]) -> None:
        """Called with what became of settlements and renewals."""

    def lost(self, link: NodeLink, partitions: Iterable[TopicPartition] | None, why: str) -> None:
        """Called when the locks of this node's records are gone: those of these partitions, or all."""

    def moved(self) -> None:
        """Called when the metadata is stale: other nodes may lead the partitions now."""

    def failed(self, error: TidemillError) -> None:
        """Called with an error after which the link cannot go on."""


class NodeLink:
    """Fetches from one node, and tells it what became of records. ``start`` once, ``close`` once."""

    def __init__(self, owner: LinkOwner, node_id: int) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        #: What the node's version, and the group's configs, allow.
        self.can_renew = True
        self.can_settle = True
        #: How records go back that nobody has looked at: as undelivered, or the nearest that the node knows.
        self.giving_back = _RETURN
        self._owner = owner
        self._partitions: frozenset[TopicPartition] = frozenset()
        self._session = ShareSession()
        self._connection: Connection | None = None
        self._wake_fetch = asyncio.Event()
        self._wake_tell = asyncio.Event()
        #: Set unless a fetch is under way.
        self._is_answered = asyncio.Event()
        self._is_answered.set()
        #: Partitions whose locks were given up since the last fetch was sent: its answer comes too late.
        self._gone: set[TopicPartition] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions to fetch from this node."""
        return self._partitions

    @property
    def is_broken(self) -> bool:
        """Whether the connection was lost, which nobody has noticed if no request was under way."""
        return self._connection is not None and self._connection.failed

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Fetch from these partitions from now on."""
        self._partitions = frozenset(partitions)
        self._wake_fetch.set()

    def start(self) -> None:
        """Begin to fetch."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._report(work)) for work in (self._fetch_on(), self._tell_on())]

    async def _report(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a part of the link's work; readers get an unexpected error, or they would wait for ever."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - readers raise it
            _log.exception("group %r: the consumer stops", self._owner.group)
            what = f"the share consumer failed: {type(error).__name__}: {error}"
            self._owner.failed(TidemillError(what))

    def wake(self) -> None:
        """Look again at what is wanted and what is to be told."""
        self._wake_fetch.set()
        self._wake_tell.set()

    async def fetch_answered(self) -> None:
        """Wait for the answer of the fetch that is under way, if any."""
        await self._is_answered.wait()

    async def close(self) -> None:
        """Close the session: the node releases what it holds for this consumer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connection = self._connection
        if connection is None:
            return
        if self._session.is_open and not connection.failed:
            body = self._body(CLOSING_EPOCH) | {"is_renew_ack": False, "topics": []}
            # A node that does not hear it notices that the connection is closed.
            with contextlib.suppress(TidemillError):
                await connection.request(
                    "ShareAcknowledge", body, versions=_VERSIONS, timeout_ms=_CLOSE_TIMEOUT_MS
                )
        await connection.close()

    # --- fetching

    async def _fetch_on(self) -> None:
        failures = 0
        while True:
            while not self._partitions or self._owner.wanted() <= 0:
                if self.is_broken:
                    await self._over("the connection was lost")
                    continue
                self._wake_fetch.clear()
                await self._wake_fetch.wait()
            try:
                delayed = await self._fetch()
                failures = failures + 1 if delayed else 0
            except TidemillError as error:
                failures += 1
                if not self._passes(error):
                    self._owner.failed(error)
                    return
                await self._over(f"{error.name}: {error.message}")
                self._owner.moved()
            if failures:
                await asyncio.sleep(backoff_ms(failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS) / 1000)

    async def _fetch(self) -> bool:
        """Fetch once. True if a partition could not be read for a reason that passes."""
        connection = await self._connected()
        wanted, partitions = self._owner.wanted(), self._partitions
        if wanted <= 0 or not partitions:
            return False
        parcel = self._acknowledged_along()
        said = {} if parcel is None else parcel.parts
        step = self._session.fetch(partitions)
        body = self._body(step.epoch) | {
            "max_wait": 0 if said else self._owner.max_wait_ms,
            "min_bytes": 1,
            "max_bytes": _FETCH_BYTES_MAX,
            "max_records": wanted,
            "batch_size": wanted,
            "share_acquire_mode": _RECORD_LIMIT if wanted < _EXACT_RECORDS else _BATCH_OPTIMIZED,
            "is_renew_ack": False,
            "topics": self._topics(
                {partition: said.get(partition, []) for partition in {*step.added, *said}}
            ),
            "forgotten_topics_data": self._forgotten(step.forgotten),
        }
        timeout_ms = self._owner.max_wait_ms + _WAIT_MARGIN_MS
        self._gone.clear()
        self._is_answered.clear()
        try:
            response = await connection.request("ShareFetch", body, versions=_VERSIONS, timeout_ms=timeout_ms)
            check(response.error_code, response.error_message, f"fetching for group {self._owner.group!r}")
            if connection is not self._connection:
                raise ApiError(ErrorCode.network_exception, "the connection was lost, and the locks with it")
        except TidemillError as error:
            if parcel is not None:
                self._not_heard(parcel, error)
            raise
        else:
            return self._take(response, parcel)
        finally:
            self._is_answered.set()

    def _acknowledged_along(self) -> Parcel | None:
        """The acknowledgements that can be sent along with a fetch."""
        if not self._session.is_open:
            return None
        parcel = self.outbox.take(Way.ACKNOWLEDGE)
        if parcel is None:
            return None
        # A partition that is named by a fetch is fetched from.
        apart = {each: parcel.parts.pop(each) for each in parcel.parts.keys() - self._partitions}
        self.outbox.unanswered(Parcel(parcel.way, apart))
        return parcel if parcel.parts else None

    def _take(self, response: Any, parcel: Parcel | None) -> bool:
        lock_seconds = response.acquisition_lock_timeout.total_seconds()
        errors: dict[TopicPartition, ErrorCode] = {}
        moved: list[TopicPartition] = []
        delayed, was_empty = False, True
        for topic in response.responses:
            name = self._owner.topic_names.get(topic.topic_id)
            for part in topic.partitions if name is not None else ():
                assert name is not None
                partition = name, part.partition_index
                errors[partition] = ErrorCode(part.acknowledge_error_code)
                if part.error_code in _MOVED:
                    moved.append(partition)
                elif part.error_code != ErrorCode.none:
                    delayed = True
                    self._refused(partition, part)
                elif part.acquired_records:
                    was_empty = False
                    if partition in self._gone:
                        self._give_back(partition, part)
                    else:
                        self._owner.took(self, partition, part, lock_seconds)
        if parcel is not None:
            self._owner.settled(self.outbox.answered(parcel, errors))
        if moved:
            self.gone(moved, "another node leads them")
            self._owner.moved()
        self._owner.fetched(self, was_empty)
        return delayed or bool(moved)

    def _give_back(self, partition: TopicPartition, part: Any) -> None:
        """Return records that came too late. A node that does not lead them any more says so."""
        for each in part.acquired_records:
            self.outbox.put_range(partition, each.first_offset, each.last_offset, self.giving_back)
        self.wake()

    def _refused(self, partition: TopicPartition, part: Any) -> None:
        error = ApiError(
            ErrorCode(part.error_code),
            part.error_message
            or f"reading {partition[0]}-{partition[1]} for group {self._owner.group!r}: the node answered "
            f"{ErrorCode(part.error_code).name.upper()}",
        )
        if error.retriable or part.error_code in _SESSION_ERRORS:
            _log.info("%s; trying again", error.message)
        else:
            self._owner.failed(error)

    # --- telling

    async def _tell_on(self) -> None:
        failures = 0
        while True:
            while not self.outbox or not self._session.is_open:
                self._wake_tell.clear()
                await self._wake_tell.wait()
            parcel = self.outbox.take()
            if parcel is None:
                continue
            try:
                errors = await self._tell(parcel)
            except TidemillError as error:
                if parcel.way is Way.RENEW and error.code == ErrorCode.invalid_request:
                    self._cannot_renew(parcel)
                    continue
                self._not_heard(parcel, error)
                await self._over(f"{error.name}: {error.message}")
                if not self._passes(error):
                    self._owner.failed(error)
                    return
                continue
            if parcel.way is Way.RENEW and ErrorCode.invalid_request in errors.values():
                self._cannot_renew(parcel)
                continue
            outcomes = self.outbox.answered(parcel, errors)
            self._owner.settled(outcomes)
            moved = {outcome.partition for outcome in outcomes if outcome.error in _MOVED}
            if moved:
                self.gone(moved, "another node leads them")
                self._owner.moved()
            failures = failures + 1 if len(outcomes) < _size(parcel) else 0
            if failures:
                await asyncio.sleep(backoff_ms(failures, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS) / 1000)

    async def _tell(self, parcel: Parcel) -> Mapping[TopicPartition, ErrorCode]:
        connection = self._connection
        if connection is None or connection.failed:
            raise ApiError(ErrorCode.network_exception, "the connection was lost")
        body = self._body(self._session.acknowledge())
        if parcel.way is Way.SETTLE:
            body |= {
                "transactional_id": None,
                "producer_id": -1,
                "producer_epoch": -1,
                "topics": self._settling_topics(parcel.parts),
            }
            response = await connection.request("ShareSettle", body)
        else:
            body |= {"is_renew_ack": parcel.way is Way.RENEW, "topics": self._topics(parcel.parts)}
            response = await connection.request("ShareAcknowledge", body, versions=_VERSIONS)
        check(response.error_code, response.error_message, f"settling records of group {self._owner.group!r}")
        names = self._owner.topic_names
        return {
            (names[topic.topic_id], part.partition_index): ErrorCode(part.error_code)
            for topic in (response.topics if parcel.way is Way.SETTLE else response.responses)
            if topic.topic_id in names
            for part in topic.partitions
        }

    async def accept_in_transaction(
        self, parts: Mapping[TopicPartition, Sequence[Entry]], transaction: AttemptId
    ) -> None:
        """Have a transaction accept records.

        Raises ``TidemillError`` unless the node took all of them; then those that it did not take are
        released. While the end of the producer's transaction before is under way, it is tried again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._owner.cluster.timeout_ms / 1000
        left, attempts = parts, 0
        try:
            while left := await self._accept(left, transaction, is_last=loop.time() >= deadline):
                attempts += 1
                await asyncio.sleep(backoff_ms(attempts, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS) / 1000)
        except BaseException:
            # These were not accepted. Records that the transaction has are not this member's any more.
            for partition, entries in left.items():
                for entry in entries:
                    self.outbox.put_range(partition, entry.first_offset, entry.last_offset, _RELEASE)
            self.wake()
            raise

    async def _accept(
        self, parts: Mapping[TopicPartition, Sequence[Entry]], transaction: AttemptId, *, is_last: bool
    ) -> dict[TopicPartition, Sequence[Entry]]:
        """Ask once to have records accepted. Gives those to try again, unless this is the last attempt."""
        connection = self._connection
        if connection is None or connection.failed or not self._session.is_open:
            raise ApiError(ErrorCode.network_exception, "the connection was lost, and the records with it")
        if not self.can_settle:
            raise ApiError(
                ErrorCode.unsupported_version, "the node cannot accept records in a transaction; upgrade it"
            )
        body = self._body(self._session.acknowledge()) | {
            "transactional_id": transaction.transactional_id,
            "producer_id": transaction.producer_id,
            "producer_epoch": transaction.producer_epoch,
            "topics": self._settling_topics(parts),
        }
        response = await connection.request("ShareSettle", body)
        what = f"accepting records of group {self._owner.group!r} in a transaction"
        check(response.error_code, response.error_message, what)
        names = self._owner.topic_names
        answers = {
            (names[topic.topic_id], part.partition_index): part
            for topic in response.topics
            if topic.topic_id in names
            for part in topic.partitions
        }
        again: dict[TopicPartition, Sequence[Entry]] = {}
        for partition, entries in parts.items():
            answer = answers.get(partition)
            if answer is None:
                check(ErrorCode.unknown_server_error, "the node said nothing of some partitions", what)
            elif answer.error_code == ErrorCode.concurrent_transactions and not is_last:
                again[partition] = entries
            else:
                check(answer.error_code, answer.error_message, what)
        return again

    def _cannot_renew(self, parcel: Parcel) -> None:
        self.can_renew = False
        _log.warning(
            "group %r does not let members renew locks: records that take longer than their lock come again "
            "(group config share.renew.acknowledge.enable)",
            self._owner.group,
        )
        self._owner.settled(_outcomes(parcel, ErrorCode.unsupported_version))

    def _not_heard(self, parcel: Parcel, error: TidemillError) -> None:
        self._owner.settled(_outcomes(parcel, error.code))

    # --- connection and session

    async def _connected(self) -> Connection:
        connection = await self._owner.cluster.connection(
            self.node_id, purpose=f"share {self._owner.member_id}"
        )
        if connection is not self._connection:
            if self._connection is not None:
                await self._over("the connection was lost")
            self._connection = connection
            self._session = ShareSession()
            self.can_renew = connection.version_of("ShareAcknowledge", _VERSIONS) >= _RENEWING_VERSION
            self.can_settle = _SETTLE_KEY in connection.served
            self.giving_back = _way_back(connection.served.get(_SETTLE_KEY))
        return connection

    async def _over(self, why: str) -> None:
        """End the share session and close its connection, which ends every lock at the node, too."""
        connection, self._connection = self._connection, None
        self._session = ShareSession()
        self.outbox.forget(self.outbox.partitions())
        self._owner.lost(self, None, why)
        if connection is not None:
            await connection.close()

    def gone(self, partitions: Iterable[TopicPartition], why: str) -> None:
        """Forget what was to be told about these partitions: the locks of their records are gone."""
        gone = set(partitions)
        self._gone |= gone
        self.outbox.forget(gone)
        self._owner.lost(self, gone, why)

    def _passes(self, error: TidemillError) -> bool:
        if isinstance(error, ConnectionClosed):
            # Closed by the other task of this link, if the consumer itself is still open.
            return not self._owner.cluster.closed
        return is_transient(error) or error.code in _SESSION_ERRORS or error.code in _MOVED

    # --- requests

    def _body(self, epoch: int) -> dict[str, Any]:
        return {
            "group_id": self._owner.group,
            "member_id": self._owner.member_id,
            "share_session_epoch": epoch,
        }

    def _topics(self, parts: Mapping[TopicPartition, Sequence[Entry]]) -> list[dict[str, Any]]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), entries in parts.items():
            batches = [
                {
                    "first_offset": batch.first_offset,
                    "last_offset": batch.last_offset,
                    "acknowledge_types": batch.types,
                }
                for batch in ack_batches(entries)
            ]
            topics.setdefault(topic, []).append(
                {"partition_index": index, "acknowledgement_batches": batches}
            )
        return self._named(topics)

    def _settling_topics(self, parts: Mapping[TopicPartition, Sequence[Entry]]) -> list[dict[str, Any]]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), entries in parts.items():
            batches = [
                {
                    "first_offset": entry.first_offset,
                    "last_offset": entry.last_offset,
                    "acknowledge_types": [int(entry.settlement.kind)],
                    "delay_ms": entry.settlement.delay_ms,
                    "reason": entry.settlement.reason or None,
                }
                for entry in merged(entries)
            ]
            topics.setdefault(topic, []).append({"partition_index": index, "batches": batches})
        return self._named(topics)

    def _forgotten(self, partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
        topics: dict[str, list[int]] = {}
        for topic, index in sorted(partitions):
            topics.setdefault(topic, []).append(index)
        return self._named(topics)

    def _named(self, topics: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
        ids = self._owner.topic_ids
        return [{"topic_id": ids[name], "partitions": parts} for name, parts in topics.items()]


def _outcomes(parcel: Parcel, error: ErrorCode) -> list[Outcome]:
    return [
        Outcome(partition, entry, error) for partition, entries in parcel.parts.items() for entry in entries
    ]


def _way_back(served: tuple[int, int] | None) -> Settlement:
    """How to give records back that nobody has looked at, to a node with these versions of ShareSettle."""
    if served is None:
        return _RELEASE
    # Without a delay, because nothing is wrong with them.
    return _RETURN if served[1] >= _RETURNING_VERSION else _RELEASE_NOW


def _size(parcel: Parcel) -> int:
    return sum(map(len, parcel.parts.values()))
