"""The tree of commands: a call loads the command that it names, and nothing of the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tidemill.cli.app import make_app

_WHOLE = typer.main.get_group(make_app())


@pytest.mark.parametrize("name", sorted(_WHOLE.commands))
def test_a_command_that_is_named_is_as_in_the_whole_tree(name: str) -> None:
    runner = CliRunner()
    alone = runner.invoke(make_app([name, "--help"]), [name, "--help"], prog_name="tidemill")
    whole = runner.invoke(make_app(), [name, "--help"], prog_name="tidemill")
    assert (alone.exit_code, alone.output) == (0, whole.output)


def test_a_call_loads_no_other_commands() -> None:
    script = "import sys; from tidemill.cli.app import make_app; make_app(['up']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "tidemill.cli.up" in loaded
    assert not {"tidemill.cli.doctor", "tidemill.cli.share", "tidemill.cli.cluster.commands"} & loaded


@pytest.mark.parametrize("arguments", [("topc", "list"), ("--debug", "topc")])
def test_an_unknown_command_is_told_the_nearest(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(make_app(arguments), list(arguments))
    assert result.exit_code == 2
    assert "Did you mean 'topic'" in result.output


def _every_help(command: Any, *names: str) -> Iterator[tuple[str, str]]:
    """The help of a command and of all below it, by the name that a user types."""
    result = CliRunner().invoke(make_app(), [*names, "--help"], prog_name="tidemill")
    assert result.exit_code == 0
    yield " ".join(names), result.output
    for name, each in getattr(command, "commands", {}).items():
        yield from _every_help(each, *names, name)


def test_help_shows_arguments_once_and_whole_sentences() -> None:
    for name, text in _every_help(_WHOLE):
        usage = text.split("\n\n")[0]
        assert "...}" not in usage, (name, usage)
        assert "[[" not in usage, (name, usage)
        _, _, commands = text.partition("\nCommands:\n")
        listed = commands.partition("\n\n")[0]
        assert "..." not in listed, (name, listed)
        if listed:
            assert listed.rstrip().endswith("."), (name, listed)
    group = CliRunner().invoke(make_app(["group"]), ["group", "--help"]).output
    assert "the committed offset and lag of each partition." in " ".join(group.split())
