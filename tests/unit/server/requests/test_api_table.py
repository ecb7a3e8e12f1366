"""The rows of served APIs: one handler each, and what a node must not load for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from support.served_apis import served_apis
from tidemill.server.requests import api_table
from tidemill.server.requests.api_table import LOADED_AT_FIRST_USE, LOADED_AT_START, serves
from tidemill.server.requests.authorization import ResourceType
from tidemill.wire.apis import APIS, APIS_BY_NAME, NODES_ONLY, request_class, response_class


def test_every_api_of_the_wire_has_one_row_and_one_handler() -> None:
    rows = served_apis()
    assert {key: row.api for key, row in rows.items()} == APIS
    assert len({row.handler for row in rows.values()}) == len(APIS)


def test_the_modules_that_are_loaded_at_first_use_serve_what_the_table_says() -> None:
    served: dict[str, set[str]] = {}
    for row in served_apis().values():
        module = row.handler.__module__.removeprefix("tidemill.server.handlers.")
        served.setdefault(module, set()).add(row.api.name)
    assert set(LOADED_AT_START) == served.keys() - LOADED_AT_FIRST_USE.keys()
    assert {module: set(names) for module, names in LOADED_AT_FIRST_USE.items()} == {
        module: names for module, names in served.items() if module not in LOADED_AT_START
    }


def test_a_node_begins_with_few_handlers_and_loads_others_one_module_at_a_time() -> None:
    program = (
        "import sys\n"
        "from tidemill.server.requests.api_table import OVERLAPPING, is_loaded, load, load_first\n"
        "from tidemill.server.requests.api_table import served_api\n"
        "from tidemill.wire.apis import APIS_BY_NAME\n"
        "handlers = lambda: {name for name in sys.modules if name.startswith('tidemill.server.handlers.')}\n"
        "load_first()\n"
        "fetch, metadata, share = (APIS_BY_NAME[n].key for n in ('Fetch', 'Metadata', 'ShareFetch'))\n"
        "assert is_loaded(fetch) and is_loaded(metadata) and not is_loaded(share)\n"
        "assert fetch in OVERLAPPING and share not in OVERLAPPING\n"
        "before = handlers()\n"
        "load(share)\n"
        "assert is_loaded(share) and share in OVERLAPPING and served_api(share).api.name == 'ShareFetch'\n"
        "new = {name.removeprefix('tidemill.server.handlers.') for name in handlers() - before}\n"
        "assert new == {'share', 'share.fetching', 'share.acknowledging'}, new\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_module_that_does_not_serve_what_the_table_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    served_apis()
    key = APIS_BY_NAME["JoinGroup"].key
    monkeypatch.delitem(api_table._rows, key)
    with pytest.raises(LookupError, match=r"handlers\.groups\.classic has no handler that serves JoinGroup"):
        api_table.load(key)


def test_an_api_without_a_handler_keeps_a_node_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    served_apis()
    monkeypatch.delitem(api_table._rows, 3)
    with pytest.raises(LookupError, match=r"no handler in tidemill.server.handlers serves Metadata"):
        served_apis()


def test_a_second_handler_is_refused_where_it_is_declared() -> None:
    served_apis()

    async def again(broker: Any, call: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(ValueError, match="API Metadata has two handlers"):
        serves("Metadata")(again)
    with pytest.raises(LookupError, match="there is no API 'Nonsense'"):
        serves("Nonsense")


def test_produce_and_fetches_overlap_and_answer_by_themselves() -> None:
    rows = served_apis().values()
    acknowledging = {"ShareAcknowledge", "ShareSettle", "FetchRegion"}
    assert {row.api.name for row in rows if row.overlaps} == {
        "Produce",
        "Fetch",
        "ShareFetch",
    } | acknowledging
    by_themselves = {"Produce", "Fetch", "ShareFetch", "ApiVersions"}
    assert {row.api.name for row in rows if not row.in_task} == by_themselves


def test_versions_nodes_and_ones_own_pin_need_no_permission() -> None:
    free = {row.api.name for row in served_apis().values() if not row.permissions}
    # What only nodes ask each other is refused to every client.
    between_nodes = {APIS[key].name for key in NODES_ONLY}
    assert free == {"ApiVersions", "DescribeCluster", "ReleasePin"} | between_nodes


def test_fields_that_name_resources_are_fields_of_every_version() -> None:
    for key, row in served_apis().items():
        for version in row.api.versions:
            fields = request_class(key, version).__dataclass_fields__
            for permission in row.permissions:
                if permission.resource is not ResourceType.CLUSTER and permission.field is not None:
                    assert permission.field in fields, (row.api.name, version)


def test_an_api_that_is_refused_as_a_whole_has_a_place_for_the_error() -> None:
    """Where there is none, the handler has to ask, and to put the error beside what it is about."""
    for key, row in served_apis().items():
        if any(permission.field is not None for permission in row.permissions):
            fields = response_class(key, row.api.max_version).__dataclass_fields__
            assert "error_code" in fields, f"{row.api.name}: use for_each, and ask in the handler"


def test_handlers_load_neither_arrow_nor_rocksdb() -> None:
    program = (
        "import sys\n"
        "from tidemill.server.requests.api_table import load, load_first\n"
        "from tidemill.wire.apis import APIS\n"
        "load_first()\n"
        "for key in APIS: load(key)\n"
        "loaded = {'pyarrow', 'numpy', 'rocksdict'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
