"""``tidemill cluster upgrade`` with a real node and a real etcd: nothing of the node's data is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.processes import NodeProcess, process_environment

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def tidemill(*arguments: str, send: str = "", exit_code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", *arguments],
        input=send,
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment(),
    )
    assert done.returncode == exit_code, (done.stdout, done.stderr)
    return done.stdout if exit_code == 0 else done.stderr


def as_json(*arguments: str) -> Any:
    return json.loads(tidemill("--format", "json", *arguments))


def test_a_node_goes_on_in_a_cluster_with_all_its_data(etcd: EtcdServer, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with NodeProcess(data) as node:
        server = ("--server", node.bootstrap_servers)
        tidemill("topic", "create", "words", "--partitions", "3", "-c", "retention.ms=123456789", *server)
        tidemill("topic", "produce", "words", *server, send="one\ntwo\nthree\n")
        before = as_json("topic", "describe", "words", *server)
        refused = tidemill("cluster", "upgrade", "--data", str(data), "--cluster", etcd.url, exit_code=1)
        assert "is in use by process" in refused
    done = as_json("cluster", "upgrade", "--data", str(data), "--cluster", etcd.url)
    assert (done["node_id"], done["node_name"]) == (1, "node-1")
    assert Path(done["kept"]).exists()
    with pytest.raises(RuntimeError, match=r"start it with --cluster etcd://\.\.\. --name node-1"):
        NodeProcess(data).start()
    settings = {"cluster": etcd.url, "cluster_listen": "127.0.0.1:0"}
    with NodeProcess(data, **settings) as node:
        server = ("--server", node.bootstrap_servers)
        after = as_json("topic", "describe", "words", *server)
        assert after["topic_id"] == before["topic_id"]
        assert after["configs"] == before["configs"]
        assert [each["end_offset"] for each in after["partitions"]] == [
            each["end_offset"] for each in before["partitions"]
        ]
        read = tidemill("topic", "consume", "words", "--exit", *server)
        assert sorted(read.split()) == ["one", "three", "two"]
        tidemill("topic", "produce", "words", *server, send="four\n")
    again = tidemill("cluster", "upgrade", "--data", str(data), "--cluster", etcd.url, exit_code=1)
    assert f"--name node-1 --data {data}" in again


def test_a_cluster_that_is_there_already_is_not_overwritten(etcd: EtcdServer, tmp_path: Path) -> None:
    settings = {"cluster": etcd.url, "cluster_listen": "127.0.0.1:0", "cluster_name": "other"}
    with NodeProcess(tmp_path / "first", **settings), NodeProcess(tmp_path / "alone") as alone:
        alone.stop()
        options = ("--data", str(tmp_path / "alone"), "--cluster", etcd.url, "--set", "cluster_name=other")
        refused = tidemill("cluster", "upgrade", *options, exit_code=1)
        assert "nothing was changed" in refused
        # It still starts on its own.
        with alone:
            alone.readiness()


def test_what_does_not_exist_is_told(etcd: EtcdServer, tmp_path: Path) -> None:
    missing = ("--data", str(tmp_path / "no"), "--cluster", etcd.url)
    assert "there is no data directory" in tidemill("cluster", "upgrade", *missing, exit_code=1)
    assert not (tmp_path / "no").exists()
    assert "name the etcd" in tidemill("cluster", "upgrade", "--data", str(tmp_path), exit_code=2)
