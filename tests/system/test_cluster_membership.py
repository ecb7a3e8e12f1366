"""Nodes that a cluster refuses, one that has lost its directory, and one whose disk is full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd import NO_ETCD, has_etcd
from support.processes import wait_until
from support.real_cluster import RealCluster, RealNode

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

_DISK_BYTES = 64 * 1024 * 1024
_WAIT_SECONDS = 240


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A small file system of its own; None if none can be mounted here."""
    path = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, disk: Path | None) -> Iterator[RealCluster]:
    """Three nodes; the third one is on the small disk."""
    data_dirs = {} if disk is None else {"n3": disk / "n3"}
    with RealCluster(
        tmp_path_factory.mktemp("cluster"), data_dirs=data_dirs, replica_lag_ms=3_000
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def show_logs(cluster: RealCluster) -> Iterator[None]:
    yield
    print(cluster.logs())  # noqa: T201


def refusal(node: RealNode, *flags: str) -> str:
    """What a node says that does not start."""
    before = len(node.log_text())
    with pytest.raises(RuntimeError):
        node.start(*flags)
    return node.log_text()[before:]


def records_of(node: RealNode, topic: str, partition: int = 0) -> bytes:
    """The bytes of a replica's log."""
    return b"".join(path.read_bytes() for path in sorted(node.partition_dir(topic, partition).glob("*.log")))


def test_a_node_with_an_empty_directory_is_refused_until_it_is_said_to_be_replaced(
    cluster: RealCluster, topic: str
) -> None:
    cluster.create_topic(topic, partitions=3)
    for partition in range(3):
        cluster.produce(topic, *(f"{number}" for number in range(100)), partition=partition)
    node = cluster["n2"]
    node.stop()
    node.data_dir.rename(node.data_dir.with_name("lost"))
    said = refusal(node)
    assert "--replace-directory" in said
    assert "'n2'" in said
    assert "Traceback" not in said
    node.start("--replace-directory")
    cluster.wait_in_sync(topic, 3)
    for partition in range(3):
        leader = cluster.leader(topic, partition)
        assert records_of(node, topic, partition) == records_of(leader, topic, partition) != b""
    node.stop()
    node.start()  # from now on it is this node's directory
    cluster.wait_in_sync(topic, 3)


def test_a_copied_directory_is_refused(cluster: RealCluster, tmp_path: Path) -> None:
    node = cluster["n1"]
    node.stop()
    copy = tmp_path / "copy"
    shutil.copytree(node.data_dir, copy)
    node.start()
    said = refusal(cluster.add("n1", copy))
    assert "node 'n1' runs already" in said
    said = refusal(cluster.add("n4", copy))
    assert "is node 'n1''s" in said
    assert "another --data directory" in said
    assert "Traceback" not in said


def test_a_second_node_of_the_same_name_is_refused(cluster: RealCluster, tmp_path: Path) -> None:
    said = refusal(cluster.add("n1", tmp_path / "data"))
    assert "node 'n1' runs already" in said
    assert "two nodes need two names" in said
    said = refusal(cluster.add("n1", tmp_path / "data"), "--replace-directory")
    assert "node 'n1' runs already" in said, "also if it shall replace the other"
    assert "Traceback" not in said


def test_another_clusters_directory_is_refused(cluster: RealCluster, tmp_path: Path) -> None:
    stranger = cluster.add("stranger", tmp_path / "data", cluster_name="other")
    stranger.start()
    stranger.stop()
    said = refusal(cluster.add("stranger", tmp_path / "data"))
    assert "belongs to cluster" in said
    assert "another --data directory" in said
    assert "Traceback" not in said


def test_a_node_with_another_secret_is_refused(cluster: RealCluster, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not the others' secret")
    said = refusal(cluster.add("spy", tmp_path / "data", cluster_secret_file=secret))
    assert "secret" in said
    assert "Traceback" not in said


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (64 * 1024, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_follower_with_a_full_disk_leaves_the_in_sync_set_and_the_leader_goes_on(
    cluster: RealCluster, disk: Path | None, topic: str
) -> None:
    if disk is None:
        pytest.skip("no small file system can be mounted here")
    follower = cluster["n3"]
    cluster.create_topic(topic, partitions=3)
    led = [index for index, each in cluster.partitions(topic).items() if each.leader != follower.node_id]
    filler = fill(disk)
    try:
        for partition in led:
            cluster.produce(topic, *("x" * 10_000 for _ in range(20)), partition=partition)

        def are_without_it() -> bool:
            found = cluster.partitions(topic)
            return bool(found) and all(
                follower.node_id not in found[index].in_sync and len(found[index].in_sync) == 2
                for index in led
            )

        wait_until(are_without_it, "the full disk is in no in-sync set", _WAIT_SECONDS)
        assert any("disk full" in problem for problem in follower.readiness()["problems"])
        cluster.wait_for_leaders(topic, but=follower)  # it gives up what it leads, too
        for partition in range(3):
            cluster.produce(topic, "more", partition=partition)
    finally:
        filler.unlink()
    cluster.wait_in_sync(topic, 3)
