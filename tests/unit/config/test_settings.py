from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.values import Address
from tidemill.errors import ConfigError


def test_the_defaults_are_those_of_the_design() -> None:
    settings = Settings()

    assert settings.max_frame_bytes == 100 * 2**20
    assert settings.max_first_frame_bytes == 512 * 2**10
    assert settings.fetch_max_bytes == 8 * 2**20
    assert settings.idle_timeout_ms == 600_000
    assert settings.auto_create_topics


def test_every_setting_is_documented_and_its_default_reads_back() -> None:
    for info in SETTINGS:
        assert info.spec.doc.endswith("."), info.name
        assert info.allowed
        assert info.read(info.default_text, "test") == info.default, info.name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_connections": 0}, "max_connections"),
        ({"max_connections": True}, "max_connections"),
        ({"max_connections": "5"}, "max_connections"),
        ({"listen": "127.0.0.1:9092"}, "listen"),
        ({"listen": None}, "listen"),
        ({"node_name": "-"}, "node_name"),
        ({"node_name": "a" * 65}, "node_name"),
        ({"max_frame_bytes": 2**20, "max_inflight_bytes": 2**19}, "max_inflight_bytes"),
        ({"max_frame_bytes": 2**18}, "max_first_frame_bytes"),
        ({"group_min_session_timeout_ms": 2_000_000}, "group_max_session_timeout_ms"),
        ({"max_partitions_per_topic": 3, "default_partitions": 4}, "default_partitions"),
        ({"advertised_listener": Address("example", 0)}, "advertised_listener"),
        ({"topic_defaults": {"retention.ms": "soon"}}, "retention.ms"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(Settings(), **changes)


def test_settings_made_in_a_program_are_used_as_given() -> None:
    settings = Settings(
        data_dir=Path("d"), listen=Address("::1", 0), http=None, topic_defaults={"segment.ms": "5"}
    )

    assert settings.http is None
    assert str(settings.listen) == "[::1]:0"
