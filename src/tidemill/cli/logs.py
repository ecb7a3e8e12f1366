"""``tidemill log dump | verify | repair``: the files of a data directory, without a node."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import ExecuteOption, ExitCode, Session, command, warn

if TYPE_CHECKING:
    from tidemill.cli.data_files import PartitionFiles
    from tidemill.log.offline.inspect import DumpedBatch, VerifyReport
    from tidemill.log.offline.repair import RepairPlan

__all__ = ("register",)

PartitionsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="TOPIC[:P,P]", help="Topics, or partitions like orders:0,2. Default: all."),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data directory. Default: the setting."),
]

#: The folder of the tables' state; ``tidemill.tables``, which defines it, takes long to load.
_STATE_FOLDER = "kv"
_REPAIR_CACHE_BYTES = 8 * 1024 * 1024


class Treatment(StrEnum):
    """What to do about damage in the middle of a log."""

    SKIP = "skip"
    TRUNCATE = "truncate"


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "dump")(dump)
    command(app, "verify")(verify)
    command(app, "repair")(repair)


def dump(
    session: Session,
    partitions: PartitionsArgument = None,
    data: DataOption = None,
    records: Annotated[
        bool, typer.Option("--records", "-r", help="Also show the records of each batch.")
    ] = False,
    from_offset: Annotated[
        int, typer.Option("--from", metavar="OFFSET", min=0, help="The first offset to show.")
    ] = 0,
    to_offset: Annotated[
        int | None, typer.Option("--to", metavar="OFFSET", min=0, help="The offset to stop before.")
    ] = None,
) -> None:
    """Show the record batches in the files of partitions. Changes nothing; a node may be running."""
    from tidemill.cli.data_files import data_directory, find_partitions
    from tidemill.cli.output import write_json, write_line
    from tidemill.log.offline import inspect
    from tidemill.log.storage import LocalStorage

    path = data_directory(data)
    storage = LocalStorage(path)
    for partition in find_partitions(path, partitions or []):
        if not session.as_json:
            write_line(f"{partition.topic}-{partition.index}  ({partition.directory})")
        batches = inspect.dump(
            storage, partition.directory, records=records, from_offset=from_offset, to_offset=to_offset
        )
        for batch in batches:
            if session.as_json:
                write_json(_batch_as_json(partition, batch))
            else:
                for line in _batch_as_text(batch):
                    write_line(line)


def _batch_as_json(partition: PartitionFiles, batch: DumpedBatch) -> dict[str, Any]:
    from tidemill.cli.topics.output_format import text_or_base64
    from tidemill.records.compression import CODEC_NAMES

    value: dict[str, Any] = {
        "topic": partition.topic,
        "partition": partition.index,
        "segment": batch.segment,
        "position": batch.position,
        "bytes": batch.size_bytes,
        "problem": batch.problem or None,
    }
    header = batch.header
    if header is not None:
        value |= {
            "base_offset": header.base_offset,
            "last_offset": header.last_offset,
            "record_count": header.record_count,
            "leader_epoch": header.leader_epoch,
            "compression": CODEC_NAMES.get(header.codec, str(header.codec)),
            "max_timestamp": header.max_timestamp,
            "producer_id": header.producer_id,
            "producer_epoch": header.producer_epoch,
            "base_sequence": header.base_sequence,
            "transactional": header.is_transactional,
            "control": header.is_control,
        }
    if batch.records:
        value["records"] = [
            {
                "offset": record.offset,
                "timestamp": record.timestamp_ms,
                **text_or_base64("key", record.key),
                **text_or_base64("value", record.value),
                "headers": [{"name": name, **text_or_base64("value", each)} for name, each in record.headers],
            }
            for record in batch.records
        ]
    return value


def _batch_as_text(batch: DumpedBatch) -> list[str]:
    from tidemill.records.compression import CODEC_NAMES

    where = f"  {batch.segment.rpartition('/')[2]} at byte {batch.position}: {batch.size_bytes} bytes"
    header = batch.header
    if header is None:
        return [f"{where}, NOT A BATCH: {batch.problem}"]
    parts = [
        f"offsets {header.base_offset} to {header.last_offset}",
        f"{header.record_count} records",
        CODEC_NAMES.get(header.codec, str(header.codec)),
        f"epoch {header.leader_epoch}",
    ]
    if header.is_idempotent:
        parts.append(f"producer {header.producer_id}/{header.producer_epoch} from {header.base_sequence}")
    parts += [
        word
        for word, holds in (("transactional", header.is_transactional), ("control", header.is_control))
        if holds
    ]
    if batch.problem:
        parts.append(f"PROBLEM: {batch.problem}")
    lines = [f"{where}, {', '.join(parts)}"]
    lines += [
        f"    {record.offset}  {record.timestamp_ms}  key {_shown(record.key)}  value {_shown(record.value)}"
        for record in batch.records
    ]
    return lines


def _shown(data: bytes | None) -> str:
    return "null" if data is None else repr(data)[1:]


def verify(session: Session, partitions: PartitionsArgument = None, data: DataOption = None) -> None:
    """Check every record batch of partitions. Changes nothing. Exits with 1 if something needs repair."""
    from tidemill.cli.data_files import data_directory, find_partitions, owner_of
    from tidemill.cli.output import progress
    from tidemill.log.offline import inspect
    from tidemill.log.storage import LocalStorage

    path = data_directory(data)
    owner = owner_of(path)
    if owner is not None:
        warn(f"{path} is in use by {owner}: what it writes meanwhile may look torn")
    chosen = find_partitions(path, partitions or [])
    storage = LocalStorage(path)
    reports: list[tuple[PartitionFiles, VerifyReport]] = []
    with progress("verifying", sum(each.log_bytes for each in chosen), in_bytes=True) as bar:
        for partition in chosen:
            report = inspect.verify(storage, partition.directory, is_listed=partition.listed_below > 0)
            reports.append((partition, report))
            bar.advance(partition.log_bytes)
    _show_reports(session, reports)
    if any(_serious(report) for _, report in reports):
        raise typer.Exit(ExitCode.ERROR)


def _serious(report: VerifyReport) -> bool:
    """Whether something is wrong that the next start does not repair by itself."""
    from tidemill.log.offline.inspect import ProblemKind

    return any(problem.kind is not ProblemKind.TORN for problem in report.problems)


def _show_reports(session: Session, reports: list[tuple[PartitionFiles, VerifyReport]]) -> None:
    from tidemill.cli.output import Table, human_bytes, show, write_line

    value = [
        {
            "topic": partition.topic,
            "partition": partition.index,
            "directory": partition.directory,
            "ok": report.ok,
            "segments": report.segments,
            "batches": report.batches,
            "records": report.records,
            "bytes": report.size_bytes,
            "end_offset": report.end_offset,
            "problems": [
                {"kind": each.kind.value, "path": each.path, "position": each.position, "what": each.what}
                for each in report.problems
            ],
            "notes": report.notes,
            "kept_aside": report.kept_aside,
        }
        for partition, report in reports
    ]
    rows = [
        (
            partition.topic,
            partition.index,
            "ok" if report.ok else "DAMAGED" if _serious(report) else "torn",
            report.records,
            report.end_offset,
            human_bytes(report.size_bytes),
        )
        for partition, report in reports
    ]
    show(session, value, Table(("topic", "partition", "verdict", "records", "end", "size"), rows))
    if session.as_json:
        return
    for _, report in reports:
        for problem in report.problems:
            write_line(str(problem))
        for note in report.notes:
            write_line(f"note: {note}")
    if any(_serious(report) for _, report in reports):
        write_line("'tidemill log repair' shows what can be done")


def repair(
    session: Session,
    partitions: PartitionsArgument = None,
    data: DataOption = None,
    treatment: Annotated[
        Treatment,
        typer.Option(
            "--treatment",
            help="skip: leave out damaged records, keep those after them. truncate: end the log before them.",
        ),
    ] = Treatment.SKIP,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Also start partitions whose files are missing. Their records are lost; the state of a "
            "table is kept if it still exists.",
        ),
    ] = False,
    execute: ExecuteOption = False,
) -> None:
    """Make damaged partitions usable again. The node must be stopped.

    Nothing is deleted: what is taken out of the log is kept in files beside it.
    """
    from tidemill.cli.data_files import data_directory, find_partitions, refuse_if_running
    from tidemill.cli.output import progress, write_line
    from tidemill.log.offline.repair import DamageTreatment, apply_repair, plan_repair
    from tidemill.log.storage import LocalStorage
    from tidemill.server.disk.data_directory import DataDirectory

    path = data_directory(data)
    refuse_if_running(path)
    chosen = find_partitions(path, partitions or [])
    storage = LocalStorage(path)
    plans: list[tuple[PartitionFiles, RepairPlan]] = []
    directory = DataDirectory(path)
    if execute:
        # Acquiring it also removes the mark of a clean stop, so that the next start reads every log.
        directory.acquire()
    try:
        with progress("checking", sum(each.log_bytes for each in chosen), in_bytes=True) as bar:
            for partition in chosen:
                plan = plan_repair(
                    storage,
                    partition.directory,
                    DamageTreatment(treatment.value),
                    listed_below=partition.listed_below,
                    accept_loss=accept_loss,
                    state_offset=_state_offset(path, partition) if accept_loss else None,
                )
                plans.append((partition, plan))
                bar.advance(partition.log_bytes)
        in_cluster = directory.read_identity() is not None
        done = [
            apply_repair(plan, in_cluster=in_cluster) if execute and not plan.is_empty else []
            for _, plan in plans
        ]
    finally:
        directory.release()
    _show_plans(session, plans, done, execute)
    if in_cluster and not session.as_json and any(plan.loses_records for _, plan in plans):
        write_line(
            "This node is part of a cluster: at its next start a replica that has lost records leaves the "
            "in-sync set, and is copied anew from its leader. If no other replica has them, the partition "
            "has no leader until you decide: see 'tidemill cluster elect --help'"
        )
    if any(plan.refused for _, plan in plans):
        raise typer.Exit(ExitCode.ERROR)


def _state_offset(data: Path, partition: PartitionFiles) -> int | None:
    """The log offset of the table's state that was folded from the partition; None if there is none."""
    directory = data / _STATE_FOLDER / partition.name
    if not directory.is_dir():
        return None
    from tidemill.kv.contract import KvLimits
    from tidemill.kv.recovery import newest_offset
    from tidemill.server.runtime import rocks_engine
    from tidemill.tables.state.bucket import bucket_identity

    engine = rocks_engine(KvLimits(_REPAIR_CACHE_BYTES, _REPAIR_CACHE_BYTES), lambda error: False)
    return newest_offset(directory, engine, bucket_identity(partition.topic_id, partition.index))


