"""``tidemill up --cluster`` with a real etcd: the death of a node's process is known at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.processes import process_environment, wait_until
from tidemill.control.records import NodeConfigsRecord, encode
from tidemill.control.stores.etcd import EtcdStore
from tidemill.control.stores.etcd_channel import EtcdSettings
from tidemill.control.stores.etcd_url import parse_etcd_url
from tidemill.control.stores.store import Put, Txn

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

#: Longer than any test: a session that ends before was ended by somebody.
_LEASE_MS = 600_000


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


class Up:
    """``tidemill up --cluster`` as an operator starts it."""

    def __init__(self, etcd: EtcdServer, directory: Path, cluster: str) -> None:
        command = [sys.executable, "-m", "tidemill.cli", "up", "--format", "json", "--cluster", etcd.url]
        command += ["--data", str(directory / "data"), "--http", ""]
        command += ["--listen", "127.0.0.1:0", "--cluster-listen", "127.0.0.1:0"]
        command += ["--set", f"cluster_name={cluster}", "--set", f"session_timeout_ms={_LEASE_MS}"]
        command += ["--set", "disk_reserve_bytes=1048576"]
        self.errors = directory / "errors"
        with self.errors.open("ab") as errors:
            self.popen = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=process_environment()
            )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.errors.read_text()
        #: The node itself; ``popen`` is its supervisor.
        self.node_pid: int = json.loads(line)["pid"]

    def close(self) -> None:
        for pid in (self.node_pid, self.popen.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.communicate()


def sessions(etcd: EtcdServer, cluster: str) -> set[str]:
    """The keys of the nodes that count as live."""

    async def read() -> set[str]:
        store = EtcdStore(EtcdSettings(parse_etcd_url(etcd.url)), f"tidemill/{cluster}/")
        try:
            return set((await store.read("alive/")).entries)
        finally:
            await store.close()

    return asyncio.run(read())


def test_a_killed_node_is_dead_to_the_cluster_long_before_its_lease_is_over(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    up = Up(etcd, tmp_path, "killed")
    try:
        assert sessions(etcd, "killed") == {"alive/1"}
        os.kill(up.node_pid, signal.SIGKILL)
        assert up.popen.wait(120) == 128 + signal.SIGKILL
        assert sessions(etcd, "killed") == set()
    finally:
        up.close()


async def change(etcd: EtcdServer) -> int:
    """Write something; gives the revision."""
    store = EtcdStore(EtcdSettings(parse_etcd_url(etcd.url)), "tidemill/restored/")
    try:
        put = Put("configs/cluster", encode(NodeConfigsRecord(configs={})))
        return await store.commit(Txn(puts=(put,)))
    finally:
        await store.close()


def test_a_killed_nodes_lease_is_left_alone_in_an_etcd_that_was_restored_meanwhile(tmp_path: Path) -> None:
    def seen_revision() -> int:
        return int(json.loads((tmp_path / "data" / "cluster-identity.json").read_text())["seen_revision"])

    with EtcdServer(tmp_path / "etcd") as etcd:
        up = Up(etcd, tmp_path, "restored")
        try:
            copy = etcd.copy_data()
            revision = asyncio.run(change(etcd))
            wait_until(lambda: seen_revision() >= revision, "the node has noted the change")
            # It is not to notice by itself.
            os.kill(up.node_pid, signal.SIGSTOP)
            etcd.kill()
            etcd.restart(put_back=copy)
            os.kill(up.node_pid, signal.SIGKILL)
            assert up.popen.wait(120) == 128 + signal.SIGKILL
            assert sessions(etcd, "restored") == {"alive/1"}
        finally:
            up.close()


def test_a_stop_is_orderly_and_exits_with_0(etcd: EtcdServer, tmp_path: Path) -> None:
    up = Up(etcd, tmp_path, "stopped")
    try:
        up.popen.send_signal(signal.SIGTERM)
        output, _ = up.popen.communicate(timeout=120)
        assert json.loads(output.splitlines()[-1]) == {"event": "stopped"}
        assert up.popen.returncode == 0
        assert sessions(etcd, "stopped") == set()
        assert (tmp_path / "data" / "clean-stop").exists()
    finally:
        up.close()


def test_a_node_whose_supervisor_was_killed_stops_in_an_orderly_way(etcd: EtcdServer, tmp_path: Path) -> None:
    up = Up(etcd, tmp_path, "alone")
    try:
        up.popen.kill()
        wait_until((tmp_path / "data" / "clean-stop").exists, "the node has stopped")
        wait_until(lambda: sessions(etcd, "alone") == set(), "its session is over")
    finally:
        up.close()


def test_when_both_processes_are_killed_the_lease_decides(etcd: EtcdServer, tmp_path: Path) -> None:
    up = Up(etcd, tmp_path, "both")
    try:
        # Stopped first, so that neither sees the other's death.
        up.popen.send_signal(signal.SIGSTOP)
        os.kill(up.node_pid, signal.SIGKILL)
        up.popen.kill()
        up.popen.wait()
        assert sessions(etcd, "both") == {"alive/1"}
    finally:
        up.close()
