"""Fetch, in every version, through the wire format; the test decides when a flush happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.exchange import Answer, Exchange, fetch_part, produce_part
from support.fake_connection import filled
from tidemill.control.commands import BumpLeaderEpochs, DeleteTopic
from tidemill.errors import ErrorCode, SyncFailed
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.server.handlers.records import fetch as handler
from tidemill.wire.apis import APIS

VERSIONS = APIS[1].versions
WITH_SESSIONS = [version for version in VERSIONS if version >= 7]
LONG = 30_000
READ_COMMITTED = 1


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange({"t": (3, {}), "u": (1, {})}) as started:
        yield started


def parts(answer: Answer) -> list[Any]:
    return [partition for topic in answer.value.responses for partition in topic.partitions]


def values(partition: Any) -> list[str]:
    """What is in the whole batches; the last one may be cut short."""
    data, found = bytes(partition.records or b""), []
    while len(data) >= HEADER_BYTES and parse_header(data).size_bytes <= len(data):
        size = parse_header(data).size_bytes
        found += [(record.value or b"").decode() for record in read_records(data[:size])]
        data = data[size:]
    return found


async def got(node: Exchange, answer: Answer) -> Any:
    """The one partition of an answer that is there at once."""
    await node.settle()
    (partition,) = parts(answer)
    return partition


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often waiting requests look at their partitions."""
    count = [0]
    original = handler._Fetch._is_ready

    def counted(self: handler._Fetch) -> Generator[None, None, bool]:
        count[0] += 1
        return original(self)

    monkeypatch.setattr(handler._Fetch, "_is_ready", counted)
    return count


# --- what is read


@pytest.mark.parametrize("version", VERSIONS)
async def test_records_come_back_as_they_were_written(node: Exchange, version: int) -> None:
    await node.write("t", "a", "b")
    await node.write("t", "c")
    partition = await got(node, node.fetch(version, fetch_part("t", 1)))
    assert values(partition) == ["a", "b", "c"], "whole batches, from the one that holds the offset"
    assert (partition.error_code, partition.high_watermark, partition.last_stable_offset) == (0, 3, 3)


@pytest.mark.parametrize("version", VERSIONS)
async def test_nothing_above_the_high_watermark_is_read(node: Exchange, version: int) -> None:
    await node.write("t", "durable")
    node.produce(9, produce_part("t", plain_batch("not yet")), acks=0)
    partition = await got(node, node.fetch(version, fetch_part("t")))
    assert values(partition) == ["durable"]
    assert partition.high_watermark == 1
    for offset in (1, 2):
        at_the_end = await got(node, node.fetch(version, fetch_part("t", offset)))
        assert (at_the_end.error_code, values(at_the_end)) == (0, []), "there is just nothing to read yet"
    behind = await got(node, node.fetch(version, fetch_part("t", 3)))
    assert behind.error_code == ErrorCode.offset_out_of_range


async def test_a_fetch_between_the_high_watermark_and_the_log_end_waits_for_records(node: Exchange) -> None:
    node.produce(9, produce_part("t", plain_batch("a", "b")), acks=0)
    await node.settle()
    answer = node.fetch(11, fetch_part("t", 2), fetch_part("u", 0, max_bytes=0), max_wait=LONG, min_bytes=1)
    await node.settle()
    assert not answer.arrived
    await node.write("t", "c")
    assert values(parts(answer)[0]) == ["c"]


@pytest.mark.parametrize("version", [version for version in VERSIONS if version >= 5])
@pytest.mark.parametrize("offset", [-1, 1, 4, 1000])
async def test_an_offset_out_of_range_is_told_with_the_range(
    node: Exchange, version: int, offset: int
) -> None:
    await node.write("t", "a", "b", "c")
    node.partition("t").delete_records(2)
    partition = await got(node, node.fetch(version, fetch_part("t", offset)))
    assert partition.error_code == ErrorCode.offset_out_of_range
    assert (partition.log_start_offset, partition.high_watermark) == (2, 3)


