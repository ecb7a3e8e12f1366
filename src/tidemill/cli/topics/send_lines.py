"""Sending the lines of a file or a pipe as records, for ``topic produce``."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidemill.cli.output import Progress, progress
from tidemill.cli.session import tell_waiting
from tidemill.cli.topics.input_format import LineParser
from tidemill.client.cluster import Cluster
from tidemill.client.producing.producer import Delivered, Producer
from tidemill.errors import ApiError, TidemillError

__all__ = (
    "Sending",
    "Tally",
    "read_lines",
)

_CHUNK_BYTES: Final = 256 * 1024
_CHUNKS_AHEAD: Final = 8


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """The lines of an open file, in lists, without their ends; the last one need not have an end.

    A thread that waits for a terminal cannot be stopped, so it is a daemon: it ends with the process.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    capacity = threading.Semaphore(_CHUNKS_AHEAD)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while chunk and not isinstance(chunk, OSError):
            capacity.acquire()
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except OSError as error:
                chunk = error
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    threading.Thread(target=read, name="tidemill-input", daemon=True).start()
    rest = b""
    while chunk := await chunks.get():
        capacity.release()
        if isinstance(chunk, OSError):
            raise chunk
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
    if rest:
        yield [rest]


@dataclass(slots=True)
class Tally:
    """Counts of the records that were sent."""

    sent: int = 0
    bytes: int = 0
    partitions: dict[int, int] = field(default_factory=dict)
    failed: int = 0
    failure: TidemillError | None = None

    def note(self, delivery: asyncio.Future[Delivered]) -> None:
        """Count one delivery that is done."""
        if delivery.cancelled():
            self.failed += 1
        elif (error := delivery.exception()) is not None:
            self.failed += 1
            assert isinstance(error, TidemillError)
            self.failure = self.failure or error
        else:
            partition = delivery.result().partition
            self.sent += 1
            self.partitions[partition] = self.partitions.get(partition, 0) + 1


@dataclass(slots=True)
class Sending:
    """One run of ``topic produce``: what to send, and how."""

    topic: str
    parser: LineParser
    skip_empty: bool
    partition: int | None
    codec: int
    acks: int
    rate: float | None
    #: The prompt, if the input is a terminal.
    prompt: str
    tally: Tally = field(default_factory=Tally)

    async def run(self, cluster: Cluster, file: Path | None) -> Tally:
        """Send every line of ``file``, or of stdin. Stops at a refused record: the tally has its error."""
        await cluster.topic(self.topic, create=True)
        async with Producer(cluster, acks=self.acks, codec=self.codec) as producer:
            await self._pump(producer, file)
        return self.tally

    async def _pump(self, producer: Producer, file: Path | None) -> None:
        descriptor = sys.stdin.fileno() if file is None else os.open(file, os.O_RDONLY)
        size = 0 if file is None else os.fstat(descriptor).st_size
        if file is None:
            tell_waiting(descriptor, self.prompt)
        bar_context = nullcontext(None) if file is None else progress("sending", size, in_bytes=True)
        try:
            with bar_context as bar:
                await self._send_all(producer, descriptor, bar)
        finally:
            if file is not None:
                os.close(descriptor)

    async def _send_all(self, producer: Producer, descriptor: int, bar: Progress | None) -> None:
        loop = asyncio.get_running_loop()
        started, number, count = loop.time(), 0, 0
        async for lines in read_lines(descriptor):
            for line in lines:
                number += 1
                if self.skip_empty and not line.strip():
                    continue
                try:
                    record, asked = self.parser(line, time.time_ns() // 1_000_000)
                except ApiError as error:
                    await producer.flush()
                    said = f"line {number}: {error.message}; the lines before it were sent"
                    raise ApiError(error.code, said) from None
                if self.rate is not None:
                    await asyncio.sleep(max(0.0, started + count / self.rate - loop.time()))
                partition = asked if self.partition is None else self.partition
                delivery = await producer.send(self.topic, record, partition)
                delivery.add_done_callback(self.tally.note)
                count += 1
                self.tally.bytes += len(record.key or b"") + len(record.value or b"")
                if self.tally.failure is not None:
                    return
                if bar is not None:
                    bar.advance(len(line) + 1)
