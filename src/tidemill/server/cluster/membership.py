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

import msgspec

from tidemill.cluster.handshake import ClusterIdentity
from tidemill.cluster.listener import ClusterListener
from tidemill.cluster.peer import PeerContext, Peers
from tidemill.config.broker_keys import FOLLOWER_RATE, LEADER_RATE, rate_in_force
from tidemill.config.values import Address
from tidemill.control.cluster_controller import ClusterController
from tidemill.control.commands import (
    AlterInSync,
    Command,
    DeclareFit,
    DeclareUnfit,
    RegisterNode,
    Resign,
)
from tidemill.control.node_planning import check_cluster_tls
from tidemill.control.records import PartitionImage
from tidemill.control.session import Session
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, DiskFull, ErrorCode, StorageError, TidemillError
from tidemill.net.errors import cannot_listen
from tidemill.replication.fetching.fetcher import ReplicaFetcher
from tidemill.replication.fetching.leader_service import LeaderService, ProposalRefused
from tidemill.replication.rules.state import Role
from tidemill.replication.throttle import MoveThrottle
from tidemill.server.broker.housekeeping import Chore
from tidemill.server.cluster.freshness import MetadataFreshness
from tidemill.server.cluster.held_partitions import HeldPartitions
from tidemill.server.cluster.internal_topics import raise_internal_topics
from tidemill.server.cluster.joining import check_logs, cluster_transport, greet, read_secret
from tidemill.server.cluster.kafka_requests import NodeRequests
from tidemill.server.cluster.lapsed_session import LapsedSession
from tidemill.server.cluster.messages import handlers_of, quick_handlers_of
from tidemill.server.cluster.monitoring import ClusterWatch
from tidemill.server.cluster.newest_answers import ClusterNewestAnswers
from tidemill.server.cluster.open_transactions import OpenTransactions
from tidemill.server.cluster.probing import Probing
from tidemill.server.cluster.proposals import Proposals, is_certain_refusal
from tidemill.server.cluster.replica_ends import ReplicaEnds
from tidemill.server.cluster.successions import Successions

if TYPE_CHECKING:
    from tidemill.control.image import MetadataDelta, MetadataImage
    from tidemill.control.stores.store import MetadataStore
    from tidemill.replication.partition import Partition
    from tidemill.replication.rules.in_sync import IsrProposal
    from tidemill.server.broker import Broker
    from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity
    from tidemill.server.runtime import Runtime

__all__ = ("Membership",)

logger = logging.getLogger(__name__)

