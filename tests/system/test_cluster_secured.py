"""A cluster with TLS to etcd and between nodes, a user of etcd, and racks: all of it by settings."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, TopicPartition

from support.etcd import NO_ETCD, EtcdServer, has_etcd, make_certificates
from support.processes import wait_until
from support.prometheus_text import parse_metrics
from support.real_cluster import RealCluster, RealNode
from tidemill.cluster.frames import encode
from tidemill.cluster.handshake import NONCE_BYTES
from tidemill.cluster.messages import HelloRequest, RequestHeader

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

_RACKS = {"n1": "a", "n2": "b", "n3": "c"}
_VALUE_BYTES = 1_000
#: Longer than any test: a session that ends before was ended by the process that looks after the node.
_SESSION_MS = 600_000


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of the nodes, of another authority than etcd's."""
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[RealCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    password = directory / "password"
    password.write_text("right\n")
    with EtcdServer(directory / "etcd", tls=True) as etcd:
        asyncio.run(etcd.enable_authentication("tidemill/"))
        with RealCluster(
            directory,
            etcd=etcd,
            racks=_RACKS,
            session_timeout_ms=_SESSION_MS,
            etcd_tls_ca=etcd.ca_file,
            etcd_tls_cert=etcd.cert_file,
            etcd_tls_key=etcd.key_file,
            etcd_user="node",
            etcd_password_file=password,
            cluster_tls_ca=certificates / "ca.crt",
            cluster_tls_cert=certificates / "server.crt",
            cluster_tls_key=certificates / "server.key",
        ) as running:
            yield running


@pytest.fixture(autouse=True)
def show_logs(cluster: RealCluster) -> Iterator[None]:
    yield
    print(cluster.logs())  # noqa: T201


def read(cluster: RealCluster, topic: str, count: int, **config: str) -> list[str]:
    consumer = Consumer(cluster.config | {"group.id": "g", "enable.auto.commit": False, **config})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[str] = []

    def is_read() -> bool:
        found = consumer.consume(count, timeout=0.2)
        values.extend(each.value().decode() for each in found if each.error() is None)
        return len(values) >= count

    wait_until(is_read, f"{count} records of {topic} are read")
    consumer.close()
    return values


def test_records_are_replicated_and_the_death_of_a_node_is_told_to_etcd(
    cluster: RealCluster, topic: str
) -> None:
    cluster.create_topic(topic)
    cluster.produce(topic, "one", "two")
    dead = cluster.leader(topic)
    dead.kill()
    cluster.wait_for_leaders(topic, but=dead)
    cluster.produce(topic, "three")
    assert read(cluster, topic, 3) == ["one", "two", "three"]
    dead.start()
    cluster.wait_in_sync(topic, 3)


def answers(node: RealNode, context: ssl.SSLContext | None) -> bool:
    """Whether the node's port for other nodes answers a greeting."""
    host, port = node.cluster_address
    hello = HelloRequest(RequestHeader(1, 1, 9, 60_000), "another cluster", 1, 1, uuid4(), bytes(NONCE_BYTES))
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, port), 60))
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=host))
            connection.sendall(b"".join(encode(hello)))
            return connection.recv(1) != b""
    except (ssl.SSLError, ConnectionError):
        return False


def test_nodes_talk_to_nobody_without_a_certificate_of_theirs(
    cluster: RealCluster, certificates: Path
) -> None:
    node = cluster["n1"]
    assert not answers(node, None)
    context = ssl.create_default_context(cafile=certificates / "ca.crt")
    assert not answers(node, context)
    # Another authority's.
    context.load_cert_chain(cluster.etcd.cert_file, cluster.etcd.key_file)
    assert not answers(node, context)
    context.load_cert_chain(certificates / "client.crt", certificates / "client.key")
    assert answers(node, context)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"etcd_user": "nobody"}, "refuses user 'nobody' with this password"),
        ({"etcd_tls_ca": None, "etcd_tls_cert": None, "etcd_tls_key": None}, "without TLS"),
    ],
)
def test_a_node_that_etcd_does_not_take_says_why(
    cluster: RealCluster, tmp_path: Path, change: dict[str, str | None], says: str
) -> None:
    node = cluster.add("stranger", tmp_path / "data")
    for name, value in change.items():
        if value is None:
            del node.settings[name]
        else:
            node.settings[name] = value
    with pytest.raises(RuntimeError, match=says):
        node.start()
    assert "Traceback" not in node.log_text()


def test_a_node_without_tls_between_nodes_is_refused_in_words(cluster: RealCluster, tmp_path: Path) -> None:
    node = cluster.add("plain", tmp_path / "data")
    for name in ("cluster_tls_ca", "cluster_tls_cert", "cluster_tls_key"):
        del node.settings[name]
    with pytest.raises(RuntimeError, match="does not use TLS between nodes"):
        node.start()
    assert "Traceback" not in node.log_text()


def sent(node: RealNode, topic: str) -> float:
    """The bytes of records of a topic that the node has given to consumers."""
    with urllib.request.urlopen(f"{node.http_url}/metrics", timeout=120) as response:
        metrics = parse_metrics(response.read().decode())
    return metrics["tidemill_topic_bytes_out_total"].value(topic=topic)


def test_a_consumer_reads_from_the_follower_in_its_rack(cluster: RealCluster, topic: str) -> None:
    cluster.create_topic(topic)
    values = [f"{number}".ljust(_VALUE_BYTES) for number in range(200)]
    cluster.produce(topic, *values)
    leader = cluster.leader(topic)
    closest, other = (node for node in (cluster[name] for name in _RACKS) if node is not leader)
    before = {node.name: sent(node, topic) for node in cluster if node.running}
    assert read(cluster, topic, 200, **{"client.rack": _RACKS[closest.name]}) == values
    gave = {node.name: sent(node, topic) - before[node.name] for node in (leader, closest, other)}
    assert gave[closest.name] >= 200 * _VALUE_BYTES
    assert gave[leader.name] == gave[other.name] == 0, "the leader has only said where to go"
