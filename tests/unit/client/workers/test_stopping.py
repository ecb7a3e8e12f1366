"""Signals stop workers, whenever they come."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import tidemill
from tidemill import Ordered, run_workers
from tidemill.client.admin.topics import create_topic
from tidemill.client.sync_client import Tidemill
from tidemill.client.workers.stopping import StopSignals
from tidemill.errors import ConfigError

_numbers = itertools.count()


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as opened:
        yield opened


@pytest.fixture
def topic(db: Tidemill) -> str:
    made = f"topic-{next(_numbers)}"
    db.run(create_topic(db._awaited.cluster, made, partitions=1))
    return made


class _AtLine(logging.Handler):
    """Sends this process SIGTERM when a worker logs something with these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def sigterm_at(request: pytest.FixtureRequest) -> Any:
    log = logging.getLogger("tidemill.worker")
    before = log.level

    def send(words: str) -> None:
        handler = _AtLine(words)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        request.addfinalizer(partial(log.removeHandler, handler))
        request.addfinalizer(partial(log.setLevel, before))

    return send


def _run_with_signal_at(number: int, run: Any) -> bool:
    """Have SIGTERM handled at the n-th thing that the main thread does in ``run``; whether it got so far."""
    left = number

    def profile(frame: Any, event: str, what: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return left <= 0


def test_a_signal_at_any_moment_of_a_wait_ends_it() -> None:
    def wait() -> None:
        while not stopping.wait(0.001):
            pass

    for number in range(1, 40):
        with StopSignals() as stopping:
            assert _run_with_signal_at(number, wait)


def test_a_second_signal_interrupts() -> None:
    with StopSignals() as stopping:
        signal.raise_signal(signal.SIGTERM)
        assert stopping.wait()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopSignals(second_interrupts=False) as stopping:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.wait()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_signal_ends_workers_that_run(db: Tidemill, topic: str, ordered: bool) -> None:
    def handle(record: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    first = db.worker(f"{topic}-first", topic, handle, ordered=ordered)
    second = db.worker(f"{topic}-second", topic, lambda record: None, ordered=ordered)
    db.produce(topic, "x")
    run_workers(first, second)
    assert not first.is_running
    assert not second.is_running


def test_an_error_of_one_worker_ends_all_and_is_raised_when_they_have_stopped(
    db: Tidemill, topic: str
) -> None:
    fine = db.worker(f"{topic}-fine", topic, lambda record: None, ordered=True)
    failing = db.worker(f"{topic}-failing", topic, print, ordered=Ordered(own=[5]))
    with pytest.raises(ConfigError, match="has 1 partition, numbered from 0: there is no partition 5"):
        run_workers(failing, fine)
    assert not fine.is_running


def test_a_signal_ends_a_worker_that_waits_for_anothers_lease(
    db: Tidemill, topic: str, sigterm_at: Any
) -> None:
    sigterm_at("started on cursor")
    # It would wait for ten minutes.
    options = Ordered(lease_ms=600_000)
    with db.cursor(topic, topic, lease_ms=600_000) as owner:
        worker = db.worker(topic, topic, print, ordered=options)
        run_workers(worker)
        assert not worker.is_running
        owner.commit()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_signal_ends_a_worker_whose_nodes_cannot_be_reached(sigterm_at: Any, ordered: bool) -> None:
    with tidemill.open() as node:
        db = tidemill.connect(node.bootstrap_servers)
        db.produce("tasks", "x")
    with db:
        sigterm_at("started on")
        worker = db.worker("worker", "tasks", print, ordered=ordered)
        run_workers(worker)
        assert not worker.is_running
