"""The largest requests about share groups and cursors, and others that came after ``support.hostile``.

They are made as those: by a function of the node's address that does what the request needs first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from support.hostile import (
    NOW,
    Address,
    Throw,
    create,
    create_table,
    group_coordinator,
    open_transaction,
    share_joining,
    very_many_topics,
)
from support.raw import RawClient, produce_body
from tidemill.records.record import Record, build_batch
from tidemill.tables.predicates.predicate import Compare, In, Or, encode

__all__ = ("HOSTILE_READERS", "HOSTILE_READERS_OF_MANY", "KEPT_OPEN")

KEPT_OPEN: list[RawClient] = []
"""Connections that a request needs: a share session ends with its own. Whoever throws closes them."""

MEMBER = str(UUID(int=1))
_ACCEPT, _RELEASE, _REJECT = 1, 2, 3


def topic_id(address: Address, name: str) -> UUID:
    with RawClient(address, 300) as client:
        topics = client.request("Metadata", 12, {"topics": [{"name": name, "topic_id": None}]}).topics
    found: UUID = topics[0].topic_id
    return found


# --- share groups


def set_group_config(address: Address, group_id: str, **configs: str) -> None:
    entries = [
        {"name": name.replace("_", "."), "config_operation": 0, "value": value}
        for name, value in configs.items()
    ]
    resource = {"resource_type": 32, "resource_name": group_id, "configs": entries}
    with RawClient(address, 300) as client:
        answer = client.request("IncrementalAlterConfigs", 1, {"resources": [resource]})
        assert answer.responses[0].error_code == 0, answer


def hold_many(address: Address, group_id: str, partitions: int, records: int) -> UUID:
    """Have member "m" of a group hold so many records of each partition of a topic; gives the topic's id."""
    create(address, group_id, partitions=partitions)
    group_coordinator(address)
    set_group_config(address, group_id, share_auto_offset_reset="earliest")
    found = topic_id(address, group_id)
    client = RawClient(address, 300)
    KEPT_OPEN.append(client)
    client.request("ApiVersions", 2, {})
    batch = build_batch([Record(None, b"v", NOW) for _ in range(records)])
    for start in range(0, partitions, 100):
        entries = [{"index": n, "records": batch} for n in range(start, min(partitions, start + 100))]
        topics = [{"name": group_id, "partition_data": entries}]
        client.request("Produce", 9, {"acks": -1, "timeout": 60_000, "topic_data": topics})
    join_until_assigned(client, group_id, group_id)
    wanted = [{"topic_id": found, "partitions": partitions_to_fetch(partitions)}]
    body = share_fetch(group_id, max_wait=10_000, max_bytes=50_000_000, max_records=partitions * records)
    held = epoch = 0
    while held < partitions * records:
        asked = {"share_session_epoch": epoch, "topics": [] if epoch else wanted}
        answer = client.request("ShareFetch", 1, body | asked)
        assert answer.error_code == 0, answer
        epoch += 1
        for each in answer.responses:
            for part in each.partitions:
                held += sum(run.last_offset - run.first_offset + 1 for run in part.acquired_records)
    return found


def join_until_assigned(client: RawClient, group_id: str, topic: str) -> None:
    """Have the member join until the state of its partitions is there, and they are assigned to it."""
    while True:
        answer = client.request("ShareGroupHeartbeat", 1, share_joining(group_id, MEMBER, topic))
        assert answer.error_code == 0, answer
        if answer.assignment is not None and answer.assignment.topic_partitions:
            return


def partitions_to_fetch(count: int) -> list[dict[str, Any]]:
    return [{"partition_index": n, "acknowledgement_batches": []} for n in range(count)]


def share_fetch(group_id: str, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"group_id": group_id, "member_id": MEMBER, "min_bytes": 1, "batch_size": 1_000}
    return body | {"forgotten_topics_data": []} | fields


