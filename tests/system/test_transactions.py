"""Transactions of real clients, each in a process of its own.

What a step does is in ``clients/*_txn_client.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import ClientProcess, NodeProcess, wait_until

CLIENTS = (
    "confluent",
    "kafka_python",
    "aiokafka",
    # The first test that needs Java's clients may have to download them.
    pytest.param("java"),
)
NOTHING_COMMITTED = -1001

Step = Callable[..., Any]
feature = pytest.mark.feature


@pytest.fixture(scope="module", params=CLIENTS)
def client_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def step(node: NodeProcess, start_shared_client: Any, client_name: str) -> Step:
    """``step("commit", name="p")`` runs one step in the client's process."""
    client: ClientProcess = start_shared_client(f"{client_name}_txn", node)
    return client.call


@pytest.fixture
def both(step: Step, topic: str) -> Callable[[], tuple[list[str], list[str]]]:
    """What readers of committed and of uncommitted data see."""

    def look() -> tuple[list[str], list[str]]:
        return (
            step("read", topic=topic, level="read_committed"),
            step("read", topic=topic, level="read_uncommitted"),
        )

    return look


def begin(step: Step, name: str, topic: str, *texts: str, **start: Any) -> None:
    """A producer with a transaction in which these texts are written and acknowledged."""
    assert step("start", name=name, **start) == "ok"
    go_on(step, name, topic, *texts)


def go_on(step: Step, name: str, topic: str, *texts: str) -> None:
    assert step("begin", name=name) == "ok"
    assert step("send", name=name, topic=topic, texts=texts) == "ok"


@feature("transactions: commit and abort", "transactions: read_committed")
def test_committed_is_seen_aborted_is_not_and_open_not_yet(step: Step, topic: str, both: Any) -> None:
    step("create", topic=topic, partitions=1)
    begin(step, topic, topic, "a", "b", transactional_id=topic)
    assert both() == ([], ["a", "b"])
    assert step("commit", name=topic) == "ok"
    assert both() == (["a", "b"], ["a", "b"])
    go_on(step, topic, topic, "c")
    step("write_plain", topic=topic, texts=["behind"])
    assert both() == (["a", "b"], ["a", "b", "c", "behind"])
    assert step("abort", name=topic) == "ok"
    assert both() == (["a", "b", "behind"], ["a", "b", "c", "behind"])
    go_on(step, topic, topic, "d")
    assert step("commit", name=topic) == "ok"
    assert both()[0] == ["a", "b", "behind", "d"]


@feature("transactions: several partitions")
def test_a_transaction_is_whole_over_partitions(step: Step, topic: str) -> None:
    step("create", topic=topic, partitions=3)
    assert step("start", name=topic, transactional_id=topic) == "ok"
    for end, text in (("commit", "kept"), ("abort", "dropped"), ("commit", "kept too")):
        assert step("begin", name=topic) == "ok"
        for partition in range(3):
            assert step("send", name=topic, topic=topic, texts=[text], partition=partition) == "ok"
        assert step(end, name=topic) == "ok"
    for partition in range(3):
        read = step("read", topic=topic, level="read_committed", partition=partition)
        assert read == ["kept", "kept too"]


@feature("transactions: fencing")
def test_a_second_producer_fences_the_first(step: Step, topic: str, both: Any) -> None:
    step("create", topic=topic, partitions=1)
    begin(step, "first", topic, "of the first", transactional_id=topic)
    begin(step, "second", topic, "of the second", transactional_id=topic)
    assert step("commit", name="first") != "ok"
    assert step("commit", name="second") == "ok"
    assert both()[0] == ["of the second"]


@feature("transactions: fencing")
def test_a_fenced_producer_that_writes_on_is_told_for_good(
    node: NodeProcess, start_client: Any, topic: str
) -> None:
    """librdkafka takes what Produce answers for fatal: the application closes the producer."""
    step = start_client("confluent_txn", node).call
    step("create", topic=topic, partitions=1)
    begin(step, "first", topic, "of the first", transactional_id=topic)
    assert step("start", name="second", transactional_id=topic) == "ok"
    assert step("fatal_error_of_sending", name="first", topic=topic, text="too late") == "_FENCED"


@feature("transactions: timeout")
def test_a_transaction_that_takes_too_long_is_aborted(step: Step, topic: str, both: Any) -> None:
    step("create", topic=topic, partitions=1)
    begin(step, topic, topic, "too late", transactional_id=topic, timeout_ms=4_000)
    step("write_plain", topic=topic, texts=["behind"])
    wait_until(lambda: both()[0] == ["behind"], "the transaction is aborted")
    assert step("commit", name=topic) != "ok"
    assert both()[0] == ["behind"]
    begin(step, "another", topic, "in time", transactional_id=topic)
    assert step("commit", name="another") == "ok"
    assert both()[0] == ["behind", "in time"]


