"""The table of served APIs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.api_versions import all_versions
from tidemill.wire.apis import (
    APIS,
    Api,
    find_api,
    is_flexible,
    is_served,
    request_class,
    request_header_version,
    response_class,
    response_header_version,
)

# Kafka 4.4's ranges: what a client negotiates depends on these numbers.
RANGES = {
    "Produce": (0, 3, 13),
    "Fetch": (1, 4, 18),
    "ListOffsets": (2, 1, 11),
    "Metadata": (3, 0, 13),
    "OffsetCommit": (8, 2, 10),
    "OffsetFetch": (9, 1, 10),
    "FindCoordinator": (10, 0, 6),
    "JoinGroup": (11, 0, 9),
    "Heartbeat": (12, 0, 4),
    "LeaveGroup": (13, 0, 5),
    "SyncGroup": (14, 0, 5),
    "ApiVersions": (18, 0, 5),
    "InitProducerId": (22, 0, 6),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_ranges_are_those_of_kafka(name: str) -> None:
    key, lowest, highest = RANGES[name]
    api = APIS[key]
    assert (api.name, api.min_version, api.max_version) == (name, lowest, highest)


@pytest.mark.parametrize(("api", "version"), all_versions())
def test_every_served_version_has_its_classes_and_headers(api: Api, version: int) -> None:
    assert api in APIS.values()
    key = api.key
    request, response = request_class(key, version), response_class(key, version)
    assert (request.__api_key__, request.__version__) == (key, version)
    assert (response.__api_key__, response.__version__) == (key, version)
    assert request.__flexible__ == response.__flexible__ == is_flexible(key, version)
    assert request.__header_schema__.__version__ == request_header_version(key, version)
    assert response.__header_schema__.__version__ == response_header_version(key, version)


def test_keys_are_unique_and_in_order() -> None:
    assert list(APIS) == sorted({api.key for api, _ in all_versions()})


def test_versions_outside_the_range_are_not_served() -> None:
    assert is_served(0, 3)
    assert is_served(0, 13)
    assert not is_served(0, 2)
    assert not is_served(0, 14)
    assert not is_served(0, -1)
    assert not is_served(999, 0)
    assert find_api(999) is None


@pytest.mark.parametrize(("key", "version"), [(0, 2), (999, 0)])
def test_a_version_that_is_not_served_has_no_class(key: int, version: int) -> None:
    with pytest.raises(LookupError, match=f"API key {key} version {version} is not served"):
        request_class(key, version)


def test_message_classes_are_loaded_on_first_use() -> None:
    code = (
        "import sys, tidemill.wire.requests, tidemill.wire.encode\n"
        "from tidemill.wire.apis import request_class\n"
        "loaded = lambda: [name for name in sys.modules if name.startswith('kio.schema.fetch.v')]\n"
        "assert not loaded(), loaded()\n"
        "request_class(1, 11)\n"
        "assert 'kio.schema.fetch.v11.request' in loaded() and 'kio.schema.fetch.v12' not in loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
