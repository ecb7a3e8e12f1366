"""The results of a pipeline's run: where they are, and the commands that show them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from tidemill.errors import TidemillError

__all__ = ("Written", "how_to_look", "log_ends", "spark_tables", "written_since")

_SHOWN: Final = 5
_ROWS: Final = 10


@dataclass(frozen=True, slots=True)
class Written:
    """The tables and topics that a run has written to. The topics of tables are left out."""

    tables: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()


def log_ends(servers: str) -> dict[str, int]:
    """The number of offsets that every topic has used so far; empty if no server answers."""
    from tidemill.client.admin.topics import LATEST, list_offsets
    from tidemill.client.cluster import Cluster

    async def ask() -> dict[str, int]:
        async with Cluster(servers) as cluster:
            topics = [topic for topic in await cluster.all_topics() if not topic.internal]
            partitions = [(topic.name, each.index) for topic in topics for each in topic.partitions]
            found = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
        ends = dict.fromkeys((topic.name for topic in topics), 0)
        for (name, _), at in found.items():
            ends[name] += at.offset
        return ends

    try:
        return asyncio.run(ask())
    except TidemillError:
        # The run itself has succeeded, so this is not reported as its failure.
        return {}


def written_since(before: Mapping[str, int], servers: str) -> Written:
    """The tables and topics that have more records than ``before``."""
    import tidemill

    changed = sorted(name for name, end in log_ends(servers).items() if end > before.get(name, 0))
    try:
        with tidemill.connect(servers) as db:
            known = {table.name for table in db.tables()}
    except TidemillError:
        known = set()
    # The topics of a table are called database.table, or database.table.partition.
    tables = {name: ".".join(name.split(".")[:2]) for name in changed}
    return Written(
        tuple(sorted({table for table in tables.values() if table in known})),
        tuple(name for name, table in tables.items() if table not in known),
    )


def spark_tables(warehouse: str, flows: Sequence[str]) -> list[Path]:
    """The folders of the flows that are Spark's own tables, if they are on this machine."""
    address = urlsplit(warehouse)
    if address.scheme not in ("", "file"):
        return []
    folder = Path(unquote(address.path))
    return [folder / flow for flow in sorted(set(flows)) if (folder / flow).is_dir()]


def how_to_look(
    written: Written, tables_of_spark: Sequence[Path], servers: str, data: Path | None
) -> list[str]:
    """Lines that tell how to look at results. ``data``: the data of the run's own node, if it has one."""
    option = "" if data is not None else f" --server {servers}"
    commands = [f"tidemill table scan {name} --limit {_ROWS}{option}" for name in written.tables[:_SHOWN]]
    commands += [
        f"tidemill topic consume {name} --from -{_ROWS} --exit{option}" for name in written.topics[:_SHOWN]
    ]
    if commands and data is not None:
        commands.insert(0, f"tidemill up --data {data}    # in another terminal: the node with the results")
    commands += [
        f"python -c \"import pandas; print(pandas.read_parquet('{path}'))\""
        for path in tables_of_spark[:_SHOWN]
    ]
    return ["see the results:", *(f"  {command}" for command in commands)] if commands else []
