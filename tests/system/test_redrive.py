"""Dead letters go back to where they came from, each once, chosen by reason and by time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

import tidemill
from tidemill.client.admin.topics import delete_topic
from tidemill.client.async_client import connect_async
from tidemill.client.producing import transactional
from tidemill.client.share import redrive as redriving
from tidemill.client.share.redrive import Choice, Redriven, redrive
from tidemill.client.share.transaction import AsyncShareTransaction
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.partition import machine

DLQ = "dlq.outbox"


@pytest.fixture
def db() -> Iterator[tidemill.Tidemill]:
    with tidemill.open() as node:
        yield node


def run(db: tidemill.Tidemill, choice: Choice, **options: bool) -> Redriven:
    async def work() -> Redriven:
        async with await connect_async(db.bootstrap_servers) as client:
            return await redrive(client.cluster, choice, **options)  # type: ignore[arg-type]

    return asyncio.run(work())


def take(share: tidemill.Share, count: int) -> list[tidemill.ShareRecord]:
    """The next ``count`` records, and whatever comes with the last of them."""
    found: list[tidemill.ShareRecord] = []
    while len(found) < count:
        more = share.poll(timeout=120)
        assert more, f"{len(found)} of {count} records came"
        found += more
    return found


def kill_all(db: tidemill.Tidemill, *reasons: str) -> None:
    """Have a group reject a record for each reason, and wait for the letters."""
    db.produce_many("outbox", [(f"k{number}", why) for number, why in enumerate(reasons)])
    with db.share("emails", "outbox", dead_letter=DLQ) as share:
        for _ in reasons:
            record = share.next()
            record.reject(record.text())
        share.flush()
        while share.lag():
            time.sleep(0.02)


def test_letters_are_chosen_sent_back_once_and_name_their_group(db: tidemill.Tidemill) -> None:
    kill_all(db, "no such address", "too large", "no such address")
    everything = Choice("emails")
    planned = run(db, everything, execute=False)
    assert (planned.sent, planned.not_chosen) == ({"outbox": 3}, 0)
    assert planned.reasons == {"no such address": 2, "too large": 1}
    some = run(db, Choice("emails", reason="address"))
    assert (some.sent, some.not_chosen) == ({"outbox": 2}, 1)
    with db.share("emails", "outbox") as share:
        back = sorted(take(share, 2), key=lambda record: record.key or b"")
        assert [(record.key, record.text()) for record in back] == [
            (b"k0", "no such address"),
            (b"k2", "no such address"),
        ]
        assert all(record.header("tidemill-redriven-for") == b"emails" for record in back)
        assert all(record.header("__dlq.errors.topic") is None for record in back)
        for record in back:
            record.accept()
    assert run(db, Choice("emails", until_ms=1)).not_chosen == 1, "the other one is still there"
    with pytest.raises(ApiError, match="no dead-letter topic"):
        run(db, Choice("others"))
    assert run(db, everything).sent == {"outbox": 1}
    assert run(db, everything).sent == {}, "each once"


def test_letters_of_a_topic_that_is_gone_stay_where_they_are(db: tidemill.Tidemill) -> None:
    kill_all(db, "a")

    async def delete() -> None:
        async with await connect_async(db.bootstrap_servers) as client:
            await delete_topic(client.cluster, "outbox")

    asyncio.run(delete())
    done = run(db, Choice("emails"))
    assert (done.sent, done.topic_is_gone) == ({}, 1)


def test_redrives_that_run_side_by_side_send_each_letter_once(db: tidemill.Tidemill) -> None:
    kill_all(db, *map(str, range(40)))

    async def work() -> list[Redriven]:
        async with await connect_async(db.bootstrap_servers) as client:
            return await asyncio.gather(*(redrive(client.cluster, Choice("emails")) for _ in range(3)))

    assert sum(done.sent["outbox"] for done in asyncio.run(work())) == 40
    with db.share("readers", "outbox", read_committed=True) as share:
        seen = [record.text() for record in take(share, 80)]
        assert sorted(map(int, seen)) == sorted([*range(40), *range(40)])


def test_a_redrive_that_dies_before_its_commit_is_done_once_by_the_next(
    db: tidemill.Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_all(db, "a", "b")

    class Died(Exception):
        pass

    async def die(transaction: AsyncShareTransaction, *, commit: bool) -> None:
        await transaction._producer.flush()
        await transaction._tell()
        # As a process that is gone: nobody aborts, and the coordinator's timeout has to.
        raise Died

    monkeypatch.setattr(redriving, "_PATIENCE_SECONDS", 5.0)
    with monkeypatch.context() as patch:
        patch.setattr(AsyncShareTransaction, "end", die)
        patch.setattr(transactional, "_TRANSACTION_MS", 2_000)
        with pytest.raises(Died):
            run(db, Choice("emails"))
    sent = 0
    for _ in range(240):
        sent += sum(run(db, Choice("emails")).sent.values())
        if sent == 2:
            break
        time.sleep(0.5)
    assert sent == 2
    assert run(db, Choice("emails")).sent == {}
    with db.share("readers", "outbox", read_committed=True) as share:
        seen = take(share, 4)
        assert len(seen) == 4, "the two that died, and each of them again"


def test_a_redrive_waits_for_a_letter_that_its_own_failed_transaction_holds(
    db: tidemill.Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_all(db, "a")
    real, failed = AsyncShareTransaction.end, list[bool]()

    async def end(transaction: AsyncShareTransaction, *, commit: bool) -> None:
        if failed:
            await real(transaction, commit=commit)
            return
        failed.append(True)
        await transaction._producer.flush()
        await transaction._tell()
        # As if its coordinator could not be reached: the transaction stays open until somebody aborts it.
        transaction._producer._is_open, transaction._producer._identity = False, None
        raise ApiError(ErrorCode.not_coordinator, "the coordinator is away")

    monkeypatch.setattr(AsyncShareTransaction, "end", end)
    done = run(db, Choice("emails"))
    assert (failed, done.sent) == ([True], {"outbox": 1})


def test_a_redrive_holds_what_it_does_not_choose_and_tells_what_it_could_not_look_at(
    db: tidemill.Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        kill_all(db, *["even", "odd"] * 5)
    planned = run(db, Choice("emails", reason="odd"), execute=False)
    assert (planned.sent["outbox"], planned.not_chosen, planned.not_looked_at) == (15, 15, 0)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_RUNS_MAX", 1)
        patch.setattr(redriving, "_LETTERS_MAX", 1)
        some = run(db, Choice("emails", reason="odd"))
    assert 1 <= some.not_chosen <= 5, "the first letter is kept, and was written with nine others at most"
    assert some.not_looked_at >= 20
    rest = run(db, Choice("emails"))
    assert (rest.sent["outbox"], rest.not_looked_at) == (30 - some.sent["outbox"], 0)
