"""What the members of a consumer group go through, the same for every client that can be one.

The clients are processes with the scenarios ``create_topic``, ``produce_to_partitions``, ``member_join``,
``member_wait`` and ``member_leave``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.processes import ClientProcess, NodeProcess
from support.raw import RawClient

__all__ = (
    "SHORT_SESSION_MS",
    "end_sessions_soon",
    "killed_member_is_replaced",
    "share_and_take_over",
    "static_member_returns",
)


#: For tests in which a member dies. Other sessions are long: a busy machine costs nobody a partition.
SHORT_SESSION_MS = 6_000
_GROUP_RESOURCE = 32


def end_sessions_soon(node: NodeProcess, group: str, kind: str) -> None:
    """Have a group miss its members soon; ``kind`` is "consumer" (KIP-848) or "share"."""
    config = {"name": f"{kind}.session.timeout.ms", "config_operation": 0, "value": f"{SHORT_SESSION_MS}"}
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configs": [config]}
    with RawClient(node.address) as client:
        answer = client.request("IncrementalAlterConfigs", 1, {"resources": [resource]})
    assert not answer.responses[0].error_code, answer.responses[0].error_message


def share_and_take_over(one: ClientProcess, two: ClientProcess, topic: str, **config: Any) -> None:
    """Two members share four partitions and read everything once; when one leaves, the other has all."""
    one.call("create_topic", topic=topic, partitions=4)
    join = {"name": topic, "group": topic, "topic": topic, **config}
    one.call("member_join", **join)
    assert one.call("member_wait", name=topic, partitions=4)["assigned"] == [0, 1, 2, 3]
    two.call("member_join", **join)
    first = one.call("member_wait", name=topic, partitions=2)["assigned"]
    second = two.call("member_wait", name=topic, partitions=2)["assigned"]
    assert sorted(first + second) == [0, 1, 2, 3]
    texts = [f"v{number}" for number in range(40)]
    one.call("produce_to_partitions", topic=topic, texts=texts, partitions=4)
    read = one.call("member_wait", name=topic, values=20)["values"]
    read += two.call("member_wait", name=topic, values=20)["values"]
    assert sorted(read) == sorted(texts)
    two.call("member_leave", name=topic)
    assert one.call("member_wait", name=topic, partitions=4)["assigned"] == [0, 1, 2, 3]
    one.call("member_leave", name=topic)


def killed_member_is_replaced(one: ClientProcess, two: ClientProcess, topic: str, **config: Any) -> None:
    """A member that dies without a word loses its partitions when its session, a short one, ends."""
    one.call("create_topic", topic=topic, partitions=2)
    join = {"name": topic, "group": topic, "topic": topic, **config}
    one.call("member_join", **join)
    one.call("member_wait", name=topic, partitions=2)
    two.call("member_join", **join)
    one.call("member_wait", name=topic, partitions=1)
    two.call("member_wait", name=topic, partitions=1)
    two.kill()
    one.call("member_wait", name=topic, partitions=2)
    one.call("member_leave", name=topic)


def static_member_returns(
    one: ClientProcess,
    two: ClientProcess,
    start_another: Callable[[], ClientProcess],
    topic: str,
    **config: Any,
) -> None:
    """A static member that comes back in a new process gets its partitions, and nobody else notices."""
    one.call("create_topic", topic=topic, partitions=2)
    join = {"name": topic, "group": topic, "topic": topic, **config}
    one.call("member_join", group_instance_id="first", **join)
    one.call("member_wait", name=topic, partitions=2)
    two.call("member_join", group_instance_id="second", **join)
    before = one.call("member_wait", name=topic, partitions=1)
    lost = two.call("member_wait", name=topic, partitions=1)
    two.kill()
    returned = start_another()
    returned.call("member_join", group_instance_id="second", **join)
    # Had there been a rebalance, this assignment would have waited for the first member to take part.
    assert returned.call("member_wait", name=topic, partitions=1)["assigned"] == lost["assigned"]
    assert one.call("member_wait", name=topic)["rebalances"] == before["rebalances"]
    returned.close()
    one.call("member_leave", name=topic)
