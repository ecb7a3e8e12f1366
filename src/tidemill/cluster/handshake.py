"""The opening of a connection: two nodes show each other that they have the same secret. Pure, no I/O.

    asking side                                   listening side
    Hello: cluster, versions, nonce        →
                                           ←      Hello: node id, version, nonce
    HelloProof: proof "asking"             →
                                           ←      HelloProof: proof "listening", time of day

A proof is HMAC-SHA256, with the secret as its key, over a label of the side and everything that both have
said: no proof is good for another connection, another node or the other side. The asking side proves first:
who does not have the secret gets nothing from a listening node that secrets could be tried against.

The proofs are about the opening. Who can change bytes on the way can do so afterwards: only TLS keeps them
out. All nodes have one secret, so a node that has it can claim to be any other.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from tidemill.cluster.codes import error_of, raise_for
from tidemill.cluster.messages import (
    PROTOCOL_VERSION,
    ClusterErrorCode,
    ClusterRequest,
    ClusterResponse,
    HelloProof,
    HelloProofResponse,
    HelloRequest,
    HelloResponse,
    RequestHeader,
)
from tidemill.errors import ApiError, ConfigError, ProtocolError

__all__ = (
    "HANDSHAKE_BYTES_MAX",
    "NONCE_BYTES",
    "OLDEST_VERSION",
    "AskingHandshake",
    "ClusterIdentity",
    "ListeningHandshake",
    "PeerInfo",
)

NONCE_BYTES: Final = 32
#: The largest frame that either side takes before the proofs.
HANDSHAKE_BYTES_MAX: Final = 64 * 1024
#: The oldest version of the protocol that this node speaks.
OLDEST_VERSION: Final = 1
_ASKING: Final = b"tidemill asking"
_LISTENING: Final = b"tidemill listening"


@dataclass(frozen=True)
class ClusterIdentity:
    """Who this node is in its cluster, and the secret that all of its nodes have.

    ``node_epoch`` gives the revision at which the node is registered; 0 while it is not.
    """

    cluster_id: str
    node_id: int
    incarnation: UUID
    secret: bytes = field(repr=False)
    node_epoch: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        if not self.secret:
            raise ConfigError(
                "a node of a cluster needs its secret; give all nodes the same cluster_secret_file"
            )


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """The node at the other end of a connection, after it has shown that it has the secret."""

    node_id: int
    incarnation: UUID
    #: The version of the protocol on this connection.
    version: int
    #: Where it connects from.
    host: str = ""


def _proof(secret: bytes, label: bytes, hello: HelloRequest, answer: HelloResponse) -> bytes:
    """What a side shows. Each part has its length before it, so that no two conversations look the same."""
    parts = (
        label,
        hello.cluster_id.encode(),
        hello.incarnation.bytes,
        hello.nonce,
        answer.nonce,
        *(
            str(number).encode()
            for number in (
                hello.header.source,
                answer.node_id,
                hello.oldest_version,
                hello.newest_version,
                answer.version,
            )
        ),
    )
    said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret, said, "sha256")


def _agreed_version(oldest: int, newest: int) -> int:
    """The newest version that both sides speak. Raises ``ApiError`` UNSUPPORTED_VERSION."""
    version = min(newest, PROTOCOL_VERSION)
    if version < max(oldest, OLDEST_VERSION):
        raise error_of(
            ClusterErrorCode.UNSUPPORTED_VERSION,
            f"the asking node speaks versions {oldest} to {newest} of the cluster's protocol, this one "
            f"{OLDEST_VERSION} to {PROTOCOL_VERSION}; update the older of the two nodes",
        )
    return version


def _checked_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce of {len(nonce)} bytes; it must have {NONCE_BYTES}")


class AskingHandshake:
    """The side that has connected to node ``node_id``. ``nonce`` is fresh and random."""

    def __init__(self, identity: ClusterIdentity, node_id: int, nonce: bytes) -> None:
        self._identity = identity
        self._node_id = node_id
        self._nonce = nonce
        self._hello: HelloRequest | None = None
        self._answer: HelloResponse | None = None

    def hello(self, header: RequestHeader) -> HelloRequest:
        """The first message."""
        mine = self._identity
        self._hello = HelloRequest(
            header, mine.cluster_id, OLDEST_VERSION, PROTOCOL_VERSION, mine.incarnation, self._nonce
        )
        return self._hello

    def prove(self, header: RequestHeader, answer: ClusterResponse) -> HelloProof:
        """The second message. Raises ``ApiError`` if the other side refuses, or is not who was expected."""
        raise_for(answer.header, "Hello")
        if not isinstance(answer, HelloResponse):
            raise ProtocolError(f"Hello was answered with {type(answer).__name__}")
        _checked_nonce(answer.nonce)
        if answer.node_id != self._node_id:
            raise error_of(
                ClusterErrorCode.INVALID_REQUEST,
                f"node {answer.node_id} answers at the address of node {self._node_id}; check the address "
                "that each of the two nodes advertises",
            )
        if not OLDEST_VERSION <= answer.version <= PROTOCOL_VERSION:
            raise error_of(
                ClusterErrorCode.UNSUPPORTED_VERSION,
                f"node {self._node_id} wants version {answer.version} of the cluster's protocol, this one "
                f"speaks {OLDEST_VERSION} to {PROTOCOL_VERSION}; update the older of the two nodes",
            )
        assert self._hello is not None, "Hello comes first"
        self._answer = answer
        return HelloProof(header, _proof(self._identity.secret, _ASKING, self._hello, answer))

    def finish(self, answer: ClusterResponse) -> HelloProofResponse:
        """Check the other side's proof. Raises ``ApiError`` if it refuses ours, or has another secret."""
        raise_for(answer.header, "HelloProof")
        if not isinstance(answer, HelloProofResponse):
            raise ProtocolError(f"HelloProof was answered with {type(answer).__name__}")
        assert self._hello is not None
        assert self._answer is not None
        expected = _proof(self._identity.secret, _LISTENING, self._hello, self._answer)
        if not hmac.compare_digest(expected, answer.proof):
            raise _wrong_secret(f"node {self._node_id} took this node's proof, but has another secret")
        return answer

    @property
    def version(self) -> int:
        """The version of the connection."""
        assert self._answer is not None
        return self._answer.version


