from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from support.memory_store import MemoryStore
from tidemill.control.commands import (
    AllocateProducerIds,
    BumpLeaderEpochs,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    RegisterNode,
    SetClusterId,
    SetTopicConfigs,
)
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataDelta, MetadataImage
from tidemill.control.placement import ControlLimits
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import Put, StoreClosed, Txn
from tidemill.errors import ApiError, DiskFull, ErrorCode, MetadataConflict, StorageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tidemill.control.stores.store import MetadataStore

NODE = RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1))


class Disturbed(MemoryStore):
    """A store that counts commits and lets a test do something just before one."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = 0
        self.before_commit: Callable[[Txn], Awaitable[None]] | None = None

    async def commit(self, txn: Txn) -> int:
        self.commits += 1
        if self.before_commit is not None:
            await self.before_commit(txn)
        return await super().commit(txn)


@asynccontextmanager
async def running(store: MetadataStore, **options: Any) -> AsyncIterator[Controller]:
    controller = Controller(store, **options)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


def topic(name: str, partitions: int = 1, **fields: Any) -> CreateTopic:
    return CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1, **fields)


async def reached(controller: Controller, revision: int) -> None:
    moved = asyncio.Event()
    end = controller.subscribe(lambda old, new, delta: moved.set())
    async with asyncio.timeout(120):
        while controller.image.revision < revision:
            await moved.wait()
            moved.clear()
    end()


async def test_a_submitted_command_is_in_the_image_when_submit_returns() -> None:
    async with running(MemoryStore()) as controller:
        await controller.submit(NODE)
        created = await controller.submit(topic("t", 3))
        assert controller.image.topics["t"] == created
        assert await controller.submit(AllocateProducerIds()) == 0
        assert await controller.submit(AllocateProducerIds()) == 1_000


async def test_a_refused_command_changes_nothing() -> None:
    store = Disturbed()
    async with running(store) as controller:
        with pytest.raises(ApiError) as caught:
            await controller.submit(DeleteTopic(name="no"))
        assert caught.value.code is ErrorCode.unknown_topic_or_partition
        assert store.commits == 0
        assert controller.image == MetadataImage()


async def test_metadata_is_there_again_after_a_restart(tmp_path: Path) -> None:
    images = []
    for round_ in range(2):
        store = SqliteStore(tmp_path / "metadata.db")
        async with running(store) as controller:
            if round_ == 0:
                await controller.submit_many([SetClusterId(cluster_id="c"), NODE, topic("t", 2_500)])
                await controller.submit(BumpLeaderEpochs(name="t", partitions=(2_400,)))
            images.append(controller.image)
        await store.close()
    assert images[0] == images[1]
    assert images[1].topics["t"].partitions[2_400].leader_epoch == 1


async def test_check_gives_the_result_without_doing_it() -> None:
    async with running(MemoryStore()) as controller:
        await controller.submit(NODE)
        before = controller.image
        assert controller.check(topic("t", 2)).name == "t"
        with pytest.raises(ApiError):
            controller.check(topic("t", 0))
        assert controller.image is before


async def test_of_two_controllers_on_one_store_only_one_creates_a_topic() -> None:
    store = MemoryStore()
    async with running(store) as first, running(store) as second:
        await first.submit(NODE)
        await reached(second, first.image.revision)
        outcomes = await asyncio.gather(
            first.submit(topic("a.b")), second.submit(topic("a_b")), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
        assert [error.code for error in refused] == [ErrorCode.invalid_topic_exception]
        revision = (await store.read()).revision
        await reached(first, revision)
        await reached(second, revision)
        assert len(first.image.topics) == 1
        assert first.image == second.image


async def test_producer_ids_of_racing_controllers_never_overlap() -> None:
    store = MemoryStore()
    async with running(store) as first, running(store) as second:
        blocks = await asyncio.gather(
            *(c.submit(AllocateProducerIds()) for c in (first, second) for _ in range(20))
        )
    assert sorted(blocks) == [1_000 * i for i in range(40)]


async def test_a_conflict_is_planned_again_from_what_the_other_wrote() -> None:
    store = Disturbed()
    async with running(store) as controller, running(store) as other:
        await controller.submit_many([NODE, topic("t")])
        await reached(other, controller.image.revision)

        async def interfere(txn: Txn) -> None:
            store.before_commit = None
            await other.submit(SetTopicConfigs(name="t", configs={"theirs": "1"}))

        store.before_commit = interfere
        grown = await controller.submit(CreatePartitions(name="t", new_count=4))
        assert len(grown.partitions) == 4
        assert grown.configs == {"theirs": "1"}
        assert controller.image.topics["t"] == grown


async def test_conflicts_without_end_are_given_up() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)

        async def interfere(txn: Txn) -> None:
            for compare in txn.compares:
                value = (await store.read("producer-ids")).entries
                await MemoryStore.commit(store, Txn(puts=(Put(compare.key, _producer_ids(len(value))),)))

        store.before_commit = interfere
        with pytest.raises(MetadataConflict):
            await controller.submit(AllocateProducerIds())
        store.before_commit = None
        await controller.submit(AllocateProducerIds())


def _producer_ids(number: int) -> bytes:
    from tidemill.control.records import ProducerIdsRecord, encode

    return encode(ProducerIdsRecord(next_producer_id=number))


async def test_concurrent_submits_are_serialised_and_do_not_conflict_with_each_other() -> None:
    store = Disturbed()
    async with running(store) as controller:

        async def let_others_run(txn: Txn) -> None:
            await asyncio.sleep(0)

        store.before_commit = let_others_run
        blocks = await asyncio.gather(*(controller.submit(AllocateProducerIds()) for _ in range(10)))
        assert blocks == [1_000 * i for i in range(10)]
        assert store.commits == 10


async def test_many_commands_take_few_transactions_and_fail_one_by_one() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)
        commands = [topic(f"t{i}") for i in range(1_000)]
        commands[500] = topic("not a name")
        commands[999] = topic("t0")
        store.commits = 0
        results = await controller.submit_many(commands)
        # A topic takes a compare and two puts, a transaction 128 operations.
        assert store.commits == 24
        refused = {i: result.code.name for i, result in enumerate(results) if isinstance(result, ApiError)}
        assert refused == {500: "invalid_topic_exception", 999: "topic_already_exists"}
        assert len(controller.image.topics) == 998
        assert results[998] == controller.image.topics["t998"]


async def test_commands_of_one_batch_see_each_other() -> None:
    async with running(MemoryStore()) as controller:
        results = await controller.submit_many(
            [
                NODE,
                topic("t", 2),
                CreatePartitions(name="t", new_count=3),
                SetTopicConfigs(name="t", configs={"a": "1"}),
                DeleteTopic(name="t"),
                topic("t", 5),
                AllocateProducerIds(),
                AllocateProducerIds(),
                topic("short-lived"),
                DeleteTopic(name="short-lived"),
            ]
        )
        assert results[6:8] == [0, 1_000]
        assert controller.image.topics["t"] == results[5]
        assert set(controller.image.topics) == {"t"}
        assert controller.image.replica_counts == {0: 5}


async def test_a_topic_of_ten_thousand_partitions_is_one_transaction() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)
        store.commits = 0
        await controller.submit(topic("big", 10_000))
        assert store.commits == 1
        assert len(controller.image.topics["big"].partitions) == 10_000


async def test_a_command_over_the_limits_of_the_store_is_refused_alone() -> None:
    async with running(MemoryStore()) as controller:
        huge = SetTopicConfigs(name="a", configs={"x": "y" * 1_100_000})
        results = await controller.submit_many([NODE, topic("a"), huge, topic("b")])
        assert isinstance(results[2], ApiError)
        assert results[2].code is ErrorCode.policy_violation
        assert set(controller.image.topics) == {"a", "b"}


async def test_a_failing_store_fails_the_commands_of_that_transaction_only() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)

        async def fail(txn: Txn) -> None:
            store.before_commit = None
            raise StorageError("the disk is gone")

        store.before_commit = fail
        results = await controller.submit_many([topic(f"t{i}") for i in range(50)])
        failed = [i for i, result in enumerate(results) if isinstance(result, StorageError)]
        assert failed == list(range(42))
        assert set(controller.image.topics) == {f"t{i}" for i in range(42, 50)}


async def test_subscribers_hear_every_revision_once_and_in_order_whoever_wrote() -> None:
    store = MemoryStore()
    async with running(store) as controller, running(store) as other:
        heard: list[tuple[int, int, MetadataDelta]] = []
        end = controller.subscribe(lambda old, new, delta: heard.append((old.revision, new.revision, delta)))
        await controller.submit(NODE)
        await reached(other, controller.image.revision)
        for i in range(5):
            await other.submit(topic(f"theirs{i}"))
            await controller.submit(topic(f"ours{i}"))
        assert [old for old, _, _ in heard[1:]] == [new for _, new, _ in heard[:-1]]
        names = [created.name for _, _, delta in heard for created in delta.created]
        assert names == [f"{who}{i}" for i in range(5) for who in ("theirs", "ours")]
        end()
        await controller.submit(topic("unheard"))
        assert len(heard) == 11


async def test_subscribers_have_been_told_when_submit_returns_also_if_one_of_them_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(MemoryStore()) as controller:
        told: list[str] = []

        def broken(old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
            raise RuntimeError("bug in a subscriber")

        controller.subscribe(broken)
        controller.subscribe(lambda old, new, delta: told.extend(t.name for t in delta.created))
        await controller.submit(NODE)
        await controller.submit(topic("t"))
        assert told == ["t"]
        assert "bug in a subscriber" in caplog.text


async def test_a_subscriber_from_before_the_start_hears_what_was_read() -> None:
    store = MemoryStore()
    async with running(store) as controller:
        await controller.submit_many([NODE, topic("t")])
    second = Controller(store)
    created: list[str] = []
    second.subscribe(lambda old, new, delta: created.extend(t.name for t in delta.created))
    await second.start()
    assert created == ["t"]
    await second.stop()


async def test_a_watch_that_fell_behind_starts_over_from_a_full_read() -> None:
    store = MemoryStore(history_revisions=5)
    async with running(store) as controller, running(store) as other:
        await controller.submit(NODE)
        await reached(other, controller.image.revision)

        # No step of the event loop for the controllers while the history runs past them.
        for i in range(50):
            await store.commit(Txn(puts=(Put(f"others/{i}", b""),)))
        await other.submit(topic("t"))
        await reached(controller, other.image.revision)
        assert controller.image == other.image


async def test_a_store_that_closes_stops_the_controller_and_says_so() -> None:
    store = MemoryStore()
    async with running(store) as controller:
        await controller.submit(NODE)
        image = controller.image
        await store.close()
        assert controller._watcher is not None
        await asyncio.wait({controller._watcher}, timeout=120)
        assert isinstance(controller.failure, StoreClosed)
        with pytest.raises(StoreClosed):
            await controller.submit(topic("t"))
        assert controller.image is image


async def test_corrupt_metadata_stops_the_start() -> None:
    store = MemoryStore()
    await store.commit(Txn(puts=(Put("topics/t", b"\xc1"),)))
    with pytest.raises(StorageError, match="topics/t"):
        await Controller(store).start()


async def test_a_cancelled_submit_leaves_the_controller_usable(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "metadata.db")
    async with running(store) as controller:
        await controller.submit(NODE)
        for i in range(20):
            task = asyncio.create_task(controller.submit(topic(f"t{i}")))
            for _ in range(i % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await controller.submit(topic("last"))
        image = MetadataImage.from_stored(await store.read())
        await reached(controller, image.revision)
        assert controller.image == image
    await store.close()


async def test_the_limits_of_the_controller_are_those_it_was_given() -> None:
    async with running(MemoryStore(), limits=ControlLimits(partitions_per_topic=5)) as controller:
        await controller.submit(NODE)
        with pytest.raises(ApiError, match="limit is 5"):
            await controller.submit(topic("t", 6))


async def test_a_controller_that_was_not_started_says_so() -> None:
    with pytest.raises(RuntimeError, match="start"):
        await Controller(MemoryStore()).submit(NODE)


class FullDisk(MemoryStore):
    """A store without room, until a reserve is given up."""

    has_room = True

    async def commit(self, txn: Txn) -> int:
        if not self.has_room:
            raise DiskFull("no room")
        return await super().commit(txn)


async def test_on_a_full_disk_deletions_use_the_reserve_and_creations_do_not() -> None:
    store = FullDisk()
    given_up: list[DiskFull] = []

    def give_up(error: DiskFull) -> bool:
        given_up.append(error)
        store.has_room = True
        return True

    async with running(store) as controller:
        await controller.submit_many([NODE, topic("a"), topic("b")])
        controller.give_up_reserve = give_up
        store.has_room = False
        with pytest.raises(DiskFull):
            await controller.submit(topic("c"))
        assert given_up == []
        await controller.submit(DeleteTopic(name="a"))
        assert len(given_up) == 1
        assert set(controller.image.topics) == {"b"}
        # From now on there is room, but it is not for growing.
        controller.growth_refusal = DiskFull("the reserve is given up")
        results = await controller.submit_many([topic("d"), DeleteTopic(name="b")])
        assert results[0] is controller.growth_refusal
        assert set(controller.image.topics) == set()
        controller.growth_refusal = None
        await controller.submit(topic("d"))


async def test_a_deletion_that_finds_no_reserve_either_fails() -> None:
    store = FullDisk()
    async with running(store) as controller:
        await controller.submit_many([NODE, topic("a")])
        store.has_room = False
        with pytest.raises(DiskFull):
            await controller.submit(DeleteTopic(name="a"))
        assert set(controller.image.topics) == {"a"}
