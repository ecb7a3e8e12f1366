"""What ``tidemill pipeline run`` says of its results, with a real node to ask."""

from __future__ import annotations

from pathlib import Path

import tidemill
from tidemill.cli.pipelines.results import Written, how_to_look, log_ends, spark_tables, written_since


def test_tables_and_topics_that_were_written_are_found() -> None:
    with tidemill.open(http=None) as node:
        servers = node.bootstrap_servers
        node.create_table("shop.kept", "id bigint", primary_key="id").upsert([{"id": 1}])
        table = node.create_table("shop.orders", "id bigint", primary_key="id", buckets=3)
        before = log_ends(servers)
        assert before == {"shop.kept": 1, "shop.orders": 0}
        assert written_since(before, servers) == Written()
        table.upsert([{"id": number} for number in range(10)])
        assert written_since(before, servers) == Written(("shop.orders",), ())


def test_a_node_that_does_not_answer_spoils_nothing() -> None:
    assert log_ends("127.0.0.1:1") == {}
    assert written_since({}, "127.0.0.1:1") == Written()


def test_tables_of_spark_are_folders_of_the_warehouse(tmp_path: Path) -> None:
    (tmp_path / "a b" / "history").mkdir(parents=True)
    warehouse = (tmp_path / "a b").as_uri()
    assert spark_tables(warehouse, ["keep_latest", "history"]) == [tmp_path / "a b" / "history"]
    assert spark_tables("s3a://bucket/folder", ["history"]) == []


def test_results_of_a_runs_own_node_need_that_node_again() -> None:
    lines = how_to_look(
        Written(("shop.orders",)), [Path("state/w/history")], "127.0.0.1:5", Path("state/node")
    )
    assert lines[0] == "see the results:"
    assert lines[1].startswith("  tidemill up --data state/node ")
    assert lines[2] == "  tidemill table scan shop.orders --limit 10"
    assert "read_parquet('state/w/history')" in lines[3]


def test_results_on_other_nodes_are_asked_of_those() -> None:
    assert how_to_look(Written(("shop.orders",), ("alerts",)), [], "10.0.0.1:9092", None) == [
        "see the results:",
        "  tidemill table scan shop.orders --limit 10 --server 10.0.0.1:9092",
        "  tidemill topic consume alerts --from -10 --exit --server 10.0.0.1:9092",
    ]


def test_a_run_that_wrote_nothing_says_nothing() -> None:
    assert how_to_look(Written(), [], "127.0.0.1:5", Path("state/node")) == []
