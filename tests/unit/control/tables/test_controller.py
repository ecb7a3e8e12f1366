from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest

from support.memory_store import MemoryStore
from tidemill.control.commands import CreateTopic, DeleteTopic, RegisterNode, SetTopicConfigs
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataImage
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import Txn
from tidemill.control.tables.commands import (
    AddTablePartition,
    AlterTable,
    CreateDatabase,
    CreateTable,
    DropDatabase,
    DropExpiredLeases,
    DropLease,
    DropTable,
    DropTablePartition,
    PutLease,
)
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage
from tidemill.control.tables.steps import alter_table, drop_table
from tidemill.errors import ApiError, MetadataConflict, TableCode, TableError

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
        self.before_commit: Callable[[], Awaitable[None]] | None = None

    async def commit(self, txn: Txn) -> int:
        self.commits += 1
        disturb, self.before_commit = self.before_commit, None
        if disturb is not None:
            await disturb()
        return await super().commit(txn)


@asynccontextmanager
async def running(store: MetadataStore) -> AsyncIterator[Controller]:
    controller = Controller(store)
    await controller.start()
    try:
        yield controller
    finally:
        await controller.stop()


@asynccontextmanager
async def two_on_one() -> AsyncIterator[tuple[Disturbed, Controller, Controller]]:
    """A store with a node, and two controllers on it that have seen it."""
    store = Disturbed()
    async with running(store) as first, running(store) as second:
        await first.submit(NODE)
        await reached(second, first)
        yield store, first, second


async def reached(controller: Controller, other: Controller) -> None:
    moved = asyncio.Event()
    end = controller.subscribe(lambda old, new, delta: moved.set())
    async with asyncio.timeout(120):
        while controller.image.revision < other.image.revision:
            await moved.wait()
            moved.clear()
    end()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], MetadataStore]:
    """Opens the same store each time."""
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "metadata.db")
    memory = MemoryStore()
    return lambda: memory


def table(name: str, **fields: Any) -> CreateTable:
    defaults = {"schema": b"s", "bucket_map": b"m", "row_format": "row", "key_format": "raw", "created_ms": 1}
    return CreateTable(name=name, topic_id=uuid4(), **{**defaults, **fields})


def add(name: str, value: object) -> AddTablePartition:
    return AddTablePartition(table=name, value=str(value), topic_id=uuid4())


def lease(lease_id: str, table_id: int = 1, expires_at_ms: int = 100) -> LeaseImage:
    snapshots = (LeasedSnapshot(0, 0, 3, 40), LeasedSnapshot(0, 1, 3, 50))
    return LeaseImage(
        lease_id=lease_id, table_id=table_id, holder="h", expires_at_ms=expires_at_ms, snapshots=snapshots
    )


async def test_tables_partitions_and_leases_are_there_again_after_a_restart(store: Any) -> None:
    opened = store()
    async with running(opened) as controller:
        await controller.submit(NODE)
        await controller.submit(CreateDatabase(name="d", comment="c", created_ms=3))
        created = await controller.submit(table("d.t", buckets=1_500))
        assert controller.image.tables["d.t"] == created
        await controller.submit(table("d.p", partition_column="day"))
        part = await controller.submit(add("d.p", "monday"))
        await controller.submit(add("d.p", "tuesday"))
        await controller.submit(DropTablePartition(table="d.p", value="tuesday"))
        altered = await controller.submit(AlterTable(name="d.p", base_schema_count=1, new_schema=b"s1"))
        assert altered.partitions == (part,)
        await controller.submit(PutLease(lease=lease("a", created.id)))
        await controller.submit(PutLease(lease=lease("b", altered.id)))
        await controller.submit(DropLease(lease_id="b"))
        before = controller.image
        assert before == MetadataImage.from_stored(await opened.read())
    if isinstance(opened, SqliteStore):
        await opened.close()
    reopened = store()
    async with running(reopened) as controller:
        assert controller.image == before
        assert controller.image.leases_of(created.id) == (lease("a", created.id),)
        dropped = await controller.submit(DropTable(name="d.t"))
        assert dropped == created
        assert set(controller.image.topics) == {"d.p.monday"}
    await reopened.close()


async def test_a_table_is_created_and_dropped_in_one_transaction_each() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)
        store.commits = 0
        await controller.submit(table("d.t", buckets=10_000))
        assert store.commits == 1
        assert len(controller.image.topics["d.t"].partitions) == 10_000
        await controller.submit(PutLease(lease=lease("a")))
        store.commits = 0
        await drop_table(controller, DropTable(name="d.t"))
        assert store.commits == 1
        assert not controller.image.topics
        assert not controller.image.leases


