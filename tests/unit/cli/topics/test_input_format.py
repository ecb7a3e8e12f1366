"""From lines of input to records."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.topics.input_format import json_line, plain_line
from tidemill.errors import ApiError, ErrorCode

NOW_MS = 5


def test_plain_line_is_a_value_without_a_key() -> None:
    record, partition = plain_line(None, [("h", b"1")])(b"a=b", NOW_MS)
    assert (record.key, record.value, record.timestamp_ms, record.headers) == (
        None,
        b"a=b",
        5,
        (("h", b"1"),),
    )
    assert partition is None


def test_first_separator_ends_the_key() -> None:
    record, _ = plain_line(b"::", [])(b"k::v::w", NOW_MS)
    assert (record.key, record.value) == (b"k", b"v::w")


def test_line_without_the_separator_is_refused() -> None:
    with pytest.raises(ApiError, match="no key separator") as caught:
        plain_line(b":", [])(b"value", NOW_MS)
    assert caught.value.code == ErrorCode.invalid_record


def test_json_line_gives_key_value_headers_partition_and_time() -> None:
    line = b'{"key": "k", "value": "v", "headers": {"a": "1"}, "partition": 2, "timestamp": 9}'
    record, partition = json_line([("all", b"x")])(line, NOW_MS)
    assert (record.key, record.value, record.timestamp_ms) == (b"k", b"v", 9)
    assert record.headers == (("all", b"x"), ("a", b"1"))
    assert partition == 2


def test_json_value_that_is_no_string_is_written_as_json() -> None:
    record, _ = json_line([])('{"value": {"a": ["ü", 1]}}'.encode(), NOW_MS)
    assert record.value == '{"a": ["ü", 1]}'.encode()


def test_missing_and_null_values_are_null() -> None:
    assert json_line([])(b"{}", NOW_MS).record.value is None
    assert json_line([])(b'{"value": null}', NOW_MS).record.value is None


@pytest.mark.parametrize(
    "given_object",
    [
        {"kye": "k"},
        {"partition": -1},
        {"partition": True},
        {"timestamp": "now"},
        {"value": "!", "value_encoding": "base64"},
        {"value": "a", "value_encoding": "hex"},
        {"headers": "a"},
        {"headers": [{"value": "a"}]},
    ],
)
def test_field_that_makes_no_sense_is_refused(given_object: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        json_line([])(json.dumps(given_object).encode(), NOW_MS)
    assert caught.value.code == ErrorCode.invalid_record


@given(st.binary(max_size=40))
def test_any_bytes_are_a_record_or_refused(line: bytes) -> None:
    try:
        json_line([])(line, NOW_MS)
    except ApiError as error:
        assert error.code == ErrorCode.invalid_record
