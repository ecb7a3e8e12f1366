"""Three real nodes and a real etcd under load: what is killed, paused, stopped and cut off loses nothing.

``CLUSTER_EVENTS=100`` makes the campaign longer (``make test-long``): a kill and the start after it are one
event, and so are a cut of links and its healing. ``CLUSTER_SEED`` sets the seed of its moments and of the
nodes; it is printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from support.campaign import PARTITIONS, Campaign, Loads
from support.etcd import NO_ETCD, has_etcd
from support.history import History, check
from support.linearizing import TooManyOrders
from support.processes import ClientProcess, wait_until
from support.raw import RawClient
from support.real_cluster import ETCD, SHORT_SESSION_TIMEOUT_MS, RealCluster, RealNode
from support.real_tables import TableLoad
from support.real_topics import TopicLoad
from support.seeds import choose_seed
from support.topic_history import TopicHistory
from system.clients.exchange import EXCHANGE_SECONDS, PAUSE_SECONDS

CLIENT = "cluster of three nodes"
feature = pytest.mark.feature

_EVENTS = int(os.environ.get("CLUSTER_EVENTS") or 10)
_SECONDS_PER_EVENT = 120
#: A follower that does not reach its leader leaves the in-sync set after this: sooner than a user's.
_REPLICA_LAG_MS = 4_000
_ACKS = 5
_MAX_MESSAGE_BYTES = 20_000
_CONFIG = {"max.message.bytes": str(_MAX_MESSAGE_BYTES), "segment.bytes": "1048576"}
_DRAINS = ("drain", "python drain", "txn drain")

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

StartClient = Callable[..., ClientProcess]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with RealCluster(
        directory,
        has_links=True,
        replica_lag_ms=_REPLICA_LAG_MS,
        session_timeout_ms=SHORT_SESSION_TIMEOUT_MS,
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def show_logs(request: pytest.FixtureRequest, cluster: RealCluster) -> Iterator[None]:
    """The nodes' last words are shown of a test that fails; the next one finds all nodes well."""
    yield
    print(cluster.logs())  # noqa: T201
    cluster.mend()


def start_load(load: ClientProcess, topic: str, histories: dict[str, Path]) -> None:
    target: dict[str, Any] = {"topic": topic, "partitions": PARTITIONS}
    load.call(
        "start_load",
        name="confluent",
        path=str(histories["confluent"]),
        too_large_bytes=_MAX_MESSAGE_BYTES,
        **target,
    )
    load.call("start_kafka_python_load", name="python", path=str(histories["python"]), **target)


@feature(
    "cluster: kills, pauses, cut links, death of etcd",
    "produce: idempotent",
    "consume: from the earliest record",
)
@pytest.mark.timeout(600 + _SECONDS_PER_EVENT * _EVENTS)
def test_kills_pauses_cut_links_and_an_etcd_that_dies_lose_repeat_and_invent_nothing(
    cluster: RealCluster, tmp_path: Path, start_client: StartClient, topic: str
) -> None:
    seed = choose_seed("CLUSTER_SEED")
    cluster.create_topic(topic, partitions=PARTITIONS, config=_CONFIG)
    transactions = f"{topic}-transactions"
    cluster.create_topic(transactions, partitions=PARTITIONS)
    names = ("confluent", "python", "steady", "committed", *_DRAINS)
    histories = {name: tmp_path / f"{name}.jsonl" for name in names}
    load, watch = (start_client("kafka_python_load", cluster) for _ in range(2))
    start_load(load, topic, histories)
    start_reader(watch, "steady", histories, topic)
    start_reader(watch, "committed", histories, transactions, isolated=True)
    with TableLoad(cluster.bootstrap_servers) as table, TopicLoad(cluster, random.Random(seed)) as by_name:
        loads = Loads(load, lambda: start_client("load", cluster), transactions, tmp_path, table)
        loads.wait_for_acks()  # the coordinator's topic is there now
        topics = (topic, transactions, "__transaction_state", table.topic)
        campaign = Campaign(cluster, topics, random.Random(seed))
        campaign.run(_EVENTS, loads)
        outcome = loads.stop()
        table.check()
        by_name.wait_for_acks(_ACKS)
        by_name.check()
    errors, ends = drain(watch, histories, topic, transactions)

    plain = joined(histories, "confluent", "python", "steady", "drain", "python drain")
    assert check(plain, "drain", "python drain") == []
    assert in_order(plain, "drain") == []
    history = joined(histories | loads.histories, *loads.histories, "committed", "txn drain")
    assert check(history, "txn drain") == []
    assert errors == []
    assert outcome["confluent"]["unknown"] == outcome["python"]["unknown"] == []
    assert sum(ends) == outcome["confluent"]["acked"] + outcome["python"]["acked"]
    assert outcome["txn"]["failure"] is None
    assert loads.committed > _EVENTS
    assert campaign.events == _EVENTS
    assert by_name.history.acknowledged > _EVENTS
    assert is_a_loss_noticed(by_name.history), "nothing that is lost would be noticed"


