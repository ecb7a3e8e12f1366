"""The ``tidemill`` command as its users run it: real processes against a real node."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

import tidemill

_DEADLINE_SECONDS = 120
_COMMAND = [sys.executable, "-m", "tidemill.cli"]
_SRC = Path(__file__).parents[2] / "src"
_AS_INSTALLED = Path(__file__).parents[1] / "support" / "as_installed"


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    paths = [str(_AS_INSTALLED), str(_SRC), kept.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | changes


def run(
    *arguments: str, send: bytes = b"", exit_code: int = 0, **changes: str
) -> subprocess.CompletedProcess[bytes]:
    """Run ``tidemill`` to its end and insist on its exit code."""
    done = subprocess.run(
        [*_COMMAND, *arguments],
        input=send,
        capture_output=True,
        timeout=_DEADLINE_SECONDS,
        env=environment(**changes),
    )
    assert done.returncode == exit_code, (done.returncode, done.stdout, done.stderr)
    return done


@contextmanager
def unused_address() -> Iterator[str]:
    """An address where nobody listens, and nobody will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        yield f"{host}:{port}"


class UpProcess:
    """``tidemill up`` in a process of its own; ready when it says so."""

    def __init__(self, data: Path, *arguments: str, as_json: bool = True) -> None:
        where = ("--data", str(data), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        form = ("--format", "json") if as_json else ()
        with data.with_name(f"{data.name}.stderr").open("ab") as errors:
            self.popen = subprocess.Popen(
                [*_COMMAND, "up", *where, *arguments, *form],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
            )
        assert self.popen.stdout is not None
        self.stdout: IO[str] = self.popen.stdout
        first = self.stdout.readline()
        assert first, f"the node ended with {self.popen.wait()}"
        self.first_line = first
        self.ready: dict[str, Any] = json.loads(first) if as_json else {}

    @property
    def server(self) -> str:
        return str(self.ready["server"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """(exit code, the rest of its output) after a signal."""
        self.popen.send_signal(number)
        rest = self.stdout.read()
        self.stdout.close()
        return self.popen.wait(_DEADLINE_SECONDS), rest

    def kill(self) -> None:
        """End it if a test has failed to."""
        self.popen.kill()
        self.popen.wait()
        self.stdout.close()


Cli = Callable[..., Any]
StartUp = Callable[..., UpProcess]


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[StartUp]:
    """``start_up()`` runs a node on the test's own data directory."""
    started: list[UpProcess] = []

    def start(*arguments: str, as_json: bool = True) -> UpProcess:
        started.append(UpProcess(tmp_path / "data", *arguments, as_json=as_json))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    running = UpProcess(tmp_path_factory.mktemp("cli") / "data")
    yield running
    running.kill()


@pytest.fixture
def cli(up: UpProcess) -> Cli:
    """Run a command against the node; gives its JSON, or with ``raw`` its output."""

    def call(*arguments: str, raw: bool = False, **options: Any) -> Any:
        form = () if raw else ("--format", "json")
        done = run(*arguments, *form, "--server", up.server, **options)
        return done.stdout if raw or not done.stdout else json.loads(done.stdout)

    return call


def fill(server: str, topic: str) -> str:
    """Make a topic of two partitions with five records in each."""
    run("topic", "create", topic, "--partitions", "2", "--server", server)
    lines = [{"value": f"v{n}", "partition": partition} for partition in (0, 1) for n in range(5)]
    sent = "\n".join(map(json.dumps, lines)).encode()
    run("topic", "produce", topic, "--json", "--server", server, send=sent)
    return topic


@pytest.fixture
def filled(up: UpProcess, topic: str) -> str:
    """A topic of the test's own."""
    return fill(up.server, topic)


@pytest.fixture(scope="module")
def kept(up: UpProcess) -> str:
    """A topic that no test changes."""
    return fill(up.server, "kept")


# --- help and version


def test_version_and_help_come_without_a_node() -> None:
    assert run("--version").stdout.startswith(b"tidemill ")
    text = run("--help").stdout.decode()
    for name in ("up", "topic", "group", "log", "doctor", "settings", "completion"):
        assert f"  {name} " in text
    assert b"--from" in run("topic", "consume", "--help").stdout


def test_help_loads_neither_rich_nor_the_protocol() -> None:
    script = "import sys, tidemill.cli.app; tidemill.cli.app.make_app(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment(), check=True)
    assert not {b"rich", b"kio", b"uvloop", b"starlette"} & set(done.stdout.split())


def test_a_call_loads_no_pydantic() -> None:
    """typer does from 0.29 on, at every call with an option or argument, and it takes long."""
    script = (
        "import atexit, sys, tidemill.cli\n"
        "atexit.register(lambda: print(*sys.modules))\n"
        "sys.argv = ['tidemill', 'settings', '--format', 'json']\n"
        "tidemill.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment(), check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert b"typer" in loaded
    assert b"pydantic" not in loaded


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_written_for_every_shell(shell: str) -> None:
    assert b"_TIDEMILL_COMPLETE" in run("completion", shell).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tidemill to", "topic"),
        ("tidemill cursor re", "reset resume replay"),
        ("tidemill topic consume --fr", "--from"),
        ("tidemill completion ", "bash zsh fish"),
    ],
)
def test_bash_completes_commands_options_and_values(typed: str, offered: str, tmp_path: Path) -> None:
    launcher = tmp_path / "tidemill"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidemill "$@"\n')
    launcher.chmod(0o755)
    script = (
        "source <(tidemill completion bash)\n"
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))\n'
        '_tidemill_completion tidemill; echo "${COMPREPLY[*]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *typed.split(" ")],
        env={**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == offered.split()
    assert done.stderr == ""


def test_wrong_usage_exits_with_2_and_names_the_mistake() -> None:
    assert b"Did you mean 'list'" in run("topic", "lst", exit_code=2).stderr
    assert b"NAME=VALUE" in run("topic", "create", "t", "--config", "x", exit_code=2).stderr
    assert b"no position in a log" in run("topic", "consume", "t", "--from", "soon", exit_code=2).stderr
    assert b"has no meaning" in run("topic", "consume", "t", "--template", "%q", exit_code=2).stderr


# --- the node


def test_up_says_where_it_listens_and_what_to_type(start_up: StartUp) -> None:
    up = start_up(as_json=False)
    code, rest = up.stop(signal.SIGINT)
    text = up.first_line + rest
    assert code == 0
    assert "is ready" in text
    assert "tidemill topic produce" in text
    assert "kcat -b 127.0.0.1:" in text
    assert text.endswith("stopped\n")


def test_health_is_served_where_up_says(up: UpProcess) -> None:
    with urllib.request.urlopen(f"{up.ready['http']}/readyz", timeout=_DEADLINE_SECONDS) as response:
        assert json.load(response)["ready"] is True


def test_data_survives_a_stop_and_a_start(start_up: StartUp) -> None:
    first = start_up()
    run("topic", "produce", "kept", "--server", first.server, send=b"a\nb\n")
    assert first.stop()[0] == 0
    second = start_up()
    assert run("topic", "consume", "kept", "--exit", "--server", second.server).stdout == b"a\nb\n"
    assert second.stop()[0] == 0


def test_settings_of_up_come_from_flags(start_up: StartUp) -> None:
    up = start_up("--set", "default_partitions=3", "--set", "topic.retention.ms=1234")
    run("topic", "create", "t", "--server", up.server)
    described = json.loads(
        run("topic", "describe", "t", "-a", "--format", "json", "--server", up.server).stdout
    )
    assert len(described["partitions"]) == 3
    assert {"name": "retention.ms", "value": "1234"}.items() <= next(
        entry for entry in described["configs"] if entry["name"] == "retention.ms"
    ).items()


def test_second_signal_ends_the_node_at_once(start_up: StartUp) -> None:
    up = start_up()
    # A connection that never answers would hold up nothing but this: both signals come before the loop turns.
    up.popen.send_signal(signal.SIGSTOP)
    up.popen.send_signal(signal.SIGTERM)
    up.popen.send_signal(signal.SIGINT)
    up.popen.send_signal(signal.SIGCONT)
    assert up.popen.wait(_DEADLINE_SECONDS) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_second_process_on_a_data_directory_is_refused_and_names_the_first(up: UpProcess) -> None:
    error = run("up", "--data", up.ready["data"], "--listen", "127.0.0.1:0", exit_code=1).stderr.decode()
    assert f"process {up.popen.pid}" in error
    assert up.server in error
    assert error.count("\n") == 1


def test_port_in_use_is_reported_with_what_to_do(up: UpProcess, tmp_path: Path) -> None:
    options = ("--data", str(tmp_path / "d"), "--http", "127.0.0.1:0", "--listen", up.server)
    error = run("up", *options, exit_code=1).stderr.decode()
    assert up.server in error
    assert "in use" in error
    assert "--listen" in error


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_an_address_that_other_machines_can_reach_is_refused_without_the_flag(
    option: str, tmp_path: Path
) -> None:
    where = {"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0", option: "0.0.0.0:0"}
    arguments = [part for pair in where.items() for part in pair]
    error = run("up", "--data", str(tmp_path / "d"), *arguments, exit_code=1).stderr.decode()
    assert f"refused to listen on 0.0.0.0:0 ({option.removeprefix('--')})" in error
    assert "no TLS, authentication or ACL" in error
    assert "--allow-unauthenticated" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "d").exists()


def test_with_the_flag_a_node_listens_for_other_machines_and_doctor_says_so(
    start_up: StartUp, tmp_path: Path
) -> None:
    up = start_up("--listen", "0.0.0.0:0", "--allow-unauthenticated")
    assert up.ready["listen"].startswith("0.0.0.0:")
    log = (tmp_path / "data.stderr").read_text()
    assert log.count("WARNING") == 1
    assert "listening on 0.0.0.0:0 (listen) for other machines without authentication" in log
    reachable = f"127.0.0.1:{up.ready['listen'].rpartition(':')[2]}"
    http = str(up.ready["http"]).removeprefix("http://")
    doctor = ("doctor", "--data", up.ready["data"], "--http", http, "--server", reachable)
    assert "warn  listeners: other machines can connect to node 1 (listen 0.0.0.0:0)" in (
        run(*doctor).stdout.decode()
    )
    refused = run(*doctor, exit_code=1, TIDEMILL_LISTEN="0.0.0.0:1").stdout.decode()
    assert "fail  settings: 'tidemill up' refuses listen = 0.0.0.0:1" in refused


def test_unknown_setting_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    error = run("up", "--data", str(tmp_path / "d"), "--set", "default_partition=3", exit_code=1).stderr
    assert b"default_partitions" in error


# --- topics


def test_topic_is_created_shown_changed_and_deleted(cli: Cli, topic: str) -> None:
    created = cli("topic", "create", topic, "--partitions", "2", "--config", "retention.ms=60000")
    assert (created["created"], created["partitions"]) == (True, 2)
    assert topic in [entry["topic"] for entry in cli("topic", "list")]
    cli(
        "topic", "alter", topic, "--partitions", "3", "-c", "segment.bytes=1048576", "--reset", "retention.ms"
    )
    described = cli("topic", "describe", topic)
    assert [entry["partition"] for entry in described["partitions"]] == [0, 1, 2]
    assert {entry["name"]: entry["value"] for entry in described["configs"]} == {"segment.bytes": "1048576"}
    assert cli("topic", "delete", topic, "--yes") == {"deleted": [topic]}
    assert topic not in [entry["topic"] for entry in cli("topic", "list")]


def test_create_twice_is_refused_unless_it_is_wanted(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic)
    cli("topic", "create", topic, exit_code=1)
    assert cli("topic", "create", topic, "--if-not-exists")["created"] is False


def test_refused_config_changes_nothing(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "-c", "retention.ms=soon", exit_code=1)
    cli("topic", "describe", topic, exit_code=3)


def test_missing_topic_exits_with_3(cli: Cli) -> None:
    cli("topic", "describe", "nowhere", exit_code=3)
    cli("topic", "consume", "nowhere", "--exit", exit_code=3)
    cli("topic", "delete", "nowhere", "--yes", exit_code=3)
    assert cli("topic", "delete", "nowhere", "--yes", "--if-exists") == {"deleted": []}


def test_trim_deletes_the_oldest_records(cli: Cli, filled: str) -> None:
    assert cli("topic", "trim", f"{filled}:0", "--before", "3") == [
        {"topic": filled, "partition": 0, "start_offset": 3}
    ]
    assert cli("topic", "consume", filled, "-e", "-p", "0", "-t", "%o ", raw=True) == b"3 4 "


def test_tables_are_plain_text_in_a_pipe(cli: Cli, kept: str) -> None:
    lines = cli("topic", "describe", kept, raw=True).decode().splitlines()
    heads = "PARTITION LEADER REPLICAS IN SYNC ELIGIBLE LAG START END SIZE"
    assert lines[1].split() == heads.split()
    assert "\x1b" not in "".join(lines)


def test_unreachable_server_exits_with_4_and_says_what_to_try() -> None:
    with unused_address() as server:
        error = run("topic", "list", "--server", server, exit_code=4).stderr.decode()
    assert error.startswith("error: BROKER_NOT_AVAILABLE: ")
    assert server in error
    assert "tidemill up" in error
    assert error.count("\n") == 1


def test_server_that_speaks_another_protocol_is_named(up: UpProcess) -> None:
    server = str(up.ready["http"]).removeprefix("http://")
    assert b"Kafka" in run("topic", "list", "--server", server, exit_code=1).stderr


def test_server_comes_from_the_environment(up: UpProcess) -> None:
    run("topic", "list", TIDEMILL_SERVER=up.server)


def test_debug_shows_the_traceback_and_its_absence_does_not(up: UpProcess) -> None:
    arguments = ("topic", "describe", "nowhere", "--server", up.server)
    assert b"Traceback" not in run(*arguments, exit_code=3).stderr
    assert b"Traceback" in run(*arguments, "--debug", exit_code=1).stderr


# --- producing and consuming


def test_lines_are_produced_and_consumed_by_a_template(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic)
    summary = cli("topic", "produce", topic, "-K", ":", "-H", "h=1", send=b"a:1\nb:2\nc:3")
    assert (summary["records"], summary["failed"]) == (3, 0)
    written = cli("topic", "consume", topic, "--exit", "-t", r"%t/%p/%o/%k/%v/%h/%s\n", raw=True)
    assert written == b"".join(f"{topic}/0/{n}/{k}/{n + 1}/h=1/1\n".encode() for n, k in enumerate("abc"))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression_is_read_back(cli: Cli, topic: str, codec: str) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(500))
    cli("topic", "produce", topic, "--compression", codec, send=lines)
    assert cli("topic", "consume", topic, "--exit", raw=True) == lines


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_level_of_acknowledgement_writes(cli: Cli, topic: str, acks: str) -> None:
    cli("topic", "create", topic)
    cli("topic", "produce", topic, "--acks", acks, send=b"a\nb\n")
    assert cli("topic", "consume", topic, "--from", "earliest", "-n", "2", raw=True) == b"a\nb\n"


