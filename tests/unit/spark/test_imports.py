"""What Spark's processes load with the connector: there are many, and most live for one query only."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What importing a module of the connector must not load, and who needs it instead.
_NEVER = (
    "hypothesis",  # tests
    "kio.serial",  # the first message that is read
    "kio.schema.index",  # tests
    "pandas",  # those who ask for it
    "rocksdict",  # the state of a node
    "sqlglot",  # filters as SQL
    "tidemill.client.admin.groups",  # streams that show their progress
    "tidemill.config.settings",  # nodes
    "tidemill.config.topic",  # changing topics
    "tidemill.log",  # nodes
    "tidemill.server",  # nodes
    "tidemill.tables.rows.json_reading",  # tables of JSON
    "tidemill.tables.rows.json_writing",
    "tidemill.tables.keys.codec",  # look-ups and writes
    "tidemill.tables.predicates.predicate",  # filters
)
_NOT_FOR_READERS = (
    "tidemill.records.checksum",  # records of logs
    "pyarrow.compute",
    "tidemill.client.producing.attempts",  # writers
    "tidemill.client.consuming.batch_reader",  # tasks that read a log
    "tidemill.client.producing.columns",  # writers
    "tidemill.client.tables.table",  # loaded by the one who opens it
    "tidemill.records.columns.build",
    "tidemill.records.columns.read",
    "tidemill.spark.reading.decoding",
    "tidemill.spark.writing.writers",
    "tidemill.tables.rows.conforming",
    "tidemill.tables.rows.formats",
    "tidemill.tables.rows.binary",
)


def loaded_by(statements: str) -> set[str]:
    """The modules of a fresh process after these statements and what Spark imports before."""
    program = (
        "import sys, pyspark.worker, pyspark.sql.datasource\n"
        "import pyspark.sql.streaming.python_streaming_source_runner\n"
        f"{statements}\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["reader", "stream_reader", "tasks"])
def test_a_reader_loads_nothing_that_only_others_need(module: str) -> None:
    loaded = loaded_by(f"import tidemill.spark.reading.{module}")
    assert f"tidemill.spark.reading.{module}" in loaded
    assert not loaded & {*_NEVER, *_NOT_FOR_READERS}


def test_a_writer_loads_nothing_that_only_others_need() -> None:
    loaded = loaded_by("import tidemill.spark.writing.writers")
    assert "tidemill.client.producing.attempts" in loaded
    assert not loaded & {
        *_NEVER,
        "pyarrow.compute",
        "tidemill.client.consuming.batch_reader",
        "tidemill.client.tables.follow",
    }


def test_kio_is_loaded_without_hypothesis_which_can_be_imported_afterwards() -> None:
    statements = (
        "import tidemill.wire.tables, tidemill.wire.extra, kio.serial\n"
        "assert 'hypothesis' not in sys.modules, 'kio has loaded it'\n"
        "import hypothesis.strategies\n"
        "assert hypothesis.strategies.integers(1, 1).example() == 1"
    )
    assert {"kio.static.primitive", "hypothesis.strategies"} <= loaded_by(statements)


def test_kio_gets_the_hypothesis_that_is_there_already() -> None:
    statements = (
        "import hypothesis, tidemill.errors, kio.static._phantom\n"
        "assert kio.static._phantom.hypothesis is hypothesis"
    )
    assert "tidemill.errors" in loaded_by(statements)
