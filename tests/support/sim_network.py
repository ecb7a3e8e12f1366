"""A network in memory for nodes and clients on a virtual loop: ordered links with delay that can be cut.

Each host has a ``SimTransport``, its way to listen and to connect. A connection is two ``SimStream``s, one at
each end; bytes arrive in order, sometimes in pieces, after seeded delays. While the way from one host to
another is cut, nothing of it arrives and nothing is lost: it comes when the cut is healed, as with TCP. The
connections of a process that is gone are reset. Those of a machine that is gone stay half open: the other
side hears nothing, until it sends something and the machine is there again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, cast
from zlib import crc32

from support.virtual_loop import VirtualLoop
from tidemill.config.values import Address
from tidemill.net.transport import Listener

__all__ = ("SimNetwork", "SimStream", "SimTransport")

#: How long bytes are on their way at most; mostly it is much less.
_DELAY_SECONDS_MAX = 0.005
#: What the operating system takes of a stream that nobody reads.
_SOCKET_BYTES = 64 * 1024
_FIRST_FREE_PORT = 50_000
#: How many of the writes arrive in two pieces.
_SPLIT_SHARE = 0.1

Protocols = Callable[[], asyncio.BaseProtocol]


class SimNetwork:
    """All hosts, and what is between them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.listeners: dict[Address, SimListener] = {}
        self._cut: set[tuple[str, str]] = set()
        #: Machines that are off: nobody there refuses a connection.
        self._off: set[str] = set()
        self._streams: dict[SimStream, None] = {}
        self._next_port = _FIRST_FREE_PORT
        #: Set for a moment when cuts are healed, and when a machine is there again.
        self.healed = asyncio.Event()

    def transport(self, host: str) -> SimTransport:
        """How ``host`` listens and connects."""
        return SimTransport(self, host)

    def cut(self, source: str, target: str) -> None:
        """Nothing that ``source`` sends arrives at ``target``; the other way is left as it is."""
        self._cut.add((source, target))

    def heal(self) -> None:
        """All ways are open again."""
        self._cut.clear()
        self._announce()
        for stream in list(self._streams):
            stream.deliver_soon()

    def _announce(self) -> None:
        self.healed.set()
        self.healed.clear()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def can_connect(self, source: str, target: str) -> bool:
        """Whether an attempt to connect gets an answer, be it a refusal."""
        return target not in self._off and not self.is_cut(source, target) and not self.is_cut(target, source)

    def reset(self, host: str, *, silently: bool = False) -> None:
        """The host is gone: nobody listens there, and its connections end on the other side.

        ``silently``: nobody is there to say so, because the machine is off.
        """
        if silently:
            self._off.add(host)
        for address in [address for address in self.listeners if address.host == host]:
            del self.listeners[address]
        for stream in list(self._streams):
            if stream.host == host:
                stream.vanish() if silently else stream.abort()

    def switch_on(self, host: str) -> None:
        """The machine is there again, though nobody may listen yet."""
        self._off.discard(host)
        self._announce()

    def is_up(self, host: str) -> bool:
        """Whether anybody listens there."""
        return any(address.host == host for address in self.listeners)

    def delay(self) -> float:
        return _DELAY_SECONDS_MAX * self.loop.rng.random() ** 3

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def add(self, stream: SimStream) -> None:
        self._streams[stream] = None

    def remove(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)


class SimTransport:
    """Implements ``tidemill.net.transport.Transport`` for one host."""

    def __init__(self, network: SimNetwork, host: str) -> None:
        self._network = network
        self._host = host

    async def listen(self, address: Address, protocol: Protocols, backlog: int) -> Listener:
        taken = Address(self._host, address.port or self._network.free_port())
        if taken in self._network.listeners:
            raise OSError(f"{taken} is in use")
        listener = self._network.listeners[taken] = SimListener(self._network, taken, protocol)
        return listener

    async def connect(self, address: Address, protocol: Protocols) -> asyncio.Transport:
        network = self._network
        while not network.can_connect(self._host, address.host):
            await network.healed.wait()
        await asyncio.sleep(network.delay())
        listener = network.listeners.get(address)
        if listener is None or not listener.is_serving:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        here = SimStream(network, self._host, address, copy_context())
        there = SimStream(network, address.host, Address(self._host, network.free_port()), listener.context)
        here.peer, there.peer = there, here
        # By the process that listens, on its clock.
        there.open(listener.context.copy().run(listener.protocol))
        here.open(protocol())
        return here


