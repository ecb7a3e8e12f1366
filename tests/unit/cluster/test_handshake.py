"""Only nodes of one cluster with one secret open a connection, and a proof is good for one of them only."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
import pytest

from tidemill.cluster.codes import cluster_code
from tidemill.cluster.handshake import (
    NONCE_BYTES,
    AskingHandshake,
    ClusterIdentity,
    ListeningHandshake,
    PeerInfo,
)
from tidemill.cluster.messages import (
    ClusterErrorCode,
    ClusterRequest,
    ClusterResponse,
    ErrorResponse,
    HeartbeatRequest,
    HelloProof,
    HelloProofResponse,
    HelloResponse,
    RequestHeader,
    ResponseHeader,
)
from tidemill.errors import ConfigError, ProtocolError, TidemillError

ONE = ClusterIdentity("harbour", 1, UUID(int=11), b"the secret")
TWO = ClusterIdentity("harbour", 2, UUID(int=22), b"the secret")
HEADER = RequestHeader(1, 0, 1, 1_000)


def nonce(letter: bytes) -> bytes:
    return letter * NONCE_BYTES


def asking(identity: ClusterIdentity = ONE, node_id: int = 2) -> AskingHandshake:
    return AskingHandshake(identity, node_id, nonce(b"a"))


def listening(identity: ClusterIdentity = TWO) -> ListeningHandshake:
    return ListeningHandshake(identity, nonce(b"b"), "host")


def refused(error: TidemillError, code: ClusterErrorCode, *words: str) -> None:
    assert cluster_code(error) is code
    for word in words:
        assert word in error.message


def greeted(one: AskingHandshake, two: ListeningHandshake, header: RequestHeader = HEADER) -> ClusterResponse:
    return two.answer(one.hello(header), 0)[0]


def test_two_nodes_with_one_secret_know_each_other_afterwards() -> None:
    one, two = asking(), listening()
    answer, info = two.answer(one.hello(HEADER), 5)
    assert info is None, "nothing is proven yet"
    answer, info = two.answer(one.prove(HEADER, answer), 5)
    assert info == PeerInfo(1, UUID(int=11), 1, "host")
    assert one.finish(answer).wall_ms == 5
    assert one.version == 1


def test_a_listening_node_shows_nothing_that_secrets_can_be_tried_against() -> None:
    answer = greeted(asking(), listening())
    other = greeted(asking(), listening(replace(TWO, secret=b"another")))
    assert answer == other, "without a proof, nothing that is said depends on the secret"


def test_another_secret_is_refused_by_the_listening_side() -> None:
    one, two = asking(replace(ONE, secret=b"a guess")), listening()
    proof = one.prove(HEADER, greeted(one, two))
    with pytest.raises(TidemillError) as caught:
        two.answer(proof, 0)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET, "node 1", "cluster_secret")


def test_another_secret_is_refused_by_the_asking_side() -> None:
    one, two = asking(), listening()
    one.prove(HEADER, greeted(one, two))
    with pytest.raises(TidemillError) as caught:
        one.finish(HelloProofResponse(ResponseHeader(0), bytes(32)))
    refused(caught.value, ClusterErrorCode.WRONG_SECRET, "node 2", "cluster_secret")


def test_another_cluster_is_refused_without_naming_ones_own() -> None:
    two = listening(replace(TWO, cluster_id="deep water"))
    with pytest.raises(TidemillError) as caught:
        greeted(asking(), two)
    refused(caught.value, ClusterErrorCode.WRONG_CLUSTER, "'harbour'", "setting cluster")
    assert "deep water" not in caught.value.message


@pytest.mark.parametrize("versions", [(2, 9), (-5, 0)])
def test_no_version_in_common_is_refused(versions: tuple[int, int]) -> None:
    hello = msgspec.structs.replace(
        asking().hello(HEADER), oldest_version=versions[0], newest_version=versions[1]
    )
    with pytest.raises(TidemillError) as caught:
        listening().answer(hello, 0)
    refused(caught.value, ClusterErrorCode.UNSUPPORTED_VERSION, "1 to 1", "update")


def test_a_version_that_was_not_offered_is_refused() -> None:
    one = asking()
    answer = greeted(one, listening())
    with pytest.raises(TidemillError) as caught:
        one.prove(HEADER, msgspec.structs.replace(answer, version=2))
    refused(caught.value, ClusterErrorCode.UNSUPPORTED_VERSION, "update")


def test_changed_versions_do_not_get_past_the_proof() -> None:
    """Somebody in between makes the two speak an older version."""
    one, two = asking(), listening()
    changed = msgspec.structs.replace(one.hello(HEADER), newest_version=9)
    answer, _ = two.answer(changed, 0)
    with pytest.raises(TidemillError) as caught:
        two.answer(one.prove(HEADER, answer), 0)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


def test_a_proof_that_comes_back_proves_nothing() -> None:
    """Who has no secret listens, and shows the asking side its own proof."""
    one = asking()
    shown = one.prove(HEADER, greeted(one, listening(replace(TWO, secret=b"none"))))
    with pytest.raises(TidemillError) as caught:
        one.finish(HelloProofResponse(ResponseHeader(0), shown.proof))
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


def test_a_node_cannot_be_made_to_prove_something_to_itself() -> None:
    """Who has no secret is connected to, and passes everything on to the same node's own listener."""
    one, own_listener = asking(), listening(ONE)
    with pytest.raises(TidemillError) as caught:
        greeted(one, own_listener)
    refused(caught.value, ClusterErrorCode.INVALID_REQUEST, "both ends", "node 1")
    answer = HelloResponse(ResponseHeader(0), 1, 1, nonce(b"b"))
    with pytest.raises(TidemillError) as caught:
        one.prove(HEADER, answer)
    refused(caught.value, ClusterErrorCode.INVALID_REQUEST, "node 1 answers at the address of node 2")


