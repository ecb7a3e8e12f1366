"""Planning of nodes: registration, admission, tags, removal, and files of deleted topics. Pure.

A registration says what became of the node's disk since the last one. It stays said until the controller has
admitted an incarnation: a node that registers twice in a row does not lose what the first one told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.control import records
from tidemill.control.commands import (
    AdmitNode,
    AllocateNodeNumber,
    ForgetDeleted,
    RegisterNode,
    RemoveNode,
    SetNodeTags,
)
from tidemill.control.image import NodeImage
from tidemill.control.plans import Plan, guards, planner, write_one
from tidemill.control.records import encode
from tidemill.control.stores.store import ACCEPT_METADATA, LOST_METADATA
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage
    from tidemill.control.placement import ControlLimits

__all__ = ("check_cluster_tls",)

_NAMED_MAX = 20
"""How many replicas the refusal to remove a node names."""


@planner.register(AllocateNodeNumber)
def _(command: AllocateNodeNumber, image: MetadataImage, limits: ControlLimits) -> Plan[int]:
    known = {node.name: node.id for node in image.nodes.values()} | dict(image.node_numbers)
    if command.name in known:
        return Plan({}, {}, known[command.name])
    number = max(known.values(), default=0) + 1
    record = records.NodeNumbersRecord(numbers={**known, command.name: number})
    return write_one(image, records.NODE_NUMBERS_KEY, encode(record), number)


@planner.register(RegisterNode)
def _(command: RegisterNode, image: MetadataImage, limits: ControlLimits) -> Plan[NodeImage]:
    for other in image.nodes.values():
        if (other.id == command.node_id) != (other.name == command.name):
            raise _duplicate(
                f"node {other.name!r} is registered with id {other.id}, so {command.name!r} cannot be"
                f" {command.node_id}; give it another name and id"
            )
    if image.replicated:
        _check_session(command, image)
        _check_directory(command, image)
        check_cluster_tls(image, command.node_id, command.cluster_tls)
    node = _registered(command, image)
    if image.nodes.get(node.id) == node:
        return Plan({}, {}, node)
    key = records.node_key(node.id)
    seen = (key, records.alive_key(node.id), records.admitted_key(node.id)) if image.replicated else (key,)
    return Plan({key: encode(_node_record(node))}, guards(image, seen), node)


def _check_session(command: RegisterNode, image: MetadataImage) -> None:
    if image.alive.get(command.node_id, command.incarnation) != command.incarnation:
        raise _duplicate(
            f"node {command.name!r} runs already, as another process: two nodes need two names. If that one"
            " has just been stopped, try again when its session is over, in a few seconds"
        )
    if command.seen_revision > image.revision:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"node {command.name!r} has seen metadata revision {command.seen_revision}, and the store is at"
            f" {image.revision}: {LOST_METADATA}",
        )


def _check_directory(command: RegisterNode, image: MetadataImage) -> None:
    old = image.nodes.get(command.node_id)
    known = None if old is None else old.directory_id
    if known not in (None, command.directory_id) and not command.replace_directory:
        raise _duplicate(
            f"node {command.name!r} had the data directory {known}, and this one is {command.directory_id}."
            " Start it with its old directory, or give this node another name. If the old directory is gone"
            " for good, say so with --replace-directory: its replicas are copied anew from the other nodes"
        )
    if old is not None and _is_outdated(command, old) and not command.replace_directory:
        raise _duplicate(
            f"the data directory of node {command.name!r} is older than the one that it had: it was restored"
            " from an old image, and may lack records that count as safe. Start the node with its newest"
            " directory. If that is gone for good, say so with --replace-directory: its replicas are copied"
            f" anew from the other nodes. If it was etcd that was restored: {ACCEPT_METADATA}"
        )
    for other in image.nodes.values():
        same = other.directory_id is not None and other.directory_id == command.directory_id
        if same and other.id != command.node_id and other.id in image.alive:
            raise _duplicate(
                f"the data directory {command.directory_id} is that of node {other.name!r}, which runs: it"
                " was copied. Start this node with an empty directory"
            )


def check_cluster_tls(image: MetadataImage, node_id: int, cluster_tls: bool | None) -> None:
    """Raise ``ApiError`` if a node with TLS between nodes would meet one without.

    Neither would hear the other, and each would take it for one that does not answer. Only nodes that run
    count: TLS can be turned on or off while all of them are stopped.
    """
    if cluster_tls is None:
        return
    for other in image.nodes.values():
        if other.id == node_id or other.id not in image.alive:
            continue
        if other.cluster_tls is not None and other.cluster_tls != cluster_tls:
            this, that = ("uses", "does not") if cluster_tls else ("does not use", "does")
            raise ApiError(
                ErrorCode.invalid_config,
                f"this node {this} TLS between nodes (cluster_tls_ca, cluster_tls_cert, cluster_tls_key), and"
                f" node {other.name!r}, which runs, {that}: give all nodes of the cluster the same of these"
                " settings. To turn TLS on or off, stop all nodes first; a node that was killed counts as"
                " running for some more seconds",
            )


def _is_outdated(command: RegisterNode, old: NodeImage) -> bool:
    """Whether the directory does not know the incarnation that was registered last with it."""
    incarnations = (*command.known_as, command.incarnation)
    return (
        bool(command.known_as)
        and old.directory_id == command.directory_id
        and old.incarnation not in incarnations
    )


def _registered(command: RegisterNode, image: MetadataImage) -> NodeImage:
    """The node as the command registers it, with what was said of its disk and is not dealt with yet."""
    old = image.nodes.get(command.node_id)
    clean, new_directory, lost = True, False, {*command.lost}
    if old is not None and old.incarnation == command.incarnation:
        clean, new_directory = old.clean, old.new_directory
        lost |= {*old.lost}
    elif old is not None:
        clean = command.clean_of == old.incarnation
        new_directory = old.directory_id not in (None, command.directory_id) or _is_outdated(command, old)
        if image.admitted.get(old.id) != old.incarnation:
            clean = clean and old.clean
            new_directory = new_directory or old.new_directory
            lost |= {*old.lost}
    return NodeImage(
        id=command.node_id,
        name=command.name,
        host=command.host,
        port=command.port,
        rack=command.rack,
        incarnation=command.incarnation,
        cluster_host=command.cluster_host,
        cluster_port=command.cluster_port,
        machine=command.machine,
        directory_id=command.directory_id,
        clean=clean and image.replicated,
        new_directory=new_directory and image.replicated,
        lost=tuple(sorted(lost)),
        cluster_tls=command.cluster_tls,
    )


def _node_record(node: NodeImage) -> records.NodeRecord:
    return records.NodeRecord(
        name=node.name,
        host=node.host,
        port=node.port,
        rack=node.rack,
        incarnation=node.incarnation,
        cluster_host=node.cluster_host,
        cluster_port=node.cluster_port,
        machine=node.machine,
        directory_id=node.directory_id,
        clean=node.clean,
        new_directory=node.new_directory,
        lost=node.lost,
        cluster_tls=node.cluster_tls,
    )


@planner.register(AdmitNode)
def _(command: AdmitNode, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    node = image.nodes.get(command.node_id)
    alive = image.alive.get(command.node_id)
    if node is None or not node.incarnation == command.incarnation == alive:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"node {command.node_id} does not run as incarnation {command.incarnation} any more",
        )
    key = records.admitted_key(node.id)
    if image.admitted.get(node.id) == node.incarnation:
        return Plan({}, {}, None)
    value = encode(records.AdmittedRecord(incarnation=node.incarnation))
    seen = guards(image, (key, records.node_key(node.id), records.alive_key(node.id)))
    return Plan({key: value}, seen, None)


@planner.register(SetNodeTags)
def _(command: SetNodeTags, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    _node(image, command.node_id)
    tags = tuple(sorted({*command.tags}))
    if image.node_tags.get(command.node_id, ()) == tags:
        return Plan({}, {}, None)
    value = encode(records.NodeTagsRecord(tags=tags)) if tags else None
    key = records.node_tags_key(command.node_id)
    return Plan({key: value}, guards(image, (key, records.node_key(command.node_id))), None)


@planner.register(RemoveNode)
def _(command: RemoveNode, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    node_id = command.node_id
    if node_id not in image.nodes:
        return Plan({}, {}, None)
    if node_id in image.alive:
        raise ApiError(ErrorCode.invalid_request, f"node {node_id} runs; stop it before it is removed")
    if image.replica_counts.get(node_id):
        raise ApiError(ErrorCode.invalid_request, _still_holds(image, node_id))
    gone = (
        records.node_key(node_id),
        records.admitted_key(node_id),
        records.node_tags_key(node_id),
        records.node_configs_key(node_id),
    )
    present = [key for key in gone if image.key_revision(key)]
    return Plan(dict.fromkeys(present), guards(image, (*present, records.alive_key(node_id))), None)


def _still_holds(image: MetadataImage, node_id: int) -> str:
    held = [
        f"{name}-{index}"
        for name in sorted(image.topics)
        for index, partition in enumerate(image.topics[name].partitions)
        if node_id in partition.replicas
    ]
    more = "" if len(held) <= _NAMED_MAX else f" and {len(held) - _NAMED_MAX} more"
    return (
        f"node {node_id} holds {len(held)} replicas: {', '.join(held[:_NAMED_MAX])}{more}; move them to other"
        " nodes before it is removed"
    )


@planner.register(ForgetDeleted)
def _(command: ForgetDeleted, image: MetadataImage, limits: ControlLimits) -> Plan[None]:
    deleted = image.deleted_topics.get(command.topic_id)
    if deleted is None:
        return Plan({}, {}, None)
    left = tuple(node_id for node_id in deleted.nodes if node_id != command.node_id)
    if left == deleted.nodes and left:
        return Plan({}, {}, None)
    record = records.DeletedTopicRecord(name=deleted.name, nodes=left, deleted_by=deleted.deleted_by)
    value = encode(record) if left else None
    return write_one(image, records.deleted_topic_key(deleted.id), value, None)


def _node(image: MetadataImage, node_id: int) -> NodeImage:
    node = image.nodes.get(node_id)
    if node is None:
        raise ApiError(ErrorCode.broker_id_not_registered, f"there is no node {node_id}")
    return node


def _duplicate(message: str) -> ApiError:
    return ApiError(ErrorCode.duplicate_broker_registration, message)
