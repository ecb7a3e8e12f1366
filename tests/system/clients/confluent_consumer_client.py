"""What the tests do with confluent-kafka's consumers of the new protocol (KIP-848)."""

from __future__ import annotations

import threading
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, ConsumerGroupType, TopicPartition
from confluent_kafka.admin import AdminClient

from system.clients.confluent_client import BASE, DEADLINE_SECONDS, create, done, produce
from system.clients.worker import MemberState, scenario, serve


class Member(threading.Thread):
    """A member of a group, polling until it is told to leave. It commits what it has read when it leaves."""

    def __init__(self, group: str, topics: list[str], config: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.state = MemberState()
        self.errors: list[str] = []
        self._leave = threading.Event()
        self._consumer = Consumer(
            BASE
            | {"group.id": group, "group.protocol": "consumer", "auto.offset.reset": "earliest"}
            | {"enable.auto.commit": False}
            | config
        )
        self._consumer.subscribe(
            topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self.start()

    def _assigned(self, source: Consumer, partitions: list[TopicPartition]) -> None:
        source.incremental_assign(partitions)
        if partitions:  # An empty call only tells that a new epoch has begun.
            self._note()

    def _revoked(self, source: Consumer, partitions: list[TopicPartition]) -> None:
        self._commit()
        source.incremental_unassign(partitions)
        self._note()

    def _note(self) -> None:
        self.state.assign({place.partition for place in self._consumer.assignment()})

    def _commit(self) -> None:
        places = [
            place for place in self._consumer.position(self._consumer.assignment()) if place.offset >= 0
        ]
        if places:
            try:
                self._consumer.commit(offsets=places, asynchronous=False)
            except Exception as error:
                self.errors.append(str(error))

    def run(self) -> None:
        while not self._leave.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.state.read(message.value().decode())
        self._commit()
        self._consumer.close()

    def leave(self) -> list[str]:
        self._leave.set()
        self.join()
        return self.errors


members: dict[str, Member] = {}


@scenario
def member_join(name: str, group: str, topic: str, **config: Any) -> None:
    members[name] = Member(group, [topic], {key.replace("_", "."): value for key, value in config.items()})


@scenario
def member_wait(name: str, partitions: int | None = None, values: int = 0) -> dict[str, Any]:
    return members[name].state.wait(partitions, values)


@scenario
def member_leave(name: str) -> list[str]:
    return members.pop(name).leave()


@scenario
def create_topic(topic: str, partitions: int) -> None:
    create(topic, partitions)


@scenario
def produce_to_partitions(topic: str, texts: list[str], partitions: int) -> None:
    produce(topic, [{"value": text, "partition": number % partitions} for number, text in enumerate(texts)])


def fresh_admin() -> AdminClient:
    """A new one for each question: librdkafka's may hang for good once its only node was away."""
    return AdminClient(BASE)


@scenario
def group_kinds() -> dict[str, str]:
    """The groups, and which protocol each speaks."""
    admin = fresh_admin()
    listing = admin.list_consumer_groups(request_timeout=DEADLINE_SECONDS).result()
    return {one.group_id: ConsumerGroupType(one.type).name for one in listing.valid}


@scenario
def describe_group(group: str) -> dict[str, Any]:
    admin = fresh_admin()
    (found,) = done(admin.describe_consumer_groups([group], request_timeout=DEADLINE_SECONDS))
    return {
        "state": found.state.name,
        "type": ConsumerGroupType(found.type).name,
        "assignor": found.partition_assignor,
        "members": {
            member.member_id: sorted(place.partition for place in member.assignment.topic_partitions)
            for member in found.members
        },
        "instances": sorted(filter(None, (member.group_instance_id for member in found.members))),
    }


@scenario
def committed_offsets(group: str) -> int:
    """How many records the group has committed, over all partitions."""
    asked = [ConsumerGroupTopicPartitions(group)]
    admin = fresh_admin()
    (found,) = done(admin.list_consumer_group_offsets(asked))
    return sum(place.offset for place in found.topic_partitions)


if __name__ == "__main__":
    serve()
