"""What happens while the shop is open: how far the senders are, and how far each query of the pipeline.

A query's progress comes from Spark. Its *lag* is what was sent and is not in its result yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from producers import Senders
from pyspark.sql.streaming import StreamingQuery

PERIOD_SECONDS = 0.25
STUCK_SECONDS = 300.0


@dataclass(frozen=True)
class Sample:
    """One look at everything. ``done`` is how many messages each query has behind it."""

    seconds: float
    is_sending: bool
    sent: int
    bytes_sent: int
    done: dict[str, int]

    @property
    def is_warm(self) -> bool:
        """Whether every query has done a batch."""
        return all(self.done.values())

    @property
    def is_over(self) -> bool:
        """Whether everything is sent and done."""
        return not self.is_sending and self.lag == 0

    @property
    def lag(self) -> int:
        """How far the slowest query is behind the senders."""
        return self.sent - min(self.done.values())


@dataclass(frozen=True)
class Batch:
    """One batch of a query: how many messages it took, and for how long it ran."""

    messages: int
    seconds: float


@dataclass
class Story:
    """All that was seen of one run."""

    seed: int
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, in their order."""
    samples: list[Sample] = field(default_factory=list)
    batches: dict[str, dict[int, Batch]] = field(default_factory=dict)
    """By query, and then by the number of the batch."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - began

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def lag_max(self) -> int:
        return max(sample.lag for sample in self.samples)

    def sending_rates(self) -> tuple[float, float]:
        """Messages and megabytes a second that were sent, after the first minute of the shop's time."""
        warm = next(sample for sample in self.samples if sample.is_warm)
        end = next(sample for sample in self.samples if not sample.is_sending)
        seconds = max(end.seconds - warm.seconds, PERIOD_SECONDS)
        return (end.sent - warm.sent) / seconds, (end.bytes_sent - warm.bytes_sent) / seconds / 1e6

    def spark_rate(self) -> float:
        """Messages a second through all queries together, while they were warm."""
        warm = next(sample for sample in self.samples if sample.is_warm)
        seconds = max(self.last.seconds - warm.seconds, PERIOD_SECONDS)
        return (sum(self.last.done.values()) - sum(warm.done.values())) / seconds


class Watcher:
    """Looks at senders and queries, and notes what it sees in ``story``."""

    def __init__(
        self,
        senders: Senders,
        queries: dict[str, StreamingQuery],
        story: Story,
        interrupted: threading.Event,
    ) -> None:
        self._senders = senders
        self._queries = queries
        self._story = story
        self._interrupted = interrupted
        self._began = self._changed = time.monotonic()
        story.batches = {name: {} for name in queries}

    def watch(self, until: Callable[[Sample], bool], show: Callable[[Sample], None]) -> None:
        """Look on until a sample is as it should be. Raises what ended a sender or a query."""
        while True:
            sample = self._look()
            show(sample)
            if until(sample):
                return
            if time.monotonic() - self._changed > STUCK_SECONDS:
                raise TimeoutError(
                    f"nothing moved for {STUCK_SECONDS:.0f} s; {sample.lag:,} messages are left"
                )
            if self._interrupted.wait(PERIOD_SECONDS):
                raise KeyboardInterrupt

    def _look(self) -> Sample:
        # Asked first: what is sent is final if nobody is sending.
        is_sending = self._senders.running
        if self._senders.failure is not None:
            raise self._senders.failure
        batches = self._story.batches
        for name, query in self._queries.items():
            _note_batches(query, batches[name])
        done = {name: sum(batch.messages for batch in each.values()) for name, each in batches.items()}
        now = time.monotonic()
        sample = Sample(now - self._began, is_sending, self._senders.sent, self._senders.bytes_sent, done)
        samples = self._story.samples
        if not samples or (sample.sent, done) != (samples[-1].sent, samples[-1].done):
            self._changed = now
        samples.append(sample)
        return sample


def _note_batches(query: StreamingQuery, batches: dict[int, Batch]) -> None:
    failure = query.exception()
    if failure is not None:
        raise failure
    last = query.lastProgress
    if last is None or (last.batchId in batches and batches[last.batchId].messages == last.numInputRows):
        return
    for progress in query.recentProgress:
        # An idle query reports the number of its next batch, with no messages.
        if progress.numInputRows:
            seconds = progress.durationMs["triggerExecution"] / 1000
            batches[progress.batchId] = Batch(progress.numInputRows, seconds)
