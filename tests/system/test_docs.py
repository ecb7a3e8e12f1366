"""The guides work when pasted, and the examples run.

- Python blocks of the README are programs of their own; those of the other guides follow each other. What
  stands behind ``print(…)  # `` is what it prints.
- Console blocks are pasted into a shell, one after the other, against one node.
- A block marked ``no-run`` is only shown.
- Python blocks write nothing to standard error: what a reader pastes ends without noise. Commands may, since
  that is where they say what they wait for and what to do next.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import tidemill
from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.ports import free_port
from support.processes import process_environment

ROOT = Path(__file__).parents[2]
SPARK_CONF = ROOT / "tests" / "support" / "spark_conf"
README, TABLES, SPARK, CLUSTER = "README.md", "docs/tables.md", "docs/spark.md", "docs/cluster.md"
CURSORS = "docs/cursors.md"
SHARE_GROUPS, WORKERS = "docs/share-groups.md", "docs/workers.md"
COMING_FROM = "docs/coming-from-celery.md"
BLOCK = re.compile(r"^```(python|console)( no-run)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
TIMEOUT_SECONDS = 240
#: What Java says of itself to everybody, and of the options that the tests give it.
JAVA_SAYS = re.compile(r"^(NOTE: Picked up |WARNING: Using incubator modules: ).*\n", re.MULTILINE)

#: Runs every script that it is given, each as a program of its own in a directory of its own.
RUN_SCRIPTS = """
import os, runpy, sys
for script in sys.argv[1:]:
    os.chdir(os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
"""


class Block(NamedTuple):
    """A block of code in a document."""

    line: int
    text: str


def blocks(document: str, kind: str) -> list[Block]:
    text = (ROOT / document).read_text()
    found = BLOCK.finditer(text)
    return [
        Block(text[: each.start(3)].count("\n"), each[3]) for each in found if each[1] == kind and not each[2]
    ]


def run(command: list[str], directory: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """What a program prints; it must end well, and say nothing else."""
    result = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "SPARK_CONF_DIR": str(SPARK_CONF)},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    noise = JAVA_SAYS.sub("", result.stderr)
    assert not noise, f"it makes noise:\n{noise}"
    return result.stdout


def check_printed(source: str, output: str) -> None:
    """Everything that ``source`` says it prints is in ``output``, in that order."""
    lines = iter(output.splitlines())
    for expected in PRINTED.findall(source):
        assert expected in lines, f"{expected!r} is not printed, or not there:\n{output}"


def test_python_blocks_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    scripts = []
    for block in blocks(README, "python"):
        if block.text.startswith("# test_"):
            continue
        script = tmp_path / f"line-{block.line}" / "guide.py"
        script.parent.mkdir()
        script.write_text("\n" * block.line + block.text)
        scripts.append(script)
    output = run([sys.executable, "-c", RUN_SCRIPTS, *map(str, scripts)], tmp_path)
    check_printed("".join(script.read_text() for script in scripts), output)


def test_tests_of_the_readme_pass(tmp_path: Path) -> None:
    tests = [block.text for block in blocks(README, "python") if block.text.startswith("# test_")]
    for text in tests:
        (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    # Without capturing, or pytest would keep the noise to itself; pytest-asyncio wants its option said.
    options = ["-q", "-s", "-o", "asyncio_default_fixture_loop_scope=function"]
    assert f"{len(tests)} passed" in run([sys.executable, "-m", "pytest", *options], tmp_path)


@pytest.mark.parametrize("guide", [TABLES, SPARK, SHARE_GROUPS, WORKERS, COMING_FROM, CURSORS])
def test_python_blocks_of_a_guide_run_one_after_the_other(guide: str, tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    source = ""
    for block in blocks(guide, "python"):
        # On the lines that they have in the document, so that a traceback names them.
        source += "\n" * (block.line - source.count("\n")) + block.text
    script.write_text(source)
    check_printed(source, run([sys.executable, str(script)], tmp_path, 280))


def commands(block: str) -> list[str]:
    """What a reader would paste, but for starting the node, which the test does itself."""
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if not line.startswith("tidemill up")]


def test_console_blocks_run_one_after_the_other(tmp_path: Path) -> None:
    launcher = tmp_path / "bin" / "tidemill"
    launcher.parent.mkdir()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tidemill.cli "$@"\n')
    launcher.chmod(0o755)
    with tidemill.open(tmp_path / "data", http="127.0.0.1:0") as node:
        environment = {
            **os.environ,
            "PATH": f"{launcher.parent}{os.pathsep}{os.environ['PATH']}",
            "TIDEMILL_SERVER": node.bootstrap_servers,
        }
        for block in (*blocks(README, "console"), *blocks(TABLES, "console"), *blocks(CURSORS, "console")):
            for command in commands(block.text):
                if command.startswith("tidemill doctor"):
                    command = f"tidemill doctor --http {(node.http_url or '')[7:]}"
                result = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", command],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_SECONDS,
                )
                assert result.returncode == 0, f"$ {command}\n{result.stdout}{result.stderr}"


@pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)
def test_the_nodes_and_commands_of_the_cluster_guide_work(tmp_path: Path) -> None:
    """The nodes are started as the guide says, but on free ports."""
    lines = [line for block in blocks(CLUSTER, "console") for line in block.text.splitlines()]
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert [line for line in typed if line.startswith("etcd ")] == ["etcd --data-dir etcd-data"]
    starts = [line for line in typed if line.startswith("tidemill up ")]
    ports: dict[str, str] = {}
    with EtcdServer(tmp_path / "etcd") as etcd, ExitStack() as running:
        for line in starts:
            there = line.replace("etcd://127.0.0.1:2379", etcd.url)
            for port in re.findall(r"(?<!etcd://)127\.0\.0\.1:(\d+)", line):
                ports.setdefault(port, str(free_port()))
                there = there.replace(f" 127.0.0.1:{port}", f" 127.0.0.1:{ports[port]}")
            command = [sys.executable, "-m", "tidemill.cli", *there.split()[1:]]
            node = subprocess.Popen(
                command, cwd=tmp_path, env=process_environment(), stdout=subprocess.PIPE, text=True
            )
            running.callback(node.communicate)
            running.callback(node.terminate)
            assert node.stdout is not None
            assert "is ready" in node.stdout.readline()
        environment = {**process_environment(), "TIDEMILL_SERVER": f"127.0.0.1:{ports['9092']}"}
        for line in typed:
            if line not in starts and not line.startswith("etcd "):
                shell = line.replace("tidemill ", f"{sys.executable} -m tidemill.cli ")
                done = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", shell],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_SECONDS,
                )
                assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"


def test_the_demo_ends_with_nothing_lost(tmp_path: Path) -> None:
    demo = str(ROOT / "examples" / "stream_demo.py")
    assert "Nothing was lost." in run([sys.executable, demo, "--orders", "4000"], tmp_path)


def test_the_tables_example_comes_to_its_end(tmp_path: Path) -> None:
    output = run([sys.executable, str(ROOT / "examples" / "tables.py")], tmp_path)
    assert "3 changes: the same" in output
    assert "5,001 rows now, 9,999 in the leased snapshot" in output


def test_the_tasks_example_does_every_task(tmp_path: Path) -> None:
    output = run([sys.executable, str(ROOT / "examples" / "tasks.py")], tmp_path)
    assert output.splitlines()[-1] == "Every booking was done."
