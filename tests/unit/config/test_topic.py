from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.topic import AlterOp, TopicConfig, apply_changes, check_overrides
from tidemill.config.topic_keys import TOPIC_KEYS, ConfigKind
from tidemill.errors import ApiError, ErrorCode


def refusal(overrides: dict[str, str]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_overrides(overrides)
    return caught.value


def test_the_table_and_the_typed_defaults_agree() -> None:
    texts = {key.name: key.default for key in TOPIC_KEYS.values() if key.default is not None}

    assert TopicConfig.from_overrides(texts) == TopicConfig()


def test_every_effective_key_changes_a_field() -> None:
    other = {
        "cleanup.policy": "compact",
        "compression.type": "zstd",
        "follower.replication.throttled.replicas": "0:1,0:2",
        "leader.replication.throttled.replicas": "*",
        "message.timestamp.type": "LogAppendTime",
        "min.cleanable.dirty.ratio": "0.25",
        "internal.segment.bytes": "1000",
        "tidemill.retention.waits.for.cursors": "true",
    }
    changed = set()
    for key in TOPIC_KEYS.values():
        if key.effective:
            config = TopicConfig.from_overrides({key.name: other.get(key.name, "2000000")})
            changed |= {
                field.name
                for field in fields(config)
                if getattr(config, field.name) != getattr(TopicConfig(), field.name)
            }
            assert config != TopicConfig(), key.name

    assert changed == {field.name for field in fields(TopicConfig)}


def test_every_default_passes_its_own_check() -> None:
    check_overrides({key.name: key.default for key in TOPIC_KEYS.values() if key.default is not None})


def test_keys_without_effect_say_so_and_the_others_do_not() -> None:
    for key in TOPIC_KEYS.values():
        assert ("no effect here" in key.doc) is not key.effective, key.name


def test_values_are_typed() -> None:
    config = TopicConfig.from_overrides(
        {
            "cleanup.policy": " compact , delete ",
            "retention.ms": "-1",
            "min.cleanable.dirty.ratio": "0.1",
            "message.timestamp.type": "LogAppendTime",
            "message.timestamp.before.max.ms": "+5",
        }
    )

    assert config.cleanup_policy == {"compact", "delete"}
    assert config.compacts
    assert config.deletes
    assert config.retention_ms == -1
    assert config.min_cleanable_dirty_ratio == 0.1
    assert config.timestamp_type == "LogAppendTime"
    assert config.timestamp_before_max_ms == 5


def test_an_override_beats_the_default_of_the_node() -> None:
    config = TopicConfig.from_overrides({"retention.ms": "5"}, {"retention.ms": "7", "segment.ms": "9"})

    assert (config.retention_ms, config.segment_ms) == (5, 9)


def test_an_empty_cleanup_policy_neither_deletes_nor_compacts() -> None:
    config = TopicConfig.from_overrides({"cleanup.policy": ""})

    assert not config.deletes
    assert not config.compacts


def test_internal_segment_bytes_replaces_the_segment_size() -> None:
    overrides = {"internal.segment.bytes": "1000", "segment.bytes": "2000000"}
    check_overrides(overrides)

    assert TopicConfig.from_overrides(overrides).segment_bytes == 1000


def test_only_a_compacted_topic_rolls_for_its_compaction_lag() -> None:
    lag = {"max.compaction.lag.ms": "1000"}

    assert TopicConfig.from_overrides(lag).segment_age_max_ms == TopicConfig().segment_ms
    assert TopicConfig.from_overrides(lag | {"cleanup.policy": "compact"}).segment_age_max_ms == 1000


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("retention.ms", "-2", "a 64-bit integer of at least -1"),
        ("retention.ms", "1_000", "a 64-bit integer of at least -1"),
        ("retention.ms", "", "a 64-bit integer of at least -1"),
        ("retention.ms", str(2**63), "a 64-bit integer"),
        ("retention.ms", "9" * 5000, "a 64-bit integer"),
        ("max.message.bytes", str(2**31), "a 32-bit integer"),
        ("max.message.bytes", str(11 * 1024 * 1024 + 1), "from 0 to 11534336"),
        ("index.interval.bytes", str(64 * 1024 + 1), "from 0 to 65536"),
        ("segment.bytes", "1048575", "at least 1048576"),
        ("min.cleanable.dirty.ratio", "1.01", "from 0 to 1"),
        ("min.cleanable.dirty.ratio", "nan", "a number"),
        ("compression.type", "brotli", "one of uncompressed, zstd, lz4, snappy, gzip, producer"),
        ("compression.gzip.level", "0", "from 1 to 9, or -1"),
        ("cleanup.policy", "delete,shred", "a list of compact, delete"),
        ("cleanup.policy", "delete,", "a list of compact, delete"),
        ("cleanup.policy", "delete,delete", "each at most once"),
        ("preallocate", "maybe", "true or false"),
        ("leader.replication.throttled.replicas", "1:2,x", "partition:broker"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_name(name: str, value: str, allowed: Any) -> None:
    error = refusal({name: value})

    assert error.code is ErrorCode.invalid_config
    assert name in error.message
    assert value[:100] in error.message
    assert allowed in error.message
    assert len(error.message) < 500


def test_a_larger_number_that_an_older_release_stored_counts_as_the_largest() -> None:
    stored = {"max.message.bytes": "90000000", "index.interval.bytes": str(2**31 - 1)}
    config = TopicConfig.from_overrides(stored)
    assert config.max_message_bytes == 11 * 1024 * 1024
    assert config.index_interval_bytes == 64 * 1024
    altered = apply_changes(stored, [("retention.ms", 0, "5")])
    assert altered == stored | {"retention.ms": "5"}, "other configs can be changed"
    with pytest.raises(ApiError, match=r"max\.message\.bytes"):
        apply_changes(stored, [("max.message.bytes", 0, "90000001")])


def test_an_unknown_name_is_refused_with_the_closest_known_one() -> None:
    error = refusal({"retension.ms": "5"})

    assert error.code is ErrorCode.invalid_config
    assert "retension.ms" in error.message
    assert "did you mean retention.ms?" in error.message


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    assert "did you mean" not in refusal({"\x00" * 50: "5"}).message


def test_the_compaction_lags_must_fit_together() -> None:
    error = refusal({"min.compaction.lag.ms": "11", "max.compaction.lag.ms": "10"})

    assert error.code is ErrorCode.invalid_config
    assert "min.compaction.lag.ms (11)" in error.message
    with pytest.raises(ApiError):
        check_overrides({"min.compaction.lag.ms": "11"}, {"max.compaction.lag.ms": "10"})


def test_set_and_delete_change_only_what_they_name() -> None:
    current = {"retention.ms": "1", "segment.ms": "2"}

    after = apply_changes(
        current,
        [("retention.ms", AlterOp.SET, "5"), ("segment.ms", AlterOp.DELETE, None), ("flush.ms", 1, None)],
    )

    assert after == {"retention.ms": "5"}
    assert current == {"retention.ms": "1", "segment.ms": "2"}


@pytest.mark.parametrize(
    ("before", "op", "value", "after"),
    [
        ({}, AlterOp.APPEND, "compact", "delete,compact"),
        ({"cleanup.policy": "compact"}, AlterOp.APPEND, "delete,compact", "compact,delete"),
        ({"cleanup.policy": "compact,delete"}, AlterOp.SUBTRACT, "delete", "compact"),
        ({"cleanup.policy": "compact"}, AlterOp.SUBTRACT, "compact,delete", ""),
        ({}, AlterOp.SUBTRACT, "delete", ""),
    ],
)
def test_append_and_subtract_work_on_the_list_or_its_default(
    before: Any, op: Any, value: str, after: Any
) -> None:
    assert apply_changes(before, [("cleanup.policy", op, value)]) == {"cleanup.policy": after}


def test_append_starts_from_the_default_of_the_node() -> None:
    after = apply_changes({}, [("cleanup.policy", AlterOp.APPEND, "delete")], {"cleanup.policy": "compact"})

    assert after == {"cleanup.policy": "compact,delete"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ([("retention.ms", 0, "1"), ("retention.ms", 1, None)], ErrorCode.invalid_request),
        ([("retention.ms", 0, None)], ErrorCode.invalid_request),
        ([("cleanup.policy", 2, None)], ErrorCode.invalid_request),
        ([("retention.ms", 4, "1")], ErrorCode.invalid_request),
        ([("retention.ms", 2, "1")], ErrorCode.invalid_config),
        ([("retention.ms", 3, "1")], ErrorCode.invalid_config),
        ([("retention.ms", 0, "soon")], ErrorCode.invalid_config),
        ([("no.such.config", 0, "1")], ErrorCode.invalid_config),
        ([("no.such.config", 2, "1")], ErrorCode.invalid_config),
        ([("cleanup.policy", 2, "shred")], ErrorCode.invalid_config),
        (
            [("min.compaction.lag.ms", 0, str(2**62)), ("max.compaction.lag.ms", 0, "1")],
            ErrorCode.invalid_config,
        ),
    ],
)
def test_a_change_that_kafka_would_refuse_gets_its_code(changes: Any, code: Any) -> None:
    with pytest.raises(ApiError) as caught:
        apply_changes({"segment.ms": "2"}, changes)

    assert caught.value.code is code


@given(st.dictionaries(st.sampled_from(sorted(TOPIC_KEYS)), st.text(max_size=12) | st.integers().map(str)))
def test_overrides_are_either_refused_with_invalid_config_or_usable(overrides: Any) -> None:
    try:
        check_overrides(overrides)
    except ApiError as error:
        assert error.code is ErrorCode.invalid_config
    else:
        config = TopicConfig.from_overrides(overrides)
        assert config.min_compaction_lag_ms <= config.max_compaction_lag_ms
        assert config.cleanup_policy <= {"compact", "delete"}


@given(
    st.sampled_from([key for key in TOPIC_KEYS.values() if key.kind in (ConfigKind.INT, ConfigKind.LONG)]),
    st.integers(-(2**65), 2**65) | st.integers(-10, 30),
)
def test_a_whole_number_is_taken_exactly_when_it_is_in_range(key: Any, number: int) -> None:
    bits = 31 if key.kind is ConfigKind.INT else 63
    fits = -(2**bits) <= number < 2**bits
    in_range = (key.minimum is None or number >= key.minimum) and (
        key.maximum is None or number <= key.maximum
    )
    if fits and (in_range or number == key.also):
        assert key.parse(str(number)) == number
    else:
        with pytest.raises(ApiError):
            key.parse(str(number))


def test_a_long_takes_exactly_64_bits() -> None:
    key = TOPIC_KEYS["retention.bytes"]

    assert [key.parse(str(number)) for number in (-(2**63), 2**63 - 1)] == [-(2**63), 2**63 - 1]
    for number in (-(2**63) - 1, 2**63):
        with pytest.raises(ApiError, match="64-bit"):
            key.parse(str(number))
