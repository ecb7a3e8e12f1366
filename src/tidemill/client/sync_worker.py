"""Workers for programs that do not await: the async client's names, on the thread of ``Tidemill``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidemill.client.arguments import shown
from tidemill.client.blocking import Blocking, blocking
from tidemill.client.workers.handling import WorkerCounts
from tidemill.client.workers.stopping import StopSignals
from tidemill.client.workers.worker import AsyncWorker
from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.client.sync_client import Tidemill

__all__ = ("Worker", "run_workers")


class Worker(Blocking[AsyncWorker]):
    """Runs a handler for every record of a topic.

    ``@db.worker("emails", topic="outbox")`` above a handler makes one; ``send.run()`` works until the process
    is told to stop. Calling it with a record calls the handler.
    """

    def __init__(self, db: Tidemill, awaited: AsyncWorker) -> None:
        super().__init__(db, awaited)
        db.workers.append(self)

    @property
    def name(self) -> str | None:
        """The name of the worker, and of its group or cursor; None: its position is in memory only."""
        return self._awaited.name

    @property
    def topic(self) -> str:
        """Topic whose records the worker handles."""
        return self._awaited.topic

    @property
    def counts(self) -> WorkerCounts:
        """Counters of the records that the worker has handled so far."""
        return self._awaited.counts

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not come to its end."""
        return self._awaited.is_running

    def __call__(self, handler_or_record: Any) -> Any:
        """With a function: that is the handler. Later: call the handler with a record, as in a test."""
        given = self._awaited(handler_or_record)
        return self if given is self._awaited else given

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_and_join()

    def run(self, *, metrics: str | None = None, allow_unauthenticated: bool = False) -> None:
        """Work until SIGINT or SIGTERM; a second signal interrupts at once.

        With ``metrics``, an address ``host:port``, the worker's metrics are served there, for Prometheus. One
        that other machines can reach needs ``allow_unauthenticated``.
        """
        run_workers(self, metrics=metrics, allow_unauthenticated=allow_unauthenticated)

    start = blocking(AsyncWorker.start)
    stop = blocking(AsyncWorker.stop)
    pause = blocking(AsyncWorker.pause)
    resume = blocking(AsyncWorker.resume)
    join = blocking(AsyncWorker.join)
    stop_and_join = blocking(AsyncWorker.stop_and_join)
    run_until_empty = blocking(AsyncWorker.run_until_empty)


def run_workers(*workers: Worker, metrics: str | None = None, allow_unauthenticated: bool = False) -> None:
    """Work until SIGINT or SIGTERM stops all of these workers; a second signal interrupts at once.

    If one of them ends with an error the others are stopped, and the error is raised. With ``metrics``, an
    address ``host:port``, their metrics are served there as ``/metrics``, for Prometheus. One that other
    machines can reach needs ``allow_unauthenticated``.
    """
    for worker in workers:
        if not isinstance(worker, Worker):
            raise ConfigError(f"a worker is what @db.worker(…) makes, not {shown(worker)}")
    begun: list[Worker] = []
    with StopSignals() as stopping, _serving(workers, metrics, allow_unauthenticated):
        try:
            for worker in workers:
                worker._db.run(worker._awaited.begin(on_end=stopping.tell))
                begun.append(worker)
            stopping.wait()
        finally:
            for worker in begun:
                worker.stop()
            errors = [error for error in map(_joined, begun) if error is not None]
        if errors:
            raise errors[0]


def _joined(worker: Worker) -> Exception | None:
    """Wait until a worker has stopped; the error that ended it."""
    try:
        worker.join()
    except Exception as error:  # noqa: BLE001 - raised when the others have stopped, too
        return error
    return None


def _serving(
    workers: Sequence[Worker], metrics: str | None, allow_unauthenticated: bool
) -> AbstractContextManager[object]:
    if metrics is None:
        return nullcontext()
    from tidemill.client.workers.metrics import MetricsServer, measure

    return MetricsServer(
        lambda: [each._db.run(measure(each._awaited)) for each in workers],
        metrics,
        allow_unauthenticated=allow_unauthenticated,
    )
