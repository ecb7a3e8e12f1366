"""``tidemill cluster`` against three real nodes and a real etcd: what an operator sees and does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support.etcd import NO_ETCD, has_etcd
from support.processes import process_environment, wait_until
from support.prometheus_text import parse_metrics
from support.real_cluster import RealCluster
from tidemill.server.cluster.metrics import CLUSTER_METRICS

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with RealCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def tidemill(
    cluster: RealCluster, *arguments: str, send: str = "", exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command against whichever node answers."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", *arguments, "--server", cluster.bootstrap_servers],
        input=send,
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment(),
    )
    assert done.returncode == exit_code, (done.stdout, done.stderr)
    return done


def run(*arguments: str, exit_code: int = 0) -> str:
    """Run a command on this machine's files; gives all that it says."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment(),
    )
    assert done.returncode == exit_code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def as_json(cluster: RealCluster, *arguments: str, exit_code: int = 0) -> Any:
    return json.loads(tidemill(cluster, *arguments, "--format", "json", exit_code=exit_code).stdout)


def health(cluster: RealCluster) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", "cluster", "status", "--server", cluster.bootstrap_servers],
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment(),
    )
    word = done.stdout.split()[0]
    assert done.returncode == ["GREEN", "YELLOW", "RED"].index(word)
    return done.stdout


def doctor(cluster: RealCluster) -> list[dict[str, Any]]:
    node = cluster["n1"]
    options = ("--data", str(node.data_dir), "--http", node.http_url.removeprefix("http://"))
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", "doctor", "--format", "json", *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment() | {"TIDEMILL_CLUSTER": cluster.etcd.url, "TIDEMILL_SERVER": node.server},
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def partition(cluster: RealCluster, topic: str, index: int = 0) -> dict[str, Any]:
    found: list[dict[str, Any]] = as_json(cluster, "cluster", "partitions", topic)
    return found[index]


def test_nodes_partitions_and_the_controller_are_shown(cluster: RealCluster) -> None:
    cluster.create_topic("shown", partitions=3)
    nodes = as_json(cluster, "cluster", "nodes")
    assert {each["name"] for each in nodes} == {"n1", "n2", "n3"}
    assert {each["state"] for each in nodes} == {"live"}
    (controller,) = (each["node"] for each in nodes if each["controller"])
    assert as_json(cluster, "cluster", "controller")["controller"] == controller
    partitions = as_json(cluster, "cluster", "partitions", "shown")
    assert [sorted(each["in_sync"]) for each in partitions] == [[1, 2, 3]] * 3
    tidemill(cluster, "topic", "produce", "shown", send="one\ntwo\n")
    described = as_json(cluster, "topic", "describe", "shown")["partitions"]
    assert all(len(each["lag"]) == 2 for each in described), "two followers each"
    assert "LAG" in tidemill(cluster, "topic", "describe", "shown").stdout


