"""Taking a single node into a cluster: what moves, what is refused, and what an interruption leaves."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from support.memory_store import MemoryStore
from tidemill.control.commands import CreateTopic, RegisterNode, SetClusterId
from tidemill.control.controller import Controller
from tidemill.control.records import CLUSTER_KEY, ClusterRecord, NodeRecord, decode, encode
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import OutcomeUnknown, Put, StoreUnavailable, Txn
from tidemill.coordination.ids import RandomIds
from tidemill.errors import ConfigError, StorageError, TidemillError
from tidemill.server.cluster.upgrade import upgrade
from tidemill.server.disk.data_directory import DataDirectory

TOPICS = 70
"""So many that they need several transactions."""


@pytest.fixture
async def directory(tmp_path: Path) -> DataDirectory:
    """The data directory of a node that has run on its own."""
    held = DataDirectory(tmp_path / "data")
    held.lock()
    store = SqliteStore(held.metadata_path)
    controller = Controller(store)
    await controller.start()
    await controller.submit(SetClusterId(cluster_id="c"))
    node = RegisterNode(node_id=1, name="node-1", host="h", port=1, incarnation=UUID(int=1))
    await controller.submit(node)
    for number in range(TOPICS):
        await controller.submit(CreateTopic(name=f"t{number}", topic_id=UUID(int=number + 1), partitions=2))
    await controller.stop()
    await store.close()
    return held


class Interrupting(MemoryStore):
    """Fails at one of its commits: before it is done, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.commits_left = -1
        self.is_done_first = False

    async def commit(self, txn: Txn) -> int:
        self.commits_left -= 1
        if self.commits_left == 0 and not self.is_done_first:
            raise StoreUnavailable("etcd is away")
        revision = await super().commit(txn)
        if self.commits_left == 0:
            raise OutcomeUnknown("etcd did not answer")
        return revision


async def values(store: MemoryStore) -> dict[str, bytes]:
    return {key: entry.value for key, entry in (await store.read()).entries.items()}


async def source_of(directory: DataDirectory, *, kept: bool = False) -> dict[str, bytes]:
    path = directory.metadata_path
    store = SqliteStore(path.with_name(path.name + ".before-cluster") if kept else path)
    try:
        return {key: entry.value for key, entry in (await store.read()).entries.items()}
    finally:
        await store.close()


async def check_upgraded(directory: DataDirectory, target: MemoryStore) -> None:
    """All keys are there, two of them changed as they must be; the directory belongs to the cluster."""
    found, before = await values(target), await source_of(directory, kept=True)
    cluster = decode(CLUSTER_KEY, found.pop(CLUSTER_KEY), ClusterRecord)
    node = decode("nodes/1", found.pop("nodes/1"), NodeRecord)
    old_node = decode("nodes/1", before.pop("nodes/1"), NodeRecord)
    del before[CLUSTER_KEY]
    assert found == before
    assert (cluster.cluster_id, cluster.replicated, len(cluster.secret)) == ("c", True, 32)
    assert (node.name, node.incarnation) == (old_node.name, old_node.incarnation)
    identity = directory.read_identity()
    assert identity is not None
    assert (identity.cluster_id, identity.node_name) == ("c", "node-1")
    assert identity.directory_id == node.directory_id
    assert not directory.metadata_path.exists()


async def test_every_key_moves_and_the_old_file_is_kept(directory: DataDirectory) -> None:
    target = MemoryStore()
    done = await upgrade(directory, target, RandomIds())
    await check_upgraded(directory, target)
    assert (done.cluster_id, done.node_id, done.node_name) == ("c", 1, "node-1")
    assert done.keys == 2 * TOPICS + 2
    assert done.kept.exists()


async def test_a_second_time_it_says_that_it_is_done(directory: DataDirectory) -> None:
    await upgrade(directory, MemoryStore(), RandomIds())
    with pytest.raises(ConfigError, match=r"belongs to cluster c already; start it with .*--name node-1"):
        await upgrade(directory, MemoryStore(), RandomIds())


async def test_a_directory_without_metadata_is_refused(tmp_path: Path) -> None:
    held = DataDirectory(tmp_path / "empty")
    held.lock()
    with pytest.raises(ConfigError, match="no node has ever run there"):
        await upgrade(held, MemoryStore(), RandomIds())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (CLUSTER_KEY, encode(ClusterRecord(cluster_id="another", replicated=True))),
        (CLUSTER_KEY, encode(ClusterRecord(cluster_id="c", replicated=True))),
        ("topics/t1", b"something else"),
        ("topics/mine", b""),
    ],
)
async def test_a_prefix_that_is_not_empty_is_left_alone(
    directory: DataDirectory, key: str, value: bytes
) -> None:
    target = MemoryStore()
    await target.commit(Txn(puts=(Put(key, value),)))
    with pytest.raises(ConfigError, match=f"'{key}' is not this node's: nothing was changed"):
        await upgrade(directory, target, RandomIds())
    assert await values(target) == {key: value}
    assert directory.metadata_path.exists()
    directory.check_alone()


@pytest.mark.parametrize("is_done_first", [False, True])
@pytest.mark.parametrize("commits", range(1, 6))
async def test_an_attempt_that_was_interrupted_is_finished_by_the_next(
    directory: DataDirectory, commits: int, is_done_first: bool
) -> None:
    target = Interrupting()
    target.commits_left, target.is_done_first = commits, is_done_first
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        await upgrade(directory, target, RandomIds())
    await upgrade(directory, target, RandomIds())
    await check_upgraded(directory, target)


async def test_an_attempt_has_that_many_transactions(directory: DataDirectory) -> None:
    """The test above interrupts each of them: the first one, three of the copy, and the last one."""
    target = Interrupting()
    before = target.commits_left
    await upgrade(directory, target, RandomIds())
    copies = -(-2 * TOPICS // 60)
    assert before - target.commits_left == 1 + copies + 1


async def test_until_its_last_transaction_no_node_takes_it_for_a_cluster(directory: DataDirectory) -> None:
    target = Interrupting()
    target.commits_left = 5
    with pytest.raises(StoreUnavailable):
        await upgrade(directory, target, RandomIds())
    cluster = decode(CLUSTER_KEY, (await values(target))[CLUSTER_KEY], ClusterRecord)
    assert not cluster.replicated
    # Its data directory is promised already: on its own it would write what the cluster does not know.
    with pytest.raises(ConfigError, match="run it again"):
        directory.check_alone()


async def test_a_copy_that_differs_does_not_become_a_cluster(directory: DataDirectory) -> None:
    class Garbling(MemoryStore):
        async def commit(self, txn: Txn) -> int:
            puts = tuple(put._replace(value=b"?") if put.key == "topics/t7" else put for put in txn.puts)
            return await super().commit(Txn(compares=txn.compares, puts=puts, deletes=txn.deletes))

    target = Garbling()
    with pytest.raises(StorageError, match="the first key that differs is 'topics/t7'"):
        await upgrade(directory, target, RandomIds())
    assert directory.metadata_path.exists()
    directory.check_alone()


async def test_two_at_the_same_time_do_not_mix(directory: DataDirectory) -> None:
    class Racing(MemoryStore):
        async def commit(self, txn: Txn) -> int:
            await super().commit(Txn(puts=(Put(CLUSTER_KEY, b"another's"),)))
            return await super().commit(txn)

    target = Racing()
    with pytest.raises(TidemillError, match="at the same time"):
        await upgrade(directory, target, RandomIds())
    assert set(await values(target)) == {CLUSTER_KEY}
