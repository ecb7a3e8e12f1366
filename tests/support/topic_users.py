"""Users of a story who create, alter and delete a few topics, all at the same time and through all nodes.

What they are told must have an order that explains it: ``topic_history`` says what that means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from support.cluster_clients import ClusterClient
from support.cluster_story import ClusterStory, insist
from support.topic_history import Answer, TopicHistory
from tidemill.errors import ErrorCode, TidemillError

__all__ = ("TopicUsers",)

_CONFIGS = ("retention.ms", "retention.bytes", "flush.ms")
_TOPIC_RESOURCE, _SET = 2, 0
#: A client without an answer waits: what may happen at any time makes the search long.
_QUIET_SECONDS = 6.0


class TopicUsers:
    """``clients`` of them; each asks any node, and goes on whatever the answer."""

    def __init__(self, pace: float = 1.0, *, clients: int = 3, topics: int = 4) -> None:
        self.pace = pace
        self._client_count = clients
        self._is_closing = False
        self._busy = 0
        self._names = [f"shared-{number}" for number in range(topics)]
        self.history = TopicHistory()

    async def prepare(self, story: ClusterStory) -> None:
        self.story = story
        # Something that the operator can move.
        await story.create_kept("kept", 1, {})

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        clients = [self.story.client.another() for _ in range(self._client_count)]
        return [*map(self._run, clients), self._read_now_and_then()]

    def close(self) -> None:
        self._is_closing = True

    @property
    def at_rest(self) -> bool:
        return not self._busy

    def observe(self) -> None:
        pass

    async def drain(self) -> bool:
        await self._read_all()
        return True

    @property
    def acknowledged(self) -> int:
        return self.history.acknowledged

    def check(self) -> None:
        problems = self.history.problems()
        insist(not problems, "\n".join(problems))

    # --- what they do

    async def _run(self, client: ClusterClient) -> None:
        rng = client.rng
        while not self._is_closing:
            self._busy += 1
            try:
                name = rng.choice(self._names)
                some = (self._create, self._delete, *[self._alter] * 4)
                if not await rng.choice(some)(client, name):
                    await asyncio.sleep(_QUIET_SECONDS * rng.random())
            finally:
                self._busy -= 1
            await asyncio.sleep(self.pace * rng.choice((0.02, 0.5, 2.0)) * rng.random())

    async def _create(self, client: ClusterClient, name: str) -> bool:
        wanted = {
            "name": name,
            "num_partitions": 1,
            "replication_factor": 3,
            "assignments": [],
            "configs": [],
        }
        answer, body = await self._ask(client, "CreateTopics", 7, {"topics": [wanted], "timeout": 3_000})
        is_made = answer.code is ErrorCode.none
        self.history.created(name, answer, body.topics[0].topic_id if is_made else None)
        return answer.is_certain

    async def _delete(self, client: ClusterClient, name: str) -> bool:
        answer, _ = await self._ask(client, "DeleteTopics", 4, {"topic_names": [name], "timeout": 3_000})
        self.history.deleted(name, answer)
        return answer.is_certain

    async def _alter(self, client: ClusterClient, name: str) -> bool:
        key, value = client.rng.choice(_CONFIGS), str(self.history.new_value())
        config = {"name": key, "config_operation": _SET, "value": value}
        resource = {"resource_type": _TOPIC_RESOURCE, "resource_name": name, "configs": [config]}
        body = {"resources": [resource], "validate_only": False}
        answer, _ = await self._ask(client, "IncrementalAlterConfigs", 1, body)
        self.history.altered(name, answer, key, value)
        return answer.is_certain

    async def _ask(
        self, client: ClusterClient, api: str, version: int, body: Mapping[str, Any]
    ) -> tuple[Answer, Any]:
        loop = self.story.loop
        called_at = loop.now
        try:
            answer = await client.ask_any(api, body, version)
        except TidemillError:
            return Answer(called_at, loop.now, None), None
        results = answer.topics if api == "CreateTopics" else answer.responses
        return Answer(called_at, loop.now, ErrorCode(results[0].error_code)), answer

    # --- what is true

    async def _read_now_and_then(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(1)
            await self._read_all()

    async def _read_all(self) -> None:
        called_at = self.story.loop.now
        image = await self.story.stored_image()
        for name in self._names:
            topic = image.topics.get(name)
            found = None if topic is None else (topic.id, tuple(sorted(topic.configs.items())))
            self.history.read(name, called_at, self.story.loop.now, found)

    def __repr__(self) -> str:
        return f"topics of {self._client_count} clients, {self._busy} busy"
