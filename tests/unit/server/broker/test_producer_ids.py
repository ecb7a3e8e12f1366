"""Producer ids."""

from __future__ import annotations

import asyncio

from tidemill.server.broker import Broker
from tidemill.server.broker.producer_ids import ProducerIds


async def test_producer_ids_are_never_given_twice(broker: Broker) -> None:
    ids = await asyncio.gather(*(broker.producer_ids.next() for _ in range(2_500)))
    assert len(set(ids)) == 2_500


async def test_two_nodes_never_share_a_block(broker: Broker) -> None:
    other = ProducerIds(broker.controller)
    ids = [await part.next() for part in (broker.producer_ids, other) * 1_200]
    assert len(set(ids)) == 2_400
