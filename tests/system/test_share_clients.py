"""Share consumers of other makers: confluent-kafka's ShareConsumer and Java's KafkaShareConsumer.

Each member is a process of its own. They accept records, reject those that are "bad", and release "flaky"
ones until their third delivery. Where Java or Maven is missing its tests are skipped, and say so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidemill
from support.group_stories import end_sessions_soon
from support.processes import ClientProcess, NodeProcess, wait_until

CLIENTS = {"confluent-kafka": "confluent_share", "Java": "java"}

pytestmark = pytest.mark.parametrize("kind", CLIENTS, indirect=True)

Start = Callable[[], ClientProcess]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """The node that the tests of this module share; members speak often."""
    # A busy machine must not end a lock: the tests count deliveries.
    settings = {"group_share_heartbeat_interval_ms": 500, "group_share_record_lock_duration_ms": 60_000}
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The maker of the client."""
    return str(request.param)


@pytest.fixture(scope="module")
def db(node: NodeProcess) -> Iterator[tidemill.Tidemill]:
    """A connection for writing and for looking after the groups."""
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture(scope="module")
def clients(
    kind: str, node: NodeProcess, start_shared_client: Callable[..., ClientProcess]
) -> Callable[[int], ClientProcess]:
    """Processes of the client, by number; a dead one is replaced."""
    running: dict[int, ClientProcess] = {}

    def get(number: int) -> ClientProcess:
        if number not in running or not running[number].alive:
            running[number] = start_shared_client(CLIENTS[kind], node)
        return running[number]

    return get


Clients = Callable[[int], ClientProcess]
feature = pytest.mark.feature


def lag(db: tidemill.Tidemill, group: str, topic: str) -> int:
    """Records that the group has not finished; -1 if it has not begun."""
    from tidemill.client.share.lag import group_lag

    return db.run(group_lag(db._awaited.cluster, group, [topic]))


def joined(client: ClientProcess, group: str, topic: str, mode: str = "explicit") -> str:
    client.call("share_join", name=group, group=group, topic=topic, mode=mode)
    return group