def test_a_proof_for_one_node_is_none_for_another() -> None:
    """Node 3 is connected to as node 3, and passes everything on to node 2."""
    one, two = asking(node_id=3), listening()
    answer = greeted(one, two)
    assert isinstance(answer, HelloResponse)
    proof = one.prove(HEADER, msgspec.structs.replace(answer, node_id=3))
    with pytest.raises(TidemillError) as caught:
        two.answer(proof, 0)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


def test_a_proof_is_none_for_another_connection() -> None:
    one, two = asking(), listening()
    proof = one.prove(HEADER, greeted(one, two))
    later = ListeningHandshake(TWO, nonce(b"c"))
    greeted(asking(), later)
    with pytest.raises(TidemillError) as caught:
        later.answer(proof, 0)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


def test_who_has_said_hello_cannot_become_somebody_else() -> None:
    one, two = asking(), listening()
    proof = one.prove(HEADER, greeted(one, two))
    other = msgspec.structs.replace(proof, header=msgspec.structs.replace(HEADER, source=3))
    with pytest.raises(TidemillError) as caught:
        two.answer(other, 0)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


@pytest.mark.parametrize("request_", [HeartbeatRequest(HEADER, []), HelloProof(HEADER, b"")])
def test_nothing_else_comes_first(request_: ClusterRequest) -> None:
    with pytest.raises(TidemillError) as caught:
        listening().answer(request_, 0)
    refused(caught.value, ClusterErrorCode.INVALID_REQUEST, "Hello")


def test_hello_comes_once() -> None:
    two = listening()
    greeted(asking(), two)
    with pytest.raises(TidemillError) as caught:
        greeted(asking(), two)
    refused(caught.value, ClusterErrorCode.INVALID_REQUEST)


def test_a_short_nonce_is_refused_on_both_sides() -> None:
    one, two = asking(), listening()
    with pytest.raises(ProtocolError, match="nonce"):
        two.answer(msgspec.structs.replace(one.hello(HEADER), nonce=b"short"), 0)
    with pytest.raises(ProtocolError, match="nonce"):
        one.prove(HEADER, HelloResponse(ResponseHeader(0), 2, 1, b""))


def test_answers_of_another_kind_are_refused() -> None:
    one = asking()
    answer = greeted(one, listening())
    with pytest.raises(ProtocolError):
        one.prove(HEADER, ErrorResponse(ResponseHeader(0)))
    one.prove(HEADER, answer)
    with pytest.raises(ProtocolError):
        one.finish(answer)


def test_a_refusal_is_raised_with_its_words() -> None:
    one = asking()
    one.prove(HEADER, greeted(one, listening()))
    refusal = ErrorResponse(ResponseHeader(0, int(ClusterErrorCode.WRONG_SECRET), "no, thank you"))
    with pytest.raises(TidemillError, match="no, thank you") as caught:
        one.prove(HEADER, refusal)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)
    with pytest.raises(TidemillError, match="no, thank you") as caught:
        one.finish(refusal)
    refused(caught.value, ClusterErrorCode.WRONG_SECRET)


def test_a_node_without_a_secret_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match="cluster_secret"):
        ClusterIdentity("harbour", 1, UUID(int=1), b"")


def test_a_secret_is_not_shown() -> None:
    assert "the secret" not in repr(ONE)
