"""Three nodes and an etcd of one member, as processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.processes import ROOT, child_environment, free_ports
from bench.raw import RawClient

__all__ = ("ClusterNode", "ClusterNodes", "has_etcd", "until")

NODES = 3
_METADATA = 3
_DEADLINE_SECONDS = 300.0
_POLL_SECONDS = 0.002


def has_etcd() -> bool:
    return shutil.which("etcd") is not None


def until(condition: Any, what: str) -> Any:
    """What ``condition`` returns once it is true."""
    deadline = time.perf_counter() + _DEADLINE_SECONDS
    while not (found := condition()):
        if time.perf_counter() > deadline:
            raise SystemExit(f"after {_DEADLINE_SECONDS:.0f} s still not: {what}")
        time.sleep(_POLL_SECONDS)
    return found


class ClusterNode:
    """One node; its ports and its directory stay over restarts."""

    def __init__(self, work: Path, etcd: str, name: str) -> None:
        self.data_dir = work / name
        self.port, cluster_port = free_ports(2)
        self.node_id = -1
        self._work = work
        self._log = work / f"{name}.log"
        self._arguments = ["up", "--format", "json", "--name", name, "--data", str(self.data_dir)]
        self._arguments += ["--cluster", etcd, "--http", "", "--listen", self.server]
        self._arguments += ["--cluster-listen", f"127.0.0.1:{cluster_port}", "--log-level", "warning"]
        self._process: subprocess.Popen[str] | None = None

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process that is the node: the child of the one that looks after it."""
        assert self._process is not None
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[-1]) if children else parent

    def launch(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.launch", *self._arguments],
                cwd=ROOT,
                env=child_environment(self._work),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the node did not start:\n{self._log.read_text()[-4000:]}")
        self.node_id = json.loads(line)["node_id"]

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def kill(self) -> None:
        """Kill -9 of the node's process; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self._ended()

    def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._ended()

    def _ended(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def client(self) -> RawClient:
        return RawClient(socket.create_connection(("127.0.0.1", self.port)))

    def metadata(self, *topics: str) -> Any:
        """The answer to a Metadata request."""
        client = self.client()
        names = [{"name": topic} for topic in topics]
        answer = client.call(_METADATA, 8, {"topics": names, "allow_auto_topic_creation": False})
        client.close()
        return answer

    def log_bytes(self, topic: str) -> int:
        """The size of the log files of a topic's replicas here."""
        return sum(path.stat().st_size for path in self.data_dir.glob(f"logs/{topic}/*/*.log"))


class ClusterNodes:
    """A context manager: etcd and three nodes that take connections."""

    def __init__(self, work: Path) -> None:
        work.mkdir()
        self._work = work
        self._etcd_port, self._peer_port = free_ports(2)
        self._etcd: subprocess.Popen[bytes] | None = None
        etcd = f"etcd://127.0.0.1:{self._etcd_port}"
        self.nodes = [ClusterNode(work, etcd, f"n{number + 1}") for number in range(NODES)]

    def __enter__(self) -> ClusterNodes:
        self._start_etcd()
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait_ready()
        return self

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._peer_port}"
        command = ["etcd", "--name=one", f"--data-dir={self._work / 'etcd'}"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster=one={peer}"]
        with (self._work / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def is_healthy() -> bool:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{client}/health", timeout=5) as answer,
            ):
                return bool(json.load(answer)["health"] == "true")
            return False

        until(is_healthy, "etcd is healthy")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            if node.running:
                node.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        shutil.rmtree(self._work, ignore_errors=True)

    @property
    def servers(self) -> str:
        return ",".join(node.server for node in self.nodes)

    def live(self) -> Iterator[ClusterNode]:
        return (node for node in self.nodes if node.running)

    def by_id(self, node_id: int) -> ClusterNode:
        return next(node for node in self.nodes if node.node_id == node_id)

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        def are_live() -> bool:
            return len(next(self.live()).metadata().brokers) == NODES

        until(are_live, "all nodes are live")
        client = next(self.live()).client()
        client.create_topic(topic, partitions, replication_factor=NODES)
        client.close()
        self.wait_in_sync(topic)

    def wait_in_sync(self, topic: str) -> None:
        def are_in_sync() -> bool:
            (found,) = next(self.live()).metadata(topic).topics
            return bool(found.partitions) and all(len(each.isr_nodes) == NODES for each in found.partitions)

        until(are_in_sync, f"all replicas of {topic} are in sync")

    def leader(self, topic: str) -> ClusterNode:
        """The leader of partition 0."""

        def known() -> int:
            leader: int = next(self.live()).metadata(topic).topics[0].partitions[0].leader_id
            return leader + 1  # -1 is nobody

        return self.by_id(until(known, f"{topic} has a leader") - 1)