def _show_plans(
    session: Session, plans: list[tuple[PartitionFiles, RepairPlan]], done: list[list[str]], executed: bool
) -> None:
    from tidemill.cli.output import write_json, write_line

    if session.as_json:
        write_json(
            [
                {
                    "topic": partition.topic,
                    "partition": partition.index,
                    "directory": partition.directory,
                    "executed": executed and not plan.is_empty,
                    "steps": [str(step) for step in plan.steps],
                    "bytes_put_aside": plan.bytes_put_aside,
                    "offsets_lost": plan.offsets_lost,
                    "refused": plan.refused or None,
                    "kept_in": files,
                }
                for (partition, plan), files in zip(plans, done, strict=True)
            ]
        )
        return
    needed = [(partition, plan) for partition, plan in plans if not plan.is_empty or plan.refused]
    for partition, plan in needed:
        write_line(f"{partition.topic}-{partition.index}  ({partition.directory})")
        for line in plan.describe():
            write_line(f"  {line}")
    if not needed:
        write_line(f"nothing to repair in {len(plans)} partitions")
    elif executed:
        write_line(f"repaired {sum(not plan.is_empty for _, plan in needed)} partitions")
    elif all(plan.is_empty for _, plan in needed):
        write_line("nothing was changed")
    else:
        write_line("nothing was changed; add --execute to do it")
