"""The table of docs/clients.md, from the ``feature`` markers of the client tests.

The last column is a cluster of three nodes. Its tests with ``every_client=True`` run with all the clients,
and stand in their columns, too.

``python tests/system/feature_matrix.py`` writes the table into the page; ``test_feature_matrix.py`` fails
when the page is not up to date. The tests are parsed, not imported, so no client has to be installed.
"""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ("FEATURES", "PAGE", "features_shown", "page_with_table")

_SYSTEM = Path(__file__).resolve().parent
PAGE = _SYSTEM.parents[1] / "docs" / "clients.md"
TEST_FILES = (
    "test_java_clients.py",
    "test_confluent_kafka.py",
    "test_kafka_python.py",
    "test_aiokafka.py",
    "test_kcat.py",
    "test_cluster.py",
)
#: Tests of several clients, which it names in ``CLIENTS``: they stand in the columns of those.
SHARED_TEST_FILES = ("test_share_clients.py",)
_BEGIN = "<!-- table: begin -->"
_END = "<!-- table: end -->"

#: The rows, in order. A marker with another name is a mistake.
FEATURES = (
    "produce: every codec",
    "produce: acks 0, 1, all",
    "produce: idempotent",
    "produce: large messages",
    "produce: too large a message is refused",
    "records: keys, headers, null values, timestamps",
    "consume: from the earliest record",
    "consume: from the end",
    "consume: from an offset",
    "consume: from a time",
    "consume: offset out of range",
    "consume: pause, resume, seek",
    "groups: members share partitions",
    "groups: rebalance when a member leaves",
    "groups: rebalance when a member dies",
    "groups: static members",
    "groups: commit and fetch offsets",
    "groups: subscribe by pattern",
    "share groups: accept, release, reject, delivery count",
    "share groups: independent groups, implicit acknowledgement",
    "share groups: start at the end",
    "share groups: members share the records of a partition",
    "share groups: a member dies",
    "share groups: order per key, retry with delay",
    "share groups: described, moved and deleted by an admin client",
    "topics: created by use",
    "topics: unknown topic error",
    "topic config: recompression",
    "topic config: append time",
    "topic config: retention by size",
    "topic config: retention by time",
    "admin: create, describe, delete topics",
    "admin: create partitions",
    "admin: describe topic partitions",
    "admin: describe and alter configs",
    "admin: incremental alter configs",
    "admin: delete records",
    "admin: list offsets",
    "admin: newest timestamp",
    "admin: list and describe groups",
    "admin: delete groups",
    "admin: remove group members",
    "admin: list and alter a group's offsets",
    "admin: delete a group's offsets",
    "admin: describe cluster",
    "admin: elect leaders",
    "admin: describe log directories",
    "admin: authorized operations",
    "admin: quorum, features, config resources",
    "admin: list transactions, describe producers",
    "admin: fence producers",
    "transactions: of the second kind (KIP-890)",
    "streams: exactly_once_v2",
    "cluster: metadata refresh",
    "cluster: fail-over of leaders",
    "cluster: reassignment under load",
    "cluster: kills, pauses, cut links, death of etcd",
    "cluster: rolling restart under load",
    "cluster: fail-over of a group's coordinator",
)


def features_shown(source: str, *, for_all: bool = False) -> tuple[str, dict[str, list[str]]]:
    """(client, tests by feature) of one test file; ``for_all``: only tests that run with every client."""
    client = ""
    shown: dict[str, list[str]] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "CLIENT":
            client = ast.literal_eval(statement.value)
        if isinstance(statement, ast.FunctionDef):
            for name in _marked_features(statement, for_all=for_all):
                shown.setdefault(name, []).append(statement.name)
    return client, shown


def _named_clients(source: str) -> set[str]:
    """The clients with which the tests of a shared file run."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "CLIENTS":
            return set(ast.literal_eval(statement.value))
    raise ValueError("a shared test file says in CLIENTS with which clients it runs")


def _marked_features(function: ast.FunctionDef, *, for_all: bool) -> list[str]:
    return [
        ast.literal_eval(argument)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) in ("feature", "pytest.mark.feature")
        and (not for_all or any(keyword.arg == "every_client" for keyword in decorator.keywords))
        for argument in decorator.args
    ]


def table() -> str:
    """The table in Markdown: a row per feature, a column per client, in each cell the tests."""
    clients = [(name, *features_shown((_SYSTEM / name).read_text())) for name in TEST_FILES]
    *_, (cluster, _, _) = clients
    _, common = features_shown((_SYSTEM / cluster).read_text(), for_all=True)
    for _, _, shown in clients[:-1]:
        shown |= common
    for name in SHARED_TEST_FILES:
        source = (_SYSTEM / name).read_text()
        for _, client, shown in clients:
            if client in _named_clients(source):
                shown |= features_shown(source)[1]
    unknown = {feature for _, _, shown in clients for feature in shown} - set(FEATURES)
    if unknown:
        raise ValueError(f"markers that name no feature of FEATURES: {sorted(unknown)}")
    heads = [f"{client} ([tests](../tests/system/{name}))" for name, client, _ in clients]
    lines = [f"| feature | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for feature in FEATURES:
        cells = [
            "<br>".join(f"`{test}`" for test in shown.get(feature, ["–"])).replace("`–`", "–")
            for _, _, shown in clients
        ]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    """The page with its table replaced by the current one."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
