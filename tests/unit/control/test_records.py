from __future__ import annotations

from uuid import UUID

import msgspec
import pytest

from tidemill.control.records import (
    PARTITIONS_PER_CHUNK,
    PartitionImage,
    PartitionsRecord,
    TopicRecord,
    chunk_count,
    decode,
    encode,
    topic_key,
)
from tidemill.errors import CorruptData, StorageError

TOPIC = TopicRecord(name="t", topic_id=UUID(int=5), partition_count=3, configs={"retention.ms": "1"})


def test_a_record_comes_back_as_it_was() -> None:
    assert decode("topics/t", encode(TOPIC), TopicRecord) == TOPIC


def test_a_full_chunk_is_small() -> None:
    partition = PartitionImage(70_000, 2**31 - 1, (70_000, 70_001, 70_002), (70_000, 70_001, 70_002))
    chunk = PartitionsRecord(partitions=(partition,) * PARTITIONS_PER_CHUNK)
    assert len(encode(chunk)) < 64 * 1024
    assert decode("partitions/x/000", encode(chunk), PartitionsRecord) == chunk


@pytest.mark.parametrize("value", [b"", b"\xc1", encode(TOPIC)[:-3], msgspec.msgpack.encode({"v": 1})])
def test_bytes_that_are_not_the_record_are_corruption(value: bytes) -> None:
    with pytest.raises(CorruptData, match="topics/t"):
        decode("topics/t", value, TopicRecord)


def test_a_newer_format_is_refused_and_not_guessed_at() -> None:
    with pytest.raises(StorageError, match="newer Tidemill"):
        decode("topics/t", msgspec.msgpack.encode({"v": 2, "whatever": 1}), TopicRecord)


def test_names_that_collide_have_one_key() -> None:
    assert topic_key("a.b_c") == topic_key("a_b.c") != topic_key("a-b-c")


@pytest.mark.parametrize(("partitions", "chunks"), [(1, 1), (1_000, 1), (1_001, 2), (10_000, 10)])
def test_chunk_count(partitions: int, chunks: int) -> None:
    assert chunk_count(partitions) == chunks
