"""Codecs, and the limit on what they may produce."""

from __future__ import annotations

import struct
import tracemalloc

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.compression import CODEC_NAMES, GZIP, LZ4, NONE, SNAPPY, ZSTD, compress, decompress

CODECS = sorted(CODEC_NAMES)
REAL = [GZIP, SNAPPY, LZ4, ZSTD]


@given(st.sampled_from(CODECS), st.binary(max_size=2000), st.integers(1, 60))
def test_round_trip(codec: int, piece: bytes, times: int) -> None:
    data = piece * times
    assert bytes(decompress(codec, compress(codec, data), len(data) + 1)) == data


@pytest.mark.parametrize("codec", REAL)
def test_exactly_the_limit_is_allowed_and_one_byte_more_is_not(codec: int) -> None:
    packed = compress(codec, b"x" * 100_000)
    assert len(decompress(codec, packed, 100_000)) == 100_000
    with pytest.raises(ApiError) as caught:
        decompress(codec, packed, 99_999)
    assert caught.value.code == ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", REAL)
def test_a_bomb_takes_memory_only_up_to_the_limit(codec: int) -> None:
    bomb = compress(codec, bytes(64 * 1024 * 1024))
    limit = 1024 * 1024
    tracemalloc.start()
    with pytest.raises(ApiError):
        decompress(codec, bomb, limit)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * limit + 2 * len(bomb)


def test_a_snappy_block_that_claims_more_than_its_bytes_can_give_is_refused_before_memory_is_taken() -> None:
    claim = b"\x80\x80\x80\x40" + b"\x00a"  # 128 MiB out of two bytes
    with pytest.raises(ApiError, match="too large"):
        decompress(SNAPPY, claim, 256 * 1024 * 1024)


def test_the_snappy_expansion_limit_admits_the_most_compressible_block() -> None:
    data = bytes(32 * 1024 * 40)
    assert bytes(decompress(SNAPPY, compress(SNAPPY, data), len(data))) == data
    assert bytes(decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(data)), len(data))) == data


@pytest.mark.parametrize("codec", REAL)
@pytest.mark.parametrize("cut", [0, 1, 7, -1])
def test_truncated_input_is_corrupt(codec: int, cut: int) -> None:
    packed = compress(codec, b"hello " * 100)
    with pytest.raises(ApiError) as caught:
        decompress(codec, packed[: cut or 3], 10_000)
    assert caught.value.code == ErrorCode.corrupt_message


@pytest.mark.parametrize("length", [-1, 2**31 - 1, 100])
def test_a_framed_snappy_block_with_a_wrong_length_is_corrupt(length: int) -> None:
    framed = b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, length) + b"abc"
    with pytest.raises(ApiError) as caught:
        decompress(SNAPPY, framed, 1000)
    assert caught.value.code == ErrorCode.corrupt_message


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        decompress(5, b"", 10)
    assert caught.value.code == ErrorCode.unsupported_compression_type


def test_uncompressed_bytes_are_not_copied() -> None:
    data = b"plain"
    assert decompress(NONE, data, 0) is data
