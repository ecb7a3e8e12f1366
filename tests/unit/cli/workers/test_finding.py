"""Which workers a command line means."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tidemill.cli.workers.finding import find_workers
from tidemill.cli.workers.reloading import source_times
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_worker import Worker
from tidemill.client.workers.worker import AsyncWorker


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("tasks_of_a_test")
    made.db = Tidemill("127.0.0.1:1")
    made.other = Tidemill("127.0.0.1:2")
    for name in ("first", "second"):
        awaited = AsyncWorker(name, "t", lambda handler: handler)
        setattr(made, name, Worker(made.db, awaited))
    made.some = [made.second]
    made.number = 7
    made.awaited = AsyncWorker("third", "t", lambda handler: handler)

    async def app() -> None:
        """What somebody may write who uses connect_async."""

    made.app = app
    monkeypatch.setitem(sys.modules, "tasks_of_a_test", made)
    return made


def names(target: str) -> list[str | None]:
    return [worker.name for worker in find_workers(target)]


@pytest.mark.usefixtures("module")
def test_a_worker_a_connection_a_list_or_a_whole_module_can_be_named() -> None:
    assert names("tasks_of_a_test:first") == ["first"]
    assert names("tasks_of_a_test:db") == ["first", "second"]
    assert names("tasks_of_a_test:some") == ["second"]
    assert names("tasks_of_a_test") == ["first", "second"]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_of_a_test:app", "there is no module 'no_such_module_of_a_test'"),
        ("tasks_of_a_test:missing", "has no 'missing'; it has db, other, first, second"),
        ("tasks_of_a_test:number", "is of type int"),
        ("tasks_of_a_test:awaited", "handlers may be async def"),
        ("tasks_of_a_test:app", "handlers may be async def"),
        ("tasks_of_a_test:other", "is a connection without workers"),
    ],
)
def test_what_is_no_worker_is_refused_with_what_to_name(target: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        find_workers(target)


def test_a_module_that_imports_a_missing_one_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tasks_of_a_test.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        find_workers("broken_tasks_of_a_test:app")


def test_python_files_are_watched_and_hidden_and_installed_ones_are_not(tmp_path: Path) -> None:
    for name in ("app.py", "pkg/tasks.py", ".venv/x.py", "pkg/__pycache__/y.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    found = {str(path.relative_to(tmp_path)) for path, _ in source_times(tmp_path)}
    assert found == {"app.py", "pkg/tasks.py"}
