"""Share groups: their speed beside that of a consumer group on the same records, and what they cost."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.context import Bench
from bench.processes import NodeProcess, cpu_seconds, memory_mb, run_json
from bench.raw import RawClient, batch_of
from bench.report import Aim, Section
from bench.spread import Spread, number, percentile

__all__ = ("share", "share_costs")

_TOPIC = "work"
_PARTITIONS = 4
_RECORD_BYTES = 1_000
_BATCH_RECORDS = 100
_KEYS = 1_000
_WANTED_RATIO = 0.5
#: A record behind the longest backlog may cost so much more than one behind the shortest.
_WANTED_FLATNESS = 1.5
_STALLED_SECONDS = 60.0
_ACCEPT = 1
_FIND_TOPIC, _ALTER_CONFIGS, _HEARTBEAT, _SHARE_FETCH, _SHARE_ACKNOWLEDGE = 3, 44, 76, 78, 79
_GROUP_RESOURCE = 32

_NOTE = (
    f"{_RECORD_BYTES:,} B records in {_PARTITIONS} partitions, confluent-kafka on both sides, the members of "
    "a group as threads of one process. They join before the records are written; the time is that from the "
    "first record to the last. The share consumers accept what a poll gave with the next one, and the node "
    "answers that when it is on disk; the consumers commit every five seconds. A consumer group has no use "
    f"for more members than partitions. Order per key: {_KEYS:,} keys. Accept each: the share consumers are "
    "in explicit mode, acknowledge every record by a call of its own, and commit after each poll."
)
_COSTS_NOTE = (
    "One member that asks for 500 records and accepts them with its next request, over one bare connection. "
    "Backlog: the records behind the ones that are fetched; flat means ratios near 1. Accept each: every "
    "record is an entry of the request by itself, where the other rows accept ranges as they were handed "
    "out. Latency of an acknowledgement: of one record, from the request to its answer, which comes when the "
    "change is on disk. Memory: of the node's process, with records held in pieces of ten."
)


def share(bench: Bench) -> Section:
    """Share groups and consumer groups of several sizes on the same kind of topic, in turns."""
    plan = bench.plan
    section = Section(
        "Share groups",
        (
            "members",
            "share group records/s",
            "consumer group records/s",
            "ratio",
            "node CPU µs/record, share",
            "node CPU µs/record, consumer",
        ),
        note=_NOTE,
    )
    ratios: dict[int, Spread] = {}
    for members in plan.share_members:
        ours, ours_cpu = [], []
        theirs, theirs_cpu = [], []
        for turn in range(plan.rounds):
            bench.progress(f"share: {members} members, round {turn + 1}")
            rate, cpu = _drain(bench, "share", members)
            ours.append(rate)
            ours_cpu.append(cpu)
            rate, cpu = _drain(bench, "consume", members)
            theirs.append(rate)
            theirs_cpu.append(cpu)
        ratios[members] = Spread(ours).over(Spread(theirs))
        cpu_cells = number(Spread(ours_cpu).median), number(Spread(theirs_cpu).median)
        section.add(f"{members}", Spread(ours), Spread(theirs), ratios[members], *cpu_cells)
    most = plan.share_members[-1]
    for what, job, order in (("accept each", "share-each", "none"), ("order per key", "share", "key")):
        bench.progress(f"share: {what}")
        rates = [_drain(bench, job, most, order=order) for _ in range(plan.rounds)]
        cpu_median = number(Spread(cpu for _, cpu in rates).median)
        section.add(f"{most}, {what}", Spread(rate for rate, _ in rates), "", "", cpu_median, "")
    section.aims.append(
        Aim(
            f"share groups of {', '.join(map(str, plan.share_members))} members: ratio to a consumer group",
            f"≥ {_WANTED_RATIO}",
            ", ".join(number(ratio.median) for ratio in ratios.values()),
            min(ratio.median for ratio in ratios.values()) >= _WANTED_RATIO,
        )
    )
    return section


def _drain(bench: Bench, job: str, members: int, order: str = "none") -> tuple[float, float]:
    """(records per second, CPU µs of the node per record) of one group that reads everything once."""
    plan = bench.plan
    with bench.node() as node:
        client = RawClient.of(node)
        client.create_topic(_TOPIC, _PARTITIONS)
        configs = {"share.auto.offset.reset": "earliest", "tidemill.share.order": order}
        _configure(client, "bench", configs)
        client.close()
        found = run_json(
            bench.work,
            "bench.share",
            job,
            servers=node.bootstrap_servers,
            port=node.port,
            members=members,
            records=plan.share_records,
            warm_up_seconds=plan.share_warm_up_seconds,
            keyed=order == "key",
            node_pid=node.pid,
        )
    return found["records"] / found["seconds"], found["node_seconds"] / found["records"] * 1e6


def _configure(client: RawClient, group: str, configs: Mapping[str, str]) -> None:
    entries = [{"name": name, "config_operation": 0, "value": value} for name, value in configs.items()]
    resource = {"resource_type": _GROUP_RESOURCE, "resource_name": group, "configs": entries}
    answer = client.call(_ALTER_CONFIGS, 1, {"resources": [resource]})
    if answer.responses[0].error_code:
        raise SystemExit(f"the configs of {group} were refused: {answer.responses[0]}")


# --- costs, by a bare client


def share_costs(bench: Bench) -> Section:
    """Cost per record by the size of the backlog, latency of acknowledgements, memory of what is held."""
    plan = bench.plan
    section = Section(
        "What share groups cost",
        ("what", "measured", "node CPU µs/record", "ratio to the shortest"),
        note=_COSTS_NOTE,
    )
    with bench.node() as node:
        client = RawClient.of(node)
        costs: dict[int, Spread] = {}
        for backlog in plan.share_backlogs:
            bench.progress(f"share: a backlog of {backlog:,} records")
            rates, costs[backlog] = _cost(bench, node, _Member(client, f"backlog-{backlog}", 1), backlog)
            ratio = costs[backlog].over(costs[plan.share_backlogs[0]])
            section.add(f"backlog of {backlog:,}", f"{rates} records/s", costs[backlog], ratio)
        shortest, longest = plan.share_backlogs[0], plan.share_backlogs[-1]
        growth = costs[longest].over(costs[shortest])
        section.aims.append(
            Aim(
                f"share groups: cost per record with a backlog of {longest:,}, by that with {shortest:,}",
                f"≤ {_WANTED_FLATNESS}",
                str(growth),
                growth.median <= _WANTED_FLATNESS,
            )
        )
        bench.progress("share: each record accepted by itself")
        rates, cpus = _cost(bench, node, _Member(client, "each", 1), shortest, singly=True)
        section.add("accept each", f"{rates} records/s", cpus, cpus.over(costs[shortest]))
        bench.progress("share: latency of acknowledgements")
        member = _Member(client, "latency", 1)
        member.fill(0, plan.share_acknowledgements + _BATCH_RECORDS)
        milliseconds = member.acknowledge_each(plan.share_acknowledgements)
        p50, p99 = percentile(milliseconds, 50), percentile(milliseconds, 99)
        section.add("acknowledgement of one record", f"{p50:.2f} ms, p99 {p99:.2f} ms", "", "")
        bench.progress("share: memory of what is held")
        section.add("memory per 1,000 in flight", f"{_held_kb(bench, node, client)} KB", "", "")
        client.close()
    return section


def _cost(
    bench: Bench, node: NodeProcess, member: _Member, backlog: int, *, singly: bool = False
) -> tuple[Spread, Spread]:
    """(records per second, CPU µs of the node per record) of a member that has a backlog of that length."""
    plan = bench.plan
    member.fill(0, backlog + plan.share_fetches * (plan.rounds + 1) * 500)
    # The first one finds much that the node has never done: not in the time of any backlog.
    member.fetch_and_accept()
    measured = [_timed(node, member, plan.share_fetches, singly=singly) for _ in range(plan.rounds)]
    return Spread(rate for rate, _ in measured), Spread(cpu for _, cpu in measured)


def _timed(node: NodeProcess, member: _Member, fetches: int, *, singly: bool = False) -> tuple[float, float]:
    before, started = cpu_seconds(node.pid), time.perf_counter()
    records = sum(member.fetch_and_accept(singly=singly) for _ in range(fetches))
    seconds = time.perf_counter() - started
    return records / seconds, (cpu_seconds(node.pid) - before) / records * 1e6


def _held_kb(bench: Bench, node: NodeProcess, client: RawClient) -> str:
    partitions, held = bench.plan.share_held_partitions, 4_000
    _configure(client, "held", {"share.partition.max.record.locks": str(held)})
    member = _Member(client, "held", partitions)
    for index in range(partitions):
        member.fill(index, held)
    member.fetch_and_accept(max_records=1)
    before, _ = memory_mb(node.pid)
    count = 0
    while count < partitions * held - 500 * partitions:
        count += member.hold(10)
    after, _ = memory_mb(node.pid)
    return number(max(0.0, after - before) * 1_000 / (count / 1_000))


class _Member:
    """A member of a share group that is nothing but its requests."""

    def __init__(self, client: RawClient, group: str, partitions: int) -> None:
        self._client = client
        self._group = group
        self._topic = f"topic-{group}"
        client.create_topic(self._topic, partitions)
        metadata = client.call(_FIND_TOPIC, 12, {"topics": [{"name": self._topic}]})
        self._topic_id = metadata.topics[0].topic_id
        self._partitions = partitions
        self._epoch = 0
        self._held: list[tuple[int, int, int]] = []
        _configure(client, group, {"share.auto.offset.reset": "earliest"})
        self._join()

    def _join(self) -> None:
        """Be a member until the state of all partitions is initialized."""
        body = {
            "group_id": self._group,
            "member_id": "bench",
            "member_epoch": 0,
            "subscribed_topic_names": [self._topic],
        }
        deadline = time.monotonic() + _STALLED_SECONDS
        while time.monotonic() < deadline:
            answer = self._client.call(_HEARTBEAT, 1, body)
            if answer.error_code:
                raise SystemExit(f"the heartbeat of {self._group} was refused: {answer}")
            body |= {"member_epoch": answer.member_epoch, "subscribed_topic_names": None}
            assigned = answer.assignment.topic_partitions if answer.assignment is not None else ()
            if sum(len(each.partitions) for each in assigned) == self._partitions:
                return
            time.sleep(0.05)
        raise SystemExit(f"{self._group} got no assignment")

    def fill(self, index: int, records: int) -> None:
        batch = batch_of(_BATCH_RECORDS, _BATCH_RECORDS)
        for _ in range(records // _BATCH_RECORDS):
            self._client.produce(self._topic, range(index, index + 1), batch, acks=0)
        self._client.produce(self._topic, range(index, index + 1), batch)

    def fetch_and_accept(self, max_records: int = 500, *, singly: bool = False) -> int:
        """Fetch, accepting what the last call has fetched: in ranges, or singly. How many records came."""
        accepted = self._held
        if singly:
            accepted = [
                (index, each, each) for index, first, last in self._held for each in range(first, last + 1)
            ]
        given = self._fetch(max_records, accepted, mode=0)
        self._held = given
        return sum(last - first + 1 for _, first, last in given)

    def hold(self, max_records: int) -> int:
        """Fetch exactly so many, and keep them."""
        return sum(last - first + 1 for _, first, last in self._fetch(max_records, (), mode=1))

    def _fetch(
        self, max_records: int, accepted: Sequence[tuple[int, int, int]], mode: int
    ) -> list[tuple[int, int, int]]:
        batches: dict[int, list[dict[str, Any]]] = {}
        for index, first, last in accepted:
            batches.setdefault(index, []).append(_batch(first, last))
        indexes = range(self._partitions) if self._epoch == 0 else batches
        body = {
            "group_id": self._group,
            "member_id": "bench",
            "share_session_epoch": self._epoch,
            "max_wait": 500,
            "min_bytes": 1,
            "max_bytes": 10_000_000,
            "max_records": max_records,
            "batch_size": max_records,
            "share_acquire_mode": mode,
            "topics": [
                {
                    "topic_id": self._topic_id,
                    "partitions": [
                        {"partition_index": index, "acknowledgement_batches": batches.get(index, [])}
                        for index in indexes
                    ],
                }
            ],
            "forgotten_topics_data": [],
        }
        self._epoch += 1
        answer = self._client.call(_SHARE_FETCH, 2, body)
        if answer.error_code:
            raise SystemExit(f"a ShareFetch of {self._group} was refused: {answer.error_message}")
        found = []
        for topic in answer.responses:
            for partition in topic.partitions:
                if partition.error_code or partition.acknowledge_error_code:
                    raise SystemExit(f"a ShareFetch of {self._group} failed: {partition}")
                found += [
                    (partition.partition_index, each.first_offset, each.last_offset)
                    for each in partition.acquired_records
                ]
        return found

    def acknowledge_each(self, count: int) -> list[float]:
        """Accept records one by one. Milliseconds of each acknowledgement."""
        waiting: list[tuple[int, int]] = []
        found: list[float] = []
        while len(found) < count:
            if not waiting:
                given = self._fetch(100, (), mode=0)
                waiting = [
                    (index, offset) for index, first, last in given for offset in range(first, last + 1)
                ]
            index, offset = waiting.pop()
            partition = {"partition_index": index, "acknowledgement_batches": [_batch(offset, offset)]}
            body = {
                "group_id": self._group,
                "member_id": "bench",
                "share_session_epoch": self._epoch,
                "topics": [{"topic_id": self._topic_id, "partitions": [partition]}],
            }
            self._epoch += 1
            started = time.perf_counter()
            answer = self._client.call(_SHARE_ACKNOWLEDGE, 2, body)
            found.append((time.perf_counter() - started) * 1_000)
            if answer.error_code or answer.responses[0].partitions[0].error_code:
                raise SystemExit(f"an acknowledgement was refused: {answer}")
        return found


def _batch(first: int, last: int) -> dict[str, Any]:
    return {"first_offset": first, "last_offset": last, "acknowledge_types": [_ACCEPT]}


# --- the child: a group of confluent-kafka's consumers


class _Count:
    """Records that the members of a group were given."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.count = 0
        self.began = 0.0
        self.ended = 0.0
        self._lock = threading.Lock()

    def add(self, records: int) -> None:
        now = time.perf_counter()
        with self._lock:
            self.began = self.began or now
            self.count += records
            self.ended = now

    @property
    def left(self) -> int:
        return self.wanted - self.count


