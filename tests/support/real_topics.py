"""Clients of a real cluster that create, alter and delete a few topics at once, by name, through all nodes.

What they are told must have an order that explains it (``topic_history``), with what is stored in etcd, which
is read in between. A name is used for a while; then another one takes its place, so that the search for an
order stays short.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final
from uuid import UUID

from support.processes import wait_until
from support.raw import RawClient
from support.real_cluster import RealCluster, RealNode
from support.topic_history import Answer, TopicHistory
from tidemill.control.image import MetadataImage
from tidemill.control.stores.etcd import EtcdStore
from tidemill.control.stores.etcd_channel import EtcdSettings
from tidemill.control.stores.etcd_url import parse_etcd_url
from tidemill.errors import ErrorCode, TidemillError

__all__ = ("TopicLoad",)

_CLIENTS = 3
_NAMES = 3
#: What one name's history has before another name takes its place.
_OPERATIONS_MAX: Final = 60
_UNKNOWN_MAX: Final = 4
_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.3
_READ_SECONDS = 0.5
_TOPIC_RESOURCE, _SET = 2, 0
_CONFIG = "retention.ms"
#: Where a cluster that is called nothing else has its metadata.
_PREFIX = "tidemill/tidemill/"


class TopicLoad:
    """Three clients and a reader, each in a thread; a context manager that ends them."""

    def __init__(self, cluster: RealCluster, rng: random.Random) -> None:
        self.history = TopicHistory()
        self._cluster = cluster
        self._numbers = itertools.count()
        self._names = [self._new_name() for _ in range(_NAMES)]
        self._unknown: dict[str, int] = {}
        self._end = threading.Event()
        self._failures: list[BaseException] = []
        works: list[Callable[[], None]] = [self._read_now_and_then]
        works += [self._client(random.Random(rng.random())) for _ in range(_CLIENTS)]
        self._threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True) for each in works]

    def __enter__(self) -> TopicLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def wait_for_acks(self, more: int) -> None:
        """Wait until that many more changes are acknowledged."""
        wanted = self.history.acknowledged + more

        def are_there() -> bool:
            if self._failures:
                raise self._failures[0]
            return self.history.acknowledged >= wanted

        wait_until(are_there, f"{more} changes of topics are acknowledged")

    def check(self) -> None:
        """End the load; what it was told has an order, and in the end all nodes say what is stored."""
        self.__exit__(None, None, None)
        if self._failures:
            raise self._failures[0]
        asyncio.run(self._read())
        assert self.history.problems() == []
        stored = asyncio.run(self._stored()).topics
        names = {name: stored[name].id for name in self.history.by_name if name in stored}
        for node in self._cluster:
            wait_until(partial(self._lists, node, names), f"{node.name} lists what is stored")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failures.append(error)

    def _new_name(self) -> str:
        return f"by-name-{next(self._numbers)}"

    # --- what clients do

    def _client(self, rng: random.Random) -> Callable[[], None]:
        def work() -> None:
            while not self._end.is_set():
                slot = rng.randrange(_NAMES)
                action = rng.choice((self._create, self._delete, self._alter, self._alter))
                self._use(slot, action, rng.choice(list(self._cluster)))
                self._end.wait(_PAUSE_SECONDS * rng.random())

        return work

    def _use(self, slot: int, action: Callable[[RawClient, str], Answer], node: RealNode) -> None:
        """Let a client do something through a node, if that takes the connection."""
        name = self._names[slot]
        try:
            connected = RawClient(node.address, _ANSWER_SECONDS)
        except OSError:
            return
        with connected as client:
            answer = action(client, name)
        self._unknown[name] = self._unknown.get(name, 0) + (not answer.is_certain)
        used = len(self.history.by_name.get(name, ()))
        if self._names[slot] == name and (used >= _OPERATIONS_MAX or self._unknown[name] >= _UNKNOWN_MAX):
            self._names[slot] = self._new_name()

    def _create(self, client: RawClient, name: str) -> Answer:
        wanted = {
            "name": name,
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [],
        }
        answer, body = self._ask(client, "CreateTopics", 7, {"topics": [wanted], "timeout": 3_000})
        topic_id = body.topics[0].topic_id if answer.code is ErrorCode.none else None
        self.history.created(name, answer, topic_id)
        return answer

    def _delete(self, client: RawClient, name: str) -> Answer:
        answer, _ = self._ask(client, "DeleteTopics", 4, {"topic_names": [name], "timeout": 3_000})
        self.history.deleted(name, answer)
        return answer

    def _alter(self, client: RawClient, name: str) -> Answer:
        value = str(self.history.new_value())
        config = {"name": _CONFIG, "config_operation": _SET, "value": value}
        resource = {"resource_type": _TOPIC_RESOURCE, "resource_name": name, "configs": [config]}
        body = {"resources": [resource], "validate_only": False}
        answer, _ = self._ask(client, "IncrementalAlterConfigs", 1, body)
        self.history.altered(name, answer, _CONFIG, value)
        return answer

    def _ask(self, client: RawClient, api: str, version: int, body: dict[str, Any]) -> tuple[Answer, Any]:
        called_at = time.monotonic()
        try:
            answer = client.request(api, version, body)
        except OSError:
            return Answer(called_at, time.monotonic(), None), None
        results = answer.topics if api == "CreateTopics" else answer.responses
        return Answer(called_at, time.monotonic(), ErrorCode(results[0].error_code)), answer

    # --- what is true

    def _read_now_and_then(self) -> None:
        while not self._end.wait(_READ_SECONDS):
            with contextlib.suppress(TidemillError):  # etcd does not run now
                asyncio.run(self._read())

    async def _read(self) -> None:
        called_at, names = time.monotonic(), list(self._names)
        image = await self._stored()
        for name in names:
            topic = image.topics.get(name)
            found = None if topic is None else (topic.id, tuple(sorted(topic.configs.items())))
            self.history.read(name, called_at, time.monotonic(), found)

    async def _stored(self) -> MetadataImage:
        """The metadata as etcd has it now."""
        settings = EtcdSettings(parse_etcd_url(self._cluster.etcd.url))
        store = EtcdStore(settings, _PREFIX)
        try:
            return MetadataImage.from_stored(await store.read())
        finally:
            await store.close()

    def _lists(self, node: RealNode, names: dict[str, UUID]) -> bool:
        """Whether a node's Metadata has these topics, and no other of the names that were used."""
        with RawClient(node.address, _ANSWER_SECONDS) as client:
            answer = client.request("Metadata", 12, {"topics": None, "allow_auto_topic_creation": False})
        used = self.history.by_name
        return {each.name: each.topic_id for each in answer.topics if each.name in used} == names
