"""Three real nodes and a real etcd under load: what is killed, paused and stopped loses nothing.

``CLUSTER_EVENTS=100`` makes the campaign longer (``make test-long``): a kill is one event, and the start
after it another. ``CLUSTER_SEED`` sets the seed of its moments and of the nodes; it is printed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from support.etcd import NO_ETCD, has_etcd
from support.history import History, check
from support.processes import ClientFailed, ClientProcess, wait_until
from support.real_cluster import SESSION_TIMEOUT_MS, RealCluster, RealNode

CLIENT = "cluster of three nodes"
feature = pytest.mark.feature

_EVENTS = int(os.environ.get("CLUSTER_EVENTS") or 12)
_SECONDS_PER_EVENT = 30
_PARTITIONS = 3
#: Acknowledgements, and transactions, that each load gets in every state.
_ACKS = 5
_MAX_MESSAGE_BYTES = 20_000
_CONFIG = {"max.message.bytes": str(_MAX_MESSAGE_BYTES), "segment.bytes": "1048576"}
_DRAINS = ("drain", "python drain", "txn drain")
#: A hung node is resumed when another has been elected in its place, which is known after this.
_LONGER_THAN_A_SESSION_SECONDS = SESSION_TIMEOUT_MS / 1000 + 1

pytestmark = [pytest.mark.skipif(not has_etcd(), reason=NO_ETCD), pytest.mark.timeout(300)]

StartClient = Callable[..., ClientProcess]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with RealCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(autouse=True)
def show_logs(request: pytest.FixtureRequest, cluster: RealCluster) -> Iterator[None]:
    """The nodes' last words are part of what pytest shows of a test that fails."""
    yield
    print(cluster.logs())  # noqa: T201


class Loads:
    """The process of the plain loads, and that of the transactions, which is started again when it dies.

    librdkafka 2.16 ends its process by an assertion (``txn_req_cnt > 0``) when the coordinator moves at the
    wrong moment. What it had noted counts, and the next process has the same transactional id.
    """

    def __init__(
        self, plain: ClientProcess, start: Callable[[], ClientProcess], topic: str, path: Path
    ) -> None:
        self._plain = plain
        self._start = start
        self._topic = topic
        self._path = path
        self.histories: dict[str, Path] = {}
        self.committed = 0
        self._begin()

    def _begin(self) -> None:
        name = f"txn{len(self.histories)}"
        self.histories[name] = self._path / f"{name}.jsonl"
        self._transactions = self._start()
        self._transactions.call(
            "start_transactions",
            name=name,
            path=str(self.histories[name]),
            topic=self._topic,
            partitions=_PARTITIONS,
            transactional_id="txn",
        )

    def wait_for_acks(self) -> None:
        """Every load gets something done."""
        self._plain.call("wait_for_acks", more=_ACKS)
        while True:
            try:
                self._transactions.call("wait_for_acks", more=_ACKS)
            except ClientFailed as error:
                if "txn_req_cnt" not in str(error):
                    raise
                self._begin()
            else:
                self.committed += _ACKS
                return

    def stop(self) -> dict[str, Any]:
        """End them all; what became of each of the plain ones, and of the last of the transactions."""
        outcome: dict[str, Any] = self._plain.call("stop_load", deadline_seconds=180)
        try:
            (outcome["txn"],) = self._transactions.call("stop_load", deadline_seconds=180).values()
        except ClientFailed as error:
            if "txn_req_cnt" not in str(error):
                raise
            outcome["txn"] = {"failure": None}
        return outcome


