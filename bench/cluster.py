"""A cluster of three nodes on this machine, against one node alone, a copied file and a quiet cluster."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

import tidemill
from bench.cluster_nodes import ClusterNode, ClusterNodes, has_etcd, until
from bench.context import Bench
from bench.peers import touch_memory
from bench.processes import cpu_seconds, memory_mb, run_json
from bench.raw import RawClient, batch_of
from bench.report import Aim, Section
from bench.spread import Spread, number, percentile
from tidemill.client.sync_table import Table

__all__ = ("cluster",)

_RECORD_BYTES = 1_000
_PARTITIONS_PER_TOPIC = 100
_FAIL_OVER_AIM_SECONDS = 2.0
_CATCH_UP_AIM = 0.5
#: What serving one follower may cost, by what taking the records costs: decision 22.
_FOLLOWER_SHARE_AIM = 0.5
_IDLE_SECONDS = 3.0
_NOTE = (
    "Three nodes and an etcd, all on this machine: they share its cores and its disk, so the throughput "
    "of three is a lower bound. Records of 1 KB to one partition with acks=all; the leader and both "
    "followers have each on disk before it is acknowledged. Beside it one node without a cluster, in "
    "turns. Catching up: a follower that was away gets its records from the leader; beside it a copy of "
    "the same files with fsync. Fail-over: the leader is killed with kill -9; a client that does "
    "nothing but ask for the leader and write, and confluent-kafka, which looks for a new leader once a "
    "second. A look-up: with the Python client. A change of the controller: the controller's node is "
    "killed with kill -9; until every partition has a leader again, as another node's Metadata says; "
    "beside it the same with few partitions. Then what nodes with so many partitions use when nobody "
    "asks them anything."
)


def cluster(bench: Bench) -> Section:
    """All measurements on one cluster, one after the other."""
    section = Section("Cluster of three nodes", ("what", "cluster", "compared with", "", "ratio"), note=_NOTE)
    if not has_etcd():
        section.note += " There was no etcd program here: nothing was measured."
        return section
    with ClusterNodes(bench.work / "cluster") as nodes:
        _throughput(bench, section, nodes)
        _latency(bench, section, nodes)
        _rolling_restart(bench, section, nodes)
        _fail_over(bench, section, nodes)
        _catch_up(bench, section, nodes)
        _controller_changes(bench, section, nodes)
    return section


def _throughput(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    """MB/s, and what leader, follower and the node alone need of the CPU."""
    options: dict[str, Any] = {"prefix": "produce", "partitions": 1, "record_bytes": _RECORD_BYTES}
    options |= {"acks": "all", "seconds": bench.plan.cluster_produce_seconds}
    speeds: dict[str, list[float]] = {"three": [], "one": []}
    cpu: dict[str, list[float]] = {"leader": [], "follower": [], "one": []}
    nodes.create_topic("produce-0")
    leader = nodes.leader("produce-0")
    followers = [node for node in nodes.nodes if node is not leader]
    with bench.node() as alone:
        client = RawClient.of(alone)
        client.create_topic("produce-0", 1)
        client.close()
        for turn in range(bench.plan.rounds):
            bench.progress(f"cluster: produce, {turn + 1} of {bench.plan.rounds}")
            touch_memory(bench.work, len(nodes.nodes) * bench.plan.touched_bytes)
            before = [cpu_seconds(node.pid) for node in (leader, *followers)]
            result = run_json(bench.work, "bench.load", "produce", servers=nodes.servers, **options)
            used = [cpu_seconds(node.pid) for node in (leader, *followers)]
            spent = [(now - then) / result["bytes"] * 1e9 for now, then in zip(used, before, strict=True)]
            speeds["three"].append(result["bytes"] / 1e6 / result["seconds"])
            cpu["leader"].append(spent[0])
            cpu["follower"].append(sum(spent[1:]) / len(followers))
            touch_memory(bench.work, len(nodes.nodes) * bench.plan.touched_bytes)
            began = cpu_seconds(alone.pid)
            result = run_json(bench.work, "bench.load", "produce", servers=alone.bootstrap_servers, **options)
            speeds["one"].append(result["bytes"] / 1e6 / result["seconds"])
            cpu["one"].append((cpu_seconds(alone.pid) - began) / result["bytes"] * 1e9)
    _compare(section, "produce, acks=all: MB/s", speeds["three"], "one node", speeds["one"])
    _compare(section, "leader: CPU s/GB", cpu["leader"], "one node", cpu["one"])
    serving = [(led - alone) / len(followers) for led, alone in zip(cpu["leader"], cpu["one"], strict=True)]
    share = _compare(section, "leader: CPU s/GB for each follower", serving, "one node", cpu["one"])
    _compare(section, "follower: CPU s/GB", cpu["follower"], "one node", cpu["one"])
    what = "CPU of a leader per GB, for each follower: ratio to what one node needs"
    _aim(section, what, f"≤ {_FOLLOWER_SHARE_AIM}", share.median, share.median <= _FOLLOWER_SHARE_AIM)


def _compare(section: Section, what: str, ours: list[float], other: str, theirs: list[float]) -> Spread:
    ratio = Spread(ours).over(Spread(theirs))
    section.add(what, Spread(ours), other, Spread(theirs), ratio)
    return ratio


def _aim(section: Section, what: str, wanted: str, measured: float, met: bool) -> None:
    section.aims.append(Aim(what, wanted, f"{measured:.2f}", met))


def _latency_of(bench: Bench, servers: str, seconds: float) -> list[float]:
    options: dict[str, Any] = {"topic": "latency", "record_bytes": _RECORD_BYTES, "acks": "all"}
    options |= {"rate": bench.plan.cluster_rate, "seconds": seconds}
    found: list[float] = run_json(bench.work, "bench.load", "latency", servers=servers, **options)[
        "milliseconds"
    ]
    return found


def _latency(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    nodes.create_topic("latency")
    three, one = [], []
    with bench.node() as alone:
        client = RawClient.of(alone)
        client.create_topic("latency", 1)
        client.close()
        for turn in range(bench.plan.latency_rounds):
            bench.progress(f"cluster: latency, {turn + 1} of {bench.plan.latency_rounds}")
            three.append(_latency_of(bench, nodes.servers, bench.plan.latency_seconds))
            one.append(_latency_of(bench, alone.bootstrap_servers, bench.plan.latency_seconds))
    for percent in (50, 99):
        ours = [percentile(times, percent) for times in three]
        theirs = [percentile(times, percent) for times in one]
        _compare(
            section, f"latency, p{percent} ms, {bench.plan.cluster_rate} records/s", ours, "one node", theirs
        )


def _rolling_restart(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    """The latency while each node is stopped and started; the client ends with an error if it sees one."""
    bench.progress("cluster: rolling restart")
    found: list[list[float]] = []
    quiet = _latency_of(bench, nodes.servers, bench.plan.latency_seconds)
    client = threading.Thread(
        target=lambda: found.append(_latency_of(bench, nodes.servers, bench.plan.restart_seconds))
    )
    client.start()
    for node in nodes.nodes:
        node.stop()
        node.start()
        nodes.wait_in_sync("latency")
    client.join()
    if not found:
        raise SystemExit("an error of the rolling restart reached the client")
    for percent in (50, 99):
        ours, theirs = percentile(found[0], percent), percentile(quiet, percent)
        _compare(section, f"rolling restart, p{percent} ms", [ours], "without", [theirs])
    section.add("rolling restart, longest ms", number(max(found[0])), "without", number(max(quiet)),
                number(max(found[0]) / max(quiet)))  # fmt: skip


def _fail_over(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    """From kill -9 of the leader to the first record that is acknowledged, and to the first row, after it."""
    nodes.create_topic("fail-over")
    raw, confluent = [], []
    for turn in range(bench.plan.rounds):
        bench.progress(f"cluster: fail-over, {turn + 1} of {bench.plan.rounds}")
        raw.append(_fail_over_seconds(nodes, "fail-over", _first_acknowledged))
        confluent.append(_fail_over_seconds(nodes, "fail-over", _ConfluentWriter(nodes)))
    measured = Spread(raw)
    wanted = number(_FAIL_OVER_AIM_SECONDS)
    section.add("kill -9 to the first acknowledged record: s", measured, "aim", wanted,
                number(measured.median / _FAIL_OVER_AIM_SECONDS))  # fmt: skip
    _compare(section, "the same with confluent-kafka: s", confluent, "a client that asks at once", raw)
    looked_up = _look_up_seconds(bench, nodes)
    section.add("kill -9 to the first look-up: s", Spread(looked_up), "aim", wanted,
                number(Spread(looked_up).median / _FAIL_OVER_AIM_SECONDS))  # fmt: skip
    _aim(section, "fail-over on the death of a process: seconds", f"< {_FAIL_OVER_AIM_SECONDS:g}",
         measured.median, measured.median < _FAIL_OVER_AIM_SECONDS)  # fmt: skip


def _fail_over_seconds(nodes: ClusterNodes, topic: str, work: Callable[[ClusterNodes, str], None]) -> float:
    """Seconds from kill -9 of the leader until ``work`` is done; the node is in sync again afterwards."""
    leader = nodes.leader(topic)
    started = time.perf_counter()
    leader.kill()
    work(nodes, topic)
    seconds = time.perf_counter() - started
    leader.start()
    nodes.wait_in_sync(topic)
    return seconds


def _first_acknowledged(nodes: ClusterNodes, topic: str) -> None:
    """Ask for the leader and write to it, again and again, until a record is acknowledged."""
    batch, asked = batch_of(_RECORD_BYTES, 1), next(nodes.live())

    def is_written() -> bool:
        (found,) = asked.metadata(topic).topics
        leader = next((each for each in nodes.live() if each.node_id == found.partitions[0].leader_id), None)
        if leader is None:
            return False
        client = leader.client()
        try:
            client.produce(topic, range(1), batch)
        except SystemExit:
            return False  # It does not know yet that it leads.
        finally:
            client.close()
        return True

    until(is_written, "a record is acknowledged")


class _ConfluentWriter:
    """A producer of confluent-kafka that looks for a new leader as often as it can be told to."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": nodes.servers,
                "acks": "all",
                "linger.ms": 0,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 20,
                "topic.metadata.refresh.fast.interval.ms": 20,
                "log_level": 0,
            }
        )
        self._producer.produce("fail-over", b"before", partition=0)
        self._producer.flush()

    def __call__(self, nodes: ClusterNodes, topic: str) -> None:
        self._producer.produce(topic, b"after", partition=0)
        self._producer.flush()