def is_a_loss_noticed(history: TopicHistory) -> bool:
    """Whether the check would have noticed the loss of some acknowledged creation, and of some deletion."""
    return all(
        any(is_unexplained(broken) for broken in history.with_one_lost(kind)) for kind in ("create", "delete")
    )


def is_unexplained(history: TopicHistory) -> bool:
    try:
        return bool(history.problems())
    except TooManyOrders:
        return False  # Another one is looked at.


def start_reader(
    client: ClientProcess, name: str, histories: dict[str, Path], topic: str, *, isolated: bool = False
) -> None:
    client.call(
        "start_reader",
        name=name,
        path=str(histories[name]),
        topic=topic,
        partitions=PARTITIONS,
        isolated=isolated,
    )


def drain(
    client: ClientProcess, histories: dict[str, Path], topic: str, transactions: str
) -> tuple[list[str], list[int]]:
    """Read everything to its end with both clients; the errors on the way, and the ends of ``topic``."""
    ends: list[int] = client.call("end_offsets", topic=topic, partitions=PARTITIONS)
    start_reader(client, "drain", histories, topic)
    errors: list[str] = client.call("stop_reader", name="drain", ends=ends)
    errors += client.call("stop_reader", name="steady", ends=ends)
    path = str(histories["python drain"])
    client.call("read_to_ends", name="python drain", topic=topic, path=path, ends=ends)
    transaction_ends = client.call("end_offsets", topic=transactions, partitions=PARTITIONS)
    start_reader(client, "txn drain", histories, transactions, isolated=True)
    for name in ("txn drain", "committed"):
        errors += client.call("stop_reader", name=name, ends=transaction_ends)
    return errors, ends


def joined(histories: dict[str, Path], *names: str) -> History:
    history = History()
    for name in names:
        history.load(histories[name])
    return history


def in_order(history: History, reader: str) -> list[str]:
    """The values that stand behind a later one of the same producer; it numbers them."""
    last: dict[tuple[str, str], int] = {}
    wrong = []
    for event in history.of("read"):
        producer, _, number = event.value.rpartition("-")
        if event.reader == reader:
            if int(number) < last.get((event.partition, producer), -1):
                wrong.append(f"{event.value} at {event.partition}@{event.offset}")
            last[event.partition, producer] = int(number)
    return wrong


def _takes_no_connections(node: RealNode) -> bool:
    return any("takes no connections of clients" in each for each in node.readiness()["problems"])


@feature("cluster: kills, pauses, cut links, death of etcd")
def test_a_transactional_producer_leaves_a_node_that_reaches_nobody(cluster: RealCluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=PARTITIONS)
    cluster.wait_for_leaders(topic)
    node = cluster["n1"]
    # It is connected to this node only: librdkafka connects to others when it is told to use them.
    producer = Producer({"bootstrap.servers": node.server, "transactional.id": topic})
    producer.init_transactions(60)
    others = [ETCD, *(each.name for each in cluster if each is not node)]
    cluster.links.cut(*((node.name, each) for each in others), *((each, node.name) for each in others))
    node.is_cut_off = True
    try:
        cluster.wait_for_leaders(topic, but=node)
        # Each within the transaction's timeout of a minute; after that it would be aborted.
        for _ in range(3):
            producer.begin_transaction()
            for partition in range(PARTITIONS):
                producer.produce(topic, b"x", partition=partition)
            producer.commit_transaction(120)
        wait_until(lambda: _takes_no_connections(node), "the node takes no connections")
        with pytest.raises(ConnectionError), RawClient(node.address) as client:
            client.request("ApiVersions", 2, {})
    finally:
        cluster.links.heal()
        node.is_cut_off = False
        producer.close()
    wait_until(lambda: not _takes_no_connections(node), "the node takes connections again")
    cluster.wait_in_sync(topic, 3)