@feature("transactions: offsets")
def test_offsets_count_if_the_transaction_does(step: Step, topic: str) -> None:
    step("create", topic=topic, partitions=1)
    begin(step, topic, topic, "x", transactional_id=topic)
    assert step("send_offsets", name=topic, group=topic, topic=topic, offset=5) == "ok"
    assert step("abort", name=topic) == "ok"
    assert step("committed", group=topic, topic=topic) == NOTHING_COMMITTED
    go_on(step, topic, topic, "y")
    assert step("send_offsets", name=topic, group=topic, topic=topic, offset=7) == "ok"
    assert step("commit", name=topic) == "ok"
    assert step("committed", group=topic, topic=topic) == 7


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data") as running:
        yield running


@feature("transactions: restart of the node")
def test_kills_in_the_middle_of_transactions_tear_none(
    own_node: NodeProcess, start_client: Any, client_name: str
) -> None:
    step = start_client(f"{client_name}_txn", own_node).call
    step("create", topic="out", partitions=2)
    step("start", name="p0", transactional_id="copier")
    must, may = [], []
    name = "p0"
    for number in range(5):
        dies = number % 3 if number < 4 else -1  # the last one is left alone
        outcomes = [step("begin", name=name)]
        for partition in range(2):
            outcomes.append(step("send", name=name, topic="out", texts=[f"n{number}"], partition=partition))
            if dies == partition:
                own_node.kill()
                own_node.start()
        if dies == 2:
            own_node.kill()
            own_node.start()
        outcomes.append(step("commit", name=name))
        if outcomes[-1] == "ok":
            must.append(f"n{number}")
        else:
            # Nobody knows what became of it: a new producer goes on.
            may.append(f"n{number}")
            name = f"p{number + 1}"
            assert step("start", name=name, transactional_id="copier") == "ok", outcomes
    seen = [step("read", topic="out", level="read_committed", partition=index) for index in range(2)]
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == len(seen[0])
    assert set(must) <= set(seen[0]) <= {*must, *may}
    assert must, "no transaction got through"


class TestCommands:
    """``tidemill txn`` on what confluent-kafka has begun."""

    @pytest.fixture
    def step(self, node: NodeProcess, start_client: Any) -> Step:
        call: Step = start_client("confluent_txn", node).call
        return call

    def test_a_transaction_is_listed_described_and_aborted(
        self, step: Step, node: NodeProcess, topic: str
    ) -> None:
        step("create", topic=topic, partitions=2)
        begin(step, topic, topic, "x", transactional_id=topic)
        listed = txn(node, "list", "--state", "Ongoing", "--pattern", topic)
        assert [(each["transactional_id"], each["state"]) for each in listed] == [(topic, "Ongoing")]
        found = txn(node, "describe", topic)
        assert found["partitions"] == [{"topic": topic, "partition": 0}]
        assert txn(node, "abort", topic)["aborted"]["producer_id"] == found["producer_id"]
        assert step("commit", name=topic) != "ok"
        assert step("read", topic=topic, level="read_committed") == []
        assert "nothing to abort" in txn(node, "abort", topic, exit_code=1)
        assert "no transactional id" in txn(node, "describe", "never-used", exit_code=3)
        assert "there is no transaction state" in txn(node, "list", "--state", "Lost", exit_code=1)

    def test_what_hangs_in_a_partition_is_aborted_there(
        self, step: Step, node: NodeProcess, topic: str
    ) -> None:
        step("create", topic=topic, partitions=1)
        begin(step, topic, topic, "x", transactional_id=topic)
        step("write_plain", topic=topic, texts=["behind"])
        (hanging,) = (
            each for each in txn(node, "describe", "--topic", topic) if each["start_offset"] is not None
        )
        assert hanging["start_offset"] == 0
        where = ("--partition", f"{topic}:0", "--start-offset")
        assert "no transaction is open" in txn(node, "abort", *where, "5", exit_code=1)
        txn(node, "abort", *where, "0")
        assert step("read", topic=topic, level="read_committed") == ["behind"]

    def test_a_command_that_makes_no_sense_says_what_to_name(self, node: NodeProcess) -> None:
        assert "name either" in txn(node, "describe", exit_code=2)
        assert "name either" in txn(node, "abort", "x", "--start-offset", "1", exit_code=2)


def txn(node: NodeProcess, *arguments: str, exit_code: int = 0) -> Any:
    """Run ``tidemill txn``; gives its JSON, or its words if it must fail."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tidemill.cli",
            "txn",
            *arguments,
            "--server",
            node.bootstrap_servers,
            "--format",
            "json",
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == exit_code, (done.stdout, done.stderr)
    return done.stderr if exit_code else json.loads(done.stdout)
