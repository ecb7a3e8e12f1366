"""Accept records and write in one transaction, from Python, against a whole node: all or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import tidemill
from tidemill.errors import ApiError


@pytest.fixture
def db() -> Iterator[tidemill.Tidemill]:
    with tidemill.open() as node:
        yield node


def test_what_a_transaction_writes_and_accepts_counts_together(db: tidemill.Tidemill) -> None:
    seen = db.create_table("shop.seen", "id bigint, what string", primary_key=["id"])
    db.produce_many("orders", ["a", "b"])
    with db.share("billing", "orders", read_committed=True) as share:
        first = share.next()
        with share.transaction() as transaction:
            transaction.send("invoices", {"of": first.text()}, key="k")
            transaction.upsert(seen, [{"id": 1, "what": first.text()}])
            transaction.accept(first)
        assert seen.lookup(1) == {"id": 1, "what": "a"}
        second = share.next()
        with contextlib.suppress(ZeroDivisionError), share.transaction() as transaction:
            transaction.upsert(seen, [{"id": 2, "what": second.text()}])
            transaction.send("invoices", "never")
            transaction.accept(second)
            raise ZeroDivisionError
        again = share.next()
        assert (again.text(), again.delivery_count) == ("b", 2)
        assert seen.lookup(2) is None
        with share.transaction() as transaction:
            transaction.accept(again)
            with pytest.raises(ApiError, match="settle a record"):
                transaction.accept(again)
        assert share.counts.accepted == 2
    with db.share("readers", "invoices", read_committed=True) as invoices:
        assert [record.json() for record in invoices.poll(timeout=120)] == [{"of": "a"}]
    # Accepted is never delivered again, whoever comes next.
    with db.share("billing", "orders") as share:
        assert share.poll(timeout=1.0) == []
        assert share.lag() == 0


def test_a_record_whose_lock_has_ended_is_not_accepted_and_nothing_is_written(db: tidemill.Tidemill) -> None:
    seen = db.create_table("shop.seen", "id bigint, what string", primary_key=["id"])
    db.produce("orders", "a")
    with db.share("billing", "orders") as share:
        record = share.next()
        record.release(delay=0)
        share.flush()
        again = share.next()
        record._settled = None  # A caller that does not know.
        transaction = share.transaction()
        transaction.begin()
        transaction.upsert(seen, [{"id": 1, "what": "late"}])
        transaction.accept(record)
        with pytest.raises(ApiError, match="had ended"):
            transaction.end(commit=True)
        assert seen.lookup(1) is None
        again.accept()
