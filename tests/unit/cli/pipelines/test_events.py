"""What spark-pipelines prints, as events and sentences. The texts are those that Spark 4.3 wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.cli.pipelines.errors import cause_of, definition_of, essence, short_name
from tidemill.cli.pipelines.events import (
    Event,
    Failed,
    Finished,
    Refused,
    RunCompleted,
    Said,
    Started,
    Translator,
)

FAILURE = """\
2026-11-16 16:28:05: Flow 'to_out' has FAILED.
Error: [STREAM_FAILED] Query [id = 2460a1b9, runId = 13da96e3] terminated with exception: [PYTHON_EXCEPTION] \
An exception was thrown from the Python worker: Traceback (most recent call last):
  File "/somewhere/sink.py", line 37, in write
    raise TableError("the table shop.sink does not exist: create it")
tidemill.errors.TableError: the table shop.sink does not exist: create it
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: to_out [id = 2460a1b9, runId = 13da96e3]
Current State: ACTIVE

[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "/somewhere/sink.py", line 37, in write
    raise TableError("the table shop.sink does not exist: create it")
tidemill.errors.TableError: the table shop.sink does not exist: create it
 SQLSTATE: 38000
"""
REASON = "TableError: the table shop.sink does not exist: create it"


def events_of(*parts: str, at: float = 0.0, step: float = 10.0) -> list[Event]:
    """All events of these lines, which come ten seconds apart, and of their end."""
    translator = Translator()
    found: list[Event] = []
    for line in "\n".join(parts).splitlines():
        found += translator.printed(line, at)
        at += step
    return found + translator.ended(at)


def line(message: str) -> str:
    return f"2026-11-16 16:28:00: {message}"


def test_a_view_starts_and_finishes_under_its_short_name() -> None:
    events = events_of(
        line("Starting run..."),
        line("Flow spark_catalog.default.orders is QUEUED."),
        line("Flow spark_catalog.default.orders is PLANNING."),
        line("Flow spark_catalog.default.orders is STARTING."),
        line("Flow spark_catalog.default.orders is RUNNING."),
        line("Flow spark_catalog.default.orders has COMPLETED."),
        line("Run is COMPLETED."),
    )
    assert events == [Started("orders", 1), Finished("orders", 20.0, None), RunCompleted()]


def test_rows_are_those_of_all_batches() -> None:
    translator = Translator()
    translator.printed(line("Flow to_out is STARTING."), 0.0)
    for rows in (10, 32):
        translator.logged(
            f'Streaming query made progress: {{ "id" : "1",   "name" : "to_out",   "numInputRows" : {rows} }}'
        )
    translator.printed(line("Flow to_out has COMPLETED."), 3.0)
    assert translator.printed(line("Run is COMPLETED."), 3.0) == [Finished("to_out", 3.0, 42), RunCompleted()]


@pytest.mark.parametrize("text", ["", "12:00:00 WARN Utils: no", "Streaming query made progress: { torn"])
def test_other_lines_of_the_log_count_nothing(text: str) -> None:
    translator = Translator()
    translator.printed(line("Flow a is STARTING."), 0.0)
    translator.logged(text)
    translator.printed(line("Flow a has COMPLETED."), 1.0)
    assert translator.ended(1.0) == [Finished("a", 1.0, 0)]


def test_a_flow_that_fails_right_after_completing_has_not_finished() -> None:
    events = events_of(
        line("Flow to_out is STARTING."), line("Flow to_out has COMPLETED."), FAILURE, step=0.1
    )
    assert events == [Started("to_out", 1), Failed("to_out", REASON, final=False)]


def test_attempts_are_counted_and_the_last_failure_is_final() -> None:
    last = FAILURE.replace("has FAILED.", "has FAILED more than 2 times and will not be restarted.")
    events = events_of(line("Flow to_out is STARTING."), FAILURE, line("Flow to_out is STARTING."), last)
    assert events == [
        Started("to_out", 1),
        Failed("to_out", REASON, final=False),
        Started("to_out", 2),
        Failed("to_out", REASON, final=True),
    ]


def test_a_failure_that_spark_tells_twice_is_one() -> None:
    events = events_of(line("Flow to_out is STARTING."), FAILURE, FAILURE)
    assert events == [Started("to_out", 1), Failed("to_out", REASON, final=False)]


def test_a_flow_that_cannot_be_resolved_is_refused_without_its_plan() -> None:
    events = events_of(
        line("Failed to resolve flow: 'spark_catalog.default.revenue'."),
        "Error: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `idd` cannot be resolved. Did you "
        "mean one of the following? [`id`, `v`]. SQLSTATE: 42703;\n'Project ['idd]\n+- ~SubqueryAlias raw\n",
    )
    (refused,) = events
    assert isinstance(refused, Refused)
    assert refused.flow == "revenue"
    assert refused.reason.endswith("Did you mean one of the following? [`id`, `v`].")


def test_what_the_pipeline_prints_is_handed_on() -> None:
    assert events_of(line("Importing a.py..."), "hello", "", line("Starting run...")) == [Said("hello")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "(org.apache.spark.x.Y$Z) org.apache.spark.SparkRuntimeException: [A] no. SQLSTATE: 42710",
            "[A] no.",
        ),
        ("plain words", "plain words"),
        ("Failed to resolve flows.\n\nA flow can fail to resolve because ...", "Failed to resolve flows."),
        ("x" * 2_000, "x" * 1_500 + "…"),
    ],
)
def test_the_essence_of_an_error(text: str, expected: str) -> None:
    assert essence(text) == expected


def test_of_chained_exceptions_the_last_counts() -> None:
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown from the Python worker: "
        "Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\n    g()\nKeyError: 1\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "b.py", line 2, in h\n    raise X\na.b.X: two words\n'
    )
    assert essence(text) == "X: two words"


def test_a_traceback_names_the_line_of_the_pipeline_and_not_that_of_spark(tmp_path: Path) -> None:
    errors = (
        "a warning\nTraceback (most recent call last):\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        '  File "/x/site-packages/pyspark/pipelines/cli.py", line 450, in <module>\n    main()\n'
        f'  File "{tmp_path}/transformations/orders.py", line 12, in <module>\n    spark.red()\n'
        '  File "/x/site-packages/pyspark/sql/session.py", line 9, in __getattr__\n    raise\n'
        "AttributeError: no attribute 'red'\n"
    )
    cause = cause_of(errors, tmp_path)
    assert cause == ("AttributeError: no attribute 'red'", tmp_path / "transformations/orders.py", 12)


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    errors = (
        "Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        f'  File "{tmp_path}/transformations/orders.py", line 3\n    def (\n        ^\n'
        "SyntaxError: invalid syntax\n"
    )
    cause = cause_of(errors, tmp_path)
    assert cause == ("SyntaxError: invalid syntax", tmp_path / "transformations/orders.py", 3)


def test_without_a_traceback_there_is_no_cause(tmp_path: Path) -> None:
    assert cause_of("WARN nothing", tmp_path) is None


def test_a_flow_is_found_by_its_function_its_name_or_its_sql(tmp_path: Path) -> None:
    python, broken, sql = (tmp_path / name for name in ("a.py", "b.py", "c.sql"))
    python.write_text(
        'import x\n\n@dp.table\ndef orders():\n    pass\n\n@dp.append_flow(name="f")\ndef g(): ...\n'
    )
    broken.write_text("def (\n")
    sql.write_text("-- all\nCREATE MATERIALIZED VIEW revenue AS SELECT 1\n")
    files = [python, broken, sql]
    assert definition_of("spark_catalog.default.orders", files) == (python, 4)
    assert definition_of("f", files) == (python, 8)
    assert definition_of("revenue", files) == (sql, 2)
    assert definition_of("unknown", files) is None


def test_names_in_other_databases_stay_whole() -> None:
    assert short_name("spark_catalog.sales.orders") == "sales.orders"
    assert short_name("lake.default.orders") == "lake.default.orders"
