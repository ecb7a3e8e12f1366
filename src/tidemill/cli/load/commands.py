"""``tidemill bench``: measures a node, and checks that every record comes back once and in order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import ExitCode, Session, command
from tidemill.cli.topics.produce import Acks, Compression

if TYPE_CHECKING:
    from tidemill.cli.load.load_test import LoadPlan, LoadResult
    from tidemill.cli.load.records import IntegrityCheck
    from tidemill.client.cluster import Cluster

__all__ = ("register",)

_DEFAULT_TOPIC = "tidemill-bench"
_PERCENTILES = (0.5, 0.9, 0.99, 0.999)
_ACKS = {Acks.ALL: -1, Acks.ONE: 1, Acks.NONE: 0}
_LINE_SECONDS = 0.5


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "produce")(produce)
    command(app, "consume")(consume)


class _LiveLine:
    """One line on stderr with the present rate; silent if stderr is no terminal."""

    def __init__(self, label: str, value_bytes: int = 0) -> None:
        self._label = label
        self._value_bytes = value_bytes
        self._count = self._shown_count = 0
        self._shown_at = time.monotonic()
        self._visible = sys.stderr.isatty()

    def advance(self, count: int) -> None:
        self._count += count
        now = time.monotonic()
        if not self._visible or now - self._shown_at < _LINE_SECONDS:
            return
        rate = (self._count - self._shown_count) / (now - self._shown_at)
        volume = f", {rate * self._value_bytes / 1e6:.1f} MB/s" if self._value_bytes else ""
        sys.stderr.write(f"\r\x1b[K{self._label}: {self._count:,} records, {rate:,.0f}/s{volume}")
        sys.stderr.flush()
        self._shown_count, self._shown_at = self._count, now

    def end(self) -> None:
        if self._visible:
            sys.stderr.write("\r\x1b[K")


def produce(
    session: Session,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC", help="The topic to write to. Created if it does not exist.")
    ] = _DEFAULT_TOPIC,
    records: Annotated[
        int, typer.Option("--records", "-n", metavar="N", min=1, help="How many records to write.")
    ] = 100_000,
    size: Annotated[
        int, typer.Option("--size", "-s", metavar="BYTES", min=20, help="Size of each value in bytes.")
    ] = 1000,
    acks: Annotated[
        Acks, typer.Option("--acks", help="When a record is acknowledged, as in Kafka.")
    ] = Acks.ALL,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", "-p", metavar="N", min=1, help="Number of partitions, if the topic is created."
        ),
    ] = 4,
    rate: Annotated[
        float, typer.Option("--rate", metavar="N", min=0, help="Records per second; 0: as fast as possible.")
    ] = 0,
    compression: Annotated[
        Compression, typer.Option("--compression", "-z", help="How to compress batches of records.")
    ] = Compression.NONE,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight", metavar="N", min=1, max=5, help="Batches sent without an answer, per partition."
        ),
    ] = 5,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Read all records and compare them with what was written."),
    ] = True,
) -> None:
    """Write numbered records, show rate and latency, and check that each can be read once and in order."""
    from tidemill.cli.load.load_test import LoadPlan
    from tidemill.records.compression import CODEC_NUMBERS, NONE

    codec = NONE if compression is Compression.NONE else CODEC_NUMBERS[compression.value]
    plan = LoadPlan(records, size, _ACKS[acks], rate, codec, in_flight)
    produced, checked = session.run(lambda cluster: _produce(cluster, topic, partitions, plan, check))
    _show(session, "produced", produced, checked)
    if checked is not None and not checked.is_whole:
        raise typer.Exit(ExitCode.ERROR)


async def _produce(
    cluster: Cluster, topic: str, partitions: int, plan: LoadPlan, check: bool
) -> tuple[LoadResult, IntegrityCheck | None]:
    from tidemill.cli.load.load_test import produce_load, read_back
    from tidemill.client.admin.topics import create_topic
    from tidemill.errors import ApiError, ErrorCode

    try:
        await create_topic(cluster, topic, partitions=partitions)
    except ApiError as error:
        if error.code != ErrorCode.topic_already_exists:
            raise
    produced = await _watched("producing", plan.value_bytes, produce_load, cluster, topic, plan)
    if not check:
        return produced, None
    return produced, await _watched("checking", plan.value_bytes, read_back, cluster, plan, produced)


async def _watched(label: str, value_bytes: int, work: Callable[..., Any], *arguments: Any) -> Any:
    line = _LiveLine(label, value_bytes)
    try:
        return await work(*arguments, line.advance)
    finally:
        line.end()


def consume(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")] = _DEFAULT_TOPIC,
    records: Annotated[
        int | None, typer.Option("--records", "-n", metavar="N", min=1, help="Stop after so many records.")
    ] = None,
) -> None:
    """Read a topic from its first to its last record, and show the rate and the time of a fetch."""
    from tidemill.cli.load.load_test import consume_load

    result = session.run(lambda cluster: _watched("consuming", 0, consume_load, cluster, topic, records))
    _show(session, "consumed", result, None)


def _show(session: Session, verb: str, result: LoadResult, checked: IntegrityCheck | None) -> None:
    from tidemill.cli.load.records import percentile
    from tidemill.cli.output import Table, show

    seconds = max(result.seconds, 1e-9)
    value: dict[str, Any] = {
        "records": result.records,
        "bytes": result.bytes,
        "seconds": round(result.seconds, 3),
        "records_per_second": round(result.records / seconds),
        "megabytes_per_second": round(result.bytes / seconds / 1e6, 2),
        "latency_ms": {
            f"p{share * 100:g}": round(percentile(result.latencies_ms, share), 2) for share in _PERCENTILES
        },
    }
    rows: list[tuple[str, object]] = [
        (verb, f"{result.records:,} records, {result.bytes / 1e6:,.1f} MB in {result.seconds:.2f} s"),
        ("rate", f"{value['records_per_second']:,} records/s, {value['megabytes_per_second']:,} MB/s"),
        ("latency of a batch", ", ".join(f"{name} {ms} ms" for name, ms in value["latency_ms"].items())),
    ]
    if checked is not None:
        value["check"] = {
            "found": checked.found,
            "missing": checked.skipped,
            "repeated": checked.repeated,
            "whole": checked.is_whole,
        }
        verdict = "each record is there once, in order" if checked.is_whole else "NOT WHOLE"
        rows.append(
            (
                "check",
                f"{verdict}: {checked.found:,} found, {checked.skipped} missing, {checked.repeated} repeated",
            )
        )
    show(session, value, Table(("", ""), rows))