def test_doctor_looks_at_the_directory_of_the_node_that_is_named(cluster: RealCluster) -> None:
    for node in cluster:
        environment = process_environment() | {"TIDEMILL_SERVER": node.server, "TIDEMILL_HTTP": ""}
        command = [sys.executable, "-m", "tidemill", "doctor", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        told = {each["check"]: each["detail"] for each in json.loads(done.stdout)}
        assert str(node.data_dir) in told["data directory"]


def test_every_metric_of_a_cluster_is_exposed(cluster: RealCluster) -> None:
    for node in cluster:
        with urllib.request.urlopen(f"{node.http_url}/metrics", timeout=120) as response:
            exposed = parse_metrics(response.read().decode())
        assert {each.name for each in CLUSTER_METRICS} <= exposed.keys()
        assert exposed["tidemill_cluster_live_nodes"].value() == 3


def test_a_node_that_is_down_is_a_reason_and_goes_away_when_it_is_back(cluster: RealCluster) -> None:
    cluster.create_topic("watched")
    wait_until(lambda: health(cluster).startswith("GREEN"), "all is well")
    cluster["n2"].kill()
    told = wait_until(lambda: (text := health(cluster)).startswith("YELLOW") and text, "it is seen")
    assert "(n2) is down" in told
    assert len(partition(cluster, "watched")["in_sync"]) == 2
    seen = doctor(cluster)
    assert ("etcd", "ok") in {(each["check"], each["verdict"]) for each in seen}
    warned = [each["detail"] for each in seen if each["check"] == "cluster" and each["verdict"] == "warn"]
    assert any("(n2) is down" in detail for detail in warned)
    assert any("not in sync" in detail for detail in warned)
    cluster["n2"].start()
    wait_until(lambda: cluster["n2"].readiness()["ready"], "it has caught up")
    assert len(partition(cluster, "watched")["in_sync"]) == 3
    wait_until(lambda: health(cluster).startswith("GREEN"), "all is well again")


def test_leaderships_are_drained_and_come_back_by_an_election(cluster: RealCluster) -> None:
    cluster.create_topic("drained", partitions=2)
    leader = partition(cluster, "drained")["leader"]
    tidemill(cluster, "cluster", "drain", str(leader), "--timeout", "60")
    assert all(each["leader"] != leader for each in as_json(cluster, "cluster", "partitions", "drained"))
    # It holds its replicas still, as the last one of each: others are preferred.
    assert partition(cluster, "drained")["replicas"][-1] == leader
    order = [leader, *(node for node in (1, 2, 3) if node != leader)]
    target = ",".join(map(str, order))
    tidemill(cluster, "cluster", "reassign", "drained", "0", "--to", target, "--wait")
    tidemill(cluster, "cluster", "elect", "drained", "0")
    cluster.wait_for_leaders("drained")
    assert partition(cluster, "drained")["leader"] == leader


def test_a_replica_moves_to_another_node_with_its_records(cluster: RealCluster) -> None:
    cluster.create_topic("moved", replication_factor=1)
    tidemill(cluster, "topic", "produce", "moved", send="a\nb\nc\n")
    home = partition(cluster, "moved")["leader"]
    drained = tidemill(cluster, "cluster", "drain", str(home), exit_code=1)
    assert "it has one replica; move it with --replicas" in drained.stdout
    target = home % 3 + 1
    tidemill(cluster, "cluster", "reassign", "moved", "0", "--to", str(target), "--wait")
    assert partition(cluster, "moved")["replicas"] == [target]
    assert tidemill(cluster, "topic", "consume", "moved", "--exit").stdout == "a\nb\nc\n"
    assert as_json(cluster, "cluster", "reassign") == []
    refused = tidemill(cluster, "cluster", "reassign", "moved", "0", "--to", "99", exit_code=3)
    assert "99" in refused.stderr


def test_a_move_begins_with_a_throttle_that_every_node_has_until_it_is_removed(cluster: RealCluster) -> None:
    cluster.create_topic("throttled", replication_factor=1)
    target = partition(cluster, "throttled")["leader"] % 3 + 1
    tidemill(
        cluster, "cluster", "reassign", "throttled", "0", "--to", str(target), "--throttle", "5MiB", "--wait"
    )
    limit = 5 * 1024 * 1024
    every = [{"node": node, "send": limit, "fetch": limit} for node in (1, 2, 3)]
    wait_until(lambda: as_json(cluster, "cluster", "throttle") == every, "every node has it")
    assert "each node sends at most 5.0 MiB/s" in tidemill(cluster, "cluster", "reassign").stdout
    assert "throttle of moves" in health(cluster)
    tidemill(cluster, "cluster", "throttle", "--off")
    none = [{"node": node, "send": None, "fetch": None} for node in (1, 2, 3)]
    wait_until(lambda: as_json(cluster, "cluster", "throttle") == none, "no node has it")


def tags(cluster: RealCluster) -> dict[str, list[str]]:
    return {str(each["node"]): each["tags"] for each in as_json(cluster, "cluster", "nodes")}


def test_replicas_that_have_nowhere_to_go_are_listed(cluster: RealCluster) -> None:
    cluster.create_topic("everywhere")
    done = as_json(cluster, "cluster", "drain", "1", "--replicas", exit_code=1)
    assert "no other live node" in {each["topic"]: each["reason"] for each in done["stuck"]}["everywhere"]
    assert tags(cluster)["1"] == ["PERMANENT_OFFLINE"]
    assert "is drained: it gets no new replicas" in health(cluster)
    undone = tidemill(cluster, "cluster", "drain", "1", "--undo").stdout
    assert "node 1 gets new replicas again" in undone
    wait_until(lambda: not tags(cluster)["1"], "the tag is gone")
    cluster.create_topic("everywhere-again")


def test_a_node_is_removed_once_it_is_down_and_holds_nothing(cluster: RealCluster) -> None:
    fourth = cluster.add("n4").start()
    cluster.wait_for_nodes(4)
    number = str(fourth.node_id)
    cluster.create_topic("leaving", replication_factor=1)
    tidemill(cluster, "cluster", "reassign", "leaving", "0", "--to", number, "--wait")
    runs = tidemill(cluster, "cluster", "remove", number, exit_code=1)
    assert "stop it before it is removed" in runs.stderr
    tidemill(cluster, "cluster", "drain", "n4", "--replicas", "--timeout", "60")
    assert tags(cluster)[number] == ["PERMANENT_OFFLINE"]
    cluster.create_topic("later", partitions=8, replication_factor=1)
    placed = as_json(cluster, "cluster", "partitions", "later")
    assert {holder for each in placed for holder in each["replicas"]} == {1, 2, 3}, "it gets no new replicas"
    fourth.stop()
    tidemill(cluster, "cluster", "remove", number)
    assert number not in {str(each["node"]) for each in as_json(cluster, "cluster", "nodes")}
    assert "there is no node" in tidemill(cluster, "cluster", "remove", number, exit_code=3).stderr


def test_a_replica_whose_loss_is_accepted_is_copied_anew_and_the_last_one_waits_for_an_operator(
    cluster: RealCluster,
) -> None:
    cluster.create_topic("copied")
    cluster.create_topic("single", partitions=3, replication_factor=1)
    node = cluster["n2"]
    placed = as_json(cluster, "cluster", "partitions", "single")
    (alone,) = (each["partition"] for each in placed if each["replicas"] == [node.node_id])
    assert cluster.produce("copied", "a", "b") == [0, 1]
    cluster.produce("single", "gone", partition=alone)
    node.stop()
    shutil.rmtree(node.partition_dir("copied"))
    shutil.rmtree(node.partition_dir("single", alone))
    command = ("log", "repair", "copied:0", f"single:{alone}", "--data", str(node.data_dir))
    refused = run(*command, "--execute", exit_code=1)
    assert "--accept-loss" in refused
    done = run(*command, "--accept-loss", "--execute")
    assert "leaves the in-sync set, and is copied anew from its leader" in done.replace("\n", " ")
    node.start()
    cluster.wait_in_sync("copied", 3)
    assert tidemill(cluster, "topic", "consume", "copied", "--exit").stdout == "a\nb\n"
    files = [each.partition_dir("copied").glob("*.log") for each in (node, cluster["n1"])]
    copied, kept = (b"".join(path.read_bytes() for path in sorted(each)) for each in files)
    assert copied == kept != b""
    assert partition(cluster, "single", alone)["leader"] == -1, "nobody else has its records"
    assert "RED" in health(cluster)
    tidemill(cluster, "cluster", "elect", "--unclean", "single", str(alone), "--yes")
    cluster.wait_for_leaders("single")
    assert cluster.produce("single", "new", partition=alone)[0] >= 1, "no offset is given twice"


def test_an_unclean_election_shows_the_ends_and_wants_a_confirmation(cluster: RealCluster) -> None:
    cluster.create_topic("lost", replication_factor=2, config={"min.insync.replicas": "1"})
    first, second = (
        next(node for node in cluster if node.node_id == holder)
        for holder in partition(cluster, "lost")["replicas"]
    )
    tidemill(cluster, "topic", "produce", "lost", send="on both\n")
    refused = tidemill(cluster, "cluster", "elect", "--unclean", "lost", "0", "--yes", exit_code=1)
    assert "is led by node" in refused.stderr
    second.kill()
    wait_until(lambda: len(partition(cluster, "lost")["in_sync"]) == 1, "the follower has left")
    tidemill(cluster, "topic", "produce", "lost", send="on one\n")
    first.kill()
    second.start()
    wait_until(lambda: partition(cluster, "lost")["leader"] == -1, "nobody can lead")
    assert "RED" in health(cluster)
    usage = tidemill(cluster, "cluster", "elect", "--unclean", "lost", exit_code=2)
    assert "names one partition" in usage.stderr
    unsaid = tidemill(cluster, "cluster", "elect", "--unclean", "lost", "0", exit_code=2)
    assert "confirm with --yes" in unsaid.stderr
    shown = tidemill(cluster, "cluster", "elect", "--unclean", "lost", "0", "--yes").stdout
    assert f"node {second.node_id} leads lost-0" in shown
    cluster.wait_for_leaders("lost")
    assert tidemill(cluster, "topic", "consume", "lost", "--exit").stdout == "on both\n"
    first.start()
    cluster.wait_in_sync("lost", 2)
