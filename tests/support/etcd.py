"""A real etcd of one member for tests: the ``etcd`` program on free ports of this machine.

``has_etcd`` says whether the program is there. ``start`` returns when etcd has answered that it is healthy;
the ports stay the same over ``kill`` and ``restart``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from pathlib import Path
from types import TracebackType

import grpc
from aetcd import rpc

from support.ports import free_ports
from support.processes import wait_until

__all__ = ("NO_ETCD", "EtcdServer", "has_etcd", "make_certificates")

NO_ETCD = "there is no etcd program here; install it with: apt-get install etcd-server"

_START_ATTEMPTS = 5
_POLL_SECONDS = 0.02


def has_etcd() -> bool:
    return shutil.which("etcd") is not None


class EtcdServer:
    """One etcd process with its own directory. With ``tls`` it wants a client certificate, too."""

    def __init__(self, directory: Path, *, tls: bool = False) -> None:
        self.directory = directory
        self.tls = tls
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_path = directory / "etcd.log"
        directory.mkdir(parents=True, exist_ok=True)
        if tls:
            make_certificates(directory)
        self._choose_ports()

    @property
    def endpoints(self) -> str:
        """Where clients connect: ``host:port``."""
        return f"127.0.0.1:{self._client_port}"

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._client_port

    @property
    def running(self) -> bool:
        return self._popen is not None

    @property
    def url(self) -> str:
        return f"etcd://{self.endpoints}"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.crt"

    @property
    def cert_file(self) -> Path:
        return self.directory / "client.crt"

    @property
    def key_file(self) -> Path:
        return self.directory / "client.key"

    def start(self) -> EtcdServer:
        """Start, and return when it is healthy. Other ports are taken if somebody was faster."""
        for _ in range(_START_ATTEMPTS):
            self._launch()
            try:
                self._wait_until_healthy()
            except _PortTaken:
                self._choose_ports()
                continue
            return self
        raise RuntimeError(f"etcd found no free port\n{self.log_text()}")

    def restart(self, *, lose_data: bool = False, put_back: Path | None = None) -> None:
        """Start again on the same ports, after ``kill``; with a copy of ``copy_data``, if one is named."""
        if lose_data or put_back is not None:
            shutil.rmtree(self.directory / "data")
        if put_back is not None:
            shutil.copytree(put_back, self.directory / "data")
        self._launch()
        self._wait_until_healthy()

    def kill(self) -> None:
        """kill -9. Works on a paused process, too."""
        process, self._popen = self._running(), None
        process.kill()
        process.wait()

    def copy_data(self) -> Path:
        """A copy of what it has, as a backup would be. It is killed for that, and started again."""
        self.kill()
        copy = self.directory / f"copy-{len(list(self.directory.glob('copy-*')))}"
        shutil.copytree(self.directory / "data", copy)
        self.restart()
        return copy

    def pause(self) -> None:
        """Let the process hang: connections stay open and nothing is answered."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        # Until it has stopped it may still answer.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def log_text(self) -> str:
        return self._log_path.read_text(errors="replace")[-10_000:]

    async def enable_authentication(self, prefix: str) -> None:
        """Users root and node with password "right"; node may use the keys below the prefix."""
        async with self._channel() as channel:
            auth = rpc.AuthStub(channel)
            for name in ("root", "node"):
                await auth.UserAdd(rpc.AuthUserAddRequest(name=name, password="right"))
                await auth.RoleAdd(rpc.AuthRoleAddRequest(name=name))
                await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=name, role=name))
            end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            permission = rpc.Permission(
                permType=rpc.Permission.READWRITE, key=prefix.encode(), range_end=end.encode()
            )
            await auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="node", perm=permission))
            await auth.AuthEnable(rpc.AuthEnableRequest())

    def _channel(self) -> grpc.aio.Channel:
        if not self.tls:
            return grpc.aio.insecure_channel(self.endpoints)
        ca, key, cert = (path.read_bytes() for path in (self.ca_file, self.key_file, self.cert_file))
        return grpc.aio.secure_channel(self.endpoints, grpc.ssl_channel_credentials(ca, key, cert))

    async def outlast(self, lease_id: int) -> None:
        """Return when the lease has expired."""
        async with grpc.aio.insecure_channel(self.endpoints) as channel:
            request = rpc.LeaseTimeToLiveRequest(ID=lease_id)
            async with asyncio.timeout(120):
                while (await rpc.LeaseStub(channel).LeaseTimeToLive(request)).TTL != -1:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)  # only asking shows it

    async def revoke_leases(self) -> None:
        """End all leases, so that none that a test has left raises the revision in the middle of another."""
        async with grpc.aio.insecure_channel(self.endpoints) as channel:
            stub = rpc.LeaseStub(channel)
            for lease in (await stub.LeaseLeases(rpc.LeaseLeasesRequest())).leases:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.LeaseRevoke(rpc.LeaseRevokeRequest(ID=lease.ID))

    def _launch(self) -> None:
        assert self._popen is None, "it runs already"
        scheme = "https" if self.tls else "http"
        client, peer = f"{scheme}://{self.endpoints}", f"http://127.0.0.1:{self._peer_port}"
        command = ["etcd", "--name=one", f"--data-dir={self.directory / 'data'}", "--logger=zap"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        command += [f"--initial-cluster=one={peer}"]
        if self.tls:
            files = {"trusted-ca-file": "ca.crt", "cert-file": "server.crt", "key-file": "server.key"}
            command += [f"--{option}={self.directory / name}" for option, name in files.items()]
            command += ["--client-cert-auth"]
        with self._log_path.open("ab") as log:
            self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_until_healthy(self) -> None:
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=self.ca_file)
            context.load_cert_chain(self.cert_file, self.key_file)

        def is_healthy() -> bool:
            if self._running().poll() is not None:
                self._popen = None
                if "address already in use" in self.log_text():
                    raise _PortTaken
                raise RuntimeError(f"etcd ended\n{self.log_text()}")
            url = f"{'https' if self.tls else 'http'}://{self.endpoints}/health"
            try:
                with urllib.request.urlopen(url, timeout=120, context=context) as answer:
                    return bool(json.load(answer)["health"] == "true")
            except OSError:
                return False

        wait_until(is_healthy, "etcd is healthy", 120.0)

    def _choose_ports(self) -> None:
        self._client_port, self._peer_port = free_ports(2)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None, "it does not run"
        return self._popen

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._popen is not None:
            self.kill()


class _PortTaken(Exception):
    pass


def make_certificates(directory: Path) -> None:
    """Make an authority and what it signs: a certificate of the server and one of a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req", "-x509", *new_key, "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.crt"
    )  # fmt: skip
    (directory / "names.cnf").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
            "-extfile", "names.cnf", "-days", "2", "-out", f"{name}.crt",
        )  # fmt: skip