@feature("cluster: rolling restart under load")
def test_no_error_of_a_rolling_restart_reaches_a_client_that_retries(
    cluster: RealCluster, tmp_path: Path, start_client: StartClient, topic: str
) -> None:
    cluster.create_topic(topic, partitions=PARTITIONS, config=_CONFIG)
    histories = {name: tmp_path / f"{name}.jsonl" for name in ("confluent", "python", "steady")}
    target: dict[str, Any] = {"topic": topic, "partitions": PARTITIONS}
    load, watch = (start_client("kafka_python_load", cluster) for _ in range(2))
    start_load(load, topic, histories)
    watch.call("start_reader", name="steady", path=str(histories["steady"]), **target)
    for node in cluster:
        load.call("wait_for_acks", more=_ACKS)
        node.stop()
        load.call("wait_for_acks", more=_ACKS)
        node.start()
        cluster.wait_in_sync(topic, 3)
    load.call("wait_for_acks", more=_ACKS)
    outcome = load.call("stop_load", deadline_seconds=400)
    errors = watch.call("stop_reader", name="steady", ends=watch.call("end_offsets", **target))
    assert check(joined(histories, *histories), "steady") == []
    assert errors == []
    assert outcome["confluent"]["unknown"] == outcome["python"]["unknown"] == []


class Member:
    """A member of a group that commits what it has read, and goes on over outages."""

    def __init__(self, cluster: RealCluster, group: str, topic: str) -> None:
        self._consumer = Consumer(
            cluster.config
            | {
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 45_000,
            }
        )
        self._consumer.subscribe([topic])
        self.values: list[str] = []

    def read(self, count: int) -> None:
        """Read until there are that many values in all."""

        def has_read() -> bool:
            for message in self._consumer.consume(100, timeout=0.2):
                if message.error() is None:
                    self.values.append(message.value().decode())
            return len(self.values) >= count

        wait_until(has_read, f"{count} values are read")

    def commit(self) -> None:
        def is_committed() -> bool:
            try:
                self._consumer.commit(asynchronous=False)
            except KafkaException as error:
                return bool(error.args[0].name() == "_NO_OFFSET")
            return True

        wait_until(is_committed, "the offsets are committed")

    def close(self) -> None:
        self._consumer.close()


def coordinator(cluster: RealCluster, group: str) -> RealNode:
    def found() -> RealNode | None:
        admin = AdminClient(cluster.config)
        try:
            node_id = admin.describe_consumer_groups([group])[group].result(120).coordinator.id
        except KafkaException:
            return None
        return next((node for node in cluster if node.running and node.node_id == node_id), None)

    node: RealNode = wait_until(found, f"the coordinator of {group} is known")
    return node


@feature("cluster: fail-over of a group's coordinator", "groups: commit and fetch offsets")
def test_a_group_goes_on_over_the_death_of_its_coordinator(cluster: RealCluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=1)
    member = Member(cluster, "survivors", topic)
    cluster.produce(topic, "1", "2", "3")
    member.read(3)
    member.commit()
    cluster.wait_in_sync("__consumer_offsets", 3)
    dead = coordinator(cluster, "survivors")
    dead.kill()
    cluster.produce(topic, "4", "5")
    member.read(5)
    member.commit()
    member.close()
    assert member.values == ["1", "2", "3", "4", "5"]
    dead.start()
    cluster.wait_in_sync(topic, 3)
    cluster.wait_in_sync("__consumer_offsets", 3)
    # By another coordinator, or the same one in another life.
    coordinator(cluster, "survivors").stop()
    later = Member(cluster, "survivors", topic)
    cluster.produce(topic, "6")
    later.read(1)
    assert later.values == ["6"], "what was committed counts"
    later.close()
    for node in cluster:
        if not node.running:
            node.start()
    cluster.wait_in_sync(topic, 3)