def test_json_lines_go_in_and_come_out_the_same(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "3")
    line = {"key": "k", "value": "/w==", "value_encoding": "base64", "partition": 2, "timestamp": 7}
    cli("topic", "produce", topic, "--json", send=json.dumps(line).encode())
    consumed = cli("topic", "consume", topic, "--exit")
    assert consumed == {**line, "topic": topic, "offset": 0, "headers": []}


def test_file_is_produced_in_order_and_at_a_rate(cli: Cli, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"a\nb\nc\n")
    summary = cli("topic", "produce", topic, "--file", str(file), "--rate", "20")
    assert summary["records"] == 3
    assert summary["seconds"] >= 0.1
    assert cli("topic", "consume", topic, "--exit", raw=True) == b"a\nb\nc\n"


def test_bad_line_is_named_by_its_number(cli: Cli, up: UpProcess, topic: str) -> None:
    arguments = ("topic", "produce", topic, "--json", "--server", up.server)
    assert b"line 2" in run(*arguments, send=b'{"value": "sound"}\n{', exit_code=1).stderr
    assert cli("topic", "consume", topic, "--exit", raw=True) == b"sound\n"


def test_missing_partition_is_refused(cli: Cli, kept: str) -> None:
    cli("topic", "produce", kept, "--partition", "9", send=b"a\n", exit_code=3)
    cli("topic", "consume", kept, "--partition", "9", "--exit", exit_code=3)


