"""The metadata client on a store that hangs, is away, or loses answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from msgspec.structs import replace

from support.memory_store import MemoryStore
from support.store_proxy import StoreProxy
from tidemill.control.commands import (
    AdmitNode,
    AllocateProducerIds,
    AlterInSync,
    Command,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    ForgetDeleted,
    RegisterNode,
    SetClusterId,
    SetTopicConfigs,
)
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataImage
from tidemill.control.records import CONTROLLER_KEY, AliveRecord, ControllerRecord, alive_key, encode
from tidemill.control.stores.store import ChangeBatch, Compare, OutcomeUnknown, Put, StoreUnavailable, Txn
from tidemill.control.tables.commands import CreateDatabase, DropDatabase
from tidemill.errors import ApiError, ErrorCode

NODE = RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1))


def topic(name: str) -> CreateTopic:
    return CreateTopic(name=name, topic_id=uuid4(), partitions=2)


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def proxy() -> StoreProxy:
    return StoreProxy(MemoryStore())


@pytest.fixture
async def controller(proxy: StoreProxy) -> AsyncIterator[Controller]:
    controller = Controller(proxy, sleep=no_wait)
    await controller.start()
    await controller.submit(NODE)
    yield controller
    await controller.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Let the others have their turns until it is so."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not come to that")


async def test_a_watch_that_fails_is_begun_again_and_nothing_is_missed(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.unavailable = True
    await until(lambda: controller.trouble is not None)
    assert controller.trouble_since is not None
    with pytest.raises(StoreUnavailable):
        await controller.submit(topic("refused"))
    other = Controller(proxy.store)
    await other.start()
    await other.submit(topic("t"))
    assert "t" not in controller.image.topics
    proxy.unavailable = False
    await until(lambda: "t" in controller.image.topics)
    assert [controller.trouble, controller.trouble_since, controller.failure] == [None] * 3
    await other.submit(topic("u"))
    await until(lambda: "u" in controller.image.topics)
    await controller.submit(topic("v"))
    await other.stop()


COMMANDS: list[tuple[list[Command[Any]], Command[Any]]] = [
    ([], topic("t")),
    ([topic("t")], DeleteTopic(name="t")),
    ([topic("t")], CreatePartitions(name="t", new_count=5)),
    ([topic("t")], SetTopicConfigs(name="t", configs={"a": "1"}, base={})),
    ([], RegisterNode(node_id=0, name="n0", host="h", port=2, incarnation=UUID(int=2))),
    ([], CreateDatabase(name="d", created_ms=1)),
    ([CreateDatabase(name="d", created_ms=1)], DropDatabase(name="d")),
]


@pytest.mark.parametrize("was_done", [True, False])
@pytest.mark.parametrize(("before", "command"), COMMANDS, ids=lambda value: type(value).__name__)
async def test_a_command_whose_answer_was_lost_is_done_once_and_succeeds(
    proxy: StoreProxy, controller: Controller, before: Any, command: Any, was_done: bool
) -> None:
    for each in before:
        await controller.submit(each)
    expected = controller.check(command)
    revision = controller.image.revision
    if was_done:
        proxy.lost_replies = 1
    else:
        proxy.lost_commits = 1
    assert await controller.submit(command) == expected
    assert controller.image.revision == revision + 1
    assert controller.image == MetadataImage.from_stored(await proxy.store.read())


async def test_producer_ids_are_burnt_rather_than_given_twice(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.lost_replies = 2
    assert await controller.submit(AllocateProducerIds(count=10)) == 20
    assert await controller.submit(AllocateProducerIds(count=10)) == 30


async def test_a_refusal_after_a_lost_answer_is_a_success_only_for_what_was_planned_before(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.lost_replies = 1
    results = await controller.submit_many([DeleteTopic(name="never"), topic("t")])
    assert isinstance(results[0], ApiError)
    assert controller.image.topics["t"] == results[1]


def before_the_next_read(proxy: StoreProxy, happens: Callable[[], Awaitable[object]]) -> None:
    """Have something happen between the commit whose answer is lost and the read that follows."""
    real = proxy.store.read

    async def read(*args: Any, **options: Any) -> Any:
        proxy.store.read = real  # type: ignore[method-assign]
        await happens()
        return await real(*args, **options)

    proxy.store.read = read  # type: ignore[method-assign]


CLUSTER = SetClusterId(cluster_id="c", replicated=True, secret=b"s")
MINE, THEIRS = UUID(int=71), UUID(int=72)


@pytest.fixture
async def shared(proxy: StoreProxy) -> AsyncIterator[Controller]:
    """The controller of a node that is not alone, with topic t."""
    controller = Controller(proxy, sleep=no_wait)
    await controller.start()
    await controller.submit(CLUSTER)
    await controller.submit(NODE)
    alive = AliveRecord(incarnation=NODE.incarnation)
    await proxy.store.commit(Txn(puts=(Put(alive_key(0), encode(alive)),)))
    await until(lambda: bool(controller.image.alive))
    await controller.submit(AdmitNode(node_id=0, incarnation=NODE.incarnation))
    await controller.submit(topic("t"))
    yield controller
    await controller.stop()


@pytest.fixture
async def other(proxy: StoreProxy, shared: Controller) -> AsyncIterator[Controller]:
    """The controller of another node."""
    other = Controller(proxy.store)
    await other.start()
    yield other
    await other.stop()


def deletion(controller: Controller, command_id: UUID) -> DeleteTopic:
    return DeleteTopic(name="t", topic_id=controller.image.topics["t"].id, command_id=command_id)


async def test_after_a_lost_answer_a_deletion_is_told_from_somebody_elses(
    proxy: StoreProxy, shared: Controller, other: Controller
) -> None:
    theirs = deletion(shared, THEIRS)
    proxy.lost_commits = 1
    before_the_next_read(proxy, lambda: other.submit(theirs))
    with pytest.raises(ApiError) as refused:
        await shared.submit(deletion(shared, MINE))
    assert refused.value.code is ErrorCode.unknown_topic_or_partition


async def test_after_a_lost_answer_a_deletion_is_known_as_ones_own(
    proxy: StoreProxy, shared: Controller, other: Controller
) -> None:
    mine = deletion(shared, MINE)
    proxy.lost_replies = 1

    async def somebody_creates_it_anew() -> None:
        await until(lambda: "t" not in other.image.topics)
        await other.submit(topic("t"))

    before_the_next_read(proxy, somebody_creates_it_anew)
    assert (await shared.submit(mine)).id == mine.topic_id
    assert "t" in shared.image.topics, "it is another one, which nobody has deleted"


async def test_after_a_lost_answer_nobody_knows_who_has_deleted_what_no_node_has_files_of(
    proxy: StoreProxy, shared: Controller, other: Controller
) -> None:
    mine = deletion(shared, MINE)
    proxy.lost_replies = 1

    async def forget() -> None:
        await until(lambda: "t" not in other.image.topics)
        await other.submit(ForgetDeleted(topic_id=mine.topic_id or UUID(int=0), node_id=0))

    before_the_next_read(proxy, forget)
    with pytest.raises(OutcomeUnknown):
        await shared.submit(mine)


async def test_after_a_lost_answer_a_creation_counts_also_if_somebody_has_deleted_the_topic_since(
    proxy: StoreProxy, shared: Controller, other: Controller
) -> None:
    created = topic("u")
    proxy.lost_replies = 1

    async def delete() -> None:
        await until(lambda: "u" in other.image.topics)
        await other.submit(DeleteTopic(name="u", topic_id=created.topic_id, command_id=THEIRS))

    before_the_next_read(proxy, delete)
    assert (await shared.submit(created)).id == created.topic_id
    assert "u" not in shared.image.topics


async def test_after_a_lost_answer_a_creation_is_not_refused_because_of_somebody_elses_topic(
    proxy: StoreProxy, shared: Controller, other: Controller
) -> None:
    """The lost attempt may be done yet, when that topic is deleted."""
    proxy.lost_commits = 1
    before_the_next_read(proxy, lambda: other.submit(topic("u")))
    with pytest.raises(OutcomeUnknown):
        await shared.submit(topic("u"))


async def test_after_a_lost_answer_a_controller_that_was_replaced_does_not_say_that_nothing_was_done(
    proxy: StoreProxy, controller: Controller
) -> None:
    record = Put(CONTROLLER_KEY, encode(ControllerRecord(node_id=0, incarnation=UUID(int=1))))
    fence = Compare(CONTROLLER_KEY, await proxy.store.commit(Txn(puts=(record,))))
    await until(lambda: controller.image.key_revision(CONTROLLER_KEY) == fence.mod_revision)
    proxy.lost_replies = 1
    before_the_next_read(proxy, lambda: proxy.store.commit(Txn(puts=(record,))))
    with pytest.raises(OutcomeUnknown):
        await controller.submit(topic("t"), fence=fence)
    assert "t" in controller.image.topics
    with pytest.raises(ApiError) as refused:
        await controller.submit(topic("u"), fence=fence)
    assert refused.value.code is ErrorCode.not_controller


async def test_after_a_lost_answer_a_controller_that_stops_does_not_say_that_nothing_was_done(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.lost_replies = 1
    before_the_next_read(proxy, controller.stop)
    with pytest.raises(OutcomeUnknown):
        await controller.submit(topic("t"))


async def test_after_a_lost_answer_an_in_sync_set_that_was_overtaken_is_not_refused_for_certain(
    proxy: StoreProxy, controller: Controller
) -> None:
    for node_id in (1, 2):
        await controller.submit(replace(NODE, node_id=node_id, name=f"n{node_id}"))
    created = await controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=1, replication=3))
    first = created.partitions[0]
    other = Controller(proxy.store)
    await other.start()

    def without(*left: int, partition_epoch: int) -> AlterInSync:
        return AlterInSync(
            topic_id=created.id,
            index=0,
            leader=first.leader,
            leader_epoch=first.leader_epoch,
            partition_epoch=partition_epoch,
            isr=tuple(each for each in first.isr if each not in left),
            node_epochs={},
        )

    followers = [each for each in first.isr if each != first.leader]

    async def overtake() -> None:
        await until(lambda: other.image.topics["t"].partitions[0].partition_epoch == 1)
        await other.submit(without(*followers, partition_epoch=1))

    proxy.lost_replies = 1
    before_the_next_read(proxy, overtake)
    with pytest.raises(OutcomeUnknown):
        await controller.submit(without(followers[0], partition_epoch=0))
    assert controller.image.topics["t"].partitions[0].isr == (first.leader,)
    await other.stop()


async def test_an_outcome_that_cannot_be_found_out_is_reported_as_unknown(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.lost_replies = 1
    real = proxy.store.read

    async def read(*args: Any, **options: Any) -> Any:
        raise StoreUnavailable("away")

    proxy.store.read = read  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        # The watch would tell, but the client cannot be sure of it.
        await controller.submit(topic("t"))
    proxy.store.read = real  # type: ignore[method-assign]
    await until(lambda: "t" in controller.image.topics)


async def test_while_the_store_hangs_the_image_stays_and_then_it_goes_on(
    proxy: StoreProxy, controller: Controller
) -> None:
    proxy.hang()
    waiting = asyncio.create_task(controller.submit(topic("t")))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not controller.image.topics
    proxy.go_on()
    await waiting
    assert "t" in controller.image.topics


async def test_nothing_is_committed_behind_the_fence(proxy: StoreProxy, controller: Controller) -> None:
    revision = await proxy.store.commit(Txn(puts=(Put("controller", b"\x81\xa7node_id\x00"),)))
    await until(lambda: controller.image.controller is not None)
    fence = Compare("controller", revision)
    await controller.submit(topic("t"), fence=fence)
    # Another node takes over, and this one has not heard of it.
    proxy.hang()
    submitted = asyncio.create_task(controller.submit(topic("u"), fence=fence))
    await asyncio.sleep(0)
    await proxy.store.commit(Txn(puts=(Put("controller", b"\x81\xa7node_id\x01"),)))
    proxy.go_on()
    with pytest.raises(ApiError) as caught:
        await submitted
    assert caught.value.code is ErrorCode.not_controller
    assert "u" not in controller.image.topics


async def test_a_watch_that_brings_nothing_does_not_hold_up_commands(
    proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.control.controller._WATCH_PATIENCE_SECONDS", 0)

    async def watch(from_revision: int) -> AsyncIterator[ChangeBatch]:
        await asyncio.Event().wait()
        yield ChangeBatch(0, ())

    proxy.watch = watch  # type: ignore[method-assign,assignment]
    controller = Controller(proxy)
    await controller.start()
    await controller.submit(NODE)
    assert controller.image.nodes
    await controller.stop()