class Kcat:
    """kcat's exchange: each has processes of its own, one that writes and one that reads."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._topic = ""
        self._values: list[str] = []

    def call(self, name: str, **arguments: Any) -> None:
        calls: dict[str, Callable[..., None]] = {"start_exchange": self._start, "exchange": self._exchange}
        calls[name](**arguments)

    def _start(self, topic: str, partitions: int) -> None:
        self._topic, self._values = topic, []

    def _exchange(self, count: int) -> None:
        command = ["kcat", "-b", self._servers, "-t", self._topic]
        idempotent = ["-X", "enable.idempotence=true", "-X", "linger.ms=0", "-X", "socket.timeout.ms=6000"]
        with subprocess.Popen(
            [*command, "-P", *idempotent], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdin is not None
            assert writer.stderr is not None
            for _ in range(count):
                self._values.append(f"{len(self._values)}")
                writer.stdin.write(self._values[-1] + "\n")
                writer.stdin.flush()
                time.sleep(PAUSE_SECONDS)
            writer.stdin.close()
            assert writer.wait(EXCHANGE_SECONDS) == 0, writer.stderr.read()
        reader = [*command, "-C", "-e", "-q", "-o", "beginning", "-X", "enable.partition.eof=true"]
        read = subprocess.run(reader, capture_output=True, text=True, timeout=EXCHANGE_SECONDS)
        assert sorted(read.stdout.split()) == sorted(self._values), read.stderr


class Exchanges:
    """All clients that are here, each with a topic of its own; they write and read side by side."""

    def __init__(self, cluster: RealCluster, start_client: StartClient) -> None:
        self._cluster = cluster
        self._pool = ThreadPoolExecutor()
        # Each knows one node when it starts.
        one = SimpleNamespace(bootstrap_servers=cluster["n1"].server)
        self.clients: dict[str, Any] = {
            name: start_client(name, one) for name in ("confluent", "kafka_python", "aiokafka")
        }
        if shutil.which("kcat"):
            self.clients["kcat"] = Kcat(one.bootstrap_servers)
        with contextlib.suppress(pytest.skip.Exception):  # where Java is missing
            self.clients["java"] = start_client("java", one)

    def start(self, topic: str, replication_factor: int) -> list[str]:
        """Let all of them begin with new topics, which are named."""
        topics = [f"{topic}-{name}" for name in self.clients]
        for each in topics:
            self._cluster.create_topic(
                each, partitions=PARTITIONS, replication_factor=replication_factor, config=_CONFIG
            )
        for each, client in zip(topics, self.clients.values(), strict=True):
            client.call("start_exchange", topic=each, partitions=PARTITIONS)
        return topics

    @contextlib.contextmanager
    def running(self, count: int) -> Iterator[None]:
        """Write and read while the body runs."""
        calls = {
            name: self._pool.submit(client.call, "exchange", count=count)
            for name, client in self.clients.items()
        }
        try:
            yield
        finally:
            failures = {name: call.exception() for name, call in calls.items()}
        assert not any(failures.values()), failures


@pytest.fixture(scope="module")
def exchanges(cluster: RealCluster, start_shared_client: StartClient) -> Exchanges:
    return Exchanges(cluster, start_shared_client)


@feature("cluster: metadata refresh", every_client=True)
def test_every_client_that_knows_one_node_finds_the_others(
    cluster: RealCluster, exchanges: Exchanges, topic: str
) -> None:
    for each in exchanges.start(topic, 3):
        leaders = {state.leader for state in cluster.partitions(each).values()}
        assert leaders == {node.node_id for node in cluster}, "every node leads a partition"
    with exchanges.running(30):
        pass


@feature("cluster: fail-over of leaders", every_client=True)
def test_every_client_goes_on_over_a_fail_over(
    cluster: RealCluster, exchanges: Exchanges, topic: str
) -> None:
    topics = exchanges.start(topic, 3)
    with exchanges.running(30):
        pass
    dead = cluster["n2"]
    with exchanges.running(150):
        time.sleep(0.3)  # in the middle of it
        dead.kill()
        for each in topics:
            cluster.wait_for_leaders(each, but=dead)
    dead.start()
    for each in topics:
        cluster.wait_in_sync(each, 3)


@feature("cluster: reassignment under load", every_client=True)
def test_every_client_goes_on_while_its_partitions_move_to_other_nodes(
    cluster: RealCluster, exchanges: Exchanges, topic: str
) -> None:
    topics = exchanges.start(topic, 2)
    with exchanges.running(30):
        pass
    nodes = {node.node_id for node in cluster}
    with exchanges.running(150):
        for each in topics:
            before = cluster.partitions(each)
            # The leader goes, and the node that had no replica leads.
            targets = {
                index: [*(nodes - set(state.in_sync)), *(set(state.in_sync) - {state.leader})]
                for index, state in before.items()
            }
            cluster.reassign(each, targets)
            cluster.elect_preferred(each)
            after = cluster.partitions(each)
            assert {index: state.leader for index, state in after.items()} == {
                index: target[0] for index, target in targets.items()
            }
    with exchanges.running(30):
        pass


@feature("cluster: fail-over of a group's coordinator", "groups: commit and fetch offsets")
def test_every_client_commits_offsets_in_a_cluster(exchanges: Exchanges, topic: str) -> None:
    for name, client in exchanges.clients.items():
        if name != "kcat":
            client.call("offsets_are_committed_and_fetched", topic=f"{topic}-{name}")
