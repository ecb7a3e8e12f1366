"""Clients of a simulated cluster: they find leaders in the metadata, retry as real ones do, and note it all.

Each is a task. Errors that pass are retried; an error that no client should ever see is noted in ``strange``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from support.history import History
from support.sim_network import SimNetwork
from tidemill.config.values import Address
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.connection import Connection
from tidemill.records.batch import parse_header
from tidemill.records.control import read_marker
from tidemill.records.record import Record, build_batch, read_records

__all__ = ("ClusterClient", "Committer", "IdempotentProducer", "LooseProducer", "Reader")

#: Errors that pass: the client asks again, perhaps somebody else.
PASSING = {
    ErrorCode.broker_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.coordinator_not_available,
    ErrorCode.fenced_leader_epoch,
    ErrorCode.kafka_storage_error,
    ErrorCode.leader_not_available,
    ErrorCode.not_coordinator,
    ErrorCode.not_enough_replicas,
    ErrorCode.not_enough_replicas_after_append,
    ErrorCode.not_leader_or_follower,
    ErrorCode.offset_not_available,
    ErrorCode.request_timed_out,
    ErrorCode.unknown_leader_epoch,
    # A node whose image lags does not know the topic yet.
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.unknown_topic_id,
}
#: What a batch gets while one before it is not there.
OUT_OF_ORDER = ErrorCode.out_of_order_sequence_number
_REQUEST_MS = 4_000
_PRODUCE_MS = 2_000
_IN_FLIGHT_MAX = 5
_PAUSE_SECONDS = 0.2


class ClusterClient:
    """Connections to all nodes, and what the metadata says about topics."""

    def __init__(
        self,
        network: SimNetwork,
        rng: random.Random,
        bootstrap: list[Address],
        strange: list[str] | None = None,
    ) -> None:
        self.network = network
        self.rng = rng
        self.strange: list[str] = [] if strange is None else strange
        self._bootstrap = bootstrap
        self._connections: dict[Address, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._leaders: dict[tuple[str, int], tuple[int, int]] = {}

    def another(self) -> ClusterClient:
        """A client that knows nothing of what this one has heard."""
        return ClusterClient(self.network, self.rng, self._bootstrap, self.strange)

    async def pause(self) -> None:
        await asyncio.sleep(_PAUSE_SECONDS * (0.1 + self.rng.random()))

    async def ask(
        self,
        address: Address,
        name: str,
        body: Mapping[str, Any],
        version: int,
        timeout_ms: int = _REQUEST_MS,
    ) -> Any:
        """The answer of one node. Raises ``TidemillError`` if there is none."""
        connection = self._connections.get(address)
        if connection is None or connection.failed:
            connection = await Connection.open(
                address, transport=self.network.transport("client"), timeout_ms=1_000
            )
            self._connections[address] = connection
        return await connection.request(name, body, versions=(version, version), timeout_ms=timeout_ms)

    async def ask_any(self, name: str, body: Mapping[str, Any], version: int) -> Any:
        """The answer of any node."""
        return await self.ask(self.rng.choice(self._bootstrap), name, body, version)

    async def refresh(self) -> None:
        """Ask some node who leads what; what it does not know stays as it was."""
        with suppress(TidemillError):
            answer = await self.ask_any("Metadata", {"topics": None}, 9)
            for broker in answer.brokers:
                self._addresses[broker.node_id] = Address(broker.host, broker.port)
            for topic in answer.topics:
                for each in topic.partitions:
                    self._note_leader(topic.name, each)

    def _note_leader(self, topic: str, each: Any) -> None:
        known = self._leaders.get((topic, each.partition_index))
        if known is None or known[1] <= each.leader_epoch:
            self._leaders[topic, each.partition_index] = (each.leader_id, each.leader_epoch)

    async def leader(self, topic: str, partition: int) -> tuple[Address, int]:
        """The leader's address and epoch, as far as known; asks if nobody is. Raises ``TidemillError``."""
        node_id, epoch = self._leaders.get((topic, partition), (-1, -1))
        if node_id not in self._addresses:
            await self.refresh()
            node_id, epoch = self._leaders.get((topic, partition), (-1, -1))
        if node_id not in self._addresses:
            raise ApiError(ErrorCode.leader_not_available, f"{topic}-{partition} has no leader")
        return self._addresses[node_id], epoch

    def forget(self, topic: str, partition: int) -> None:
        """The leader did not answer, or said that it is not the leader."""
        if (topic, partition) in self._leaders:
            # The epoch stays: who has heard of a newer one does not go back to an older leader.
            self._leaders[topic, partition] = (-1, self._leaders[topic, partition][1])

    def note_strange(self, what: str) -> None:
        self.strange.append(what)


