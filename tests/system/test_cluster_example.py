"""``make cluster``: three nodes, one killed after the other, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.processes import process_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster"
pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), "--directory", str(directory / "work"), *arguments],
        cwd=directory,
        env=process_environment(),
        capture_output=True,
        text=True,
    )


def test_every_record_is_there_though_every_node_was_killed(tmp_path: Path) -> None:
    done = run(tmp_path, "--rate", "1000", "--seconds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every record is there." in done.stdout
    assert done.stdout.count("is killed (kill -9)") == 3
    assert done.stdout.count("longest pause of a partition") == 3
    assert done.stderr == ""


def test_an_etcd_that_runs_already_is_used_and_left_running(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        done = run(tmp_path, "--rate", "500", "--seconds", "0.5", "--etcd", etcd.url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert etcd.url in done.stdout
        assert not (tmp_path / "work" / "etcd").exists()
    assert "Every record is there." in done.stdout


def test_an_etcd_that_does_not_answer_is_told(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "etcd") as etcd:
        url = etcd.url
    done = run(tmp_path, "--etcd", url)
    assert done.returncode == 1
    assert "did not start; its log is" in done.stdout
