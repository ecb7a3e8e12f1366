"""Writing of Arrow columns as JSON values. ``tidemill.tables.rows.formats`` says how values are spelt.

Texts are made column by column and joined by Arrow, row by row; there is no Python object per value, but for
binary values. A null is written as ``null``, so that all rows of a batch have all fields.
"""

from __future__ import annotations

import binascii
import json

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from tidemill.records.columns import compute as pc
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.rows.nested import list_parts, make_array, null_mask
from tidemill.tables.rows.refusals import Refusal, indexed_by, refuse_where

__all__ = ("json_objects",)

#: Days of 0000-01-01 and of 9999-12-31: the range of four digits of a year.
_DAYS = (-719_528, 2_932_896)
_MICROSECONDS_PER_DAY = 86_400_000_000
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def json_objects(fields: list[pa.Field], arrays: list[pa.Array], prefix: str = "") -> pa.StringArray:
    """One JSON object per row. Raises ``Refusal`` for a value that JSON rows cannot have."""
    parts: list[object] = []
    for number, (field, array) in enumerate(zip(fields, arrays, strict=True)):
        name = json.dumps(field.name, ensure_ascii=False)
        parts += [f"{',' if number else '{'}{name}:", _texts(array, prefix + field.name)]
    return pc.binary_join_element_wise(*parts, "}", "")


def _texts(array: pa.Array, path: str) -> pa.StringArray:
    """The JSON text of every value; the text ``null`` where it is null."""
    texts = _spelt(array, path)
    return texts.fill_null("null") if array.null_count else texts


def _spelt(array: pa.Array, path: str) -> pa.StringArray:
    """The JSON text of every value; null where it is null."""
    data_type = array.type
    if arrow.is_string(data_type):
        return _quoted(_escaped(array))
    if arrow.is_floating(data_type):
        return _floats(array)
    if arrow.is_integer(data_type) or arrow.is_boolean(data_type):
        return array.cast(pa.string())
    if arrow.is_duration(data_type):
        return array.cast(pa.int64()).cast(pa.string())
    if arrow.is_binary(data_type):
        return _quoted(_base64(array))
    if arrow.is_decimal(data_type):
        return _quoted(_decimals(array))
    if arrow.is_nested(data_type):
        return _nested(array, path)
    return _quoted(_moments(array, path))


def _quoted(texts: pa.Array) -> pa.StringArray:
    return pc.binary_join_element_wise('"', texts, '"', "")


def _escaped(texts: pa.StringArray) -> pa.StringArray:
    """Escape what JSON does not allow inside of quotes; most texts have nothing of it."""
    data = texts.buffers()[2]
    if data is None:
        return texts
    characters = np.frombuffer(data, np.uint8)
    special = characters[(characters < ord(" ")) | (characters == _QUOTE) | (characters == _BACKSLASH)]
    # The backslash comes first, because the other escapes contain backslashes.
    for byte in sorted(set(special.tolist()), key=lambda one: one != _BACKSLASH):
        character = chr(byte)
        texts = pc.replace_substring(texts, character, json.dumps(character)[1:-1])
    return texts


def _floats(array: pa.Array) -> pa.StringArray:
    # As doubles, whose digits read back as the same float.
    wide = array.cast(pa.float64())
    texts = wide.cast(pa.string())
    minus_zero = pc.equal(texts, "-0")
    if pc.any(minus_zero).as_py():
        texts = pc.if_else(minus_zero, "-0.0", texts)
    if pc.all(pc.is_finite(wide), min_count=0).as_py():
        return texts
    infinite = pc.if_else(pc.greater(wide, 0.0), '"Infinity"', '"-Infinity"')
    texts = pc.if_else(pc.is_inf(wide), infinite, texts)
    return pc.if_else(pc.is_nan(wide), '"NaN"', texts)


def _base64(array: pa.Array) -> pa.StringArray:
    values = [
        None if value is None else binascii.b2a_base64(value, newline=False) for value in array.to_pylist()
    ]
    return pa.array(values, pa.binary()).cast(pa.string())


def _decimals(array: pa.Array) -> pa.StringArray:
    texts = array.cast(pa.string())
    # Arrow writes very small decimals with an exponent.
    short = pc.match_substring(texts, "E").fill_null(False).to_numpy(zero_copy_only=False)
    if not short.any():
        return texts
    spelt = [f"{value:f}" for value in array.filter(from_numpy(short)).to_pylist()]
    return pc.replace_with_mask(texts, from_numpy(short), pa.array(spelt, pa.string()))


def _moments(array: pa.Array, path: str) -> pa.StringArray:
    data_type = array.type
    if arrow.is_time(data_type):
        return array.cast(pa.string())
    first, last = _DAYS
    whole = array.cast(pa.int32() if arrow.is_date(data_type) else pa.int64())
    if arrow.is_timestamp(data_type):
        first, last = first * _MICROSECONDS_PER_DAY, (last + 1) * _MICROSECONDS_PER_DAY - 1
    beyond = pc.or_(pc.less(whole, first), pc.greater(whole, last)).fill_null(False)
    text = "is a time that JSON rows cannot have: years go from 0000 to 9999"
    refuse_where(beyond.to_numpy(zero_copy_only=False), path, text)
    if arrow.is_date(data_type):
        return array.cast(pa.string())
    # Without its zone, because Arrow takes a hundred times as long to write one.
    texts = pc.binary_replace_slice(array.cast(pa.timestamp("us")).cast(pa.string()), 10, 11, "T")
    return texts if data_type.tz is None else pc.binary_join_element_wise(texts, "Z", "")


def _nested(array: pa.Array, path: str) -> pa.StringArray:
    nulls = null_mask(array)
    if nulls is not None:
        with indexed_by(np.flatnonzero(~nulls).__getitem__):
            present = _nested(array.drop_null(), path)
        return present.take(from_numpy(np.cumsum(~nulls) - 1, nulls))
    if arrow.is_struct(array.type):
        return json_objects(list(array.type), array.flatten(), path + ".")
    offsets, elements = list_parts(array)
    with indexed_by(lambda index: np.searchsorted(offsets, index, "right") - 1):
        if not arrow.is_map(array.type):
            texts = _texts(elements, path + ".element")
        else:
            keys, items = elements.flatten()
            texts = _pairs(keys, items, offsets, path)
    opening, closing = "{}" if _as_object(array.type) else "[]"
    lists = make_array(
        pa.list_(pa.string()), len(array), None, [pa.py_buffer(offsets.astype(np.int32))], [texts]
    )
    return pc.binary_join_element_wise(opening, pc.binary_join(lists, ","), closing, "")


def _as_object(data_type: pa.DataType) -> bool:
    return bool(arrow.is_map(data_type) and arrow.is_string(data_type.key_type))


def _pairs(keys: pa.Array, items: pa.Array, offsets: np.ndarray, path: str) -> pa.StringArray:
    """The entries of maps: fields of objects where the keys are text, else pairs."""
    key_texts, item_texts = _texts(keys, path + ".key"), _texts(items, path + ".value")
    if not arrow.is_string(keys.type):
        return pc.binary_join_element_wise("[", key_texts, ",", item_texts, "]", "")
    codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    _, firsts = np.unique(rows * (int(codes.max(initial=0)) + 1) + codes, return_index=True)
    if len(firsts) != len(codes):
        again = np.ones(len(codes), bool)
        again[firsts] = False
        index = int(again.argmax())
        raise Refusal(index, path, f"has key {keys[index].as_py()!r} twice, which JSON rows cannot have")
    return pc.binary_join_element_wise(key_texts, ":", item_texts, "")
