"""ElectLeaders: the preferred replica leads again, or a partition without a leader gets one.

- A preferred leader takes over once the present one has resigned in its favour. The answer waits for that, as
  long as the request wants to. A present leader that has not done so after a second is asked itself: perhaps
  it has not heard of the wish.
- An unclean election loses what the new leader does not have. Kafka's request cannot name the new leader, so
  the live replicas are asked how far they reach, and the one with the highest (last epoch, end) is elected.
  While one that is live does not answer, nobody is: it may have the most. Who asked is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from tidemill.control.commands import Election, ElectLeaders
from tidemill.control.refusals import CatchUp
from tidemill.coordination.turns import in_chunks, in_slices
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.cluster.replica_ends import furthest
from tidemill.server.handlers.outcome import outcome, refused
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import ALTER, CLUSTER, CLUSTER_NAME, for_each, refusal
from tidemill.server.requests.call import Call
from tidemill.wire.requests import ms

__all__ = ("elect_leaders",)

_ELECTED_AT_ONCE_MAX: Final = 1_000
_NO_LEADER: Final = -1
_ASKED_AFTER_S: Final = 1.0
_ELECTIONS: Final = {0: Election.PREFERRED, 1: Election.UNCLEAN}
_MESSAGES: Final = {
    ErrorCode.election_not_needed: "the partition has the leader that this election would give it",
    ErrorCode.preferred_leader_not_available: "the preferred leader is not in sync; try again when it is",
    ErrorCode.eligible_leaders_not_available: (
        "no replica can lead the partition, or a live one does not say how far it reaches"
    ),
    ErrorCode.unknown_topic_or_partition: "there is no such partition",
    ErrorCode.request_timed_out: "the present leader has not resigned yet; it does so when it can",
}

logger = logging.getLogger(__name__)

Outcomes = dict[int, dict[str, Any]]


@serves("ElectLeaders", for_each(ALTER, CLUSTER))
async def elect_leaders(broker: Broker, call: Call) -> dict[str, Any]:
    """Elect leaders of partitions. For all partitions, only those are answered that needed an election."""
    asked = call.request.topic_partitions
    wanted: dict[str, list[int]] = {}
    if not call.may(ALTER, CLUSTER, CLUSTER_NAME):
        return _no_election(call, refusal(ALTER, CLUSTER, CLUSTER_NAME))
    if asked is None:
        wanted = {name: list(range(len(topic.partitions))) for name, topic in broker.image.topics.items()}
    for topic in asked or ():
        wanted.setdefault(topic.topic, []).extend(topic.partitions)
    election = _ELECTIONS.get(call.field("election_type", 0))
    until_s = asyncio.get_running_loop().time() + max(0, ms(call.request.timeout)) / 1000
    results = []
    for name, indexes in wanted.items():
        if election is None:
            error = refused("there is no such election type; 0 is preferred, 1 is unclean")
            outcomes = dict(await in_slices((index, outcome(error)) for index in indexes))
        else:
            outcomes = {}
            for chunk in in_chunks(tuple(dict.fromkeys(indexes)), _ELECTED_AT_ONCE_MAX):
                outcomes |= await _elect(broker, call, name, chunk, election, until_s)
        partitions = await in_slices(
            {"partition_id": index, **body}
            for index, body in outcomes.items()
            if asked is not None or body["error_code"] is not ErrorCode.election_not_needed
        )
        if partitions or asked is not None:
            results.append({"topic": name, "partition_result": partitions})
    code = ErrorCode.none if election is not None else ErrorCode.invalid_request
    return {"error_code": code, "replica_election_results": results}


def _no_election(call: Call, error: ApiError) -> dict[str, Any]:
    """The answer of a refused request. Each partition has the error: the first version has no other field."""
    results = [
        {
            "topic": topic.topic,
            "partition_result": [{"partition_id": index, **outcome(error)} for index in topic.partitions],
        }
        for topic in call.request.topic_partitions or ()
    ]
    return {"error_code": error.code, "replica_election_results": results}


async def _elect(
    broker: Broker, call: Call, name: str, indexes: Sequence[int], election: Election, until_s: float
) -> Outcomes:
    try:
        if election is Election.PREFERRED:
            codes = await _propose(broker, ElectLeaders(name=name, partitions=tuple(indexes)))
            codes |= await _still_led_by_others(broker, name, codes, until_s)
        else:
            codes = await _elect_uncleanly(broker, call, name, indexes)
    except TidemillError as error:
        return {index: outcome(error) for index in indexes}
    return {
        index: {"error_code": codes[index], "error_message": _MESSAGES.get(codes[index])} for index in indexes
    }


async def _propose(broker: Broker, command: ElectLeaders) -> dict[int, ErrorCode]:
    codes = await broker.propose(command)
    # From another node they come as plain numbers.
    return {int(index): ErrorCode(code) for index, code in codes.items()}


async def _still_led_by_others(
    broker: Broker, name: str, codes: dict[int, ErrorCode], until_s: float
) -> dict[int, ErrorCode]:
    """Wait until present leaders have obeyed; gives REQUEST_TIMED_OUT for those that have not in time."""
    wished = [index for index, code in codes.items() if code is ErrorCode.none]

    def waiting() -> list[int]:
        topic = broker.image.topics.get(name)
        placed = () if topic is None else topic.partitions
        return [
            index
            for index in wished
            if index < len(placed) and placed[index].successor not in (_NO_LEADER, placed[index].leader)
        ]

    changed = asyncio.Event()
    unsubscribe = broker.controller.subscribe(lambda *_: changed.set())

    async def obeyed_by(deadline_s: float) -> None:
        async with asyncio.timeout_at(min(until_s, deadline_s)):
            while waiting():
                await changed.wait()
                changed.clear()

    try:
        with contextlib.suppress(TimeoutError):
            await obeyed_by(asyncio.get_running_loop().time() + _ASKED_AFTER_S)
        with contextlib.suppress(TimeoutError):
            if late := waiting():
                async with asyncio.timeout_at(until_s):
                    await broker.ask_to_resign(broker.find.topic(name), late)
            await obeyed_by(until_s)
    finally:
        unsubscribe()
    return dict.fromkeys(waiting(), ErrorCode.request_timed_out)


async def _elect_uncleanly(
    broker: Broker, call: Call, name: str, indexes: Sequence[int]
) -> dict[int, ErrorCode]:
    """Elect the replica that reaches furthest, in each partition that has no leader."""
    # Which of them need an election, and which do not exist, is known without asking anybody.
    election = ElectLeaders(name=name, partitions=tuple(indexes), election=Election.UNCLEAN)
    codes = await CatchUp(broker.controller.catch_up).check(partial(broker.controller.check, election))
    topic = broker.find.topic(name)
    leaderless = [index for index in indexes if codes[index] is ErrorCode.eligible_leaders_not_available]
    ends = await broker.replica_ends(topic, leaderless) if leaderless else {}
    for index in leaderless:
        leader = furthest(ends.get(index, {}))
        if leader is None:
            continue
        who = f"client {call.header.client_id!r} at {call.client.address}"
        logger.warning(
            "unclean election of node %d for %s-%d, asked for by %s; the replicas reach %s",
            leader,
            name,
            index,
            who,
            {node_id: end and (end.last_epoch, end.log_end) for node_id, end in ends[index].items()},
        )
        command = ElectLeaders(
            name=name, partitions=(index,), election=Election.UNCLEAN, leader=leader, who=who
        )
        codes |= await _propose(broker, command)
    return codes
