"""What a node answers other nodes: one function for each message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidemill.cluster.handshake import PeerInfo
from tidemill.cluster.listener import Handlers, QuickHandlers
from tidemill.cluster.messages import (
    AppendRequest,
    AppendResponse,
    BrokerMetadata,
    ElectLeaderRequest,
    ElectLeaderResponse,
    FetchMetadataRequest,
    FetchRequest,
    FetchResponse,
    FindTransactionsRequest,
    FindTransactionsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    KafkaRequest,
    KafkaResponse,
    MetadataProposalResponse,
    MetadataResponse,
    PartitionMetadata,
    ProbeRequest,
    ProbeResponse,
    ProposeMetadataRequest,
    ReplicaEndsRequest,
    ReplicaEndsResponse,
    ReplicaStateAckResponse,
    ReplicaStateRequest,
    TopicMetadata,
)
from tidemill.control.commands import Command, Election, ElectLeaders
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.cluster.kafka_requests import serve_node_request
from tidemill.server.coordinators.internal_producer import append_here

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.server.broker import Broker
    from tidemill.server.cluster.membership import Membership

__all__ = ("handlers_of", "quick_handlers_of")

_NO_NODE: Final = -1


def handlers_of(membership: Membership, broker: Broker) -> Handlers:
    """The handlers of a node's cluster listener."""
    served = _Served(membership, broker)
    return {
        FetchMetadataRequest: served.fetch_metadata,
        ProposeMetadataRequest: served.propose_metadata,
        FetchRequest: served.fetch,
        ReplicaStateRequest: served.replica_state,
        HeartbeatRequest: served.heartbeat,
        AppendRequest: served.append,
        ElectLeaderRequest: served.elect_leader,
        ReplicaEndsRequest: served.replica_ends,
        ProbeRequest: served.probe,
        FindTransactionsRequest: served.find_transactions,
        KafkaRequest: served.kafka,
    }


def quick_handlers_of(membership: Membership) -> QuickHandlers:
    """What is answered without a task, if it can be: the messages that come with every flush."""
    return {
        FetchRequest: lambda _, request: membership.leaders.fetch_at_once(request),
        ReplicaStateRequest: lambda _, request: membership.leaders.replica_state_at_once(request),
    }


