from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.control.commands import (
    AdmitNode,
    AllocateProducerIds,
    BumpLeaderEpochs,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    RegisterNode,
    SetClusterId,
    SetNodeConfigs,
    SetNodeTags,
    SetTopicConfigs,
)
from tidemill.control.draft import Draft
from tidemill.control.image import MetadataDelta, MetadataImage, TopicPartition
from tidemill.control.placement import ControlLimits
from tidemill.control.records import (
    CONTROLLER_KEY,
    AliveRecord,
    ControllerRecord,
    PartitionsRecord,
    Record,
    TopicRecord,
    alive_key,
    chunk_key,
    encode,
)
from tidemill.control.stores.store import Change, ChangeBatch, Entry, StoredKeys
from tidemill.control.tables.commands import (
    AddTablePartition,
    AlterDatabase,
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
from tidemill.control.tables.records import LeaseRecord, lease_key, table_key
from tidemill.errors import CorruptData

NAMES = st.sampled_from(["a", "b.c", "b_c", "d", "__consumer_offsets", "b.c.x"])
IDS = st.uuids(version=4)
CONFIGS = st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["1", "2"]), max_size=2)
COMMANDS = st.one_of(
    st.builds(CreateTopic, name=NAMES, topic_id=IDS, partitions=st.integers(1, 4), configs=CONFIGS),
    st.builds(CreateTopic, name=NAMES, topic_id=IDS, partitions=st.sampled_from([999, 1_000, 2_001])),
    st.builds(DeleteTopic, name=NAMES),
    st.builds(CreatePartitions, name=NAMES, new_count=st.sampled_from([2, 5, 1_001])),
    st.builds(SetTopicConfigs, name=NAMES, configs=CONFIGS),
    st.builds(BumpLeaderEpochs, name=NAMES, partitions=st.sampled_from([(0,), (0, 1)])),
    st.builds(SetNodeConfigs, node_id=st.sampled_from([None, 0, 1]), configs=CONFIGS),
    st.builds(AllocateProducerIds, count=st.integers(1, 5)),
    st.builds(SetClusterId, cluster_id=st.just("cluster")),
    st.builds(SetNodeTags, node_id=st.integers(0, 2), tags=st.sampled_from([(), ("x",)])),
    st.builds(
        RegisterNode,
        node_id=st.integers(0, 2),
        name=st.sampled_from(["n0", "n1", "n2"]),
        host=st.just("h"),
        port=st.integers(1, 3),
        incarnation=IDS,
    ),
)
DATABASES = st.sampled_from(["b", "e"])
TABLES = st.sampled_from(["b.c", "b.c_x", "b_c.x", "e.t"])
VALUES = st.sampled_from(["x", "y.z", "y_z"])
PROPERTIES = st.dictionaries(st.sampled_from(["p", "q"]), st.sampled_from(["1", "2"]), max_size=2)
TABLE_COMMANDS = st.one_of(
    st.builds(CreateDatabase, name=DATABASES, created_ms=st.just(1), properties=PROPERTIES),
    st.builds(AlterDatabase, name=DATABASES, set_properties=PROPERTIES, comment=st.sampled_from([None, "c"])),
    st.builds(DropDatabase, name=DATABASES),
    *[
        st.builds(
            CreateTable,
            name=TABLES,
            topic_id=IDS,
            schema=st.binary(max_size=2),
            buckets=st.sampled_from([1, 2, 1_001]),
            bucket_map=st.just(b"map"),
            row_format=st.just("row"),
            key_format=st.just("raw"),
            partition_column=st.sampled_from([None, "day", "day"]),
            created_ms=st.just(2),
            topic_configs=CONFIGS,
        )
    ]
    * 3,
    st.builds(
        AlterTable,
        name=TABLES,
        base_schema_count=st.sampled_from([None, 1]),
        new_schema=st.none() | st.binary(max_size=2),
        set_properties=PROPERTIES,
        topic_configs=st.none() | CONFIGS,
    ),
    st.builds(DropTable, name=TABLES),
    *[st.builds(AddTablePartition, table=TABLES, value=VALUES, topic_id=IDS)] * 3,
    st.builds(DropTablePartition, table=TABLES, value=VALUES),
    *[
        st.builds(
            PutLease,
            lease=st.builds(
                LeaseImage,
                lease_id=st.sampled_from(["l1", "l2", "l3"]),
                table_id=st.integers(1, 3),
                holder=st.just("me"),
                expires_at_ms=st.integers(1, 9),
                snapshots=st.sampled_from(
                    [
                        (),
                        (LeasedSnapshot(0, 0, 7, 100), LeasedSnapshot(0, 1, 8, 5)),
                        (LeasedSnapshot(0, 1, 9, 4), LeasedSnapshot(0, 1, 10, 5)),
                    ]
                ),
            ),
            renew=st.booleans(),
        )
    ]
    * 2,
    st.builds(DropLease, lease_id=st.sampled_from(["l1", "l2"])),
    st.builds(DropExpiredLeases, now_ms=st.integers(1, 9)),
)
BATCHES = st.lists(st.lists(COMMANDS | TABLE_COMMANDS, min_size=1, max_size=4), max_size=12) | st.lists(
    st.lists(TABLE_COMMANDS, min_size=1, max_size=4), max_size=20
)
NODE = RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1))


