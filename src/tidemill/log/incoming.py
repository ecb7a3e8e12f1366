"""Checks a batch that a producer sent, and brings it into the form that goes into the log. Pure.

Everything that can refuse a batch, but for sequence numbers, is decided here and before anything is written:
the header, the checksum, and every record, which compressed batches are unpacked for (see
``records.validation``). How long that takes is the sender's choice, so ``is_quick`` says ahead whether a
batch may be prepared between two other requests; any other is prepared in a thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, InvalidRecords
from tidemill.log.storage import Buffer
from tidemill.records.batch import (
    HEADER_BYTES,
    BatchHeader,
    check_batch,
    parse_header,
    restamp_append_time,
    restamp_max_timestamp,
)
from tidemill.records.compression import CODEC_NAMES, CODEC_NUMBERS, NONE, decompress
from tidemill.records.record import MAX_DECOMPRESSED_BYTES, recompress
from tidemill.records.rewriting import no_breath
from tidemill.records.validation import (
    INT64_MAX,
    INT64_MIN,
    SMALL_BATCH_RECORDS,
    RecordRules,
    check_records,
)

__all__ = ("QUICK_RECORDS", "PreparedBatch", "is_quick", "prepare_batch", "prepare_quickly")

#: A batch within these limits is prepared in about a millisecond.
QUICK_RECORDS = 4_096
_QUICK_BYTES = 2 * 1024 * 1024
_QUICK_PACKED_BYTES = 16 * 1024
#: A small batch that unpacks to more than this is prepared in a thread nevertheless.
_QUICK_UNPACKED_BYTES = 256 * 1024


class PreparedBatch(NamedTuple):
    """A batch as it goes into the log of a topic with this configuration."""

    data: Buffer
    header: BatchHeader
    config: TopicConfig


class _NotUnpacked(InvalidRecords):
    """The records of a batch do not decompress, or not within the limit."""


def is_quick(header: BatchHeader, size_bytes: int, config: TopicConfig) -> bool:
    """Whether ``prepare_batch`` is likely to be done in about a millisecond, to judge by sizes and counts.

    ``size_bytes`` is the size of what was sent: the header has not been compared with it yet.
    """
    if header.record_count > SMALL_BATCH_RECORDS and (
        header.record_count > QUICK_RECORDS or "tidemill.records.columns.validation" not in sys.modules
    ):
        return False
    if header.codec == NONE and not _is_recompressed(header, config):
        return size_bytes <= _QUICK_BYTES
    return size_bytes <= _QUICK_PACKED_BYTES


def prepare_quickly(
    data: Buffer, header: BatchHeader, config: TopicConfig, now_ms: int
) -> PreparedBatch | None:
    """Prepare a batch that ``is_quick``; None if it is not, or does not unpack to as little as it seems.

    ``header`` is the batch's, as ``parse_header`` gave it.
    """
    if not is_quick(header, len(data), config):
        return None
    try:
        prepared = prepare_batch(data, config, now_ms, _QUICK_UNPACKED_BYTES, header=header)
        return PreparedBatch(*prepared, config)
    except _NotUnpacked:
        return None


def prepare_batch(
    data: Buffer,
    config: TopicConfig,
    now_ms: int,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    *,
    header: BatchHeader | None = None,
    batch_checked: bool = False,
    records_checked: bool = False,
    breathe: Callable[[], None] = no_breath,
) -> tuple[Buffer, BatchHeader]:
    """Check a batch against the topic's configuration and bring it into the topic's form.

    ``header`` is the batch's, if the caller has it already; ``batch_checked``: ``check_batch`` has passed it,
    so its checksum is not computed again. ``records_checked``: every record is known to be sound, in its
    place, with a key if one is needed, and the largest timestamp to be the header's. ``breathe`` is called
    now and then, for the sake of other threads.

    A header with another largest timestamp than its records have is put right, as Kafka does: some clients
    write there whatever the last record has. Searches by time and retention go by it.
    """
    if header is None or not batch_checked:
        header = check_batch(data, header)
    if header.codec not in CODEC_NAMES:
        raise ApiError(
            ErrorCode.unsupported_compression_type, f"compression codec number {header.codec} is unknown"
        )
    _check_size(header.size_bytes, config)
    rules = _rules(config, now_ms)
    recompressed = _is_recompressed(header, config)
    if recompressed or not records_checked or not rules.allows_up_to(header.max_timestamp):
        plain = _unpack(data, header, max_decompressed_bytes)
        breathe()
        largest = check_records(header, plain, rules, breathe)
        if largest != header.max_timestamp and config.timestamp_type == "CreateTime":
            data = restamp_max_timestamp(data, largest)
            header = parse_header(data)
        if recompressed:
            codec = CODEC_NUMBERS[config.compression_type]
            if codec == NONE:
                # Checked before so much is copied.
                _check_size(HEADER_BYTES + len(plain), config)
            data = recompress(header, plain, codec)
            header = parse_header(data)
            _check_size(header.size_bytes, config)
    if config.timestamp_type == "LogAppendTime":
        data = restamp_append_time(data, now_ms)
        header = parse_header(data)
    return data, header


def _is_recompressed(header: BatchHeader, config: TopicConfig) -> bool:
    return config.compression_type != "producer" and CODEC_NUMBERS[config.compression_type] != header.codec


def _rules(config: TopicConfig, now_ms: int) -> RecordRules:
    if config.timestamp_type != "CreateTime":
        return RecordRules(config.compacts)
    is_unlimited = config.timestamp_before_max_ms >= INT64_MAX
    return RecordRules(
        config.compacts,
        INT64_MIN if is_unlimited else now_ms - config.timestamp_before_max_ms,
        min(now_ms + config.timestamp_after_max_ms, INT64_MAX),
    )


def _unpack(data: Buffer, header: BatchHeader, max_bytes: int) -> bytes | memoryview:
    try:
        return decompress(header.codec, memoryview(data)[HEADER_BYTES:], max_bytes)
    except ApiError as error:
        # The checksum is right, so the producer made the batch like that: sending it again would not help.
        raise _NotUnpacked(error.message) from error


def _check_size(size_bytes: int, config: TopicConfig) -> None:
    if size_bytes > config.max_message_bytes:
        raise ApiError(
            ErrorCode.message_too_large,
            f"a batch of {size_bytes} bytes is larger than the topic's max.message.bytes of "
            f"{config.max_message_bytes}",
        )
    if size_bytes > config.segment_bytes:
        raise ApiError(
            ErrorCode.record_list_too_large,
            f"a batch of {size_bytes} bytes is larger than the topic's segment.bytes of "
            f"{config.segment_bytes}",
        )
