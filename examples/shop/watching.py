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
    sent: int
    bytes_sent: int
    done: dict[str, int]

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
    sending_seconds: float = 0.0

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

    def spark_rate(self) -> float:
        """Messages a second through all queries together, from the first sent to the last done."""
        return sum(self.last.done.values()) / self.last.seconds


def watch(
    senders: Senders,
    queries: dict[str, StreamingQuery],
    story: Story,
    show: Callable[[Sample], None],
    interrupted: threading.Event,
) -> None:
    """Look on until everything is sent and every query is done with it. Raises what ended one of them."""
    began = changed = time.monotonic()
    story.batches = {name: {} for name in queries}
    while True:
        is_sending = senders.running
        for name, query in queries.items():
            _note_batches(query, story.batches[name])
        done = {name: sum(batch.messages for batch in each.values()) for name, each in story.batches.items()}
        now = time.monotonic()
        sample = Sample(now - began, senders.sent, senders.bytes_sent, done)
        if not story.samples or done != story.last.done or sample.sent != story.last.sent:
            changed = now
        story.samples.append(sample)
        show(sample)
        if senders.failure is not None:
            raise senders.failure
        if is_sending:
            story.sending_seconds = sample.seconds
        elif sample.lag == 0:
            return
        if now - changed > STUCK_SECONDS:
            raise TimeoutError(
                f"nothing has moved for {STUCK_SECONDS:.0f} s: {sample.lag:,} messages are left"
            )
        if interrupted.wait(PERIOD_SECONDS):
            raise KeyboardInterrupt


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
