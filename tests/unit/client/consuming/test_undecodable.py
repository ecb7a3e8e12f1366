"""Batches that cannot be decoded, in the log of a node in this process: the client and ``topic consume``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from support.batches import make_batch, undecodable_batch
from tidemill.client.cluster import Cluster
from tidemill.client.consuming.record_reader import RecordReader
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode, UndecodableBatch
from tidemill.server.node import Node

T0, T1 = ("t", 0), ("t", 1)
SAID = "t-0: the batch of offsets 2 to 3 cannot be decoded: a record of -2 bytes does not fit in the batch"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """Partition 0 has offsets 0 and 1, a batch of two that cannot be decoded, and 4; partition 1 has one."""
    made = Node(Settings(data_dir=tmp_path, listen=Address("127.0.0.1", 0), http=None))
    await made.start()
    broker = made.broker
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=2, replication=1))
    first, second = (broker.find.partition(broker.find.topic("t"), index) for index in (0, 1))
    # Below the checks of Produce: such batches come from before there were any.
    for data, header in (make_batch("a", "b"), undecodable_batch("x", "y"), make_batch("c")):
        first.local_log.append(data, header, first.leader_epoch, 1)
    second.local_log.append(*make_batch("d"), second.leader_epoch, 1)
    for partition in (first, second):
        broker.flusher.request(partition)
    await broker.flusher.drain([first, second])
    yield made
    await made.stop()


async def test_all_before_it_comes_first_and_then_an_error_with_its_offsets(node: Node) -> None:
    async with Cluster(str(node.address)) as cluster:
        reader = RecordReader(cluster, {T0: 0, T1: 0})
        values = [message.record.value for message in await reader.poll()]
        assert sorted(filter(None, values)) == [b"a", b"b", b"d"]
        with pytest.raises(UndecodableBatch, match=SAID):
            await reader.poll()
        with pytest.raises(UndecodableBatch, match=SAID) as caught:
            await reader.poll()
        assert (caught.value.topic, caught.value.partition) == T0
        assert (caught.value.base_offset, caught.value.last_offset) == (2, 3)
        assert caught.value.code is ErrorCode.corrupt_message
        assert reader.positions[T0] == 2
        reader.positions[T0] = caught.value.last_offset + 1
        assert [message.record.value for message in await reader.poll()] == [b"c"]
        await reader.close()


async def test_a_reader_that_skips_is_told_of_what_it_skips(node: Node) -> None:
    skipped: list[UndecodableBatch] = []
    async with Cluster(str(node.address)) as cluster:
        reader = RecordReader(cluster, {T0: 1}, on_undecodable=skipped.append)
        assert [message.record.value for message in await reader.poll()] == [b"b", b"c"]
        assert reader.positions[T0] == 5
        await reader.close()
    assert [failure.message for failure in skipped] == [f"{SAID}; reading can go on at offset 4"]


async def consume(node: Node, *options: str) -> tuple[int | None, str, str]:
    """``tidemill topic consume t``, to its end: exit code, stdout, stderr."""
    arguments = ("topic", "consume", "t", "--exit", "--server", str(node.address), *options)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tidemill.cli", *arguments),
        env={name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), errors.decode()


@pytest.mark.parametrize("group", [(), ("--group", "g")])
async def test_the_command_names_the_batch_and_passes_over_it_when_told_to(
    node: Node, group: tuple[str, ...]
) -> None:
    code, out, errors = await consume(node, *group)
    assert (code, sorted(out.split())) == (1, ["a", "b", "d"])
    assert SAID in errors
    assert "--skip-undecodable" in errors
    assert "--partition 0 --from 4" in errors
    again = ("--group", "other") if group else ()
    code, out, errors = await consume(node, "--skip-undecodable", *again)
    assert (code, sorted(out.split())) == (0, ["a", "b", "c", "d"])
    assert errors.startswith(f"warning: {SAID}")