def _look_up_seconds(bench: Bench, nodes: ClusterNodes) -> list[float]:
    """Seconds from kill -9 of a bucket's leader to a row that the next leader gives, round by round."""
    seconds = []
    with tidemill.connect(nodes.servers) as client:
        client.create_database("bench", if_not_exists=True)
        table = client.create_table("bench.rows", "id bigint not null, n bigint", primary_key="id", buckets=1)
        topic = table.definition.partitions[0].topic
        for turn in range(bench.plan.rounds):
            bench.progress(f"cluster: look-ups over a fail-over, {turn + 1} of {bench.plan.rounds}")
            table.upsert([{"id": 1, "n": turn}])
            assert table.lookup(1) == {"id": 1, "n": turn}
            nodes.wait_in_sync(topic)
            seconds.append(_fail_over_seconds(nodes, topic, lambda _, __: _check_row(table, turn)))  # noqa: B023
    return seconds


def _check_row(table: Table, turn: int) -> None:
    found = table.lookup(1)
    if found != {"id": 1, "n": turn}:
        raise SystemExit(
            f"a look-up after a fail-over found {found}, and not what was written in round {turn}"
        )


def _catch_up(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    """How fast a follower gets what it has missed, from its first byte to its last."""
    topic, batch = "catch-up", batch_of(_RECORD_BYTES, 900)
    nodes.create_topic(topic)
    leader = nodes.leader(topic)
    follower = next(node for node in nodes.nodes if node is not leader)
    speeds, copies = [], []
    for turn in range(bench.plan.rounds):
        bench.progress(f"cluster: catching up, {turn + 1} of {bench.plan.rounds}")
        follower.stop()
        had = follower.log_bytes(topic)
        client = nodes.leader(topic).client()
        for _ in range(bench.plan.catch_up_bytes // len(batch)):
            client.produce(topic, range(1), batch)
        client.close()
        whole = nodes.leader(topic).log_bytes(topic)
        follower.launch()
        seconds = _growth_seconds(follower, topic, had, whole)
        follower.wait_ready()
        nodes.wait_in_sync(topic)
        speeds.append((whole - had) / 1e6 / seconds)
        copies.append(_copy_mb_per_second(bench.work, nodes.leader(topic), topic))
    ratio = _compare(section, "a follower catches up: MB/s", speeds, "copy of the files, fsync", copies)
    _aim(section, "a follower catches up, ratio to a copy of the files", f"≥ {_CATCH_UP_AIM}", ratio.median,
         ratio.median >= _CATCH_UP_AIM)  # fmt: skip


def _growth_seconds(follower: ClusterNode, topic: str, had: int, whole: int) -> float:
    until(lambda: follower.log_bytes(topic) > had, "the follower gets its first records")
    started = time.perf_counter()
    until(lambda: follower.log_bytes(topic) >= whole, "the follower has everything")
    return time.perf_counter() - started


def _copy_mb_per_second(work: Path, node: ClusterNode, topic: str) -> float:
    target, copied = work / "copy", 0
    started = time.perf_counter()
    for path in node.data_dir.glob(f"logs/{topic}/*/*.log"):
        with path.open("rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
            copied += file.tell()
    seconds = time.perf_counter() - started
    target.unlink()
    return copied / 1e6 / seconds


def _controller_changes(bench: Bench, section: Section, nodes: ClusterNodes) -> None:
    """Kill the controller's node, with more and more partitions."""
    topics: list[str] = []
    quiet = _controller_change(nodes, ["fail-over"])
    few_percent, few_megabytes = _idle(nodes)
    for count in bench.plan.cluster_partitions:
        bench.progress(f"cluster: {count:,} partitions")
        while len(topics) * _PARTITIONS_PER_TOPIC < count:
            topics.append(f"many-{len(topics)}")
            nodes.create_topic(topics[-1], _PARTITIONS_PER_TOPIC)
        seconds = _controller_change(nodes, topics)
        section.add(f"change of the controller, {count:,} partitions: s", number(seconds), "few partitions",
                    number(quiet), number(seconds / quiet))  # fmt: skip
        percent, megabytes = _idle(nodes)
        section.add(f"an idle node, {count:,} partitions: % of a CPU", number(percent), "few partitions",
                    number(few_percent), number(percent / max(few_percent, 0.01)))  # fmt: skip
        section.add(f"an idle node, {count:,} partitions: MB of memory", number(megabytes), "few partitions",
                    number(few_megabytes), number(megabytes / few_megabytes))  # fmt: skip


def _controller_change(nodes: ClusterNodes, topics: list[str]) -> float:
    """Seconds from kill -9 of the controller's node until each partition is led by another one."""
    dead = nodes.by_id(nodes.nodes[0].metadata().controller_id)
    witness = next(node for node in nodes.nodes if node is not dead)
    started = time.perf_counter()
    dead.kill()

    def are_led() -> bool:
        answer = witness.metadata(*topics)
        led = {each.leader_id for topic in answer.topics for each in topic.partitions}
        return answer.controller_id not in (-1, dead.node_id) and not led & {-1, dead.node_id}

    until(are_led, "every partition has a leader again")
    seconds = time.perf_counter() - started
    dead.start()
    for topic in topics:
        nodes.wait_in_sync(topic)
    return seconds


def _idle(nodes: ClusterNodes) -> tuple[float, float]:
    """What a node uses when nobody asks it anything: per cent of a CPU, and MB; the mean of all nodes."""
    before = [cpu_seconds(node.pid) for node in nodes.nodes]
    time.sleep(_IDLE_SECONDS)
    spent = sum(cpu_seconds(node.pid) for node in nodes.nodes) - sum(before)
    megabytes = sum(memory_mb(node.pid)[0] for node in nodes.nodes)
    return 100 * spent / _IDLE_SECONDS / len(nodes.nodes), megabytes / len(nodes.nodes)