class IdempotentProducer:
    """Writes batches in order to one partition, several in flight, and repeats what has no answer."""

    def __init__(
        self,
        client: ClusterClient,
        history: History,
        topic: str,
        partition: int,
        producer_id: int,
        *,
        keys: int = 0,
        on_acked: Callable[[str, str, int], None] = lambda key, value, offset: None,
        pace: float = 1.0,
    ) -> None:
        self.client, self.history, self.rng = client, history, client.rng
        self.topic, self.partition, self.producer_id = topic, partition, producer_id
        self.keys, self.on_acked, self.pace = keys, on_acked, pace
        self.made = 0
        self.is_closing = False
        #: (base sequence, records as (key, value)), oldest first.
        self.unacked: list[tuple[int, list[tuple[str, str]]]] = []

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.partition}"

    async def run(self) -> None:
        """Write until ``is_closing``, then until everything is acknowledged."""
        while not self.is_closing or self.unacked:
            if not self.is_closing:
                for _ in range(self.rng.randint(1, _IN_FLIGHT_MAX - len(self.unacked) or 1)):
                    self._make()
            if not await self._send_all():
                self.client.forget(self.topic, self.partition)
                await self.client.pause()
            elif not self.is_closing:
                await asyncio.sleep(self.pace * self.rng.choice((0.02, 0.5, 2.0)) * self.rng.random())

    def _make(self) -> None:
        if len(self.unacked) >= _IN_FLIGHT_MAX:
            return
        records: list[tuple[str, str]] = []
        for _ in range(self.rng.randint(1, 3)):
            number = self.made + len(records)
            key = f"k{self.producer_id}-{self.rng.randrange(self.keys)}" if self.keys else ""
            records.append((key, f"p{self.producer_id}-{number}"))
            self.history.sent(self.name, records[-1][1])
        self.unacked.append((self.made, records))
        self.made += len(records)

    async def _send_all(self) -> bool:
        """Send everything that is not acknowledged, in order. Whether all of it is now."""
        try:
            address, _ = await self.client.leader(self.topic, self.partition)
        except TidemillError:
            return False
        under_way = list(self.unacked)
        answers = await asyncio.gather(*(self._send(address, *batch) for batch in under_way))
        for batch, offset in zip(under_way, answers, strict=True):
            if offset is None:
                continue
            self.unacked.remove(batch)
            for number, (key, value) in enumerate(batch[1]):
                self.on_acked(key, value, offset + number)
                self.history.acked(self.name, value, offset + number)
        return None not in answers

    async def _send(self, address: Address, sequence: int, records: list[tuple[str, str]]) -> int | None:
        """The offset of a batch that was acknowledged, else None."""
        batch = build_batch(
            [Record(key.encode() or None, value.encode(), 1) for key, value in records],
            producer_id=self.producer_id,
            producer_epoch=0,
            base_sequence=sequence,
        )
        code, offset = await produce(self.client, address, self.topic, self.partition, batch)
        if code is None or code in PASSING or code == OUT_OF_ORDER:
            return None
        if code != ErrorCode.none:
            self.client.note_strange(f"producer {self.producer_id} got {code.name} for {records}")
            return None
        return offset


async def produce(
    client: ClusterClient, address: Address, topic: str, partition: int, batch: bytes, acks: int = -1
) -> tuple[ErrorCode | None, int]:
    """(error code, base offset); no code if there was no answer."""
    body = {
        "acks": acks,
        "timeout": _PRODUCE_MS,
        "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
    }
    try:
        answer = await client.ask(address, "Produce", body, 9)
    except TidemillError:
        return None, -1
    result = answer.responses[0].partition_responses[0]
    return ErrorCode(result.error_code), result.base_offset