@feature("share groups: accept, release, reject, delivery count")
def test_records_are_accepted_released_and_rejected(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    db.configure_share(topic, start="earliest")
    db.produce_many(topic, ["good-1", "bad-1", "flaky-1", "good-2", "flaky-2"])
    member = joined(clients(0), topic, topic)
    found = clients(0).call("share_wait", name=member, deliveries=9)
    assert Counter((value, outcome) for value, _, outcome in found) == {
        ("good-1", "accept"): 1,
        ("good-2", "accept"): 1,
        ("bad-1", "reject"): 1,
        ("flaky-1", "release"): 2,
        ("flaky-1", "accept"): 1,
        ("flaky-2", "release"): 2,
        ("flaky-2", "accept"): 1,
    }
    counts = defaultdict(list)
    for value, count, _ in found:
        counts[value].append(count)
    assert counts["flaky-1"] == counts["flaky-2"] == [1, 2, 3]
    assert clients(0).call("share_leave", name=member) == found
    assert lag(db, topic, topic) == 0


@feature("share groups: independent groups, implicit acknowledgement")
def test_groups_are_independent_and_implicit_members_accept_everything(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    values = [f"v{number}" for number in range(200)]
    db.produce_many(topic, values)
    for group in (f"{topic}-a", f"{topic}-b"):
        db.configure_share(group, start="earliest")
        member = joined(clients(0), group, topic, "implicit")
        found = clients(0).call("share_wait", name=member, deliveries=200)
        clients(0).call("share_leave", name=member)
        assert sorted(value for value, _, _ in found) == sorted(values)
        assert {count for _, count, _ in found} == {1}
        assert lag(db, group, topic) == 0


@feature("share groups: start at the end")
def test_a_group_that_starts_at_the_end_gets_what_comes_later(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    db.produce_many(topic, ["old-1", "old-2"])
    member = joined(clients(0), topic, topic)
    # Until the group has begun at the end, what is written may be before it.
    fresh = 0

    def arrived() -> list[Any]:
        nonlocal fresh
        db.produce(topic, f"new-{fresh}")
        fresh += 1
        found: list[Any] = clients(0).call("share_wait", name=member)
        return found

    found = wait_until(arrived, "a new record has arrived")
    found = clients(0).call("share_leave", name=member)
    assert {value.split("-")[0] for value, _, _ in found} == {"new"}


@feature("share groups: members share the records of a partition")
def test_members_of_two_makers_share_the_records_of_one_partition(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    """Two processes of the client, and a Python worker: every record is handled once, by one of them."""
    db.configure_share(topic, start="earliest")
    db.produce(topic, "first")
    members = [clients(0), clients(1)]
    for client in members:
        joined(client, topic, topic)
    ours: list[str] = []
    worker = db.worker(topic, topic, lambda record: ours.append(record.text()), concurrency=4)
    values = ["first"]
    with worker:
        for number in range(40):
            texts = [f"{number}-{each}" for each in range(25)]
            db.produce_many(topic, texts)
            values += texts

        def theirs() -> int:
            return sum(len(client.call("share_wait", name=topic)) for client in members)

        wait_until(lambda: len(ours) + theirs() >= len(values), "all have been handled")
    found = [each for client in members for each in client.call("share_leave", name=topic)]
    assert {count for _, count, _ in found} == {1}
    assert sorted([value for value, _, _ in found] + ours) == sorted(values)
    assert lag(db, topic, topic) == 0


@feature("share groups: a member dies")
def test_what_a_killed_member_held_goes_to_the_others(
    node: NodeProcess, db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    db.configure_share(topic, start="earliest")
    end_sessions_soon(node, topic, "share")
    db.produce_many(topic, [f"v{number}" for number in range(50)])
    victim = clients(1)
    joined(victim, topic, topic)
    before = victim.call("share_wait", name=topic, deliveries=1)
    joined(clients(0), topic, topic)
    victim.kill()
    wait_until(lambda: lag(db, topic, topic) == 0, "all are done")
    after = clients(0).call("share_leave", name=topic)
    # What the victim had said is done; what it held comes again. It may have said more than it told the test.
    accepted = {value for value, _, _ in before}
    assert not accepted & {value for value, _, _ in after}
    assert len({value for value, _, _ in after}) == len(after)


@feature("share groups: order per key, retry with delay")
def test_order_per_key_and_backoff_hold_for_clients_that_know_nothing_of_them(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    db.configure_share(topic, start="earliest", order="key", retry_backoff=0.05)
    records = []
    for number in range(20):
        for key in ("a", "b", "c", "d"):
            flaky = "flaky-" if number % 7 == 3 else ""
            records.append((key, f"{flaky}{key}-{number:02}"))
    db.produce_many(topic, records)
    for number in (0, 1):
        joined(clients(number), topic, topic)
    wait_until(lambda: lag(db, topic, topic) == 0, "all are done")
    accepted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number in (0, 1):
        for value, _, outcome in clients(number).call("share_leave", name=topic):
            if outcome == "accept":
                key, at = value.removeprefix("flaky-").split("-")
                accepted[key, number].append(int(at))
    for found in accepted.values():
        # Without the order, what was released would come back behind later records of its key.
        assert found == sorted(found)
    assert {key: sorted(accepted[key, 0] + accepted[key, 1]) for key in ("a", "b", "c", "d")} == {
        key: list(range(20)) for key in ("a", "b", "c", "d")
    }


@feature("share groups: order per key, retry with delay")
def test_a_released_record_waits_for_its_backoff_while_others_come(
    db: tidemill.Tidemill, clients: Clients, topic: str
) -> None:
    from tidemill.client.admin.share_groups import share_records

    # As long as a test may take.
    db.configure_share(topic, start="earliest", retry_backoff=600)
    db.produce(topic, "flaky-1")
    joined(clients(0), topic, topic)
    clients(0).call("share_wait", name=topic, deliveries=1)

    def delayed() -> int:
        found: int = db.run(share_records(db._awaited.cluster, topic, (topic, 0))).delayed
        return found

    wait_until(lambda: delayed() == 1, "the node waits with the record that was released")
    db.produce_many(topic, [f"good-{number}" for number in range(20)])
    clients(0).call("share_wait", name=topic, deliveries=21)
    found = clients(0).call("share_leave", name=topic)
    assert [each for each in found if each[0] == "flaky-1"] == [["flaky-1", 1, "release"]]
    assert len(found) == 21
    assert delayed() == 1
