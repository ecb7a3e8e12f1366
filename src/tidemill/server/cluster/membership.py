"""A node's membership of a cluster: its session, its connections to other nodes, and its replicas.

Order of a start: the metadata is read, the listeners are bound, the logs are checked; then the node
registers, its session begins, and the controller admits it. Until then it leads nothing. A stop goes the
other way: leaderships are given to in-sync replicas first, and the session ends when everything is on disk.

A session that is lost (etcd was away for longer than it lives) begins anew as another incarnation. The
process has gone on, so what it has reported is still on its disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tidemill.cluster.handshake import ClusterIdentity
from tidemill.cluster.listener import ClusterListener
from tidemill.cluster.peer import PeerContext, Peers
from tidemill.config.values import Address
from tidemill.control.cluster_controller import ClusterController
from tidemill.control.commands import AlterInSync, DeclareFit, RegisterNode, Resign
from tidemill.control.session import Session
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.errors import cannot_listen
from tidemill.replication.fetcher import ReplicaFetcher
from tidemill.replication.leader_service import LeaderService, ProposalRefused
from tidemill.replication.state import Role
from tidemill.server.broker.housekeeping import Chore
from tidemill.server.cluster.held_partitions import HeldPartitions
from tidemill.server.cluster.internal_topics import raise_internal_topics
from tidemill.server.cluster.joining import cluster_transport, greet, note_seen, read_secret
from tidemill.server.cluster.kafka_requests import NodeRequests
from tidemill.server.cluster.messages import handlers_of
from tidemill.server.cluster.monitoring import ClusterWatch
from tidemill.server.cluster.open_transactions import OpenTransactions
from tidemill.server.cluster.probing import Probing
from tidemill.server.cluster.proposals import Proposals, is_certain_refusal
from tidemill.server.cluster.replica_ends import ReplicaEnds
from tidemill.server.cluster.successions import Successions

if TYPE_CHECKING:
    from tidemill.control.image import MetadataDelta, MetadataImage
    from tidemill.control.stores.store import MetadataStore
    from tidemill.replication.in_sync import IsrProposal
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker
    from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity
    from tidemill.server.runtime import Runtime

__all__ = ("Membership",)

logger = logging.getLogger(__name__)

_RENEWALS_PER_SESSION: Final = 3
_ADMISSION_WAIT_S: Final = 60.0
_RESIGNING_S: Final = 30.0
_RESIGN_AGAIN_S: Final = 0.2
_REGISTER_ATTEMPTS_MAX: Final = 10
_CUTTING_THREADS: Final = 2
_INTERNAL_TOPICS_INTERVAL_MS: Final = 10_000
_FITNESS_INTERVAL_MS: Final = 5_000
#: A node whose time of day is further off than this says so.
_CLOCK_OFF_MS: Final = 10_000


@dataclass(frozen=True)
class _Registration:
    """What stays the same when a node registers again."""

    host: str
    port: int
    cluster: Address
    directory_id: UUID


class Membership:
    """This node's part in the cluster, from ``listen`` to ``leave``."""

    def __init__(
        self,
        broker: Broker,
        store: MetadataStore,
        runtime: Runtime,
        directory: DataDirectory,
        identity: DirectoryIdentity,
        on_lease: Callable[[int], None] | None = None,
    ) -> None:
        settings, loop = broker.settings, asyncio.get_running_loop()
        self._broker = broker
        self._settings = settings
        self._runtime = runtime
        self._directory = directory
        self._identity = identity
        self.incarnation = runtime.ids.uuid()
        broker.find.own_incarnation = lambda: self.incarnation
        self._registration: _Registration | None = None
        #: For intervals; it goes on while the machine sleeps, where the system has such a clock.
        self._steady_ms: Callable[[], int] = lambda: int(loop.time() * 1000)
        secret = read_secret(settings, broker.image)
        transport = cluster_transport(settings, runtime.transport)
        assert broker.image.cluster_id is not None
        shown = ClusterIdentity(
            broker.image.cluster_id,
            broker.node_id,
            self.incarnation,
            secret,
            lambda: broker.image.node_epoch(broker.node_id),
        )
        self._context = PeerContext(shown, transport, runtime.ids, runtime.wall_ms)
        self.peers = Peers(self._context, self._address_of)
        self.session = Session(
            store,
            broker.node_id,
            on_lost=self._register_again,
            clock_ms=self._steady_ms,
            ttl_ms=settings.session_timeout_ms,
            renew_ms=settings.session_timeout_ms // _RENEWALS_PER_SESSION,
            on_lease=on_lease,
        )
        self.probing = Probing(
            broker.node_id,
            self.peers,
            lambda: broker.image,
            seed=runtime.ids.token(8),
            clock_ms=self._steady_ms,
            wall_ms=runtime.wall_ms,
            on_change=self._suspects_changed,
        )
        self.elected = ClusterController(
            broker.controller, store, self.session, broker.node_id, suspects=self.probing.suspects
        )
        self.proposals = Proposals(broker.node_id, broker.controller, self.elected, self.peers)
        self.node_requests = NodeRequests(self.peers)
        self.open_transactions = OpenTransactions(broker, self.peers)
        self.fetcher = ReplicaFetcher(self.peers, broker.clock, runtime.pools("cut", _CUTTING_THREADS))
        self.leaders = LeaderService(
            broker.replicas,
            self.peers,
            broker.clock,
            propose=self._propose_in_sync,
            report_unfit=self._report_unfit,
            suspected=self._doubtful,
            disk_is_full=lambda: broker.disk.is_full,
            replica_lag_ms=settings.replica_lag_ms,
            move_bytes_per_second=settings.move_bytes_per_second,
        )
        self.held = HeldPartitions(broker)
        self.replica_ends = ReplicaEnds(broker, self.peers)
        self._listener = ClusterListener(
            shown, handlers_of(self, broker), transport=transport, ids=runtime.ids, wall_ms=runtime.wall_ms
        )
        self.address = settings.cluster_listen
        self.watch = ClusterWatch(broker)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._successions = Successions(broker, lambda partition: self._resign(partition, unfit=False))
        self._unsubscribe: Callable[[], None] | None = None

    def _address_of(self, node_id: int) -> Address | None:
        node = self._broker.image.nodes.get(node_id)
        return (
            None if node is None or not node.cluster_port else Address(node.cluster_host, node.cluster_port)
        )

    def _live_addresses(self) -> dict[int, Address]:
        """The cluster addresses of the other nodes that are live."""
        others = self._broker.image.live_nodes - {self._broker.node_id}
        found = {node_id: self._address_of(node_id) for node_id in others}
        return {node_id: address for node_id, address in found.items() if address is not None}

    def _doubtful(self) -> frozenset[int]:
        """The nodes that are not live, and those that seem to be gone though they are."""
        image = self._broker.image
        return frozenset(image.nodes) - image.live_nodes | self.probing.suspects()

    # --- joining

    async def listen(self) -> None:
        """Accept connections of other nodes. Raises ``TidemillError`` if the address cannot be used."""
        try:
            self.address = await self._listener.start(self._settings.cluster_listen)
        except OSError as error:
            raise cannot_listen("listen", self._settings.cluster_listen, error, "--cluster-listen") from error

    async def join(self) -> None:
        """Register, begin the session and take up replication; returns when the controller has admitted it.

        The logs have been checked before. Raises ``TidemillError`` if the cluster does not take the node.
        """
        broker, advertised = self._broker, self._settings.cluster_advertised or self.address
        self._registration = _Registration(
            broker.advertised.host, broker.advertised.port, advertised, self._identity.directory_id
        )
        await greet(self._live_addresses(), self._context)
        await self._register(self._directory.clean_of)
        # Only now: what a follower tells its leader counts for the registration that it names.
        listeners = [self.fetcher.update, self.leaders.update, self.open_transactions.update]
        broker.replicas.role_listeners += listeners
        for partition in broker.replicas:
            for update in listeners:
                update(partition)
        self._unsubscribe = broker.controller.subscribe(self._metadata_changed)
        await self.session.start(self.incarnation)
        self.elected.start()
        self.leaders.start()
        self.open_transactions.start()
        self.probing.start()
        on_disk = await asyncio.to_thread(broker.replicas.found_on_disk)
        self.held.start((topic_id, index) for _, topic_id, index in on_disk)
        await self._wait_admitted()

    async def _register(self, clean_of: UUID | None) -> None:
        assert self._registration is not None
        broker, settings, registration = self._broker, self._settings, self._registration
        command = RegisterNode(
            node_id=broker.node_id,
            name=settings.node_name,
            host=registration.host,
            port=registration.port,
            rack=settings.rack,
            incarnation=self.incarnation,
            cluster_host=registration.cluster.host,
            cluster_port=registration.cluster.port,
            machine=settings.machine or socket.gethostname(),
            directory_id=registration.directory_id,
            clean_of=clean_of,
            lost=tuple(broker.replicas.lost()),
            seen_revision=self._identity.seen_revision,
            replace_directory=settings.replace_directory,
        )
        await broker.controller.submit(command)

    async def _register_again(self) -> UUID:
        """The session was lost: register as another incarnation, whose disk has all that was reported."""
        logger.warning("the session of node %d was lost; it registers again", self._broker.node_id)
        before, self.incarnation = self.incarnation, self._runtime.ids.uuid()
        await self._register(before)
        self.fetcher.report_all()
        return self.incarnation

    async def _wait_admitted(self) -> None:
        """Wait until this node counts as live."""
        admitted = asyncio.Event()
        broker = self._broker

        def look(*_: object) -> None:
            if broker.image.live(broker.node_id):
                admitted.set()

        unsubscribe = broker.controller.subscribe(look)
        try:
            look()
            async with asyncio.timeout(_ADMISSION_WAIT_S):
                await admitted.wait()
        except TimeoutError:
            raise ApiError(
                ErrorCode.broker_not_available,
                f"the cluster's controller has not admitted node {broker.node_id} within "
                f"{_ADMISSION_WAIT_S:.0f} s; look at the log of the controller's node, and whether etcd "
                "answers",
            ) from None
        finally:
            unsubscribe()

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        self.watch.metadata_changed(old, new, delta)
        for node_id, node in new.nodes.items():
            before = old.nodes.get(node_id)
            if before is not None and before.incarnation != node.incarnation:
                self.peers.forget(node_id)
        for node_id in old.nodes.keys() - new.nodes.keys():
            self.peers.forget(node_id)
        self.held.metadata_changed(new, delta)
        self._successions.metadata_changed(new, delta)

    def _suspects_changed(self) -> None:
        logger.info("suspected nodes: %s", sorted(self.probing.suspects()) or "none")
        if self.elected.epoch is not None:
            self.elected.look_again()

    def chores(self) -> list[Chore]:
        """What is done from time to time by a node of a cluster."""
        work = partial(raise_internal_topics, self._broker)
        return [
            Chore("the replicas of internal topics", _INTERNAL_TOPICS_INTERVAL_MS, work),
            Chore("replicas that can lead again", _FITNESS_INTERVAL_MS, self._declare_fit),
        ]

    async def _declare_fit(self) -> None:
        """Say of replicas that resigned because of their disk that they can lead again."""
        image, node_id = self._broker.image, self._broker.node_id
        for partition in self._broker.replicas:
            topic = image.topic_by_id(partition.topic_id)
            placed = topic.partitions[partition.index] if topic is not None else None
            if placed is not None and node_id in placed.unfit and self.leaders.is_fit(partition):
                await self.proposals.propose(
                    DeclareFit(topic_id=partition.topic_id, index=partition.index, node_id=node_id)
                )
            await give_way()

    # --- in-sync sets and leaderships

    async def _propose_in_sync(self, partition: Partition, proposal: IsrProposal) -> None:
        own = self._broker.image.node_epoch(self._broker.node_id)
        command = AlterInSync(
            topic_id=partition.topic_id,
            index=partition.index,
            leader=self._broker.node_id,
            leader_epoch=proposal.leader_epoch,
            partition_epoch=proposal.partition_epoch,
            isr=proposal.isr,
            node_epochs={**proposal.node_epochs, self._broker.node_id: own},
        )
        try:
            await self.proposals.propose(command)
        except TidemillError as error:
            if is_certain_refusal(error):
                raise ProposalRefused(error.message) from error
            raise

    def may_answer_newest(self, partition: Partition) -> bool:
        """Whether no other node can have become the leader yet of a partition that this one leads.

        Leadership leaves a session that lives only by its own resignation; and where there is no other
        replica there is nobody to go to.
        """
        assignment = partition.assignment
        if assignment is not None and len(assignment.replicas) == 1:
            return True
        return self._steady_ms() < self.session.serving_until_ms

    def _report_unfit(self, partition: Partition, reason: str) -> None:
        if partition.assignment is not None and partition.assignment.leader == self._broker.node_id:
            self._run(self._resign(partition, unfit=True))

    async def _resign(self, partition: Partition, *, unfit: bool) -> None:
        command = Resign(
            topic_id=partition.topic_id,
            index=partition.index,
            node_id=self._broker.node_id,
            leader_epoch=partition.leader_epoch,
            unfit=unfit,
        )
        try:
            await self.proposals.propose(command)
        except TidemillError as error:
            logger.info("%r: the leadership could not be given up: %s", partition, error.message)

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    # --- leaving

    async def resign_all(self) -> None:
        """Give every leadership to another in-sync replica, where there is one; not longer than 30 s."""
        if not self._broker.image.live(self._broker.node_id):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESIGNING_S):
                while movable := self._movable():
                    for partition in movable:
                        await self._resign(partition, unfit=False)
                        await give_way()
                    await asyncio.sleep(_RESIGN_AGAIN_S)

    def _movable(self) -> list[Partition]:
        """The partitions that this node leads and another live replica could."""
        image, node_id = self._broker.image, self._broker.node_id
        live = image.live_nodes - {node_id}
        found = []
        for partition in self._broker.replicas:
            topic = image.topic_by_id(partition.topic_id)
            if topic is None or partition.index >= len(topic.partitions):
                continue
            placed = topic.partitions[partition.index]
            if placed.leader == node_id and partition.role is Role.LEADER and live & set(placed.isr):
                found.append(partition)
        return found

    async def stop_replication(self) -> None:
        """Stop fetching and serving followers, before the logs are closed."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self.probing.stop()
        await self.elected.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._successions.stop()
        await self.open_transactions.stop()
        await self.held.stop()
        await self.leaders.close()
        await self.fetcher.close()
        self.fetcher.cutting_pool.shutdown(wait=False)
        await self._listener.close()
        await self.peers.close()

    async def leave(self, *, clean: bool) -> None:
        """End the session; ``clean`` says that everything is on disk, which is noted first.

        The note names the incarnation that the cluster knows: this one, once it has begun its session.
        """
        with contextlib.suppress(TidemillError):
            self._identity = note_seen(self._directory, self._identity, self._broker.image.revision)
        registered = self.session.incarnation or self._directory.clean_of
        if clean and registered is not None:
            self._directory.note_clean_stop(registered)
        await self.session.revoke()

    # --- what it tells of itself

    @property
    def image(self) -> MetadataImage:
        """The metadata as this node knows it."""
        return self._broker.image

    def problems(self) -> list[str]:
        """What keeps this node, or the cluster as it sees it, from being well; in words."""
        found = []
        image, node_id = self._broker.image, self._broker.node_id
        if self.session.trouble is not None:
            found.append(
                f"etcd does not answer: {self.session.trouble}; records are taken and served, but topics "
                "cannot be changed and no leader can be elected"
            )
        if not image.live(node_id):
            found.append(f"node {node_id} is not admitted to the cluster at the moment")
        for other, ahead_ms in sorted(self.peers.clocks_ahead_ms().items()):
            if abs(ahead_ms) > _CLOCK_OFF_MS:
                direction = "ahead of" if ahead_ms > 0 else "behind"
                found.append(
                    f"the clock of node {other} is {abs(ahead_ms) // 1000} s {direction} this node's: set "
                    "both"
                )
        found += self.held.problems()
        found += self.watch.problems()
        return found