class LooseProducer:
    """Writes each record once, without sequences; with acks=1 now and then. It knows what was refused."""

    def __init__(
        self,
        client: ClusterClient,
        history: History,
        topic: str,
        partition: int,
        name: str,
        *,
        pace: float = 1.0,
    ) -> None:
        self.client, self.history, self.rng = client, history, client.rng
        self.topic, self.partition, self.name, self.pace = topic, partition, name, pace
        self.made = 0
        self.is_closing = False

    async def run(self) -> None:
        """Write until ``is_closing``."""
        while not self.is_closing:
            self.made += 1
            await self._write(f"{self.name}-{self.made}", self.rng.choice((1, -1)))
            await asyncio.sleep(self.pace * self.rng.choice((0.1, 0.5, 2.0)) * self.rng.random())

    async def _write(self, value: str, acks: int) -> None:
        where = f"{self.topic}-{self.partition}"
        try:
            address, _ = await self.client.leader(self.topic, self.partition)
        except TidemillError:
            return
        self.history.sent(where, value)
        batch = build_batch([Record(None, value.encode(), 1)])
        code, offset = await produce(self.client, address, self.topic, self.partition, batch, acks)
        if code == ErrorCode.none:
            if acks == -1:
                self.history.acked(where, value, offset)
            return
        self.client.forget(self.topic, self.partition)
        if code is ErrorCode.not_enough_replicas:
            self.history.failed(where, value)
        elif code is not None and code not in PASSING:
            self.client.note_strange(f"{self.name} got {code.name} for {value}")


class Reader:
    """Fetches a partition from its position on; an ``isolated`` one reads committed data only."""

    def __init__(
        self,
        client: ClusterClient,
        history: History,
        name: str,
        topic: str,
        partition: int,
        *,
        isolated: bool = False,
        knows_epochs: bool = True,
        pace: float = 1.0,
    ) -> None:
        self.client, self.history, self.rng = client, history, client.rng
        self.name, self.topic, self.partition, self.isolated = name, topic, partition, isolated
        #: Old clients name no leader epoch, so that a leader of the past may answer them.
        self.knows_epochs = knows_epochs
        self.pace = pace
        self.position = 0
        self.records: list[tuple[int, str, str]] = []
        self.high_watermark = 0
        self.is_closing = False
        if isolated:
            history.isolated(name)

    async def run(self) -> None:
        """Read until ``is_closing``."""
        while not self.is_closing:
            if not await self.fetch():
                self.client.forget(self.topic, self.partition)
                await self.client.pause()
            await asyncio.sleep(self.pace * self.rng.choice((0.02, 0.2, 1.0)) * self.rng.random())

    async def fetch(self) -> bool:
        """One Fetch. Whether it was answered without an error."""
        try:
            address, epoch = await self.client.leader(self.topic, self.partition)
            wanted = {
                "partition": self.partition,
                "fetch_offset": self.position,
                "partition_max_bytes": 100_000,
                "current_leader_epoch": epoch if self.knows_epochs else -1,
            }
            body = {
                "max_wait": self.rng.choice((0, 300)),
                "min_bytes": 1,
                "max_bytes": self.rng.choice((1, 500, 100_000)),
                "isolation_level": int(self.isolated),
                "topics": [{"topic": self.topic, "partitions": [wanted]}],
            }
            answer = await self.client.ask(address, "Fetch", body, 11)
        except TidemillError:
            return False
        result = answer.responses[0].partitions[0]
        code = ErrorCode(result.error_code)
        if code in PASSING:
            return False
        if code != ErrorCode.none:
            self.client.note_strange(f"{self.name} at {self.position} of {self.topic} got {code.name}")
            return False
        self._take(result)
        return True

    def _take(self, result: Any) -> None:
        if self.knows_epochs and -1 < result.high_watermark < self.high_watermark:
            self.client.note_strange(
                f"{self.name} was told a high watermark of {self.high_watermark} and then "
                f"{result.high_watermark} in {self.topic}-{self.partition}"
            )
        self.high_watermark = max(self.high_watermark, result.high_watermark)
        aborted = sorted((each.first_offset, each.producer_id) for each in result.aborted_transactions or ())
        left_out: set[int] = set()
        data = bytes(result.records or b"")
        while len(data) > 61 and (header := parse_header(data)).size_bytes <= len(data):
            batch, data = data[: header.size_bytes], data[header.size_bytes :]
            while aborted and aborted[0][0] <= header.last_offset:
                left_out.add(aborted.pop(0)[1])
            if header.is_control:
                marker = read_marker(batch)
                if marker is not None and not marker.commit:
                    left_out.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in left_out):
                self._take_batch(batch)
            self.position = max(self.position, header.next_offset)

    def _take_batch(self, batch: bytes) -> None:
        for record in read_records(batch):
            if record.offset >= self.position:
                value = (record.value or b"").decode()
                self.records.append((record.offset, (record.key or b"").decode(), value))
                self.history.read(self.name, f"{self.topic}-{self.partition}", record.offset, value)

    async def end(self) -> int | None:
        """The offset behind the last record, as ListOffsets tells it; None if it does not."""
        try:
            address, _ = await self.client.leader(self.topic, self.partition)
            partitions = [{"partition_index": self.partition, "timestamp": -1}]
            body = {
                "replica_id": -1,
                "isolation_level": int(self.isolated),
                "topics": [{"name": self.topic, "partitions": partitions}],
            }
            answer = await self.client.ask(address, "ListOffsets", body, 5)
        except TidemillError:
            return None
        result = answer.topics[0].partitions[0]
        return int(result.offset) if result.error_code == ErrorCode.none else None

    async def drain(self) -> bool:
        """Read up to the end. Whether that was reached."""
        end = await self.end()
        if end is None:
            self.client.forget(self.topic, self.partition)
            return False
        while self.position < end:
            if not await self.fetch():
                self.client.forget(self.topic, self.partition)
                return False
        return True


