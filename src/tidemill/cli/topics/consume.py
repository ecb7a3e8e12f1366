"""``tidemill topic consume``: messages on stdout, by a template or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.session import Session, command, warn

if TYPE_CHECKING:
    from tidemill.cli.positions import Position
    from tidemill.client.cluster import Cluster, TopicPartition
    from tidemill.client.consuming.record_reader import Message
    from tidemill.errors import ApiError, UndecodableBatch

__all__ = ("register",)

_EPILOG = (
    "Template: %t topic, %p partition, %o offset, %k key, %v value, %T timestamp in ms, %h headers, "
    r"%s size of the value, %% percent; \n \t \r \0 \xHH \\."
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    command(app, "consume", epilog=_EPILOG)(consume)


def consume(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where to start: earliest, latest, an offset, a time like 2025-01-31T12:00, an age like "
            "-10m (10 minutes ago), or -N for the last N of each partition. Default: latest; earliest with "
            "--exit. A group starts at its committed offsets, if it has some.",
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="P", min=0, help="Only this partition; repeatable."),
    ] = None,
    max_messages: Annotated[
        int | None,
        typer.Option("--max-messages", "-n", metavar="N", min=1, help="Stop after so many records."),
    ] = None,
    exit_at_end: Annotated[
        bool,
        typer.Option(
            "--exit/--follow",
            "-e",
            help="Stop at the last record that exists now, or wait for more (default).",
        ),
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            metavar="GROUP",
            help="Read as a member of this consumer group, and commit offsets.",
        ),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", "-t", metavar="TEXT", help=r"How to print a record; see below. Default: '%v\n'."
        ),
    ] = None,
    skip_undecodable: Annotated[
        bool,
        typer.Option("--skip-undecodable", help="Skip batches that cannot be decoded, with a warning."),
    ] = False,
) -> None:
    """Read records and print them. Ctrl-C stops.

    \b
    Example:
      tidemill topic consume orders --from earliest --exit --template '%k wants %v\\n'
    """
    from tidemill.cli.positions import position_argument
    from tidemill.errors import UndecodableBatch

    if group is not None and partition:
        raise typer.BadParameter("a group decides by itself who reads what", param_hint="--partition")
    if template is not None and session.as_json:
        raise typer.BadParameter("--format json has a form of its own", param_hint="--template")
    chosen = start if start is not None else "earliest" if exit_at_end else "latest"
    position = position_argument(chosen, "--from")
    skip = _warn_of if skip_undecodable else None
    consumption = _Consumption(_writer(session, template), max_messages, exit_at_end, skip)
    try:
        if group is None:
            session.run(lambda cluster: consumption.read_partitions(cluster, topic, partition, position))
        else:
            session.run(lambda cluster: consumption.read_as_group(cluster, topic, group, position))
    except UndecodableBatch as error:
        raise _with_advice(error) from error


def _warn_of(failure: UndecodableBatch) -> None:
    warn(f"{failure.message}; skipped")


def _with_advice(error: UndecodableBatch) -> ApiError:
    """The error with the options by which the batch can be skipped."""
    from tidemill.errors import ApiError

    return ApiError(
        error.code,
        f"{error.message}: give --skip-undecodable to pass over such batches, or read on with "
        f"--partition {error.partition} --from {error.last_offset + 1}",
    )


def _stopped(topic: str, indexes: Sequence[int]) -> ApiError:
    from tidemill.errors import ApiError, ErrorCode

    names = ", ".join(f"{topic}-{index}" for index in indexes)
    has = "has" if len(indexes) == 1 else "have"
    return ApiError(
        ErrorCode.leader_not_available,
        f"{names} {has} no leader and cannot be read (LEADER_NOT_AVAILABLE); 'tidemill doctor' says why",
    )


def _writer(session: Session, template: str | None) -> Callable[[Message], bytes]:
    from tidemill.cli.topics.output_format import compile_template, message_as_json

    if session.as_json:
        return lambda message: json.dumps(message_as_json(message), ensure_ascii=False).encode() + b"\n"
    try:
        return compile_template(r"%v\n" if template is None else template)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--template") from None


class _Consumption:
    """Prints messages until ``max_messages`` were printed."""

    def __init__(
        self,
        write: Callable[[Message], bytes],
        max_messages: int | None,
        exit_at_end: bool,
        skip: Callable[[UndecodableBatch], None] | None,
    ) -> None:
        self._write = write
        self._skip = skip
        self._left = max_messages
        self._exit_at_end = exit_at_end
        #: The end of each partition when reading began; with --exit, reading stops there.
        self._ends: dict[TopicPartition, int] = {}

    async def read_partitions(
        self, cluster: Cluster, topic_name: str, chosen: Sequence[int] | None, position: Position
    ) -> None:
        from tidemill.cli.positions import offsets_at
        from tidemill.client.consuming.record_reader import RecordReader

        topic = await cluster.topic(topic_name)
        indexes = chosen or [partition.index for partition in topic.partitions]
        partitions = [(topic_name, index) for index in indexes]
        leaderless = {each.index for each in topic.partitions if each.leader not in cluster.nodes}
        stopped = sorted(leaderless.intersection(indexes))
        failure = _stopped(topic_name, stopped) if stopped else None
        if failure is not None:
            partitions = [partition for partition in partitions if partition[1] not in leaderless]
            if not partitions:
                raise failure
            warn(f"{failure.message}; the others are read")
        positions = await offsets_at(cluster, partitions, position)
        await self._note_ends(cluster, partitions)
        reader = RecordReader(cluster, positions, out_of_range="earliest", on_undecodable=self._skip)
        try:
            while not self._finished(reader.positions):
                self._put(await reader.poll(), lambda message: None)
        finally:
            await reader.close()
        if failure is not None:
            raise failure

    async def read_as_group(self, cluster: Cluster, topic_name: str, group: str, position: Position) -> None:
        from tidemill.cli.positions import offsets_at
        from tidemill.client.consuming.group_consumer import GroupConsumer

        await cluster.topic(topic_name)

        async def start(partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
            return await offsets_at(cluster, partitions, position)

        consumer = GroupConsumer(cluster, group, [topic_name], start, on_undecodable=self._skip)
        seen = 0
        try:
            while not (seen and self._finished(consumer.positions)):
                messages = await consumer.poll()
                if consumer.assignments != seen:
                    seen = consumer.assignments
                    await self._note_ends(cluster, list(consumer.positions))
                self._put(messages, consumer.mark)
        finally:
            await consumer.close()

    async def _note_ends(self, cluster: Cluster, partitions: Sequence[TopicPartition]) -> None:
        from tidemill.client.admin.topics import LATEST, list_offsets

        if self._exit_at_end:
            new = [partition for partition in partitions if partition not in self._ends]
            found = await list_offsets(cluster, dict.fromkeys(new, LATEST))
            self._ends |= {partition: at.offset for partition, at in found.items()}

    def _finished(self, positions: dict[TopicPartition, int]) -> bool:
        if self._left == 0:
            return True
        return self._exit_at_end and all(
            offset >= self._ends.get(partition, offset + 1) for partition, offset in positions.items()
        )

    def _put(self, messages: list[Message], mark: Callable[[Message], None]) -> None:
        out = sys.stdout.buffer
        for message in messages:
            if self._left == 0:
                break
            end = self._ends.get((message.topic, message.partition))
            if end is not None and message.record.offset >= end:
                continue
            out.write(self._write(message))
            mark(message)
            if self._left is not None:
                self._left -= 1
        out.flush()
