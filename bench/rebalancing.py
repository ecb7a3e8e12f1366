"""How long a group takes to take in one more member, by its size and protocol."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from typing import Any

from bench.context import Bench
from bench.processes import run_json
from bench.raw import RawClient
from bench.report import Section
from bench.spread import Spread
from tidemill.config.values import parse_address
from tidemill.net.connection import Connection
from tidemill.wire.consumer_protocol import pack_subscription

__all__ = ("rebalancing",)

_TOPIC = "rebalance"
_PARTITIONS = 400
#: How often members send heartbeats. With the 3 to 5 seconds of real clients that would be what is measured.
_HEARTBEAT_SECONDS = 0.02
_SESSION_MS = 30_000
_REBALANCE_IN_PROGRESS = 27
_MEMBER_ID_REQUIRED = 79


def rebalancing(bench: Bench) -> Section:
    """Groups of two, twenty and two hundred members get one more."""
    section = Section(
        "Rebalance when a member joins",
        (
            "protocol, members",
            "until all are settled ms",
            "ms per member",
            "ratio to a round trip per member",
        ),
        note=f"All members in one process, {_PARTITIONS} partitions, heartbeats every "
        f"{_HEARTBEAT_SECONDS * 1000:.0f} ms so that the server is measured and not the interval. The peer "
        "is as many heartbeat round trips as there are members, one after the other.",
    )
    with bench.node() as node:
        RawClient.of(node).create_topic(_TOPIC, _PARTITIONS)
        for protocol in ("classic", "consumer"):
            for members in bench.plan.group_members:
                bench.progress(f"rebalance: {members} members, {protocol}")
                found = [
                    run_json(
                        bench.work,
                        "bench.rebalancing",
                        servers=node.bootstrap_servers,
                        protocol=protocol,
                        members=members,
                    )
                    for _ in range(bench.plan.rounds)
                ]
                settled = Spread(one["settled_ms"] for one in found)
                trips = Spread(one["round_trip_ms"] * members for one in found)
                section.add(
                    f"{protocol}, {members}",
                    settled,
                    Spread(one["settled_ms"] / members for one in found),
                    settled.over(trips),
                )
    return section


# --- the child


class _Classic:
    """A member of a classic group; its leader gives everybody an empty share: the exchange is the same."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group
        self._member_id = ""
        self.generation = -1

    async def settle(self) -> None:
        """Join, and join again, until this member is in a generation with an assignment."""
        while True:
            joined = await self._connection.request(
                "JoinGroup",
                {
                    "group_id": self._group,
                    "member_id": self._member_id,
                    "session_timeout": _SESSION_MS,
                    "rebalance_timeout": _SESSION_MS,
                    "protocol_type": "consumer",
                    "protocols": [{"name": "range", "metadata": pack_subscription([_TOPIC])}],
                },
                timeout_ms=2 * _SESSION_MS,
            )
            self._member_id = joined.member_id or self._member_id
            if joined.error_code == _MEMBER_ID_REQUIRED:
                continue
            assert joined.error_code == 0, joined
            self.generation = joined.generation_id
            shares = [{"member_id": member.member_id, "assignment": b""} for member in joined.members]
            synced = await self._connection.request(
                "SyncGroup",
                {
                    "group_id": self._group,
                    "generation_id": self.generation,
                    "member_id": self._member_id,
                    "protocol_type": "consumer",
                    "protocol_name": "range",
                    "assignments": shares,
                },
                timeout_ms=2 * _SESSION_MS,
            )
            if synced.error_code == 0:
                return
            assert synced.error_code == _REBALANCE_IN_PROGRESS, synced

    async def beat(self) -> bool:
        """Whether the group is at rest, as far as this member is told."""
        answer = await self._connection.request(
            "Heartbeat",
            {"group_id": self._group, "generation_id": self.generation, "member_id": self._member_id},
        )
        if answer.error_code == _REBALANCE_IN_PROGRESS:
            await self.settle()
            return False
        assert answer.error_code == 0, answer
        return True


class _Modern:
    """A member of a group of the new protocol: it gives up and takes what it is told."""

    def __init__(self, connection: Connection, group: str) -> None:
        self._connection = connection
        self._group = group
        self._member_id = str(uuid.uuid4())
        self.generation = 0
        self.owned: list[dict[str, Any]] = []

    async def settle(self) -> None:
        await self.beat()

    async def beat(self) -> bool:
        joining = self.generation == 0
        answer = await self._connection.request(
            "ConsumerGroupHeartbeat",
            {
                "group_id": self._group,
                "member_id": self._member_id,
                "member_epoch": self.generation,
                "rebalance_timeout": _SESSION_MS,
                "subscribed_topic_names": [_TOPIC] if joining else None,
                "topic_partitions": self.owned,
            },
        )
        assert answer.error_code == 0, answer
        is_news = answer.member_epoch != self.generation
        self.generation = answer.member_epoch
        if answer.assignment is not None:
            told = [
                {"topic_id": topic.topic_id, "partitions": list(topic.partitions)}
                for topic in answer.assignment.topic_partitions
            ]
            is_news, self.owned = is_news or told != self.owned, told
        return not is_news

    @property
    def share(self) -> int:
        return sum(len(topic["partitions"]) for topic in self.owned)


async def _measure(servers: str, protocol: str, members: int) -> dict[str, float]:
    address, group = parse_address(servers), f"bench-{uuid.uuid4()}"
    kind = _Classic if protocol == "classic" else _Modern
    there = [kind(await Connection.open(address), group) for _ in range(members)]
    await asyncio.gather(*(member.settle() for member in there))
    await _rest(there)
    started = time.perf_counter()
    for member in there:
        await member.beat()
    round_trip_ms = (time.perf_counter() - started) / members * 1000
    newcomer = kind(await Connection.open(address), group)
    started = time.perf_counter()
    beating = asyncio.ensure_future(newcomer.settle())
    while not beating.done():
        await asyncio.gather(*(member.beat() for member in there))
        await asyncio.wait([beating], timeout=_HEARTBEAT_SECONDS)
    await beating
    await _rest([*there, newcomer])
    return {"settled_ms": (time.perf_counter() - started) * 1000, "round_trip_ms": round_trip_ms}


async def _rest(members: list[Any]) -> None:
    """Send heartbeats until no member gets news, all agree, and every partition is owned."""
    while True:
        quiet = all(await asyncio.gather(*(member.beat() for member in members)))
        same = len({member.generation for member in members}) == 1
        whole = not isinstance(members[0], _Modern) or sum(m.share for m in members) == _PARTITIONS
        if quiet and same and whole:
            return
        await asyncio.sleep(_HEARTBEAT_SECONDS)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_measure(**json.loads(sys.argv[1])))))
