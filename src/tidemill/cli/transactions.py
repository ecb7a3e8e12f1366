"""``tidemill txn list | describe | abort | jobs``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import Session, command

if TYPE_CHECKING:
    from tidemill.client.admin.transactions import PartitionProducer, TransactionDescription
    from tidemill.client.cluster import Cluster

__all__ = ("register",)

IdArgument = Annotated[str | None, typer.Argument(metavar="ID", help="The transactional id.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "list")(list_transactions)
    command(app, "describe")(describe)
    command(app, "abort")(abort)
    command(app, "jobs")(jobs)


def list_transactions(
    session: Session,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only this state, such as Ongoing; repeatable."),
    ] = None,
    longer_than_ms: Annotated[
        int,
        typer.Option(
            "--longer-than-ms", metavar="MS", help="Only transactions that began longer ago than this."
        ),
    ] = -1,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", metavar="REGEX", help="Only ids that match this regular expression (RE2) completely."
        ),
    ] = None,
) -> None:
    """List the transactional ids and their states."""
    from tidemill.cli.output import Table, show
    from tidemill.client.admin import transactions as transaction_admin

    found = session.run(
        lambda cluster: transaction_admin.list_transactions(
            cluster, state or (), longer_than_ms=longer_than_ms, pattern=pattern
        )
    )
    value = [each._asdict() for each in found]
    rows = [(each.transactional_id, each.state, each.producer_id, each.coordinator) for each in found]
    show(session, value, Table(("transactional id", "state", "producer", "coordinator"), rows))


def jobs(session: Session) -> None:
    """List jobs, such as Spark queries: the last batch that each has published, and its open attempts."""
    from dataclasses import asdict

    from tidemill.cli.output import Table, show
    from tidemill.client.producing.attempts import list_jobs

    found = session.run(list_jobs)
    rows = [
        (
            each.job,
            None if each.published_batch < 0 else each.published_batch,
            _time(each.published_ms),
            each.open_attempts,
            each.idle_ms // 1_000,
        )
        for each in found
    ]
    columns = ("job", "published batch", "published at", "open attempts", "idle seconds")
    show(session, [asdict(each) for each in found], Table(columns, rows))


def describe(
    session: Session,
    transactional_id: IdArgument = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic",
            metavar="TOPIC[:P,P]",
            help="Show the producers of these partitions and their open transactions; repeatable.",
        ),
    ] = None,
) -> None:
    """Show the transaction of a transactional id, or the open transactions in a topic."""
    if (transactional_id is None) == (not topic):
        raise typer.BadParameter("name either a transactional id or a --topic")
    if transactional_id is not None:
        _describe_id(session, transactional_id)
    else:
        _describe_topics(session, topic or [])


def _describe_id(session: Session, transactional_id: str) -> None:
    from tidemill.cli.output import Table, show
    from tidemill.client.admin import transactions as transaction_admin

    found = session.run(lambda cluster: transaction_admin.describe_transaction(cluster, transactional_id))
    title = (
        f"{transactional_id}: {found.state}, producer {found.producer_id} epoch {found.producer_epoch}, "
        f"timeout {found.timeout_ms} ms, started {_time(found.started_ms) or 'never'}"
    )
    show(session, _value(found), Table(("topic", "partition"), found.partitions, title=title))


def _value(described: TransactionDescription) -> dict[str, Any]:
    return {
        "transactional_id": described.transactional_id,
        "state": described.state,
        "producer_id": described.producer_id,
        "producer_epoch": described.producer_epoch,
        "timeout_ms": described.timeout_ms,
        "started_ms": described.started_ms,
        "partitions": [{"topic": topic, "partition": index} for topic, index in described.partitions],
    }


def _describe_topics(session: Session, topics: list[str]) -> None:
    from tidemill.cli.output import Table, show

    producers = session.run(lambda cluster: _producers(cluster, topics))
    rows = [
        (
            each.topic,
            each.partition,
            each.producer_id,
            each.producer_epoch,
            _time(each.last_timestamp_ms),
            each.start_offset,
        )
        for each in producers
    ]
    columns = ("topic", "partition", "producer", "epoch", "last write", "open since offset")
    show(session, [each._asdict() for each in producers], Table(columns, rows))


async def _producers(cluster: Cluster, topics: list[str]) -> list[PartitionProducer]:
    from tidemill.cli.positions import topic_partitions
    from tidemill.client.admin.transactions import describe_producers

    partitions = [each for text in topics for each in await topic_partitions(cluster, text)]
    return await describe_producers(cluster, partitions)


def _time(timestamp_ms: int | None) -> str | None:
    from datetime import UTC, datetime

    if timestamp_ms is None or timestamp_ms < 0:
        return None
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def abort(
    session: Session,
    transactional_id: IdArgument = None,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition",
            metavar="TOPIC:P",
            help="Abort a transaction in this partition that no transaction coordinator knows.",
        ),
    ] = None,
    start_offset: Annotated[
        int | None,
        typer.Option(
            "--start-offset",
            metavar="N",
            help="Its first offset, as 'txn describe --topic' shows.",
        ),
    ] = None,
) -> None:
    """Abort a transaction.

    With a transactional id: its open transaction is aborted in all partitions, and its producer is fenced.
    With --partition and --start-offset: an abort marker is written to this partition alone, for a transaction
    that would never end there. Do not use this for a transaction whose producer is still at work: it would be
    aborted in this partition and could be committed in others.
    """
    hanging = partition is not None and start_offset is not None
    by_id = transactional_id is not None and partition is None and start_offset is None
    if by_id == hanging or (hanging and transactional_id is not None):
        raise typer.BadParameter("name either a transactional id, or --partition and --start-offset")
    if transactional_id is not None:
        _abort_id(session, transactional_id)
    else:
        assert partition is not None
        assert start_offset is not None
        _abort_hanging(session, partition, start_offset)


def _abort_id(session: Session, transactional_id: str) -> None:
    from tidemill.cli.output import write_json, write_line
    from tidemill.client.admin import transactions as transaction_admin

    found = session.run(lambda cluster: transaction_admin.abort_transaction(cluster, transactional_id))
    if session.as_json:
        write_json({"aborted": _value(found)})
    else:
        write_line(
            f"the transaction of {transactional_id} is aborted in {len(found.partitions)} partitions; "
            f"producer {found.producer_id} epoch {found.producer_epoch} is fenced"
        )


def _abort_hanging(session: Session, partition: str, start_offset: int) -> None:
    from tidemill.cli.output import write_json, write_line

    producer = session.run(lambda cluster: _end_in(cluster, partition, start_offset))
    if session.as_json:
        write_json({"aborted": producer._asdict()})
    else:
        write_line(
            f"the transaction of producer {producer.producer_id} epoch {producer.producer_epoch} is aborted "
            f"in {producer.topic}-{producer.partition}"
        )


async def _end_in(cluster: Cluster, text: str, start_offset: int) -> PartitionProducer:
    from tidemill.cli.positions import topic_partitions
    from tidemill.client.admin.transactions import abort_hanging

    partitions = await topic_partitions(cluster, text)
    if len(partitions) != 1:
        raise typer.BadParameter(
            f"--partition must name one partition, as TOPIC:P; {text!r} names {len(partitions)}"
        )
    return await abort_hanging(cluster, partitions[0], start_offset)
