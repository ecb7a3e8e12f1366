from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.control.commands import (
    AllocateProducerIds,
    BumpLeaderEpochs,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    RegisterNode,
    SetClusterId,
    SetNodeConfigs,
    SetTopicConfigs,
)
from tidemill.control.draft import Draft
from tidemill.control.image import MetadataDelta, MetadataImage, TopicPartition
from tidemill.control.placement import ControlLimits
from tidemill.control.records import PartitionsRecord, TopicRecord, chunk_key, encode
from tidemill.control.store import Change, ChangeBatch, Entry, Snapshot
from tidemill.errors import CorruptData

NAMES = st.sampled_from(["a", "b.c", "b_c", "d", "__consumer_offsets"])
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
    st.builds(
        RegisterNode,
        node_id=st.integers(0, 2),
        name=st.sampled_from(["n0", "n1", "n2"]),
        host=st.just("h"),
        port=st.integers(1, 3),
        incarnation=IDS,
    ),
)
BATCHES = st.lists(st.lists(COMMANDS, min_size=1, max_size=4), max_size=12)
NODE = RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1))


class History:
    """A store in miniature: commits drafts of commands and keeps every state."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        self.entries: dict[str, Entry] = {}

    def commit(self, *commands) -> MetadataImage:
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


@given(BATCHES)
def test_the_fold_of_a_watch_equals_the_fold_of_a_full_read(batches) -> None:
    history = History()
    history.commit(NODE)
    for commands in batches:
        image = history.commit(*commands)
        assert image == MetadataImage.from_snapshot(Snapshot(image.revision, history.entries))


@given(BATCHES)
def test_an_image_agrees_with_itself(batches) -> None:
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
def test_leader_epochs_never_go_back(batches) -> None:
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
def test_a_delta_over_many_revisions_turns_the_old_topics_into_the_new_ones(batches) -> None:
    history = History()
    old = history.commit(NODE)
    for commands in batches:
        history.commit(*commands)
    new = history.image
    delta = MetadataDelta.between(old, new)
    names = {topic.name for topic in old.topics.values()} - {topic.name for topic in delta.deleted}
    names |= {topic.name for topic in delta.created}
    assert names == set(new.topics)


def test_a_delta_names_what_happened() -> None:
    history = History()

    def topic(name: str, **fields) -> CreateTopic:
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
