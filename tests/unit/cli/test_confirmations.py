"""What cannot be undone is asked about on a terminal, and done without a question elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import tidemill
from tidemill.client.sync_client import Tidemill
from tidemill.records.record import Record
from tidemill.share.letters import Letter, letter_record

DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        node.produce_many("orders", ["a", "b"])
        with node.cursor("billing", "orders") as cursor:
            cursor.poll()
            cursor.commit()
        with node.share("emails", "orders", dead_letter="letters", start="earliest") as share:
            share.next().accept()
            share.flush()
        for owner in ("emails", "ledger"):
            letter = Letter(owner, "orders", 0, 0, 1, "no address")
            parked = letter_record(Record(b"k", b"v", 1_000), letter, copy=True, now_ms=1_000)
            node.produce("letters", parked.value, key=parked.key, headers=dict(parked.headers))
        yield node


class Said(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    errors: str


def answer(db: Tidemill, *arguments: str, with_: bytes) -> Said:
    """Run a command whose input is a terminal where somebody types an answer."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        (sys.executable, "-m", "tidemill", *arguments, "--server", db.bootstrap_servers),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(terminal)
    try:
        os.write(controller, with_)
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        os.close(controller)
    return Said(process.returncode, out, errors)


@pytest.mark.parametrize(
    ("command", "question"),
    [
        (("topic", "trim", "orders", "--before", "latest"), "Delete the records of orders before latest?"),
        (("topic", "delete", "orders"), "Delete orders with all records?"),
        (("share", "delete", "emails"), "Delete share group emails?"),
        (("cursor", "delete", "billing"), "Delete cursor billing and its position?"),
        (
            ("share", "redrive", "emails", "--execute"),
            "Send 1 record back to orders? All readers of the topic see them again.",
        ),
        (
            ("cursor", "replay", "ledger", "--from", "letters", "--execute"),
            "Send 1 record back to orders? All readers of the topic see them again.",
        ),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, tuple) else "",
)
def test_nothing_happens_before_somebody_says_yes(
    db: Tidemill, command: tuple[str, ...], question: str
) -> None:
    said = answer(db, *command, with_=b"n\n")
    assert (said.code, said.out) == (1, "")
    assert f"{question} [y/N]: " in said.errors
    assert db.cursor(None, "orders").lag().records == 2


def test_a_yes_sends_letters_back_and_leaves_stdout_to_the_result(db: Tidemill) -> None:
    replay = ("--format", "json", "cursor", "replay", "ledger", "--from", "letters", "--execute")
    said = answer(db, *replay, with_=b"y\n")
    assert json.loads(said.out) == {
        "worker": "ledger",
        "executed": True,
        "sent": {"orders": 1},
        "reasons": {"no address": 1},
        "parked_twice": 0,
        "without_contents": 0,
    }
    command = ("share", "redrive", "emails", "--execute", "--yes")
    said = answer(db, *command, with_=b"")
    assert (said.code, said.errors) == (0, "")
    assert said.out.splitlines()[1].split() == ["back", "to", "orders", "1"]
    assert db.cursor(None, "orders").lag().records == 6, "two records, and two with the ends of transactions"
    said = answer(db, *command[:-1], with_=b"")
    assert said.out.splitlines()[1:] == ["not sent  not chosen        1"], "the one of the ledger"
