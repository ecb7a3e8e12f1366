"""The metrics that processes of workers serve."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import tidemill
from support.prometheus_text import Family, parse_metrics
from tidemill import Bounded, Ordered, Reject, run_workers
from tidemill.client.sync_client import Tidemill
from tidemill.client.workers.metrics import MetricsServer, measure
from tidemill.errors import ConfigError


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as opened:
        yield opened


def _read(address: object, path: str = "/metrics") -> dict[str, Family]:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=120) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parse_metrics(response.read().decode())


def test_the_page_tells_what_workers_have_done_and_how_far_they_are_behind(db: Tidemill) -> None:
    db.produce_many("tasks", [str(number) for number in range(6)])
    reached, go_on = threading.Event(), threading.Event()
    failed: list[int] = []

    def handle(record: Any) -> None:
        number = int(record.text())
        if number == 1 and not failed:
            failed.append(number)
            raise ValueError("once")
        if number == 2:
            raise Reject("no such thing")
        if number == 4:
            reached.set()
            assert go_on.wait(120)

    options = Ordered(batch_size=1, restart=Bounded(9, within_seconds=60))
    ordered = db.worker("ordered", "tasks", handle, ordered=options, dead_letter="letters", retry_backoff=0)
    restarting = db.worker("restarting", "tasks", handle, ordered=options)
    shared = db.worker("shared", "tasks", lambda record: None, concurrency=2)
    workers = [ordered, restarting, shared]
    shared.run_until_empty()
    ordered.start()
    assert reached.wait(120)
    with MetricsServer(lambda: [db.run(measure(each._awaited)) for each in workers], "127.0.0.1:0") as server:
        found = _read(server.address)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _read(server.address, "/")
    go_on.set()
    ordered.stop_and_join()

    def value(name: str, worker: str) -> float:
        return found[f"tidemill_worker_{name}"].value(worker=worker, topic="tasks")

    assert {name: value(name, "ordered") for name in ("up", "running_handlers", "handled_total")} == {
        "up": 1,
        "running_handlers": 1,
        "handled_total": 4,
    }
    assert value("failed_total", "ordered") == 1
    assert value("parked_total", "ordered") == 1
    assert value("restarts_total", "ordered") == 0
    assert value("lag_records", "ordered") == 1
    assert value("lag_seconds", "ordered") > 0
    assert (value("up", "shared"), value("handled_total", "shared")) == (0, 6)
    assert len(found["tidemill_worker_parked_total"].samples) == 2
    assert len(found["tidemill_worker_rejected_total"].samples) == 1


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_run_workers_serves_metrics(db: Tidemill) -> None:
    db.produce("served", "x")
    address = _free_address()
    found: list[dict[str, Family]] = []

    def read() -> None:
        found.append(_read(address))
        os.kill(os.getpid(), signal.SIGTERM)

    worker = db.worker("served", "served", lambda _: threading.Thread(target=read).start(), ordered=True)
    run_workers(worker, metrics=address)
    assert found[0]["tidemill_worker_up"].value(worker="served", topic="served") == 1


async def test_an_awaited_worker_serves_metrics(db: Tidemill) -> None:
    address = _free_address()
    found: list[dict[str, Family]] = []
    async with await tidemill.connect_async(db.bootstrap_servers) as connected:
        await connected.produce("awaited", "x")

        async def handle(record: Any) -> None:
            found.append(await asyncio.to_thread(_read, address))
            await worker.stop()

        worker = connected.worker("awaited", "awaited", handle)
        await worker.run(metrics=address)
    assert found[0]["tidemill_worker_running_handlers"].value(worker="awaited", topic="awaited") == 1


def test_an_address_that_is_none_or_is_taken_is_refused(db: Tidemill) -> None:
    with pytest.raises(ConfigError, match="the address of the metrics, 'here', is not host:port"):
        MetricsServer(list, "here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot serve metrics on .*take another with --metrics"):
            MetricsServer(list, address)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_an_address_that_other_machines_reach_needs_permission(db: Tidemill, host: str) -> None:
    worker = db.worker("exposed", "exposed", lambda _: None, ordered=True)
    with pytest.raises(ConfigError, match=r"refused to serve metrics on .*--allow-unauthenticated"):
        run_workers(worker, metrics=f"{host}:0")
    with pytest.raises(ConfigError, match="refused to serve metrics"):
        worker.run(metrics=f"{host}:0")


def test_with_permission_other_machines_can_read_them() -> None:
    with (
        MetricsServer(list, "0.0.0.0:0", allow_unauthenticated=True) as server,
        urllib.request.urlopen(f"http://127.0.0.1:{server.address.port}/metrics", timeout=120) as page,
    ):
        assert page.status == 200
