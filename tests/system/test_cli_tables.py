"""``tidemill db`` and ``tidemill table`` as their users run them: real processes against a real node."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import tidemill
from support.processes import NodeProcess

_DEADLINE_SECONDS = 120
_COMMAND = [sys.executable, "-m", "tidemill.cli"]
_SRC = Path(__file__).parents[2] / "src"
_AS_INSTALLED = Path(__file__).parents[1] / "support" / "as_installed"
_numbers = itertools.count()

ORDERS = "id bigint, region string, amount double"
ROWS = [{"id": number, "region": "eu" if number % 2 else "us", "amount": number / 4} for number in range(300)]
#: A column of every kind that CSV and JSON spell differently from Arrow.
WIDE = (
    "id int, flag boolean, price decimal(10,2), day date, at timestamp, local timestamp_ntz, clock time, "
    "span interval day to second, data binary, tags array<string>, place struct<x:double,y:double>"
)
WIDE_ROWS = [
    {
        "id": 1,
        "flag": True,
        "price": "12.50",
        "day": "2025-01-31",
        "at": "2025-01-31T12:00:00.25Z",
        "local": "2025-01-31T12:00:00",
        "clock": "12:30:00.000000001",
        "span": 1_500_000,
        "data": "AP8=",
        "tags": ["a", 'b"\n', None],
        "place": {"x": 1.5, "y": None},
    },
    {"id": 2, "flag": False, "tags": []},
    {"id": 3},
]


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    paths = [str(_AS_INSTALLED), str(_SRC), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | changes


#: Loads everything once and forks for every call: a process of its own each, without the second of loading.
_FORKING = """
import importlib, json, os, sys
import pandas, pyarrow.compute, tidemill.cli.app, tidemill.client.async_client
tidemill.cli.app.make_app()
for name in ("describing", "read_rows", "schema", "write_rows"):
    importlib.import_module("tidemill.cli.tables." + name)
for line in sys.stdin:
    arguments, *streams = json.loads(line)
    child = os.fork()
    if not child:
        for descriptor, path in enumerate(streams):
            os.dup2(os.open(path, os.O_RDWR), descriptor)
        sys.argv, code = ["tidemill", *arguments], 0
        try:
            tidemill.cli.main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Commands:
    """Runs ``tidemill`` with arguments, to its end."""

    def __init__(self, directory: Path, server: str) -> None:
        self._streams = [directory / name for name in ("in", "out", "err")]
        self._server = server
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def run(self, *arguments: str, send: bytes = b"", exit_code: int = 0) -> tuple[bytes, bytes]:
        """Its stdout and stderr; insists on its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for path, data in zip(self._streams, (send, b"", b""), strict=True):
            path.write_bytes(data)
        # Behind "--" there are only keys.
        place = arguments.index("--") if "--" in arguments else len(arguments)
        given = [*arguments[:place], "--server", self._server, *arguments[place:]]
        self._process.stdin.write(json.dumps([given, *map(str, self._streams)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, errors = (path.read_bytes() for path in self._streams[1:])
        assert code == exit_code, (code, out, errors)
        return out, errors

    def __call__(self, *arguments: str, raw: bool = False, exit_code: int = 0, send: bytes = b"") -> Any:
        """The lines of JSON that it writes; with ``raw`` its output, with ``exit_code`` its error."""
        form = () if raw or "--" in arguments else ("--format", "json")
        out, errors = self.run(*arguments, *form, send=send, exit_code=exit_code)
        if exit_code:
            assert b"Traceback" not in errors
            return errors.decode()
        return out if raw else [json.loads(line) for line in out.splitlines()]

    def close(self) -> None:
        self._process.communicate(timeout=_DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def cli(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("cli"), node.bootstrap_servers)
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def db(node: NodeProcess) -> Iterator[tidemill.Tidemill]:
    """The same node from Python, to prepare tables and to look at them."""
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def name() -> str:
    """A table that no other test uses."""
    return f"shop.t{next(_numbers)}"


@pytest.fixture
def orders(db: tidemill.Tidemill, name: str) -> str:
    """A table of the test's own, with 300 rows in 2 buckets."""
    db.create_table(name, ORDERS, primary_key="id", buckets=2).upsert(ROWS)
    return name


