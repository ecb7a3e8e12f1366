"""``make run``: the shop, as a newcomer starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SHOP = Path(__file__).parents[2] / "examples" / "shop"
SPARK_CONF = Path(__file__).parents[1] / "support" / "spark_conf"


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """In a session of its own, as in a terminal, with a folder of its own for what is temporary."""
    (directory / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, str(SHOP), *arguments],
        cwd=directory,
        env={**os.environ, "TMPDIR": str(directory / "tmp"), "SPARK_CONF_DIR": str(SPARK_CONF)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def files(directory: Path) -> set[str]:
    # kio asks hypothesis, where that is installed, for a folder.
    return {path.name for path in directory.iterdir()} - {".hypothesis"}


def wait_until_gone(group: int, deadline_seconds: float = 120) -> None:
    """Until no process of the group is left."""
    deadline = time.monotonic() + deadline_seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"processes of group {group} are left")


def test_every_row_is_right_and_nothing_is_left_behind(tmp_path: Path) -> None:
    shop = start(tmp_path, "--events", "4000", "--seconds", "3", "--seed", "5", "--report", "report.html")
    output, errors = shop.communicate()
    assert shop.returncode == 0, output + errors + (tmp_path / "report.spark.log").read_text()
    assert "Every row is right." in output
    assert errors == ""
    assert "rows are right." in (tmp_path / "report.html").read_text()
    wait_until_gone(shop.pid)
    assert files(tmp_path) == {"report.html", "report.spark.log", "tmp"}
    assert not [name for name in files(tmp_path / "tmp") if name.startswith("tidemill")]


def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    shop = start(tmp_path, "--events", "100000", "--seconds", "300")
    assert shop.stdout is not None
    assert shop.stderr is not None
    for line in shop.stdout:
        if line.startswith("3."):
            break
    os.killpg(shop.pid, signal.SIGINT)
    output, errors = shop.communicate()
    assert shop.returncode == 130, output + errors
    assert "Stopped." in output
    assert errors == ""
    wait_until_gone(shop.pid)
    assert not [name for name in files(tmp_path / "tmp") if name.startswith("tidemill")]


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    shop = start(tmp_path, "--keep", ".")
    output, _ = shop.communicate()
    assert shop.returncode == 2
    assert "--keep needs a new folder" in output
