"""A cluster of real processes: an ``etcd`` and nodes started by ``tidemill up --cluster``, on free ports.

Each node can be killed, stopped, paused, resumed and started again; its ports and its data directory stay.
States are waited for by asking for Metadata, as clients do. When a test fails, ``logs`` has what the nodes
have written, and the fixture that made the cluster shows it.

    with RealCluster(tmp_path) as cluster:
        cluster.create_topic("t", partitions=3)
        cluster["n1"].kill()
        cluster.wait_for_leaders("t")
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from support.etcd import EtcdServer
from support.links import Links
from support.ports import free_ports
from support.processes import process_environment, wait_until
from support.raw import RawClient

__all__ = (
    "ETCD",
    "SHORT_SESSION_TIMEOUT_MS",
    "PartitionState",
    "RealCluster",
    "RealNode",
)

#: The death of a node's process is known at once; a session ends only for a test that asks for a short one.
_SESSION_TIMEOUT_MS = 60_000
#: Shorter than a user's, so that a test sees a dead machine soon; longer than a busy machine's hiccups.
SHORT_SESSION_TIMEOUT_MS = 6_000
#: What etcd is called where links are named.
ETCD = "etcd"
_DEADLINE_SECONDS = 240.0
_STOP_DEADLINE_SECONDS = 120.0
_CALL_SECONDS = 10.0
_LOG_TAIL = 6_000


class PartitionState(NamedTuple):
    """What Metadata says of a partition."""

    leader: int
    in_sync: tuple[int, ...]


class RealNode:
    """One node: its name, its ports, its directory, and the process while it runs."""

    def __init__(
        self,
        name: str,
        etcd: EtcdServer,
        data_dir: Path,
        work: Path,
        settings: Mapping[str, Any],
        links: Links | None = None,
    ) -> None:
        self.name = name
        self.data_dir = data_dir
        self.node_id = -1
        self.settings = dict(settings)
        self._kafka_port, self._cluster_port, self._http_port = free_ports(3)
        self._etcd_url = etcd.url
        if links is not None:
            self._etcd_url = f"etcd://127.0.0.1:{links.listen(name, ETCD, lambda: etcd.address)}"
            port = links.listen(None, name, lambda: ("127.0.0.1", self._cluster_port))
            self.settings["cluster_advertised"] = f"127.0.0.1:{port}"
        self._log_path = work / f"{name}.log"
        self._popen: subprocess.Popen[str] | None = None
        self._is_paused = False
        #: Set by a test that has cut it off: what it says of the cluster is old.
        self.is_cut_off = False

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self._kafka_port}"

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._kafka_port

    @property
    def cluster_address(self) -> tuple[str, int]:
        """Where other nodes connect."""
        return "127.0.0.1", self._cluster_port

    @property
    def answers(self) -> bool:
        """Whether it runs, and has the cluster's metadata, as far as this test has done nothing to it."""
        return self.running and not self._is_paused and not self.is_cut_off

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self._http_port}"

    @property
    def running(self) -> bool:
        return self._popen is not None

    @property
    def pid(self) -> int:
        """The process that is the node. ``tidemill up`` looks after it from another."""
        return self._pids()[-1]

    def launch(self, *flags: str) -> RealNode:
        """Start without waiting for anything."""
        assert self._popen is None, f"{self.name} runs already"
        command = [sys.executable, "-m", "tidemill.cli", "up", "--format", "json", "--name", self.name]
        command += ["--cluster", self._etcd_url, "--data", str(self.data_dir), "--listen", self.server]
        command += ["--cluster-listen", f"127.0.0.1:{self._cluster_port}"]
        command += ["--http", f"127.0.0.1:{self._http_port}", *flags]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        with self._log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=process_environment(),
            )
        return self

    def wait_ready(self) -> RealNode:
        """Wait until it serves. ``RuntimeError`` with its words if it ends instead."""
        popen = self._running()
        assert popen.stdout is not None
        line = popen.stdout.readline()
        if not line:
            self._popen = None
            code = popen.wait(_STOP_DEADLINE_SECONDS)
            popen.stdout.close()
            raise RuntimeError(f"node {self.name} ended with {code}\n{self.log_text()[-_LOG_TAIL:]}")
        self.node_id = json.loads(line)["node_id"]
        return self

    def start(self, *flags: str) -> RealNode:
        """``launch`` and ``wait_ready``."""
        return self.launch(*flags).wait_ready()

    def kill(self) -> None:
        """Let the node's process die by ``kill -9``."""
        os.kill(self.pid, signal.SIGKILL)
        self._ended()

    def lose_machine(self) -> None:
        """Kill everything of this node at once, so that nobody can tell etcd."""
        pids = self._pids()
        for pid in pids[:-1]:
            os.kill(pid, signal.SIGSTOP)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGKILL)
        self._ended()

    def stop(self) -> None:
        """Stop in an orderly way."""
        self._running().send_signal(signal.SIGTERM)
        code = self._ended()
        assert code == 0, f"node {self.name} ended with {code}\n{self.log_text()[-_LOG_TAIL:]}"

    def pause(self) -> None:
        """Let the process hang: connections stay open and nothing is answered."""
        self._is_paused = True
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        self._is_paused = False
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End whatever runs, in any state."""
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.lose_machine()

    def log_text(self) -> str:
        """Everything this node has logged, over all its starts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def readiness(self) -> dict[str, Any]:
        """The answer of ``/readyz``, also if it says no."""
        try:
            with urllib.request.urlopen(f"{self.http_url}/readyz", timeout=120) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            answer = json.load(error)
        return answer

    def partition_dir(self, topic: str, partition: int = 0) -> Path:
        """Where the files of a replica are."""
        (found,) = (self.data_dir / "logs" / topic).glob(f"*-{partition}")
        return found

    def _running(self) -> subprocess.Popen[str]:
        assert self._popen is not None, f"{self.name} does not run"
        return self._popen

    def _pids(self) -> list[int]:
        """The processes of this node: that of ``tidemill up``, and its child if it has one."""
        pid = self._running().pid
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [pid, *map(int, children)]
        return [pid]

    def _ended(self) -> int:
        popen, self._popen = self._running(), None
        self._is_paused = False
        try:
            return popen.wait(_STOP_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
            raise TimeoutError(f"node {self.name} did not end\n{self.log_text()[-_LOG_TAIL:]}") from None
        finally:
            assert popen.stdout is not None
            popen.stdout.close()


def _starts(node: RealNode) -> bool:
    """Start a node; False if it is refused, for instance because its last session is not over."""
    with contextlib.suppress(RuntimeError):
        node.start()
    return node.running


class RealCluster:
    """An etcd and nodes n1, n2, …, all of them processes; a context manager that ends them all."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        data_dirs: Mapping[str, Path] = MappingProxyType({}),
        has_links: bool = False,
        etcd: EtcdServer | None = None,
        racks: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """With ``has_links``, the links between nodes, and to etcd, can be cut.

        ``etcd`` is one that runs already; it is ended by whoever has started it.
        """
        self._links = Links(self._name_of) if has_links else None
        self.directory = directory
        self._data_dirs = data_dirs
        self._racks = racks
        self._has_own_etcd = etcd is None
        self.etcd = EtcdServer(directory / "etcd") if etcd is None else etcd
        self.settings = {
            "session_timeout_ms": _SESSION_TIMEOUT_MS,
            # The directories of many nodes are kept for a while.
            "disk_reserve_bytes": 1024 * 1024,
            **settings,
        }
        self.nodes: dict[str, RealNode] = {}
        self._names = [f"n{number + 1}" for number in range(nodes)]

    def __enter__(self) -> RealCluster:
        if self._has_own_etcd:
            self.etcd.start()
        try:
            if self._links is not None:
                self._links.__enter__()
            for name in self._names:
                rack = {"rack": self._racks[name]} if name in self._racks else {}
                self.add(name, self._data_dirs.get(name), **rack).launch()
            for node in self:
                node.wait_ready()
            self.wait_for_nodes(len(self._names))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for node in self:
            node.close()
        if self._has_own_etcd:
            self.etcd.__exit__(None, None, None)
        if self._links is not None:
            self._links.__exit__(None, None, None)

    def mend(self) -> None:
        """Undo what a test that failed has left: cut links, and what is dead or paused."""
        if self._links is not None:
            self._links.heal()
        if not self.etcd.running:
            self.etcd.restart()
        for node in self:
            node.is_cut_off = False
            if node.running:
                node.resume()
            else:
                wait_until(partial(_starts, node), f"{node.name} runs again", _DEADLINE_SECONDS)

    @property
    def links(self) -> Links:
        """The links between the nodes, by their names, and to ``ETCD``."""
        assert self._links is not None, "a cluster without links"
        return self._links

    def _name_of(self, node_id: int) -> str:
        return next((node.name for node in self if node.node_id == node_id), "")

    def add(self, name: str, data_dir: Path | None = None, **settings: Any) -> RealNode:
        """Another node, which is not started. One whose name exists twice is known by the first."""
        directory = data_dir or self.directory / name
        number = sum(each.startswith(name) for each in self.nodes)
        known_as = f"{name}-{number}" if name in self.nodes else name
        work = self.directory / f"of-{known_as}"
        work.mkdir()
        node = RealNode(name, self.etcd, directory, work, self.settings | settings, self._links)
        self.nodes[known_as] = node
        return node

    def __getitem__(self, name: str) -> RealNode:
        return self.nodes[name]

    def __iter__(self) -> Iterator[RealNode]:
        return iter(self.nodes.values())

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(self[name].server for name in self._names)

    @property
    def config(self) -> dict[str, Any]:
        """Where confluent-kafka's clients connect."""
        return {"bootstrap.servers": self.bootstrap_servers, "log_level": 0, "reconnect.backoff.max.ms": 500}

    # --- topics and states

    def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 1,
        replication_factor: int = 3,
        config: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create a topic, and wait until all its replicas are in sync."""
        new = NewTopic(topic, partitions, replication_factor, config={**config})

        def created() -> bool:
            admin = AdminClient(self.config)  # kept: it drops what it is asked for when it goes
            (future,) = admin.create_topics([new], request_timeout=30).values()
            try:
                future.result(120)
            except KafkaException as error:
                if error.args[0].name() == "TOPIC_ALREADY_EXISTS":
                    return True
                if error.args[0].retriable() or error.args[0].name() in ("_TRANSPORT", "_TIMED_OUT"):
                    return False
                raise
            return True

        wait_until(created, f"topic {topic} is created", _DEADLINE_SECONDS)
        self.wait_in_sync(topic, replication_factor)

    def metadata(self, topic: str | None = None) -> Any:
        """The answer to a Metadata request of the first node that gives one; None if none does."""
        wanted = [] if topic is None else [{"name": topic}]
        return self._ask("Metadata", 9, {"topics": wanted, "allow_auto_topic_creation": False})

    def partitions(self, topic: str) -> dict[int, PartitionState]:
        """Leader and in-sync replicas as Metadata has them now; nothing if no node knows the topic."""
        answer = self.metadata(topic)
        if answer is None:
            return {}
        return {
            each.partition_index: PartitionState(each.leader_id, tuple(each.isr_nodes))
            for each in answer.topics[0].partitions
        }

    def leader(self, topic: str, partition: int = 0) -> RealNode:
        """The node that leads a partition; waits until one does."""
        self.wait_for_leaders(topic)
        leader = self.partitions(topic)[partition].leader
        return next(node for node in self if node.node_id == leader and node.running)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until Metadata lists that many nodes."""

        def are_there() -> bool:
            answer = self.metadata()
            return answer is not None and len(answer.brokers) == count

        self._wait(are_there, f"{count} nodes are live")

    def wait_for_leaders(self, topic: str, but: RealNode | None = None) -> None:
        """Wait until each partition has a leader; ``but``: one that is not this node."""
        lost = {-1} if but is None else {-1, but.node_id}

        def are_led() -> bool:
            found = self.partitions(topic)
            return bool(found) and not lost & {each.leader for each in found.values()}

        self._wait(are_led, f"every partition of {topic} has a leader")

    def wait_in_sync(self, topic: str, count: int) -> None:
        """Wait until each partition has a leader and that many in-sync replicas."""

        def are_in_sync() -> bool:
            found = self.partitions(topic).values()
            return bool(found) and all(each.leader != -1 and len(each.in_sync) == count for each in found)

        self._wait(are_in_sync, f"every partition of {topic} has {count} in-sync replicas")

    def reassign(self, topic: str, targets: Mapping[int, list[int]]) -> None:
        """Move partitions to other nodes, and wait until they are there and in sync."""
        wanted = [{"partition_index": index, "replicas": nodes} for index, nodes in targets.items()]
        body = {"topics": [{"name": topic, "partitions": wanted}], "timeout": 30_000}

        def is_begun() -> bool:
            answer = self._ask("AlterPartitionReassignments", 0, body)
            return answer is not None and not answer.error_code

        def are_there() -> bool:
            found = self.partitions(topic)
            return {index: set(each.in_sync) for index, each in found.items() if index in targets} == {
                index: set(nodes) for index, nodes in targets.items()
            }

        self._wait(is_begun, f"moves of {topic} are begun")
        self._wait(are_there, f"{topic} is at {targets}")

    def elect_preferred(self, topic: str) -> None:
        """Have the first replica of each partition lead."""
        partitions = sorted(self.partitions(topic))
        body = {"topic_partitions": [{"topic": topic, "partitions": partitions}], "timeout": 30_000}
        self._wait(lambda: self._ask("ElectLeaders", 1, body | {"election_type": 0}), "leaders are elected")
        self.wait_for_leaders(topic)

    def _ask(self, api: str, version: int, body: Mapping[str, Any]) -> Any:
        """The answer of the first node that gives one; None if none does."""
        for node in self:
            if node.answers:
                with contextlib.suppress(OSError), RawClient(node.address, _CALL_SECONDS) as client:
                    return client.request(api, version, dict(body))
        return None

    def produce(self, topic: str, *values: str, partition: int = 0) -> list[int]:
        """Write with acks=all, retried until it is done; the offsets."""
        producer = Producer(self.config | {"enable.idempotence": True, "message.timeout.ms": 200_000})
        told: list[Any] = []
        for value in values:
            producer.produce(topic, value, partition=partition, on_delivery=lambda *each: told.append(each))
        assert producer.flush(_DEADLINE_SECONDS) == 0, f"records are still waiting\n{self.logs()}"
        assert all(error is None for error, _ in told), [str(error) for error, _ in told]
        return [message.offset() for _, message in told]

    def _wait(self, condition: Any, what: str) -> None:
        try:
            wait_until(condition, what, _DEADLINE_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        """The last lines of every node's log, for the message of a test that fails."""
        return "\n".join(
            f"--- {known_as}{'' if node.running else ' (does not run)'}\n{node.log_text()[-_LOG_TAIL:]}"
            for known_as, node in self.nodes.items()
        )
