"""Exactly once from Spark, whatever dies: drivers, tasks and nodes are killed at the worst moments.

Every story copies numbers to a topic, where a duplicate shows, and to a table with a primary key. What may
be seen is checked while a process is held at the moment that counts, and at the end. The moments are those of
``support/spark_jobs/watched.py``; a test waits until a process is held there, so that it is hit for certain.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.number_story import BATCH, NumberStory
from support.processes import NodeProcess, process_environment, wait_until
from support.spark_cluster import spark_cluster
from support.spark_driver import SparkDriver, is_running
from support.spark_jobs.points import Points
from support.table_nodes import SOON

_COLD_SECONDS = 180.0
_MOMENTS = ("before-write", "during-write", "after-write", "before-commit", "during-commit", "after-commit")
_PUBLISHED = ("during-commit", "after-commit")
#: Where a process lives on that is cut off from a driver that has died, and where it comes to in the end: the
#: rest of its rows is refused, and its publication is an old one.
_CUT_OFF = {"during-write": "write-failed", "before-commit": "after-commit"}
_READING = {"startingOffsets": "earliest", "maxRowsPerTrigger": BATCH}
#: How many tasks a batch has in each life of the driver.
_TASKS = (2, 5, 3, 4, 2, 5, 3)


class Copies:
    """Streaming copies of one source, one to each target, over all lives of a driver."""

    def __init__(self, story: NumberStory, directory: Path, targets: list[str]) -> None:
        self._story = story
        self._directory = directory
        self.targets = [story.add_target(target) for target in targets]
        self.points = {target: Points(directory / f"points of {target}") for target in targets}

    def begin(self, driver: SparkDriver, tasks: int = 2) -> None:
        for target in self.targets:
            points, before = self.points[target], len(self.points[target].notes())
            driver.call(
                "copy",
                source=self._story.source,
                target=target,
                checkpoint=str(self.checkpoint(target)),
                points=str(points.directory),
                reading=_READING | {"minPartitions": tasks},
            )
            # One after the other: two queries that began at one moment in a cold session both failed once, in
            # Spark 4.3's serialization of tasks ("Illegal size 5 of collection, expected 6").
            wait_until(lambda: len(points.notes()) > before, f"{target} is being written", _COLD_SECONDS)  # noqa: B023

    def checkpoint(self, target: str) -> Path:
        return self._directory / f"checkpoint of {target}"

    def logged(self, target: str) -> int:
        """How many batches Spark knows to be through."""
        return len(list((self.checkpoint(target) / "commits").glob("[0-9]*")))

    def wait_held(self, target: str, point: str, batch: int) -> int:
        return wait_held(self.points[target], point, batch)

    def finish(self, driver: SparkDriver) -> None:
        for target in self.targets:
            assert driver.call("finish", name=target)["failure"] is None


def wait_held(points: Points, point: str, batch: int) -> int:
    """The process that is held there."""

    def state() -> int | None:
        assert points.reached("failed") == []
        return points.held(point, batch)

    held: int = wait_until(
        state,
        f"{points.directory.name}: a process is held at {point} of batch {batch}",
        _COLD_SECONDS,
    )
    return held


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
    copies = Copies(story, tmp_path, ["killed", "test.killed"])
    story.fill(len(_MOMENTS) + 1)
    cut_off: dict[str, tuple[str, int]] = {}
    for life in range(len(_MOMENTS)):
        # The two queries die at different moments, and over all lives at every one.
        moments = dict(zip(copies.targets, (_MOMENTS[life], _MOMENTS[life - 3]), strict=True))
        for target, moment in moments.items():
            copies.points[target].arm(moment, life)
        with SparkDriver(tmp_path, node.bootstrap_servers) as driver:
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
        if life % 2:
            # What was published and what is open is remembered by more than the node's memory.
            node.kill()
            node.start()
    survivor: SparkDriver = request.getfixturevalue("driver")
    copies.begin(survivor, _TASKS[-1])
    copies.finish(survivor)
    for target in copies.targets:
        story.check(target, len(_MOMENTS) + 1)
        assert_replayed(copies.points[target])
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
        _COLD_SECONDS,
    )
    if moment == "during-write":
        assert all("is over" in end["error"] for end in ends())


def assert_replayed(points: Points) -> None:
    """Batches were split anew when they ran again, and not written again if they had been published."""
    held = {each["at"]: each["batch"] for each in points.reached("held")}
    assert held.keys() == set(_MOMENTS)
    for moment, rows in (("before-commit", BATCH), ("during-commit", 0), ("after-commit", 0)):
        batch = held[moment]
        written = [each["rows"] for each in points.reached("after-write", batch)]
        first, again = written[: _TASKS[batch]], written[_TASKS[batch] :]
        assert len(again) == _TASKS[batch + 1] != len(first)
        assert (sum(first), sum(again)) == (BATCH, rows)


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(400)
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


@pytest.mark.timeout(300)
def test_two_targets_of_foreach_batch_get_a_batch_once_though_the_driver_dies_between_them(
    node: NodeProcess, driver: SparkDriver, tmp_path: Path
) -> None:
    story = NumberStory(node, "pairs")
    first, second = story.add_target("first"), story.add_target("test.second")
    story.fill(3)
    points = Points(tmp_path / "points")
    copying = {
        "source": story.source,
        "targets": [first, second],
        "checkpoint": str(tmp_path / "checkpoint"),
        "points": str(points.directory),
        "reading": _READING,
        "app": "pairs",
    }
    points.arm("between", 1)
    with SparkDriver(tmp_path, node.bootstrap_servers) as doomed:
        doomed.call("copy_to_both", **copying)
        wait_held(points, "between", 1)
        story.check(first, 2)
        story.check(second, 1)
        doomed.kill()
    driver.call("copy_to_both", **copying)
    assert driver.call("finish", name="pairs")["failure"] is None
    story.check(first, 3)
    story.check(second, 3)
    written = Points(points.directory / "first").reached("after-write", 1)
    assert [each["rows"] for each in written] == [BATCH // 2, BATCH // 2, 0, 0]


@pytest.mark.timeout(300)
def test_rows_of_a_batch_write_whose_driver_died_are_never_seen_and_hold_nobody_up(
    node: NodeProcess, tmp_path: Path
) -> None:
    story = NumberStory(node, "dead-jobs")
    points = {name: Points(tmp_path / name) for name in ("dead", "test.dead")}
    with SparkDriver(tmp_path, node.bootstrap_servers) as doomed:
        for target, own in points.items():
            story.add_target(target)
            own.arm("before-commit", 0)
            options = {"transactionTimeout": "15 seconds"}
            rows = {"first": 0, "end": BATCH, "options": options}
            doomed.call("write", name=target, target=target, points=str(own.directory), **rows)
        for target, own in points.items():
            wait_held(own, "before-commit", 0)
            assert story.open_attempts(target) == 2
        doomed.kill()
    assert {number for *_, number in story.records("dead", "read_uncommitted")} == set(range(BATCH))
    later = range(BATCH, 2 * BATCH)
    story.append("dead", later)
    story.expect("dead", later, "")
    # Nobody tells the nodes that the job is dead: it gives no sign of life, and that is enough.
    wait_until(lambda: not story.open_transactions(*points), "the dead jobs' transactions are aborted", 60.0)
    words = ["txn", "jobs", "--format", "json", "--server", node.bootstrap_servers]
    jobs = subprocess.check_output([sys.executable, "-m", "tidemill.cli", *words], env=process_environment())
    assert {job["job"].rpartition(":")[2]: job["open_attempts"] for job in json.loads(jobs)}.items() >= {
        ("dead", 0),
        ("test.dead", 0),
    }
    story.check_topic("dead", later)
    story.check("test.dead", 0)


@pytest.mark.timeout(300)
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


@pytest.mark.timeout(400)
def test_of_a_slow_task_and_its_twin_one_is_published(node: NodeProcess, tmp_path: Path) -> None:
    story = NumberStory(node, "speculation")
    copies = Copies(story, tmp_path, ["twins", "test.twins"])
    story.fill(2)
    speculation = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
    }
    with (
        spark_cluster(tmp_path / "cluster", process_environment()) as master,
        SparkDriver(tmp_path, node.bootstrap_servers, master, **speculation) as driver,
    ):
        for batch, target in enumerate(copies.targets):
            copies.points[target].arm("after-write", batch)
        copies.begin(driver)
        copies.finish(driver)
        for batch, target in enumerate(copies.targets):
            story.check(target, 2)
            assert copies.points[target].held("after-write", batch), "one attempt was slow"
            written = copies.points[target].reached("after-write", batch)
            assert sum(each["rows"] for each in written) > BATCH, "and its twin has written all rows, too"
    assert story.open_transactions(*copies.targets) == []