@pytest.mark.parametrize(
    ("topic", "index", "expected"),
    [
        ("missing", 0, ErrorCode.unknown_topic_or_partition),
        ("t", 3, ErrorCode.unknown_topic_or_partition),
        ("t", -1, ErrorCode.unknown_topic_or_partition),
    ],
)
async def test_unknown_partitions_are_told_beside_known_ones(
    node: Exchange, topic: str, index: int, expected: ErrorCode
) -> None:
    await node.write("u", "v")
    answer = node.fetch(11, fetch_part(topic, 0, index), fetch_part("u"), max_wait=LONG, min_bytes=10**6)
    await node.settle()
    unknown, known = parts(answer)
    assert unknown.error_code == expected
    assert values(known) == ["v"]


@pytest.mark.parametrize("topic_id", [UUID(int=0), UUID(int=5)])
async def test_an_unknown_topic_id_is_told(node: Exchange, topic_id: UUID) -> None:
    partition = await got(node, node.fetch(13, fetch_part(topic_id)))
    assert partition.error_code == ErrorCode.unknown_topic_id


async def test_a_stopped_partition_is_told(node: Exchange) -> None:
    await node.write("t", "a")
    node.produce(9, produce_part("t", plain_batch("b")))
    node.storage.fail_next("sync", ".log", SyncFailed("on purpose"))
    await node.flush()
    partition = await got(node, node.fetch(11, fetch_part("t")))
    assert partition.error_code == ErrorCode.kafka_storage_error


# --- how much


async def test_the_first_batch_comes_whole_however_small_the_limits(node: Exchange) -> None:
    for _ in range(2):
        await node.write("t", "x" * 100)
        await node.write("u", "y" * 100)
    answer = node.fetch(11, fetch_part("t", max_bytes=1), fetch_part("u"), max_bytes=1)
    await node.settle()
    first, second = parts(answer)
    assert values(first) == ["x" * 100]
    assert (second.error_code, values(second), second.high_watermark) == (0, [], 2)


async def test_an_empty_partition_leaves_the_first_batch_to_the_next(node: Exchange) -> None:
    await node.write("u", "y" * 100)
    answer = node.fetch(11, fetch_part("t"), fetch_part("u"), max_bytes=1)
    await node.settle()
    assert [values(partition) for partition in parts(answer)] == [[], ["y" * 100]]


async def test_max_bytes_is_shared_by_the_partitions(node: Exchange) -> None:
    for index in range(3):
        for _ in range(4):
            await node.write("t", "x" * 1_000, partition=index)
    answer = node.fetch(11, *(fetch_part("t", 0, index) for index in range(3)), max_bytes=5_500)
    await node.settle()
    assert [len(values(partition)) for partition in parts(answer)] == [4, 1, 0]


async def test_max_bytes_of_a_partition_is_its_own(node: Exchange) -> None:
    for _ in range(4):
        await node.write("t", "x" * 1_000)
        await node.write("u", "x" * 1_000)
    answer = node.fetch(11, fetch_part("t", max_bytes=2_500), fetch_part("u", max_bytes=500))
    await node.settle()
    assert [len(values(partition)) for partition in parts(answer)] == [2, 0]