def test_record_that_is_too_large_is_reported(cli: Cli, up: UpProcess, topic: str) -> None:
    cli("topic", "create", topic, "-c", "max.message.bytes=1000")
    done = run("topic", "produce", topic, "--server", up.server, send=b"x" * 5000, exit_code=1)
    assert b"error: MESSAGE_TOO_LARGE" in done.stderr


@pytest.mark.parametrize(
    ("start", "offsets"),
    [
        ("earliest", b"01234"),
        ("3", b"34"),
        ("-2", b"34"),
        ("-1h", b"01234"),
        ("1970-01-02T00:00:00Z", b"01234"),
        ("latest", b""),
        ("999", b""),
    ],
)
def test_consuming_starts_where_it_is_told(cli: Cli, kept: str, start: str, offsets: bytes) -> None:
    arguments = ("topic", "consume", kept, "-p", "0", "--exit", "--from", start, "-t", "%o")
    assert cli(*arguments, raw=True) == offsets


def test_following_waits_for_records_that_come_later(cli: Cli, up: UpProcess, filled: str) -> None:
    consumer = subprocess.Popen(
        [*_COMMAND, *f"topic consume {filled} --from -1 -p 0 --follow -n 2 --server {up.server}".split()],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert consumer.stdout is not None
    with consumer.stdout as lines:
        assert lines.readline() == b"v4\n"
        cli("topic", "produce", filled, "-p", "0", send=b"late\n")
        assert lines.readline() == b"late\n"
    assert consumer.wait(_DEADLINE_SECONDS) == 0


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_consumer_that_is_stopped_commits_what_it_wrote(
    cli: Cli, up: UpProcess, kept: str, number: signal.Signals, exit_code: int
) -> None:
    group = f"stopped-by-{number}"
    consumer = subprocess.Popen(
        [*_COMMAND, *f"topic consume {kept} --from earliest -g {group} --server {up.server}".split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert consumer.stdout is not None
    for _ in range(10):
        assert consumer.stdout.readline()
    consumer.send_signal(number)
    out, errors = consumer.communicate(timeout=_DEADLINE_SECONDS)
    assert (consumer.returncode, out, errors) == (exit_code, b"", b"")
    described = cli("group", "describe", group)
    assert [entry["committed_offset"] for entry in described["offsets"]] == [5, 5]
    assert described["state"] == "Empty"


def test_closed_pipe_ends_the_consumer_quietly(cli: Cli, up: UpProcess, topic: str) -> None:
    cli("topic", "produce", topic, send=b"".join(b"%0100d\n" % number for number in range(20_000)))
    consumer = subprocess.Popen(
        [*_COMMAND, "topic", "consume", topic, "--exit", "--server", up.server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert consumer.stdout is not None
    assert consumer.stderr is not None
    consumer.stdout.readline()
    consumer.stdout.close()
    with consumer.stderr as errors:
        assert errors.read() == b""
    assert consumer.wait(_DEADLINE_SECONDS) == 0


# --- groups


def test_group_goes_on_where_it_was(cli: Cli, kept: str) -> None:
    arguments = ("topic", "consume", kept, "--group", "onward", "--from", "earliest", "-t", "%p%o ")
    first = cli(*arguments, "-n", "3", raw=True).split()
    second = cli(*arguments, "--exit", raw=True).split()
    assert len(first) == 3
    assert len(second) == 7
    assert not set(first) & set(second)


def test_group_is_listed_described_and_deleted(cli: Cli, kept: str) -> None:
    group = "listed"
    cli("topic", "consume", kept, "--group", group, "--exit", "-n", "1")
    assert {"group": group, "state": "Empty"}.items() <= next(
        entry for entry in cli("group", "list") if entry["group"] == group
    ).items()
    assert cli("group", "describe", group)["lag"] == 4
    assert cli("group", "delete", group)["groups"] == [group]
    cli("group", "describe", group, exit_code=3)
    cli("group", "delete", group, exit_code=3)


def test_share_group_is_shown_moved_and_deleted(cli: Cli, up: UpProcess, filled: str) -> None:
    group = "porters"
    with tidemill.connect(up.server) as db, db.share(group, filled, lock=60) as records:
        taken = [records.next() for _ in range(3)]
        held = cli("share", "peek", group, "--state", "acquired")["partitions"]
        assert sum(each["acquired"] for each in held) >= 3
        owners = {run["owner"] for each in held for run in each["records"]}
        described = cli("share", "describe", group)
        assert {member["member_id"] for member in described["members"]} == owners
        assert (described["state"], described["lag"]) == ("Stable", 10)
        cli("share", "reset-offsets", group, "--to", "latest", "--execute", exit_code=1)
        cli("share", "delete", group, exit_code=1)
        for record in taken:
            record.accept()
    assert cli("share", "lag", group)["lag"] == 7
    assert {"group": group, "state": "Empty"} in cli("share", "list")
    cli("group", "describe", group, exit_code=3)
    planned = cli("share", "reset-offsets", group, "--to", "latest")
    assert [entry["to"] for entry in planned["offsets"]] == [5, 5]
    assert cli("share", "lag", group)["lag"] == 7
    cli("share", "reset-offsets", group, "--to", "-2", "--topic", f"{filled}:1", "--execute")
    cli("share", "reset-offsets", group, "--to", "latest", "--topic", f"{filled}:0", "--execute")
    rows = cli("share", "lag", group)["offsets"]
    assert (rows[0]["start_offset"], rows[0]["lag"]) == (5, 0)
    cli("share", "reset-offsets", group, "--to", "earliest", "--execute")
    assert cli("share", "lag", group)["lag"] == 10
    assert cli("share", "delete", group, "--topic", filled)["deleted"] == "offsets"
    assert cli("share", "lag", group)["offsets"] == []
    assert cli("share", "delete", group)["groups"] == [group]
    cli("share", "describe", group, exit_code=3)
    cli("share", "delete", group, exit_code=3)


def test_dead_letters_are_sent_back_by_a_command(cli: Cli, up: UpProcess) -> None:
    group, topic = "menders", "to-mend"
    with tidemill.connect(up.server) as db:
        db.produce_many(topic, ["cup", "plate"])
        with db.share(group, topic, dead_letter="dlq.to-mend") as records:
            for _ in range(2):
                record = records.next()
                record.reject(f"broken {record.text()}")
            records.flush()
            while records.lag():
                time.sleep(0.05)

    def dead() -> list[tuple[str, int, int, str]]:
        runs = cli("share", "peek", group)["partitions"][0]["records"]
        return [(run["state"], run["first_offset"], run["delivery_count"], run["reason"]) for run in runs]

    assert dead() == [("dead", 0, 1, "broken cup"), ("dead", 1, 1, "broken plate")]
    assert cli("share", "peek", group, "--state", "delayed")["partitions"][0]["records"] == []
    planned = cli("share", "redrive", group)
    assert (planned["executed"], planned["sent"]) == (False, {topic: 2})
    done = cli("share", "redrive", group, "--reason", "cup", "--since", "-1h", "--execute")
    assert (done["executed"], done["sent"], done["not_chosen"]) == (True, {topic: 1}, 1)
    assert done["reasons"] == {"broken cup": 1}
    assert ("dead", 1, 1, "broken plate") in dead()
    assert ("dead", 0, 1, "broken cup") not in dead(), "it was sent back"
    assert cli("share", "redrive", group, "--until", "-1h")["sent"] == {}
    cli("share", "redrive", group, "--since", "earliest", exit_code=2)
    cli("share", "redrive", "nobody", exit_code=1)
    with tidemill.connect(up.server) as db, db.share(group, topic) as records:
        back = records.next()
        assert (back.text(), back.header("tidemill-redriven-for")) == ("cup", group.encode())
        back.accept()


def test_offsets_are_reset_only_when_told_to(cli: Cli, kept: str) -> None:
    group = "reset"
    cli("topic", "consume", kept, "--group", group, "--from", "earliest", "--exit", raw=True)

    def committed() -> list[int]:
        return [entry["committed_offset"] for entry in cli("group", "describe", group)["offsets"]]

    planned = cli("group", "reset-offsets", group, "--to", "earliest")
    assert planned["executed"] is False
    assert [(entry["from"], entry["to"]) for entry in planned["offsets"]] == [(5, 0), (5, 0)]
    assert committed() == [5, 5]
    cli("group", "reset-offsets", group, "--to", "-2", "--topic", f"{kept}:1", "--execute")
    assert committed() == [5, 3]
    cli("group", "reset-offsets", group, "--to", "1", "--topic", kept, "--execute")
    assert committed() == [1, 1]
    cli("group", "delete", group, "--topic", f"{kept}:0")
    assert [entry["partition"] for entry in cli("group", "describe", group)["offsets"]] == [1]


def test_offsets_of_a_group_with_members_are_not_reset(cli: Cli, up: UpProcess, kept: str) -> None:
    group = "busy"
    arguments = ["topic", "consume", kept, "--from", "earliest", "--group", group, "--server", up.server]
    consumer = subprocess.Popen([*_COMMAND, *arguments], stdout=subprocess.PIPE, env=environment())
    assert consumer.stdout is not None
    consumer.stdout.readline()
    done = run(
        "group", "reset-offsets", group, "--to", "latest", "--execute", "--server", up.server, exit_code=1
    )
    assert b"error: NON_EMPTY_GROUP" in done.stderr
    assert b"NON_EMPTY_GROUP" in run("group", "delete", group, "--server", up.server, exit_code=1).stderr
    consumer.terminate()
    consumer.communicate(timeout=_DEADLINE_SECONDS)


# --- files


def test_log_is_dumped_verified_and_repaired(start_up: StartUp, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start_up()
    for value in (b"first\n", b"second\n", b"third\n"):
        run("topic", "produce", "t", "--server", up.server, send=value)
    files = ("--data", str(data), "--format", "json")
    assert b"in use" in run("log", "repair", *files, exit_code=1).stderr
    assert b"warning" in run("log", "verify", *files).stderr
    assert up.stop()[0] == 0

    batches = [json.loads(line) for line in run("log", "dump", "t", "--records", *files).stdout.splitlines()]
    assert [batch["records"][0]["value"] for batch in batches] == ["first", "second", "third"]
    (segment,) = data.glob("logs/t/*/*.log")
    with segment.open("r+b") as file:
        file.seek(batches[1]["position"] + batches[1]["bytes"] - 1)
        file.write(b"\xff")

    report = next(
        each for each in json.loads(run("log", "verify", *files, exit_code=1).stdout) if not each["ok"]
    )
    assert report["problems"][0]["kind"] == "data"
    assert report["problems"][0]["position"] == batches[1]["position"]
    planned = json.loads(run("log", "repair", "t", *files).stdout)
    assert (planned[0]["executed"], planned[0]["offsets_lost"]) == (False, 1)
    run("log", "verify", *files, exit_code=1)
    assert json.loads(run("log", "repair", "t:0", "--execute", *files).stdout)[0]["executed"] is True
    run("log", "verify", *files)

    again = start_up()
    read = run("topic", "consume", "t", "--exit", "-t", r"%o %v\n", "--server", again.server).stdout
    assert read == b"0 first\n2 third\n"
    assert again.stop()[0] == 0


def test_files_of_a_missing_topic_or_directory_are_reported(up: UpProcess, tmp_path: Path) -> None:
    run("log", "dump", "nowhere", "--data", up.ready["data"], exit_code=3)
    assert b"--data" in run("log", "verify", "--data", str(tmp_path / "none"), exit_code=1).stderr


# --- doctor and settings


def test_doctor_finds_a_healthy_node_healthy(up: UpProcess) -> None:
    http = str(up.ready["http"]).removeprefix("http://")
    done = run(
        "doctor", "--data", up.ready["data"], "--http", http, "--server", up.server, "--format", "json"
    )
    verdicts = {finding["check"]: finding["verdict"] for finding in json.loads(done.stdout)}
    assert set(verdicts.values()) == {"ok"}
    assert {"versions", "open files", "data directory", "node", "API versions", "partitions"} <= set(verdicts)
    assert {"listeners", "unknown directories", "health", "scrub", "clock"} <= set(verdicts)


def test_doctor_reports_a_directory_of_no_topic(up: UpProcess) -> None:
    stray = Path(up.ready["data"]) / "logs" / "stray" / f"{'0' * 32}-0"
    stray.mkdir(parents=True)
    done = run("doctor", "--data", up.ready["data"], "--server", up.server)
    stray.rmdir()
    assert f"warn  unknown directories: logs/stray/{'0' * 32}-0" in done.stdout.decode()


def test_doctor_fails_without_a_node(tmp_path: Path) -> None:
    with unused_address() as server:
        done = run("doctor", "--data", str(tmp_path), "--server", server, exit_code=1)
    assert b"fail  node: cannot reach" in done.stdout


def test_settings_show_value_and_source(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("default_partitions = 4\n")
    done = run(
        "settings", "--config", str(file), "--format", "json", TIDEMILL_NODE_ID="7", TIDEMILL_SERVER="a:1"
    )
    found = {entry["name"]: (entry["value"], entry["source"]) for entry in json.loads(done.stdout)}
    assert found["default_partitions"] == (4, str(file))
    assert found["node_id"] == (7, "TIDEMILL_NODE_ID")
    assert found["flush_threads"][1] == "default"
