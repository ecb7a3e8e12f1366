"""Peers that a node is compared with: librdkafka's mock cluster, a bare socket, disk and interpreter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from bench.processes import ROOT, child_environment

__all__ = (
    "MockCluster",
    "bare_import_seconds",
    "disk_mb_per_second",
    "stream_files",
    "synced_writes_ms",
    "touch_memory",
)

_SOCKET_BUFFER_BYTES = 1 << 20
# Some extension modules register names that only they themselves can import, hence the except. The exit is
# sudden because a node, too, is not timed while it tidies up.
_BARE_IMPORT = """
import importlib, os, sys
sys.modules["hypothesis"] = None
for name in {modules}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
os._exit(0)
"""


class MockCluster:
    """librdkafka's built-in cluster of one broker, in a process of its own.

    It keeps the last 5 MB of each partition in memory, checks nothing and writes nothing.
    """

    def __init__(self, work: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers", "mock"],
            cwd=ROOT,
            env=child_environment(work),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.bootstrap_servers = self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> MockCluster:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _serve_mock() -> None:
    from confluent_kafka import Producer

    owner = Producer({"test.mock.num.brokers": 1})
    (broker,) = owner.list_topics(timeout=30).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    sys.stdin.read()


def stream_files(files: Sequence[str]) -> dict[str, float]:
    """Send the files' bytes from one process to another through a loopback socket, with sendfile.

    That is the least that has to be done to bring these bytes to a reader: no request, no offset, no record.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            _send(files, server.getsockname()[1])
            os._exit(0)
        receiver, _ = server.accept()
        started, received = time.perf_counter(), 0
        buffer = bytearray(_SOCKET_BUFFER_BYTES)
        while count := receiver.recv_into(buffer):
            received += count
        seconds = time.perf_counter() - started
        os.waitpid(child, 0)
        usage = os.times()
    return {
        "seconds": seconds,
        "bytes": received,
        "sender_cpu_seconds": usage.children_user + usage.children_system,
    }


def _send(files: Sequence[str], port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sender:
        for name in files:
            with Path(name).open("rb") as source:
                sender.sendfile(source)


def touch_memory(directory: Path, size: int) -> None:
    """Fill ``size`` bytes of page cache and give them back.

    In a virtual machine the host hands out memory at its first touch, which may take several times as long as
    writing to it. Pages that were in use just before are there, as in a machine that has run for a while.
    """
    path = directory / "touched"
    chunk = bytes(_SOCKET_BUFFER_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(chunk)):
            file.write(chunk)
    path.unlink()


def disk_mb_per_second(directory: Path, chunk_bytes: int, seconds: float) -> float:
    """Megabytes per second of ``write`` and ``fdatasync`` of chunk after chunk at the end of a file."""
    path = directory / "bare-chunks"
    data = os.urandom(chunk_bytes)
    written, started = 0, time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while time.perf_counter() - started < seconds:
            written += file.write(data)
            os.fdatasync(file.fileno())
    elapsed = time.perf_counter() - started
    path.unlink()
    return written / 1e6 / elapsed


def synced_writes_ms(directory: Path, record_bytes: int, rate: int, seconds: float) -> list[float]:
    """Milliseconds of ``write`` and ``fdatasync`` of one record at the end of a file, at a fixed rate."""
    path = directory / "bare-writes"
    data = b"x" * record_bytes
    found = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        started = time.perf_counter()
        for number in range(int(rate * seconds)):
            wait = started + number / rate - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            begun = time.perf_counter()
            os.write(descriptor, data)
            os.fdatasync(descriptor)
            found.append((time.perf_counter() - begun) * 1000)
            if begun - started > seconds:
                break
    finally:
        os.close(descriptor)
        path.unlink()
    return found


def bare_import_seconds(work: Path, modules: Sequence[str]) -> float:
    """The lifetime of an interpreter that only imports these modules."""
    script = work / "bare_import.py"
    script.write_text(_BARE_IMPORT.format(modules=list(modules)))
    started = time.perf_counter()
    subprocess.run([sys.executable, str(script)], env=child_environment(work), check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1] == "mock":
        _serve_mock()
    else:
        print(json.dumps(stream_files(**json.loads(sys.argv[2]))))
