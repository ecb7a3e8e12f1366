"""A node inside this process, on a thread of its own: ``tidemill.open``.

A node that nobody closes is stopped in an orderly way when the program ends, and an ephemeral one takes its
directory along. That must happen while Python still lets threads be started, which the node does until its
end: before ``concurrent.futures`` ends its workers, and so before ``atexit``.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - has its own end noted before the nodes', which go first
import contextlib
import difflib
import logging
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

import uvloop

from tidemill.client.arguments import shown
from tidemill.client.sync_client import Tidemill
from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.values import Address, parse_address
from tidemill.embedded.ephemeral_directory import EphemeralDirectory
from tidemill.embedded.keywords import SettingKeywords
from tidemill.errors import ConfigError
from tidemill.server.node import Node
from tidemill.server.running import run_until

__all__ = ("EmbeddedNode", "open_node")

_log = logging.getLogger(__name__)
#: Names that settings and the command line have for what ``open_node`` takes as ``path``.
_PATH_NAMES = ("data", "data_dir")
_PATH_HINT = "the data directory is the first argument, path"


class EmbeddedNode(Tidemill):
    """A running node, and a connection to it.

    Use it in a ``with`` statement, or call ``close`` yourself; otherwise it is closed when the program ends.

    >>> import tidemill
    >>> with tidemill.open() as node:
    ...     node.bootstrap_servers.startswith("127.0.0.1:")
    True
    """

    def __init__(self, settings: Settings, ephemeral: EphemeralDirectory | None) -> None:
        super().__init__("")
        self._settings = settings
        self._ephemeral = ephemeral
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._node = Node(settings)
        self._node_thread = threading.Thread(target=self._run_node, name="tidemill-node", daemon=True)
        _open_nodes.add(self)
        self._node_thread.start()
        # Without a limit: reading large logs after a crash takes as long as it takes.
        self._started.wait()
        self._raise_failure()

    @property
    def bootstrap_servers(self) -> str:
        """What a Kafka client takes as ``bootstrap.servers``."""
        return str(self._node.broker.advertised)

    @property
    def http_url(self) -> str | None:
        """The address of health and metrics; None if they are not served."""
        address = self._node.http_address
        return None if address is None else f"http://{address}"

    @property
    def data_dir(self) -> Path:
        return self._settings.data_dir

    def close(self) -> None:
        """Stop in an orderly way. Closing twice is fine.

        A forked process stops nothing: the node is its parent's.
        """
        if not self._process.is_this:
            return
        try:
            super().close()
        finally:
            if self._node_thread.is_alive() and self._loop is not None and self._stop is not None:
                # The loop may just have ended by itself.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._stop.set)
                self._node_thread.join()
            self._remove_ephemeral()
            _open_nodes.discard(self)
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise, in the caller's thread, the error that ended the node's thread."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._node_thread.join()
            self._remove_ephemeral()
            _open_nodes.discard(self)
            raise failure

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return f"<tidemill node at {self.bootstrap_servers}, data in {self.data_dir}{closed}>"

    def _run_node(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as failure:  # noqa: BLE001 - raised again in the caller's thread
            self._failure = failure
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        await run_until(self._node, self._stop, self._started.set)

    def _remove_ephemeral(self) -> None:
        if self._ephemeral is not None:
            self._ephemeral.remove()


#: Nodes that nobody has closed yet: they are closed when the program ends.
_open_nodes: set[EmbeddedNode] = set()


def _close_open_nodes() -> None:
    for node in list(_open_nodes):
        try:
            node.close()
        except Exception:  # noqa: BLE001 - the other nodes are closed all the same
            _log.exception("%r did not stop in an orderly way when the program ended", node)


# Python has no public name for "before the workers end"; without it, this is as early as programs can have.
getattr(threading, "_register_atexit", atexit.register)(_close_open_nodes)


def open_node(
    path: str | Path | None = None,
    *,
    listen: str = "127.0.0.1:0",
    http: str | None = None,
    **settings: Unpack[SettingKeywords],
) -> EmbeddedNode:
    """Run a node inside this process.

    ``path`` is the data directory; without it the node is ephemeral: its data goes when it is closed, or when
    the program ends. It listens on a free port unless ``listen`` says otherwise; ``http``
    (``"127.0.0.1:0"``, say) adds health and metrics. Addresses that other machines can reach need
    ``allow_unauthenticated=True``: there is no authentication yet. Further keyword arguments are settings;
    ``tidemill settings`` lists them with their defaults.

    >>> import tidemill
    >>> with tidemill.open(auto_create_topics=False, kv_block_cache_bytes="64 MiB") as node:
    ...     ":" in node.bootstrap_servers
    True
    """
    chosen = Settings(
        data_dir=_data_dir(path),
        listen=_address("listen", listen),
        http=_address("http", http) if http else None,
        # A reserve keeps data readable on a full disk; ephemeral data is removed with the node anyway.
        **_read({"disk_reserve_bytes": 0, **settings} if path is None else settings),
    )
    if path is not None:
        return EmbeddedNode(chosen, None)
    # Made last, so that settings that are refused leave nothing behind.
    ephemeral = EphemeralDirectory()
    return EmbeddedNode(replace(chosen, data_dir=ephemeral.data_dir), ephemeral)


def _data_dir(path: Any) -> Path:
    try:
        return Path(path or "")
    except TypeError as error:
        raise ConfigError(f"path is the data directory, as text or a path, not {shown(path)}") from error


def _read(settings: Mapping[str, object]) -> dict[str, Any]:
    """The values of settings, which may be given as text, as in the config file."""
    _check_names(settings)
    infos = {info.name: info for info in SETTINGS}
    return {
        # The defaults of topics are no row of the table; ``Settings`` checks them.
        name: infos[name].read(value, "tidemill.open") if name in infos else value
        for name, value in settings.items()
    }


def _check_names(settings: Mapping[str, object]) -> None:
    known = {field.name for field in fields(Settings)}.difference(_PATH_NAMES)
    for name in settings.keys() - known:
        if name in _PATH_NAMES:
            hint = _PATH_HINT
        elif close := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
            hint = f"did you mean {close[0]}?"
        else:
            hint = "'tidemill settings' lists those that there are"
        raise ConfigError(f"tidemill.open has no setting {name!r}: {hint}")


def _address(setting: str, text: Any) -> Address:
    try:
        return parse_address(text if isinstance(text, str) else "")
    except ValueError as error:
        raise ConfigError(f"setting {setting} cannot be {text!r}: give it as {error}") from error