class Campaign:
    """Events of all kinds, each undone before the next."""

    def __init__(self, cluster: RealCluster, topics: tuple[str, ...], rng: random.Random) -> None:
        self._cluster = cluster
        self._topics = topics
        self._rng = rng
        self.events = 0

    def run(self, events: int, load: Loads) -> None:
        """Each kind once, with each node killed once; then at random. Every state gets something done."""
        kinds = [*(self.kill for _ in self._cluster), self.pause, self.lose_etcd, self.stop]
        nodes = list(self._cluster)
        while self.events < events:
            for kind in kinds:
                nodes = nodes or list(self._cluster)
                node = nodes.pop(self._rng.randrange(len(nodes)))
                print(f"{time.strftime('%X')} event {self.events}: {kind.__name__} {node.name}")  # noqa: T201
                kind(node, load)
                for topic in self._topics:
                    self._cluster.wait_in_sync(topic, 3)
                load.wait_for_acks()
                if self.events >= events:
                    return
            kinds = self._rng.choices(
                [self.kill, self.lose_machine, self.pause, self.lose_etcd, self.stop], k=6
            )

    def kill(self, node: RealNode, load: Loads) -> None:
        """Kill -9 at some moment of the load."""
        self._some_time()
        node.kill()
        self._goes_on_without(node, load)
        node.start()

    def lose_machine(self, node: RealNode, load: Loads) -> None:
        """As if the power was cut: the session ends by itself."""
        self._some_time()
        node.lose_machine()
        self._goes_on_without(node, load)
        node.start()

    def stop(self, node: RealNode, load: Loads) -> None:
        self._some_time()
        node.stop()
        self._goes_on_without(node, load)
        node.start()

    def pause(self, node: RealNode, load: Loads) -> None:
        """The process hangs for longer than its session, and then takes itself for alive."""
        self._some_time()
        node.pause()
        time.sleep(_LONGER_THAN_A_SESSION_SECONDS)
        self._goes_on_without(node, load)
        node.resume()

    def lose_etcd(self, node: RealNode, load: Loads) -> None:
        """Without etcd the leaders go on, and sessions that ended meanwhile begin anew."""
        self._some_time()
        self._cluster.etcd.kill()
        load.wait_for_acks()
        time.sleep(self._rng.uniform(0, 2 * SESSION_TIMEOUT_MS / 1000))
        self._cluster.etcd.restart()
        self.events += 2

    def _some_time(self) -> None:
        time.sleep(self._rng.uniform(0.1, 1.0))

    def _goes_on_without(self, node: RealNode, load: Loads) -> None:
        for topic in self._topics:
            self._cluster.wait_for_leaders(topic, but=node)
        load.wait_for_acks()
        self.events += 2


def start_load(load: ClientProcess, topic: str, histories: dict[str, Path]) -> None:
    target: dict[str, Any] = {"topic": topic, "partitions": _PARTITIONS}
    load.call(
        "start_load",
        name="confluent",
        path=str(histories["confluent"]),
        too_large_bytes=_MAX_MESSAGE_BYTES,
        **target,
    )
    load.call("start_kafka_python_load", name="python", path=str(histories["python"]), **target)


@feature(
    "cluster: fail-over of leaders under load", "produce: idempotent", "consume: from the earliest record"
)
@pytest.mark.timeout(300 + _SECONDS_PER_EVENT * _EVENTS)
def test_kills_pauses_and_an_etcd_that_dies_lose_repeat_and_invent_nothing(
    cluster: RealCluster, tmp_path: Path, start_client: StartClient, topic: str
) -> None:
    seed = int(os.environ.get("CLUSTER_SEED") or random.randrange(2**32))
    print(f"CLUSTER_SEED={seed}")  # noqa: T201
    cluster.create_topic(topic, partitions=_PARTITIONS, config=_CONFIG)
    transactions = f"{topic}-transactions"
    cluster.create_topic(transactions, partitions=_PARTITIONS)
    names = ("confluent", "python", "steady", "committed", *_DRAINS)
    histories = {name: tmp_path / f"{name}.jsonl" for name in names}
    load, watch = (start_client("kafka_python_load", cluster) for _ in range(2))
    start_load(load, topic, histories)
    start_reader(watch, "steady", histories, topic)
    start_reader(watch, "committed", histories, transactions, isolated=True)
    loads = Loads(load, lambda: start_client("load", cluster), transactions, tmp_path)
    loads.wait_for_acks()  # the coordinator's topic is there now
    campaign = Campaign(cluster, (topic, transactions, "__transaction_state"), random.Random(seed))
    campaign.run(_EVENTS, loads)
    outcome = loads.stop()
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
    assert campaign.events >= _EVENTS


