"""A node with share groups, without sockets: requests of members in few words, through the wire format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from support.batches import plain_batch
from support.broker_topics import create, leader
from support.served_apis import served_apis
from support.share_states import MemoryPersister
from tidemill.config.group_keys import GroupConfig
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.server.requests.dispatch import BrokerDispatcher
from tidemill.server.share.led_partition import LedSharePartition
from tidemill.server.traffic import Traffic
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response
from tidemill.wire.requests import parse_header as parse_request_header

__all__ = (
    "ACCEPT",
    "GAP",
    "GROUP",
    "REJECT",
    "RELEASE",
    "RENEW",
    "RETURN",
    "Fetched",
    "Member",
    "ShareWorld",
)

GAP, ACCEPT, RELEASE, REJECT, RENEW, RETURN = range(6)
GROUP = "workers"


class Fetched(NamedTuple):
    """What a ShareFetch gave of one partition."""

    error: int
    acknowledge_error: int
    #: (first, last, delivery count)
    acquired: list[tuple[int, int, int]]
    #: Values of the records that were acquired.
    values: list[str]
    leader: tuple[int, int]

    @property
    def offsets(self) -> list[int]:
        return [offset for first, last, _ in self.acquired for offset in range(first, last + 1)]


_NOTHING = Fetched(0, 0, [], [], (-1, -1))

# Requests get to the nodes without a connection, which would have their handlers loaded.
served_apis()


class ShareWorld:
    """A broker, one topic, and one share group whose state is kept in memory, or by the node (``stored``)."""

    def __init__(self, broker: Broker, *, stored: bool = False) -> None:
        self.broker = broker
        self.persister: Any = broker.persister if stored else MemoryPersister()
        broker.share.persister = self.persister
        self.topic_id: Any = None
        self._configs: dict[str, GroupConfig] = {}
        broker.group_config = self._group_config  # type: ignore[method-assign]
        self._dispatcher = BrokerDispatcher(broker, Traffic())
        self._connections = 0

    def _group_config(self, group_id: str) -> GroupConfig:
        return self._configs.get(group_id, GroupConfig())

    def configure(self, group: str = GROUP, **configs: Any) -> None:
        """Set configs of a group, by the names of ``GroupConfig``."""
        self._configs[group] = GroupConfig(**configs)

    async def begin(self, partitions: int = 1, start: int = 0) -> None:
        """Create the topic, and initialize the state of the group for its partitions."""
        self.topic_id = await create(self.broker, "orders", partitions)
        for index in range(partitions):
            await self.initialize(index=index, start=start)

    async def initialize(
        self, group: str = GROUP, *, index: int = 0, start: int = 0, state_epoch: int = 0
    ) -> None:
        await self.persister.initialize(self.key(group, index), state_epoch, start)

    def key(self, group: str = GROUP, index: int = 0) -> SharePartitionKey:
        return SharePartitionKey(group, self.topic_id, index)

    async def write(self, *values: str, index: int = 0) -> None:
        """Append one batch; returns when it is committed."""
        await self.append(plain_batch(*values, timestamp_ms=self.broker.clock_ms()), index)

    async def write_records(self, *records: Record, index: int = 0, codec: int = 0) -> None:
        await self.append(build_batch(records, codec=codec), index)

    async def append(self, batch: bytes, index: int = 0) -> None:
        partition = leader(self.broker, "orders", index)
        await wait_committed(partition, partition.append(batch, self.broker.clock_ms()).last_offset + 1)

    def led(self, group: str = GROUP, index: int = 0) -> LedSharePartition:
        """The share partition, which is loaded."""
        found = self.broker.share.loaded(self.key(group, index))
        assert found is not None
        return found

    def member(self, name: str, group: str = GROUP) -> Member:
        """A member on a connection of its own."""
        self._connections += 1
        return Member(self, name, group, self._connections)

    async def ask(self, api: str, version: int, /, connection: int = 0, **body: Any) -> Any:
        """Send a request, and give its decoded response."""
        key = APIS_BY_NAME[api].key
        frame = encode_request(key, version, 7, "the-client", body)[4:]
        header = parse_request_header(frame)
        sent: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()
        aborted = ConnectionError("the connection was closed")
        call = Call(
            header,
            decode_request(header, frame),
            "10.1.2.3",
            sent.set_result,
            lambda: sent.set_exception(aborted),
            connection,
        )
        self._dispatcher.dispatch(call)
        _, entity = decode_response(key, version, b"".join(await sent)[4:])
        return entity

    async def settle(self) -> None:
        """Let everything happen that is due now."""
        for _ in range(20):
            await asyncio.sleep(0)


class Member:
    """A member of a share group, with its share session."""

    def __init__(self, world: ShareWorld, name: str, group: str, connection: int) -> None:
        self._world = world
        self.name = name
        self.group = group
        self.connection = connection
        self.epoch = 0

    def _next_epoch(self, epoch: int | None) -> int:
        if epoch is not None:
            return epoch
        self.epoch += 1
        return self.epoch - 1

    async def ask_fetch(
        self,
        indexes: Sequence[int] = (0,),
        *,
        acknowledge: Sequence[tuple[int, int, int, Sequence[int]]] = (),
        forget: Sequence[int] = (),
        epoch: int | None = None,
        version: int = 2,
        **body: Any,
    ) -> Any:
        """Send a ShareFetch; ``acknowledge`` has (partition, first, last, types)."""
        batches: dict[int, list[dict[str, Any]]] = {index: [] for index in indexes}
        for index, first, last, types in acknowledge:
            batches.setdefault(index, []).append(_batch(first, last, types))
        named = {
            "max_wait": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "max_records": 500,
            "batch_size": 500,
        } | body
        topic_id = self._world.topic_id
        return await self._world.ask(
            "ShareFetch",
            version,
            self.connection,
            group_id=self.group,
            member_id=self.name,
            share_session_epoch=self._next_epoch(epoch),
            topics=[
                {
                    "topic_id": topic_id,
                    "partitions": [
                        {"partition_index": index, "acknowledgement_batches": given}
                        for index, given in batches.items()
                    ],
                }
            ],
            forgotten_topics_data=[{"topic_id": topic_id, "partitions": list(forget)}] if forget else [],
            **named,
        )

    async def fetch(self, index: int = 0, **body: Any) -> Fetched:
        """Fetch one partition, and give what came of it. Fails if the request was refused as a whole."""
        response = await self.ask_fetch((index,), **body)
        assert response.error_code == 0, response
        return self.part(response, index)

    def part(self, response: Any, index: int = 0) -> Fetched:
        for topic in response.responses:
            for partition in topic.partitions:
                if partition.partition_index == index:
                    return _fetched(partition)
        return _NOTHING

    async def acknowledge(
        self, *batches: tuple[int, int, Sequence[int]], index: int = 0, epoch: int | None = None, **body: Any
    ) -> int:
        """Acknowledge (first, last, types). The error of the request, or of the partition."""
        response = await self._world.ask(
            "ShareAcknowledge",
            body.pop("version", 2),
            self.connection,
            group_id=self.group,
            member_id=self.name,
            share_session_epoch=self._next_epoch(epoch),
            topics=[
                {
                    "topic_id": self._world.topic_id,
                    "partitions": [
                        {
                            "partition_index": index,
                            "acknowledgement_batches": [_batch(*each) for each in batches],
                        }
                    ],
                }
            ],
            **body,
        )
        if response.error_code:
            return int(response.error_code)
        return int(response.responses[0].partitions[0].error_code)

    async def settle(
        self,
        first: int,
        last: int,
        kind: int,
        *,
        delay_ms: int = -1,
        reason: str | None = None,
        transaction: tuple[str | None, int, int] = (None, -1, -1),
        version: int = 1,
    ) -> int:
        """Acknowledge with ShareSettle. The error."""
        batch = _batch(first, last, (kind,)) | {"delay_ms": delay_ms, "reason": reason}
        response = await self._world.ask(
            "ShareSettle",
            version,
            self.connection,
            group_id=self.group,
            member_id=self.name,
            share_session_epoch=self._next_epoch(None),
            **dict(zip(("transactional_id", "producer_id", "producer_epoch"), transaction, strict=True)),
            topics=[
                {
                    "topic_id": self._world.topic_id,
                    "partitions": [{"partition_index": 0, "batches": [batch]}],
                }
            ],
        )
        if response.error_code:
            return int(response.error_code)
        return int(response.topics[0].partitions[0].error_code)

    async def close(self) -> None:
        """Close the session as clients do."""
        await self.ask_fetch((), epoch=-1)


def _batch(first: int, last: int, types: Sequence[int]) -> dict[str, Any]:
    return {"first_offset": first, "last_offset": last, "acknowledge_types": list(types)}


def _fetched(partition: Any) -> Fetched:
    acquired = [
        (each.first_offset, each.last_offset, each.delivery_count) for each in partition.acquired_records
    ]
    offsets = {offset for first, last, _ in acquired for offset in range(first, last + 1)}
    data, values = bytes(partition.records or b""), []
    while data:
        size = parse_header(data).size_bytes
        if not parse_header(data).is_control:
            values += [
                (record.value or b"").decode()
                for record in read_records(data[:size])
                if record.offset in offsets
            ]
        data = data[size:]
    current = partition.current_leader
    return Fetched(
        int(partition.error_code),
        int(partition.acknowledge_error_code),
        acquired,
        values,
        (current.leader_id, current.leader_epoch),
    )