class Committer:
    """Commits rising offsets of a group; what was acknowledged must be found again, by whoever asks later.

    A commit without an answer may be done at any later time, also after one that was sent behind it.
    """

    def __init__(self, client: ClusterClient, group: str, topic: str, *, pace: float = 1.0) -> None:
        self.client, self.group, self.topic, self.rng = client, group, topic, client.rng
        self.pace = pace
        self.asked = 0
        self.acknowledged = -1
        self.unknown: set[int] = set()
        self.violations: list[str] = []
        self.is_closing = False
        #: Why the last question had no answer, for people.
        self.refusal = ""
        self._coordinator: Address | None = None

    async def run(self) -> None:
        """Commit and fetch until ``is_closing``."""
        while not self.is_closing:
            done = await (self.commit() if self.rng.random() < 0.6 else self.fetch())
            if not done:
                self._coordinator = None
                await self.client.pause()
            await asyncio.sleep(self.pace * self.rng.choice((0.1, 0.5, 2.0)) * self.rng.random())

    async def _ask(self, name: str, body: Mapping[str, Any], version: int) -> Any:
        """The coordinator's answer, or None."""
        try:
            if self._coordinator is None:
                found = await self.client.ask_any("FindCoordinator", {"key": self.group, "key_type": 0}, 3)
                if found.error_code != ErrorCode.none:
                    self.refusal = f"FindCoordinator: {ErrorCode(found.error_code).name}"
                    return None
                self._coordinator = Address(found.host, found.port)
            return await self.client.ask(self._coordinator, name, body, version)
        except TidemillError as error:
            self.refusal = f"{name}: {error}"
            return None

    async def commit(self) -> bool:
        """Commit the next offset. Whether that was acknowledged."""
        self.asked += 1
        offset = self.asked
        partitions = [{"partition_index": 0, "committed_offset": offset}]
        body = {"group_id": self.group, "topics": [{"name": self.topic, "partitions": partitions}]}
        self.unknown.add(offset)
        answer = await self._ask("OffsetCommit", body, 8)
        if answer is None:
            return False
        code = ErrorCode(answer.topics[0].partitions[0].error_code)
        if code == ErrorCode.none:
            self.acknowledged = max(self.acknowledged, offset)
            self.unknown.discard(offset)
        elif code not in PASSING:
            self.client.note_strange(f"the commit of {offset} got {code.name}")
        return code == ErrorCode.none

    async def fetch(self) -> bool:
        """Ask for the committed offset, and see that it is not older than what was acknowledged before."""
        before = self.acknowledged
        body = {"group_id": self.group, "topics": [{"name": self.topic, "partition_indexes": [0]}]}
        answer = await self._ask("OffsetFetch", body, 6)
        if answer is None:
            return False
        code = ErrorCode(answer.error_code)
        if code != ErrorCode.none:
            self._coordinator, self.refusal = None, f"{self._coordinator} {code.name}"
            if code not in PASSING:
                self.client.note_strange(f"OffsetFetch got {code.name}")
            return False
        found = answer.topics[0].partitions[0].committed_offset
        if found < before and found not in self.unknown:
            self.violations.append(f"offset {before} was acknowledged, and then {found} was found")
        return True
