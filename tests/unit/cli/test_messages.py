"""What the command line says to somebody who is new, made a mistake, or is waited for."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.app import make_app
from tidemill.embedded.node import EmbeddedNode
from tidemill.log.notes.repaired import REPAIRED_NAME
from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity

DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with tidemill.open(http="127.0.0.1:0") as running:
        running.create_table("shop.log", "id bigint")
        running.create_table("shop.stock", "id bigint", primary_key="id").upsert([{"id": 1}])
        yield running


def run(*arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """stdout and stderr of a command that must end with ``code``."""
    unset = {name: None for name in os.environ if name.startswith("TIDEMILL_")}
    result = CliRunner().invoke(
        make_app(arguments), list(arguments), prog_name="tidemill", env={**unset, **environment}
    )
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


# --- settings


def test_settings_are_listed_even_if_one_of_them_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("max_conections = 5\n")
    out, errors = run("settings", "--config", str(file), code=1)
    assert "max_connections " in out
    assert "unknown setting 'max_conections'" in errors
    assert "did you mean max_connections? 'tidemill settings' lists them all" in errors
    out, errors = run("settings", "--format", "json", code=1, TIDEMILL_ZZZ="1")
    assert "listen" in {entry["name"] for entry in json.loads(out)}
    assert "unknown setting 'TIDEMILL_ZZZ' (from the environment): 'tidemill settings' lists" in errors


def test_up_points_to_the_list_of_settings(tmp_path: Path) -> None:
    _, errors = run("up", "--data", str(tmp_path), "--set", "zzz=1", code=1)
    assert "unknown setting 'zzz' (from --set): 'tidemill settings' lists them all" in errors


# --- addresses


def test_a_host_that_does_not_exist_is_named() -> None:
    _, errors = run("topic", "list", "--server", "nosuchhost.invalid:9092", code=4)
    assert "cannot resolve host 'nosuchhost.invalid'" in errors
    assert "Unknown error" not in errors


def test_the_http_address_is_recognised_as_such(node: EmbeddedNode) -> None:
    _, errors = run("topic", "list", "--server", str(node._node.http_address), code=1)
    assert "it speaks HTTP" in errors
    assert "check that the address is the node's Kafka address" in errors


def test_doctor_says_in_plain_words_why_http_does_not_answer(node: EmbeddedNode, tmp_path: Path) -> None:
    where = ("--server", node.bootstrap_servers, "--http", "127.0.0.1:1", "--data", str(tmp_path))
    out, _ = run("doctor", *where)
    assert "nothing answers at http://127.0.0.1:1/readyz (Connection refused)" in out


def test_doctor_looks_at_the_directory_that_the_node_runs_on(node: EmbeddedNode, tmp_path: Path) -> None:
    asked = ("doctor", "--server", node.bootstrap_servers, "--http", str(node._node.http_address))
    out, _ = run(*asked)
    assert f"data directory: {node.data_dir} can be written; in use by process {os.getpid()}" in out
    assert "disk space: " in out
    assert "unknown directories: none" in out
    other, _ = run(*asked, "--data", str(tmp_path))
    assert f"data directory: {tmp_path} can be written; no node is running on it" in other


def test_up_says_what_to_do_about_a_path_that_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.touch()
    _, errors = run("up", "--data", str(file), "--http", "", "--listen", "127.0.0.1:0", code=1)
    assert f"cannot use {file} as data directory: File exists; choose one that can be created" in errors


# --- names


def test_a_topic_that_cannot_be_called_so_is_told_why(node: EmbeddedNode) -> None:
    _, errors = run("topic", "produce", "bad name", "--server", node.bootstrap_servers, code=1)
    assert "topic name 'bad name' has characters other than letters" in errors


def test_an_unknown_topic_config_points_to_the_command_that_lists_them(node: EmbeddedNode) -> None:
    options = ("--config", "zzz=1", "--server", node.bootstrap_servers)
    _, errors = run("topic", "create", "t", *options, code=1)
    assert "'tidemill topic describe TOPIC --all-configs' lists the known names" in errors


def test_a_key_that_is_no_column_is_named(node: EmbeddedNode) -> None:
    columns = ("--columns", "id bigint", "--primary-key", "no", "--server", node.bootstrap_servers)
    _, errors = run("table", "create", "shop.wrong", *columns, code=1)
    assert "primary key column 'no' is not in the schema; the columns are: id" in errors


def test_a_table_without_a_key_is_read_by_following_it(node: EmbeddedNode) -> None:
    _, errors = run("table", "scan", "shop.log", "--server", node.bootstrap_servers, code=1)
    assert "'tidemill table follow'" in errors


# --- help


def test_help_of_follow_shows_the_fields_that_lines_have(node: EmbeddedNode) -> None:
    said, _ = run("table", "follow", "--help")
    assert "json for programs" not in said, "there is one format only"
    shown = [json.loads(line) for line in said.splitlines() if line.lstrip().startswith("{")]
    fields = {line["op"]: set(line) for line in shown}
    where = ("--server", node.bootstrap_servers)
    out, _ = run("table", "follow", "shop.stock", "--until-now", *where)
    assert {line["op"]: set(line) for line in map(json.loads, out.splitlines())} == {
        "snapshot": fields["snapshot"]
    }
    node.table("shop.log").append([{"id": 7}])
    out, _ = run("table", "follow", "shop.log", "--until-now", *where)
    (change,) = map(json.loads, out.splitlines())
    assert change["op"] == "insert"
    assert set(change) == fields["delete"]


# --- waiting for input


def command(node: EmbeddedNode, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.cli", *arguments, "--server", node.bootstrap_servers]


@pytest.mark.parametrize(
    ("options", "line", "said"),
    [
        ((), "hello", "records"),
        (("-K", ":"), "k:v", "records as KEY:VALUE"),
        (("--json",), '{"value": "v"}', 'records as JSON objects like {"key": "k", "value": "v"}'),
    ],
)
def test_produce_says_on_a_terminal_what_it_waits_for(
    node: EmbeddedNode, options: tuple[str, ...], line: str, said: str
) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command(node, "topic", "produce", "typed", *options),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(terminal)
    try:
        assert process.stderr is not None
        prompt = f"type {said}, one per line; Ctrl-D at the start of a line ends\n"
        assert process.stderr.readline() == prompt
        os.write(controller, f"{line}\n\x04".encode())
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        os.close(controller)
    assert (process.returncode, errors) == (0, "")
    assert re.match(r"wrote 1 record ", out)


def test_upsert_says_on_a_terminal_what_it_waits_for(node: EmbeddedNode) -> None:
    _, errors = run("table", "upsert", "shop.stock", "-", "--server", node.bootstrap_servers, code=2)
    assert "stdin does not say what is in it: give csv, json or parquet" in errors
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        command(node, "table", "upsert", "shop.stock", "-", "--input-format", "json"),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(terminal)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("type rows, in the format that was named; Ctrl-D")
        os.write(controller, b'{"id": 5}\n\x04')
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        os.close(controller)
    assert out.startswith("wrote 1 row ")


def test_produce_from_a_pipe_says_nothing_of_the_kind(node: EmbeddedNode) -> None:
    done = subprocess.run(
        command(node, "topic", "produce", "piped"),
        input=b"hello\n",
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert done.stderr == b""


def test_a_repair_that_is_refused_does_not_ask_for_the_execute_option(tmp_path: Path) -> None:
    with tidemill.open(tmp_path) as node:
        node.create_table("shop.gone", "id bigint").append({"id": 1})
    (directory,) = tmp_path.glob("logs/shop.gone/*-0")
    shutil.rmtree(directory)
    asked = ("log", "repair", "shop.gone:0", "--data", str(tmp_path))
    out, _ = run(*asked, code=1)
    assert "give up what was in it with --accept-loss\nnothing was changed\n" in out
    out, _ = run(*asked, "--accept-loss")
    assert "nothing was changed; add --execute to do it" in out


def test_a_repair_of_a_replica_of_a_cluster_says_what_becomes_of_it(tmp_path: Path) -> None:
    with tidemill.open(tmp_path) as node:
        node.create_table("shop.gone", "id bigint").append({"id": 1})
    (directory,) = tmp_path.glob("logs/shop.gone/*-0")
    shutil.rmtree(directory)
    asked = ("log", "repair", "shop.gone:0", "--data", str(tmp_path), "--accept-loss", "--execute")
    identity = DirectoryIdentity(cluster_id="c", directory_id=UUID(int=1), node_name="n1")
    DataDirectory(tmp_path).write_identity(identity)
    out, _ = run(*asked)
    assert "copied anew from its leader" in out
    assert (directory / REPAIRED_NAME).exists()


def test_a_repair_of_a_node_that_is_alone_leaves_no_mark(tmp_path: Path) -> None:
    with tidemill.open(tmp_path) as node:
        node.create_table("shop.gone", "id bigint").append({"id": 1})
    (directory,) = tmp_path.glob("logs/shop.gone/*-0")
    shutil.rmtree(directory)
    out, _ = run("log", "repair", "shop.gone:0", "--data", str(tmp_path), "--accept-loss", "--execute")
    assert "cluster" not in out
    assert not (directory / REPAIRED_NAME).exists()
