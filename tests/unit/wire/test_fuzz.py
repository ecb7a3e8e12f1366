"""The kept corpus of the fuzzer, and a short run of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_fuzzer() -> ModuleType:
    path = Path(__file__).parents[2] / "fuzz" / "fuzz_wire.py"
    spec = importlib.util.spec_from_file_location("fuzz_wire", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_wire"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


fuzzer = load_fuzzer()


def test_the_corpus_has_the_outcomes_that_it_had() -> None:
    entries = list(fuzzer.read_corpus())
    assert len(entries) > 50
    for target, outcome, data in entries:
        assert fuzzer.outcome_of(fuzzer.TARGETS[target], data) == outcome, data.hex()


def test_the_corpus_has_messages_of_tables_in_both_directions() -> None:
    outcomes = [outcome for _, outcome, _ in fuzzer.read_corpus()]
    for name in ("ScanKvRequest", "ScanKvResponse", "CreateTableRequest", "DescribeTableResponse"):
        assert any(name in outcome for outcome in outcomes), name


@pytest.mark.parametrize("target", sorted(fuzzer.TARGETS))
def test_mutated_inputs_parse_or_are_refused(target: str) -> None:
    # Rows are read column by column, which takes long for one row at a time.
    count = 1000 if target in ("row", "json") else 4000
    report = fuzzer.fuzz(fuzzer.TARGETS[target], count, seed=1)
    assert report.findings == []
    assert report.outcomes["parsed"] > 0
    assert report.outcomes["refused"] > 0
