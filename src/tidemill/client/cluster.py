"""A cluster as its clients see it: bootstrap, metadata, who leads what, and trying again.

Rules:

- The first contact is tried once per bootstrap address: a wrong address is reported at once. After that, what
  may pass by itself (a leader that moved, a coordinator that loads, a lost connection) is tried again with
  growing pauses until ``timeout_ms`` is over.
- One attempt has a part of that time only (``attempt_ms``): a node that hangs gives no answer, others do.
- After every failure the cached metadata and coordinators are taken as stale, and another node is asked than
  the last one: a node that is cut off from its cluster takes itself for the leader for as long as that lasts.
  For the same reason an answer with an older leader epoch than a known one is not believed, for a while.
- Coordinators and fetches have connections of their own, so that a long poll holds up nobody.
- A closed cluster stays closed. It belongs to one process and one event loop, and refuses to be used in
  others: a call there would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, TypeVar
from uuid import UUID

from tidemill.client.process_bound import OpeningProcess
from tidemill.config.values import Address, TopicPartition, parse_address
from tidemill.errors import (
    ApiError,
    ConfigError,
    ConnectionClosed,
    ErrorCode,
    NodeUnavailable,
    ProtocolError,
)
from tidemill.net.answers import check
from tidemill.net.connection import DEFAULT_TIMEOUT_MS, Connection, Versions
from tidemill.net.pool import ConnectionPool
from tidemill.net.retry import RetryPolicy, retry
from tidemill.net.transport import Transport

__all__ = (
    "GROUP_KEY",
    "TRANSACTION_KEY",
    "Cluster",
    "PartitionInfo",
    "TopicInfo",
    "TopicPartition",
)

_T = TypeVar("_T")

_METADATA_VERSIONS: Final[Versions] = (4, 13)
#: A connection of its own, so that metadata does not wait behind other requests to the same node.
_BOOTSTRAP_PURPOSE: Final = "bootstrap"
_CLOSED: Final = "this connection is closed; open another one with connect_async"
#: How long a leader is believed against answers that name one of an older epoch. Not for ever: metadata that
#: was restored from a backup may go back.
_BELIEVED_SECONDS: Final = 60.0
_ATTEMPT_MS: Final = 10_000
GROUP_KEY: Final = 0
TRANSACTION_KEY: Final = 1


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """A partition with its leader and replicas. A leader of -1 means that there is none now."""

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
    """Connections to a cluster, and its cached metadata. Use ``async with``, or ``connect`` and ``close``."""

    def __init__(
        self,
        bootstrap: str | Sequence[Address],
        *,
        client_id: str = "tidemill",
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        transport: Transport | None = None,
    ) -> None:
        self.bootstrap = _addresses(bootstrap) if isinstance(bootstrap, str) else tuple(bootstrap)
        #: The bootstrap addresses as text.
        self.servers = ",".join(map(str, self.bootstrap))
        self.timeout_ms = timeout_ms
        self.cluster_id: str | None = None
        self.controller_id = -1
        self.nodes: dict[int, Address] = {}
        self._topics: dict[str, TopicInfo] = {}
        #: When each topic's leaders were last found to be newer than known.
        self._believed_since: dict[str, float] = {}
        #: The node that was asked last, and the one whose answers were of no use.
        self._asked: Address | None = None
        self._avoided: Address | None = None
        self._stale = True
        self._coordinators: dict[tuple[int, str], int] = {}
        self._pool = ConnectionPool(client_id=client_id, transport=transport)
        self._process = OpeningProcess()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def attempt_ms(self) -> int:
        """How long to wait for one node's answer to a request that another node could answer instead."""
        return min(self.timeout_ms, _ATTEMPT_MS)

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
        await self._pool.close()

    # --- metadata

    async def know_nodes(self) -> None:
        """Ask for the nodes of the cluster, unless they are known and not stale."""
        if self._stale or not self.nodes:
            await self._refresh({*self._topics}, create=False)

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

    def known_topic(self, name: str) -> TopicInfo | None:
        """The topic as it was when it was last asked for; None if it never was, or did not exist."""
        return self._topics.get(name)

    async def all_topics(self) -> list[TopicInfo]:
        """Every topic, by name, as it is now."""
        await self._refresh(None, create=False)
        return sorted(self._topics.values(), key=lambda topic: topic.name)

    def forget(self) -> None:
        """Take all that is cached as stale, and ask another node next; connections that work are kept."""
        self.doubt_leaders()
        self._coordinators.clear()

    def doubt_leaders(self) -> None:
        """Ask another node for the leaders when they are needed next."""
        self._stale = True
        self._avoided = self._asked

    async def _refresh(self, names: Iterable[str] | None, create: bool) -> None:
        wanted = None if names is None else [{"name": name} for name in sorted(names)]

        async def ask() -> None:
            response = await self.to_any(
                "Metadata",
                {"topics": wanted, "allow_auto_topic_creation": create},
                versions=_METADATA_VERSIONS,
                timeout_ms=self.attempt_ms,
            )
            self._take_metadata(response, names is None)

        await self.retrying(ask)

    def _take_metadata(self, response: Any, complete: bool) -> None:
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        self.nodes = {node.node_id: Address(node.host, node.port) for node in response.brokers}
        known = self._topics
        if complete:
            self._topics = {}
        for topic in response.topics:
            if topic.error_code == ErrorCode.unknown_topic_or_partition:
                self._topics.pop(topic.name, None)
                continue
            # A topic without a leader is known, too: callers that need the leader raise an error.
            if topic.error_code == ErrorCode.invalid_topic_exception:
                # The answer has no message for this error; the check raises one.
                from tidemill.config.topic_names import check_topic_name

                check_topic_name(topic.name)
            if topic.error_code != ErrorCode.leader_not_available:
                check(topic.error_code, None, f"topic {topic.name!r}")
            self._topics[topic.name] = self._believed(known.get(topic.name), _topic_info(topic))
        self._stale = False

    def _believed(self, known: TopicInfo | None, told: TopicInfo) -> TopicInfo:
        """The topic as a node has just described it, except for partitions whose known leader is newer."""
        now = asyncio.get_running_loop().time()
        is_same = known is not None and known.topic_id == told.topic_id
        epochs = [each.leader_epoch for each in known.partitions] if is_same and known is not None else []
        if any(each.leader_epoch > epoch for each, epoch in zip(told.partitions, epochs, strict=False)):
            self._believed_since[told.name] = now
        if known is None or now - self._believed_since.get(told.name, -_BELIEVED_SECONDS) > _BELIEVED_SECONDS:
            return told
        newest = [
            known.partitions[index] if index < len(epochs) and each.leader_epoch < epochs[index] else each
            for index, each in enumerate(told.partitions)
        ]
        return replace(told, partitions=tuple(newest))

    # --- requests by destination

    async def to_any(self, name: str, body: Mapping[str, Any], **options: Any) -> Any:
        """Send a request to any node."""
        return await (await self.bootstrap_connection()).request(name, body, **options)

    async def to_controller(self, name: str, body: Mapping[str, Any], **options: Any) -> Any:
        """Send a request to the controller that the metadata names."""
        if self._stale:
            await self._refresh(self._topics, create=False)
        if self.controller_id not in self.nodes:
            return await self.to_any(name, body, **options)
        return await (await self.connection(self.controller_id)).request(name, body, **options)

    async def to_coordinator(
        self, key: str, name: str, body: Mapping[str, Any], *, key_type: int = GROUP_KEY, **options: Any
    ) -> Any:
        """Send a request to the coordinator of a group, or of a transactional id with ``TRANSACTION_KEY``."""
        node_id = self._coordinators.get((key_type, key))
        if node_id is None:
            node_id = self._coordinators[key_type, key] = await self._find_coordinator(key, key_type)
        # Only requests of groups wait for long. Transactions share one connection: a job has one per task.
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
        self._check_usable_here()
        return await self._pool.get(address, purpose)

    async def drop_connections(self, purpose: str) -> None:
        """Close the connections for this purpose: the nodes then stop working on what is under way."""
        if self._process.is_this and not self._closed:
            await self._pool.drop(purpose)

    async def bootstrap_connection(self) -> Connection:
        """A connection to one of the bootstrap addresses, or of the nodes they named.

        The one that is to be avoided is used if no other node answers.
        """
        self._check_usable_here()
        avoided, self._avoided = self._avoided, None
        wanted = [*self.bootstrap, *self.nodes.values()]
        # Nodes first: bootstrap addresses may be those of nodes that are gone.
        others = [each for each in (*self.nodes.values(), *self.bootstrap) if each != avoided]
        if avoided is not None and others:
            try:
                connection = await self._pool.get_any(others, _BOOTSTRAP_PURPOSE)
            except (NodeUnavailable, ProtocolError):
                connection = await self._pool.get(avoided, _BOOTSTRAP_PURPOSE)
        else:
            connection = await self._pool.get_any(wanted, _BOOTSTRAP_PURPOSE)
        self._asked = connection.address
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

    async def _find_coordinator(self, key: str, key_type: int) -> int:
        body = {"key": key, "key_type": key_type, "coordinator_keys": [key]}
        response = await self.to_any("FindCoordinator", body, timeout_ms=self.attempt_ms)
        found = response.coordinators[0] if hasattr(response, "coordinators") else response
        check(found.error_code, found.error_message, f"finding the coordinator of {key!r}")
        node_id: int = found.node_id
        self.nodes[node_id] = Address(found.host, found.port)
        return node_id

    # --- trying again

    def retrying(
        self,
        action: Callable[[], Awaitable[_T]],
        *,
        timeout_ms: int | None = None,
        policy: RetryPolicy | None = None,
    ) -> Awaitable[_T]:
        """Await ``action()`` until it succeeds, fails for good, or the time is over.

        Either may be given: for how long, or a policy of the caller's own.
        """
        if not self._pool.was_connected:
            return action()
        policy = policy or RetryPolicy(self.timeout_ms if timeout_ms is None else timeout_ms)
        return retry(action, policy, before_next=self.forget)


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
    """Parse bootstrap servers: ``host:port``, several separated by commas."""
    try:
        return tuple(parse_address(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"the server {text!r} is not {error}") from None
