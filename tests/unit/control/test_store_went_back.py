"""What the controller does when its store has lost data, or an older copy of it was put back under it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.memory_store import MemoryStore
from support.store_copy import FILLER, copy_at_same_revisions
from support.store_proxy import StoreProxy
from tidemill.config.values import parse_address
from tidemill.control.commands import CreateTopic, RegisterNode
from tidemill.control.controller import Controller
from tidemill.control.stores.etcd import EtcdStore
from tidemill.control.stores.etcd_channel import EtcdSettings
from tidemill.control.stores.store import (
    ChangeBatch,
    MetadataStore,
    MetadataWentBack,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Txn,
)

NODE = RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1))
WORDS = "etcd has lost data or was restored. Stop all nodes, restore"

needs_etcd = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)


def topic(name: str) -> CreateTopic:
    return CreateTopic(name=name, topic_id=uuid4(), partitions=1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the state itself
            await asyncio.sleep(0.01)


async def fill(store: MetadataStore, revision: int) -> None:
    """Write something until the store has passed ``revision``."""
    while await store.commit(FILLER) <= revision:
        pass


async def assert_stopped(controller: Controller, store: MetadataStore, topics: set[str]) -> None:
    """It has said why, keeps the image, and writes nothing, also when the store has passed the image."""
    assert controller.trouble is not None
    assert WORDS in controller.trouble
    before = await store.read()
    for _ in range(2):
        with pytest.raises(MetadataWentBack, match=WORDS):
            await controller.submit(topic("refused"))
        with pytest.raises(MetadataWentBack, match=WORDS):
            await controller.refresh()
        assert controller.image.topics.keys() == topics
        assert (await store.read()).entries.keys() - {"filler"} == before.entries.keys() - {"filler"}
        await fill(store, controller.image.revision + 10)
    assert controller.went_back is controller.failure is not None
    assert controller.trouble is not None


# --- any store


@asynccontextmanager
async def started(store: MetadataStore) -> AsyncIterator[Controller]:
    controller = Controller(store)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


@pytest.fixture
async def proxy() -> StoreProxy:
    return StoreProxy(MemoryStore())


@pytest.fixture
async def controller(proxy: StoreProxy) -> AsyncIterator[Controller]:
    async with started(proxy) as controller:
        await controller.submit(NODE)
        await controller.submit(topic("kept"))
        yield controller


def cut_and(proxy: StoreProxy, store: MetadataStore) -> None:
    """The connection is lost, and behind it is another store."""
    proxy.unavailable = True
    proxy.store = store


@pytest.mark.parametrize("passed_by", [0, 50])
async def test_an_older_copy_of_the_store_stops_it_also_if_that_has_gone_on_since(
    proxy: StoreProxy, controller: Controller, passed_by: int
) -> None:
    older = await copy_at_same_revisions(proxy.store)
    await controller.submit(topic("lost"))
    if passed_by:
        # Only the keys tell.
        async with started(older) as other:
            await other.submit(topic("another"))
        await fill(older, controller.image.revision + passed_by)
    cut_and(proxy, older)
    await until(lambda: controller.trouble is not None)
    assert controller.went_back is None, "a store that cannot be reached has not lost anything"
    proxy.unavailable = False
    await until(lambda: controller.went_back is not None)
    await assert_stopped(controller, older, {"kept", "lost"})


async def test_a_copy_of_the_store_that_lacks_nothing_is_followed(
    proxy: StoreProxy, controller: Controller
) -> None:
    copy = await copy_at_same_revisions(proxy.store)
    cut_and(proxy, copy)
    await until(lambda: controller.trouble is not None)
    proxy.unavailable = False
    await until(lambda: controller.trouble is None)
    await controller.submit(topic("new"))
    assert controller.image.topics.keys() == {"kept", "new"}


@pytest.mark.parametrize("lost", [1, 3])
async def test_a_commit_to_an_older_copy_is_not_acknowledged(
    proxy: StoreProxy, controller: Controller, lost: int
) -> None:
    older = await copy_at_same_revisions(proxy.store)
    for number in range(lost):
        await controller.submit(topic(f"lost-{number}"))
    # The watch has not noticed anything.
    proxy.store = older
    with pytest.raises(MetadataWentBack, match=WORDS):
        await controller.submit(topic("t"))
    assert "t" not in controller.image.topics
    await assert_stopped(controller, older, {"kept", *(f"lost-{number}" for number in range(lost))})


async def test_after_a_lost_answer_nobody_says_that_nothing_was_done(
    proxy: StoreProxy, controller: Controller
) -> None:
    older = await copy_at_same_revisions(proxy.store)
    await controller.submit(topic("lost"))
    proxy.store = older
    proxy.lost_replies = 1
    with pytest.raises(OutcomeUnknown):
        await controller.submit(topic("t"))
    assert controller.went_back is not None


async def test_a_store_that_lacks_what_another_node_has_seen_stops_it(
    proxy: StoreProxy, controller: Controller
) -> None:
    await controller.refresh(controller.image.revision)
    assert controller.went_back is None
    with pytest.raises(MetadataWentBack, match=WORDS):
        await controller.refresh(controller.image.revision + 1)
    await assert_stopped(controller, proxy.store, {"kept"})


async def test_a_read_that_the_watch_has_overtaken_is_not_taken_for_an_older_store(
    proxy: StoreProxy, controller: Controller
) -> None:
    real = proxy.store.read

    async def read(*args: Any, **options: Any) -> Any:
        stored = await real(*args, **options)
        async with started(MemoryStoreView(proxy.store, real)) as other:
            await other.submit(topic("meanwhile"))
        await until(lambda: "meanwhile" in controller.image.topics)
        return stored

    proxy.store.read = read  # type: ignore[method-assign]
    await controller.refresh()
    assert [controller.went_back, controller.trouble] == [None, None]
    assert "meanwhile" in controller.image.topics


class MemoryStoreView(StoreProxy):
    """A store that is read by another function."""

    def __init__(self, store: MetadataStore, read: Any) -> None:
        super().__init__(store)
        self.read = read  # type: ignore[method-assign]


# --- a real etcd


def store_of(server: EtcdServer) -> EtcdStore:
    return EtcdStore(EtcdSettings((parse_address(server.endpoints),), deadline_ms=30_000), "tidemill/test/")


@asynccontextmanager
async def opened(server: EtcdServer) -> AsyncIterator[EtcdStore]:
    store = store_of(server)
    try:
        yield store
    finally:
        await store.close()


async def submit_once_it_works(controller: Controller, command: CreateTopic) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                await controller.submit(command)
                return
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(0.02)


async def advance(copy: Path, work: Path, revision: int) -> Path:
    """What an etcd has that was started with ``copy`` and has passed ``revision``."""
    with EtcdServer(work) as server:
        server.kill()
        server.restart(put_back=copy)
        async with opened(server) as store:
            await fill(store, revision)
        return server.copy_data()


@needs_etcd
@pytest.mark.parametrize("lost", ["restored", "restored and passed", "emptied"])
async def test_a_real_etcd_that_lost_data_under_a_running_controller_stops_it(
    tmp_path: Path, lost: str
) -> None:
    with EtcdServer(tmp_path / "etcd") as server:
        async with opened(server) as store, started(store) as controller:
            await controller.submit(NODE)
            await controller.submit(topic("kept"))
            copy = server.copy_data()
            # The watch goes on over a restart that loses nothing.
            await submit_once_it_works(controller, topic("lost"))
            assert controller.went_back is None
            if lost == "restored and passed":
                copy = await advance(copy, tmp_path / "advanced", controller.image.revision + 50)
            server.kill()
            server.restart(lose_data=lost == "emptied", put_back=None if lost == "emptied" else copy)
            await until(lambda: controller.went_back is not None)
            await assert_stopped(controller, store, {"kept", "lost"})


async def take(batches: AsyncIterator[ChangeBatch]) -> ChangeBatch:
    async with asyncio.timeout(120):
        return await anext(batches)


@needs_etcd
@pytest.mark.parametrize("has_delivered", [True, False])
async def test_a_watch_of_etcd_does_not_go_on_in_an_older_copy_that_has_passed_it(
    tmp_path: Path, has_delivered: bool
) -> None:
    with EtcdServer(tmp_path / "etcd") as server:
        async with opened(server) as store:
            await store.commit(Txn(puts=(Put("a", b"1"),)))
            copy = server.copy_data()
            async with opened(server) as writer:
                await writer.commit(Txn(puts=(Put("b", b"1"),)))
                last = await writer.commit(Txn(puts=(Put("c", b"1"),)))
            watch = store.watch(last if has_delivered else last + 1)
            opens = watch_opens(store)
            waiting = asyncio.create_task(take(watch))
            if has_delivered:
                assert (await waiting).revision == last
                waiting = asyncio.create_task(take(watch))
            await opens.wait()
            copy = await advance(copy, tmp_path / "advanced", last + 50)
            server.kill()
            server.restart(put_back=copy)
            with pytest.raises(MetadataWentBack, match=WORDS):
                await waiting


def watch_opens(store: EtcdStore) -> asyncio.Event:
    """Set when a watch has been opened."""
    opened = asyncio.Event()
    check = store._check_history

    async def check_history(*args: Any) -> Any:
        found = await check(*args)
        opened.set()
        return found

    store._check_history = check_history  # type: ignore[method-assign,assignment]
    return opened
