"""The client process: one job with confluent-kafka, its result as JSON on stdout.

``python -m bench.load produce|consume|latency JSON``; the keys of the JSON object are the job's parameters.
The configuration is the same whatever the servers are, so that a node and its peer see the same client.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

__all__ = ("consume", "latency", "partition_names", "produce")

PARTITIONS_PER_TOPIC = 4
_QUEUE_KB = 65_536
_RECORDS_PER_TURN = 200
_RECORDS_PER_READ = 5_000
_FLUSH_SECONDS = 120.0
_STALLED_SECONDS = 30.0


def partition_names(prefix: str, count: int) -> list[tuple[str, int]]:
    """The partitions that records go to in turn: one, or many in topics of four, as the mock cluster has."""
    return [(f"{prefix}-{n // PARTITIONS_PER_TOPIC}", n % PARTITIONS_PER_TOPIC) for n in range(count)]


def produce(
    servers: str, prefix: str, partitions: int, record_bytes: int, acks: str, seconds: float
) -> dict[str, float]:
    """Write for ``seconds``, then wait until everything is acknowledged."""
    failures: list[KafkaError] = []
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "acks": acks,
            "queue.buffering.max.kbytes": _QUEUE_KB,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
            "on_delivery": lambda error, _: failures.append(error),
            "log_level": 3,
        }
    )
    places = partition_names(prefix, partitions)
    value = b"x" * record_bytes
    for topic, partition in places:
        producer.produce(topic, value, partition=partition)
    _flush(producer, failures)
    count, cpu_before, started = 0, _own_cpu_seconds(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(_RECORDS_PER_TURN):
            topic, partition = places[count % partitions]
            while True:
                try:
                    producer.produce(topic, value, partition=partition)
                    break
                except BufferError:
                    producer.poll(0.005)
            count += 1
    _flush(producer, failures)
    return _result(started, cpu_before, count, record_bytes)


def _flush(producer: Producer, failures: list[KafkaError]) -> None:
    left = producer.flush(_FLUSH_SECONDS)
    if failures or left:
        raise SystemExit(f"{len(failures)} records failed ({failures[:1]}), {left} were never acknowledged")


def consume(servers: str, prefix: str, partitions: int, record_bytes: int) -> dict[str, float]:
    """Read all records, from the first offset on."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "bench", "enable.auto.commit": False, "log_level": 3}
    )
    places = partition_names(prefix, partitions)
    there = sum(consumer.get_watermark_offsets(TopicPartition(*place), timeout=30)[1] for place in places)
    count, cpu_before, started = 0, _own_cpu_seconds(), time.perf_counter()
    consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in places])
    while count < there:
        # It returns once it has so many, so no more are asked for than are left.
        messages = consumer.consume(min(_RECORDS_PER_READ, there - count), timeout=_STALLED_SECONDS)
        if not messages or messages[0].error():
            raise SystemExit(f"{count} of {there} records were read, then: {messages[:1]}")
        count += len(messages)
    result = _result(started, cpu_before, count, record_bytes)
    consumer.close()
    return result


def latency(
    servers: str, topic: str, record_bytes: int, acks: str, rate: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds from ``produce`` to the delivery report, at a fixed rate."""
    producer = Producer({"bootstrap.servers": servers, "acks": acks, "linger.ms": 0, "log_level": 3})
    value = b"x" * record_bytes
    producer.produce(topic, value, partition=0)
    producer.flush(_FLUSH_SECONDS)
    found: list[float] = []

    def delivered(due: float) -> Callable[[KafkaError | None, object], None]:
        def note(error: KafkaError | None, _: object) -> None:
            if error is not None:
                raise SystemExit(f"a record was not delivered: {error}")
            found.append((time.perf_counter() - due) * 1000)

        return note

    started = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = started + number / rate
        while (wait := due - time.perf_counter()) > 0:
            producer.poll(wait)
        # Counted from when it should have been sent: a stall then also counts for those held up behind it.
        producer.produce(topic, value, partition=0, on_delivery=delivered(due))
        producer.poll(0)
    producer.flush(_FLUSH_SECONDS)
    return {"milliseconds": found}


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _result(started: float, cpu_before: float, count: int, record_bytes: int) -> dict[str, float]:
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": _own_cpu_seconds() - cpu_before,
        "records": count,
        "bytes": count * record_bytes,
    }


_JOBS: dict[str, Callable[..., dict[str, Any]]] = {"produce": produce, "consume": consume, "latency": latency}

if __name__ == "__main__":
    print(json.dumps(_JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
