"""Which topics a member of a ``consumer`` group subscribes to, read from the bytes it joined with.

The bytes come from clients and are not checked by anybody else, so anything may be in them. Only the prefix
that all versions of the consumer protocol share is read: a version, the topics, the user data.
"""

from __future__ import annotations

from tidemill.coordination.binary import MalformedBytes, Reader

__all__ = ("CONSUMER_PROTOCOL", "parse_subscription")

CONSUMER_PROTOCOL = "consumer"
"""The protocol type of groups whose metadata is a consumer subscription."""


def parse_subscription(metadata: bytes) -> frozenset[str]:
    """The subscribed topics. Any bytes either parse or raise ``MalformedBytes``.

    >>> sorted(parse_subscription(bytes.fromhex("0000 00000001 0001 61 ffffffff")))
    ['a']
    """
    reader = Reader(metadata)
    version = reader.int16()
    if version < 0:
        raise MalformedBytes(f"consumer protocol version {version} does not exist")
    topics = frozenset(reader.string() for _ in range(reader.count(smallest_element=2)))
    reader.nullable_bytes()
    return topics