class _Served:
    """The handlers, each named after its message."""

    def __init__(self, membership: Membership, broker: Broker) -> None:
        self._membership = membership
        self._broker = broker

    # --- metadata

    async def fetch_metadata(self, peer: PeerInfo, request: FetchMetadataRequest) -> MetadataResponse:
        """Answer another node with this node's metadata of topics, nodes and the controller."""
        image = self._broker.image
        names = sorted(image.topics) if request.topics is None else request.topics
        topics = []
        begin_slice()
        for name in names:
            topic = image.topics.get(name)
            if topic is not None:
                topics.append(_topic(image, topic))
            await give_way()
        return MetadataResponse(
            request.header.answer(),
            cluster_id=image.cluster_id or "",
            controller_id=None if image.controller is None else image.controller.node_id,
            topics=topics,
            brokers=[
                BrokerMetadata(node.id, node.host, node.port, node.rack, alive=image.live(node.id))
                for node in image.nodes.values()
            ],
            revision=image.revision,
        )

    async def propose_metadata(
        self, peer: PeerInfo, request: ProposeMetadataRequest
    ) -> MetadataProposalResponse:
        """Commit a command as the controller, or pass it on."""
        return await self._membership.proposals.answer(request)

    async def elect_leader(self, peer: PeerInfo, request: ElectLeaderRequest) -> ElectLeaderResponse:
        """Have the controller choose another leader; an unclean election names it."""
        topic = self._broker.find.topic_by_id(request.partition.topic_id)
        index = request.partition.index
        if index >= len(topic.partitions):
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"{topic.name} has no partition {index}")
        if request.mode == "resign":
            # Nobody resigns for another node: a leader that does not know of it would go on answering.
            partition = self._broker.find.partition(topic, index)
            if request.preferred_leader != self._broker.node_id:
                await self._membership.resign(partition)
        elif request.mode in (Election.PREFERRED.value, Election.UNCLEAN.value):
            command: Command[Any] = ElectLeaders(
                name=topic.name,
                partitions=(index,),
                election=Election(request.mode),
                leader=request.preferred_leader,
                who=f"node {peer.node_id}",
            )
            codes = await self._membership.proposals.propose(command)
            code = ErrorCode(next(iter(codes.values())))
            if code not in (ErrorCode.none, ErrorCode.election_not_needed):
                raise ApiError(code, f"no other leader of {topic.name}-{index} was elected")
        else:
            raise ApiError(ErrorCode.invalid_request, f"there is no election of mode {request.mode!r}")
        placed = self._broker.find.topic_by_id(topic.id).partitions[index]
        leader = None if placed.leader == _NO_NODE else placed.leader
        return ElectLeaderResponse(request.header.answer(), leader=leader, epoch=placed.leader_epoch)

    async def replica_ends(self, peer: PeerInfo, request: ReplicaEndsRequest) -> ReplicaEndsResponse:
        """Tell how far this node's replicas reach."""
        begin_slice()
        ends = []
        for where in request.partitions:
            ends.append(self._membership.replica_ends.here(where))
            await give_way()
        return ReplicaEndsResponse(request.header.answer(), partitions=ends)

    # --- replication

    async def fetch(self, peer: PeerInfo, request: FetchRequest) -> FetchResponse:
        """Give a follower the records that it lacks."""
        return await self._membership.leaders.fetch(request)

    async def replica_state(self, peer: PeerInfo, request: ReplicaStateRequest) -> ReplicaStateAckResponse:
        """Take note of what is durable at a follower."""
        return await self._membership.leaders.replica_state(request)

    async def heartbeat(self, peer: PeerInfo, request: HeartbeatRequest) -> HeartbeatResponse:
        """Take note of high watermarks that a leader tells."""
        return self._membership.fetcher.heartbeat(request, self._broker.replicas.peek)

    async def append(self, peer: PeerInfo, request: AppendRequest) -> AppendResponse:
        """Append a batch of another node's internal writer, by all the rules of a client's."""
        if request.required_acks not in (1, -1):
            raise ApiError(
                ErrorCode.invalid_required_acks, f"acks must be 1 or -1, not {request.required_acks}"
            )
        broker, index = self._broker, request.partition.index
        topic = broker.find.topic_by_id(request.partition.topic_id)
        broker.find.partition(topic, index, request.leader_epoch)
        base_offset, append_time = await append_here(
            broker,
            topic,
            index,
            bytes(request.records),
            acks=request.required_acks,
            transactional_id=request.transactional_id,
        )
        return AppendResponse(request.header.answer(), base_offset, append_time)

    # --- liveness, and Kafka's own requests

    async def probe(self, peer: PeerInfo, request: ProbeRequest) -> ProbeResponse:
        """Say that this node is well, or ask another one for the asking node."""
        return await self._membership.probing.answer(request)

    async def find_transactions(
        self, peer: PeerInfo, request: FindTransactionsRequest
    ) -> FindTransactionsResponse:
        """Say which transactions the coordinators of some shards know."""
        asked = [(each.producer_id, (each.topic, each.index)) for each in request.transactions]
        known = await self._broker.transactions.find_under_way(request.shards, asked)
        return FindTransactionsResponse(request.header.answer(), known=known)

    async def kafka(self, peer: PeerInfo, request: KafkaRequest) -> KafkaResponse:
        """Serve a Kafka request that only nodes may send."""
        frame = await serve_node_request(self._broker, peer.node_id, request.frame)
        return KafkaResponse(request.header.answer(), frame=frame)


def _topic(image: MetadataImage, topic: TopicImage) -> TopicMetadata:
    partitions = [
        PartitionMetadata(
            index,
            None if placed.leader == _NO_NODE else placed.leader,
            placed.leader_epoch,
            list(placed.replicas),
            list(placed.isr),
            [node_id for node_id in placed.replicas if not image.live(node_id)],
        )
        for index, placed in enumerate(topic.partitions)
    ]
    return TopicMetadata(topic.name, topic.id, partitions, topic.internal)
