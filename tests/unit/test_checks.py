"""The checks before a commit are those of ``make check``."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_the_pre_commit_hooks_run_exactly_what_make_check_runs() -> None:
    (targets,) = re.findall(r"^check:([a-z ]*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert [hook["entry"] for hook in hooks] == [f"make {target}" for target in targets.split()]
    for hook in hooks:
        # The whole tree is checked: types can break in files that the commit leaves alone.
        assert not hook["pass_filenames"]
        assert not hook.keys() & {"args", "exclude", "files", "stages", "types", "types_or"}


def test_only_replication_reaches_through_a_partition_to_its_log() -> None:
    package = ROOT / "src" / "tidemill"
    reaching = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if ".local_log" in path.read_text() and path.relative_to(package).parts[0] != "replication"
    ]
    assert not reaching, "what others need of a log is a method or a property of Partition"
