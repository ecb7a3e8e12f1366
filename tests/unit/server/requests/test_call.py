from __future__ import annotations

import asyncio

from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.server.watchdog import LoopWatchdog
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header

METADATA = 3


def made(version: int, client_id: str | None = "me") -> tuple[Call, list[ReplyBuffers], list[str]]:
    frame = encode_request(METADATA, version, 7, client_id, {"topics": []})[4:]
    header = parse_header(frame)
    sent: list[ReplyBuffers] = []
    closed: list[str] = []
    call = Call(header, decode_request(header, frame), "10.0.0.1", sent.append, lambda: closed.append("x"))
    return call, sent, closed


def test_a_reply_is_encoded_for_the_version_of_the_request() -> None:
    for version in (1, 12):
        call, sent, _ = made(version)
        call.reply({"brokers": [], "cluster_id": "c", "controller_id": 1, "topics": []})
        ((data,),) = sent
        correlation_id, body = decode_response(METADATA, version, bytes(data)[4:])
        assert (correlation_id, body.controller_id) == (7, 1)


def test_no_reply_and_abort() -> None:
    call, sent, closed = made(1)
    call.no_reply()
    assert (sent, closed) == ([()], [])
    call.abort()
    assert closed == ["x"]


def test_fields_that_a_version_does_not_have_get_a_default() -> None:
    old, new = made(1)[0], made(12)[0]
    assert old.field("include_topic_authorized_operations", "none") == "none"
    assert new.field("include_topic_authorized_operations", "none") is not None
    assert new.field("include_topic_authorized_operations", "none") != "none"


def test_a_client_without_a_name_has_an_empty_one() -> None:
    assert made(1)[0].client_id == "me"
    assert made(1, None)[0].client_id == ""


def test_only_who_asked_for_it_is_hurried() -> None:
    call, _, _ = made(1)
    call.hurry()
    hurried: list[int] = []
    call.on_hurry = lambda: hurried.append(1)
    call.hurry()
    assert hurried == [1]


async def test_the_turns_of_a_task_count_as_those_of_its_request() -> None:
    now = [0.0]
    call, _, _ = made(1)
    call.watchdog = LoopWatchdog(lambda: now[0])

    async def work() -> str:
        await asyncio.sleep(0)
        now[0] += 0.5
        return "done"

    assert await call.start_task(work()) == "done"
    assert call.watchdog.longest_seconds() == {"Metadata": 0.5}
