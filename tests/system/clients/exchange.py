"""Writing and reading at the same time while a cluster changes: the same for every client.

``start_exchange`` makes a producer and a consumer that live as long as the process; ``exchange`` writes some
more records with them and reads everything, each once and in the order of its partition.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from system.clients.worker import scenario

__all__ = ("EXCHANGE_SECONDS", "PAUSE_SECONDS", "Exchange", "Told", "serve_exchange")

EXCHANGE_SECONDS = 300.0
#: Between two records, so that they are spread over what happens meanwhile.
PAUSE_SECONDS = 0.01


class Told:
    """What was written to each partition, and what was read of it: numbers that count up."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._written = 0
        self._read = [0] * partitions

    def next(self) -> tuple[int, str]:
        """Partition and value of the next record."""
        self._written += 1
        return self._written % self._partitions, str(self._written)

    def read(self, partition: int, value: str) -> None:
        """Note a value, which must be the one behind the last of its partition."""
        wanted = self._read[partition] * self._partitions + (partition or self._partitions)
        assert value == str(wanted), f"partition {partition} has {value} where {wanted} must be"
        self._read[partition] += 1

    @property
    def is_complete(self) -> bool:
        return sum(self._read) == self._written


class Exchange(ABC):
    """A producer and a consumer of one client."""

    def __init__(self, partitions: int) -> None:
        self._told = Told(partitions)

    @abstractmethod
    def send(self, partition: int, value: str) -> None:
        """Have a record sent."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything is acknowledged; raise if anything failed."""

    @abstractmethod
    def poll(self) -> list[tuple[int, str]]:
        """Partition and value of records that have come since, if any."""

    def run(self, count: int) -> None:
        for _ in range(count):
            self.send(*self._told.next())
            time.sleep(PAUSE_SECONDS)
        self.flush()
        deadline = time.monotonic() + EXCHANGE_SECONDS
        while not self._told.is_complete:
            assert time.monotonic() < deadline, vars(self._told)
            for partition, value in self.poll():
                self._told.read(partition, value)


def serve_exchange(kind: type[Exchange]) -> None:
    """Make the scenarios of a client; ``kind`` takes a topic and the number of its partitions."""
    exchanges: list[Exchange] = []

    def start_exchange(topic: str, partitions: int) -> None:
        exchanges.append(kind(topic, partitions))  # type: ignore[call-arg,arg-type]

    def exchange(count: int) -> None:
        exchanges[-1].run(count)

    scenario(start_exchange)
    scenario(exchange)
