"""The cost of transactions: writing in them, and reading past those that were aborted."""

from __future__ import annotations

import json
import sys
import time

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.context import Bench
from bench.processes import run_json
from bench.raw import RawClient
from bench.report import Section
from bench.spread import Spread

__all__ = ("reading", "writing")

_RECORD_BYTES = 1_000
_TIMEOUT_SECONDS = 60.0


def writing(bench: Bench) -> Section:
    """Transactional produce beside idempotent produce, by the same client in turns."""
    plan = bench.plan
    section = Section(
        "Transactional produce",
        ("records per transaction", "transactional MB/s", "idempotent MB/s", "ratio"),
        note="1 KB records to one partition, confluent-kafka. A transaction ends with commit_transaction, "
        "which waits for everything in it: small ones cost a round trip and several syncs for few records.",
    )
    for size in plan.transaction_records:
        bench.progress(f"transactions: {size} records each")
        ours, plain = [], []
        with bench.node() as node:
            RawClient.of(node).create_topic("txn", 1)
            for turn in range(plan.rounds):
                options = {"servers": node.bootstrap_servers, "records": plan.transactional_records}
                found = run_json(bench.work, "bench.transactions", "write", per_transaction=size, **options)
                ours.append(found["mb_per_second"])
                found = run_json(bench.work, "bench.transactions", "write", per_transaction=0, **options)
                plain.append(found["mb_per_second"])
                bench.progress(f"transactions: {size} records each, round {turn + 1}")
        section.add(f"{size:,}", Spread(ours), Spread(plain), Spread(ours).over(Spread(plain)))
    return section


def reading(bench: Bench) -> Section:
    """read_committed over a log of which every second transaction was aborted."""
    plan = bench.plan
    section = Section(
        "Reading committed data",
        ("what", "records/s given to the reader", "MB/s of log passed", "ratio of MB/s to the first row"),
        note="1 KB records in transactions of 100, one partition. Aborted records travel to the client, "
        "which leaves them out; the ratio says whether finding out which costs anything.",
    )
    with bench.node() as node:
        client = RawClient.of(node)
        for topic, aborted in (("all", 0), ("half", 1)):
            bench.progress(f"transactions: writing the topic {topic!r}")
            client.create_topic(topic, 1)
            run_json(
                bench.work,
                "bench.transactions",
                "fill",
                servers=node.bootstrap_servers,
                topic=topic,
                records=plan.transactional_records,
                abort_every_second=bool(aborted),
            )
        first: Spread | None = None
        for topic, isolation, name in (
            ("all", "read_committed", "read_committed, nothing aborted"),
            ("half", "read_committed", "read_committed, half aborted"),
            ("half", "read_uncommitted", "read_uncommitted, half aborted"),
        ):
            rates, passed = [], []
            for _ in range(plan.rounds):
                found = run_json(
                    bench.work,
                    "bench.transactions",
                    "read",
                    servers=node.bootstrap_servers,
                    topic=topic,
                    isolation=isolation,
                )
                rates.append(found["records"] / found["seconds"])
                passed.append(plan.transactional_records * _RECORD_BYTES / found["seconds"] / 1e6)
            speed = Spread(passed)
            first = first or speed
            section.add(name, Spread(rates), speed, speed.over(first))
    return section


# --- the child


def _write(servers: str, records: int, per_transaction: int) -> dict[str, float]:
    config = {"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 3}
    if per_transaction:
        config["transactional.id"] = "bench"
    producer = Producer(config)
    if per_transaction:
        producer.init_transactions(_TIMEOUT_SECONDS)
    value = b"x" * _RECORD_BYTES
    producer.list_topics("txn", timeout=_TIMEOUT_SECONDS)
    started = time.perf_counter()
    for first in range(0, records, per_transaction or records):
        if per_transaction:
            producer.begin_transaction()
        for _ in range(min(per_transaction or records, records - first)):
            _send(producer, "txn", value)
        if per_transaction:
            producer.commit_transaction(_TIMEOUT_SECONDS)
    producer.flush(_TIMEOUT_SECONDS)
    return {"mb_per_second": records * _RECORD_BYTES / (time.perf_counter() - started) / 1e6}


def _send(producer: Producer, topic: str, value: bytes) -> None:
    while True:
        try:
            producer.produce(topic, value, partition=0)
            return
        except BufferError:
            producer.poll(0.01)


def _fill(servers: str, topic: str, records: int, abort_every_second: bool) -> dict[str, int]:
    producer = Producer({"bootstrap.servers": servers, "transactional.id": f"fill-{topic}", "log_level": 3})
    producer.init_transactions(_TIMEOUT_SECONDS)
    value = b"x" * _RECORD_BYTES
    for number in range(records // 100):
        producer.begin_transaction()
        for _ in range(100):
            _send(producer, topic, value)
        if abort_every_second and number % 2:
            producer.flush(_TIMEOUT_SECONDS)  # what is aborted must be in the log to be read past
            producer.abort_transaction(_TIMEOUT_SECONDS)
        else:
            producer.commit_transaction(_TIMEOUT_SECONDS)
    return {"records": records}


def _read(servers: str, topic: str, isolation: str) -> dict[str, float]:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # or else finding the end takes longer than getting there
            "enable.auto.commit": False,
            "log_level": 3,
        }
    )
    consumer.list_topics(topic, timeout=_TIMEOUT_SECONDS)
    started, count, ended = time.perf_counter(), 0, False
    consumer.assign([TopicPartition(topic, 0, 0)])
    while not ended:
        messages = consumer.consume(1000, 0.1)
        ended = any(message.error() is not None for message in messages)
        count += len(messages) - ended
    seconds = time.perf_counter() - started
    consumer.close()
    return {"records": count, "seconds": seconds}


if __name__ == "__main__":
    jobs = {"write": _write, "fill": _fill, "read": _read}
    print(json.dumps(jobs[sys.argv[1]](**json.loads(sys.argv[2]))))
