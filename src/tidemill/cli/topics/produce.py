"""``tidemill topic produce``: one record per line of input."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.session import Session, command

if TYPE_CHECKING:
    from tidemill.cli.topics.send_lines import Tally

__all__ = ("register",)


class Compression(StrEnum):
    """The compression codecs of Kafka."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class Acks(StrEnum):
    """The acknowledgements that a producer waits for."""

    ALL = "all"
    ONE = "1"
    NONE = "0"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "produce")(produce)


def produce(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to write to.")],
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", exists=True, dir_okay=False, readable=True, help="Read this file, not stdin."
        ),
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="A line is KEY, then this text, then VALUE."
        ),
    ] = None,
    json_lines: Annotated[
        bool,
        typer.Option("--json", help="A line is a JSON object: key, value, headers, partition, timestamp."),
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header", "-H", metavar="NAME=VALUE", help="Add this header to every record; repeatable."
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option("--partition", "-p", metavar="P", min=0, help="Write to this partition only."),
    ] = None,
    compression: Annotated[
        Compression, typer.Option("--compression", "-z", help="How to compress batches of records.")
    ] = Compression.NONE,
    acks: Annotated[
        Acks,
        typer.Option(
            "--acks",
            help="Wait until a record is on the disks of all in-sync replicas (all) or of the leader (1), "
            "or do not wait (0).",
        ),
    ] = Acks.ALL,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", min=0.001, help="The most records to write in a second."),
    ] = None,
) -> None:
    """Write records: one for each line of stdin or of a file.

    \b
    Example:
      printf 'anna:3 apples\\nberta:1 pear\\n' | tidemill topic produce orders --key-separator :

    With --acks all the producer is idempotent: a retry never makes a duplicate.
    """
    from tidemill.cli.topics.commands import parse_assignments
    from tidemill.cli.topics.input_format import json_line, plain_line
    from tidemill.cli.topics.send_lines import Sending
    from tidemill.records.compression import CODEC_NUMBERS, NONE
    from tidemill.wire.apis import ACKS_ALL

    if json_lines and key_separator is not None:
        raise typer.BadParameter("--json lines name their key themselves", param_hint="--key-separator")
    if key_separator == "":
        raise typer.BadParameter("it must not be empty", param_hint="--key-separator")
    headers = [(name, value.encode()) for name, value in parse_assignments(header, "--header").items()]
    separator = None if key_separator is None else key_separator.encode()
    parser = json_line(headers) if json_lines else plain_line(separator, headers)
    sending = Sending(
        topic,
        parser,
        skip_empty=json_lines,
        partition=partition,
        codec=NONE if compression is Compression.NONE else CODEC_NUMBERS[compression.value],
        acks=ACKS_ALL if acks is Acks.ALL else int(acks.value),
        rate=rate,
        prompt=_prompt(json_lines, key_separator),
    )
    started = time.monotonic()
    tally = session.run(lambda cluster: sending.run(cluster, file))
    _summarize(session, topic, tally, time.monotonic() - started)
    if tally.failure is not None:
        raise tally.failure


def _prompt(json_lines: bool, key_separator: str | None) -> str:
    """The prompt for a user whose records are read from a terminal."""
    wanted = "records" if key_separator is None else f"records as KEY{key_separator}VALUE"
    if json_lines:
        wanted = 'records as JSON objects like {"key": "k", "value": "v"}'
    return f"type {wanted}, one per line"


def _summarize(session: Session, topic: str, tally: Tally, seconds: float) -> None:
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
