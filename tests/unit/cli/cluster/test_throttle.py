"""``tidemill cluster throttle``, and the throttle in the list of moves: what is set, shown and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.app import make_app
from tidemill.cli.cluster.throttle import throttle_text
from tidemill.client.admin.replicas import NodeThrottle, set_throttle
from tidemill.client.admin.topics import create_topic
from tidemill.client.sync_client import Tidemill

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def node() -> Iterator[Tidemill]:
    with tidemill.open() as opened:
        opened.run(create_topic(opened._awaited.cluster, "t", partitions=1))
        yield opened


@pytest.fixture
def db(node: Tidemill) -> Tidemill:
    """A node without a throttle."""
    node.run(set_throttle(node._awaited.cluster, None))
    return node


def run(db: Tidemill, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(make_app(), ["cluster", *arguments, "--server", db.bootstrap_servers])
    assert result.exit_code == code, result.output
    return result.output


def limits(db: Tidemill, *arguments: str) -> list[tuple[int | None, int | None]]:
    """What each node sends and fetches, as the command says in JSON."""
    shown: list[dict[str, Any]] = json.loads(run(db, "throttle", *arguments, "--format", "json"))
    return [(each["send"], each["fetch"]) for each in shown]


def test_a_throttle_is_set_shown_and_removed(db: Tidemill) -> None:
    assert limits(db) == [(None, None)]
    assert limits(db, "50MiB") == [(50 * MIB, 50 * MIB)]
    assert "50.0 MiB/s" in run(db, "throttle")
    assert limits(db, "2000", "--node", "1") == [(2_000, 2_000)], "the node's own comes first"
    assert limits(db, "3000", "--node", "node-1") == [(3_000, 3_000)], "a node has a name, too"
    assert limits(db, "--node", "1", "--off") == [(50 * MIB, 50 * MIB)]
    assert limits(db, "--off") == [(None, None)]


def test_a_throttle_of_all_nodes_takes_the_place_of_that_of_one(db: Tidemill) -> None:
    limits(db, "2000", "--node", "1")
    assert limits(db, "3000") == [(3_000, 3_000)]
    limits(db, "2000", "--node", "1")
    assert limits(db, "--off") == [(None, None)]


def test_the_list_of_moves_and_the_status_show_the_throttle(db: Tidemill) -> None:
    assert "throttle" not in run(db, "reassign") + run(db, "status")
    limits(db, "50MiB")
    told = "each node sends at most 50.0 MiB/s and fetches at most 50.0 MiB/s"
    assert f"throttle: {told}" in run(db, "reassign")
    assert f"throttle of moves: {told}" in run(db, "status")
    assert json.loads(run(db, "reassign", "--format", "json")) == []
    (shown,) = json.loads(run(db, "status", "--format", "json"))["throttles"]
    assert shown == {"node": 1, "send": 50 * MIB, "fetch": 50 * MIB}


def test_a_move_is_begun_with_a_throttle_that_stays(db: Tidemill) -> None:
    run(db, "reassign", "t", "0", "--to", "1", "--throttle", "1MiB", "--wait")
    assert limits(db) == [(MIB, MIB)]


def test_commands_take_the_names_of_nodes_and_count_with_words(db: Tidemill) -> None:
    assert "the move of t-0 is done" in run(db, "reassign", "t", "0", "--to", "node-1", "--wait")
    assert "1 of 1 node live, 1 topic, 1 partition, controller 1 (node-1)" in run(db, "status")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("throttle", "fast"), 2, "a number of bytes"),
        (("throttle", "0"), 2, "'--off' removes it"),
        (("throttle", "50MiB", "--off"), 2, "either BYTES or --off"),
        (("throttle", "--node", "1"), 2, "give BYTES or --off"),
        (("throttle", "9999999999GiB"), 1, "leader.replication.throttled.rate"),
        (("throttle", "1MiB", "--node", "9"), 3, "there is no node '9'"),
        (("throttle", "1MiB", "--node", "-1"), 3, "there is no node '-1'"),
        (("drain", "9"), 3, "there is no node '9': give the number or the name of one"),
        (("remove", "one"), 3, "there is no node 'one'"),
        (("reassign", "--throttle", "1MiB"), 2, "give TOPIC PARTITION"),
        (("reassign", "t", "0", "--to", "1", "--throttle", "slow"), 2, "a number of bytes"),
        (("reassign", "t", "0", "--to", "1,one", "--throttle", "1MiB"), 3, "there is no node 'one'"),
    ],
)
def test_what_cannot_be_a_throttle_is_refused_and_changes_nothing(
    db: Tidemill, arguments: tuple[str, ...], code: int, said: str
) -> None:
    # Messages about the command line stand in a box, over several lines.
    words = run(db, *arguments, code=code).replace("│", " ").split()
    assert said in " ".join(words)
    assert limits(db) == [(None, None)]


def test_nodes_with_other_limits_are_named() -> None:
    found = {1: NodeThrottle(1024, None), 2: NodeThrottle(1024, 2048), 3: NodeThrottle(1024, None)}
    assert throttle_text(found) == (
        "each of the nodes 1, 3 sends at most 1.0 KiB/s; "
        "node 2 sends at most 1.0 KiB/s and fetches at most 2.0 KiB/s"
    )
    assert throttle_text({}) is None
