"""The share coordinator of one node, through the node's own persister and the wire."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic, DeleteTopic
from tidemill.coordination.share_state import (
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.coordinators.persister import Transaction
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.node import Node
from tidemill.transactions.messages import Producer
from tidemill.wire.apis import NODES_ONLY

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]
DONE = StateBatch(0, 4, DeliveryState.ACKNOWLEDGED, 1)
LATER = StateBatch(5, 5, DeliveryState.AVAILABLE, 2, not_before_ms=77)
DYING = StateBatch(6, 6, DeliveryState.ARCHIVING, 5, reason="no such customer")


async def start(directory: Path, **options: Any) -> Node:
    """A node whose metadata is in its directory, so that it can be started again."""
    defaults: dict[str, Any] = {"share_state_topic_partitions": 2}
    settings = Settings(data_dir=directory, listen=Address("127.0.0.1", 0), http=None, **(defaults | options))
    node = Node(settings)
    await node.start()
    return node


async def create(broker: Broker, name: str = "t") -> UUID:
    topic_id = uuid4()
    await broker.controller.submit(CreateTopic(name=name, topic_id=topic_id, partitions=1))
    return topic_id


async def begin(broker: Broker) -> SharePartitionKey:
    """A share partition with a state that was written once."""
    key = SharePartitionKey("g", await create(broker), 0)
    await broker.persister.initialize(key, 1, 0)
    await broker.persister.read_state(key, 0)
    await broker.persister.write_state(key, 1, 0, NO_START, 5, [DONE, LATER, DYING], LogPosition(40, 2))
    return key


async def refusal(work: Awaitable[Any]) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value.code


async def test_the_topic_comes_with_the_first_use_and_has_its_own_shape(broker: Broker) -> None:
    key = SharePartitionKey("g", await create(broker), 0)
    assert SHARE_STATE.topic not in broker.image.topics
    await broker.persister.initialize(key, 1, 0)
    assert len(broker.image.topics[SHARE_STATE.topic].partitions) == 2
    assert broker.image.topics[SHARE_STATE.topic].internal


async def test_state_comes_back_as_it_was_written_also_after_a_restart(tmp_path: Path) -> None:
    node = await start(tmp_path)
    key = await begin(node.broker)
    written = await node.broker.persister.read_state(key, 3)
    assert written == (1, 0, (DONE, LATER, DYING), 5, LogPosition(40, 2))
    await node.stop()
    node = await start(tmp_path)
    assert await node.broker.persister.read_state(key, 3) == written
    assert await refusal(node.broker.persister.read_state(key, 2)) is ErrorCode.fenced_leader_epoch
    assert (await node.broker.persister.read_summary(key, -1)) == (1, 3, 0, 5)
    await node.stop()


async def test_what_the_coordinator_refuses_is_raised_with_its_code_and_not_tried_again(
    broker: Broker,
) -> None:
    persister, key = broker.persister, await begin(broker)
    never = SharePartitionKey("other", key.topic_id, 0)
    assert await refusal(persister.read_state(never, 0)) is ErrorCode.invalid_request
    assert await refusal(persister.write_state(never, 0, 0, 0, 0, [])) is ErrorCode.invalid_request
    assert await refusal(persister.initialize(key, 0, 0)) is ErrorCode.fenced_state_epoch
    await persister.initialize(key, 2, 9)
    assert await refusal(persister.write_state(key, 1, 0, 0, 0, [])) is ErrorCode.fenced_state_epoch
    await persister.read_state(key, 4)
    assert await refusal(persister.write_state(key, 2, 3, 0, 0, [])) is ErrorCode.fenced_leader_epoch
    await persister.delete(key)
    await persister.delete(key)
    assert await refusal(persister.read_state(key, 4)) is ErrorCode.invalid_request


async def test_states_go_with_their_topic(broker: Broker) -> None:
    key = await begin(broker)
    kept = SharePartitionKey("g", await create(broker, "kept"), 0)
    await broker.persister.initialize(kept, 1, 0)
    await broker.controller.submit(DeleteTopic(name="t"))
    await broker.coordinators.on_topics_deleted(["t"])
    assert broker.share_states.count() == 1
    assert await refusal(broker.persister.read_state(key, 0)) is ErrorCode.invalid_request


async def test_the_log_is_pruned_and_the_state_is_still_there(tmp_path: Path) -> None:
    options: dict[str, Any] = {"share_state_updates_per_snapshot": 3, "share_state_topic_partitions": 1}
    node = await start(tmp_path, **options)
    broker, key = node.broker, await begin(node.broker)
    idle = SharePartitionKey("idle", key.topic_id, 0)
    await broker.persister.initialize(idle, 1, 7)
    for number in range(50):
        batch = StateBatch(10 + number, 10 + number, DeliveryState.ACKNOWLEDGED, 1)
        await broker.persister.write_state(key, 1, 0, NO_START, 6 + number, [batch])
    await broker.share_states.expire()
    partition = broker.find.partition(broker.find.topic(SHARE_STATE.topic), 0)
    assert partition.log_end_offset - partition.log_start_offset <= 5
    states = {each: await broker.persister.read_state(each, 0) for each in (key, idle)}
    assert states[key].batches[-1] == StateBatch(10, 59, DeliveryState.ACKNOWLEDGED, 1)
    await node.stop()
    node = await start(tmp_path, **options)
    for each, state in states.items():
        assert await node.broker.persister.read_state(each, 0) == state
    await node.stop()


# --- in a transaction


async def start_producer(broker: Broker, transactional_id: str = "x") -> Producer:
    from tidemill.server.coordinators.transactions import TRANSACTIONS

    await broker.coordinators.ensure_topic(TRANSACTIONS)
    answer = await broker.transactions.init_producer_id(transactional_id, 60_000)
    assert answer.producer is not None
    return answer.producer


@pytest.mark.parametrize("commit", [True, False])
async def test_a_write_in_a_transaction_counts_when_that_commits(tmp_path: Path, commit: bool) -> None:
    node = await start(tmp_path)
    broker, key = node.broker, await begin(node.broker)
    producer = await start_producer(broker)
    accepted = StateBatch(5, 6, DeliveryState.ACKNOWLEDGED, 2)
    await broker.persister.write_in_transaction(key, 1, 0, [accepted], Transaction("x", *producer))
    pending = accepted._replace(producer_id=producer.id, producer_epoch=producer.epoch)
    assert (await broker.persister.read_state(key, 0)).batches == (DONE, pending)
    await node.stop()

    node = await start(tmp_path)
    broker = node.broker
    assert (await broker.persister.read_state(key, 1)).batches == (DONE, pending), "also after a restart"
    ended = await broker.transactions.end("x", producer, commit=commit, new_epoch=False)
    assert ended.error is ErrorCode.none
    after = await broker.persister.read_state(key, 1)
    assert after.batches == ((DONE, accepted) if commit else (DONE, LATER, DYING))
    assert after.delivery_complete_count == (7 if commit else 5)
    await node.stop()


async def test_a_write_of_a_producer_that_was_fenced_is_refused(broker: Broker) -> None:
    key = await begin(broker)
    old = await start_producer(broker)
    new = await start_producer(broker)
    accepted = StateBatch(5, 6, DeliveryState.ACKNOWLEDGED, 2)
    write = broker.persister.write_in_transaction
    assert await refusal(write(key, 1, 0, [accepted], Transaction("x", *old))) in (
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_epoch,
    )
    await write(key, 1, 0, [accepted], Transaction("x", *new))
    assert await refusal(write(key, 0, 0, [accepted], Transaction("x", *new))) is ErrorCode.fenced_state_epoch


# --- the clients' port


async def test_clients_are_refused_and_not_told_of_these_apis(broker: Broker, ask: Ask) -> None:
    key = await begin(broker)
    begun, written = {"state_epoch": 9, "start_offset": 9}, {"leader_epoch": 9, "state_batches": []}
    for api, version, fields in (
        ("InitializeShareGroupState", 0, begun),
        ("ReadShareGroupState", 0, {"leader_epoch": 9}),
        ("WriteShareGroupState", 0, begun | written),
        ("WriteShareGroupState", 1, begun | written),
        ("DeleteShareGroupState", 0, {}),
        ("ReadShareGroupStateSummary", 0, {"leader_epoch": 9}),
        ("ReadShareGroupStateSummary", 1, {"leader_epoch": 9}),
    ):
        topics = [{"topic_id": key.topic_id, "partitions": [{"partition": 0, **fields}]}]
        answer = await ask(broker, api, version, group_id="g", topics=topics)
        ((result,),) = (each.partitions for each in answer.results)
        assert ErrorCode(result.error_code) is ErrorCode.cluster_authorization_failed, api
        assert "among themselves" in result.error_message
    assert (await broker.persister.read_state(key, 0)).batches == (DONE, LATER, DYING)
    advertised = await ask(broker, "ApiVersions", 3, client_software_name="c", client_software_version="1")
    assert not NODES_ONLY & {each.api_key for each in advertised.api_keys}


async def test_the_coordinator_of_a_share_partition_is_found_by_its_key(broker: Broker, ask: Ask) -> None:
    key = SharePartitionKey("with:colons", await create(broker), 3)
    assert SharePartitionKey.parse(str(key)) == key
    answer = await ask(broker, "FindCoordinator", 6, key_type=2, coordinator_keys=[str(key), "g:x:0", "g"])
    found, *malformed = answer.coordinators
    assert (found.error_code, found.node_id) == (ErrorCode.none, broker.node_id)
    assert [each.error_code for each in malformed] == [ErrorCode.invalid_request] * 2