_RENEWALS_PER_SESSION: Final = 3
_ADMISSION_WAIT_S: Final = 60.0
_RESIGNING_S: Final = 30.0
_RESIGN_AGAIN_S: Final = 0.2
_LOOK_S: Final = 2.0
_RESIGNATIONS_AT_ONCE: Final = 100
_DECLARED_AT_ONCE: Final = 100
_CUTTING_THREADS: Final = 2
_INTERNAL_TOPICS_INTERVAL_MS: Final = 10_000
_FITNESS_INTERVAL_MS: Final = 5_000
_SEEN_INTERVAL_MS: Final = 5_000
_FRESHNESS_INTERVAL_MS: Final = 5_000
_WITHOUT_ETCD: Final = (
    "records are taken and served, but topics cannot be changed and no leader can be elected"
)
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
        self._identity_lock = asyncio.Lock()
        self.incarnation = runtime.ids.uuid()
        #: The incarnation that was registered last, by this process.
        self._registered: UUID | None = None
        broker.find.own_incarnation = lambda: self.incarnation
        self._registration: _Registration | None = None
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
            clock_ms=runtime.session_ms,
            ttl_ms=settings.session_timeout_ms,
            renew_ms=settings.session_timeout_ms // _RENEWALS_PER_SESSION,
            on_lease=on_lease,
            refusal=lambda: broker.controller.went_back,
        )
        self.newest = ClusterNewestAnswers(
            broker.node_id, self.session, self.peers, runtime.session_ms, lambda: broker.image
        )
        self._lapsed = LapsedSession(
            broker, self.session, self.peers, runtime.session_ms, silent_ms=lambda: self.probing.silent_ms
        )
        self.probing = Probing(
            broker.node_id,
            self.peers,
            lambda: broker.image,
            seed=runtime.ids.token(8),
            clock_ms=lambda: int(loop.time() * 1000),
            wall_ms=runtime.wall_ms,
            on_change=self._suspects_changed,
        )
        self.elected = ClusterController(
            broker.controller, store, self.session, broker.node_id, suspects=self.probing.suspects
        )
        self.proposals = Proposals(broker.node_id, broker.controller, self.elected, self.peers)
        self.node_requests = NodeRequests(self.peers)
        self.open_transactions = OpenTransactions(broker, self.peers)
        self.fetcher = ReplicaFetcher(
            self.peers, broker.clock, runtime.pools("cut", _CUTTING_THREADS), node_id=broker.node_id
        )
        self.leaders = LeaderService(
            broker.replicas,
            self.peers,
            broker.clock,
            propose=self._propose_in_sync,
            report_unfit=self._report_unfit,
            suspected=self._doubtful,
            disk_is_full=lambda: broker.disk.is_full,
            replica_lag_ms=settings.replica_lag_ms,
            throttle=MoveThrottle(0, broker.node_id),
        )
        self.freshness = MetadataFreshness(
            broker.node_id, self.peers, lambda: broker.image, broker.controller.refresh
        )
        self.held = HeldPartitions(broker)
        self.replica_ends = ReplicaEnds(broker, self.peers)
        self._listener = ClusterListener(
            shown,
            handlers_of(self, broker),
            quick_handlers=quick_handlers_of(self),
            transport=transport,
            ids=runtime.ids,
            wall_ms=runtime.wall_ms,
        )
        self.address = settings.cluster_listen
        self.watch = ClusterWatch(broker)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._successions = Successions(broker, self.resign)
        #: Partitions about whose resignation the controller is being asked.
        self._resigning: set[Partition] = set()
        #: Replicas of which the controller is being told that they are unfit.
        self._declaring: set[Partition] = set()
        self._may_declare = asyncio.Semaphore(_DECLARED_AT_ONCE)
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
        for raised in check_logs(self._identity, broker.image, broker.replicas):
            await broker.controller.submit(raised)
        await self._register(self._directory.clean_of)
        # Only now: what a follower tells its leader counts for the registration that it names.
        listeners = [self.fetcher.update, self.leaders.update, self.open_transactions.update]
        broker.replicas.role_listeners += listeners
        for partition in broker.replicas:
            for update in listeners:
                update(partition)
        self._unsubscribe = broker.controller.subscribe(self._metadata_changed)
        self._set_rates(broker.image)
        await self.session.start(self.incarnation)
        self._lapsed.start()
        self.elected.start()
        self.leaders.start()
        self.open_transactions.start()
        self.probing.start()
        on_disk = await asyncio.to_thread(broker.replicas.found_on_disk)
        self.held.start((topic_id, index) for _, topic_id, index in on_disk)
        await self._wait_admitted()
        # Again: another node may have registered at the same time.
        check_cluster_tls(broker.image, broker.node_id, self._uses_tls)

    @property
    def _uses_tls(self) -> bool:
        return self._settings.cluster_tls_ca is not None

    async def _register(self, clean_of: UUID | None) -> None:
        assert self._registration is not None
        known_as = self._identity.incarnations
        if self.incarnation not in known_as:
            # Durable before it is registered, so that an older copy of the directory is recognised.
            await self._note_identity(incarnations=(*self._may_be_registered(), self.incarnation))
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
            known_as=known_as,
            seen_revision=self._identity.seen_revision,
            replace_directory=settings.replace_directory,
            cluster_tls=self._uses_tls,
        )
        try:
            await broker.controller.submit(command)
        except ApiError:
            await self._note_identity(incarnations=known_as)
            raise
        self._registered = self.incarnation
        await self._note_seen()

    def _may_be_registered(self) -> tuple[UUID, ...]:
        """The incarnations of which one is registered, by all that this directory and the metadata know.

        The last one that was noted may be registered late, by a request that a crash has left on its way.
        """
        if self._registered is not None:
            return (self._registered,)
        noted, node = self._identity.incarnations, self._broker.image.nodes.get(self._broker.node_id)
        if node is None or node.incarnation not in noted:
            return noted
        return tuple(dict.fromkeys((node.incarnation, noted[-1])))

    async def _note_seen(self) -> None:
        """Note durably how much of the metadata this directory has seen: older metadata is refused then."""
        image = self._broker.image
        if image.revision > self._identity.seen_revision:
            key, key_revision = image.newest_key()
            # A disk that takes nothing is found out, and said, where records are written.
            with contextlib.suppress(StorageError):
                await self._note_identity(
                    seen_revision=image.revision, seen_key=key, seen_key_revision=key_revision
                )

    async def _note_identity(self, **changes: Any) -> None:
        """Change the identity durably. Raises ``StorageError``."""
        async with self._identity_lock:
            noted = msgspec.structs.replace(self._identity, **changes)
            try:
                await asyncio.to_thread(self._directory.write_identity, noted)
            except DiskFull as error:
                if not self._broker.disk.give_up_reserve(error):
                    raise
                await asyncio.to_thread(self._directory.write_identity, noted)
            self._identity = noted

    async def _register_again(self) -> UUID:
        """The session was lost: register as another incarnation, whose disk has all that was reported."""
        # An etcd that has lost data, or was restored, has lost the session, too.
        await self._broker.controller.refresh()
        logger.warning("the session of node %d was lost; it registers again", self._broker.node_id)
        if self.incarnation == self._registered:
            self.incarnation = self._runtime.ids.uuid()
        await self._register(self._registered)
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
        if delta.node_configs_changed:
            self._set_rates(new)
        for node_id, node in new.nodes.items():
            before = old.nodes.get(node_id)
            if before is not None and before.incarnation != node.incarnation:
                self.peers.forget(node_id)
        for node_id in old.nodes.keys() - new.nodes.keys():
            self.peers.forget(node_id)
        self.held.metadata_changed(new, delta)
        self._successions.metadata_changed(new, delta)

    def _set_rates(self, image: MetadataImage) -> None:
        """Limit what this node sends and fetches for replicas that are moved."""
        node_id, stored = self._broker.node_id, image.node_configs
        setting = self._settings.move_bytes_per_second
        self.leaders.set_rate(rate_in_force(LEADER_RATE, node_id, stored, setting))
        self.fetcher.set_rate(rate_in_force(FOLLOWER_RATE, node_id, stored))

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
            Chore("the metadata's revision on disk", _SEEN_INTERVAL_MS, self._note_seen),
            Chore("the age of the metadata", _FRESHNESS_INTERVAL_MS, self.freshness.look),
        ]

    async def _declare_fit(self) -> None:
        """Tell the controller which replicas that were unfit because of their disk can lead again."""
        node_id = self._broker.node_id
        for partition in self._broker.replicas:
            placed = self._placed(partition)
            if placed is not None and node_id in placed.unfit and self.leaders.is_fit(partition):
                fit = DeclareFit(topic_id=partition.topic_id, index=partition.index, node_id=node_id)
                try:
                    await self.proposals.propose(fit)
                except TidemillError as error:
                    logger.info("%r can lead again; that is told later: %s", partition, error.message)
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

    def _placed(self, partition: Partition) -> PartitionImage | None:
        """What the metadata says of a partition that this node holds; None if it is gone."""
        topic = self._broker.image.topic_by_id(partition.topic_id)
        if topic is None or partition.index >= len(topic.partitions):
            return None
        return topic.partitions[partition.index]

    def _report_unfit(self, partition: Partition, reason: str) -> None:
        if partition not in self._declaring and self._has_unfit_to_tell(partition):
            self._declaring.add(partition)
            self._run(self._declare_unfit(partition))

    def _has_unfit_to_tell(self, partition: Partition) -> bool:
        """Whether the metadata would still elect a replica of this node that is unfit, or counts on it."""
        placed, node_id = self._placed(partition), self._broker.node_id
        if placed is None or node_id not in placed.replicas:
            return False
        counts = partition.failure is not None and node_id in (*placed.isr, *placed.elr)
        return node_id not in placed.unfit or placed.leader == node_id or counts

    async def _declare_unfit(self, partition: Partition) -> None:
        node_id = self._broker.node_id
        try:
            async with self._may_declare:
                command = DeclareUnfit(
                    topic_id=partition.topic_id,
                    index=partition.index,
                    node_id=node_id,
                    node_epoch=self._broker.image.node_epoch(node_id),
                    leader_epoch=partition.leader_epoch,
                    failed=partition.failure is not None,
                )
                if partition.assignment is not None and partition.assignment.leader == node_id:
                    await self._give_up(partition, command)
                else:
                    await self.proposals.propose(command)
        except TidemillError as error:
            logger.info("%r is unfit to lead; that is told later: %s", partition, error.message)
        finally:
            self._declaring.discard(partition)

    async def resign(self, partition: Partition) -> None:
        """Ask for another leader. Until it is certain that there is none, this one relies on nothing."""
        command = Resign(
            topic_id=partition.topic_id,
            index=partition.index,
            node_id=self._broker.node_id,
            leader_epoch=partition.leader_epoch,
        )
        await self._give_up(partition, command)

    async def _give_up(self, partition: Partition, command: Command[PartitionImage]) -> None:
        """Propose a command that ends the leadership of the partition's epoch.

        One question at a time. After one whose outcome is not known it stays like that in this epoch:
        it may arrive late.
        """
        if partition in self._resigning:
            return
        side, epoch = partition.as_leader, partition.leader_epoch
        is_first = not side.is_resigning
        self._resigning.add(partition)
        side.resign()
        try:
            placed = msgspec.convert(await self.proposals.propose(command), PartitionImage)
            is_over = placed.leader_epoch == epoch
        except TidemillError as error:
            logger.info("%r: the leadership could not be given up: %s", partition, error.message)
            is_over = is_certain_refusal(error)
        finally:
            self._resigning.discard(partition)
        if is_over and is_first:
            side.stay(epoch)

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    # --- leaving

    async def resign_all(self) -> None:
        """Give every leadership to another in-sync replica, where there is one; not longer than 30 s."""
        broker = self._broker
        await self._look_at_etcd()
        if not broker.image.live(broker.node_id) or broker.controller.went_back is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESIGNING_S):
                while movable := self._movable():
                    await self._resign_side_by_side(movable)
                    await asyncio.sleep(_RESIGN_AGAIN_S)

    async def _look_at_etcd(self) -> None:
        """Find out whether etcd was restored since the last news: then nothing is to be written to it."""
        with contextlib.suppress(TidemillError, TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._broker.controller.refresh()

    async def _resign_side_by_side(self, partitions: list[Partition]) -> None:
        """Resign from several at a time: the controller commits together what is asked together."""
        left = iter(partitions)

        async def resign_some() -> None:
            for partition in left:
                await self.resign(partition)
                await give_way()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_RESIGNATIONS_AT_ONCE, len(partitions))):
                group.create_task(resign_some())

    def _movable(self) -> list[Partition]:
        """The partitions that this node leads and another live replica could."""
        image, node_id = self._broker.image, self._broker.node_id
        live = image.live_nodes - {node_id}
        return [
            partition
            for partition in self._broker.replicas
            if (placed := self._placed(partition)) is not None
            and placed.leader == node_id
            and partition.role is Role.LEADER
            and live & set(placed.isr)
        ]

    async def stop_replication(self) -> None:
        """Stop fetching and serving followers, before the logs are closed."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self.probing.stop()
        await self._lapsed.stop()
        await self.elected.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._successions.stop()
        await self.newest.stop()
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
        if self._registered is not None:
            await self._note_seen()
        registered = self.session.incarnation or self._directory.clean_of
        if clean and registered is not None:
            self._directory.note_clean_stop(registered)
        await self._look_at_etcd()
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
        failure = self._broker.controller.failure
        if self._broker.controller.went_back is not None:
            found.append(f"etcd cannot be relied on: {failure}. Until then {_WITHOUT_ETCD}")
        elif failure is not None:
            found.append(f"etcd is not followed: {failure}")
        elif self.session.trouble is not None:
            found.append(f"etcd does not answer: {self.session.trouble}; {_WITHOUT_ETCD}")
        if not image.live(node_id):
            found.append(f"node {node_id} is not admitted to the cluster at the moment")
        for other, ahead_ms in sorted(self.peers.clocks_ahead_ms().items()):
            if abs(ahead_ms) > _CLOCK_OFF_MS:
                direction = "ahead of" if ahead_ms > 0 else "behind"
                found.append(
                    f"the clock of node {other} is {abs(ahead_ms) // 1000} s {direction} this node's: set "
                    "both"
                )
        found += self._lapsed.problems()
        found += self.freshness.problems()
        found += self.held.problems()
        found += self.watch.problems()
        found += self.leaders.problems()
        return found
