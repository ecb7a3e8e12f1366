"""The supervisor of a node: what it does when the node's process ends, and when it is killed itself."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from tidemill.cli import supervisor
from tidemill.cli.supervisor import revoker
from tidemill.config.settings import Settings
from tidemill.server.cluster import etcd

_SRC = Path(__file__).parents[3] / "src"
_PROGRAM = """
import os, select, signal, sys
from tidemill.cli.supervisor import supervise

report = supervise(lambda lease_id: print("revoked", lease_id, flush=True))
def told(number, _):
    print("signal", number, flush=True)
    os._exit(7)
signal.signal(signal.SIGTERM, told)
"""


def start(child: str) -> subprocess.Popen[str]:
    """A supervisor whose child runs the given lines, and is killed with the test at the latest."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM + child],
        env={**os.environ, "PYTHONPATH": str(_SRC)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_newest_lease_of_a_killed_node_is_revoked() -> None:
    with start("report.tell(5); report.tell(77); os.kill(os.getpid(), signal.SIGKILL)") as parent:
        output, errors = parent.communicate()
    assert output == "revoked 77\n"
    assert "killed by signal 9" in errors
    assert parent.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("told", ["", "report.tell(5); report.tell(0); "])
def test_a_node_without_a_lease_leaves_nothing_to_revoke(told: str) -> None:
    with start(told + "os._exit(3)") as parent:
        output, errors = parent.communicate()
    assert (output, errors, parent.returncode) == ("", "", 3)


def test_a_signal_reaches_the_node_once_and_its_exit_code_is_passed_on() -> None:
    with start("print('up', flush=True); signal.pause(); signal.pause()") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(signal.SIGTERM)
        output, _ = parent.communicate()
    assert output == f"signal {signal.SIGTERM.value}\n"
    assert parent.returncode == 7


def test_a_signal_to_the_terminals_group_reaches_the_node_through_its_supervisor_only() -> None:
    with start("print(os.getpgid(0) == os.getpid(), flush=True); os._exit(0)") as parent:
        output, _ = parent.communicate()
    assert output == "True\n"


def test_a_node_notices_that_its_supervisor_was_killed() -> None:
    child = (
        "import select; print('up', flush=True); select.select([report], [], []); print('alone', flush=True)"
    )
    with start(child) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        # Its lease is told to nobody any more, which is no reason to fail.
        assert parent.stdout.readline() == "alone\n"


def test_telling_a_supervisor_that_is_gone_is_no_error() -> None:
    child = (
        "import select; print('up', flush=True); select.select([report], [], []); report.tell(1); print('on')"
    )
    with start(child) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.readline() == "on\n"


class _Gateway(socketserver.StreamRequestHandler):
    """An etcd that knows one path, and one lease."""

    def handle(self) -> None:
        request, length = self.rfile.readline(), 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if line.startswith(b"Content-Length: "):
                length = int(line.split()[1])
        is_known = request.startswith(b"POST /v3/lease/revoke ") and json.loads(self.rfile.read(length)) == {
            "ID": "77"
        }
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n{}" if is_known else b"HTTP/1.0 404 Not Found\r\n\r\n")


@pytest.mark.parametrize(("lease_id", "is_revoked"), [(77, True), (78, False)])
def test_a_lease_is_revoked_by_http_at_the_first_endpoint_that_does_it(
    lease_id: int, is_revoked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_grpc: list[int] = []
    store = SimpleNamespace(revoke=AsyncMock(side_effect=by_grpc.append), close=AsyncMock())
    monkeypatch.setattr(etcd, "open_etcd", lambda settings: store)
    monkeypatch.setattr(supervisor, "_HTTP_SECONDS", 120.0)
    with socketserver.TCPServer(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Nobody listens at the first, whose port needs a privileged process.
        cluster = f"etcd://127.0.0.1:1,127.0.0.1:{server.server_address[1]}"
        revoker(Settings(cluster=cluster))(lease_id)
        server.shutdown()
    assert by_grpc == ([] if is_revoked else [lease_id])


def test_an_etcd_with_a_password_is_not_asked_by_http(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_grpc: list[int] = []
    store = SimpleNamespace(revoke=AsyncMock(side_effect=by_grpc.append), close=AsyncMock())
    monkeypatch.setattr(etcd, "open_etcd", lambda settings: store)
    password = tmp_path / "password"
    password.write_text("x")
    revoker(Settings(cluster="etcd://127.0.0.1:1", etcd_user="u", etcd_password_file=password))(5)
    assert by_grpc == [5]
