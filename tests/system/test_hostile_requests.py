"""No request holds the event loop: hostile ones are thrown at a node while another client pings it.

Two things are judged. The node's own evidence is the processor time of the longest turn of its loop, which is
exact also on a busy machine. It says nothing of a loop that waits, for a disk or a lock; that is seen in the
time that the other client waits for an answer. How long that takes depends on the machine, too, so an idle
node is pinged beside it, and the limit grows with the longest time that this one took.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from support.hostile import HOSTILE
from support.hostile_admin import HOSTILE_ADMIN
from support.hostile_readers import HOSTILE_READERS, HOSTILE_READERS_OF_MANY, KEPT_OPEN
from support.hostile_state import HOSTILE_STATE
from support.machine import slowness
from support.processes import NodeProcess
from support.raw import RawClient

#: The rule. On a slower core the same work takes longer in proportion.
TURN_CPU_SECONDS_MAX = 0.020
#: What a request does, it does every time; what the machine does to it, it does not.
ATTEMPTS = 4
DEADLINE_SECONDS = 300.0
#: A ping may take this long on any machine, or so many times the longest of the idle node.
PING_SECONDS_MAX = 0.250
PING_RATIO_MAX = 5.0
#: Pause between two pings of the idle node, which must not keep the other one from its core.
IDLE_PAUSE_SECONDS = 0.005

REQUESTS = {**HOSTILE, **HOSTILE_READERS_OF_MANY, **HOSTILE_READERS, **HOSTILE_ADMIN, **HOSTILE_STATE}


class Nodes:
    """The node that requests are thrown at; a new one takes its place when a turn was too long."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._count = 0
        self._is_for_readers = False
        self.running = self._start()

    def _start(self) -> NodeProcess:
        self._count += 1
        return NodeProcess(self._data_dir / str(self._count)).start()

    def of(self, name: str) -> NodeProcess:
        """The node for a request. The partitions that all of them need do not fit on one."""
        if self._is_for_readers != (name in HOSTILE_READERS):
            self._is_for_readers = not self._is_for_readers
            self.replace()
        return self.running

    def replace(self) -> None:
        """Start another node: the metrics of this one keep the longest turn for ever."""
        self.running.stop()
        self.running = self._start()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("hostile"))
    yield nodes
    nodes.running.stop()


@pytest.fixture(scope="module")
def idle_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that only answers pings: what makes it slow is the machine."""
    node = NodeProcess(tmp_path_factory.mktemp("idle") / "node").start()
    yield node
    node.stop()


def longest_turns(node: NodeProcess) -> dict[str, float]:
    """Processor seconds of the longest turn, by API."""
    with urllib.request.urlopen(f"{node.http_url}/metrics", timeout=DEADLINE_SECONDS) as response:
        lines = response.read().decode().splitlines()
    prefix = 'tidemill_loop_turn_cpu_seconds_max{api="'
    found = (line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix))
    return {api: float(seconds) for api, seconds in found}


def too_long(node: NodeProcess) -> dict[str, float]:
    """The turns that were too long, by API: also those of work that a request has left behind."""
    found = {api: turn for api, turn in longest_turns(node).items() if turn >= TURN_CPU_SECONDS_MAX}
    if not found:
        return {}
    limit = TURN_CPU_SECONDS_MAX * slowness()
    return {api: turn for api, turn in found.items() if turn >= limit}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_holds_the_event_loop(name: str, nodes: Nodes, idle_node: NodeProcess) -> None:
    nodes.of(name)
    found: list[str] = []
    for _ in range(ATTEMPTS):
        pings = throw_beside_another_client(name, nodes.running, idle_node)
        turns = too_long(nodes.running)
        if not turns and not pings.are_too_long:
            return
        found.append(f"processor seconds of turns by API: {turns}; {pings}")
        # Again at a new node: a machine that others use may have been the reason.
        nodes.replace()
    raise AssertionError("\n".join(found))


class Pings(NamedTuple):
    """The longest time that a ping took, in seconds, while a request was handled."""

    thrown_at: float
    idle: float

    @property
    def are_too_long(self) -> bool:
        return self.thrown_at > max(PING_SECONDS_MAX, PING_RATIO_MAX * self.idle)

    def __str__(self) -> str:
        return (
            f"another client waited up to {self.thrown_at:.3f} s for its answer, and one of an idle node up "
            f"to {self.idle:.3f} s"
        )


def throw_beside_another_client(name: str, node: NodeProcess, idle_node: NodeProcess) -> Pings:
    """Throw a request at a node, and ping it and an idle one until it is answered."""
    with (
        RawClient(node.address, DEADLINE_SECONDS) as hostile,
        RawClient(node.address, DEADLINE_SECONDS) as other,
        RawClient(idle_node.address, DEADLINE_SECONDS) as idle,
    ):
        for client in (hostile, other, idle):
            client.request("ApiVersions", 2, {})
        api, version, body = REQUESTS[name](node.address)
        frame = hostile.encode(api, version, body)
        answered = threading.Event()

        def throw() -> None:
            try:
                hostile.send(frame)
                hostile.read_frame()
            finally:
                answered.set()

        with ThreadPoolExecutor(2) as threads:
            throwing = threads.submit(throw)
            of_idle = threads.submit(longest_ping, idle, answered, IDLE_PAUSE_SECONDS)
            pings = Pings(longest_ping(other, answered), of_idle.result())
            throwing.result()
    while KEPT_OPEN:
        KEPT_OPEN.pop().close()
    return pings


def longest_ping(client: RawClient, answered: threading.Event, pause_seconds: float = 0.0) -> float:
    """Ping until a request is answered, and once at least; gives the longest time that a ping took."""
    longest = 0.0
    while True:
        began = time.perf_counter()
        # Raises if the node does not answer it.
        client.request("ApiVersions", 2, {})
        longest = max(longest, time.perf_counter() - began)
        if answered.wait(pause_seconds):
            return longest


def test_a_long_ping_is_judged_by_that_of_an_idle_node() -> None:
    assert Pings(thrown_at=0.26, idle=0.01).are_too_long
    assert not Pings(thrown_at=0.24, idle=0.01).are_too_long
    assert not Pings(thrown_at=0.9, idle=0.2).are_too_long, "the machine is busy"
    assert Pings(thrown_at=1.1, idle=0.2).are_too_long
