"""``tidemill topic create | list | describe | alter | trim | delete``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import Session, YesOption, command, confirm

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster, TopicInfo, TopicPartition

__all__ = ("parse_assignments", "register")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]
ConfigsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="NAME=VALUE", help="A topic config, such as retention.ms=60000; repeatable."
    ),
]
_MANY = 5


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "create")(create)
    command(app, "list")(list_topics)
    command(app, "describe")(describe)
    command(app, "alter")(alter)
    command(app, "trim")(trim)
    command(app, "delete")(delete)


def parse_assignments(texts: list[str] | None, option: str) -> dict[str, str]:
    """Parse ``name=value`` texts into a mapping; anything else is a usage error."""
    values: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        values[name.strip()] = value
    return values


def create(
    session: Session,
    topic: TopicArgument,
    partitions: Annotated[
        int,
        typer.Option(
            "--partitions", "-p", metavar="N", help="Their number. -1: the setting default_partitions."
        ),
    ] = -1,
    replication: Annotated[
        int,
        typer.Option(
            "--replication",
            "-r",
            metavar="N",
            help="Replicas of each partition. -1: the setting default_replication.",
        ),
    ] = -1,
    config: ConfigsOption = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the topic exists.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Only check whether the topic could be created.")
    ] = False,
) -> None:
    """Create a topic."""
    from tidemill.cli.output import write_json, write_line
    from tidemill.client.admin.topics import CreatedTopic, create_topic
    from tidemill.errors import ApiError, ErrorCode

    configs = parse_assignments(config, "--config")

    async def work(cluster: Cluster) -> CreatedTopic | None:
        try:
            return await create_topic(
                cluster,
                topic,
                partitions=partitions,
                replication=replication,
                configs=configs,
                validate_only=validate_only,
            )
        except ApiError as error:
            if if_not_exists and error.code == ErrorCode.topic_already_exists:
                return None
            raise

    created = session.run(work)
    if session.as_json:
        write_json(
            {
                "topic": topic,
                "created": created is not None and not validate_only,
                "partitions": created.partitions if created else None,
                "replication": created.replication if created else None,
                "topic_id": created.topic_id if created else None,
            }
        )
    elif created is None:
        write_line(f"topic {topic} exists already")
    else:
        count = f"{created.partitions} partition{'s' if created.partitions != 1 else ''}"
        verb = "could be created" if validate_only else "created"
        write_line(f"topic {topic} {verb} with {count}")


def list_topics(
    session: Session,
    internal: Annotated[
        bool, typer.Option("--internal", help="Also list internal topics, such as __consumer_offsets.")
    ] = False,
) -> None:
    """List the topics."""
    from tidemill.cli.output import Table, show

    async def work(cluster: Cluster) -> list[TopicInfo]:
        return await cluster.all_topics()

    topics = [topic for topic in session.run(work) if internal or not topic.internal]
    value = [
        {
            "topic": topic.name,
            "topic_id": topic.topic_id,
            "partitions": len(topic.partitions),
            "replication": _replication(topic),
            "internal": topic.internal,
        }
        for topic in topics
    ]
    rows = [(entry["topic"], entry["partitions"], entry["replication"]) for entry in value]
    show(session, value, Table(("topic", "partitions", "replication"), rows))


def _replication(topic: TopicInfo) -> int:
    return max((len(partition.replicas) for partition in topic.partitions), default=0)


def describe(
    session: Session,
    topic: TopicArgument,
    all_configs: Annotated[
        bool, typer.Option("--all-configs", "-a", help="Also show configs that have their default.")
    ] = False,
) -> None:
    """Show a topic: its partitions with replicas, offsets and sizes, and its configs.

    Lag is how many records a follower is behind its leader, as node:records.
    """
    from tidemill.cli.cluster.inspect import lag_text
    from tidemill.cli.output import Table, human_bytes, show

    found = session.run(lambda cluster: _describe(cluster, topic))
    configs = [entry for entry in found["configs"] if all_configs or entry["source"] != "default"]
    partitions = Table(
        ("partition", "leader", "replicas", "in sync", "eligible", "lag", "start", "end", "size"),
        [
            (
                entry["partition"],
                entry["leader"],
                ",".join(map(str, entry["replicas"])),
                ",".join(map(str, entry["in_sync"])),
                ",".join(map(str, entry["eligible"])) or None,
                lag_text(entry["lag"]),
                entry["start_offset"],
                entry["end_offset"],
                None if entry["bytes"] is None else human_bytes(entry["bytes"]),
            )
            for entry in found["partitions"]
        ],
        title=f"topic {topic} ({found['topic_id']})",
    )
    tables = [partitions]
    if configs:
        rows = [(entry["name"], entry["value"], entry["source"]) for entry in configs]
        tables.append(Table(("config", "value", "set by"), rows))
    show(session, {**found, "configs": configs}, *tables)


async def _describe(cluster: Cluster, name: str) -> dict[str, Any]:
    from tidemill.cli.cluster.inspect import follower_lags
    from tidemill.client.admin import topics as admin
    from tidemill.client.admin.replicas import eligible_leaders
    from tidemill.errors import TidemillError

    topic = await cluster.topic(name)
    eligible = await eligible_leaders(cluster, [name])
    lags = await follower_lags(cluster, [name])
    sizes: dict[TopicPartition, int] = {}
    for directory in await admin.describe_log_directories(cluster):
        sizes |= directory.partition_bytes
    partitions = []
    for partition in topic.partitions:
        key = name, partition.index
        start = end = problem = None
        try:
            start = (await admin.list_offsets(cluster, {key: admin.EARLIEST}))[key].offset
            end = (await admin.list_offsets(cluster, {key: admin.LATEST}))[key].offset
        except TidemillError as error:
            # One stopped partition must not hide the others.
            problem = error.name
        partitions.append(
            {
                "partition": partition.index,
                "leader": partition.leader,
                "leader_epoch": partition.leader_epoch,
                "replicas": partition.replicas,
                "in_sync": partition.isr,
                "eligible": eligible.get(key, ()),
                "lag": lags.get(key, {}),
                "start_offset": start if problem is None else problem,
                "end_offset": end,
                "bytes": sizes.get(key),
            }
        )
    configs = [
        {"name": entry.name, "value": entry.value, "source": entry.source}
        for entry in await admin.describe_topic_configs(cluster, name)
    ]
    return {
        "topic": name,
        "topic_id": topic.topic_id,
        "internal": topic.internal,
        "partitions": partitions,
        "configs": configs,
    }


def alter(
    session: Session,
    topic: TopicArgument,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", metavar="N", help="The new number of partitions, larger than before."
        ),
    ] = None,
    config: ConfigsOption = None,
    reset: Annotated[
        list[str] | None,
        typer.Option("--reset", metavar="NAME", help="Reset a config to its default; repeatable."),
    ] = None,
) -> None:
    """Change the configs of a topic, or add partitions."""
    from tidemill.cli.output import write_json, write_line
    from tidemill.client.admin.topics import alter_topic_configs, create_partitions

    configs = parse_assignments(config, "--config")
    if partitions is None and not configs and not reset:
        raise typer.BadParameter("nothing to change: give --config, --reset or --partitions")

    async def work(cluster: Cluster) -> None:
        if configs or reset:
            await alter_topic_configs(cluster, topic, to_set=configs, to_reset=reset or ())
        if partitions is not None:
            await create_partitions(cluster, topic, partitions)

    session.run(work)
    if session.as_json:
        write_json({"topic": topic, "set": configs, "reset": reset or [], "partitions": partitions})
    else:
        write_line(f"topic {topic} altered")


def trim(
    session: Session,
    topic: Annotated[
        str, typer.Argument(metavar="TOPIC[:P,P]", help="The topic, or partitions like orders:0,2.")
    ],
    before: Annotated[
        str,
        typer.Option(
            "--before",
            metavar="WHERE",
            help="latest, an offset, a time, or an age like -10m (10 minutes ago).",
        ),
    ],
    yes: YesOption = False,
) -> None:
    """Delete the oldest records of a topic, up to an offset or a time. This cannot be undone."""
    from tidemill.cli.output import Table, show
    from tidemill.cli.positions import offsets_at, position_argument, topic_partitions
    from tidemill.client.admin.topics import delete_records

    position = position_argument(before, "--before")

    async def work(cluster: Cluster) -> dict[TopicPartition, int]:
        partitions = await topic_partitions(cluster, topic)
        return await delete_records(cluster, await offsets_at(cluster, partitions, position))

    confirm(f"Delete the records of {topic} before {before}?", yes=yes)
    starts = sorted(session.run(work).items())
    value = [{"topic": name, "partition": index, "start_offset": start} for (name, index), start in starts]
    rows = [(name, index, start) for (name, index), start in starts]
    show(session, value, Table(("topic", "partition", "start"), rows))


def delete(
    session: Session,
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC", help="The topics to delete.")],
    yes: YesOption = False,
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="Succeed if a topic does not exist.")
    ] = False,
) -> None:
    """Delete topics with all of their records. This cannot be undone."""
    from tidemill.cli.output import progress, write_json, write_line
    from tidemill.client.admin.topics import delete_topic
    from tidemill.errors import ApiError, ErrorCode

    confirm(f"Delete {', '.join(topics)} with all records?", yes=yes)

    async def work(cluster: Cluster) -> list[str]:
        deleted: list[str] = []
        with progress("deleting", len(topics) if len(topics) > _MANY else 0) as bar:
            for name in topics:
                try:
                    await delete_topic(cluster, name)
                    deleted.append(name)
                except ApiError as error:
                    if not (if_exists and error.code == ErrorCode.unknown_topic_or_partition):
                        raise
                bar.advance(1)
        return deleted

    deleted = session.run(work)
    if session.as_json:
        write_json({"deleted": deleted})
    else:
        for name in deleted:
            write_line(f"topic {name} deleted")