@pytest.fixture(scope="module")
def kept(db: tidemill.Tidemill) -> str:
    """A table that no test changes, with 300 rows in 2 buckets."""
    db.create_table("shop.kept", ORDERS, primary_key="id", buckets=2).upsert(ROWS)
    return "shop.kept"


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """``tidemill`` in the background; it is gone afterwards."""
    process = subprocess.Popen([*_COMMAND, *arguments], env=environment(), **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def all_rows(db: tidemill.Tidemill, table: str) -> list[dict[str, Any]]:
    rows = db.table(table).scan().to_arrow().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


# --- help


def test_help_of_every_command_has_an_example_and_loads_no_arrow() -> None:
    script = """
import sys, typer, tidemill.cli.app
def walk(path, command):
    for name, each in getattr(command, "commands", {}).items():
        yield from walk((*path, name), each)
    if not hasattr(command, "commands"):
        yield path, command
root = typer.main.get_command(tidemill.cli.app.make_app())
for group in ("db", "table"):
    for path, command in walk((group,), root.commands[group]):
        print(*path, "Example" in command.help and "tidemill " + " ".join(path) in command.help)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment(), check=True)
    *lines, modules = done.stdout.decode().splitlines()
    assert {line.rpartition(" ")[2] for line in lines} == {"True"}, lines
    assert len(lines) == 5 + 11 + 2 + 3 + 3
    assert not {"pyarrow", "numpy", "rich", "kio", "sqlglot"} & set(modules.split())


def test_wrong_usage_exits_with_2_and_names_the_mistake(cli: Commands, tmp_path: Path) -> None:
    odd = tmp_path / "rows.txt"
    odd.touch()
    mistakes = {
        "--columns, or with --schema-from": ("create", "shop.x"),
        "nothing to change": ("alter", "shop.x"),
        "--input-format": ("upsert", "shop.x", str(odd)),
        "there is no file": ("upsert", "shop.x", str(tmp_path / "missing.csv")),
        "either keys or a --file": ("delete", "shop.x"),
        "like 90s, 10m": ("lease", "acquire", "shop.x", "--for", "soon"),
        "--limit": ("scan", "shop.x", "--all", "--limit", "3"),
    }
    for said, arguments in mistakes.items():
        assert said in " ".join(cli("table", *arguments, exit_code=2).split())


# --- databases


def test_database_is_created_shown_changed_and_dropped(cli: Commands) -> None:
    created = cli("db", "create", "depot", "--comment", "for tests", "--property", "owner=anna")
    assert created == [{"database": "depot", "created": True}]
    assert "DATABASE_ALREADY_EXISTS" in cli("db", "create", "depot", exit_code=1)
    assert cli("db", "create", "depot", "--if-not-exists")[0]["created"] is False
    cli("db", "alter", "depot", "--set", "tier=1", "--unset", "owner")
    cli("table", "create", "depot.a", "--columns", "id int", "--primary-key", "id")
    (described,) = cli("db", "describe", "depot")
    assert (described["comment"], described["properties"]) == ("for tests", {"tier": "1"})
    assert described["tables"] == ["depot.a"]
    assert {"database": "depot", "tables": 1}.items() <= next(
        each for each in cli("db", "list")[0] if each["database"] == "depot"
    ).items()
    assert "DATABASE_NOT_EMPTY" in cli("db", "drop", "depot", "--yes", exit_code=1)
    assert cli("db", "drop", "depot", "--cascade", "--yes")[0]["dropped"] is True
    assert "DATABASE_NOT_FOUND" in cli("db", "describe", "depot", exit_code=3)
    assert cli("db", "drop", "depot", "--yes", "--if-exists")[0]["dropped"] is False


# --- tables


def test_table_is_created_shown_changed_and_dropped(cli: Commands, name: str) -> None:
    words = "id bigint, region string comment 'where', tags array<string>"
    create = ("table", "create", name, "--columns", words, "--primary-key", "region,id", "--buckets", "3")
    options = ("--row-format", "json", "--property", "user.team=a", "--comment", "what was ordered")
    (created,) = cli(*create, *options)
    assert created["created"] is True
    assert "TABLE_ALREADY_EXISTS" in cli(*create, exit_code=1)
    assert cli(*create, "--if-not-exists")[0]["created"] is False
    cli("table", "alter", name, "--add-column", "note string", "--set", "user.x=1", "--unset", "user.team")
    (described,) = cli("table", "describe", name)
    assert [(each["name"], each["type"], each["nullable"], each["key"]) for each in described["columns"]] == [
        ("id", "bigint", False, 2),
        ("region", "string", False, 1),
        ("tags", "array<string>", True, None),
        ("note", "string", True, None),
    ]
    expected = {
        "primary_key": ["region", "id"],
        "buckets": 3,
        "routing": {"kind": "hash", "version": 1, "boundaries": []},
        "row_format": "json",
        "key_format": "json",
        "partitions": [{"partition": None, "topic": name}],
        "properties": {"user.x": "1"},
        "comment": "what was ordered",
    }
    assert expected.items() <= described.items()
    assert [each["schema_id"] for each in described["schema_versions"]] == [0, 1]
    shown = cli("table", "describe", name, raw=True).decode()
    assert "by hash" in shown
    assert "where" in shown
    assert name in [each["table"] for each in cli("table", "list", "shop")[0]]
    assert cli("table", "drop", name, "--yes") == [{"dropped": [name]}]
    assert "TABLE_NOT_FOUND" in cli("table", "describe", name, exit_code=3)
    assert cli("table", "drop", name, "--yes", "--if-exists") == [{"dropped": []}]


def test_boundaries_are_typed_like_keys_and_shown_the_same(cli: Commands, name: str) -> None:
    arguments = ("table", "create", name, "--columns", "region string, id int", "-k", "region", "-k", "id")
    (created,) = cli(*arguments, "--boundary", "eu", "--boundary", '["us",-5]')
    assert created["routing"] == {"kind": "range", "version": 1, "boundaries": ["eu", '["us",-5]']}
    assert created["buckets"] == 3
    error = cli(*arguments[:2], f"{name}b", *arguments[3:], "--boundary", '["us","x"]', exit_code=1)
    assert "KEY_REFUSED" in error
    assert "whole number" in error


def test_refused_schema_creates_nothing(cli: Commands, name: str) -> None:
    assert "INVALID_SCHEMA" in cli("table", "create", name, "--columns", "id bigint, id int", exit_code=1)
    assert "TABLE_NOT_FOUND" in cli("table", "stats", name, exit_code=3)


# --- writing


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz", "parquet", "json", "jsonl"])
def test_file_makes_its_table_and_fills_it(
    cli: Commands, db: tidemill.Tidemill, name: str, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"rows.{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix == "parquet":
        pa.parquet.write_table(table, file)
    elif "json" in suffix:
        lines = [json.dumps(row) for row in ROWS]
        file.write_text("[" + ",\n".join(lines) + "]" if suffix == "json" else "\n".join(lines))
    else:
        sink = pa.BufferOutputStream()
        options = pa.csv.WriteOptions(delimiter="\t" if suffix == "tsv" else ",")
        pa.csv.write_csv(table, sink, options)
        data = sink.getvalue().to_pybytes()
        file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    cli("table", "create", name, "--schema-from", str(file), "--primary-key", "id", "--buckets", "2")
    (written,) = cli("table", "upsert", name, str(file))
    assert (written["written"], written["bytes_read"]) == (300, file.stat().st_size)
    assert all_rows(db, name) == ROWS


def test_every_type_goes_out_as_csv_json_and_parquet_and_comes_back(
    cli: Commands, db: tidemill.Tidemill, name: str, tmp_path: Path
) -> None:
    db.create_table(name, WIDE, primary_key="id")
    cli("table", "upsert", name, "-", "--input-format", "json", send=json.dumps(WIDE_ROWS).encode())
    original = all_rows(db, name)
    assert original[0]["data"] == b"\0\xff"
    assert original[0]["place"] == {"x": 1.5, "y": None}
    for suffix in ("csv", "jsonl", "parquet"):
        file = tmp_path / f"out.{suffix}"
        output = () if suffix != "jsonl" else ("--output", "json")
        cli("table", "scan", name, "--to-file", str(file), *output, raw=True)
        again = f"{name}{suffix}"
        db.create_table(again, WIDE, primary_key="id")
        cli("table", "upsert", again, str(file))
        assert all_rows(db, again) == original
    assert list(tmp_path.glob(".*")) == []


def test_several_files_and_stdin_are_written_one_after_the_other(
    cli: Commands, db: tidemill.Tidemill, orders: str, tmp_path: Path
) -> None:
    file = tmp_path / "first.csv"
    file.write_text("region;id\nfirst;7\nfirst;8\n")
    arguments = ("table", "upsert", orders, str(file), "-", "--input-format", "csv", "--delimiter", ";")
    said = cli(*arguments, raw=True, send=b'id;amount;region\n8;;""\n').decode()
    assert said.startswith("wrote 3 rows")
    found = db.table(orders)
    assert found.lookup(7) == {"id": 7, "region": "first", "amount": None}
    assert found.lookup(8) == {"id": 8, "region": "", "amount": None}


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("csv", b"id,amount\n1,2\n2,two\n", "stdin, row 2: column 'amount' (double): "),
        ("csv", b"id,amount\n1,2\n,3\n", "stdin, row 2: column 'id' is null"),
        ("csv", b"id,amount\n1,2,3\n", "stdin, row 1: Expected 2 columns, got 3"),
        ("csv", b"id,cost\n1,2\n", "column 'cost', which the table does not have"),
        ("csv", b"", "Empty CSV file"),
        ("json", b'{"id":1}\n{"id":"2"}\n', "stdin, row 2"),
        ("json", b'[{"id":1},7]', "stdin, row 2 is not an object"),
        ("json", b'[{"id":1}', "']'"),
        ("parquet", b"PAR1", "cannot come through a pipe"),
    ],
)
def test_refused_row_is_named_and_nothing_of_its_piece_is_written(
    cli: Commands, name: str, db: tidemill.Tidemill, kind: str, data: bytes, said: str
) -> None:
    table = db.create_table(name, ORDERS, primary_key="id")
    error = cli("table", "upsert", name, "-", "--input-format", kind, send=data, exit_code=1)
    assert error.startswith("error: ROW_REFUSED: ")
    assert said in error
    assert table.scan().count() == (1 if said == "']'" else 0)


def test_error_says_how_many_rows_are_written_before_it(
    cli: Commands, name: str, db: tidemill.Tidemill, tmp_path: Path
) -> None:
    db.create_table(name, "id bigint, note string", primary_key="id")
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"id": number, "note": "x" * 1000}) for number in range(3000)]
    file.write_text("\n".join([*lines, '{"id":null}\n']))
    error = cli("table", "upsert", name, str(file), exit_code=1)
    assert f"{file}, row 3,001" in error
    count = db.table(name).scan().count()
    assert 1000 <= count < 3000
    assert error.endswith(f"; {count:,} rows before it are written\n")


def test_interrupted_writing_ends_at_once_and_says_what_is_written(node: NodeProcess, kept: str) -> None:
    arguments = ("table", "upsert", kept, "-", "--input-format", "csv", "--server", node.bootstrap_servers)
    read, write = os.pipe()
    with started(*arguments, stdin=read, stderr=subprocess.PIPE) as process:
        os.close(read)
        # More than a pipe holds: when it is gone, the command is reading.
        os.write(write, b"id,region\n" + b"x" * 100_000)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == b"warning: interrupted; nothing is written\n"
        assert process.wait(_DEADLINE_SECONDS) == 130
        os.close(write)


def test_rows_are_deleted_by_keys_of_the_command_line_and_of_a_file(
    cli: Commands, db: tidemill.Tidemill, orders: str, tmp_path: Path
) -> None:
    assert cli("table", "delete", orders, "0", '{"id":1}', "[2]")[0]["deleted"] == 3
    file = tmp_path / "gone.csv"
    file.write_text("region,id\neu,3\nus,4\n")
    cli("table", "delete", orders, "--file", str(file))
    cli("table", "delete", orders, "-f", "-", "--input-format", "json", send=b'{"id":5,"why":"old"}\n')
    assert all_rows(db, orders) == ROWS[6:]
    assert "KEY_REFUSED" in cli("table", "delete", orders, "six", exit_code=1)
    assert "'id'" in cli(
        "table", "delete", orders, "-f", "-", "--input-format", "csv", send=b"x\n1\n", exit_code=1
    )


# --- reading


def test_rows_are_looked_up_in_the_order_of_the_keys(cli: Commands, kept: str) -> None:
    assert cli("table", "lookup", kept, "9", "[3]", '{"id":9}') == [ROWS[9], ROWS[3], ROWS[9]]
    assert cli("table", "lookup", kept, "9", "--columns", "region") == [{"region": "eu"}]
    shown = cli("table", "lookup", kept, "3", raw=True).decode().splitlines()
    assert [line.split() for line in shown] == [["ID", "REGION", "AMOUNT"], ["3", "eu", "0.75"]]


def test_key_without_a_row_exits_with_3_and_is_named(cli: Commands, kept: str) -> None:
    assert cli("table", "lookup", kept, "5", "--", "-7", exit_code=3).endswith("no row with key -7\n")
    assert "whole number like 42" in cli("table", "lookup", kept, "4.5", exit_code=1)
    assert "does not fit" in cli("table", "lookup", kept, str(2**63), exit_code=1)


def test_prefix_of_a_key_finds_all_rows_that_have_it(cli: Commands, db: tidemill.Tidemill, name: str) -> None:
    rows = [{"region": region, "id": number} for region in ("eu", "us") for number in range(150)]
    db.create_table(name, "region string, id int", primary_key=["region", "id"]).upsert(rows)
    assert cli("table", "lookup", name, "us", "--prefix") == rows[150:]
    assert len(cli("table", "lookup", name, "us", "--prefix", raw=True).splitlines()) == 101
    assert cli("table", "lookup", name, '["eu",7]') == [{"region": "eu", "id": 7}]
    error = cli("table", "lookup", name, "us", exit_code=1)
    assert "1 of 2 values" in error
    assert """'["eu",42]'""" in error


def test_scan_shows_the_first_rows_and_says_that_there_are_more(cli: Commands, kept: str) -> None:
    out, note = cli.run("table", "scan", kept)
    assert len(out.splitlines()) == 1 + 100
    assert b"first 100 rows" in note
    out, note = cli.run("table", "scan", kept, "--all")
    assert len(out.splitlines()) == 1 + 300
    assert note == b""


def test_scan_takes_columns_condition_range_and_limit(cli: Commands, kept: str) -> None:
    chosen = (
        "--columns",
        "amount,id",
        "--where",
        "region = 'eu' AND amount > 10",
        "--from",
        "50",
        "--to",
        "60",
    )
    expected = [{"amount": number / 4, "id": number} for number in range(51, 60, 2)]
    assert sorted(cli("table", "scan", kept, *chosen), key=lambda row: row["id"]) == expected
    assert cli("table", "scan", kept, *chosen, "--count") == [{"table": kept, "rows": 5}]
    assert len(cli("table", "scan", kept, "--limit", "7")) == 7
    assert "INVALID_PREDICATE" in cli("table", "scan", kept, "--where", "amount >", exit_code=1)
    assert "no column 'cost'" in cli("table", "scan", kept, "--columns", "cost", exit_code=1)
    assert "KEY_REFUSED" in cli("table", "scan", kept, "--from", "x", exit_code=1)


def test_scan_streams_csv_and_parquet_through_a_pipe(cli: Commands, kept: str) -> None:
    csv = cli("table", "scan", kept, "--output", "csv", "--where", "id < 2", raw=True)
    assert csv.splitlines()[0] == b'"id","region","amount"'
    assert sorted(csv.splitlines()[1:]) == [b'0,"us",0', b'1,"eu",0.25']
    parquet = cli("table", "scan", kept, "--output", "parquet", raw=True)
    assert pa.parquet.read_table(pa.BufferReader(parquet)).num_rows == 300


def test_scan_to_a_file_leaves_no_half_file_behind(cli: Commands, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    assert "LEASE_NOT_FOUND" in cli(
        "table", "scan", kept, "--lease", "none", "-o", "csv", "--to-file", str(file), raw=True, exit_code=3
    )
    assert list(tmp_path.iterdir()) == []
    assert cli("table", "scan", kept, "--to-file", str(file), raw=True).startswith(b"wrote 300 rows")
    assert len(file.read_bytes().splitlines()) == 301


def test_closed_pipe_ends_a_scan_quietly(node: NodeProcess, kept: str) -> None:
    arguments = ("table", "scan", kept, "--all", "--server", node.bootstrap_servers)
    read, write = os.pipe()
    os.close(read)
    with started(*arguments, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(_DEADLINE_SECONDS) == 0


def test_follow_prints_rows_and_then_changes_until_it_is_stopped(
    node: NodeProcess, db: tidemill.Tidemill, name: str
) -> None:
    table = db.create_table(name, "region string, id int, v string", primary_key=["region", "id"])
    table.upsert({"region": "eu", "id": 1, "v": "a"})
    with started(
        "table", "follow", name, "--server", node.bootstrap_servers, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert first == {"op": "snapshot", "row": {"region": "eu", "id": 1, "v": "a"}}
        table.upsert({"region": "eu", "id": 1, "v": "b"})
        table.delete([("eu", 1)])
        changes = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [(each["op"], each["bucket"], each["row"]) for each in changes] == [
            ("upsert", 0, {"region": "eu", "id": 1, "v": "b"}),
            ("delete", 0, {"region": "eu", "id": 1}),
        ]
        assert changes[0]["offset"] < changes[1]["offset"]
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b""
        # As 'topic consume' does.
        assert process.wait(_DEADLINE_SECONDS) == 130


def test_follow_ends_at_what_is_there_now_if_it_is_told_to(cli: Commands, kept: str) -> None:
    assert len(cli("table", "follow", kept, "--until-now", raw=True).splitlines()) == 300
    assert cli("table", "follow", kept, "--no-snapshot", "--until-now", raw=True) == b""


def test_table_without_a_key_is_followed_from_its_beginning(cli: Commands, name: str) -> None:
    cli("table", "create", name, "--columns", "v string")
    cli("table", "upsert", name, "-", "--input-format", "csv", send=b"v\na\nb\n")
    lines = cli("table", "follow", name, "--until-now")
    assert [(each["op"], each["row"]) for each in lines] == [("insert", {"v": "a"}), ("insert", {"v": "b"})]
    for arguments in (("scan", name), ("lookup", name, "a"), ("delete", name, "a")):
        assert "NOT_A_PRIMARY_KEY_TABLE" in cli("table", *arguments, exit_code=1)


# --- state


def test_stats_have_a_line_per_bucket_and_a_total(cli: Commands, kept: str) -> None:
    (stats,) = cli("table", "stats", kept)
    assert [each["bucket"] for each in stats["buckets"]] == [0, 1]
    assert stats["total"]["row_count"] == sum(each["log_end_offset"] for each in stats["buckets"]) == 300
    assert stats["total"]["log_bytes"] == sum(each["log_bytes"] for each in stats["buckets"])
    lines = cli("table", "stats", kept, raw=True).decode().splitlines()
    assert lines[0].split()[:4] == ["BUCKET", "ROWS", "STATE", "LOG"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "total"]


def test_snapshots_are_taken_listed_and_reported_when_broken(
    cli: Commands, node: NodeProcess, orders: str
) -> None:
    (taken,) = cli("table", "snapshot", "create", orders)
    assert [each["bucket"] for each in taken] == [0, 1]
    assert sum(each["log_offset"] for each in taken) == 300
    assert cli("table", "snapshot", "list", orders) == [taken]
    (bucket,) = (node.data_dir / "logs" / orders).glob("*-1")
    (manifest,) = (node.data_dir / "kv" / bucket.name / "snapshots").glob("*/tidemill-snapshot.json")
    manifest.write_bytes(b"{}")
    (listed,) = cli("table", "snapshot", "list", orders)
    assert listed[0] == taken[0]
    assert (listed[1]["bucket"], listed[1]["problem"] is None) == (1, False)
    last = cli("table", "snapshot", "list", orders, raw=True).decode().splitlines()[-1]
    assert last.split()[:5] == ["1", "-", "-", "-", "-"]
    assert last.endswith(listed[1]["problem"])


def test_lease_keeps_snapshots_until_it_is_released(
    cli: Commands, db: tidemill.Tidemill, orders: str
) -> None:
    ((lease,),) = cli("table", "lease", "acquire", orders, "--for", "2h", "--holder", "report", "--fresh")
    assert (lease["table"], lease["holder"], len(lease["snapshots"])) == (orders, "report", 2)
    db.table(orders).delete([0])
    assert cli("table", "scan", orders, "--count", "--lease", lease["lease_id"])[0]["rows"] == 300
    assert cli("table", "scan", orders, "--count")[0]["rows"] == 299
    assert cli("table", "lease", "list", orders) == [[lease]]
    listed = cli("table", "lease", "list", raw=True).decode()
    assert lease["lease_id"] in listed
    assert "report" in listed
    assert cli("table", "lease", "release", lease["lease_id"]) == [{"released": [lease["lease_id"]]}]
    assert "LEASE_NOT_FOUND" in cli("table", "lease", "release", lease["lease_id"], exit_code=3)
    assert cli("table", "lease", "list", orders) == [[]]


def test_partitions_are_listed_added_and_dropped(cli: Commands, name: str) -> None:
    words = ("--columns", "day date, id int", "--primary-key", "day,id", "--partition-by", "day")
    cli("table", "create", name, *words)
    cli("table", "upsert", name, "-", "--input-format", "csv", send=b"day,id\n2025-01-01,1\n2025-01-02,2\n")
    (partitions,) = cli("table", "partition", "list", name)
    assert [(each["partition"], each["topic"]) for each in partitions] == [
        ("2025-01-01", f"{name}.2025-01-01"),
        ("2025-01-02", f"{name}.2025-01-02"),
    ]
    assert [each["partition"] for each in cli("table", "stats", name)[0]["buckets"]] == [
        "2025-01-01",
        "2025-01-02",
    ]
    (made,) = cli("table", "partition", "create", name, "2025-02-01")
    assert made == {"table": name, "partitions": [{"partition": "2025-02-01", "topic": f"{name}.2025-02-01"}]}
    assert "ROW_REFUSED" in cli("table", "partition", "create", name, "february", exit_code=1)
    cli("table", "partition", "drop", name, "2025-02-01", "2025-01-01", "--yes")
    assert cli("table", "scan", name) == [{"day": "2025-01-02", "id": 2}]
    assert "PARTITION_NOT_FOUND" in cli("table", "partition", "drop", name, "2025-01-01", "-y", exit_code=3)
    (line,) = cli("table", "follow", name, "--until-now")
    assert line["row"] == {"day": "2025-01-02", "id": 2}