def acknowledging(group_id: str, topics: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    return {"group_id": group_id, "member_id": MEMBER, "share_session_epoch": epoch, "topics": topics}


def alternately(records: int, *types: int) -> list[dict[str, Any]]:
    """A batch for each record, so that no two neighbours have the same state."""
    return [
        {"first_offset": n, "last_offset": n, "acknowledge_types": [types[n % len(types)]]}
        for n in range(records)
    ]


def acknowledge_as_many_as_a_partition_has(address: Address, group_id: str = "share-held") -> Throw:
    found = hold_many(address, group_id, 1, 2_000)
    partitions = [{"partition_index": 0, "acknowledgement_batches": alternately(2_000, _ACCEPT, _RELEASE)}]
    topics = [{"topic_id": found, "partitions": partitions}]
    return "ShareAcknowledge", 1, acknowledging(group_id, topics, -1)


def acknowledge_records_of_many_partitions(address: Address) -> Throw:
    """As many acknowledgements as a request may have, over many partitions."""
    found = hold_many(address, "share-held-wide", 90, 500)
    batches = alternately(500, _ACCEPT, _RELEASE)
    partitions = [{"partition_index": n, "acknowledgement_batches": batches} for n in range(90)]
    topics = [{"topic_id": found, "partitions": partitions}]
    return "ShareAcknowledge", 1, acknowledging("share-held-wide", topics, -1)


def acknowledge_what_nobody_holds(address: Address) -> Throw:
    found = hold_many(address, "share-not-held", 1, 1)
    partitions = [{"partition_index": 0, "acknowledgement_batches": alternately(45_000, _ACCEPT)}]
    topics = [{"topic_id": found, "partitions": partitions}]
    return "ShareAcknowledge", 1, acknowledging("share-not-held", topics, -1)


def acknowledge_with_a_type_for_each(address: Address) -> Throw:
    """One batch with a type for each of very many offsets."""
    found = hold_many(address, "share-typed", 1, 1)
    batch = {"first_offset": 0, "last_offset": 89_999, "acknowledge_types": [1, 2] * 45_000}
    partitions = [{"partition_index": 0, "acknowledgement_batches": [batch]}]
    topics = [{"topic_id": found, "partitions": partitions}]
    return "ShareAcknowledge", 1, acknowledging("share-typed", topics, -1)


def settle_with_reasons(address: Address) -> Throw:
    """A delay or a reason of the greatest length for every record."""
    found = hold_many(address, "share-settled", 8, 1_900)
    batches = [
        each | {"delay_ms": 1_000 + n, "reason": f"{n}".ljust(900, "r")}
        for n, each in enumerate(alternately(1_900, _REJECT, _RELEASE))
    ]
    partitions = [{"partition_index": n, "batches": batches} for n in range(8)]
    topics = [{"topic_id": found, "partitions": partitions}]
    body = acknowledging("share-settled", topics, -1)
    return "ShareSettle", 0, body | {"transactional_id": None, "producer_id": -1, "producer_epoch": -1}


def describe_many_share_records(address: Address) -> Throw:
    """Records of which no two neighbours have the same state."""
    api, version, body = acknowledge_as_many_as_a_partition_has(address, "share-shown")
    with RawClient(address, 300) as client:
        client.request(api, version, body)
    states = [f"state-{n}" for n in range(90_000)]
    body = {"group_id": "share-shown", "topic": "share-shown", "partition": 0, "limit": 1_000}
    return "DescribeShareRecords", 0, body | {"states": states}


def share_fetch_of_a_wide_topic(address: Address) -> Throw:
    """Partitions that all have a state, which is read for the first time."""
    create_once(address, "share-read", 500)
    group_coordinator(address)
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        join_until_assigned(client, "wide", "share-read")
    topics = [{"topic_id": topic_id(address, "share-read"), "partitions": partitions_to_fetch(500)}]
    body = share_fetch("wide", share_session_epoch=0, max_wait=0, max_bytes=1_000_000, max_records=500)
    return "ShareFetch", 1, body | {"topics": topics}


def share_group_describe_of_a_wide_group(address: Address) -> Throw:
    share_fetch_of_a_wide_topic(address)
    return "ShareGroupDescribe", 1, {"group_ids": ["wide"]}


def leave_the_wide_group(address: Address) -> None:
    leaving = share_joining("wide", MEMBER, "share-read") | {"member_epoch": -1}
    with RawClient(address, 300) as client:
        client.request("ShareGroupHeartbeat", 1, leaving)


def delete_many_share_offsets(address: Address) -> Throw:
    share_fetch_of_a_wide_topic(address)
    leave_the_wide_group(address)
    names = ["share-read", *(f"none-{n}" for n in range(4_999))]
    return "DeleteShareGroupOffsets", 0, {"group_id": "wide", "topics": [{"topic_name": n} for n in names]}


def alter_as_many_share_offsets_as_allowed(address: Address) -> Throw:
    share_fetch_of_a_wide_topic(address)
    leave_the_wide_group(address)
    topics = [{"topic_name": "share-read", "partitions": offsets(500)}]
    topics += [{"topic_name": f"none-{n}", "partitions": offsets(3)} for n in range(4_700)]
    return "AlterShareGroupOffsets", 0, {"group_id": "wide", "topics": topics}


def offsets(count: int) -> list[dict[str, Any]]:
    return [{"partition_index": n, "start_offset": 0} for n in range(count)]


def share_group_of_many_topics(address: Address) -> Throw:
    """A member that names as many topics as it may, all of which exist."""
    group_coordinator(address)
    very_many_topics(address)
    names = [f"very-many-{n}" for n in range(5_000)]
    return "ShareGroupHeartbeat", 1, share_joining("share-of-many", MEMBER, *names)


# --- cursors


def taking(name: str, topic: UUID, first: int = 0, count: int = 500) -> dict[str, Any]:
    finished = b"\x55" * 127 + b"\x01"
    positions = [
        {"partition": n, "offset": 0, "leader_epoch": 0, "started": True, "finished": finished}
        for n in range(first, first + count)
    ]
    body = {"name": name, "topic": "cursor-wide", "topic_id": topic, "region": b"r" * 1_000}
    body |= {"shown": "s" * 1_000, "owner": "o" * 1_000, "lease_ms": 60_000, "force": True}
    return body | {"partitions": positions}


def take_wide_cursors(address: Address, *names: str, partitions: int = 2_000) -> UUID:
    """Have cursors over all partitions of a wide topic, with as much in each as there can be."""
    create_once(address, "cursor-wide", 2_000)
    found = topic_id(address, "cursor-wide")
    with RawClient(address, 300) as client:
        client.request("FindCoordinator", 2, {"key": names[0], "key_type": 100})
        for name in names:
            for first in range(0, partitions, 500):
                answer = client.request("TakeCursor", 0, taking(name, found, first))
                assert answer.error_code == 0, answer
    return found


def create_once(address: Address, name: str, partitions: int) -> None:
    with RawClient(address, 300) as client:
        topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": []}
        client.request("CreateTopics", 5, {"topics": [topic], "timeout": 60_000})


def take_a_wide_cursor(address: Address) -> Throw:
    found = take_wide_cursors(address, "taken")
    return "TakeCursor", 0, taking("taken", found)


def commit_a_wide_cursor(address: Address) -> Throw:
    epochs = _epochs(address, "committed")
    position = {"offset": 7, "leader_epoch": 0, "started": True, "finished": b"\xaa" * 128}
    positions = [{**each, "previous_offset": 0, **position} for each in epochs]
    return "CommitCursor", 0, {"name": "committed", "partitions": positions}


def keep_a_wide_cursor(address: Address) -> Throw:
    epochs = _epochs(address, "kept")
    return "KeepCursor", 0, {"name": "kept", "lease_ms": 60_000, "release": False, "partitions": epochs}


def _epochs(address: Address, name: str) -> list[dict[str, int]]:
    """A wide cursor's first partitions, and the epochs of their owner."""
    found = take_wide_cursors(address, name)
    with RawClient(address, 300) as client:
        answer = client.request("TakeCursor", 0, taking(name, found))
    return [{"partition": each.partition, "epoch": each.epoch} for each in answer.partitions]


def alter_a_wide_cursor(address: Address) -> Throw:
    take_wide_cursors(address, "altered")
    position = {"offset": 7, "leader_epoch": 0, "started": True, "finished": b"\xaa" * 128}
    positions = [{"partition": n, **position} for n in range(500)]
    return "AlterCursor", 0, {"name": "altered", "paused": 1, "force": True, "partitions": positions}


def describe_a_wide_cursor(address: Address) -> Throw:
    """As many partitions as the cursor can be given."""
    create_once(address, "cursor-wide", 2_000)
    found = topic_id(address, "cursor-wide")
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for first in range(0, 20_000, 500):
            client.request("TakeCursor", 0, taking("described", found, first))
    return "DescribeCursor", 0, {"name": "described"}


def delete_a_wide_cursor(address: Address) -> Throw:
    describe_a_wide_cursor(address)
    return "DeleteCursor", 0, {"name": "described", "force": True}


def list_many_cursors(address: Address) -> Throw:
    found = take_wide_cursors(address, *(f"wide-{n}" for n in range(5)))
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for start in range(0, 1_000, 50):
            names = [f"small-{number}" for number in range(start, start + 50)]
            client.send(
                b"".join(client.encode("TakeCursor", 0, taking(each, found, count=1)) for each in names)
            )
            for _ in names:
                client.read_frame()
    return "ListCursors", 0, {"topic": None}


ROWS = 20_000


def region_through_a_heavy_filter(address: Address) -> Throw:
    """A filter over columns of nearly the greatest size, on very many rows."""
    create_table(address, "regioned", primary_key=[], row_format="json")
    rows = build_batch([Record(None, f'{{"id": {n}, "v": "v{n}"}}'.encode(), NOW) for n in range(ROWS)])
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        answer = client.request("Produce", 9, produce_body("hostile.regioned", rows))
        assert answer.responses[0].partition_responses[0].error_code == 0, answer
    terms = tuple(Compare(("v",), "=", f"value-{n}") for n in range(2_000))
    predicate = encode(Or((*terms, In(("v",), tuple(f"value-{n}" for n in range(7_000))))))
    position = {"partition": 0, "offset": 0, "leader_epoch": 0, "current_leader_epoch": -1}
    region = {"topic": "hostile.regioned", "key_prefix": b"x" * 4_096, "predicate": predicate}
    region["headers"] = [{"name": f"h{n}", "value": b"v"} for n in range(32)]
    return "FetchRegion", 0, region | {"max_bytes": 10_000_000, "partitions": [position]}


# --- tables


def look_up_many_keys(address: Address) -> Throw:
    table_id = create_table(address, "looked-up")
    body: dict[str, Any] = {"table_id": table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1}
    keys = [n.to_bytes(8, "big") for n in range(90_000)]
    return "LookupKv", 0, body | {"keys": keys, "columns": [], "min_offset": -1, "max_wait_ms": 60_000}


def look_up_many_columns(address: Address) -> Throw:
    table_id = create_table(address, "looked-at")
    body: dict[str, Any] = {"table_id": table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1}
    columns = [f"c{n}" for n in range(90_000)]
    return "LookupKv", 0, body | {"keys": [bytes(8)], "columns": columns, "min_offset": -1, "max_wait_ms": 0}


def measure_many_ranges(address: Address) -> Throw:
    create(address, "measured-log", partitions=10)
    ranges = [
        {"topic": "measured-log", "partition": n % 10, "start_offset": 0, "end_offset": -1, "max_bytes": 1}
        for n in range(10_000)
    ]
    return "MeasureLog", 0, {"ranges": ranges}


# --- transactions


def commit_many_in_a_transaction(address: Address) -> Throw:
    group_coordinator(address)
    create(address, "in-transaction", partitions=1_000)
    producer = open_transaction(address, "in-transaction", 1)
    with RawClient(address, 300) as client:
        client.request("AddOffsetsToTxn", 3, producer | {"group_id": "g"})
    entries = [
        {"partition_index": n % 1_000, "committed_offset": 1, "committed_metadata": "m"}
        for n in range(90_000)
    ]
    body = producer | {"group_id": "g", "generation_id": -1, "member_id": "", "group_instance_id": None}
    return "TxnOffsetCommit", 3, body | {"topics": [{"name": "in-transaction", "partitions": entries}]}


def markers(partitions: list[int], count: int) -> dict[str, Any]:
    marker: dict[str, Any] = {"producer_epoch": 0, "transaction_result": False, "coordinator_epoch": 0}
    marker["topics"] = [{"name": "marked", "partition_indexes": partitions}]
    return {"markers": [marker | {"producer_id": n} for n in range(count)]}


def mark_many_partitions(address: Address) -> Throw:
    create(address, "marked", partitions=500)
    return "WriteTxnMarkers", 1, markers([n % 500 for n in range(20_000)], 1)


def mark_many_unknown_partitions(address: Address) -> Throw:
    return "WriteTxnMarkers", 1, markers(list(range(20_000)), 1)


def mark_too_many_partitions(address: Address) -> Throw:
    return "WriteTxnMarkers", 1, markers(list(range(90_000)), 1)


def write_many_markers(address: Address) -> Throw:
    create_once(address, "marked", 500)
    return "WriteTxnMarkers", 1, markers([0], 20_000)


# --- the cluster


def reassign_many(address: Address) -> Throw:
    create(address, "reassigned", partitions=500)
    entries = [{"partition_index": n, "replicas": [1]} for n in range(45_000)]
    topics = [{"name": "reassigned", "partitions": entries}]
    return "AlterPartitionReassignments", 0, {"timeout": 60_000, "topics": topics}


def reassign_to_many(address: Address) -> Throw:
    create(address, "reassigned-widely")
    topics = [
        {
            "name": "reassigned-widely",
            "partitions": [{"partition_index": 0, "replicas": list(range(90_000))}],
        }
    ]
    return "AlterPartitionReassignments", 0, {"timeout": 60_000, "topics": topics}


def list_many_reassignments(address: Address) -> Throw:
    create(address, "listed-moves", partitions=500)
    topics = [{"name": "listed-moves", "partition_indexes": [n % 500 for n in range(1_000)]}] * 90
    return "ListPartitionReassignments", 0, {"timeout": 60_000, "topics": topics}


def describe_many_replicas(address: Address) -> Throw:
    return "DescribeReplicas", 0, {"topics": [f"none-{n}" for n in range(90_000)]}


def delete_many_that_exist(address: Address) -> Throw:
    names = [f"to-go-{n}" for n in range(300)]
    topics = [{"name": name, "num_partitions": 2, "replication_factor": 1} for name in names]
    with RawClient(address, 300) as client:
        client.request("CreateTopics", 5, {"topics": topics, "timeout": 60_000})
    return "DeleteTopics", 5, {"topic_names": names, "timeout": 60_000}


HOSTILE_READERS: dict[str, Callable[[Address], Throw]] = {
    each.__name__: each
    for each in (
        acknowledge_as_many_as_a_partition_has,
        acknowledge_records_of_many_partitions,
        acknowledge_what_nobody_holds,
        acknowledge_with_a_type_for_each,
        settle_with_reasons,
        describe_many_share_records,
        share_fetch_of_a_wide_topic,
        share_group_describe_of_a_wide_group,
        delete_many_share_offsets,
        alter_as_many_share_offsets_as_allowed,
        take_a_wide_cursor,
        commit_a_wide_cursor,
        keep_a_wide_cursor,
        alter_a_wide_cursor,
        describe_a_wide_cursor,
        delete_a_wide_cursor,
        list_many_cursors,
        region_through_a_heavy_filter,
        look_up_many_keys,
        look_up_many_columns,
        measure_many_ranges,
        commit_many_in_a_transaction,
        mark_many_partitions,
        mark_many_unknown_partitions,
        mark_too_many_partitions,
        write_many_markers,
        reassign_many,
        reassign_to_many,
        list_many_reassignments,
        describe_many_replicas,
        delete_many_that_exist,
    )
}
HOSTILE_READERS_OF_MANY: dict[str, Callable[[Address], Throw]] = {
    each.__name__: each for each in (share_group_of_many_topics,)
}
"""Those that need as many topics as a node may have."""
