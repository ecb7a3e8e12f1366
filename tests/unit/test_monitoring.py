"""A live node exposes what docs/monitoring.md lists, and all that the dashboard and the alerts use."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.prometheus_text import Family, parse_metrics
from tidemill.client.admin import topics as admin
from tidemill.client.async_client import connect_async
from tidemill.client.consuming.group_consumer import GroupConsumer
from tidemill.client.consuming.record_reader import RecordReader
from tidemill.client.producing.producer import Producer
from tidemill.client.workers.metrics import WORKER_METRICS
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.records.record import Record
from tidemill.server.cluster.metrics import CLUSTER_METRICS
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.cursor_lag import CURSOR_METRICS
from tidemill.server.node import Node

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
PAGE = ROOT / "docs" / "monitoring.md"
_ROW = re.compile(
    r"^\| `([a-z_0-9]+)` \| (counter|gauge|histogram) \| ([a-z, ]*?) ?\| (.+) \|$", re.MULTILINE
)
#: How long a fetch at the end of the log waits.
WAIT_MS = 300
#: What Prometheus itself knows of a target.
_OF_PROMETHEUS = {"up"}
#: What a node has only once something has happened: damage, long turns of the loop.
_SELDOM = re.compile(r"tidemill_(loop_slow_turns_total|partition_damaged_batches)")
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"\b(?:tidemill|process)_[a-z_0-9]+\b|\bup\b")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """The metrics of a node with a topic, a group, a table, transactions and a share group."""
    return asyncio.run(_exposed(tmp_path_factory.mktemp("node")))


async def _exposed(directory: Path) -> dict[str, Family]:
    settings = Settings(data_dir=directory, listen=Address("127.0.0.1", 0), http=None)
    node = Node(settings)
    await node.start()
    try:
        async with await connect_async(str(node.address)) as db:
            table = await db.create_table("shop.stock", "id bigint, count int", primary_key=["id"])
            await table.upsert([{"id": number, "count": 2} for number in range(3)])
            await table.delete([{"id": 2}])
            assert await table.lookup({"id": 1}) == {"id": 1, "count": 2}
            await table.create_snapshot()
            # Held until the page is made.
            await table.pin()
            cluster = db.cluster
            await admin.create_topic(cluster, "orders")
            async with Producer(cluster) as producer:
                for number in range(10):
                    await producer.send("orders", Record(None, b"%d" % number))
            reader = RecordReader(cluster, {("orders", 0): 0})
            assert len(await reader.poll()) == 10
            await reader.close()
            waiting = RecordReader(cluster, {("orders", 0): 10}, max_wait_ms=WAIT_MS)
            assert await waiting.poll() == []
            await waiting.close()
            await _commit(cluster, "orders", 4)
            # What the first transaction does.
            await node.broker.coordinators.ensure_topic(TRANSACTIONS)
            # In use until the page is made.
            async with db.share("packers", "orders", start="earliest") as share:
                (await anext(aiter(share))).accept()
                return parse_metrics("".join([part async for part in node.metrics_page()]))
    finally:
        await node.stop()


async def _commit(cluster: Any, topic: str, offset: int) -> None:
    """Commit ``offset`` as a group that has read so far."""

    async def start(partitions: Any) -> dict[Any, int]:
        return dict.fromkeys(partitions, 0)

    consumer = GroupConsumer(cluster, "kitchen", [topic], start)
    seen = 0
    while seen < offset:
        for message in (await consumer.poll())[: offset - seen]:
            consumer.mark(message)
            seen += 1
    await consumer.close()


def test_a_node_tells_lag_latencies_bytes_disk_and_memory(exposed: dict[str, Family]) -> None:
    assert exposed["tidemill_group_lag"].value(group="kitchen", topic="orders", partition="0") == 6
    assert exposed["tidemill_request_seconds"].value("_count", api="Produce") >= 2
    assert exposed["tidemill_request_bytes_total"].value(api="Produce") > 100
    assert exposed["tidemill_response_bytes_total"].value(api="Fetch") > 100
    assert exposed["tidemill_topic_bytes_in_total"].value(topic="orders") > 60
    assert exposed["tidemill_topic_bytes_out_total"].value(topic="orders") > 60
    total = exposed["tidemill_disk_total_bytes"].value()
    assert 0 < exposed["tidemill_disk_free_bytes"].value() < total
    assert exposed["process_resident_memory_bytes"].value() > 10_000_000
    assert exposed["process_cpu_seconds_total"].value() > 0
    assert 3 < exposed["process_open_fds"].value() < exposed["process_max_fds"].value()


def test_a_node_tells_how_far_its_tables_are(exposed: dict[str, Family]) -> None:
    def of_table(name: str) -> float:
        return exposed[f"tidemill_table_{name}"].value(table="shop.stock")

    assert of_table("fold_lag") == 0, "the look-up has waited for it"
    assert of_table("folded_rows_total") == 4, "three rows and a deletion"
    assert of_table("lookups_total") == 1
    assert 1 <= of_table("rows") <= 10
    assert of_table("state_bytes") > 0
    assert of_table("snapshots_total") >= 1
    assert of_table("last_snapshot_timestamp_ms") > 1_700_000_000_000
    assert of_table("rebuilds_total") == 0
    assert exposed["tidemill_table_scans_open"].value() == 0
    assert exposed["tidemill_table_pins"].value() == 1


def test_the_wait_of_a_long_poll_is_no_handling(exposed: dict[str, Family]) -> None:
    whole = exposed["tidemill_request_seconds"]
    handling = exposed["tidemill_fetch_handling_seconds"]
    assert handling.value("_count") == whole.value("_count", api="Fetch")
    assert whole.value("_sum", api="Fetch") - handling.value("_sum") >= WAIT_MS / 1_000


def test_the_page_lists_every_metric_with_kind_and_labels(exposed: dict[str, Family]) -> None:
    listed = {
        name: (kind, {label for label in labels.replace(" ", "").split(",") if label})
        for name, kind, labels, _ in _ROW.findall(PAGE.read_text())
    }
    found = {
        name: (family.kind, {label for _, labels in family.samples for label, _ in labels} - {"le"})
        for name, family in exposed.items()
    }
    # A node that is alone has none of these; ``system.test_cluster_commands`` reads them off a cluster.
    found |= {each.name: (each.kind, set(each.labels)) for each in CLUSTER_METRICS}
    # Nobody uses a cursor here.
    found |= {each.name: (each.kind, set(each.labels)) for each in CURSOR_METRICS}
    # Processes of workers have these.
    found |= {each.name: (each.kind, set(each.labels)) for each in WORKER_METRICS}
    seldom = {name for name in listed if _SELDOM.fullmatch(name)}
    assert {name: row for name, row in listed.items() if name in found or name not in seldom} == found
    assert list(listed) == sorted(listed)


def _expressions(value: Any) -> Iterator[str]:
    """Every PromQL expression in a dashboard or in rules: those of panels, variables and alerts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "definition") and isinstance(inner, str):
                yield inner
            else:
                yield from _expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _expressions(inner)


