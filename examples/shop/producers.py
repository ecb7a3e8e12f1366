"""The senders: three ordinary Kafka producers, one for each system of the shop.

- Each is idempotent and waits for ``acks=all``: what is counted as sent is on the node's disk.
- They send the first minute of the shop's time, and go on when they are told to: meanwhile Spark gets warm.
- Then they send at an even pace, minute by minute, and wait for each other at the end of every minute. So no
  sender is more than a minute ahead of another, which the pipeline's watermark relies on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import groupby

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Delivery
from events import OPENING, SENDERS, Message

CODECS = {"web shop": "lz4", "payment provider": "zstd", "warehouse": "snappy"}
FLUSH_SECONDS = 60.0
AHEAD_SECONDS = 0.02
_MINUTE = timedelta(minutes=1)


class Stopped(Exception):
    """Another sender has failed, or the run was interrupted."""


class Senders:
    """Sends all messages over about ``seconds``, on threads of its own."""

    def __init__(self, servers: str, topic: str, messages: list[Message], seconds: float) -> None:
        self.total = len(messages)
        self.sent = 0
        self.bytes_sent = 0
        self.broken: dict[tuple[int, int], Message] = {}
        """The broken messages by where they are in the topic: partition and offset."""
        self.failure: Exception | None = None
        self._topic = topic
        self._seconds = seconds
        self._counting = threading.Lock()
        self._going_on = threading.Event()
        self._minute_over = threading.Barrier(len(SENDERS))
        rounds = list(_rounds(messages))
        self._threads = [
            threading.Thread(target=self._run, args=(servers, sender, rounds), name=sender, daemon=True)
            for sender in SENDERS.values()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def go_on(self) -> None:
        """Send what comes after the first minute."""
        self._going_on.set()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End at once: nothing more is sent."""
        self._minute_over.abort()
        self._going_on.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self, servers: str, sender: str, rounds: list[list[tuple[int, Message]]]) -> None:
        producer = Producer(
            {
                "bootstrap.servers": servers,
                "client.id": sender,
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": CODECS[sender],
                "linger.ms": 20,
                "log_level": 0,
            }
        )
        begin = time.monotonic()
        try:
            for messages in rounds:
                self._send(producer, [each for each in messages if each[1].sender == sender], begin)
                if producer.flush(FLUSH_SECONDS):
                    raise TimeoutError(
                        f"the {sender} could not send all messages within {FLUSH_SECONDS:.0f} s"
                    )
                self._minute_over.wait()
                if not self._going_on.is_set():
                    self._going_on.wait()
                    begin = time.monotonic()
        except (threading.BrokenBarrierError, Stopped):
            producer.purge()
        except Exception as failure:  # noqa: BLE001 - shown by the thread that waits for this one
            self.failure = failure
            self._minute_over.abort()

    def _send(self, producer: Producer, messages: list[tuple[int, Message]], begin: float) -> None:
        """Send one minute's messages, each when its share of the time is over."""
        for index, message in messages:
            early = begin + self._seconds * index / self.total - time.monotonic()
            if early > AHEAD_SECONDS:
                producer.poll(early)
            if self._minute_over.broken:
                raise Stopped
            producer.produce(
                self._topic, key=message.order_id, value=message.text, on_delivery=self._on_delivery(message)
            )
            producer.poll(0)

    def _on_delivery(self, message: Message) -> Callable[[KafkaError | None, Delivery], None]:
        def delivered(error: KafkaError | None, delivery: Delivery) -> None:
            if error is not None:
                self.failure = self.failure or KafkaException(error)
                return
            with self._counting:
                self.sent += 1
                self.bytes_sent += len(message.order_id) + len(message.text or "")
                if message.broken:
                    self.broken[delivery.partition(), delivery.offset()] = message

        return delivered


def _rounds(messages: list[Message]) -> Iterator[list[tuple[int, Message]]]:
    """The messages of each minute of the shop's time, with their numbers."""
    for _, minute in groupby(enumerate(messages), lambda each: (each[1].sent_at - OPENING) // _MINUTE):
        yield list(minute)
