"""Links between processes that can be cut: a proxy in front of each address, in a thread of the test.

A link has two ways, each cut and healed by itself. What is sent over a way that is cut is not lost but held,
as TCP does that sends it again: it arrives when the way is healed, also the end of a connection. Nobody hears
that a way was cut, and a connection that is opened meanwhile hangs.

    with Links() as links:
        port = links.listen("n1", "etcd", lambda: ("127.0.0.1", 2379))
        links.cut(("n1", "etcd"))  # what n1 says does not arrive; what it is told does
        links.heal()

Who connects to a node's cluster address is known from its first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Any

from tidemill.cluster.frames import decode_request

__all__ = ("Links", "Way")

Way = tuple[str, str]
"""From whom, to whom."""

_CHUNK_BYTES = 64 * 1024
_LENGTH_BYTES = 4


class Links:
    """All proxies of a test; a context manager. ``name_of`` says which name a node's number belongs to."""

    def __init__(self, name_of: Callable[[int], str] = str) -> None:
        self._name_of = name_of
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._cuts: frozenset[Way] = frozenset()
        self._changed = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def listen(self, source: str | None, target: str, address: Callable[[], tuple[str, int]]) -> int:
        """The port at which ``source`` reaches ``target``, which listens at ``address``.

        Without a ``source`` it is for nodes, each of which says its number.
        """
        serve = partial(self._serve, source, target, address)
        server: asyncio.Server = self._call(asyncio.start_server(serve, "127.0.0.1", 0))
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def cut(self, *ways: Way) -> None:
        """Hold what is sent over these ways from now on."""
        self._call(self._set(self._cuts | set(ways)))

    def heal(self) -> None:
        """Let everything through again."""
        self._call(self._set(()))

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _set(self, cuts: Iterable[Way]) -> None:
        self._cuts = frozenset(cuts)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _passage(self, *ways: tuple[str, str]) -> None:
        """Wait until none of the ways is cut. A node's number counts as its name once that is known."""
        while any((self._named(source), self._named(target)) in self._cuts for source, target in ways):
            await self._changed.wait()

    def _named(self, who: str) -> str:
        return self._name_of(int(who)) if who.isdecimal() else who

    async def _serve(
        self,
        source: str | None,
        target: str,
        address: Callable[[], tuple[str, int]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        first = b""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                if source is None:
                    length = await reader.readexactly(_LENGTH_BYTES)
                    first = await reader.readexactly(int.from_bytes(length, "big"))
                    source = str(decode_request(memoryview(first)).header.source)
                    first = length + first
                await self._passage((source, target), (target, source))
                onward_reader, onward_writer = await asyncio.open_connection(*address())
                onward_writer.write(first)
                await asyncio.gather(
                    self._pump(reader, onward_writer, (source, target)),
                    self._pump(onward_reader, writer, (target, source)),
                )
            finally:
                writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        try:
            while data := await reader.read(_CHUNK_BYTES):
                await self._passage(way)
                writer.write(data)
                await writer.drain()
            await self._passage(way)
            writer.close()
        except BaseException:
            writer.transport.abort()
            raise
