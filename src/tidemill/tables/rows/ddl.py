"""Types and columns in the words of Spark's DDL: writing and parsing.

Beyond Spark's own words, ``not null`` may follow the element of an array and the value of a map, so that
every type of a table can be written down and read back::

    columns  =  column, { ",", column }
    column   =  name, [ ":" ], type, [ "not null" ], [ "comment", text ]
    type     =  "bigint", … | "decimal", [ "(", digits, [ ",", digits ], ")" ] | "interval day to second"
             |  "array<", type, [ "not null" ], ">" | "map<", type, ",", type, [ "not null" ], ">"
             |  "struct<", columns, ">"
    name     =  letters, digits and "_", or anything in backticks, where two backticks stand for one
    text     =  in single or double quotes, where a backslash keeps the character behind it

Words are read in any case.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

import pyarrow as pa
from pyarrow import types as arrow

from tidemill.errors import TableCode, TableError

__all__ = ("describe_type", "read_columns")

#: Limit of nesting: far beyond what a table may have, and far below what Python's stack allows.
_DEPTH_MAX = 64
_WORDS = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.time64("ns"): "time",
    pa.duration("us"): "interval day to second",
}
_TYPES = {
    **{word: data_type for data_type, word in _WORDS.items()},
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "real": pa.float32(),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
}
_DECIMALS = ("decimal", "dec", "numeric")
_DECIMAL_DIGITS_MAX = 38
#: How many characters of a wrong text its error quotes, on either side.
_CHARACTERS_SHOWN = 20
_TOKEN = re.compile(
    r"\s*(?:(?P<word>\w+)"
    r"|`(?P<name>(?:[^`]|``)*)`"
    r"|'(?P<single>(?:[^'\\]|\\.)*)'"
    r'|"(?P<double>(?:[^"\\]|\\.)*)"'
    r"|(?P<mark>[<>(),:])"
    r"|(?P<end>\Z))",
    re.DOTALL,
)


def describe_type(data_type: pa.DataType) -> str:
    """A table's type in Spark's words; other types as Arrow writes them.

    >>> describe_type(pa.list_(pa.struct([("a", pa.int32()), ("b", pa.string())])))
    'array<struct<a:int,b:string>>'
    """
    word = _WORDS.get(data_type)
    if word is not None:
        return word
    if arrow.is_decimal128(data_type):
        return f"decimal({data_type.precision},{data_type.scale})"
    if arrow.is_map(data_type):
        return f"map<{describe_type(data_type.key_type)},{_described(data_type.item_field)}>"
    if arrow.is_list(data_type):
        return f"array<{_described(data_type.value_field)}>"
    if arrow.is_struct(data_type):
        fields = (f"{_quoted(field.name)}:{_described(field)}" for field in data_type)
        return f"struct<{','.join(fields)}>"
    return str(data_type)


def read_columns(text: str) -> list[pa.Field]:
    """Parse a list of columns."""
    reader = _Reader(text)
    fields = reader.columns(0)
    reader.expect_end()
    return fields


def _described(field: pa.Field) -> str:
    return describe_type(field.type) + ("" if field.nullable else " not null")


def _quoted(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        return name
    return "`" + name.replace("`", "``") + "`"


class _Token(NamedTuple):
    kind: str
    """One of ``word``, ``name``, ``text``, ``mark``, ``end``."""
    value: str
    position: int


class _Reader:
    """Parser of one text, which reads from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._behind = 0
        self._token = self._read()

    def columns(self, depth: int) -> list[pa.Field]:
        fields = [self._column(depth)]
        while self._take_mark(","):
            fields.append(self._column(depth))
        return fields

    def type(self, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            self._refuse("fewer nested types")
        token = self._token
        word = token.value.lower()
        if token.kind != "word":
            self._refuse("a type")
        self._advance()
        if word in _DECIMALS:
            return self._decimal()
        if word == "interval":
            for part in ("day", "to", "second"):
                self._expect_word(part)
            return pa.duration("us")
        if word in ("array", "map", "struct"):
            self._expect_mark("<")
            nested = self._nested(word, depth + 1)
            self._expect_mark(">")
            return nested
        if word not in _TYPES:
            self._token = token
            self._refuse("a type such as bigint, string, decimal(10,2), timestamp or array<int>")
        return _TYPES[word]

    def expect_end(self) -> None:
        if self._token.kind != "end":
            self._refuse("the end, or a comma")

    def _nested(self, word: str, depth: int) -> pa.DataType:
        if word == "struct":
            return pa.struct(self.columns(depth))
        first = self.type(depth)
        if word == "array":
            return pa.list_(pa.field("element", first, not self._take_not_null()))
        self._expect_mark(",")
        value = self.type(depth)
        return pa.map_(first, pa.field("value", value, not self._take_not_null()))

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0
        if self._take_mark("("):
            precision = self._number(1, _DECIMAL_DIGITS_MAX)
            if self._take_mark(","):
                scale = self._number(0, precision)
            self._expect_mark(")")
        return pa.decimal128(precision, scale)

    def _column(self, depth: int) -> pa.Field:
        name = self._token
        if name.kind not in ("word", "name"):
            self._refuse("the name of a column")
        self._advance()
        self._take_mark(":")
        data_type = self.type(depth)
        nullable = not self._take_not_null()
        metadata = None
        if self._take_word("comment"):
            if self._token.kind != "text":
                self._refuse("a comment in quotes")
            metadata = {"comment": self._token.value}
            self._advance()
        return pa.field(name.value, data_type, nullable, metadata)

    def _take_not_null(self) -> bool:
        if not self._take_word("not"):
            return False
        self._expect_word("null")
        return True

    def _number(self, low: int, high: int) -> int:
        digits = self._token.value
        # Compared as text first, because converting a very long number would take time.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 3 and low <= int(digits) <= high):
            self._refuse(f"a number from {low} to {high}")
        self._advance()
        return int(digits)

    def _take_word(self, word: str) -> bool:
        found = self._token.kind == "word" and self._token.value.lower() == word
        if found:
            self._advance()
        return found

    def _expect_word(self, word: str) -> None:
        if not self._take_word(word):
            self._refuse(repr(word))

    def _take_mark(self, mark: str) -> bool:
        found = self._token.kind == "mark" and self._token.value == mark
        if found:
            self._advance()
        return found

    def _expect_mark(self, mark: str) -> None:
        if not self._take_mark(mark):
            self._refuse(repr(mark))

    def _advance(self) -> None:
        self._token = self._read()

    def _read(self) -> _Token:
        match = _TOKEN.match(self._text, self._behind)
        if match is None:
            position = len(self._text) - len(self._text[self._behind :].lstrip())
            return _Token("odd", self._text[position : position + 1], position)
        self._behind = match.end()
        kind = str(match.lastgroup)
        value = match[kind]
        if kind in ("single", "double"):
            return _Token("text", re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL), match.start(kind) - 1)
        if kind == "name":
            return _Token("name", value.replace("``", "`"), match.start(kind) - 1)
        return _Token(kind, value, match.start(kind))

    def _refuse(self, expected: str) -> NoReturn:
        found = "the end" if self._token.kind == "end" else repr(self._token.value)
        at = self._token.position
        near = self._text[max(0, at - _CHARACTERS_SHOWN) : at + _CHARACTERS_SHOWN]
        raise TableError(
            TableCode.invalid_schema,
            f"expected {expected} at character {at + 1}, and found {found}, near {near!r}",
        )
