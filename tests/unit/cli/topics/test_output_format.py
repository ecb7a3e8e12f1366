"""How messages are written."""

from __future__ import annotations

import pytest

from tidemill.cli.output import write_json
from tidemill.cli.topics.input_format import json_line
from tidemill.cli.topics.output_format import compile_template, message_as_json
from tidemill.client.consuming.record_reader import Message
from tidemill.records.record import Record

MESSAGE = Message("orders", 3, Record(b"k", b"v\xff", 1_700_000_000_000, (("h", b"1"), ("i", None)), 42))


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("%t %p %o %k %v\\n", b"orders 3 42 k v\xff\n"),
        ("%T|%h|%s", b"1700000000000|h=1,i=|2"),
        ("100%% \\t\\r\\0\\\\\\x41", b"100% \t\r\0\\A"),
        ("Ünïcode", "Ünïcode".encode()),
        ("", b""),
    ],
)
def test_every_part_is_filled_in(template: str, written: bytes) -> None:
    assert compile_template(template)(MESSAGE) == written


def test_null_key_and_value_are_written_as_nothing() -> None:
    assert compile_template("[%k][%v]%s")(Message("t", 0, Record(None, None))) == b"[][]0"


def test_text_in_the_message_is_not_taken_for_a_template() -> None:
    assert compile_template("%v")(Message("t", 0, Record(None, b"%k\\n"))) == b"%k\\n"


@pytest.mark.parametrize(("template", "part"), [("%q", "%q"), ("50%", "%"), ("\\q", "\\q"), ("\\xZZ", "\\x")])
def test_part_without_meaning_is_refused_by_name(template: str, part: str) -> None:
    with pytest.raises(ValueError, match="has no meaning in a template") as caught:
        compile_template(template)
    assert str(caught.value).startswith(part)


def test_json_marks_bytes_that_are_not_utf8() -> None:
    value = message_as_json(MESSAGE)
    assert value["value"] == "dv8="
    assert value["value_encoding"] == "base64"
    assert "key_encoding" not in value
    assert value["headers"] == [{"name": "h", "value": "1"}, {"name": "i", "value": None}]


def test_json_of_a_message_can_be_produced_again(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_json(message_as_json(MESSAGE))
    line = capfdbinary.readouterr().out
    record, partition = json_line([])(line, 0)
    assert record == MESSAGE.record._replace(offset=-1)
    assert partition == 3
