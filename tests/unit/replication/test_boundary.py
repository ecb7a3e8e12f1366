"""What others may know of a partition."""

from __future__ import annotations

import ast
from pathlib import Path

import tidemill

SOURCES = Path(tidemill.__file__).parent


def test_nobody_outside_of_replication_reaches_through_a_partition_to_its_log() -> None:
    """Whoever reads the log itself reads above the high watermark sooner or later."""
    reaching = [
        path.relative_to(SOURCES).parts[0]
        for path in sorted(SOURCES.rglob("*.py"))
        if "local_log" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "local_log"
    ]
    assert set(reaching) == {"replication"}
