"""With too few replicas for ``min.insync.replicas``, acks=all is refused and acks=1 goes through."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from support.batches import plain_batch
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker
from tidemill.server.handlers.records.produce import produce
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header


@pytest.mark.parametrize(
    ("acks", "code", "end"), [(-1, ErrorCode.not_enough_replicas, 0), (1, ErrorCode.none, 1)]
)
async def test_too_few_replicas_refuse_acks_all_only(
    broker: Broker, acks: int, code: ErrorCode, end: int
) -> None:
    configs = {"min.insync.replicas": "2"}
    await broker.controller.submit(
        CreateTopic(name="strict", topic_id=uuid4(), partitions=1, replication=1, configs=configs)
    )
    partition = {"index": 0, "records": plain_batch("v")}
    topics = [{"name": "strict", "partition_data": [partition]}]
    frame = encode_request(0, 9, 1, "test", {"acks": acks, "timeout": 1000, "topic_data": topics})[4:]
    header = parse_header(frame)
    answers: list[ReplyBuffers] = []
    produce(broker, Call(header, decode_request(header, frame), "host", answers.append, lambda: None))
    await asyncio.gather(*broker.gated_writes.values())
    log = broker.find.partition(broker.find.topic("strict"), 0)
    await wait_committed(log, log.local_log.end_offset)
    response = decode_response(0, 9, b"".join(answers[0])[4:])[1]
    assert response.responses[0].partition_responses[0].error_code == code
    assert log.local_log.end_offset == end
