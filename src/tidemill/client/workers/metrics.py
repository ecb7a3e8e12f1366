"""Metrics of the workers of a process, for Prometheus: ``tidemill worker run --metrics``, ``run_workers``.

The counts of a worker are known to its process only. Its lag is asked for when somebody reads the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tidemill.client.cursors.lag import Lag
from tidemill.client.workers.handling import WorkerCounts
from tidemill.client.workers.ordered_engine import OrderedEngine
from tidemill.config.values import Address, parse_address
from tidemill.coordination.metrics import Labelled, Metric, Metrics, counters, gauges
from tidemill.errors import ConfigError, TidemillError
from tidemill.net.errors import cannot_listen
from tidemill.net.loopback import only_loopback
from tidemill.server.metrics import render

if TYPE_CHECKING:
    from tidemill.client.workers.worker import AsyncWorker

__all__ = ("WORKER_METRICS", "MetricsServer", "WorkerState", "measure", "metrics_page")

_LABELS: Final = ("worker", "topic")
_LAG_SECONDS: Final = 5.0
#: How often the server looks whether it is to end.
_LOOK_SECONDS: Final = 0.1
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class WorkerState(NamedTuple):
    """One worker when a page was made. ``lag`` is None for one on a share group, and if no node tells it."""

    name: str
    topic: str
    is_running: bool
    is_ordered: bool
    counts: WorkerCounts
    lag: Lag | None


async def measure(worker: AsyncWorker) -> WorkerState:
    """What a worker has done, and how far it is behind."""
    engine = worker.engine
    lag = None
    is_ordered = isinstance(engine, OrderedEngine)
    if isinstance(engine, OrderedEngine) and engine.cursor is not None:
        # The page must not wait for nodes that are away.
        with contextlib.suppress(TidemillError, TimeoutError):
            async with asyncio.timeout(_LAG_SECONDS):
                lag = await engine.cursor.lag()
    return WorkerState(worker.name or "", worker.topic, worker.is_running, is_ordered, worker.counts, lag)


def _of_workers(
    read: Callable[[WorkerState], float | None],
) -> Callable[[Sequence[WorkerState]], Labelled[float]]:
    def samples(states: Sequence[WorkerState]) -> Labelled[float]:
        found: dict[tuple[str, ...], float] = {}
        for state in states:
            value = read(state)
            if value is not None:
                # Workers without a name on one topic are one series.
                labels = state.name, state.topic
                found[labels] = found.get(labels, 0) + value
        return found.items()

    return samples


def _count(name: str, text: str, read: Callable[[WorkerState], float | None]) -> Metric[Any]:
    return counters(f"tidemill_worker_{name}_total", text, _LABELS, _of_workers(read))


def _value(name: str, text: str, read: Callable[[WorkerState], float | None]) -> Metric[Any]:
    return gauges(f"tidemill_worker_{name}", text, _LABELS, _of_workers(read))


WORKER_METRICS: Final[tuple[Metric[Any], ...]] = (
    _count("failed", "handlers that have raised", lambda each: each.counts.failed),
    _count("handled", "records that are done, given back or parked", lambda each: each.counts.handled),
    _value(
        "lag_records",
        "records that an ordered worker has not taken yet",
        lambda each: None if each.lag is None else each.lag.records,
    ),
    _value(
        "lag_seconds",
        "age of the next record of an ordered worker",
        lambda each: None if each.lag is None else each.lag.seconds,
    ),
    _count(
        "lost",
        "records whose lock was gone before they were done",
        lambda each: None if each.is_ordered else each.counts.lost,
    ),
    _count(
        "parked",
        "records that an ordered worker has parked",
        lambda each: each.counts.rejected if each.is_ordered else None,
    ),
    _count(
        "rejected",
        "records that a worker on a share group has rejected",
        lambda each: None if each.is_ordered else each.counts.rejected,
    ),
    _count(
        "released",
        "records that a worker on a share group has given back",
        lambda each: None if each.is_ordered else each.counts.released,
    ),
    _count(
        "restarts",
        "times that an ordered worker went back to its stored position",
        lambda each: each.counts.restarts if each.is_ordered else None,
    ),
    _value("running_handlers", "handlers that run now", lambda each: each.counts.running),
    _value("up", "1 while the worker runs", lambda each: float(each.is_running)),
)


async def metrics_page(states: Sequence[WorkerState]) -> str:
    """The page of metrics of these workers."""
    metrics = Metrics()
    metrics.register(states, WORKER_METRICS)
    return "".join([part async for part in render(metrics)])


class MetricsServer:
    """Serves the metrics of workers as ``/metrics``, in threads of its own. A context manager."""

    def __init__(
        self,
        states: Callable[[], Sequence[WorkerState]],
        listen: str,
        *,
        allow_unauthenticated: bool = False,
    ) -> None:
        """``states`` is called in one of the threads; ``listen`` is ``host:port``, port 0 a free one.

        An address that other machines can reach is refused with ``ConfigError`` without
        ``allow_unauthenticated``.
        """
        try:
            address = parse_address(listen)
        except ValueError as error:
            raise ConfigError(f"the address of the metrics, {listen!r}, is not {error}") from None
        if not allow_unauthenticated and not only_loopback(address, "--metrics"):
            raise ConfigError(
                f"refused to serve metrics on {address}: other machines could read them, and there is no "
                "authentication. Use 127.0.0.1; or, if only trusted machines can reach this one, add "
                "--allow-unauthenticated (allow_unauthenticated=True)"
            )
        try:
            self._server = _Server(address, states)
        except OSError as error:
            raise cannot_listen("serve metrics", address, error, "--metrics") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="tidemill-metrics", daemon=True
        )

    @property
    def address(self) -> Address:
        """The address at which the metrics are served."""
        host, port = self._server.server_address[:2]
        return Address(str(host), int(port))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A page that somebody still reads keeps no worker from ending.
    block_on_close = False

    def __init__(self, address: Address, states: Callable[[], Sequence[WorkerState]]) -> None:
        self.address_family = AF_INET6 if ":" in address.host else AF_INET
        self.states = states
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking the network for a name, as ``HTTPServer`` does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "there is only /metrics here")
            return
        assert isinstance(self.server, _Server)
        try:
            states = self.server.states()
        except TidemillError as error:
            # The connection was closed: the process is about to end.
            self.send_error(503, error.message[:200])
            return
        page = asyncio.run(metrics_page(states)).encode()
        self.send_response(200)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of its base class
        """Log nothing: requests for the page come every few seconds."""
