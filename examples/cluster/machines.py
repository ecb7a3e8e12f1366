"""The machines of the example: an etcd and three nodes, each a process of its own on this computer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 180.0
STOP_SECONDS = 120.0


class CannotStart(Exception):
    """A program did not come up; the message says where it wrote why."""


class Etcd:
    """One etcd, which keeps the cluster's metadata. Real clusters run three of them, on three machines."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("etcd")
        if program is None:
            raise CannotStart("there is no etcd here; install it with: apt-get install etcd-server")
        directory.mkdir(parents=True)
        self.log = directory / "etcd.log"
        client, peer = f"http://{HOST}:{free_port()}", f"http://{HOST}:{free_port()}"
        command = [program, "--name=one", f"--data-dir={directory / 'data'}", "--logger=zap"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster=one={peer}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.url = client.replace("http://", "etcd://")
        self._health = f"{client}/health"

    def wait(self) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._health, timeout=5) as answer:
                if json.load(answer)["health"] == "true":
                    return
            time.sleep(0.05)
        raise CannotStart(f"etcd does not answer; its log is {self.log}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Node:
    """A node of the cluster: ``tidemill up --cluster``."""

    def __init__(self, name: str, directory: Path, etcd: str, cluster: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = directory / f"{name}.log"
        self.address = f"{HOST}:{free_port()}"
        self._command = [sys.executable, "-m", "tidemill", "up", "--format", "json"]
        self._command += ["--cluster", etcd, "--name", name, "--data", str(directory / name)]
        self._command += ["--listen", self.address, "--cluster-listen", f"{HOST}:0", "--http", ""]
        self._command += ["--set", f"cluster_name={cluster}"]
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self.node_id = 0

    def start(self) -> None:
        """Start the process; ``wait`` for it afterwards."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is for the example, which then stops the nodes.
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when the node says that it is ready."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotStart(f"node {self.name} did not start; its log is {self.log}")
        ready = json.loads(line)
        self._pid, self.node_id = ready["pid"], ready["node_id"]

    def kill(self) -> None:
        """kill -9. The process that was started is the node's supervisor, and sees it die."""
        os.kill(self._pid, signal.SIGKILL)
        self._ended()

    def stop(self) -> None:
        """Stop in an orderly way, if it runs."""
        if self._process is not None:
            self._process.terminate()
            self._ended()

    def _ended(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        # Reads what it says at its end, and closes the pipe.
        process.communicate(timeout=STOP_SECONDS)


def free_port() -> int:
    """A port for a server that is killed and comes back: below those that outgoing connections are given."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as bound:
            bound.bind((HOST, port))
            return port
