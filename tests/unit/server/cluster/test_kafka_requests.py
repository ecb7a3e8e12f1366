"""Requests of Kafka's protocol between nodes: which are served, and what others get."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.cluster.kafka_requests import serve_node_request
from tidemill.server.requests import api_table
from tidemill.server.requests.call import Call
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_response


def framed(api: str, version: int, **body: Any) -> memoryview:
    return encode_request(APIS_BY_NAME[api].key, version, 0, None, body)[4:]


async def test_a_marker_of_another_node_is_written(broker: Broker) -> None:
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=1, replication=1))
    marker = {
        "producer_id": 7,
        "producer_epoch": 0,
        "transaction_result": True,
        "topics": [{"name": "t", "partition_indexes": [0]}],
        "coordinator_epoch": 3,
    }
    frame = await serve_node_request(broker, 2, framed("WriteTxnMarkers", 1, markers=[marker]))
    _, answer = decode_response(APIS_BY_NAME["WriteTxnMarkers"].key, 1, frame)
    assert answer.markers[0].topics[0].partitions[0].error_code is ErrorCode.none
    assert broker.find.partition(broker.find.topic("t"), 0).log_end_offset == 1


async def test_an_answer_that_nobody_waits_for_any_more_is_dropped(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = APIS_BY_NAME["Produce"].key
    calls: list[Call] = []
    row = replace(api_table.served_api(key), handler=lambda broker, call: calls.append(call))
    monkeypatch.setitem(api_table._rows, key, row)
    request = framed("Produce", 12, transactional_id=None, acks=-1, timeout=1_000, topic_data=[])
    asked = [asyncio.ensure_future(serve_node_request(broker, 2, request)) for _ in range(2)]
    while len(calls) < len(asked):  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    calls[0].reply({"responses": []})
    calls[1].abort()


@pytest.mark.parametrize("api", ["Metadata", "CreateTopics", "Fetch"])
async def test_what_clients_ask_for_is_refused(broker: Broker, api: str) -> None:
    with pytest.raises(ApiError) as caught:
        await serve_node_request(broker, 2, framed(api, APIS_BY_NAME[api].versions[-1]))
    assert caught.value.code is ErrorCode.invalid_request
    assert api in caught.value.message


@pytest.mark.parametrize("frame", [b"", b"\0", b"\xff" * 40])
async def test_what_is_no_request_is_refused(broker: Broker, frame: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        await serve_node_request(broker, 2, memoryview(frame))
    assert caught.value.code is ErrorCode.invalid_request


async def test_a_request_that_is_cut_short_is_refused(broker: Broker) -> None:
    whole = framed("AddPartitionsToTxn", 5, transactions=[])
    for end in range(len(whole)):
        with pytest.raises(ApiError):
            await serve_node_request(broker, 2, whole[:end])