def _names(expression: str) -> set[str]:
    return set(_NAME.findall(_TEXTS.sub("", expression)))


def _samples(exposed: dict[str, Family]) -> set[str]:
    in_cluster = {each.name for each in CLUSTER_METRICS}
    return in_cluster | {name + suffix for name, family in exposed.items() for suffix, _ in family.samples}


def _dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return loaded


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


@pytest.mark.parametrize("part", ["dashboard", "alerts"])
def test_whatever_is_shown_or_alerted_on_is_exposed(part: str, exposed: dict[str, Family]) -> None:
    expressions = list(_expressions(_dashboard() if part == "dashboard" else _rules()))
    assert len(expressions) > 10
    assert all(_names(expression) for expression in expressions)
    used = set().union(*map(_names, expressions))
    missing = used - _samples(exposed) - _OF_PROMETHEUS
    assert {name for name in missing if not _SELDOM.fullmatch(name)} == set()
    assert all(f"| `{name}` |" in PAGE.read_text() for name in missing)


def test_panels_have_titles_ids_and_places_of_their_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or all(target["refId"] for target in panel["targets"])


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    rules = _rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
    assert f"{len(rules)} alerts" in (MONITORING / "README.md").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's prometheus, is missing")
def test_promtool_finds_nothing_wrong() -> None:
    for check in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        done = subprocess.run(
            ["promtool", "check", *check], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
