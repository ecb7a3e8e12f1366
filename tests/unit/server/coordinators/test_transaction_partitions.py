"""The markers that a node writes to its own partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic
from tidemill.log.log import Appended
from tidemill.records.control import MarkerEnd
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transaction_partitions import LocalTransactionPartitions
from tidemill.transactions.messages import Producer, TransactionEnd


async def test_many_markers_of_several_partitions_are_written_in_turns_of_their_own(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.controller.submit(CreateTopic(name="new", topic_id=uuid4(), partitions=4, replication=1))
    partitions = LocalTransactionPartitions.of(broker)
    first = [TransactionEnd(Producer(1, 0), commit=True, coordinator_epoch=0)]
    for index in range(4):
        await partitions.write_markers(("new", index), first)
    turn, turns = 0, list[int]()
    write = Partition.write_markers

    def noted(self: Partition, ends: Sequence[MarkerEnd], *, now_ms: int) -> Appended:
        turns.append(turn)
        return write(self, ends, now_ms=now_ms)

    monkeypatch.setattr(Partition, "write_markers", noted)
    ends = [TransactionEnd(Producer(number, 0), commit=True, coordinator_epoch=0) for number in range(150)]
    writing = asyncio.gather(*(partitions.write_markers(("new", index), ends) for index in range(4)))
    while not writing.done():
        turn += 1
        await asyncio.sleep(0)
    assert len(set(turns)) == 4
