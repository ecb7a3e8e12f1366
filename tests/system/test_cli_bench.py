"""``tidemill bench`` against a real node: it tells rates, and whether every record is there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill

_DEADLINE_SECONDS = 240


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with tidemill.open() as node:
        yield node.bootstrap_servers


def bench(server: str, *arguments: str, exit_code: int = 0) -> Any:
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", "bench", *arguments, "--server", server, "--format", "json"],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        env=os.environ | {"PYTHONPATH": str(src)},
    )
    assert done.returncode == exit_code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("acks", ["all", "1", "0"])
def test_produced_records_are_read_back_once_and_in_order(server: str, acks: str) -> None:
    found = bench(server, "produce", f"acks-{acks}", "-n", "3000", "-s", "100", "--acks", acks, "-p", "3")
    assert (found["records"], found["bytes"]) == (3000, 300_000)
    assert found["check"] == {"found": 3000, "missing": 0, "repeated": 0, "whole": True}
    assert set(found["latency_ms"]) == {"p50", "p90", "p99", "p99.9"}


def test_a_rate_and_a_codec_are_kept(server: str) -> None:
    found = bench(server, "produce", "slow", "-n", "300", "--rate", "300", "-z", "zstd")
    assert found["seconds"] >= 0.9, "three hundred records at 300 a second take a second"
    assert found["check"]["whole"]


def test_a_second_run_into_the_same_topic_checks_its_own_records_only(server: str) -> None:
    for _ in range(2):
        assert bench(server, "produce", "twice", "-n", "500")["check"]["found"] == 500
    assert bench(server, "consume", "twice")["records"] == 1000


def test_consume_stops_after_so_many(server: str) -> None:
    bench(server, "produce", "many", "-n", "2000", "--no-check", "-p", "1")
    assert bench(server, "consume", "many", "-n", "50")["records"] == 50
