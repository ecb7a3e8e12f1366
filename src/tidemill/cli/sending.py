"""Sending lines of input as records, for ``topic produce``."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.cli.lines import LineParser
from tidemill.cli.output import Progress, progress
from tidemill.cli.session import tell_waiting
from tidemill.cli.source import read_lines
from tidemill.client.cluster import Cluster
from tidemill.client.producer import Delivered, Producer
from tidemill.errors import ApiError, TidemillError

__all__ = ("Sending", "Tally")


@dataclass(slots=True)
class Tally:
    """What became of the records."""

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
    #: What to tell somebody who sits at a terminal and is waited for.
    prompt: str
    tally: Tally = field(default_factory=Tally)

    async def run(self, cluster: Cluster, file: Path | None) -> Tally:
        """Send every line of ``file``, or of stdin. A refused record ends it: the tally holds the error."""
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
