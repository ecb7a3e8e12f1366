"""Joining a cluster: whether a data directory may be used, and how nodes know each other.

A directory belongs to one cluster and one node. It remembers how much of the cluster's metadata it has seen:
metadata that is older was lost or restored, and then only an operator can say what counts.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from tidemill.cluster.peer import Peer, PeerContext
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.image import MetadataImage
from tidemill.errors import ApiError, ConfigError, ErrorCode, TidemillError
from tidemill.net.transport import TcpTransport, Transport
from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity

__all__ = ("cluster_transport", "greet", "identify", "note_seen", "read_file", "read_secret")

_GREETING_MS: Final = 3_000
#: Answers that no waiting changes: another secret, another cluster, no common version of the protocol.
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
    cluster_id = image.cluster_id
    assert cluster_id is not None, "the cluster has a name before nodes join"
    identity = directory.read_identity()
    if identity is None:
        identity = DirectoryIdentity(cluster_id=cluster_id, directory_id=new_id(), node_name=name)
        directory.write_identity(identity)
        return identity
    if identity.cluster_id != cluster_id:
        raise ApiError(
            ErrorCode.inconsistent_cluster_id,
            f"the data directory {directory.path} belongs to cluster {identity.cluster_id}, and this is "
            f"cluster {cluster_id}; name the right etcd and --set cluster_name, or another --data directory",
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
            f"cluster's metadata, and etcd has only {image.revision}: etcd has lost data or was restored. "
            "Restore its newest copy; or, if what it has is to count, set seen_revision to 0 in "
            "cluster-identity.json on every node",
        )
    return identity


def note_seen(directory: DataDirectory, identity: DirectoryIdentity, revision: int) -> DirectoryIdentity:
    """Note how much of the metadata the directory has seen; returns the identity as it is then."""
    if revision <= identity.seen_revision:
        return identity
    identity = msgspec.structs.replace(identity, seen_revision=revision)
    directory.write_identity(identity)
    return identity


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
