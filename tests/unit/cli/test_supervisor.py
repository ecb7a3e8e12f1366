"""The supervisor of a node: what it does when the node's process ends, and when it is killed itself."""

from __future__ import annotations

import base64
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest

from tidemill.cli import supervisor
from tidemill.cli.supervisor import revoker
from tidemill.config.settings import Settings
from tidemill.control.stores.store import Entry, StoredKeys
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
    """An etcd that has one key, in any revision from 9 to 20, and one lease."""

    key_revision = 8
    asked: ClassVar[list[str]] = []

    def handle(self) -> None:
        request, length = self.rfile.readline(), 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if line.startswith(b"Content-Length: "):
                length = int(line.split()[1])
        path, body = request.split()[1].decode(), json.loads(self.rfile.read(length))
        self.asked.append(path)
        answer: dict[str, Any] | None = None
        if path == "/v3/lease/revoke" and body == {"ID": "77"}:
            answer = {}
        elif path == "/v3/kv/range" and 9 <= int(body["revision"]) <= 20:
            is_there = base64.b64decode(body["key"]) == b"tidemill/shop/nodes/1"
            answer = {"kvs": [{"key": body["key"], "mod_revision": f"{self.key_revision}"}] * is_there}
        if answer is None:
            self.wfile.write(b"HTTP/1.0 404 Not Found\r\n\r\n")
        else:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(answer).encode())


SEEN = {"seen_revision": 10, "seen_key": "nodes/1", "seen_key_revision": 8}


class _ByStore:
    """A store, as the supervisor opens it where HTTP does not do, that has the history of ``SEEN``."""

    def __init__(self, key_revision: int = 8) -> None:
        self.revoked: list[int] = []
        self._key_revision = key_revision

    async def read(self, prefix: str, *, revision: int | None = None) -> StoredKeys:
        assert revision is not None
        if revision > 20:
            raise ValueError("there is no such revision")
        return StoredKeys(revision, {"nodes/1": Entry(b"", self._key_revision)})

    async def revoke(self, lease_id: int) -> None:
        self.revoked.append(lease_id)

    async def close(self) -> None:
        pass


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_identity(tmp_path, **SEEN)
    return tmp_path


def write_identity(data_dir: Path, **seen: Any) -> None:
    identity = {"cluster_id": "c", "directory_id": str(UUID(int=1)), "node_name": "n1", **seen}
    (data_dir / "cluster-identity.json").write_text(json.dumps(identity))


@pytest.fixture
def by_store(monkeypatch: pytest.MonkeyPatch) -> _ByStore:
    store = _ByStore()
    monkeypatch.setattr(etcd, "open_etcd", lambda settings: store)
    return store


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an etcd of two members, one of which does not run."""
    monkeypatch.setattr(supervisor, "_HTTP_SECONDS", 120.0)
    monkeypatch.setattr(_Gateway, "asked", [])
    with socketserver.TCPServer(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # Nobody listens at the first, whose port needs a privileged process.
        yield f"etcd://127.0.0.1:1,127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(("lease_id", "is_revoked"), [(77, True), (78, False)])
def test_a_lease_is_revoked_by_http_at_the_first_endpoint_that_does_it(
    lease_id: int, is_revoked: bool, gateway: str, data_dir: Path, by_store: _ByStore
) -> None:
    revoker(Settings(cluster=gateway, cluster_name="shop", data_dir=data_dir))(lease_id)
    assert by_store.revoked == ([] if is_revoked else [lease_id])


@pytest.mark.parametrize(
    "seen",
    [
        {"seen_revision": 21},  # etcd is not there yet
        {"seen_key_revision": 9},  # it is, and has another history
        {"seen_key": "nodes/2"},
        {"seen_key": ""},  # nothing is noted
        {"seen_revision": 0},
    ],
    ids=str,
)
def test_nothing_is_revoked_in_an_etcd_that_was_restored(
    seen: dict[str, Any], gateway: str, data_dir: Path, by_store: _ByStore, capsys: pytest.CaptureFixture[str]
) -> None:
    write_identity(data_dir, **SEEN | seen)
    revoker(Settings(cluster=gateway, cluster_name="shop", data_dir=data_dir))(77)
    assert "/v3/lease/revoke" not in _Gateway.asked
    assert by_store.revoked == []
    assert "it ends by itself" in " ".join(capsys.readouterr().err.split())


def test_an_etcd_with_a_password_is_not_asked_by_http(data_dir: Path, by_store: _ByStore) -> None:
    password = data_dir / "password"
    password.write_text("x")
    revoker(
        Settings(cluster="etcd://127.0.0.1:1", etcd_user="u", etcd_password_file=password, data_dir=data_dir)
    )(5)
    assert by_store.revoked == [5]
