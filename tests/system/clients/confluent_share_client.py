"""A member of a share group with confluent-kafka's ShareConsumer (librdkafka)."""

from __future__ import annotations

import threading
from typing import Any

from confluent_kafka import AcknowledgeType, ShareConsumer

from system.clients.worker import BOOTSTRAP, scenario, serve

BASE = {"bootstrap.servers": BOOTSTRAP, "log_level": 3, "reconnect.backoff.max.ms": 200}
#: Deliveries after which a flaky record is accepted.
ENOUGH_DELIVERIES = 3


class Member:
    """Polls in a thread of its own until it is told to leave."""

    def __init__(self, group: str, topic: str, mode: str) -> None:
        self._is_explicit = mode == "explicit"
        self._consumer = ShareConsumer({**BASE, "group.id": group, "share.acknowledgement.mode": mode})
        self._consumer.subscribe([topic])
        self._leaving = threading.Event()
        self._changed = threading.Condition()
        self._deliveries: list[tuple[str, int, str]] = []
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                found = [each for each in self._consumer.poll(0.2) if not each.error()]
                outcomes = [self._settle(each) for each in found]
                if found:
                    failed = [error for error in self._consumer.commit_sync(30).values() if error is not None]
                    assert not failed, failed
                with self._changed:
                    self._deliveries += outcomes
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._failure = repr(error)
                self._changed.notify_all()
        finally:
            self._consumer.close()

    def _settle(self, message: Any) -> tuple[str, int, str]:
        value, count = message.value().decode(), message.delivery_count()
        outcome = "accept"
        if self._is_explicit:
            if value.startswith("bad"):
                outcome = "reject"
            elif value.startswith("flaky") and count < ENOUGH_DELIVERIES:
                outcome = "release"
            self._consumer.acknowledge(message, AcknowledgeType[outcome.upper()])
        return value, count, outcome

    def wait(self, deliveries: int) -> list[tuple[str, int, str]]:
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._failure or len(self._deliveries) >= deliveries, timeout=120
            )
            assert self._failure is None, self._failure
            assert arrived, f"wanted {deliveries} deliveries: {self._deliveries}"
            return list(self._deliveries)

    def leave(self) -> list[tuple[str, int, str]]:
        self._leaving.set()
        self._thread.join(120)
        return self.wait(0)


members: dict[str, Member] = {}


@scenario
def share_join(name: str, group: str, topic: str, mode: str = "explicit") -> None:
    members[name] = Member(group, topic, mode)


@scenario
def share_wait(name: str, deliveries: int = 0) -> list[tuple[str, int, str]]:
    return members[name].wait(deliveries)


@scenario
def share_leave(name: str) -> list[tuple[str, int, str]]:
    return members.pop(name).leave()


if __name__ == "__main__":
    serve()
