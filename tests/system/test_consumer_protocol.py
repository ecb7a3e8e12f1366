"""The new consumer protocol (KIP-848) with real consumers in processes of their own.

Here confluent-kafka (librdkafka) speaks it; aiokafka, kafka-python and Java's consumer take part as members
of the classic protocol in groups that change over. What is done is in
``clients/confluent_consumer_client.py``.
Java's consumer speaks both: see ``test_java_clients.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.group_stories import end_sessions_soon, killed_member_is_replaced, share_and_take_over
from support.processes import ClientProcess, NodeProcess, wait_until

CLIENT_SCRIPT = "confluent_consumer"

#: Members speak often, so that tests are quick: that is the server's to say.
SETTINGS = {
    "group_consumer_heartbeat_interval_ms": 100,
    "group_min_session_timeout_ms": 500,
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """The node that the tests of this module share."""
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SETTINGS) as running:
        yield running


@pytest.fixture
def third_client(client_processes: Callable[[int], ClientProcess]) -> ClientProcess:
    return client_processes(2)


def texts(start: int, end: int) -> list[str]:
    return [f"v{number}" for number in range(start, end)]


def read_by(*members: tuple[ClientProcess, str]) -> list[str]:
    return [value for process, name in members for value in process.call("member_wait", name=name)["values"]]


def all_read(wanted: list[str], *members: tuple[ClientProcess, str]) -> list[str]:
    """Wait until the members have read all of it; what they have read, sorted."""
    wait_until(lambda: set(read_by(*members)) >= set(wanted), f"{len(wanted)} values are read")
    return sorted(read_by(*members))


def test_members_share_partitions_and_take_over(
    client: ClientProcess, other_client: ClientProcess, topic: str
) -> None:
    share_and_take_over(client, other_client, topic)


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_three_members_come_and_go(
    client: ClientProcess, other_client: ClientProcess, third_client: ClientProcess, topic: str, assignor: str
) -> None:
    client.call("create_topic", topic=topic, partitions=6)
    processes = (client, other_client, third_client)
    for process in processes:
        process.call("member_join", name=topic, group=topic, topic=topic, group_remote_assignor=assignor)
    shares = [process.call("member_wait", name=topic, partitions=2)["assigned"] for process in processes]
    assert sorted(index for share in shares for index in share) == [0, 1, 2, 3, 4, 5]
    described = client.call("describe_group", group=topic)
    assert (described["state"], described["type"], described["assignor"]) == ("STABLE", "CONSUMER", assignor)
    assert sorted(described["members"].values()) == sorted(shares)
    client.call("produce_to_partitions", topic=topic, texts=texts(0, 60), partitions=6)
    assert all_read(texts(0, 60), *((process, topic) for process in processes)) == sorted(texts(0, 60))
    assert other_client.call("member_leave", name=topic) == []
    for process in (client, third_client):
        process.call("member_wait", name=topic, partitions=3)
    assert third_client.call("member_leave", name=topic) == []
    client.call("member_wait", name=topic, partitions=6)
    client.call("member_leave", name=topic)
    assert client.call("describe_group", group=topic)["state"] == "EMPTY"


def test_a_killed_member_is_replaced(
    node: NodeProcess, client: ClientProcess, other_client: ClientProcess, topic: str
) -> None:
    end_sessions_soon(node, topic, "consumer")
    killed_member_is_replaced(client, other_client, topic)


def test_a_static_member_returns_without_a_rebalance(
    client: ClientProcess, other_client: ClientProcess, third_client: ClientProcess, topic: str
) -> None:
    client.call("create_topic", topic=topic, partitions=2)
    client.call("member_join", name=topic, group=topic, topic=topic, group_instance_id="first")
    client.call("member_wait", name=topic, partitions=2)
    other_client.call("member_join", name=topic, group=topic, topic=topic, group_instance_id="second")
    before = client.call("member_wait", name=topic, partitions=1)
    mine = other_client.call("member_wait", name=topic, partitions=1)["assigned"]
    other_client.call("member_leave", name=topic)
    assert client.call("describe_group", group=topic)["instances"] == ["first", "second"], "it may come back"
    third_client.call("member_join", name=topic, group=topic, topic=topic, group_instance_id="second")
    assert third_client.call("member_wait", name=topic, partitions=1)["assigned"] == mine
    assert client.call("member_wait", name=topic)["rebalances"] == before["rebalances"]
    third_client.call("member_leave", name=topic)
    client.call("member_leave", name=topic)


def test_a_pattern_takes_in_topics_that_come_later(client: ClientProcess, topic: str) -> None:
    client.call("create_topic", topic=f"{topic}-a", partitions=2)
    client.call("member_join", name=topic, group=topic, topic=f"^{topic}-.*")
    client.call("member_wait", name=topic, partitions=2)
    client.call("create_topic", topic=f"other-{topic}-b", partitions=1)
    client.call("create_topic", topic=f"{topic}-b", partitions=4)
    client.call("produce_to_partitions", topic=f"{topic}-b", texts=texts(0, 8), partitions=4)
    client.call("produce_to_partitions", topic=f"other-{topic}-b", texts=["no"], partitions=1)
    assert all_read(texts(0, 8), (client, topic)) == sorted(texts(0, 8))
    client.call("member_leave", name=topic)


def test_reading_goes_on_where_it_was_committed(
    client: ClientProcess, other_client: ClientProcess, topic: str
) -> None:
    client.call("create_topic", topic=topic, partitions=3)
    client.call("produce_to_partitions", topic=topic, texts=texts(0, 30), partitions=3)
    client.call("member_join", name=topic, group=topic, topic=topic)
    client.call("member_wait", name=topic, values=30)
    assert client.call("member_leave", name=topic) == []
    assert client.call("committed_offsets", group=topic) == 30
    client.call("produce_to_partitions", topic=topic, texts=texts(30, 60), partitions=3)
    other_client.call("member_join", name=topic, group=topic, topic=topic)
    assert other_client.call("member_wait", name=topic, values=30)["values"] == sorted(texts(30, 60))
    other_client.call("member_leave", name=topic)


def test_members_go_on_after_the_node_was_killed(
    node: NodeProcess, client: ClientProcess, other_client: ClientProcess, topic: str
) -> None:
    client.call("create_topic", topic=topic, partitions=4)
    for process in (client, other_client):
        process.call("member_join", name=topic, group=topic, topic=topic)
    shares = [
        process.call("member_wait", name=topic, partitions=2)["assigned"]
        for process in (client, other_client)
    ]
    client.call("produce_to_partitions", topic=topic, texts=texts(0, 40), partitions=4)
    all_read(texts(0, 40), (client, topic), (other_client, topic))
    before = client.call("describe_group", group=topic)["members"]
    rebalances = client.call("member_wait", name=topic)["rebalances"]
    for round_number in range(1, 4):
        node.kill()
        node.start()
        end = 40 * (round_number + 1)
        client.call("produce_to_partitions", topic=topic, texts=texts(end - 40, end), partitions=4)
        read = all_read(texts(0, end), (client, topic), (other_client, topic))
        assert read == sorted(texts(0, end)), "nothing twice: nobody had to give anything up"
    assert client.call("describe_group", group=topic)["members"] == before
    assert client.call("member_wait", name=topic)["rebalances"] == rebalances
    assert client.call("member_wait", name=topic)["assigned"] == shares[0]
    assert client.call("member_leave", name=topic) == []
    # Its epoch moves on while it takes over; a commit that crosses that with the old one is refused.
    other_client.call("member_wait", name=topic, partitions=4)
    assert other_client.call("member_leave", name=topic) == []


def test_the_command_line_shows_members_of_both_protocols(
    node: NodeProcess, start_client: Callable[..., ClientProcess], client: ClientProcess, topic: str
) -> None:
    classic = start_client("confluent", node)
    client.call("create_topic", topic=topic, partitions=2)
    client.call("member_join", name=topic, group=topic, topic=topic, group_instance_id="mine")
    client.call("member_wait", name=topic, partitions=2)
    classic.call("member_join", name=topic, group=topic, topic=topic)
    shares = [each.call("member_wait", name=topic, partitions=1)["assigned"] for each in (client, classic)]

    def describe(output: str) -> str:
        command = [sys.executable, "-m", "tidemill.cli", "group", "describe", topic]
        options = ["--format", output, "--server", node.bootstrap_servers]
        return subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout

    described = json.loads(describe("json"))
    assert (described["kind"], described["protocol"]) == ("consumer", "uniform")
    shown = {
        member["kind"]: [place["partition"] for place in member["partitions"]]
        for member in described["members"]
    }
    assert shown == {"consumer": shares[0], "classic": shares[1]}
    table = describe("table")
    assert "mine" in table
    assert "classic" in table
    classic.call("member_leave", name=topic)
    client.call("member_leave", name=topic)
    classic.close()


@pytest.mark.parametrize(
    ("old", "config"),
    [
        ("confluent", {}),
        ("confluent", {"partition_assignment_strategy": "cooperative-sticky"}),
        ("kafka_python", {}),
        ("aiokafka", {}),
        pytest.param("java", {}),
    ],
    ids=["confluent-eager", "confluent-cooperative", "kafka-python", "aiokafka", "java"],
)
def test_a_group_changes_over_and_back_member_by_member(
    node: NodeProcess,
    start_client: Callable[..., ClientProcess],
    client: ClientProcess,
    topic: str,
    old: str,
    config: dict[str, Any],
) -> None:
    classic = start_client(old, node)
    join: dict[str, Any] = {"group": topic, "topic": topic}
    client.call("create_topic", topic=topic, partitions=4)

    def produce(start: int) -> list[str]:
        client.call("produce_to_partitions", topic=topic, texts=texts(start, start + 40), partitions=4)
        return texts(start, start + 40)

    def kind() -> str:
        kinds: dict[str, str] = client.call("group_kinds")
        return kinds[topic]

    # Two members of the classic protocol.
    for name in ("one", "two"):
        classic.call("member_join", name=name, **join, **config)
    for name in ("one", "two"):
        classic.call("member_wait", name=name, partitions=2)
    first = produce(0)
    all_read(first, (classic, "one"), (classic, "two"))
    assert kind() == "CLASSIC"

    # One goes, one of the new protocol comes: both kinds share the topic.
    classic.call("member_leave", name="two")
    client.call("member_join", name="new", **join)
    client.call("member_wait", name="new", partitions=2)
    classic.call("member_wait", name="one", partitions=2)
    assert kind() == "CONSUMER"
    second = produce(40)
    all_read(second, (classic, "one"), (client, "new"))

    # The last of the old ones goes.
    classic.call("member_leave", name="one")
    client.call("member_wait", name="new", partitions=4)
    third = produce(80)
    all_read(third, (client, "new"))
    taken = client.call("member_wait", name="new")["values"]
    assert not set(taken) & set(first), "what the old members committed is not read again"

    # And back: an old one comes, the new one goes.
    classic.call("member_join", name="three", **join, **config)
    classic.call("member_wait", name="three", partitions=2)
    assert client.call("member_leave", name="new") == []
    classic.call("member_wait", name="three", partitions=4)
    assert kind() == "CLASSIC"
    fourth = produce(120)
    all_read(fourth, (classic, "three"))
    again = classic.call("member_wait", name="three")["values"]
    assert not set(again) & set(first + second + third), "nor what the new one committed"
    classic.call("member_leave", name="three")
    classic.close()
