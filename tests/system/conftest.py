"""Fixtures of the system tests: nodes and clients, each a process of its own.

Every test has a topic of its own; a module shares one node and one process per client.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.java import JavaMissing, java_worker_command
from support.processes import ClientProcess, NodeProcess
from support.spark import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CLIENTS = Path(__file__).with_name("clients")
_numbers = itertools.count()

#: Small enough that tests see retention and session timeouts at once.
FAST_SETTINGS = {"log_retention_check_interval_ms": 200, "group_min_session_timeout_ms": 500}

StartClient = Callable[..., ClientProcess]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "feature(*names): what of the client this test shows, for docs/clients.md"
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """The node that the tests of a module share."""
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **FAST_SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def strict_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that creates no topics by itself."""
    with NodeProcess(tmp_path_factory.mktemp("strict") / "data", auto_create_topics=False) as running:
        yield running


@pytest.fixture
def start_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartClient]:
    """``start_client("confluent", node)`` starts a process of ``clients/confluent_client.py``.

    It ends with the test: the load of one that failed is not the next one's. A name that begins with "java"
    starts Java's clients (``java/``); where they cannot be built the test is skipped.
    """
    with _clients(tmp_path_factory.mktemp("clients")) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartClient]:
    """As ``start_client``, for fixtures whose clients serve all tests of a module."""
    with _clients(tmp_path_factory.mktemp("clients")) as start:
        yield start


@contextmanager
def _clients(directory: Path) -> Iterator[StartClient]:
    started: list[ClientProcess] = []

    def start(name: str, node: NodeProcess) -> ClientProcess:
        error_path = directory / f"{name}-{len(started)}.stderr"
        program = _java_clients() if name.startswith("java") else _CLIENTS / f"{name}_client.py"
        client = ClientProcess(program, error_path, node.bootstrap_servers)
        started.append(client)
        return client

    try:
        yield start
    finally:
        for client in started:
            client.close()


def _java_clients() -> tuple[str, ...]:
    try:
        return java_worker_command()
    except JavaMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one local Spark session of the suite."""
    with local_session(tmp_path_factory.mktemp("spark")) as session:
        yield session


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"{request.node.originalname.removeprefix('test_')[:80]}-{next(_numbers)}"


@pytest.fixture(scope="module")
def client_processes(
    request: pytest.FixtureRequest, node: NodeProcess, start_shared_client: StartClient
) -> Callable[[int], ClientProcess]:
    """The module's client processes by number; a dead one is replaced."""
    running: dict[int, ClientProcess] = {}

    def get(number: int) -> ClientProcess:
        if number not in running or not running[number].alive:
            running[number] = start_shared_client(request.module.CLIENT_SCRIPT, node)
        return running[number]

    return get


@pytest.fixture
def client(client_processes: Callable[[int], ClientProcess]) -> ClientProcess:
    """The module's client."""
    return client_processes(0)


@pytest.fixture
def other_client(client_processes: Callable[[int], ClientProcess]) -> ClientProcess:
    """A second process of the module's client."""
    return client_processes(1)


@pytest.fixture
def play(request: pytest.FixtureRequest, client: ClientProcess, topic: str) -> Callable[..., Any]:
    """Run the scenario that is called like the test, in the module's client process."""

    def run(**arguments: Any) -> Any:
        return client.call(request.node.originalname.removeprefix("test_"), topic=topic, **arguments)

    return run
