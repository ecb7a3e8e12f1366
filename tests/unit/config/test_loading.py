from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.loading import find_config_file, load_settings
from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.values import Address
from tidemill.errors import ConfigError


def toml(directory: Path, text: str) -> Path:
    file = directory / "tidemill.toml"
    file.write_text(text, "utf-8")
    return file


def refusal(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags or {}, environ or {}, file)
    return caught.value.message


def test_nothing_given_means_the_defaults() -> None:
    assert load_settings({"listen": None}, {"PATH": "/bin", "TIDEMILLION": "x"}) == Settings()


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "max_connections = 1\nnode_id = 1\ngroup_max_size = 1\n")
    environ = {"TIDEMILL_MAX_CONNECTIONS": "2", "TIDEMILL_NODE_ID": "2"}

    settings = load_settings({"max_connections": 3, "node_id": None}, environ, file)

    assert settings.max_connections == 3
    assert settings.node_id == 2
    assert settings.group_max_size == 1
    assert settings.flush_threads == Settings().flush_threads


def test_values_are_read_from_text_in_every_kind() -> None:
    settings = load_settings(
        {"listen": "[::1]:0", "data_dir": Path("here")},
        {"TIDEMILL_HTTP": "", "TIDEMILL_MAX_FRAME_BYTES": "50 MiB", "TIDEMILL_AUTO_CREATE_TOPICS": "off"},
    )

    assert settings.listen == Address("::1", 0)
    assert settings.data_dir == Path("here")
    assert settings.http is None
    assert settings.max_frame_bytes == 50 * 2**20
    assert settings.auto_create_topics is False


def test_toml_values_may_have_their_own_types(tmp_path: Path) -> None:
    file = toml(
        tmp_path, 'auto_create_topics = false\nmax_frame_bytes = "2 MiB"\nidle_timeout_ms = 5000\nhttp = ""\n'
    )

    settings = load_settings({}, {}, file)

    assert (
        settings.auto_create_topics,
        settings.max_frame_bytes,
        settings.idle_timeout_ms,
        settings.http,
    ) == (
        False,
        2 * 2**20,
        5000,
        None,
    )


def test_topic_defaults_come_from_all_sources_key_by_key(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        '[topic]\n"retention.ms" = 1\nsegment.ms = 2\npreallocate = true\n'
        'cleanup.policy = ["compact", "delete"]\n',
    )

    settings = load_settings({"topic": {"flush.ms": "5"}}, {"TIDEMILL_TOPIC_RETENTION_MS": "9"}, file)

    assert settings.topic_defaults == {
        "retention.ms": "9",
        "segment.ms": "2",
        "preallocate": "true",
        "cleanup.policy": "compact,delete",
        "flush.ms": "5",
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_conections = 1", ["max_conections", "did you mean max_connections?", "tidemill.toml"]),
        ("max_connections = 0", ["max_connections", "cannot be 0", "at least 1", "tidemill.toml"]),
        ("max_connections = 1.5", ["max_connections", "1.5", "a whole number"]),
        ("node_id = true", ["node_id", "True", "a whole number"]),
        ('listen = "nowhere"', ["listen", "'nowhere'", "host:port", "tidemill.toml"]),
        ("[listen]\nport = 1", ["listen", "host:port"]),
        ("topic = 5", ["topic", "must be a table"]),
        ('[topic]\n"retention.ms" = "soon"', ["retention.ms", "'soon'", "64-bit integer", "tidemill.toml"]),
        ('[topic]\n"retension.ms" = 5', ["retension.ms", "did you mean retention.ms?", "tidemill.toml"]),
        ("= 5", ["tidemill.toml", "not valid toml"]),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path, text: str, parts: Any) -> None:
    message = refusal(file=toml(tmp_path, text))

    for part in parts:
        assert part in message


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    assert "none.toml" in refusal(file=tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml is not valid toml" in refusal(file=tmp_path / "bytes.toml")


def test_braces_in_the_path_of_the_file_are_shown_as_they_are(tmp_path: Path) -> None:
    directory = tmp_path / "a{0}b"
    directory.mkdir()

    assert "a{0}b" in refusal(file=toml(directory, "node_id = -1"))


def test_a_mistake_in_a_variable_is_named_with_the_variable() -> None:
    assert "variable TIDEMILL_NODE_ID) cannot be 'one'" in refusal(environ={"TIDEMILL_NODE_ID": "one"})
    assert "did you mean TIDEMILL_NODE_ID?" in refusal(environ={"TIDEMILL_NODEID": "1"})
    assert "variable TIDEMILL_TOPIC_FLUSH_MS)" in refusal(environ={"TIDEMILL_TOPIC_FLUSH_MS": "x"})


def test_a_mistake_in_a_flag_is_named_with_the_flag() -> None:
    assert "from --listen) cannot be 'x'" in refusal(flags={"listen": "x"})
    assert "from --set node_id) cannot be 'x'" in refusal(flags={"node_id": "x"})
    assert "from --set topic.flush.ms)" in refusal(flags={"topic": {"flush.ms": "x"}})
    assert "did you mean listen?" in refusal(flags={"lisen": "x:1"})


def test_an_unknown_name_is_told_with_its_source_and_where_the_known_ones_are_listed(tmp_path: Path) -> None:
    for message, source in (
        (refusal(flags={"zzz": "1"}), "(from --set)"),
        (refusal(environ={"TIDEMILL_ZZZ": "1"}), "(from the environment)"),
        (refusal(file=toml(tmp_path, "zzz = 1")), "tidemill.toml)"),
    ):
        assert source in message
        assert "'tidemill settings' lists them all" in message
        assert "did you mean" not in message, "that they all begin with TIDEMILL_ does not make them alike"
    assert "'tidemill topic describe TOPIC --all-configs'" in refusal(flags={"topic": {"zzz": "1"}})


def test_the_config_file_is_the_given_one_then_the_variable_then_the_one_in_the_directory(
    tmp_path: Path,
) -> None:
    environ = {"TIDEMILL_CONFIG": "other.toml"}

    assert find_config_file(None, {}, tmp_path) is None
    here = toml(tmp_path, "")
    assert find_config_file(None, {}, tmp_path) == here
    assert find_config_file(None, environ, tmp_path) == tmp_path / "other.toml"
    assert find_config_file(Path("given.toml"), environ, tmp_path) == Path("given.toml")
    assert load_settings({}, environ) == Settings()


@given(
    st.dictionaries(st.sampled_from([info.variable for info in SETTINGS]), st.text(max_size=20), max_size=4)
)
def test_any_text_in_a_variable_is_either_a_setting_or_a_config_error(environ: Any) -> None:
    try:
        settings = load_settings({}, environ)
    except ConfigError as error:
        assert "setting" in error.message
    else:
        assert isinstance(settings, Settings)
