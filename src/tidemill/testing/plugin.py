"""The pytest plugin: a real node for a test, in well under a second.

    def test_orders(tidemill_node):
        with confluent_kafka.Producer({"bootstrap.servers": tidemill_node.bootstrap_servers}) as producer:
            producer.produce("orders", b"3 apples")

The fixtures are there as soon as tidemill is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidemill.embedded.node import EmbeddedNode

__all__ = ("tidemill_node", "tidemill_session_node")


@pytest.fixture
def tidemill_node() -> Iterator[EmbeddedNode]:
    """A node of the test's own, empty at the start and gone at the end."""
    import tidemill

    with tidemill.open() as node:
        yield node


@pytest.fixture(scope="session")
def tidemill_session_node() -> Iterator[EmbeddedNode]:
    """One node for the whole test run, for tests that bring topic names of their own."""
    import tidemill

    with tidemill.open() as node:
        yield node
