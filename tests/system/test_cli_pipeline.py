"""``tidemill pipeline`` as its users run it: a project as generated, on real Spark and a node of its own.

One story, because every run starts Spark anew: the first run, a second that takes only what is new, and a
dry-run that finds a mistake.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import tidemill

_COMMAND = [sys.executable, "-m", "tidemill.cli"]
_SRC = Path(__file__).parents[2] / "src"
_AS_INSTALLED = Path(__file__).parents[1] / "support" / "as_installed"
_DEADLINE_SECONDS = 400
#: Runs are short here: code that starts fast is better than code that becomes fast.
_FAST = (
    "--conf",
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
    "--conf=spark.sql.shuffle.partitions=1",
)


def call(*command: str, folder: Path, code: int = 0) -> tuple[str, str]:
    """What a command writes to its two outputs; it must end with ``code``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEMILL_", "SPARK_"))}
    paths = os.pathsep.join((str(_AS_INSTALLED), str(_SRC)))
    result = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout, result.stderr


def pipeline(*arguments: str, folder: Path, code: int = 0) -> tuple[str, str]:
    return call(*_COMMAND, "pipeline", *arguments, folder=folder, code=code)


def rows_by_flow(output: str) -> dict[str, Any]:
    """How many rows each flow read, from what a run wrote as JSON."""
    events = [json.loads(line) for line in output.splitlines()]
    assert events[-1]["event"] == "completed", output
    return {event["flow"]: event["rows"] for event in events if event["event"] == "finished"}


def state_of(project: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events that went in, and the rows of the sink's table."""
    with tidemill.open(project / "state" / "node") as db:
        events = db.table("shop.order_events").follow(
            from_offsets={("shop.order_events", 0): 0}, until_now=True
        )
        sent = [change.row for batch in events for change in batch]
        return sent, db.table("shop.orders").scan().to_arrow().to_pylist()


def order_and_status(event: dict[str, Any]) -> tuple[int, str]:
    """What no two events have in common."""
    return event["id"], event["status"]


def check(project: Path, orders: int) -> None:
    """The sink's table has the latest event of every order; Spark's tables have every event once."""
    sent, found = state_of(project)
    latest = {event["id"]: event for event in sent}
    assert len(latest) == orders
    assert sorted(found, key=lambda row: row["id"]) == [latest[key] for key in sorted(latest)]
    history = pyarrow.parquet.read_table(project / "state/warehouse/order_history").to_pylist()
    assert sorted(map(order_and_status, history)) == sorted(map(order_and_status, sent))
    revenue: dict[str, Decimal] = {}
    for event in sent:
        if event["status"] == "paid":
            revenue[event["region"]] = revenue.get(event["region"], Decimal(0)) + event["amount"]
    view = pyarrow.parquet.read_table(project / "state/warehouse/revenue_by_region").to_pylist()
    assert {row["region"]: row["revenue"] for row in view} == revenue


def test_init_says_what_is_next_and_does_not_touch_what_is_there(tmp_path: Path) -> None:
    output, _ = pipeline("init", "shop", folder=tmp_path)
    assert "tidemill pipeline run" in output
    (tmp_path / "shop" / "README.md").write_text("mine")
    _, errors = pipeline("init", "shop", folder=tmp_path, code=1)
    assert "is there already" in errors
    assert (tmp_path / "shop" / "README.md").read_text() == "mine"


@pytest.mark.timeout(3 * _DEADLINE_SECONDS)
def test_a_new_project_runs_as_generated_and_then_takes_only_what_is_new(tmp_path: Path) -> None:
    pipeline("init", "shop", folder=tmp_path)
    project = tmp_path / "shop"

    output, errors = pipeline("run", *_FAST, "--format", "json", folder=project)
    assert rows_by_flow(output) == {
        "order_history": 1_800,
        "keep_latest_orders": 1_800,
        "revenue_by_region": None,
    }
    assert errors == ""
    completed = json.loads(output.splitlines()[-1])
    assert (completed["tables"], completed["topics"]) == (["shop.orders"], [])
    assert [Path(path).name for path in completed["spark_tables"]] == ["order_history", "revenue_by_region"]
    check(project, orders=1_000)

    call(sys.executable, "prepare.py", "--send", "50", folder=project)
    output, _ = pipeline("run", *_FAST, "--format", "json", folder=project)
    assert rows_by_flow(output) == {"order_history": 90, "keep_latest_orders": 90, "revenue_by_region": None}
    check(project, orders=1_050)

    # Spark itself would pass over the name of a sink, and say that all went well.
    _, errors = pipeline("run", *_FAST, "--refresh", "latest_orders", folder=project, code=1)
    assert "error: nothing ran: --refresh=latest_orders names no table of this pipeline" in errors
    check(project, orders=1_050)

    broken = project / "transformations" / "revenue.py"
    broken.write_text(broken.read_text().replace('groupBy("region")', 'groupBy("reggion")'))
    # A catalog that has nothing to remember is made faster.
    in_memory = "--conf=spark.sql.catalogImplementation=in-memory"
    output, errors = pipeline("dry-run", *_FAST, in_memory, folder=project, code=1)
    assert "error: transformations/revenue.py, line" in errors
    assert "reggion" in errors
    assert "Traceback" not in output + errors
    log = project / output.splitlines()[-1].removeprefix("failed; log: ")
    assert "AnalysisException" in log.read_text()
