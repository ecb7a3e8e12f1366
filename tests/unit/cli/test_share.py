"""``tidemill share``: what people see of share groups."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import tidemill
from tidemill.cli.app import make_app
from tidemill.cli.share import _age
from tidemill.client.admin.share_groups import ShareRecords
from tidemill.client.sync_client import Tidemill


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        yield node


def run(db: Tidemill, *arguments: str) -> str:
    result = CliRunner().invoke(make_app(), ["share", *arguments, "--server", db.bootstrap_servers])
    assert result.exit_code == 0, result.output
    return result.output


def test_peek_shows_how_many_records_wait_and_whether_the_partition_is_stalled(db: Tidemill) -> None:
    db.produce_many("outbox", ["a", "b", "c"])
    db.configure_share("emails", max_waiting=2, start="earliest")
    with db.share("emails", "outbox") as records:
        for stalled in ("no", "yes"):
            records.next().release(delay=3_600)
            records.flush()
            waiting = {"no": "1 of 2", "yes": "2 of 2"}[stalled]
            head, line = run(db, "peek", "emails").splitlines()[1:3]
            assert head.split("  ")[-1].strip().lower() == "stalled", head
            assert line.split()[-1] == stalled
            assert waiting in line
        (found,) = json.loads(run(db, "peek", "emails", "--format", "json"))["partitions"]
    assert (found["waiting"], found["max_waiting"], found["is_stalled"]) == (2, 2, True)


def test_an_age_that_may_be_larger_is_told_as_such() -> None:
    known = ShareRecords(0, 3, "available", 1, "", 0, 1_500, "")
    assert _age(known) == "1.5 s"
    assert _age(ShareRecords(0, 3, "available", 1, "", 0, 1_500, "", is_age_minimum=True)) == "≥ 1.5 s"