def _group(
    job: str,
    servers: str,
    port: int,
    members: int,
    records: int,
    warm_up_seconds: float,
    keyed: bool,
    node_pid: int,
) -> dict[str, float]:
    total = records // (_PARTITIONS * _BATCH_RECORDS) * _PARTITIONS * _BATCH_RECORDS
    count = _Count(total)
    work = {"share": _share_member, "share-each": _explicit_member, "consume": _consumer_member}[job]
    threads = [threading.Thread(target=work, args=(servers, count), daemon=True) for _ in range(members)]
    for thread in threads:
        thread.start()
    time.sleep(warm_up_seconds)
    before = cpu_seconds(node_pid)
    _fill(port, total, keyed=keyed)
    for thread in threads:
        thread.join()
    return {
        "records": count.count,
        "seconds": count.ended - count.began,
        "node_seconds": cpu_seconds(node_pid) - before,
    }


def _fill(port: int, records: int, *, keyed: bool) -> None:
    import socket

    from tidemill.records.record import Record, build_batch

    client = RawClient(socket.create_connection(("127.0.0.1", port)))
    value = b"x" * _RECORD_BYTES
    rounds = records // (_PARTITIONS * _BATCH_RECORDS)
    batches = [
        build_batch(
            [
                Record(b"%d" % ((turn * _BATCH_RECORDS + each) % _KEYS) if keyed else None, value)
                for each in range(_BATCH_RECORDS)
            ]
        )
        for turn in range(_KEYS // _BATCH_RECORDS)
    ]
    for turn in range(rounds):
        is_last = turn == rounds - 1
        client.produce(_TOPIC, range(_PARTITIONS), batches[turn % len(batches)], acks=-1 if is_last else 0)
    client.close()


def _share_member(servers: str, count: _Count) -> None:
    from confluent_kafka import ShareConsumer

    consumer = ShareConsumer({"bootstrap.servers": servers, "group.id": "bench", "log_level": 0})
    consumer.subscribe([_TOPIC])
    while count.left > 0:
        messages = consumer.poll(0.2)
        if len(messages):
            _check(messages)
            count.add(len(messages))
    consumer.commit_sync()
    consumer.close()


def _explicit_member(servers: str, count: _Count) -> None:
    from confluent_kafka import AcknowledgeType, ShareConsumer

    consumer = ShareConsumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "share.acknowledgement.mode": "explicit",
            "log_level": 0,
        }
    )
    consumer.subscribe([_TOPIC])
    while count.left > 0:
        messages = consumer.poll(0.2)
        if len(messages):
            _check(messages)
            for message in messages:
                consumer.acknowledge(message, AcknowledgeType.ACCEPT)
            consumer.commit_sync()
            count.add(len(messages))
    consumer.close()


def _consumer_member(servers: str, count: _Count) -> None:
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.subscribe([_TOPIC])
    while (left := count.left) > 0:
        messages = consumer.consume(min(500, left), 0.05)
        if messages:
            _check(messages)
            count.add(len(messages))
    consumer.close()


def _check(messages: Any) -> None:
    for message in messages:
        if message.error() is not None:
            raise SystemExit(f"a member was told {message.error()}")


if __name__ == "__main__":
    print(json.dumps(_group(sys.argv[1], **json.loads(sys.argv[2]))))
