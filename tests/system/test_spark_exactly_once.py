"""Exactly once from Spark, whatever dies: drivers, tasks and nodes are killed at the worst moments.

Every story copies numbers to a topic, where a duplicate shows, and to a table with a primary key. What may
be seen is checked while a process is held at the moment that counts, and at the end. The moments are those of
``support/spark_jobs/watched.py``; a test waits until a process is held there, so that it is hit for certain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.number_story import BATCH, NumberStory
from support.processes import NodeProcess, process_environment, wait_until
from support.spark_copies import COLD_SECONDS, READING, Copies, wait_held
from support.spark_driver import SparkDriver, is_running
from support.spark_jobs.points import Points
from support.table_nodes import SOON

_MOMENTS = ("before-write", "during-write", "after-write", "before-commit", "during-commit", "after-commit")
_PUBLISHED = ("during-commit", "after-commit")
#: Where a process lives on that is cut off from a driver that has died, and where it comes to in the end: the
#: rest of its rows is refused, and its publication is an old one.
_CUT_OFF = {"during-write": "write-failed", "before-commit": "after-commit"}
#: Where each copy dies, life by life. A driver is slow to start, so each comes to four moments; in the end
#: topics and tables have both died at every one.
_DEATHS = {
    name: tuple(_MOMENTS[(first + 2 * life) % len(_MOMENTS)] for life in range(3))
    for name, first in (("killed", 0), ("killed-too", 3), ("test.killed", 1), ("test.killed_too", 4))
}
#: How many tasks a batch has in each life of the driver.
_TASKS = (2, 5, 3, 4)
#: Two tasks are held in every life, and one core is left to all others.
_CORES = "local[3,4]"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def driver(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkDriver]:
    """A driver for whatever does not kill one, and for the life after the last death."""
    with SparkDriver(tmp_path_factory.mktemp("driver"), node.bootstrap_servers) as running:
        yield running


@pytest.mark.timeout(900)
def test_a_driver_killed_at_every_moment_of_a_batch_leaves_one_copy(
    node: NodeProcess, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    story = NumberStory(node, "kills")
    copies = Copies(story, tmp_path, list(_DEATHS))
    lives = len(_TASKS) - 1
    story.fill(lives + 1)
    cut_off: dict[str, tuple[str, int]] = {}
    for life in range(lives):
        moments = {target: deaths[life] for target, deaths in _DEATHS.items()}
        for target, moment in moments.items():
            copies.points[target].arm(moment, life)
        with SparkDriver(tmp_path, node.bootstrap_servers, _CORES) as driver:
            copies.begin(driver, _TASKS[life])
            held = {target: copies.wait_held(target, moment, life) for target, moment in moments.items()}
            for target, moment in moments.items():
                story.check(target, life + (moment in _PUBLISHED))
                assert copies.logged(target) == life
            for target, (moment, pid) in cut_off.items():
                assert_harmless(copies.points[target], moment, life - 1, pid)
                story.check(target, life + (moments[target] in _PUBLISHED))
            cut_off = {
                target: (moment, held[target]) for target, moment in moments.items() if moment in _CUT_OFF
            }
            driver.kill(spared=[pid for _, pid in cut_off.values()])
        if life % 2 == 0:
            # What was published and what is open is remembered by more than the node's memory.
            node.kill()
            node.start()
    survivor: SparkDriver = request.getfixturevalue("driver")
    copies.begin(survivor, _TASKS[-1])
    copies.finish(survivor)
    for target, (moment, pid) in cut_off.items():
        assert_harmless(copies.points[target], moment, lives - 1, pid)
    for target in copies.targets:
        story.check(target, lives + 1)
        assert_replayed(copies.points[target], _DEATHS[target])
    assert story.open_transactions(*copies.targets) == []


def assert_harmless(points: Points, moment: str, batch: int, pid: int) -> None:
    """A process that goes on where it was held, after others have written and published its batch."""
    points.release(moment, batch)

    def ends() -> list[dict[str, Any]]:
        return [each for each in points.reached(_CUT_OFF[moment], batch) if each["pid"] == pid]

    # Spark's own code may end it first: nobody is there any more to whom it could answer.
    wait_until(
        lambda: ends() or not is_running(pid),
        f"process {pid}, cut off at {moment}, has done what it could",
        COLD_SECONDS,
    )
    if moment == "during-write":
        assert all("is over" in end["error"] for end in ends())


def assert_replayed(points: Points, deaths: Sequence[str]) -> None:
    """Batches were split anew when they ran again, and not written again if they had been published."""
    assert [each["at"] for each in points.reached("held")] == list(deaths)
    for batch, moment in enumerate(deaths):
        if moment not in ("before-commit", *_PUBLISHED):
            continue
        rows = 0 if moment in _PUBLISHED else BATCH
        written = [each["rows"] for each in points.reached("after-write", batch)]
        first, again = written[: _TASKS[batch]], written[_TASKS[batch] :]
        assert len(again) == _TASKS[batch + 1] != len(first)
        assert (sum(first), sum(again)) == (BATCH, rows)


def test_what_a_failed_task_has_written_does_not_count(
    node: NodeProcess, driver: SparkDriver, tmp_path: Path
) -> None:
    story = NumberStory(node, "failures")
    copies = Copies(story, tmp_path, ["failed", "test.failed"])
    story.fill(3)
    for points in copies.points.values():
        points.arm("during-write", 0, "fail")
        points.arm("after-write", 1, "fail")
    copies.begin(driver)
    copies.finish(driver)
    for target in copies.targets:
        story.check(target, 3)
        for batch, moment in enumerate(("during-write", "after-write")):
            reached = [
                (each["partition"], each["attempt"]) for each in copies.points[target].reached(moment, batch)
            ]
            ((failed, _),) = (place for place in reached if place[1] == 1)
            assert (failed, 0) in reached, f"its predecessor came to {moment} of batch {batch} too"
    # The failed attempts did write: a client that reads uncommitted records finds them.
    everything = [number for *_, number in story.records("failed", "read_uncommitted")]
    assert len(everything) > 3 * BATCH + BATCH // 2
    assert story.open_transactions(*copies.targets) == []


def test_a_query_outlives_a_node_that_is_killed_at_every_moment_of_a_batch(
    node: NodeProcess, driver: SparkDriver, tmp_path: Path
) -> None:
    story = NumberStory(node, "outages")
    copies = Copies(story, tmp_path, ["outlived", "test.outlived"])
    story.fill(len(_MOMENTS) + 1)
    moments = [(copies.targets[batch % 2], moment, batch) for batch, moment in enumerate(_MOMENTS)]
    for target, moment, batch in moments:
        copies.points[target].arm(moment, batch)
    copies.begin(driver)
    for target, moment, batch in moments:
        copies.wait_held(target, moment, batch)
        story.check(target, batch + (moment in _PUBLISHED))
        node.kill()
        # It goes on while the node is away.
        copies.points[target].release(moment, batch)
        node.start()
    copies.finish(driver)
    for target in copies.targets:
        story.check(target, len(_MOMENTS) + 1)
        assert copies.points[target].reached("abort") == []
    assert story.open_transactions(*copies.targets) == []


class DeadDriver:
    """What a driver leaves that dies at two places at once: between the two targets of a batch of a stream,
    and before batch writes are published. To start one is slow, so two tests share what is left.
    """

    pair = ("first", "test.second")
    alone = ("dead", "test.dead")
    later = range(BATCH, 2 * BATCH)

    def __init__(self, node: NodeProcess, directory: Path) -> None:
        self.pairs, self.jobs = NumberStory(node, "pairs"), NumberStory(node, "dead-jobs")
        for target in self.pair:
            self.pairs.add_target(target)
        self.pairs.fill(3)
        self.points = Points(directory / "points")
        self.copying = {
            "source": self.pairs.source,
            "targets": self.pair,
            "checkpoint": str(directory / "checkpoint"),
            "points": str(self.points.directory),
            "reading": READING,
            "app": "pairs",
        }
        with SparkDriver(directory, node.bootstrap_servers) as doomed:
            self._die_between_targets(doomed)
            self._die_before_commit(doomed, directory)
            doomed.kill()
        assert {number for *_, number in self.jobs.records("dead", "read_uncommitted")} == set(range(BATCH))
        # The transactions are open still: nobody has told the nodes that the driver is dead.
        assert self.jobs.open_transactions("dead")
        self.jobs.append("dead", self.later)
        self.jobs.expect("dead", self.later, "")

    def _die_between_targets(self, doomed: SparkDriver) -> None:
        self.points.arm("between", 1)
        doomed.call("copy_to_both", **self.copying)
        wait_held(self.points, "between", 1)
        first, second = self.pair
        self.pairs.check(first, 2)
        self.pairs.check(second, 1)

    def _die_before_commit(self, doomed: SparkDriver, directory: Path) -> None:
        points = {target: Points(directory / target) for target in self.alone}
        for target, own in points.items():
            self.jobs.add_target(target)
            own.arm("before-commit", 0)
            options = {"transactionTimeout": "15 seconds"}
            rows = {"first": 0, "end": BATCH, "options": options}
            doomed.call("write", name=target, target=target, points=str(own.directory), **rows)
        for target, own in points.items():
            wait_held(own, "before-commit", 0)
            assert self.jobs.open_attempts(target) == 2


@pytest.fixture(scope="module")
def dead_driver(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> DeadDriver:
    return DeadDriver(node, tmp_path_factory.mktemp("dead"))


def test_two_targets_of_foreach_batch_get_a_batch_once_though_the_driver_dies_between_them(
    driver: SparkDriver, dead_driver: DeadDriver
) -> None:
    driver.call("copy_to_both", **dead_driver.copying)
    assert driver.call("finish", name="pairs")["failure"] is None
    for target in dead_driver.pair:
        dead_driver.pairs.check(target, 3)
    written = Points(dead_driver.points.directory / "first").reached("after-write", 1)
    assert [each["rows"] for each in written] == [BATCH // 2, BATCH // 2, 0, 0]


def test_a_driver_that_is_slower_than_its_transactions_fails_and_publishes_nothing(
    node: NodeProcess, driver: SparkDriver, tmp_path: Path
) -> None:
    story = NumberStory(node, "slow-jobs")
    target, points = story.add_target("slow"), Points(tmp_path / "points")
    writing = {"target": target, "points": str(points.directory), "first": 0, "end": BATCH}
    options = {"transactionTimeout": "3 seconds", "txnAppId": "slow", "txnVersion": 0}
    points.arm("before-commit", 0)
    driver.call("write", name="slow", **writing, options=options)
    wait_held(points, "before-commit", 0)
    wait_until(lambda: not story.open_attempts(target), "the attempts have timed out")
    points.release("before-commit", 0)
    assert "2 of 2 attempts are gone; run the batch again" in driver.call("finish", name="slow")["failure"]
    story.check(target, 0)
    for _ in range(2):
        driver.call("write", name="again", **writing, options=options | {"transactionTimeout": "1 minute"})
        assert driver.call("finish", name="again")["failure"] is None
        story.check(target, 1)


def test_rows_of_a_batch_write_whose_driver_died_are_never_seen_and_hold_nobody_up(
    node: NodeProcess, dead_driver: DeadDriver
) -> None:
    story, targets = dead_driver.jobs, dead_driver.alone
    # Nobody tells the nodes that the job is dead: it gives no sign of life, and that is enough.
    wait_until(lambda: not story.open_transactions(*targets), "the dead jobs' transactions are aborted", 60.0)
    words = ["txn", "jobs", "--format", "json", "--server", node.bootstrap_servers]
    jobs = subprocess.check_output([sys.executable, "-m", "tidemill.cli", *words], env=process_environment())
    assert {job["job"].rpartition(":")[2]: job["open_attempts"] for job in json.loads(jobs)}.items() >= {
        ("dead", 0),
        ("test.dead", 0),
    }
    story.check_topic("dead", dead_driver.later)
    story.check("test.dead", 0)
