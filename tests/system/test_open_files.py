"""A node that has hardly any file descriptors left refuses what needs more, and nothing stops for good."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.batches import plain_batch
from support.hostile import create, create_table, group_coordinator
from support.processes import NodeProcess, wait_until
from support.raw import RawClient
from tidemill.errors import ErrorCode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of another process: prlimit")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data").start() as running:
        yield running


def open_files(node: NodeProcess) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


@contextmanager
def at_most(node: NodeProcess, count: int) -> Iterator[None]:
    """Let the node have so many files open, and as many as before afterwards."""
    soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (soft, hard))


def codes_of(client: RawClient, topic: str, partitions: range) -> set[ErrorCode]:
    entries = [{"index": index, "records": plain_batch("v")} for index in partitions]
    body = {"acks": -1, "timeout": 60_000, "topic_data": [{"name": topic, "partition_data": entries}]}
    answer = client.request("Produce", 9, body).responses[0].partition_responses
    return {ErrorCode(each.error_code) for each in answer}


def commit(client: RawClient, group_id: str) -> ErrorCode:
    partition = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    body = {"group_id": group_id, "generation_id_or_member_epoch": -1, "member_id": ""}
    topics = [{"name": "old", "partitions": [partition]}]
    answer = client.request("OffsetCommit", 7, body | {"topics": topics})
    return ErrorCode(answer.topics[0].partitions[0].error_code)


def is_refused_and_says_so(client: RawClient, node: NodeProcess) -> bool:
    codes = codes_of(client, "greedy", range(500))
    assert codes == {ErrorCode.none, ErrorCode.kafka_storage_error}, codes
    return any("files are open" in each for each in node.readiness()["problems"])


def test_a_client_that_wants_more_files_than_there_are_is_refused_and_others_go_on(node: NodeProcess) -> None:
    create(node.address, "old")
    create(node.address, "greedy", partitions=500)
    group_coordinator(node.address)
    with RawClient(node.address, 120) as client:
        client.request("ApiVersions", 2, {})
        assert codes_of(client, "old", range(1)) == {ErrorCode.none}
        with at_most(node, open_files(node) + 300):
            # A client that tries again: what a partition will open is estimated until it is counted.
            wait_until(lambda: is_refused_and_says_so(client, node), "the files are used up")
            assert codes_of(client, "old", range(1)) == {ErrorCode.none}
            assert {commit(client, f"g{number}") for number in range(20)} == {ErrorCode.none}
            client.request("DeleteTopics", 5, {"topic_names": ["greedy"], "timeout": 60_000})
            create(node.address, "new")
            # They are counted once a second.
            wait_until(lambda: codes_of(client, "new", range(1)) == {ErrorCode.none}, "there are descriptors")
        wait_until(lambda: not node.readiness()["problems"], "there are descriptors")


def test_a_table_with_more_buckets_than_there_are_files_does_not_take_them_all(node: NodeProcess) -> None:
    create(node.address, "old")
    table_id = create_table(node.address, "wide", buckets=200)
    with RawClient(node.address, 120) as client:
        client.request("ApiVersions", 2, {})
        with at_most(node, open_files(node) + 600):
            body = {"table_id": table_id, "min_offsets": [], "max_wait_ms": 60_000, "idle_ms": 1_000}
            answer = client.request("PinTable", 0, body)
            assert answer.error_code == ErrorCode.kafka_storage_error, answer
            assert codes_of(client, "old", range(1)) == {ErrorCode.kafka_storage_error}
            assert all("files are open" in each for each in node.readiness()["problems"])
        wait_until(lambda: codes_of(client, "old", range(1)) == {ErrorCode.none}, "there are descriptors")
        assert client.request("PinTable", 0, body).error_code == 0


def test_without_any_descriptor_a_write_is_refused_and_works_again_later(node: NodeProcess) -> None:
    create(node.address, "old")
    create(node.address, "new")
    with RawClient(node.address, 120) as client:
        client.request("ApiVersions", 2, {})
        assert codes_of(client, "old", range(1)) == {ErrorCode.none}
        with at_most(node, 3):
            assert codes_of(client, "new", range(1)) == {ErrorCode.kafka_storage_error}
            assert codes_of(client, "old", range(1)) == {ErrorCode.none}
        wait_until(lambda: codes_of(client, "new", range(1)) == {ErrorCode.none}, "there are descriptors")
    # They are counted once a second.
    wait_until(lambda: not node.readiness()["problems"], "the node takes note of them")