async def test_partitions_that_take_long_to_read_are_read_in_several_turns(
    node: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.write("t", "a")
    monkeypatch.setattr("tidemill.coordination.turns.SLICE_SECONDS", 0.0)
    answer = node.fetch(12, *(fetch_part("t") for _ in range(3)))
    assert not answer.arrived, "the rest is left to later turns"
    await node.settle()
    assert [values(each) for each in parts(answer)] == [["a"]] * 3


async def test_an_out_of_range_offset_is_told_also_when_there_is_no_room_left(node: Exchange) -> None:
    await node.write("t", "x" * 100)
    answer = node.fetch(11, fetch_part("t"), fetch_part("u", 7), max_bytes=1)
    await node.settle()
    assert parts(answer)[1].error_code == ErrorCode.offset_out_of_range


async def test_answers_do_not_go_far_over_the_nodes_budget(node: Exchange) -> None:
    for _ in range(4):
        await node.write("t", "x" * 1_000)
    other = filled(node.node.budget, node.node.budget.limits.total_bytes)
    partition = await got(node, node.fetch(11, fetch_part("t")))
    assert len(values(partition)) == 1
    other.close()


# --- waiting


async def test_a_fetch_waits_for_min_bytes_and_is_woken_by_a_flush(node: Exchange, looks: list[int]) -> None:
    answer = node.fetch(11, fetch_part("t"), fetch_part("u"), max_wait=LONG, min_bytes=1)
    await node.settle()
    assert (answer.arrived, looks) == (False, [1])
    node.produce(9, produce_part("u", plain_batch("v")), acks=0)
    await node.settle()
    assert (answer.arrived, looks) == (False, [1]), "a write that is not durable wakes nobody"
    await node.flush()
    assert [values(partition) for partition in parts(answer)] == [[], ["v"]]
    assert looks == [2]


async def test_too_few_bytes_keep_it_waiting(node: Exchange, looks: list[int]) -> None:
    answer = node.fetch(11, fetch_part("t"), fetch_part("u"), max_wait=LONG, min_bytes=1_500)
    arrived = []
    for topic in ("t", "u"):
        await node.write(topic, "x" * 1_000)
        arrived.append(answer.arrived)
    assert arrived == [False, True], "the bytes of all partitions count"
    assert looks == [3]


async def test_many_partitions_moving_at_once_wake_it_once(node: Exchange, looks: list[int]) -> None:
    answer = node.fetch(
        11, *(fetch_part("t", 0, index) for index in range(3)), max_wait=LONG, min_bytes=10**6
    )
    await node.settle()
    for index in range(3):
        partition = node.partition("t", index)
        partition.append(plain_batch("v"), node.node.now_ms)
        job = partition.begin_flush()
        assert job is not None
        job.run()
        partition.flushed(job)
    await node.settle()
    assert (answer.arrived, looks) == (False, [2])


async def test_after_max_wait_it_is_answered_with_what_there_is(node: Exchange) -> None:
    await node.write("t", "v")
    answer = node.fetch(11, fetch_part("t"), max_wait=1, min_bytes=10**6)
    assert not answer.arrived
    await node.until_answered(answer)
    assert values(await got(node, answer)) == ["v"]
    assert not node.partition("t")._readers


@pytest.mark.parametrize(("max_wait", "min_bytes"), [(0, 1), (LONG, 0)])
async def test_a_fetch_that_does_not_want_to_wait_is_answered_at_once(
    node: Exchange, max_wait: int, min_bytes: int
) -> None:
    partition = await got(node, node.fetch(11, fetch_part("t"), max_wait=max_wait, min_bytes=min_bytes))
    assert values(partition) == []


async def test_errors_are_told_at_once(node: Exchange) -> None:
    answer = node.fetch(11, fetch_part("t", 5), fetch_part("u"), max_wait=LONG, min_bytes=1)
    await node.settle()
    assert parts(answer)[0].error_code == ErrorCode.offset_out_of_range


async def test_a_topic_deleted_while_a_fetch_waits_is_told(node: Exchange) -> None:
    answer = node.fetch(11, fetch_part("t"), max_wait=LONG, min_bytes=1)
    await node.settle()
    await node.node.controller.submit(DeleteTopic(name="t"))
    await node.settle()
    assert parts(answer)[0].error_code == ErrorCode.unknown_topic_or_partition


async def test_a_partition_that_stops_while_a_fetch_waits_is_told(node: Exchange) -> None:
    answer = node.fetch(11, fetch_part("t"), max_wait=LONG, min_bytes=1)
    node.produce(9, produce_part("t", plain_batch("v")), acks=0)
    node.storage.fail_next("sync", ".log", SyncFailed("on purpose"))
    await node.flush()
    assert parts(answer)[0].error_code == ErrorCode.kafka_storage_error


async def test_a_client_that_goes_away_leaves_no_waiting_fetch_behind(node: Exchange) -> None:
    node.fetch(11, fetch_part("t"), max_wait=2**31 - 1, min_bytes=1)
    await node.settle()
    assert node.partition("t")._readers
    node.client.connection.connection_lost(None)
    assert not node.partition("t")._readers
    node.client = node.node.connect()


async def test_a_client_that_goes_away_while_its_many_partitions_are_looked_at_leaves_none_behind(
    node: Exchange,
) -> None:
    partition = node.partition("t")
    node.fetch(11, *[fetch_part("t") for _ in range(2_000)], max_wait=2**31 - 1, min_bytes=1)
    node.client.connection.connection_lost(None)
    for _ in range(100):
        await node.settle()
    assert not partition._readers
    node.client = node.node.connect()


# --- leader epochs


async def test_the_epoch_that_the_client_believes_in_is_compared(node: Exchange) -> None:
    await node.write("t", "v")
    await node.node.controller.submit(BumpLeaderEpochs(name="t", partitions=(0,)))
    now = node.partition("t").leader_epoch
    codes = []
    for epoch in (-1, now - 1, now, now + 1):
        partition = await got(node, node.fetch(11, fetch_part("t", current_leader_epoch=epoch)))
        codes.append(ErrorCode(partition.error_code))
    assert codes == [
        ErrorCode.none,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.none,
        ErrorCode.unknown_leader_epoch,
    ]


async def with_two_epochs(node: Exchange) -> tuple[int, int]:
    """Three records in one epoch and two in the next; the two epochs."""
    await node.write("t", "a", "b", "c")
    first = node.partition("t").leader_epoch
    await node.node.controller.submit(BumpLeaderEpochs(name="t", partitions=(0,)))
    await node.write("t", "d", "e")
    return first, node.partition("t").leader_epoch


@pytest.mark.parametrize("version", [12, 13, 18])
async def test_a_reader_whose_history_parted_is_told_where(node: Exchange, version: int) -> None:
    first, second = await with_two_epochs(node)
    parted = await got(node, node.fetch(version, fetch_part("t", 4, last_fetched_epoch=first)))
    assert (parted.diverging_epoch.epoch, parted.diverging_epoch.end_offset) == (first, 3)
    assert values(parted) == []
    for offset, epoch in ((3, first), (2, first), (5, second), (4, second)):
        good = await got(node, node.fetch(version, fetch_part("t", offset, last_fetched_epoch=epoch)))
        assert good.diverging_epoch.epoch == -1
        assert good.error_code == ErrorCode.none


async def test_a_last_epoch_that_nobody_knows_parts_where_this_log_ends(node: Exchange) -> None:
    _, second = await with_two_epochs(node)
    waiting = node.fetch(12, fetch_part("t", 5, last_fetched_epoch=second + 1), max_wait=LONG, min_bytes=1)
    partition = await got(node, waiting)
    assert partition.error_code == ErrorCode.none
    assert (partition.diverging_epoch.epoch, partition.diverging_epoch.end_offset) == (second, 5)


# --- sessions


def shown(answer: Answer) -> list[tuple[int, list[str]]]:
    return [(partition.partition_index, values(partition)) for partition in parts(answer)]


@pytest.mark.parametrize("version", WITH_SESSIONS)
async def test_a_session_answers_only_what_is_new(node: Exchange, version: int) -> None:
    await node.write("t", "a")
    full = node.fetch(version, *(fetch_part("t", 0, index) for index in range(3)), session_epoch=0)
    await node.settle()
    session_id = full.value.session_id
    assert session_id > 0
    assert shown(full) == [(0, ["a"]), (1, []), (2, [])]

    moved = node.fetch(version, fetch_part("t", 1, 0), session_id=session_id, session_epoch=1)
    await node.settle()
    assert (moved.value.session_id, shown(moved)) == (session_id, [])

    await node.write("t", "b", partition=2)
    news = node.fetch(version, session_id=session_id, session_epoch=2)
    await node.settle()
    assert shown(news) == [(2, ["b"])]


async def test_a_session_tells_when_only_the_start_or_the_watermark_moved(node: Exchange) -> None:
    await node.write("t", "a", "b")
    full = node.fetch(11, fetch_part("t", 2), session_epoch=0)
    await node.settle()
    node.partition("t").delete_records(1)
    news = node.fetch(11, session_id=full.value.session_id, session_epoch=1)
    await node.settle()
    assert [(partition.log_start_offset, values(partition)) for partition in parts(news)] == [(1, [])]


async def test_a_session_forgets_and_adds_partitions(node: Exchange) -> None:
    full = node.fetch(11, fetch_part("t"), fetch_part("u"), session_epoch=0)
    await node.settle()
    await node.write("t", "t")
    await node.write("u", "u")
    await node.write("t", "t2", partition=2)
    changed = node.fetch(
        11,
        fetch_part("t", 0, 2),
        session_id=full.value.session_id,
        session_epoch=1,
        forgotten_topics_data=[{"topic": "t", "partitions": [0]}],
    )
    await node.settle()
    assert sorted(values(partition)[0] for partition in parts(changed)) == ["t2", "u"]


async def test_partitions_of_a_session_take_turns(node: Exchange) -> None:
    for index in range(3):
        for _ in range(2):
            await node.write("t", "x" * 1_000, partition=index)
    sent = [fetch_part("t", 0, index) for index in range(3)]
    answer = node.fetch(11, *sent, session_epoch=0, max_bytes=1)
    await node.settle()
    served = [index for index, found in shown(answer) if found]
    for epoch in (1, 2):
        again = node.fetch(11, session_id=answer.value.session_id, session_epoch=epoch, max_bytes=1)
        await node.settle()
        served += [index for index, found in shown(again) if found]
    assert served == [0, 1, 2]


@pytest.mark.parametrize(
    ("session_change", "epoch", "expected"),
    [
        (1, 1, ErrorCode.fetch_session_id_not_found),
        (0, 2, ErrorCode.invalid_fetch_session_epoch),
        (0, 7, ErrorCode.invalid_fetch_session_epoch),
    ],
)
async def test_a_wrong_session_or_epoch_is_refused_as_a_whole(
    node: Exchange, session_change: int, epoch: int, expected: ErrorCode
) -> None:
    full = node.fetch(11, fetch_part("t"), session_epoch=0)
    await node.settle()
    wrong = node.fetch(11, session_id=full.value.session_id ^ session_change, session_epoch=epoch)
    await node.settle()
    assert (wrong.value.error_code, wrong.value.session_id, parts(wrong)) == (expected, 0, [])
    right = node.fetch(11, session_id=full.value.session_id, session_epoch=1)
    await node.settle()
    assert right.value.error_code == ErrorCode.none


async def test_naming_topics_by_id_in_a_session_by_name_is_refused(node: Exchange) -> None:
    full = node.fetch(12, fetch_part("t"), session_epoch=0)
    await node.settle()
    wrong = node.fetch(13, session_id=full.value.session_id, session_epoch=1)
    await node.settle()
    assert wrong.value.error_code == ErrorCode.fetch_session_topic_id_error


async def test_the_final_epoch_closes_the_session_and_answers_in_full(node: Exchange) -> None:
    full = node.fetch(11, fetch_part("t"), session_epoch=0)
    await node.settle()
    last = node.fetch(11, fetch_part("t"), session_id=full.value.session_id, session_epoch=-1)
    await node.settle()
    assert (last.value.session_id, len(parts(last))) == (0, 1)
    assert len(node.node.broker.fetch_sessions) == 0


async def test_a_new_session_replaces_the_old_one(node: Exchange) -> None:
    full = node.fetch(11, fetch_part("t"), session_epoch=0)
    await node.settle()
    again = node.fetch(11, fetch_part("t"), session_id=full.value.session_id, session_epoch=0)
    await node.settle()
    assert again.value.session_id != full.value.session_id
    assert len(node.node.broker.fetch_sessions) == 1


async def test_nothing_wanted_opens_no_session(node: Exchange) -> None:
    answer = node.fetch(11, session_epoch=0)
    await node.settle()
    assert (answer.value.session_id, parts(answer)) == (0, [])
    assert len(node.node.broker.fetch_sessions) == 0


async def test_a_partition_forgotten_while_an_earlier_fetch_waits_does_no_harm(node: Exchange) -> None:
    full = node.fetch(11, fetch_part("t"), session_epoch=0)
    await node.settle()
    session_id = full.value.session_id
    waiting = node.fetch(11, session_id=session_id, session_epoch=1, max_wait=LONG, min_bytes=1)
    forgetting = node.fetch(
        11,
        session_id=session_id,
        session_epoch=2,
        forgotten_topics_data=[{"topic": "t", "partitions": [0]}],
    )
    await node.settle()
    await node.write("t", "v")
    assert shown(waiting) == [(0, ["v"])]
    assert shown(forgetting) == []


# --- transactions


def transactional(*texts: str, producer: int, sequence: int) -> bytes:
    records = [Record(None, text.encode()) for text in texts]
    return build_batch(
        records, producer_id=producer, producer_epoch=0, base_sequence=sequence, attributes=0x10
    )


class Transactions:
    """Writes transactions straight into a partition."""

    def __init__(self, node: Exchange) -> None:
        self._node = node
        self._partition = node.partition("t")

    async def write(self, *texts: str, producer: int, sequence: int = 0) -> None:
        self._partition.begin_transaction(producer, 0)
        batch = transactional(*texts, producer=producer, sequence=sequence)
        self._partition.append(batch, self._node.node.broker.clock_ms())
        await self._node.flush()

    async def end(self, producer: int, *, commit: bool) -> None:
        self._partition.write_marker(
            producer, 0, commit=commit, coordinator_epoch=0, now_ms=self._node.node.broker.clock_ms()
        )
        await self._node.flush()


@pytest.mark.parametrize("version", VERSIONS)
async def test_read_committed_stops_at_the_first_open_transaction(node: Exchange, version: int) -> None:
    writes = Transactions(node)
    await node.write("t", "plain")
    await writes.write("open", producer=1)
    await node.write("t", "behind")
    committed = await got(node, node.fetch(version, fetch_part("t"), isolation_level=READ_COMMITTED))
    assert values(committed) == ["plain"]
    assert (committed.high_watermark, committed.last_stable_offset) == (3, 1)
    uncommitted = await got(node, node.fetch(version, fetch_part("t")))
    assert values(uncommitted) == ["plain", "open", "behind"]
    inside = await got(node, node.fetch(version, fetch_part("t", 2), isolation_level=READ_COMMITTED))
    assert (inside.error_code, values(inside)) == (ErrorCode.none, []), "a good position, nothing there yet"
    await writes.end(1, commit=True)
    after = await got(node, node.fetch(version, fetch_part("t"), isolation_level=READ_COMMITTED))
    assert after.last_stable_offset == 4
    assert values(after)[:3] == ["plain", "open", "behind"]
    assert list(after.aborted_transactions) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_read_committed_lists_aborted_transactions(node: Exchange, version: int) -> None:
    writes = Transactions(node)
    await writes.write("dropped", producer=1)
    await writes.write("kept", producer=2)
    await writes.end(2, commit=True)
    await writes.end(1, commit=False)
    committed = await got(node, node.fetch(version, fetch_part("t"), isolation_level=READ_COMMITTED))
    assert [(each.producer_id, each.first_offset) for each in committed.aborted_transactions] == [(1, 0)]
    uncommitted = await got(node, node.fetch(version, fetch_part("t")))
    assert uncommitted.aborted_transactions is None


async def test_a_waiting_read_committed_fetch_is_woken_by_the_commit_only(node: Exchange) -> None:
    writes = Transactions(node)
    answer = node.fetch(11, fetch_part("t"), isolation_level=READ_COMMITTED, max_wait=LONG, min_bytes=1)
    await writes.write("v", producer=1)
    assert not answer.arrived
    await writes.end(1, commit=True)
    assert values(parts(answer)[0])[0] == "v"
