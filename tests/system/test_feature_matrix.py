"""docs/clients.md says exactly what the client tests show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).with_name("feature_matrix.py")


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("feature_matrix", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(matrix: ModuleType) -> None:
    page = matrix.PAGE.read_text()
    assert page == matrix.page_with_table(page), "run python tests/system/feature_matrix.py"


def test_every_client_test_names_the_feature_it_shows(matrix: ModuleType) -> None:
    for name in (*matrix.TEST_FILES, *matrix.SHARED_TEST_FILES):
        source = (_SCRIPT.parent / name).read_text()
        _, shown = matrix.features_shown(source)
        named = {test for tests in shown.values() for test in tests}
        there = {
            line.split("(")[0].removeprefix("def ")
            for line in source.splitlines()
            if line.startswith("def test_")
        }
        assert named == there, name


def test_every_feature_is_shown_by_some_client(matrix: ModuleType) -> None:
    shown = {
        feature
        for name in (*matrix.TEST_FILES, *matrix.SHARED_TEST_FILES)
        for feature in matrix.features_shown((_SCRIPT.parent / name).read_text())[1]
    }
    assert shown == set(matrix.FEATURES)