async def test_commands_about_tables_in_one_batch_see_each_other() -> None:
    store = Disturbed()
    async with running(store) as controller:
        results: list[Any] = await controller.submit_many(
            [
                NODE,
                table("d.t"),
                CreateTopic(name="d.t", topic_id=uuid4()),
                DeleteTopic(name="d.t"),
                PutLease(lease=lease("a")),
                DropTable(name="d.t"),
                table("d.t", partition_column="x"),
                add("d.t", 1),
                add("d.t", 1),
                DropDatabase(name="d"),
                DropExpiredLeases(now_ms=100),
            ]
        )
        assert store.commits == 1
        assert [type(result) for result in results[2:4]] == [ApiError, ApiError]
        assert (results[1].id, results[6].id) == (1, 2)
        assert results[7] == results[8]
        assert isinstance(results[9], TableError)
        assert results[10] == ()
        assert set(controller.image.topics) == {"d.t.1"}
        assert not controller.image.leases
        assert controller.image == MetadataImage.from_stored(await store.read())


async def test_of_two_controllers_only_one_creates_a_table_of_colliding_names() -> None:
    async with two_on_one() as (store, first, second):
        outcomes = await asyncio.gather(
            first.submit(table("a.b_c", partition_column="x")),
            second.submit(table("a_b.c", partition_column="x")),
            return_exceptions=True,
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, TableError)]
        assert [error.table_code for error in refused] == [TableCode.invalid_schema]
        assert len((await store.read("tables/")).entries) == 1


async def test_table_numbers_of_racing_controllers_are_all_different() -> None:
    async with two_on_one() as (_, first, second):
        tables = await asyncio.gather(
            *(c.submit(table(f"d.t{n}{i}")) for n, c in enumerate((first, second)) for i in range(10))
        )
        assert sorted(each.id for each in tables) == list(range(1, 21))


async def test_a_database_is_not_dropped_under_a_table_that_is_being_created() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit(CreateDatabase(name="d", created_ms=1))
        await reached(second, first)

        async def create() -> None:
            await second.submit(table("d.t"))

        store.before_commit = create
        with pytest.raises(TableError) as caught:
            await first.submit(DropDatabase(name="d"))
        assert caught.value.table_code is TableCode.database_not_empty

        async def drop() -> None:
            await second.submit(DropTable(name="d.t"))
            await second.submit(DropDatabase(name="d"))

        store.before_commit = drop
        await first.submit(table("d.other"))
        assert set(first.image.databases) == {"d"}


async def test_racing_writers_of_one_value_get_one_partition() -> None:
    async with two_on_one() as (_, first, second):
        await first.submit(table("d.t", partition_column="day"))
        await reached(second, first)
        parts = await asyncio.gather(*(c.submit(add("d.t", "x")) for c in (first, second, first, second)))
        assert len(set(parts)) == 1
        assert set(first.image.topics) == {"d.t.x"}


async def test_of_two_schema_changes_at_once_the_second_is_told_to_read_again() -> None:
    async with two_on_one() as (_, first, second):
        await first.submit(table("d.t"))
        await reached(second, first)
        outcomes = await asyncio.gather(
            *(
                c.submit(AlterTable(name="d.t", base_schema_count=1, new_schema=schema))
                for c, schema in ((first, b"one"), (second, b"two"))
            ),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes].count(MetadataConflict) == 1
        assert len(first.image.tables["d.t"].schemas) == 2


async def test_a_lease_is_not_renewed_on_a_table_that_is_being_dropped() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit(table("d.t"))
        await first.submit(PutLease(lease=lease("a")))
        await reached(second, first)

        async def drop() -> None:
            await second.submit(DropTable(name="d.t"))

        store.before_commit = drop
        with pytest.raises(TableError) as caught:
            await first.submit(PutLease(lease=lease("a", expires_at_ms=900), renew=True))
        assert caught.value.table_code is TableCode.lease_not_found
        assert not first.image.leases


async def test_nodes_add_their_snapshots_to_a_lease_that_another_has_begun() -> None:
    """Also one that has not heard of the lease yet."""
    async with two_on_one() as (store, first, second):
        await first.submit(table("d.t"))
        await reached(second, first)
        begun, added = lease("a"), LeasedSnapshot(0, 1, 9, 70, 4, 2)
        more = replace(begun, snapshots=(added,), expires_at_ms=200)

        async def begin() -> None:
            await first.submit(PutLease(lease=begun))

        store.before_commit = begin
        made = await second.submit(PutLease(lease=more, add=True))
        assert made.snapshots == (begun.snapshots[0], added), "one of each bucket: the added one"
        assert second.image.leases["a"] == made == replace(begun, snapshots=made.snapshots, expires_at_ms=200)


async def test_a_lease_that_was_renewed_at_the_last_moment_is_not_dropped_as_over() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit(table("d.t"))
        await first.submit(PutLease(lease=lease("a", expires_at_ms=100)))
        await reached(second, first)

        async def renew() -> None:
            await second.submit(PutLease(lease=lease("a", expires_at_ms=900), renew=True))

        store.before_commit = renew
        assert await first.submit(DropExpiredLeases(now_ms=500)) == ()
        assert first.image.leases["a"].expires_at_ms == 900


