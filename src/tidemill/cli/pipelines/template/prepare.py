"""Makes what the pipeline needs; 'tidemill pipeline run' runs it first, every time.

What is there already stays as it is. An empty table of events is given 1,000 sample orders; delete that
part when real ones come.

    python prepare.py --send 500    sends the events of 500 more orders

The node is that of $TIDEMILL_SERVER. Without it, as in spark-pipeline.yml, it is one of the project's own.
"""

import argparse
import os
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import tidemill

EVENTS = "shop.order_events"
LATEST = "shop.orders"
COLUMNS = "id bigint not null, region string, amount decimal(12,2), status string, at timestamp"
NODE_DATA = Path(__file__).parent / "state" / "node"


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tables and send sample orders.")
    parser.add_argument("--send", type=int, default=0, metavar="N", help="the events of N more orders")
    wanted = parser.parse_args().send

    server = os.environ.get("TIDEMILL_SERVER")
    with tidemill.connect(server) if server else tidemill.open(NODE_DATA) as db:
        # A log of events, which any Kafka client can write too, as JSON. It has one bucket: the events of an
        # order must stay in their order.
        events = db.create_table(EVENTS, COLUMNS, row_format="json", if_not_exists=True)
        # The latest event of every order.
        db.create_table(LATEST, COLUMNS, primary_key="id", buckets=2, if_not_exists=True)
        sent = sum(bucket.log_end_offset for bucket in events.stats())
        wanted = wanted or (0 if sent else 1_000)
        if wanted:
            rows = sample_events(first_id=sent, orders=wanted)
            events.append(rows)
            print(f"sent {len(rows):,} events of {wanted:,} orders to {EVENTS}")


def sample_events(first_id: int, orders: int) -> list[dict[str, object]]:
    """Every order is placed; four out of five are paid later."""
    chance = random.Random(first_id)
    start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=first_id)
    events: list[dict[str, object]] = []
    for number in range(orders):
        order = {
            "id": first_id + number,
            "region": chance.choice(("africa", "america", "asia", "europe")),
            "amount": Decimal(chance.randrange(100, 20_000)) / 100,
        }
        at = start + timedelta(seconds=number)
        events.append({**order, "status": "placed", "at": at})
        if number % 5:
            events.append({**order, "status": "paid", "at": at + timedelta(minutes=5)})
    return events


if __name__ == "__main__":
    main()
