"""Batches that take long to look at: checked in a thread, in order, and refused if they are unsound."""

from __future__ import annotations

import gc
import struct
from collections.abc import AsyncIterator

import pytest
from crc32c import crc32c

from support.exchange import Answer, Exchange, produce_part
from tidemill.errors import ErrorCode, TidemillError
from tidemill.records.compression import GZIP, ZSTD
from tidemill.records.record import Record, build_batch

VERSION = 9
ALL = -1
NOW = 1_700_000_000_000


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    topics = {
        "plain": (2, {}),
        "packed": (1, {"compression.type": "zstd"}),
        "small": (1, {"max.message.bytes": "60"}),
    }
    async with Exchange(topics) as started:
        yield started


def many(count: int, codec: int = 0) -> bytes:
    return build_batch([Record(None, b"v%d" % number, NOW) for number in range(count)], codec=codec)


def forged(body: bytes, count: int, attributes: int = 0) -> bytes:
    """A batch with a right checksum, whatever its records are."""
    checked = struct.pack(">hiqqqhii", attributes, count - 1, NOW, NOW, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


def result(answer: Answer) -> tuple[ErrorCode, int]:
    found = answer.value.responses[0].partition_responses[0]
    return ErrorCode(found.error_code), found.base_offset


@pytest.mark.parametrize(
    "data",
    [
        forged(many(2)[61:], 2**31 - 1),
        forged(many(2)[61:], 3),
        forged(b"garbage", 1, GZIP),
        forged(b"\x0d" + many(2)[62:], 2),
        forged(many(5_000)[61:-1], 5_000),
        build_batch([Record(None, bytes(200 << 20), NOW)], codec=ZSTD),
    ],
    ids=["count 2**31-1", "count too high", "garbage gzip", "negative length", "large, cut short", "bomb"],
)
async def test_an_unsound_batch_with_a_valid_checksum_is_refused_and_moves_nothing(
    node: Exchange, data: bytes
) -> None:
    answer = node.produce(VERSION, produce_part("plain", data))
    await node.settle()
    await node.flush()
    assert result(answer)[0] == ErrorCode.invalid_record
    assert node.partition("plain").local_log.end_offset == 0


@pytest.mark.parametrize(
    ("topic", "data"),
    [
        ("plain", forged(b"garbage", 1, GZIP)),
        ("plain", forged(many(5_000)[61:-1], 5_000)),
        ("small", many(1)),
        ("small", many(20_000)),
    ],
    ids=["unsound, small", "unsound, in a thread", "too large, small", "too large, in a thread"],
)
async def test_a_refused_batch_is_freed_at_once(node: Exchange, topic: str, data: bytes) -> None:
    gc.collect()
    gc.disable()
    try:
        answer = node.produce(VERSION, produce_part(topic, data))
        await node.settle()
        assert result(answer)[0] in (ErrorCode.invalid_record, ErrorCode.message_too_large)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, TidemillError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_batches_of_one_partition_keep_their_order_whoever_looks_at_them(node: Exchange) -> None:
    batches = [many(20_000), many(1), many(5_000, ZSTD), many(2), many(90)]
    answers = [node.produce(VERSION, produce_part("plain", data)) for data in batches]
    await node.settle()
    await node.flush()
    assert [result(answer) for answer in answers] == [
        (ErrorCode.none, offset) for offset in (0, 20_000, 20_001, 25_001, 25_003)
    ]
    assert not node.node.broker.gated_writes


async def test_a_batch_is_recompressed_behind_the_gate(node: Exchange) -> None:
    answer = node.produce(VERSION, produce_part("packed", many(20_000)))
    await node.settle()
    await node.flush()
    assert result(answer) == (ErrorCode.none, 0)
    log = node.partition("packed").local_log
    assert log.end_offset == 20_000
    assert log.size_bytes < 200_000