class History:
    """A store in miniature: commits drafts of commands and keeps every state."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self.entries: dict[str, Entry] = {}

    def commit(self, *commands: Any) -> MetadataImage:
        draft = Draft(self.image, ControlLimits())
        draft.fill(commands)
        txn = draft.txn()
        changes = [Change(put.key, put.value) for put in txn.puts]
        changes += [Change(key, None) for key in txn.deletes if key in self.entries]
        if changes:
            revision = self.image.revision + 1
            self.image = self.image.apply(ChangeBatch(revision, tuple(sorted(changes))))
            for key, value in changes:
                if value is None:
                    del self.entries[key]
                else:
                    self.entries[key] = Entry(value, revision)
        return self.image

    def put(self, key: str, record: Record | None) -> None:
        """Write a record that no command writes, or delete it."""
        revision = self.image.revision + 1
        value = None if record is None else encode(record)
        self.image = self.image.apply(ChangeBatch(revision, (Change(key, value),)))
        if value is None:
            del self.entries[key]
        else:
            self.entries[key] = Entry(value, revision)


@given(BATCHES)
def test_the_fold_of_a_watch_equals_the_fold_of_a_full_read(batches: Any) -> None:
    history = History()
    history.commit(NODE)
    for commands in batches:
        image = history.commit(*commands)
        assert image == MetadataImage.from_stored(StoredKeys(image.revision, history.entries))


@given(BATCHES)
def test_an_image_agrees_with_itself(batches: Any) -> None:
    history = History()
    history.commit(NODE)
    for commands in batches:
        image = history.commit(*commands)
        assert {topic.id: topic.name for topic in image.topics.values()} == dict(image.topic_names_by_id)
        assert all(image.topic_by_id(topic.id) is topic for topic in image.topics.values())
        counted = {0: 0, 1: 0, 2: 0}
        for topic in image.topics.values():
            for partition in topic.partitions:
                assert partition.leader in partition.isr
                for node_id in partition.replicas:
                    counted[node_id] += 1
        assert {node: count for node, count in counted.items() if count} == image.replica_counts


@given(BATCHES)
def test_tables_agree_with_their_topics_databases_and_leases(batches: Any) -> None:
    history = History()
    history.commit(NODE)
    for commands in batches:
        image = history.commit(*commands)
        assert {table.id: table for table in image.tables.values()} == dict(image.tables_by_id)
        owners = {}
        for name, table in image.tables.items():
            assert table.name == name
            assert table.database in image.databases
            assert table.id < image.catalog.next_table_id
            assert (table.partition_column is None) == ([part.value for part in table.partitions] == [None])
            for part in table.partitions:
                assert part.id < table.next_partition_id
                assert table.partition(part.value) is part
                owners[part.topic_id] = (table, part)
                behind = image.topic_by_id(part.topic_id)
                assert behind is not None
                assert (behind.name, len(behind.partitions)) == (part.topic, table.buckets)
        for topic in image.topics.values():
            assert image.table_of_topic(topic.id) == owners.get(topic.id)
        for table_id in range(5):
            leases = [image.leases[key] for key in sorted(image.leases)]
            assert list(image.leases_of(table_id)) == [each for each in leases if each.table_id == table_id]
            assert table_id in image.tables_by_id or not image.leases_of(table_id)


@given(BATCHES)
def test_what_is_counted_and_indexed_of_a_catalog_is_what_there_is(batches: Any) -> None:
    history = History()
    history.commit(NODE)
    for commands in batches:
        catalog = history.commit(*commands).catalog
        for database in catalog.databases:
            names = [name for name in sorted(catalog.tables) if name.startswith(f"{database}.")]
            assert [table.name for table in catalog.tables_in(database)] == names
        assert catalog.database_bytes == sum(each.size_bytes for each in catalog.databases.values())
        assert catalog.table_bytes == sum(each.size_bytes for each in catalog.tables.values())
        leased: dict[tuple[int, int, int], list[int]] = {}
        for lease in catalog.leases.values():
            for held in lease.snapshots:
                bucket = lease.table_id, held.partition_id, held.bucket
                leased.setdefault(bucket, []).append(held.log_offset)
        assert catalog.leased_snapshots == sum(map(len, leased.values()))
        assert set(catalog.leased_offsets) == {table_id for table_id, _, _ in leased}
        for bucket, offsets in leased.items():
            assert catalog.leased_offsets_of(*bucket) == tuple(sorted(offsets))
        assert catalog.leased_offsets_of(1, 0, 10**6) == ()


@given(BATCHES)
def test_no_table_or_partition_number_is_given_twice(batches: Any) -> None:
    history = History()
    history.commit(NODE)
    seen: dict[int, str] = {}
    parts: dict[tuple[int, int], UUID] = {}
    for commands in batches:
        image = history.commit(*commands)
        for table in image.tables.values():
            assert seen.setdefault(table.id, table.name) == table.name
            for part in table.partitions:
                assert parts.setdefault((table.id, part.id), part.topic_id) == part.topic_id


@given(BATCHES)
def test_leader_epochs_never_go_back(batches: Any) -> None:
    history = History()
    old = history.commit(NODE)
    for commands in batches:
        new = history.commit(*commands)
        for topic in new.topics.values():
            before = old.topic_by_id(topic.id)
            for was, now in zip(before.partitions if before else (), topic.partitions, strict=False):
                assert now.leader_epoch >= was.leader_epoch
        old = new


@given(BATCHES)
def test_a_delta_over_many_revisions_turns_the_old_topics_into_the_new_ones(batches: Any) -> None:
    history = History()
    old = history.commit(NODE)
    for commands in batches:
        history.commit(*commands)
    new = history.image
    delta = MetadataDelta.between(old, new)
    names = {topic.name for topic in old.topics.values()} - {topic.name for topic in delta.deleted}
    names |= {topic.name for topic in delta.created}
    assert names == set(new.topics)


@given(BATCHES, BATCHES)
def test_a_delta_over_many_revisions_turns_the_old_tables_into_the_new_ones(earlier: Any, later: Any) -> None:
    history = History()
    history.commit(NODE)
    for commands in earlier:
        history.commit(*commands)
    old, entries = history.image, dict(history.entries)
    for commands in later:
        history.commit(*commands)
    new = history.image
    # A full read makes new objects of everything; what did not change is not told all the same.
    for image in (new, MetadataImage.from_stored(StoredKeys(new.revision, history.entries))):
        delta = MetadataDelta.between(old, image)
        tables = {table.id: table for table in old.tables.values()}
        for table in delta.tables_dropped:
            assert tables.pop(table.id) == table
        for table in delta.tables_changed:
            assert tables[table.id] != table
            tables[table.id] = table
        for table in delta.tables_created:
            assert table.id not in tables
            tables[table.id] = table
        assert tables == dict(new.tables_by_id)
        assert delta.leases_changed == (dict(old.leases) != dict(new.leases))
    assert old == MetadataImage.from_stored(StoredKeys(old.revision, entries))


def test_a_delta_names_what_happened() -> None:
    history = History()

    def topic(name: str, **fields: Any) -> CreateTopic:
        return CreateTopic(name=name, topic_id=uuid4(), partitions=3, **fields)

    old = history.commit(
        NODE, topic("same"), topic("gone"), topic("grown"), topic("set"), topic("again"), topic("led")
    )
    new = history.commit(
        topic("fresh"),
        DeleteTopic(name="gone"),
        CreatePartitions(name="grown", new_count=5),
        SetTopicConfigs(name="set", configs={"a": "1"}),
        DeleteTopic(name="again"),
        topic("again"),
        BumpLeaderEpochs(name="led", partitions=(1,)),
    )
    delta = MetadataDelta.between(old, new)
    assert [t.name for t in delta.created] == ["again", "fresh"]
    assert delta.deleted == (old.topics["again"], old.topics["gone"])
    assert delta.created[0].id != delta.deleted[0].id
    assert delta.new_partitions == {"grown": range(3, 5)}
    assert delta.config_changed == ("set",)
    assert delta.leader_changed == (TopicPartition("led", 1),)
    assert (delta.nodes_changed, delta.node_configs_changed) == (False, False)
    moved = history.commit(RegisterNode(node_id=0, name="n0", host="h", port=2, incarnation=uuid4()))
    assert MetadataDelta.between(new, moved).nodes_changed


def table(name: str, **fields: Any) -> CreateTable:
    defaults = {"schema": b"s", "bucket_map": b"m", "row_format": "row", "key_format": "raw", "created_ms": 1}
    return CreateTable(name=name, topic_id=uuid4(), **{**defaults, **fields})


def test_a_delta_names_what_happened_to_tables() -> None:
    history = History()
    old = history.commit(
        NODE,
        table("d.same"),
        table("d.gone"),
        table("d.again"),
        table("d.set"),
        table("d.parted", partition_column="p"),
    )
    assert [each.name for each in MetadataDelta.between(MetadataImage(), old).tables_created] == [
        "d.again",
        "d.gone",
        "d.parted",
        "d.same",
        "d.set",
    ]
    new = history.commit(
        DropTable(name="d.gone"),
        DropTable(name="d.again"),
        table("d.again"),
        table("d.fresh"),
        AlterTable(name="d.set", new_schema=b"s2"),
        AddTablePartition(table="d.parted", value="x", topic_id=uuid4()),
    )
    delta = MetadataDelta.between(old, new)
    assert delta.tables_created == (new.tables["d.again"], new.tables["d.fresh"])
    assert delta.tables_dropped == (old.tables["d.again"], old.tables["d.gone"])
    assert delta.tables_changed == (new.tables["d.parted"], new.tables["d.set"])
    assert not delta.leases_changed
    lease = LeaseImage(lease_id="l", table_id=1, holder="h", expires_at_ms=1, snapshots=())
    leased = history.commit(PutLease(lease=lease))
    assert MetadataDelta.between(new, leased).leases_changed
    assert not MetadataDelta.between(new, leased).tables_changed
    assert not MetadataDelta.between(leased, history.commit(table("d.more"))).leases_changed


def test_tables_that_trade_places_in_one_transaction_are_the_new_ones() -> None:
    history = History()
    history.commit(NODE, table("a.b_c"), table("a.p", partition_column="x"))
    history.commit(AddTablePartition(table="a.p", value="q", topic_id=uuid4()))
    new = history.commit(DropTable(name="a.b_c"), table("a_b.c"), DropTable(name="a.p"), table("a.p_q"))
    assert set(new.tables) == {"a_b.c", "a.p_q"}
    assert set(new.topics) == {"a_b.c", "a.p_q"}
    for topic in new.topics.values():
        owner = new.table_of_topic(topic.id)
        assert owner is not None
        assert owner[0] is new.tables[topic.name]
    assert new == MetadataImage.from_stored(StoredKeys(new.revision, history.entries))


def test_a_table_that_is_stored_under_another_key_keeps_its_number_and_its_topic() -> None:
    history = History()
    old = history.commit(NODE, table("d.old"))
    was = old.tables["d.old"]
    for name in ("d.a", "d.z"):
        moved = replace(was, name=name)
        changes = [Change(table_key(name), encode(moved.to_record())), Change(table_key("d.old"), None)]
        new = old.apply(ChangeBatch(old.revision + 1, tuple(sorted(changes))))
        assert dict(new.tables) == {name: moved}
        assert dict(new.tables_by_id) == {was.id: moved}
        assert new.table_of_topic(was.partitions[0].topic_id) == (moved, was.partitions[0])


def test_a_lease_whose_table_is_gone_is_folded_all_the_same() -> None:
    record = LeaseRecord(lease_id="l", table_id=99, holder="h", expires_at_ms=5, snapshots=())
    image = MetadataImage().apply(ChangeBatch(1, (Change(lease_key("l"), encode(record)),)))
    assert [lease.lease_id for lease in image.leases_of(99)] == ["l"]
    assert not image.apply(ChangeBatch(2, (Change(lease_key("l"), None),))).leases_of(99)


def test_a_new_schema_of_a_table_with_many_partitions_leaves_the_way_to_its_topics_as_it_is() -> None:
    history = History()
    history.commit(NODE, table("d.t", partition_column="p"))
    for i in range(40):
        history.commit(AddTablePartition(table="d.t", value=str(i), topic_id=uuid4()))
    old = history.image
    new = history.commit(AlterTable(name="d.t", new_schema=b"s2"))
    assert new.catalog.log_owners is old.catalog.log_owners
    changed = history.commit(AddTablePartition(table="d.t", value="more", topic_id=uuid4()))
    before, after = new.catalog.log_owners._shards, changed.catalog.log_owners._shards
    assert sum(a is not b for a, b in zip(before, after, strict=True)) == 1


def test_an_image_without_a_change_of_tables_keeps_the_catalog_itself() -> None:
    history = History()
    old = history.commit(NODE, table("d.t"))
    assert history.commit(CreateTopic(name="u", topic_id=uuid4(), partitions=1)).catalog is old.catalog


def test_an_old_transaction_is_not_applied_again() -> None:
    image = History().commit(NODE)
    with pytest.raises(ValueError, match="not newer"):
        image.apply(ChangeBatch(image.revision, ()))


def test_keys_of_others_move_the_revision_only() -> None:
    image = History().commit(NODE)
    after = image.apply(ChangeBatch(9, (Change("election/controller", b"me"),)))
    assert after.revision == 9
    assert after.key_revisions == image.key_revisions


def test_partitions_without_their_topic_or_missing_chunks_are_corruption() -> None:
    topic = TopicRecord(name="t", topic_id=UUID(int=5), partition_count=2, configs={})
    with pytest.raises(CorruptData, match="2 partitions"):
        MetadataImage().apply(ChangeBatch(1, (Change("topics/t", encode(topic)),)))
    chunk = Change(chunk_key(UUID(int=6), 0), encode(PartitionsRecord(partitions=())))
    with pytest.raises(CorruptData, match="does not exist"):
        MetadataImage().apply(ChangeBatch(1, (chunk,)))


def test_a_change_to_one_topic_of_thousands_copies_only_its_surroundings() -> None:
    history = History()
    history.commit(NODE)
    for _ in range(50):
        history.commit(*(CreateTopic(name=str(uuid4()), topic_id=uuid4(), partitions=1) for _ in range(40)))
    old = history.image
    assert len(old.topics) == 2_000
    new = history.commit(CreateTopic(name="one-more", topic_id=uuid4(), partitions=1))
    for name in ("topics", "topic_names_by_id", "topic_names_by_normalised", "key_revisions"):
        before, after = getattr(old, name)._shards, getattr(new, name)._shards
        # A topic has one entry in each, and two stored keys.
        assert 1 <= sum(a is not b for a, b in zip(before, after, strict=True)) <= 2


@given(BATCHES)
def test_the_folds_of_a_replicated_cluster_are_equal_too(batches: Any) -> None:
    history = History()
    history.commit(SetClusterId(cluster_id="c", replicated=True), NODE)
    incarnation = NODE.incarnation
    history.put(alive_key(0), AliveRecord(incarnation=incarnation))
    history.commit(AdmitNode(node_id=0, incarnation=incarnation))
    history.put(CONTROLLER_KEY, ControllerRecord(node_id=0))
    for commands in batches:
        image = history.commit(*commands)
        assert image == MetadataImage.from_stored(StoredKeys(image.revision, history.entries))
        assert len(image.deleted_topics) == sum(key.startswith("deleted/") for key in history.entries)
    history.put(alive_key(0), None)
    history.put(CONTROLLER_KEY, None)
    image = history.image
    assert image == MetadataImage.from_stored(StoredKeys(image.revision, history.entries))
    assert not image.live_nodes