async def test_a_partition_added_while_its_table_is_dropped_leaves_no_topic_behind() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit(table("d.t", partition_column="day"))
        await reached(second, first)

        async def add_one() -> None:
            await second.submit(add("d.t", "x"))

        store.before_commit = add_one
        dropped = await first.submit(DropTable(name="d.t"))
        assert [part.value for part in dropped.partitions] == ["x"]
        assert not first.image.topics


async def test_subscribers_hear_of_tables_and_leases() -> None:
    async with running(MemoryStore()) as controller:
        heard: list[str] = []

        def listen(old: Any, new: Any, delta: Any) -> None:
            heard.extend(f"+{each.name}" for each in delta.tables_created)
            heard.extend(f"-{each.name}" for each in delta.tables_dropped)
            heard.extend(f"~{each.name}" for each in delta.tables_changed)
            heard.extend(["leases"] if delta.leases_changed else [])

        controller.subscribe(listen)
        await controller.submit(NODE)
        await controller.submit(table("d.t", partition_column="x"))
        await controller.submit(add("d.t", 1))
        await controller.submit(PutLease(lease=lease("a")))
        await controller.submit(DropTable(name="d.t"))
        assert heard == ["+d.t", "~d.t", "leases", "-d.t", "leases"]


async def test_a_table_of_a_thousand_partitions_is_filled_altered_and_dropped() -> None:
    store = Disturbed()
    async with running(store) as controller:
        await controller.submit(NODE)
        await controller.submit(table("d.t", partition_column="x", schema=b"s" * 50_000))
        store.commits = 0
        results = await controller.submit_many([add("d.t", i) for i in range(1_001)])
        # A partition takes a compare and two puts, besides those of its table, which are counted once.
        assert store.commits == 24
        assert isinstance(results[-1], ApiError)
        assert len(controller.image.topics) == 1_000

        altered = await alter_table(
            controller,
            AlterTable(
                name="d.t", base_schema_count=1, new_schema=b"s1", topic_configs={"retention.ms": "9"}
            ),
        )
        assert (len(altered.schemas), altered.topic_configs) == (2, {"retention.ms": "9"})
        assert all(topic.configs == {"retention.ms": "9"} for topic in controller.image.topics.values())

        before = controller.image.tables["d.t"]
        assert await drop_table(controller, DropTable(name="d.t")) == before
        assert not controller.image.topics
        assert not controller.image.tables
        assert controller.image.replica_counts == {}


async def test_a_refused_change_of_a_large_table_changes_none_of_its_logs() -> None:
    async with running(MemoryStore()) as controller:
        await controller.submit(NODE)
        await controller.submit_many(
            [table("d.t", partition_column="x"), *(add("d.t", i) for i in range(150))]
        )
        before = controller.image
        for command in (
            AlterTable(name="d.t", base_schema_count=5, new_schema=b"s", topic_configs={"a": "1"}),
            AlterTable(name="d.t", table_id=9, topic_configs={"a": "1"}),
        ):
            with pytest.raises((MetadataConflict, TableError)):
                await alter_table(controller, command)
        with pytest.raises(TableError, match="number 1, not 9"):
            await drop_table(controller, DropTable(name="d.t", table_id=9))
        with pytest.raises(TableError, match="no table"):
            await drop_table(controller, DropTable(name="d.no"))
        with pytest.raises(TableError, match="no table"):
            await alter_table(controller, AlterTable(name="d.no", topic_configs={"a": "1"}))
        assert controller.image == before


async def test_a_large_table_that_gains_and_loses_partitions_meanwhile_is_altered_and_dropped() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit_many([table("d.t", partition_column="x"), *(add("d.t", i) for i in range(150))])
        await reached(second, first)

        async def interfere() -> None:
            await second.submit_many([DropTablePartition(table="d.t", value="149"), add("d.t", "new")])

        store.before_commit = interfere
        await alter_table(first, AlterTable(name="d.t", topic_configs={"a": "1"}))
        assert len(first.image.topics) == 150
        assert all(topic.configs == {"a": "1"} for topic in first.image.topics.values())

        async def again() -> None:
            gone = DropTablePartition(table="d.t", value="5")
            await second.submit_many([gone, *(add("d.t", f"later{i}") for i in range(9))])

        store.before_commit = again
        await drop_table(first, DropTable(name="d.t"))
        assert not first.image.topics
        assert not first.image.tables


async def test_configs_set_on_one_log_at_the_moment_of_an_alter_are_replaced() -> None:
    async with two_on_one() as (store, first, second):
        await first.submit(table("d.t"))
        await reached(second, first)

        async def set_apart() -> None:
            await second.submit(SetTopicConfigs(name="d.t", configs={"theirs": "1"}))

        store.before_commit = set_apart
        await first.submit(AlterTable(name="d.t", topic_configs={"ours": "1"}))
        assert first.image.topics["d.t"].configs == {"ours": "1"}
