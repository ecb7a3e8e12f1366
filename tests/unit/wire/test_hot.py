"""The hand-packed responses against the generic encoder, in every version."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.wire.apis import APIS
from tidemill.wire.encode import encode_response
from tidemill.wire.hot import (
    FetchPartition,
    NodeEndpoint,
    PartitionResult,
    SharePartitionData,
    encode_fetch_response,
    encode_produce_response,
    encode_share_fetch_response,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=6) | st.just("é" * 90)
NULLABLE_TEXT = st.none() | TEXT
LEADER = st.none() | st.just((-1, -1)) | st.tuples(INT32, INT32)
ERROR = st.integers(-1, 120)

RESULTS = st.builds(
    PartitionResult,
    partition_index=INT32,
    error_code=ERROR,
    base_offset=INT64,
    log_append_time_ms=INT64,
    log_start_offset=INT64,
    record_errors=st.lists(st.tuples(INT32, NULLABLE_TEXT), max_size=2),
    error_message=NULLABLE_TEXT,
    current_leader=LEADER,
) | st.builds(PartitionResult, INT32, ERROR, INT64)
FETCHED = st.builds(
    FetchPartition,
    partition_index=INT32,
    error_code=ERROR,
    high_watermark=INT64,
    last_stable_offset=INT64,
    log_start_offset=INT64,
    aborted_transactions=st.none() | st.lists(st.tuples(INT64, INT64), max_size=2),
    preferred_read_replica=INT32,
    records=st.lists(st.binary(max_size=5) | st.just(memoryview(b"r" * 200)), max_size=3),
    diverging_epoch=st.none() | st.just((-1, -1)) | st.tuples(INT32, INT64),
    current_leader=LEADER,
    snapshot_id=st.none() | st.just((-1, -1)) | st.tuples(INT64, INT32),
) | st.builds(FetchPartition, INT32, ERROR, INT64)
INT16 = st.integers(-(2**15), 2**15 - 1)
SHARED = st.builds(
    SharePartitionData,
    partition_index=INT32,
    error_code=ERROR,
    error_message=NULLABLE_TEXT,
    acknowledge_error_code=ERROR,
    acknowledge_error_message=NULLABLE_TEXT,
    current_leader=st.tuples(INT32, INT32),
    records=st.lists(st.binary(max_size=5) | st.just(memoryview(b"r" * 200)), max_size=3),
    acquired=st.lists(st.tuples(INT64, INT64, INT16), max_size=3) | st.just([(1, 2, 3)] * 300),
) | st.builds(SharePartitionData, INT32)
ENDPOINTS = st.lists(st.builds(NodeEndpoint, INT32, TEXT, INT32, NULLABLE_TEXT), max_size=2)


def topics_of(partitions: st.SearchStrategy[Any], *, by_id: bool) -> st.SearchStrategy[Any]:
    names = st.uuids() if by_id else TEXT
    return st.lists(st.tuples(names, st.lists(partitions, max_size=3)), max_size=3)


def struct_or_none(names: tuple[str, str], values: tuple[int, int] | None) -> dict[str, int]:
    return dict(zip(names, values or (-1, -1), strict=True))


def endpoint_bodies(endpoints: list[NodeEndpoint]) -> list[dict[str, Any]]:
    return [endpoint._asdict() for endpoint in endpoints]


def produce_body(topics: Any, throttle_ms: int, endpoints: list[NodeEndpoint]) -> dict[str, Any]:
    return {
        "throttle_time": throttle_ms,
        "node_endpoints": endpoint_bodies(endpoints),
        "responses": [
            {
                "name": topic,
                "topic_id": topic,
                "partition_responses": [
                    {
                        "index": result.partition_index,
                        "error_code": result.error_code,
                        "base_offset": result.base_offset,
                        "log_append_time": result.log_append_time_ms,
                        "log_start_offset": result.log_start_offset,
                        "record_errors": [
                            {"batch_index": index, "batch_index_error_message": message}
                            for index, message in result.record_errors
                        ],
                        "error_message": result.error_message,
                        "current_leader": struct_or_none(
                            ("leader_id", "leader_epoch"), result.current_leader
                        ),
                    }
                    for result in results
                ],
            }
            for topic, results in topics
        ],
    }


def fetch_body(topics: Any, **top: Any) -> dict[str, Any]:
    return top | {
        "responses": [
            {
                "topic": topic,
                "topic_id": topic,
                "partitions": [
                    {
                        "partition_index": part.partition_index,
                        "error_code": part.error_code,
                        "high_watermark": part.high_watermark,
                        "last_stable_offset": part.last_stable_offset,
                        "log_start_offset": part.log_start_offset,
                        "aborted_transactions": None
                        if part.aborted_transactions is None
                        else [
                            {"producer_id": one, "first_offset": two}
                            for one, two in part.aborted_transactions
                        ],
                        "preferred_read_replica": part.preferred_read_replica,
                        "records": b"".join(part.records),
                        "diverging_epoch": struct_or_none(("epoch", "end_offset"), part.diverging_epoch),
                        "current_leader": struct_or_none(("leader_id", "leader_epoch"), part.current_leader),
                        "snapshot_id": struct_or_none(("end_offset", "epoch"), part.snapshot_id),
                    }
                    for part in partitions
                ],
            }
            for topic, partitions in topics
        ]
    }


@pytest.mark.parametrize("version", APIS[0].versions)
@given(data=st.data(), correlation_id=INT32, throttle_ms=INT32, endpoints=ENDPOINTS)
def test_a_produce_response_is_what_the_generic_encoder_writes(
    version: int, data: st.DataObject, correlation_id: int, throttle_ms: int, endpoints: list[NodeEndpoint]
) -> None:
    topics = data.draw(topics_of(RESULTS, by_id=version >= 13))
    frame = encode_produce_response(version, correlation_id, topics, throttle_ms, endpoints)
    body = produce_body(topics, throttle_ms, endpoints)
    assert frame == encode_response(0, version, correlation_id, body)


@pytest.mark.parametrize("version", APIS[1].versions)
@given(
    data=st.data(),
    correlation_id=INT32,
    error=ERROR,
    session_id=INT32,
    throttle_ms=INT32,
    endpoints=ENDPOINTS,
)
def test_a_fetch_response_is_what_the_generic_encoder_writes(
    version: int,
    data: st.DataObject,
    correlation_id: int,
    error: int,
    session_id: int,
    throttle_ms: int,
    endpoints: list[NodeEndpoint],
) -> None:
    topics = data.draw(topics_of(FETCHED, by_id=version >= 13))
    buffers = encode_fetch_response(
        version, correlation_id, error, session_id, topics, throttle_ms, endpoints
    )
    body = fetch_body(
        topics,
        throttle_time=throttle_ms,
        error_code=error,
        session_id=session_id,
        node_endpoints=endpoint_bodies(endpoints),
    )
    assert b"".join(buffers) == encode_response(1, version, correlation_id, body)


@pytest.mark.parametrize("version", [4, 9, 12])
def test_counts_above_one_byte_are_written_in_full(version: int) -> None:
    results = [PartitionResult(index, 0, index) for index in range(300)]
    frame = encode_produce_response(version, 1, [("t", results)] * 130)
    assert frame == encode_response(0, version, 1, produce_body([("t", results)] * 130, 0, []))


@pytest.mark.parametrize("version", [4, 11, 12])
def test_record_data_are_not_copied(version: int) -> None:
    records = [memoryview(b"first"), memoryview(b"second")]
    buffers = encode_fetch_response(version, 1, 0, 0, [("t", [FetchPartition(0, 0, 9, records=records)])])
    assert [buffer for buffer in buffers if any(buffer is each for each in records)] == records


@pytest.mark.parametrize(("version", "topic"), [(13, "name"), (12, UUID(int=1))])
def test_a_topic_named_the_wrong_way_for_the_version_is_a_mistake(version: int, topic: Any) -> None:
    with pytest.raises(TypeError, match="this version names topics by"):
        encode_produce_response(version, 1, [(topic, [])])
    with pytest.raises(TypeError, match="this version names topics by"):
        encode_fetch_response(version, 1, 0, 0, [(topic, [])])


def _shared_body(data: SharePartitionData) -> dict[str, Any]:
    return {
        **{name: getattr(data, name) for name in data._fields[:5]},
        "current_leader": {"leader_id": data.current_leader[0], "leader_epoch": data.current_leader[1]},
        "records": b"".join(data.records),
        "acquired_records": [
            {"first_offset": first, "last_offset": last, "delivery_count": count}
            for first, last, count in data.acquired
        ],
    }


@pytest.mark.parametrize("version", APIS[78].versions)
@given(topics=topics_of(SHARED, by_id=True), error=ERROR, message=NULLABLE_TEXT, endpoints=ENDPOINTS)
def test_a_share_fetch_response_is_what_the_generic_encoder_writes(
    version: int, topics: Any, error: int, message: str | None, endpoints: list[NodeEndpoint]
) -> None:
    buffers = encode_share_fetch_response(5, error, message, 30_000, topics, endpoints)
    body = {
        "error_code": error,
        "error_message": message,
        "acquisition_lock_timeout": 30_000,
        "responses": [
            {"topic_id": topic_id, "partitions": [_shared_body(each) for each in partitions]}
            for topic_id, partitions in topics
        ],
        "node_endpoints": [each._asdict() for each in endpoints],
    }
    assert b"".join(buffers) == bytes(encode_response(78, version, 5, body))
