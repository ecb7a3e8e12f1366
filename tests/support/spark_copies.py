"""Copies of a story's numbers by streaming queries, held at the points of ``spark_jobs/watched.py``."""

from __future__ import annotations

from pathlib import Path

from support.number_story import BATCH, NumberStory
from support.processes import wait_until
from support.spark_driver import SparkDriver
from support.spark_jobs.points import Points

__all__ = ("COLD_SECONDS", "READING", "Copies", "wait_held")

#: What a cold session may take for anything, on a machine that is busy.
COLD_SECONDS = 400.0
READING = {"startingOffsets": "earliest", "maxRowsPerTrigger": BATCH}


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
                reading=READING | {"minPartitions": tasks},
            )
            # One after the other: two queries that began at one moment in a cold session both failed once, in
            # Spark 4.3's serialization of tasks ("Illegal size 5 of collection, expected 6").
            wait_until(lambda: len(points.notes()) > before, f"{target} is being written", COLD_SECONDS)  # noqa: B023

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
        COLD_SECONDS,
    )
    return held
