"""Users of a story who create, alter and delete a few topics, all at the same time and through all nodes.

What they are told, by topic name, must have one order that explains it (invariant 9), with each effect
between a call and its answer. A call that was refused has no effect; one without an answer may have one at
any time. Now and then the stored metadata is read: that is what was true at that moment.

What a refusal says of the topic is not judged: a node refuses by the metadata that it knows, which may be a
little old. A deletion says that the topic is gone, not who has deleted it: if etcd's answer was lost, the
node tries again, and cannot tell its own first attempt from another client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Mapping
from typing import Any
from uuid import UUID

from support.cluster_clients import ClusterClient
from support.cluster_story import ClusterStory, insist
from support.linearizing import UNKNOWN, Operation, explains
from tidemill.errors import ErrorCode, TidemillError

__all__ = ("TopicUsers",)

_CONFIGS = ("retention.ms", "retention.bytes", "flush.ms")
_FIRST_VALUE = 1_000_000_000
_REFUSED = {ErrorCode.topic_already_exists, ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id}
_TOPIC_RESOURCE, _SET = 2, 0
#: A client without an answer waits: what may happen at any time makes the search long.
_QUIET_SECONDS = 6.0

#: A topic as it is: its id and its configs; None if there is none of that name.
State = tuple[UUID, tuple[tuple[str, str], ...]] | None


class TopicUsers:
    """``clients`` of them; each asks any node, and goes on whatever the answer."""

    def __init__(self, pace: float = 1.0, *, clients: int = 3, topics: int = 4) -> None:
        self.pace = pace
        self._client_count = clients
        self._is_closing = False
        self._values = 0
        self._busy = 0
        self.histories: dict[str, list[Operation]] = {f"shared-{number}": [] for number in range(topics)}
        self.acknowledged = 0

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

    def check(self) -> None:
        for name, whole in self.histories.items():
            # An alteration without an answer that nobody has seen explains nothing.
            seen = "".join(each.name for each in whole if each.name.startswith("read"))
            history = [
                each
                for each in whole
                if each.answered_at != UNKNOWN or each.name.split("=")[-1] in seen or "=" not in each.name
            ]
            if not explains(history, None):
                told = "\n".join(
                    f"{each.called_at:.3f} to {each.answered_at:.3f}: {each.name}" for each in history
                )
                insist(False, f"nothing explains what became of topic {name}:\n{told}")

    # --- what they do

    async def _run(self, client: ClusterClient) -> None:
        rng = client.rng
        while not self._is_closing:
            self._busy += 1
            try:
                name = rng.choice(list(self.histories))
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
        answered = await self._ask(client, "CreateTopics", 7, {"topics": [wanted], "timeout": 3_000})
        topic_id = None if answered.answer is None else answered.answer.topics[0].topic_id
        # Without an answer nobody knows the id that it would have.
        made = topic_id or UUID(int=self._value())

        def apply(state: Hashable) -> tuple[Hashable] | None:
            return ((made, ()),) if state is None else None

        return answered.note(self, name, f"create {topic_id}", apply)

    async def _delete(self, client: ClusterClient, name: str) -> bool:
        answered = await self._ask(client, "DeleteTopics", 4, {"topic_names": [name], "timeout": 3_000})
        return answered.note(self, name, "delete", lambda _: (None,))

    async def _alter(self, client: ClusterClient, name: str) -> bool:
        key, value = client.rng.choice(_CONFIGS), str(_FIRST_VALUE + self._value())
        config = {"name": key, "config_operation": _SET, "value": value}
        resource = {"resource_type": _TOPIC_RESOURCE, "resource_name": name, "configs": [config]}
        body = {"resources": [resource], "validate_only": False}
        answered = await self._ask(client, "IncrementalAlterConfigs", 1, body)

        def apply(state: Any) -> tuple[Hashable] | None:
            if state is None:
                return None
            return ((state[0], tuple(sorted({**dict(state[1]), key: value}.items()))),)

        return answered.note(self, name, f"alter {key}={value}", apply)

    def _value(self) -> int:
        self._values += 1
        return self._values

    async def _ask(self, client: ClusterClient, api: str, version: int, body: Mapping[str, Any]) -> _Answered:
        called_at = self.story.loop.now
        try:
            answer = await client.ask_any(api, body, version)
        except TidemillError:
            return _Answered(called_at, UNKNOWN, None, None)
        results = answer.topics if api == "CreateTopics" else answer.responses
        code = ErrorCode(results[0].error_code)
        is_certain = code is ErrorCode.none or code in _REFUSED
        return _Answered(called_at, self.story.loop.now if is_certain else UNKNOWN, code, answer)

    # --- what is true

    async def _read_now_and_then(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(1)
            await self._read_all()

    async def _read_all(self) -> None:
        called_at = self.story.loop.now
        image = await self.story.stored_image()
        for name, history in self.histories.items():
            topic = image.topics.get(name)
            found = None if topic is None else (topic.id, tuple(sorted(topic.configs.items())))

            def apply(state: Any, found: State = found) -> tuple[Hashable] | None:
                return (found,) if _is_like(state, found) else None

            history.append(Operation(called_at, self.story.loop.now, apply, f"read {found}"))

    def __repr__(self) -> str:
        return f"topics of {self._client_count} clients, {self._busy} busy"


class _Answered:
    """A call, and its answer if there was one."""

    def __init__(self, called_at: float, answered_at: float, code: ErrorCode | None, answer: Any) -> None:
        self.called_at = called_at
        self.answered_at = answered_at
        self.code = code
        self.answer = answer if code is ErrorCode.none else None

    def note(self, users: TopicUsers, name: str, what: str, apply: Any) -> bool:
        """Add it to the history, unless it was refused: then it has no effect. Whether it was answered."""
        if self.code not in _REFUSED:
            users.acknowledged += self.code is ErrorCode.none
            users.histories[name].append(Operation(self.called_at, self.answered_at, apply, what))
        return self.answered_at != UNKNOWN


def _is_like(state: State, found: State) -> bool:
    """Whether a topic is the one that was read. One that an unanswered call made has any id."""
    if state is None or found is None:
        return state is found
    return state[1] == found[1] and (state[0] == found[0] or state[0].int < _FIRST_VALUE)
