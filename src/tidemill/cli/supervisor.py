"""``tidemill up --cluster``: the node is a child process, and this one waits for it to die.

A node's session (a lease in etcd) says that it is live. When the process dies, the lease would go on for its
time, six seconds, and nobody else would be elected before. The supervisor knows that the process is dead, so
it revokes the lease at once.

It holds the child's process id and the number of its lease, and nothing else. Every moment counts when the
child has died, so it asks etcd by its HTTP gateway, which needs a socket and no library. Where that does not
do (TLS, a password, a gateway that is switched off) it loads what a node uses.

Nothing may be written to an etcd that has lost data or was restored from an older copy, and that one may have
a lease of the same number. So it first asks for the key that the node has noted in its data directory, as the
node itself does when it starts (``joining.check_seen``). If etcd has another history, or nothing is noted,
the lease is left alone and ends by itself.

Both processes hold one end of a socket. The node writes the number of its lease to it whenever that changes,
and 0 when it has given up the lease by itself. When the supervisor is killed, the node reads the end of the
stream and stops in an orderly way, because nobody would look after it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tidemill.cli.session import warn

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.config.values import Address
    from tidemill.server.disk.data_directory import DirectoryIdentity

__all__ = ("LeaseReport", "revoker", "supervise")

_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM)
_RECEIVE_BYTES: Final = 4096
_HTTP_SECONDS: Final = 2.0


class LeaseReport:
    """The node's end of the socket to its supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection

    def fileno(self) -> int:
        """The socket's descriptor, which becomes readable when the supervisor is gone: it never writes."""
        return self._connection.fileno()

    def tell(self, lease_id: int) -> None:
        """Tell the supervisor which lease to revoke when this process dies; 0: none."""
        try:
            self._connection.send(b"%d\n" % lease_id)
        except OSError:
            # It is gone: then nobody revokes, and the lease ends by itself.
            return


def supervise(revoke: Callable[[int], None]) -> LeaseReport:
    """Fork. Returns in the child, which is to be the node; the parent ends with the child's exit code.

    ``revoke`` is called in the parent with the lease that the dead child has held. Call this before threads
    are started and before anything large is imported.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes between fork and the handlers must reach the child, too.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        ours.close()
        # A terminal sends Ctrl-C to a whole group. The child is to get it once: from its parent.
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return LeaseReport(theirs)
    theirs.close()
    sys.exit(_wait(child, ours, revoke))


def _wait(child: int, connection: socket.socket, revoke: Callable[[int], None]) -> int:
    """Wait for the child and end its lease; returns the exit code to end with."""
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: _forward(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    lease_id = _last_number(connection)
    # The stream may end a little before the process: only a process that is gone serves nobody.
    _, status = os.waitpid(child, 0)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(status)
    if lease_id:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        warn(f"the node's process {child} {how}; its session is ended, so that other nodes take over at once")
        revoke(lease_id)
    return 128 - code if code < 0 else code


def _forward(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return


def _last_number(connection: socket.socket) -> int:
    """Read numbers, one per line, until the other end is closed; returns the last one, or 0."""
    rest, last = b"", 0
    while received := connection.recv(_RECEIVE_BYTES):
        *lines, rest = (rest + received).split(b"\n")
        if lines:
            last = int(lines[-1])
    return last


def revoker(settings: Settings) -> Callable[[int], None]:
    """Revokes a lease in the etcd that the settings name; loads what it needs when it is called."""

    def revoke(lease_id: int) -> None:
        from tidemill.errors import TidemillError

        try:
            identity = _identity(settings)
            if not _revoke_by_http(settings, identity, lease_id):
                _revoke_by_store(settings, identity, lease_id)
        except (TidemillError, ValueError) as error:
            warn(f"the session could not be ended, it ends by itself in a few seconds: {error}")

    return revoke


def _identity(settings: Settings) -> DirectoryIdentity:
    """What the node has noted of the metadata that it has seen. Raises ``TidemillError`` if it has not."""
    from tidemill.errors import TidemillError
    from tidemill.server.disk.data_directory import DataDirectory

    identity = DataDirectory(settings.data_dir).read_identity()
    if identity is None or not identity.seen_revision or not identity.seen_key:
        raise TidemillError("the node has not noted what it has seen of etcd")
    return identity


def _revoke_by_store(settings: Settings, identity: DirectoryIdentity, lease_id: int) -> None:
    """Revoke a lease as a node does. Raises ``TidemillError``."""
    import asyncio

    from tidemill.server.cluster.etcd import open_etcd
    from tidemill.server.cluster.joining import check_seen

    async def work() -> None:
        store = open_etcd(settings)
        try:
            await check_seen(identity, store)
            await store.revoke(lease_id)
        finally:
            await store.close()

    asyncio.run(work())


def _revoke_by_http(settings: Settings, identity: DirectoryIdentity, lease_id: int) -> bool:
    """Revoke a lease by etcd's HTTP gateway. False if no endpoint has said that it is done.

    An endpoint that does not say that it has the node's history is asked for nothing else.
    """
    from tidemill.control.stores.etcd_url import metadata_prefix, parse_etcd_url

    if settings.cluster is None or settings.etcd_tls_ca is not None or settings.etcd_user is not None:
        return False
    key = base64.b64encode(f"{metadata_prefix(settings.cluster_name)}{identity.seen_key}".encode()).decode()
    seen = {"key": key, "revision": str(identity.seen_revision), "keys_only": True}
    for endpoint in parse_etcd_url(settings.cluster):
        try:
            found = _ask(endpoint, "kv/range", seen).get("kvs")
            if not found or int(found[0]["mod_revision"]) != identity.seen_key_revision:
                return False
            _ask(endpoint, "lease/revoke", {"ID": str(lease_id)})
        except (OSError, ValueError, LookupError):
            continue
        return True
    return False


def _ask(endpoint: Address, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What etcd's HTTP gateway answers. ``OSError`` or ``ValueError`` if that is no success."""
    content = json.dumps(body).encode()
    head = f"POST /v3/{path} HTTP/1.0\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(endpoint, _HTTP_SECONDS) as connection:
        connection.sendall(head.encode() + content)
        received = b"".join(iter(lambda: connection.recv(_RECEIVE_BYTES), b""))
    answer_head, _, answer = received.partition(b"\r\n\r\n")
    if answer_head.split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"etcd answers {received!r}")
    decoded: dict[str, Any] = json.loads(answer)
    return decoded
