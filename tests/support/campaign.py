"""A campaign against three real nodes and a real etcd: its loads, and what is done to the nodes meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.links import Way
from support.processes import ClientFailed, ClientProcess
from support.real_cluster import ETCD, SHORT_SESSION_TIMEOUT_MS, RealCluster, RealNode
from support.real_tables import TableLoad

__all__ = ("PARTITIONS", "Campaign", "Loads")

PARTITIONS = 3
#: Acknowledgements, and transactions, that each load gets in every state.
_ACKS = 5
#: A node that hangs or is cut off comes back when another has been elected in its place.
_LONGER_THAN_A_SESSION_SECONDS = SHORT_SESSION_TIMEOUT_MS / 1000 + 1


class Loads:
    """The plain loads, a table's, and the transactions, whose process is started again when it dies.

    librdkafka 2.16 ends its process by an assertion (``txn_req_cnt > 0``) when the coordinator moves at the
    wrong moment. What it had noted counts, and the next process has the same transactional id.
    """

    def __init__(
        self,
        plain: ClientProcess,
        start: Callable[[], ClientProcess],
        topic: str,
        path: Path,
        table: TableLoad,
    ) -> None:
        self._plain = plain
        self._table = table
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
            partitions=PARTITIONS,
            transactional_id="txn",
        )

    def wait_for_acks(self, *, with_transactions: bool = True) -> None:
        """Every load gets something done from now on."""
        with ThreadPoolExecutor() as side_by_side:
            waits = [
                side_by_side.submit(self._plain.call, "wait_for_acks", more=_ACKS),
                side_by_side.submit(self._table.wait_for_acks, _ACKS),
            ]
            if with_transactions:
                waits.append(side_by_side.submit(self._wait_for_transactions))
        for wait in waits:
            wait.result()

    def _wait_for_transactions(self) -> None:
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
        outcome: dict[str, Any] = self._plain.call("stop_load", deadline_seconds=400)
        try:
            (outcome["txn"],) = self._transactions.call("stop_load", deadline_seconds=400).values()
        except ClientFailed as error:
            if "txn_req_cnt" not in str(error):
                raise
            outcome["txn"] = {"failure": None}
        return outcome


class Campaign:
    """Events of all kinds, each undone before the next. ``topics`` have three replicas."""

    def __init__(self, cluster: RealCluster, topics: tuple[str, ...], rng: random.Random) -> None:
        self._cluster = cluster
        self._topics = topics
        self._rng = rng
        self.events = 0

    def run(self, events: int, load: Loads) -> None:
        """First one of each kind, those that differ most before the others; then at random."""
        every = [
            self.kill,
            self.isolate,
            self.cut_one_way,
            self.lose_etcd,
            self.pause,
            self.cut_off_etcd,
            self.stop,
            self.hear_nothing_of_etcd,
            self.lose_machine,
            self.cut_link,
        ]
        nodes: list[RealNode] = []
        for number in range(events):
            kind = every[number] if number < len(every) else self._rng.choice(every)
            nodes = nodes or list(self._cluster)
            node = nodes.pop(self._rng.randrange(len(nodes)))
            print(f"{time.strftime('%X')} event {number}: {kind.__name__} {node.name}")  # noqa: T201
            kind(node, load)
            for topic in self._topics:
                self._cluster.wait_in_sync(topic, 3)
            load.wait_for_acks()
            self.events += 1

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
        # Also if it led nothing: until its session is over, a node of its name is refused.
        self._cluster.wait_for_nodes(len([*self._cluster]) - 1)
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
        time.sleep(self._rng.uniform(0, 2 * SHORT_SESSION_TIMEOUT_MS / 1000))
        self._cluster.etcd.restart()

    def cut_link(self, node: RealNode, load: Loads) -> None:
        """Two nodes do not reach each other; both reach the third, and etcd. One leaves in-sync sets.

        A transaction waits whose coordinator is one of them, if it has written to a partition of the other.
        """
        other = self._other(node)
        self._some_time()
        self._cluster.links.cut((node.name, other.name), (other.name, node.name))
        load.wait_for_acks(with_transactions=False)
        self._cluster.links.heal()

    def cut_one_way(self, node: RealNode, load: Loads) -> None:
        """What one node sends another does not arrive; what it is sent does."""
        self._some_time()
        self._cluster.links.cut((node.name, self._other(node).name))
        load.wait_for_acks(with_transactions=False)
        self._cluster.links.heal()

    def isolate(self, node: RealNode, load: Loads) -> None:
        """A node reaches nobody but clients, and takes itself for alive, until it is too late."""
        others = [ETCD, *(each.name for each in self._cluster if each is not node)]
        self._cut_off(
            node, load, *((node.name, each) for each in others), *((each, node.name) for each in others)
        )

    def cut_off_etcd(self, node: RealNode, load: Loads) -> None:
        """A node's session ends, though all other nodes reach it."""
        self._cut_off(node, load, (node.name, ETCD), (ETCD, node.name))

    def hear_nothing_of_etcd(self, node: RealNode, load: Loads) -> None:
        """What a node tells etcd arrives, so that its session may live, and it hears nothing new."""
        self._some_time()
        self._cluster.links.cut((ETCD, node.name))
        time.sleep(_LONGER_THAN_A_SESSION_SECONDS)
        load.wait_for_acks()
        self._cluster.links.heal()

    def _cut_off(self, node: RealNode, load: Loads, *ways: Way) -> None:
        self._some_time()
        self._cluster.links.cut(*ways)
        node.is_cut_off = True
        self._goes_on_without(node, load)
        self._cluster.links.heal()
        node.is_cut_off = False

    def _other(self, node: RealNode) -> RealNode:
        return self._rng.choice([each for each in self._cluster if each is not node])

    def _some_time(self) -> None:
        time.sleep(self._rng.uniform(0.1, 1.0))

    def _goes_on_without(self, node: RealNode, load: Loads) -> None:
        for topic in self._topics:
            self._cluster.wait_for_leaders(topic, but=node)
        load.wait_for_acks()
