"""The clients of system tests end with the test that has started them."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

_TESTS = """
from types import SimpleNamespace

import pytest

NODE = SimpleNamespace(bootstrap_servers="127.0.0.1:1")
own, shared = [], []


@pytest.fixture(scope="module")
def shared_client(start_shared_client):
    return start_shared_client("confluent", NODE)


def test_that_fails_under_load(start_client, shared_client):
    own.append(start_client("confluent", NODE))
    shared.append(shared_client)
    assert not own[0].alive


def test_behind_it(shared_client):
    assert not own[0].alive
    assert shared == [shared_client]
    assert shared_client.alive
"""


def test_a_client_does_not_outlive_the_test_that_has_started_it(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest("from system.conftest import start_client, start_shared_client")
    pytester.makepyfile(_TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1, failed=1)
