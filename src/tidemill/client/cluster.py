"""A cluster as its clients see it: bootstrap, metadata, who leads what, and trying again.

Rules:

- The first contact is tried once per bootstrap address: a wrong address is reported at once. After that, what
  may pass by itself (a leader that moved, a coordinator that loads, a lost connection) is tried again with
  growing pauses until ``timeout_ms`` is over.
- After every failure the cached metadata and coordinators are taken as stale.
- Coordinators and fetches have connections of their own, so that a long poll holds up nobody.
- A closed cluster stays closed. It belongs to one process and one event loop, and refuses to be used in
  others: a call there would wait for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar
from uuid import UUID

from tidemill.client.connection import DEFAULT_TIMEOUT_MS, Connection, Versions
from tidemill.client.process_bound import OpeningProcess
from tidemill.config.values import Address, parse_address
from tidemill.errors import (
    ApiError,
    ConfigError,
    ConnectionClosed,
    ErrorCode,
    NodeUnavailable,
    ProtocolError,
    TidemillError,
)

__all__ = (
    "GROUP_KEY",
    "TRANSACTION_KEY",
    "Cluster",
    "PartitionInfo",
    "TopicInfo",
    "TopicPartition",
    "check",
    "passes_by_itself",
)

_T = TypeVar("_T")
TopicPartition = tuple[str, int]

_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 1_000
_METADATA_VERSIONS: Final[Versions] = (4, 13)
_CLOSED: Final = "this connection is closed; open another one with connect_async"
GROUP_KEY: Final = 0
TRANSACTION_KEY: Final = 1

_PASSING: Final = frozenset(
    {
        ErrorCode.broker_not_available,
        ErrorCode.concurrent_transactions,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.leader_not_available,
        ErrorCode.network_exception,
        ErrorCode.not_controller,
        ErrorCode.not_coordinator,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.not_leader_or_follower,
        ErrorCode.offset_not_available,
        ErrorCode.replica_not_available,
        ErrorCode.request_timed_out,
        ErrorCode.throttling_quota_exceeded,
        ErrorCode.unknown_leader_epoch,
        ErrorCode.unstable_offset_commit,
    }
)


def passes_by_itself(error: TidemillError) -> bool:
    """Whether the same request may succeed a moment later.

    Narrower than Kafka's ``retriable``: a missing topic or a broken disk is reported, not waited for.
    """
    return error.code in _PASSING


def check(code: int, message: str | None, what: str) -> None:
    """Raise ``ApiError`` unless ``code`` is none. ``what`` says what was tried, if the server does not."""
    if code != ErrorCode.none:
        error = ErrorCode(code)
        raise ApiError(error, message or f"{what}: the server answered {error.name.upper()}")


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Where one partition is. A leader of -1 means that there is none now."""

    index: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic and its partitions in the order of their numbers."""

    name: str
    topic_id: UUID | None
    internal: bool
    partitions: tuple[PartitionInfo, ...]


class Cluster:
    """The way to the nodes of a cluster. Use it in ``async with``, or call ``connect`` and ``close``."""

    def __init__(
        self,
        bootstrap: str | Sequence[Address],
        *,
        client_id: str = "tidemill",
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
    ) -> None:
        self.bootstrap = _addresses(bootstrap) if isinstance(bootstrap, str) else tuple(bootstrap)
        #: The same as text.
        self.servers = ",".join(map(str, self.bootstrap))
        self.client_id = client_id
        self.timeout_ms = timeout_ms
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.nodes: dict[int, Address] = {}
        self._topics: dict[str, TopicInfo] = {}
        self._stale = True
        self._coordinators: dict[tuple[int, str], int] = {}
        self._connections: dict[tuple[int | None, str], Connection] = {}
        self._opening = asyncio.Lock()
        self._process = OpeningProcess()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed, so that every further request would fail."""
        return self._closed

    async def __aenter__(self) -> Cluster:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Make the first contact. Raises ``NodeUnavailable`` or ``ProtocolError`` if no address answers."""
        await self.bootstrap_connection()

    async def close(self) -> None:
        """Close every connection. Closing twice is fine; in a forked process there is nothing to close."""
        if not self._process.is_this:
            return
        self._closed = True
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    # --- metadata

    async def topic(self, name: str, *, create: bool = False) -> TopicInfo:
        """The topic. ``create`` lets the server make a missing one, if it is set to do so."""
        if self._stale or name not in self._topics:
            await self._refresh({*self._topics, name}, create)
        found = self._topics.get(name)
        if found is None:
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"there is no topic {name!r}; 'tidemill topic list' shows those that exist",
            )
        return found

    async def all_topics(self) -> list[TopicInfo]:
        """Every topic, by name, as it is now."""
        await self._refresh(None, create=False)
        return sorted(self._topics.values(), key=lambda topic: topic.name)

    def forget(self) -> None:
        """Take all that is cached as stale; connections that work are kept."""
        self._stale = True
        self._coordinators.clear()

    async def _refresh(self, names: Iterable[str] | None, create: bool) -> None:
        wanted = None if names is None else [{"name": name} for name in sorted(names)]

        async def ask() -> None:
            response = await self.to_any(
                "Metadata",
                {"topics": wanted, "allow_auto_topic_creation": create},
                versions=_METADATA_VERSIONS,
            )
            self._take_metadata(response, names is None)

        await self.retrying(ask)

    def _take_metadata(self, response: Any, complete: bool) -> None:
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        self.nodes = {node.node_id: Address(node.host, node.port) for node in response.brokers}
        if complete:
            self._topics = {}
        for topic in response.topics:
            if topic.error_code == ErrorCode.unknown_topic_or_partition:
                self._topics.pop(topic.name, None)
                continue
            # A topic without a leader is a topic all the same: whoever needs the leader will say so.
            if topic.error_code == ErrorCode.invalid_topic_exception:
                # The answer has no words for it.
                from tidemill.control.placement import check_topic_name

                check_topic_name(topic.name)
            if topic.error_code != ErrorCode.leader_not_available:
                check(topic.error_code, None, f"topic {topic.name!r}")
            self._topics[topic.name] = _topic_info(topic)
        self._stale = False

    # --- requests by destination

    async def to_any(self, name: str, body: Mapping[str, Any], **options: Any) -> Any:
        """Ask whichever node is at hand."""
        return await (await self.bootstrap_connection()).request(name, body, **options)

    async def to_controller(self, name: str, body: Mapping[str, Any], **options: Any) -> Any:
        """Ask the controller, as Kafka names it in its metadata."""
        if self._stale:
            await self._refresh(self._topics, create=False)
        if self.controller_id not in self.nodes:
            return await self.to_any(name, body, **options)
        return await (await self.connection(self.controller_id)).request(name, body, **options)

    async def to_coordinator(
        self, key: str, name: str, body: Mapping[str, Any], *, key_type: int = GROUP_KEY, **options: Any
    ) -> Any:
        """Ask the coordinator of a group, or of a transactional id with ``TRANSACTION_KEY``."""
        node_id = self._coordinators.get((key_type, key))
        if node_id is None:
            node_id = self._coordinators[key_type, key] = await self._find_coordinator(key, key_type)
        # Only groups poll for long: transactions share a connection, for a job has as many as tasks.
        purpose = "transactions" if key_type == TRANSACTION_KEY else f"coordinator {key}"
        connection = await self.connection(node_id, purpose=purpose)
        return await connection.request(name, body, **options)

    async def leaders(self, partitions: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        """The partitions by their leader. Raises ``ApiError`` for one that is missing or has no leader."""
        by_leader: dict[int, list[TopicPartition]] = {}
        for topic_name, index in partitions:
            topic = await self.topic(topic_name)
            if not 0 <= index < len(topic.partitions):
                raise ApiError(
                    ErrorCode.unknown_topic_or_partition,
                    f"topic {topic_name!r} has {len(topic.partitions)} partitions (0 to "
                    f"{len(topic.partitions) - 1}), there is no partition {index}",
                )
            leader = topic.partitions[index].leader
            if leader not in self.nodes:
                raise ApiError(
                    ErrorCode.leader_not_available,
                    f"{topic_name}-{index} has no leader now; if it stays so, 'tidemill doctor' says why",
                )
            by_leader.setdefault(leader, []).append((topic_name, index))
        return by_leader

    async def connection(self, node_id: int, purpose: str = "") -> Connection:
        """The connection to a node for this purpose, opened if need be."""
        address = self.nodes.get(node_id)
        if address is None:
            raise ApiError(ErrorCode.leader_not_available, f"node {node_id} is not in the cluster now")
        return await self._connected((node_id, purpose), [address])

    async def bootstrap_connection(self) -> Connection:
        """A connection to one of the bootstrap addresses, or of the nodes they named."""
        return await self._connected((None, ""), [*self.bootstrap, *self.nodes.values()])

    async def _connected(self, key: tuple[int | None, str], addresses: Sequence[Address]) -> Connection:
        self._check_usable_here()
        if (connection := self._usable(key, addresses)) is not None:
            return connection
        async with self._opening:
            if (connection := self._usable(key, addresses)) is None:
                connection = await self._open_first(addresses)
                if self._closed:
                    await connection.close()
                    raise ConnectionClosed(_CLOSED)
                self._connections[key] = connection
        return connection

    def _check_usable_here(self) -> None:
        """Raise ``ConnectionClosed`` after ``close``, in a forked process, and in another event loop."""
        self._process.check(self.servers)
        if self._closed:
            raise ConnectionClosed(_CLOSED)
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise ConnectionClosed(
                "this connection was opened in another event loop (each asyncio.run has one of its own); "
                "open and use it in the same one"
            )

    def _usable(self, key: tuple[int | None, str], addresses: Sequence[Address]) -> Connection | None:
        connection = self._connections.get(key)
        # A node that came back elsewhere keeps its number.
        if connection is None or connection.failed or connection.address not in addresses:
            return None
        return connection

    async def _open_first(self, addresses: Iterable[Address]) -> Connection:
        failure: TidemillError | None = None
        for address in dict.fromkeys(addresses):
            try:
                return await Connection.open(address, client_id=self.client_id)
            except (NodeUnavailable, ProtocolError) as error:
                failure = failure or error
        assert failure is not None, "there is always an address"
        raise failure

    async def _find_coordinator(self, key: str, key_type: int) -> int:
        body = {"key": key, "key_type": key_type, "coordinator_keys": [key]}
        response = await self.to_any("FindCoordinator", body)
        found = response.coordinators[0] if hasattr(response, "coordinators") else response
        check(found.error_code, found.error_message, f"finding the coordinator of {key!r}")
        node_id: int = found.node_id
        self.nodes[node_id] = Address(found.host, found.port)
        return node_id

    # --- trying again

    async def retrying(
        self,
        attempt: Callable[[], Awaitable[_T]],
        *,
        timeout_ms: int | None = None,
        passes: Callable[[TidemillError], bool] = passes_by_itself,
    ) -> _T:
        """Await ``attempt()`` until it succeeds, fails for good, or the time is over.

        ``passes`` says which errors are worth another try.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        first_contact = not self._connections
        pause_ms = _FIRST_PAUSE_MS
        while True:
            try:
                return await attempt()
            except TidemillError as error:
                pause_seconds = pause_ms * random.uniform(0.5, 1.0) / 1000
                if first_contact or not passes(error) or loop.time() + pause_seconds > deadline:
                    raise
            self.forget()
            await asyncio.sleep(pause_seconds)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)


def _topic_info(topic: Any) -> TopicInfo:
    partitions = [
        PartitionInfo(
            partition.partition_index,
            partition.leader_id,
            getattr(partition, "leader_epoch", -1),
            tuple(partition.replica_nodes),
            tuple(partition.isr_nodes),
            tuple(getattr(partition, "offline_replicas", ())),
        )
        for partition in topic.partitions
    ]
    partitions.sort(key=lambda partition: partition.index)
    return TopicInfo(topic.name, getattr(topic, "topic_id", None), topic.is_internal, tuple(partitions))


def _addresses(text: str) -> tuple[Address, ...]:
    """``host:port``, several separated by commas."""
    try:
        return tuple(parse_address(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"the server {text!r} is not {error}") from None
