"""A node inside this process, on a thread of its own: ``tidemill.open``."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from tidemill.client.sync import Tidemill
from tidemill.config.settings import Settings
from tidemill.config.values import Address, parse_address
from tidemill.errors import ConfigError
from tidemill.server.node import Node
from tidemill.server.running import run_until

__all__ = ("EmbeddedNode", "open_node")


class EmbeddedNode(Tidemill):
    """A running node, and a connection to it. Use it in a ``with`` statement, or call ``close`` yourself.

    >>> import tidemill
    >>> with tidemill.open() as node:
    ...     node.bootstrap_servers.startswith("127.0.0.1:")
    True
    """

    def __init__(self, settings: Settings, ephemeral_dir: Path | None) -> None:
        super().__init__("")
        self._settings = settings
        self._ephemeral_dir = ephemeral_dir
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._node = Node(settings)
        self._node_thread = threading.Thread(target=self._run_node, name="tidemill-node", daemon=True)
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
        """Where health and metrics are served, if they are."""
        address = self._node.http_address
        return None if address is None else f"http://{address}"

    @property
    def data_dir(self) -> Path:
        return self._settings.data_dir

    def close(self) -> None:
        """Stop in an orderly way. Closing twice is fine."""
        try:
            super().close()
        finally:
            if self._node_thread.is_alive() and self._loop is not None and self._stop is not None:
                # The loop may just have ended by itself.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._stop.set)
                self._node_thread.join()
            self._remove_ephemeral()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise in the caller's thread what ended the node's."""
        failure, self._failure = self._failure, None
        if failure is not None:
            self._node_thread.join()
            self._remove_ephemeral()
            raise failure

    def __enter__(self) -> EmbeddedNode:
        return self

    def __repr__(self) -> str:
        return f"<tidemill node at {self.bootstrap_servers}, data in {self.data_dir}>"

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
        if self._ephemeral_dir is not None:
            shutil.rmtree(self._ephemeral_dir, ignore_errors=True)
            self._ephemeral_dir = None


def open_node(
    path: str | Path | None = None,
    *,
    listen: str = "127.0.0.1:0",
    http: str | None = None,
    **settings: Any,
) -> EmbeddedNode:
    """Run a node inside this process.

    ``path`` is the data directory; without it the node is ephemeral: its data goes when it is closed. It
    listens on a free port unless ``listen`` says otherwise; ``http`` (``"127.0.0.1:0"``, say) adds health and
    metrics. Further keyword arguments are settings, as in ``tidemill settings``.

    >>> import tidemill
    >>> with tidemill.open(auto_create_topics=False) as node:
    ...     ":" in node.bootstrap_servers
    True
    """
    chosen = Settings(
        data_dir=Path(path or ""),
        listen=_address("listen", listen),
        http=_address("http", http) if http else None,
        **settings,
    )
    if path is not None:
        return EmbeddedNode(chosen, None)
    # Made last, so that settings that are refused leave nothing behind.
    ephemeral_dir = Path(tempfile.mkdtemp(prefix="tidemill-"))
    return EmbeddedNode(replace(chosen, data_dir=ephemeral_dir), ephemeral_dir)


def _address(setting: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigError(f"setting {setting} cannot be {text!r}: give it as {error}") from error
