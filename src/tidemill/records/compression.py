"""Kafka's compression codecs, with a limit on what decompression may produce.

Snappy comes in two dressings: Java clients frame it in blocks ("xerial"), librdkafka sends one bare block.
Both are read; the framed one is written.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from typing import Final

import cramjam

from tidemill.errors import ApiError, ErrorCode

__all__ = ("CODEC_NAMES", "CODEC_NUMBERS", "NONE", "compress", "decompress")

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

CODEC_NAMES: Final = {NONE: "uncompressed", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}
CODEC_NUMBERS: Final = {name: number for number, name in CODEC_NAMES.items()}

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_BYTES = 32 * 1024
_FIRST_GUESS_BYTES = 64 * 1024
_MAPPED_MIN_BYTES = 1024 * 1024
#: Three bytes of snappy give at most 64: a larger claim is refused before memory is taken.
_SNAPPY_EXPANSION_MAX = 22

_LEVELLED: dict[int, tuple[Callable[..., cramjam.Buffer], int]] = {
    GZIP: (cramjam.gzip.compress, 6),
    LZ4: (cramjam.lz4.compress, 1),
    ZSTD: (cramjam.zstd.compress, 3),
}


def compress(codec: int, data: bytes | memoryview, level: int | None = None) -> bytes:
    """Compress ``data`` the way Kafka's clients expect codec number ``codec``."""
    if codec == NONE:
        return bytes(data)
    if codec == SNAPPY:
        return _compress_xerial(data)
    function, default_level = _LEVELLED[codec]
    return bytes(function(data, level=default_level if level is None else level))


def decompress(codec: int, data: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
    """Decompress; more than ``max_bytes`` of output, or broken input, is refused as corrupt."""
    if codec == NONE:
        return data
    try:
        if codec == SNAPPY:
            return _decompress_snappy(bytes(data), max_bytes)
        module = {GZIP: cramjam.gzip, LZ4: cramjam.lz4, ZSTD: cramjam.zstd}[codec]
    except KeyError:
        raise ApiError(
            ErrorCode.unsupported_compression_type, f"compression codec number {codec} is unknown"
        ) from None
    return _decompress_bounded(module.decompress_into, data, max_bytes)


def _decompress_bounded(
    decompress_into: Callable[..., int], data: bytes | memoryview, max_bytes: int
) -> memoryview:
    # The output size is not known ahead, so the buffer grows by doubling: memory stays within twice
    # the true size, and a bomb is stopped at the limit.
    size = min(max_bytes, max(_FIRST_GUESS_BYTES, 4 * len(data)))
    while True:
        output = _buffer(size)
        try:
            written = decompress_into(data, output)
        except cramjam.DecompressionError as error:
            if size < max_bytes and "write whole buffer" in str(error):
                size = min(max_bytes, 2 * size)
                continue
            raise _broken(error, max_bytes) from error
        return memoryview(output)[:written]


def _buffer(size: int) -> bytearray | mmap.mmap:
    """Memory to decompress into.

    A large one comes from the system untouched: a ``bytearray`` would be filled with zeros first, and every
    thread of the process would wait for that.
    """
    return bytearray(size) if size < _MAPPED_MIN_BYTES else mmap.mmap(-1, size)


def _decompress_snappy(data: bytes, max_bytes: int) -> memoryview:
    blocks = list(_xerial_blocks(data, max_bytes)) if data.startswith(_XERIAL_MAGIC) else [data]
    try:
        sizes = [_snappy_size(block, max_bytes) for block in blocks]
        if sum(sizes) > max_bytes:
            raise _broken("too large", max_bytes)
        output = memoryview(_buffer(sum(sizes)))
        position = 0
        for block, size in zip(blocks, sizes, strict=True):
            if size:
                cramjam.snappy.decompress_raw_into(block, output[position : position + size])
            else:
                cramjam.snappy.decompress_raw(block)
            position += size
    except cramjam.DecompressionError as error:
        raise _broken(error, max_bytes) from error
    return output


def _xerial_blocks(data: bytes, max_bytes: int) -> Iterator[bytes]:
    position = len(_XERIAL_HEADER)
    while position < len(data):
        if position + 4 > len(data):
            raise _broken("a snappy block has no length", max_bytes)
        (length,) = struct.unpack_from(">i", data, position)
        position += 4
        if length < 0 or position + length > len(data):
            raise _broken("a snappy block is longer than the data", max_bytes)
        yield data[position : position + length]
        position += length


def _snappy_size(block: bytes, max_bytes: int) -> int:
    size: int = cramjam.snappy.decompress_raw_len(block)
    if size > min(max_bytes, _SNAPPY_EXPANSION_MAX * len(block)):
        raise _broken("too large", max_bytes)
    return size


def _compress_xerial(data: bytes | memoryview) -> bytes:
    out = bytearray(_XERIAL_HEADER)
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        out += struct.pack(">i", len(block))
        out += block
    return bytes(out)


def _broken(why: object, max_bytes: int) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, f"records do not decompress within {max_bytes} bytes: {why}")
