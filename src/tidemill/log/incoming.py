"""From the bytes that a producer sent to the bytes that go into the log. Pure.

Everything that can refuse a batch, but for sequence numbers, is decided here and before anything is written.
"""

from __future__ import annotations

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, InvalidRecords
from tidemill.log.storage import Buffer
from tidemill.records.batch import (
    NO_TIMESTAMP,
    BatchHeader,
    check_batch,
    parse_header,
    restamp_append_time,
)
from tidemill.records.compression import CODEC_NAMES, CODEC_NUMBERS
from tidemill.records.record import MAX_DECOMPRESSED_BYTES, read_records, recompress

__all__ = ("prepare_batch",)

_UNLIMITED_MS = 2**63 - 1
#: So many records at fault are named.
_NAMED_RECORDS_MAX = 1_000


def prepare_batch(
    data: Buffer,
    config: TopicConfig,
    now_ms: int,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    *,
    records_checked: bool = False,
) -> tuple[Buffer, BatchHeader]:
    """Check a batch against the topic's configuration and bring it into the topic's form.

    The batch is decoded only if the topic asks for something that its header does not show.
    ``records_checked``: every record is known to be sound, in its place, and with a key if one is needed.
    """
    header = check_batch(data)
    if header.codec not in CODEC_NAMES:
        raise ApiError(
            ErrorCode.unsupported_compression_type, f"compression codec number {header.codec} is unknown"
        )
    _check_size(header.size_bytes, config)
    if config.timestamp_type == "CreateTime":
        _check_create_time(header, config, now_ms)
    if (config.compacts and not records_checked) or config.timestamp_before_max_ms < _UNLIMITED_MS:
        _check_records(data, config, now_ms, max_decompressed_bytes)
    if config.compression_type != "producer" and CODEC_NUMBERS[config.compression_type] != header.codec:
        codec = CODEC_NUMBERS[config.compression_type]
        data = recompress(memoryview(data), header, codec, max_decompressed_bytes)
        header = parse_header(data)
        _check_size(header.size_bytes, config)
    if config.timestamp_type == "LogAppendTime":
        data = restamp_append_time(data, now_ms)
        header = parse_header(data)
    return data, header


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


def _check_create_time(header: BatchHeader, config: TopicConfig, now_ms: int) -> None:
    if header.max_timestamp - now_ms > config.timestamp_after_max_ms:
        raise ApiError(
            ErrorCode.invalid_timestamp,
            f"timestamp {header.max_timestamp} is more than message.timestamp.after.max.ms "
            f"({config.timestamp_after_max_ms}) ahead of the broker's clock {now_ms}",
        )


def _check_records(data: Buffer, config: TopicConfig, now_ms: int, max_bytes: int) -> None:
    base_offset = parse_header(data).base_offset
    without_key: list[tuple[int, str]] = []
    too_old: list[tuple[int, str]] = []
    for delta, record in enumerate(read_records(data, max_bytes)):
        if record.offset != base_offset + delta:
            raise ApiError(
                ErrorCode.invalid_record,
                f"record {delta} says that it is number {record.offset - base_offset}",
            )
        if config.compacts and record.key is None and len(without_key) < _NAMED_RECORDS_MAX:
            without_key.append((delta, "a record without a key cannot be written to a compacted topic"))
        if (
            config.timestamp_type == "CreateTime"
            and record.timestamp_ms != NO_TIMESTAMP
            and now_ms - record.timestamp_ms > config.timestamp_before_max_ms
            and len(too_old) < _NAMED_RECORDS_MAX
        ):
            behind = (
                f"timestamp {record.timestamp_ms} is more than message.timestamp.before.max.ms "
                f"({config.timestamp_before_max_ms}) behind the broker's clock {now_ms}"
            )
            too_old.append((delta, behind))
    if without_key:
        raise InvalidRecords(without_key[0][1], record_errors=tuple(without_key))
    if too_old:
        raise InvalidRecords(too_old[0][1], code=ErrorCode.invalid_timestamp, record_errors=tuple(too_old))