class ListeningHandshake:
    """The side that was connected to. ``nonce`` is fresh and random, ``host`` where the other side is."""

    def __init__(self, identity: ClusterIdentity, nonce: bytes, host: str = "") -> None:
        self._identity = identity
        self._nonce = nonce
        self._host = host
        self._hello: HelloRequest | None = None
        self._answer: HelloResponse | None = None

    def answer(self, request: ClusterRequest, wall_ms: int) -> tuple[ClusterResponse, PeerInfo | None]:
        """The answer to a message, and who is there once that is proven.

        Raises ``ApiError`` with the answer's code; the connection then has to end.
        """
        if isinstance(request, HelloRequest) and self._hello is None:
            return self._greet(request), None
        if isinstance(request, HelloProof) and self._answer is not None:
            return self._check(request, wall_ms)
        raise error_of(
            ClusterErrorCode.INVALID_REQUEST,
            f"{type(request).__name__} came before the connection was opened: send Hello, then HelloProof",
        )

    def _greet(self, hello: HelloRequest) -> HelloResponse:
        mine = self._identity
        if hello.cluster_id != mine.cluster_id:
            # Not whose it is: nothing is proven yet.
            raise error_of(
                ClusterErrorCode.WRONG_CLUSTER,
                f"this node is not of cluster {hello.cluster_id[:100]!r}; check the setting cluster of both "
                "nodes, and the address",
            )
        version = _agreed_version(hello.oldest_version, hello.newest_version)
        _checked_nonce(hello.nonce)
        if hello.header.source == mine.node_id:
            raise error_of(
                ClusterErrorCode.INVALID_REQUEST,
                f"both ends of the connection are node {mine.node_id}; give each node a name of its own",
            )
        self._hello = hello
        self._answer = HelloResponse(hello.header.answer(), mine.node_id, version, self._nonce)
        return self._answer

    def _check(self, shown: HelloProof, wall_ms: int) -> tuple[HelloProofResponse, PeerInfo]:
        assert self._hello is not None
        assert self._answer is not None
        hello, answer, secret = self._hello, self._answer, self._identity.secret
        if shown.header.source != hello.header.source or not hmac.compare_digest(
            _proof(secret, _ASKING, hello, answer), shown.proof
        ):
            raise _wrong_secret(f"node {hello.header.source} has another secret than this node")
        proof = _proof(secret, _LISTENING, hello, answer)
        info = PeerInfo(hello.header.source, hello.incarnation, answer.version, self._host)
        return HelloProofResponse(shown.header.answer(), proof, wall_ms), info


def _wrong_secret(what: str) -> ApiError:
    return error_of(
        ClusterErrorCode.WRONG_SECRET,
        f"{what}; give all nodes of the cluster the same secret (cluster_secret_file)",
    )