def start_reader(
    client: ClientProcess, name: str, histories: dict[str, Path], topic: str, *, isolated: bool = False
) -> None:
    client.call(
        "start_reader",
        name=name,
        path=str(histories[name]),
        topic=topic,
        partitions=_PARTITIONS,
        isolated=isolated,
    )


def drain(
    client: ClientProcess, histories: dict[str, Path], topic: str, transactions: str
) -> tuple[list[str], list[int]]:
    """Read everything to its end with both clients; the errors on the way, and the ends of ``topic``."""
    ends: list[int] = client.call("end_offsets", topic=topic, partitions=_PARTITIONS)
    start_reader(client, "drain", histories, topic)
    errors: list[str] = client.call("stop_reader", name="drain", ends=ends)
    errors += client.call("stop_reader", name="steady", ends=ends)
    path = str(histories["python drain"])
    client.call("read_to_ends", name="python drain", topic=topic, path=path, ends=ends)
    transaction_ends = client.call("end_offsets", topic=transactions, partitions=_PARTITIONS)
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


@feature("cluster: rolling restart under load")
def test_no_error_of_a_rolling_restart_reaches_a_client_that_retries(
    cluster: RealCluster, tmp_path: Path, start_client: StartClient, topic: str
) -> None:
    cluster.create_topic(topic, partitions=_PARTITIONS, config=_CONFIG)
    histories = {name: tmp_path / f"{name}.jsonl" for name in ("confluent", "python", "steady")}
    target: dict[str, Any] = {"topic": topic, "partitions": _PARTITIONS}
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
    outcome = load.call("stop_load", deadline_seconds=180)
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

        wait_until(has_read, f"{count} values are read", 90)

    def commit(self) -> None:
        def is_committed() -> bool:
            try:
                self._consumer.commit(asynchronous=False)
            except KafkaException as error:
                return bool(error.args[0].name() == "_NO_OFFSET")
            return True

        wait_until(is_committed, "the offsets are committed", 90)

    def close(self) -> None:
        self._consumer.close()


def coordinator(cluster: RealCluster, group: str) -> RealNode:
    def found() -> RealNode | None:
        admin = AdminClient(cluster.config)
        try:
            node_id = admin.describe_consumer_groups([group])[group].result(30).coordinator.id
        except KafkaException:
            return None
        return next((node for node in cluster if node.running and node.node_id == node_id), None)

    node: RealNode = wait_until(found, f"the coordinator of {group} is known", 60)
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


@feature("cluster: metadata refresh")
def test_a_client_that_knows_one_node_finds_the_others(cluster: RealCluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=_PARTITIONS)
    one = cluster["n1"]
    for partition in range(_PARTITIONS):
        cluster.produce(topic, f"{partition}", partition=partition)
    config = cluster.config | {"bootstrap.servers": one.server}
    metadata = AdminClient(config).list_topics(topic, timeout=30)
    assert {f"{each.host}:{each.port}" for each in metadata.brokers.values()} == {
        node.server for node in cluster
    }
    assert {each.leader for each in metadata.topics[topic].partitions.values()} == set(metadata.brokers)
    consumer = Consumer(config | {"group.id": "g", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(_PARTITIONS)])
    found: list[str] = []
    while len(found) < _PARTITIONS:
        found += [each.value().decode() for each in consumer.consume(1, timeout=30) if each.error() is None]
    consumer.close()
    assert sorted(found) == ["0", "1", "2"]


@feature("cluster: what the client does with one node, on three")
@pytest.mark.parametrize("client", ["java", "confluent", "kafka_python", "aiokafka"])
@pytest.mark.parametrize(
    "scenario",
    ["idempotent_producer_writes_everything_once_and_in_order", "offsets_are_committed_and_fetched"],
)
def test_every_client_works_with_three_nodes(
    cluster: RealCluster, start_client: StartClient, topic: str, client: str, scenario: str
) -> None:
    start_client(client, cluster).call(scenario, topic=topic)
