"""Global options, errors and exit codes, over a small application of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from tidemill.cli.session import DebugOption, FormatOption, ServerOption, Session, command
from tidemill.errors import ApiError, ConfigError, ErrorCode, NodeUnavailable

Seen = list[Session]


def application(work: Callable[[Session], None]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.callback()
    def root(
        server: ServerOption = None,
        format: FormatOption = None,  # noqa: A002 - the option is called --format
        debug: DebugOption = False,
    ) -> None:
        pass

    @command(app, "work")
    def _work(session: Session, times: int = 1) -> None:
        """Do the work."""
        for _ in range(times):
            work(session)

    return app


def seen_session(arguments: list[str], env: dict[str, str] | None = None) -> Session:
    seen: Seen = []
    result = CliRunner().invoke(application(seen.append), arguments, env=env)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_global_options_are_taken_before_and_after_the_command() -> None:
    before = seen_session(["--server", "a:1", "--format", "json", "--debug", "work"])
    after = seen_session(["work", "--server", "a:1", "--format", "json", "--debug"])
    assert before == after
    assert (after.server, after.as_json, after.debug) == ("a:1", True, True)


def test_option_after_the_command_wins() -> None:
    assert seen_session(["--server", "a:1", "work", "--server", "b:2"]).server == "b:2"


def test_server_comes_from_flag_then_variable_then_default() -> None:
    variable = {"TIDEMILL_SERVER": "v:1"}
    assert seen_session(["work", "--server", "f:1"], variable).server == "f:1"
    assert seen_session(["work"], variable).server == "v:1"
    assert seen_session(["work"], {"TIDEMILL_SERVER": ""}).server == "127.0.0.1:9092"


def test_command_keeps_its_own_options() -> None:
    seen: Seen = []
    assert CliRunner().invoke(application(seen.append), ["work", "--times", "3"]).exit_code == 0
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ApiError(ErrorCode.topic_already_exists, "m"), 1),
        (ConfigError("m"), 1),
        (ApiError(ErrorCode.unknown_topic_or_partition, "m"), 3),
        (ApiError(ErrorCode.group_id_not_found, "m"), 3),
        (NodeUnavailable("m"), 4),
        (KeyboardInterrupt(), 130),
        (ValueError("m"), 1),
        (typer.BadParameter("m"), 2),
    ],
)
def test_every_error_has_its_exit_code(error: BaseException, exit_code: int) -> None:
    def work(session: Session) -> None:
        raise error

    result = CliRunner().invoke(application(work), ["work"])
    assert result.exit_code == exit_code


def test_error_is_one_line_with_its_code_on_stderr() -> None:
    def work(session: Session) -> None:
        raise ApiError(ErrorCode.invalid_config, "first\nsecond")

    result = CliRunner().invoke(application(work), ["work"])
    assert result.stderr == "error: INVALID_CONFIG: first second\n"
    assert result.stdout == ""


def test_debug_shows_the_error_itself() -> None:
    def work(session: Session) -> None:
        raise ApiError(ErrorCode.invalid_config, "m")

    result = CliRunner().invoke(application(work), ["work", "--debug"])
    assert isinstance(result.exception, ApiError)
