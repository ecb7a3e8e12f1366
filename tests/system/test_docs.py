"""The guides of the README work when pasted: every Python block and every console block is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidemill

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_SECONDS = 120


def blocks(kind: str) -> list[str]:
    return [text for found, text in BLOCK.findall((ROOT / "README.md").read_text()) if found == kind]


def commands(block: str) -> list[str]:
    """What a reader would paste, but for starting the node, which the test does itself."""
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if not line.startswith("tidemill up")]


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0][:40])
def test_python_block_runs_as_it_stands(block: str, tmp_path: Path) -> None:
    name = block.splitlines()[0].removeprefix("# ") if block.startswith("# ") else "guide.py"
    script = tmp_path / name
    script.write_text(block)
    runner = [sys.executable, "-m", "pytest", "-q"] if name.startswith("test_") else [sys.executable]
    result = subprocess.run(
        [*runner, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert result.returncode == 0, result.stdout + result.stderr


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
        for block in blocks("console"):
            for command in commands(block):
                if command.startswith("tidemill doctor"):
                    command = f"tidemill doctor --data {tmp_path / 'data'} --http {(node.http_url or '')[7:]}"
                result = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", command],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_SECONDS,
                )
                assert result.returncode == 0, f"$ {command}\n{result.stdout}{result.stderr}"


def test_the_demo_ends_with_nothing_lost(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "stream_demo.py"), "--orders", "4000"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing was lost." in result.stdout
