"""Properties of tables: which there are, what they may be, and which of them are configs of topics."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.settings import Settings
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.tables.properties import TABLE_PROPERTIES, TableProperties, topic_configs

SETTINGS = Settings(kv_snapshot_interval_ms=11, kv_snapshot_log_bytes=2222)


def test_a_table_with_a_key_is_compacted_unless_its_owner_says_otherwise() -> None:
    assert topic_configs({}, SETTINGS, keyed=True) == {"cleanup.policy": "compact"}
    assert topic_configs({}, SETTINGS, keyed=False) == {}
    chosen = {"cleanup.policy": "compact,delete", "retention.ms": "1000"}
    assert topic_configs(chosen, SETTINGS, keyed=True) == chosen


def test_properties_of_tables_and_of_their_owners_are_no_configs_of_topics() -> None:
    properties = {
        "snapshot.interval.ms": "1",
        "snapshot.log.bytes": "9223372036854775807",
        "user.owner": "the shop",
        "user.": "",
        "segment.bytes": "1048576",
    }
    assert topic_configs(properties, SETTINGS, keyed=False) == {"segment.bytes": "1048576"}


def test_a_misspelt_property_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ApiError, match=r"snapshot\.intervall\.ms") as error:
        topic_configs({"snapshot.intervall.ms": "1000"}, SETTINGS, keyed=True)
    assert error.value.code is ErrorCode.invalid_config
    for name in (*TABLE_PROPERTIES, "user."):
        assert name in error.value.message


def test_a_config_with_a_value_that_it_cannot_have_is_refused() -> None:
    with pytest.raises(ApiError, match=r"segment\.bytes") as error:
        topic_configs({"segment.bytes": "many"}, SETTINGS, keyed=False)
    assert error.value.code is ErrorCode.invalid_config


@pytest.mark.parametrize("name", sorted(TABLE_PROPERTIES))
@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e3", " 1", "٣", "²", str(2**63), "9" * 5_000])
def test_a_number_above_0_that_fits_is_all_that_a_number_can_be(name: str, value: str) -> None:
    with pytest.raises(TableError, match=f"property {name} must be a whole number above 0") as error:
        topic_configs({name: value}, SETTINGS, keyed=True)
    assert error.value.table_code is TableCode.invalid_schema
    assert len(error.value.message) < 200


def test_a_value_that_is_too_long_is_refused_and_not_repeated() -> None:
    with pytest.raises(TableError, match=r"'user\.x' has 10001 characters") as error:
        topic_configs({"user.x": "x" * 10_001}, SETTINGS, keyed=True)
    assert error.value.table_code is TableCode.invalid_schema
    topic_configs({"user.x": "x" * 10_000}, SETTINGS, keyed=True)


def test_what_is_not_set_comes_from_the_node() -> None:
    assert TableProperties.of({}, SETTINGS) == TableProperties(11, 2222)
    assert TableProperties.of({"snapshot.log.bytes": "7"}, SETTINGS) == TableProperties(11, 7)


@given(st.integers(1, 2**63 - 1))
def test_a_number_in_force_is_the_number_that_was_set(number: int) -> None:
    properties = {"snapshot.interval.ms": str(number)}
    topic_configs(properties, SETTINGS, keyed=True)
    assert TableProperties.of(properties, SETTINGS).snapshot_interval_ms == number
