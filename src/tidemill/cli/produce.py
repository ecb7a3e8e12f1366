"""``tidemill topic produce``: one record per line of input."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.session import Session, command

if TYPE_CHECKING:
    from tidemill.cli.lines import LineParser
    from tidemill.cli.output import Progress
    from tidemill.client.cluster import Cluster
    from tidemill.client.producer import Delivered, Producer
    from tidemill.errors import TidemillError

__all__ = ("register",)


class Compression(StrEnum):
    """Kafka's codecs."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Acks(StrEnum):
    """When a record counts as written."""

    ALL = "all"
    ONE = "1"
    NONE = "0"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "produce")(produce)


@dataclass(slots=True)
class _Tally:
    """What became of the records."""

    sent: int = 0
    bytes: int = 0
    partitions: dict[int, int] = field(default_factory=dict)
    failed: int = 0
    failure: TidemillError | None = None

    def note(self, delivery: asyncio.Future[Delivered]) -> None:
        if delivery.cancelled():
            self.failed += 1
        elif (error := delivery.exception()) is not None:
            self.failed += 1
            self.failure = self.failure or error  # type: ignore[assignment]
        else:
            partition = delivery.result().partition
            self.sent += 1
            self.partitions[partition] = self.partitions.get(partition, 0) + 1


def produce(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to write to.")],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, readable=True, help="Read it, not stdin."),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", "-K", metavar="TEXT", help="What stands between key and value."),
    ] = None,
    json_lines: Annotated[
        bool,
        typer.Option("--json", help="Each line is an object: key, value, headers, partition, timestamp."),
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header of every record; repeatable."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Write to this partition only.")
    ] = None,
    compression: Annotated[Compression, typer.Option("--compression", "-z")] = Compression.NONE,
    acks: Annotated[
        Acks, typer.Option("--acks", help="all: on the disks of all in-sync replicas.")
    ] = Acks.ALL,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="At most so many records a second.")
    ] = None,
) -> None:
    """Write records: one per line of stdin or of a file.

    With --acks all the producer is idempotent: a retry never makes a duplicate.
    """
    from tidemill.cli.lines import json_line, plain_line
    from tidemill.cli.topics import parse_assignments

    if json_lines and key_separator is not None:
        raise typer.BadParameter("--json lines name their key themselves", param_hint="--key-separator")
    if key_separator == "":
        raise typer.BadParameter("it must not be empty", param_hint="--key-separator")
    headers = [(name, value.encode()) for name, value in parse_assignments(header, "--header").items()]
    separator = None if key_separator is None else key_separator.encode()
    parser = json_line(headers) if json_lines else plain_line(separator, headers)
    job = _Job(topic, parser, json_lines, partition, compression, acks, rate)
    started = time.monotonic()
    tally = session.run(lambda cluster: job.run(cluster, file))
    _summarize(session, topic, tally, time.monotonic() - started)
    if tally.failure is not None:
        raise tally.failure


@dataclass(slots=True)
class _Job:
    topic: str
    parser: LineParser
    skip_empty: bool
    partition: int | None
    compression: Compression
    acks: Acks
    rate: float | None
    tally: _Tally = field(default_factory=_Tally)

    async def run(self, cluster: Cluster, file: Path | None) -> _Tally:
        from tidemill.client.producer import ACKS_ALL, Producer
        from tidemill.records.compression import CODEC_NUMBERS, NONE

        codec = NONE if self.compression is Compression.NONE else CODEC_NUMBERS[self.compression.value]
        acks = ACKS_ALL if self.acks is Acks.ALL else int(self.acks.value)
        await cluster.topic(self.topic, create=True)
        async with Producer(cluster, acks=acks, codec=codec) as producer:
            await self._pump(producer, file)
        return self.tally

    async def _pump(self, producer: Producer, file: Path | None) -> None:
        from tidemill.cli.output import progress

        descriptor = sys.stdin.fileno() if file is None else os.open(file, os.O_RDONLY)
        size = 0 if file is None else os.fstat(descriptor).st_size
        bar_context = nullcontext(None) if file is None else progress("sending", size, in_bytes=True)
        try:
            with bar_context as bar:
                await self._send_all(producer, descriptor, bar)
        finally:
            if file is not None:
                os.close(descriptor)

    async def _send_all(self, producer: Producer, descriptor: int, bar: Progress | None) -> None:
        from tidemill.cli.source import read_lines
        from tidemill.errors import ApiError

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
                    raise ApiError(error.code, f"line {number}: {error.message}") from None
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


def _summarize(session: Session, topic: str, tally: _Tally, seconds: float) -> None:
    from tidemill.cli.output import human_bytes, write_json, write_line

    if session.as_json:
        write_json(
            {
                "topic": topic,
                "records": tally.sent,
                "failed": tally.failed,
                "bytes": tally.bytes,
                "seconds": round(seconds, 3),
                "partitions": {str(index): tally.partitions[index] for index in sorted(tally.partitions)},
            }
        )
        return
    spread = len(tally.partitions)
    where = f"{spread} partition{'s' if spread != 1 else ''} of {topic}"
    rate = f"{tally.sent / seconds:,.0f} records/s" if seconds > 0 else ""
    write_line(
        f"wrote {tally.sent} record{'s' if tally.sent != 1 else ''} ({human_bytes(tally.bytes)}) to {where} "
        f"in {seconds:.2f} s ({rate})"
    )
    if tally.failed:
        write_line(f"{tally.failed} records were not written")
