"""Joining a cluster: whether a data directory may be used, and how nodes know each other.

A directory belongs to one cluster and one node. It remembers how much of the cluster's metadata it has seen:
metadata that is older was lost or restored, and then only an operator can say what counts. Metadata that was
restored and has gone on since has another history: one key of it is compared. What the directory remembers
may be a little old, after a crash; then the leader epochs in its logs tell.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final
from uuid import UUID

from tidemill.cluster.peer import Peer, PeerContext
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import RaiseLeaderEpoch
from tidemill.control.image import MetadataImage
from tidemill.control.stores.store import (
    LOST_METADATA,
    RESTORE_METADATA,
    MetadataStore,
    RevisionCompacted,
)
from tidemill.errors import ApiError, ConfigError, ErrorCode, TidemillError
from tidemill.net.transport import TcpTransport, Transport
from tidemill.replication.partition import Partition
from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity

__all__ = (
    "check_identity",
    "check_logs",
    "check_seen",
    "cluster_transport",
    "greet",
    "identify",
    "read_file",
    "read_secret",
)

_GREETING_MS: Final = 3_000
#: Errors for which waiting is of no use: another secret, another cluster, no common protocol version.
_REFUSALS: Final = frozenset(
    {
        ErrorCode.sasl_authentication_failed,
        ErrorCode.inconsistent_cluster_id,
        ErrorCode.unsupported_version,
    }
)


def identify(
    directory: DataDirectory, image: MetadataImage, name: str, new_id: Callable[[], UUID]
) -> DirectoryIdentity:
    """The identity of a data directory, written if it has none. Raises ``ApiError`` if it is another's."""
    assert image.cluster_id is not None, "the cluster has a name before nodes join"
    identity = check_identity(directory, image, name)
    if identity is None:
        identity = DirectoryIdentity(cluster_id=image.cluster_id, directory_id=new_id(), node_name=name)
        directory.write_identity(identity)
    return identity


def check_identity(directory: DataDirectory, image: MetadataImage, name: str) -> DirectoryIdentity | None:
    """The identity of a data directory, if it has one. Raises ``ApiError`` if it does not belong here.

    To be asked before anything is written to etcd: what is there may be another cluster's, or be all that an
    operator has left.
    """
    identity = directory.read_identity()
    if identity is None:
        return None
    if image.cluster_id is None:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"the data directory {directory.path} belongs to cluster {identity.cluster_id}, and etcd has no "
            "metadata of a cluster here. If --cluster names the right etcd, and --set cluster_name the right "
            f"name in it: {RESTORE_METADATA}",
        )
    if identity.cluster_id != image.cluster_id:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"the data directory {directory.path} belongs to cluster {identity.cluster_id}, and this is "
            f"cluster {image.cluster_id}; name the right etcd and --set cluster_name, or another --data "
            "directory",
        )
    if identity.node_name != name:
        raise ApiError(
            ErrorCode.duplicate_broker_registration,
            f"the data directory {directory.path} is node {identity.node_name!r}'s, and this node is called "
            f"{name!r}; start it as --name {identity.node_name}, or give it another --data directory",
        )
    if identity.seen_revision > image.revision:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"the data directory {directory.path} has seen revision {identity.seen_revision} of the "
            f"cluster's metadata, and etcd has only {image.revision}: {LOST_METADATA}",
        )
    return identity


async def check_seen(identity: DirectoryIdentity, store: MetadataStore) -> None:
    """Raise ``ApiError`` if the metadata's history is not the one that the directory has seen.

    That is not noticed once the history is compacted, unless the key has not been written since.
    """
    if not identity.seen_revision or not identity.seen_key:
        return
    try:
        stored = await store.read(identity.seen_key, revision=identity.seen_revision)
    except RevisionCompacted:
        stored = await store.read(identity.seen_key)
        found = stored.entries.get(identity.seen_key)
        if found is None or found.mod_revision > identity.seen_revision:
            return
    found = stored.entries.get(identity.seen_key)
    if found is None or found.mod_revision != identity.seen_key_revision:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"when the cluster's metadata was at revision {identity.seen_revision}, revision "
            f"{identity.seen_key_revision} had written its key {identity.seen_key!r} last, and by etcd's "
            f"history {'none' if found is None else found.mod_revision} had: {LOST_METADATA}",
        )


def check_logs(
    identity: DirectoryIdentity, image: MetadataImage, partitions: Iterable[Partition]
) -> list[RaiseLeaderEpoch]:
    """Raise ``ApiError`` if a log has a leader epoch that the metadata has not given yet.

    If an operator has said that the metadata counts as it is, these epochs have to be passed over first: the
    commands for that are returned.
    """
    passed_over = []
    for partition in partitions:
        topic = image.topic_by_id(partition.topic_id)
        if topic is None or partition.index >= len(topic.partitions):
            continue
        given, found = topic.partitions[partition.index].leader_epoch, partition.last_epoch
        if found <= given:
            continue
        if identity.seen_revision:
            raise ApiError(
                ErrorCode.inconsistent_cluster_id,
                f"the log of {topic.name}-{partition.index} has records of leader epoch {found}, and etcd "
                f"has given only {given}: {LOST_METADATA}",
            )
        passed_over.append(RaiseLeaderEpoch(topic_id=partition.topic_id, index=partition.index, above=found))
    return passed_over


def read_secret(settings: Settings, image: MetadataImage) -> bytes:
    """The secret that nodes share: that of the file in the settings, else etcd's. Raises ``ConfigError``."""
    if settings.cluster_secret_file is None:
        return image.cluster_secret
    secret = read_file("cluster_secret_file", settings.cluster_secret_file).strip()
    if not secret:
        raise ConfigError(f"{settings.cluster_secret_file} (setting cluster_secret_file) is empty")
    return secret


def read_file(setting: str, path: Path) -> bytes:
    """The contents of a file that a setting names. Raises ``ConfigError``."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path} (setting {setting}): {error.strerror}") from error


async def greet(nodes: Mapping[int, Address], context: PeerContext) -> None:
    """Connect to the live nodes once, before this node registers.

    Raises ``ApiError`` if they refuse this node: it could follow and lead nothing. Nodes that do not answer
    refuse nothing, and one that takes this node is enough.
    """
    answers = await asyncio.gather(
        *(_greet(node_id, address, context) for node_id, address in nodes.items()), return_exceptions=True
    )
    refused = None
    for answer in answers:
        if answer is None:
            return
        if isinstance(answer, ApiError) and answer.code in _REFUSALS:
            refused = answer
        elif not isinstance(answer, TidemillError):
            raise answer
    if refused is not None:
        raise refused


async def _greet(node_id: int, address: Address, context: PeerContext) -> None:
    peer = await Peer.open(node_id, address, context, timeout_ms=_GREETING_MS)
    await peer.close()


def cluster_transport(settings: Settings, transport: Transport) -> Transport:
    """The transport between nodes: with TLS, if the settings name certificates. Raises ``ConfigError``."""
    if settings.cluster_tls_ca is None:
        return transport
    contexts = []
    for side in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        try:
            context = ssl.create_default_context(side, cafile=str(settings.cluster_tls_ca))
            context.load_cert_chain(str(settings.cluster_tls_cert), str(settings.cluster_tls_key))
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "the certificates of cluster_tls_ca, cluster_tls_cert and cluster_tls_key cannot be used: "
                f"{error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        contexts.append(context)
    return TcpTransport(server_tls=contexts[0], client_tls=contexts[1])