class SimListener:
    """Implements ``tidemill.net.transport.Listener``."""

    def __init__(self, network: SimNetwork, address: Address, protocol: Protocols) -> None:
        self._network = network
        self.address = address
        self.protocol = protocol
        #: Who listens also runs what comes in.
        self.context = copy_context()
        self.is_serving = False

    async def start_serving(self) -> None:
        self.is_serving = True

    def close(self) -> None:
        self._network.listeners.pop(self.address, None)


class SimStream(asyncio.Transport):
    """One end of a connection."""

    peer: SimStream

    def __init__(self, network: SimNetwork, host: str, remote: Address, context: Context) -> None:
        super().__init__({"peername": (remote.host, remote.port)})
        self.host = host
        self._network = network
        self._context = context
        self._protocol: asyncio.BaseProtocol
        self._is_reading = True
        self._is_closing = False
        self._is_lost = False
        self._has_vanished = False
        #: What the peer has not received yet; None is the end of the stream, an error that of a reset one.
        self._on_the_way: deque[tuple[float, bytes | Exception | None]] = deque()
        self._unreceived_bytes = 0
        self._high, self._low = _SOCKET_BYTES, _SOCKET_BYTES // 4
        self._writer_waits = False

    def open(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._network.add(self)
        self._context.copy().run(protocol.connection_made, self)

    # --- sending

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        rng, sent = self._network.loop.rng, bytes(data)
        if len(sent) > 1 and rng.random() < _SPLIT_SHARE:
            middle = rng.randrange(1, len(sent))
            self._send(sent[:middle])
            sent = sent[middle:]
        self._send(sent)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _send(self, data: bytes | Exception | None) -> None:
        network = self._network
        earliest = self._on_the_way[-1][0] if self._on_the_way else 0.0
        arrival = max(earliest, network.loop.now + network.delay())
        self._on_the_way.append((arrival, data))
        if isinstance(data, bytes):
            self._unreceived_bytes += len(data)
        if self.get_write_buffer_size() > self._high and not self._writer_waits:
            self._writer_waits = True
            cast(asyncio.Protocol, self._protocol).pause_writing()
        self.deliver_soon(arrival)

    def deliver_soon(self, when: float = 0.0) -> None:
        loop = self._network.loop
        loop.call_outside(max(loop.now, when), self._deliver, context=self.peer._context)

    def _deliver(self) -> None:
        """Runs at the peer's: hand over what has arrived."""
        network, peer = self._network, self.peer
        while self._on_the_way and self._on_the_way[0][0] <= network.loop.now + 1e-6:
            if network.is_cut(self.host, peer.host):
                return
            if peer._is_lost:
                if peer._has_vanished and network.is_up(peer.host):
                    self._ended(ConnectionResetError("nobody knows of the connection"))
                if self._is_lost:
                    network.remove(self)
                return
            if not peer._is_reading and not isinstance(self._on_the_way[0][1], Exception):
                return
            _, data = self._on_the_way.popleft()
            if not isinstance(data, bytes):
                network.remove(self)
                peer._ended(data)
                return
            network.loop.note(f"{self.host} to {peer.host}: {len(data)} bytes, {crc32(data):08x}")
            self._unreceived_bytes -= len(data)
            peer._receive(data)
        if self._writer_waits and self.get_write_buffer_size() <= self._low and not self._is_lost:
            self._writer_waits = False
            self._context.copy().run(cast(asyncio.Protocol, self._protocol).resume_writing)

    def get_write_buffer_size(self) -> int:
        return max(0, self._unreceived_bytes - _SOCKET_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _SOCKET_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    # --- receiving

    def _receive(self, data: bytes) -> None:
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            while data and not self._is_lost:
                buffer = memoryview(protocol.get_buffer(len(data)))
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                protocol.buffer_updated(count)
        else:
            cast(asyncio.Protocol, protocol).data_received(data)

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.peer.deliver_soon()

    # --- the end

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """What was written still arrives."""
        if not self._is_closing:
            self._is_closing = True
            self._send(None)
            self._lose(None)

    def abort(self) -> None:
        """The peer hears of it, and gets nothing more."""
        if not self._is_lost:
            self._is_closing = True
            self._on_the_way.clear()
            self._send(ConnectionResetError("the connection was reset"))
            self._lose(None)

    def vanish(self) -> None:
        """The peer hears nothing: its connection is half open."""
        self._has_vanished = True
        self._is_closing = True
        self._on_the_way.clear()
        self._lose(None)

    def _ended(self, error: Exception | None) -> None:
        """The peer has closed."""
        if not self._is_lost:
            self._is_closing = True
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self._is_lost = True
        if not self._on_the_way:
            self._network.remove(self)
        self._network.loop.call_soon(self._protocol.connection_lost, error, context=self._context)
