from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import httpx
import pytest

from support.prometheus_text import parse_metrics
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.errors import ConfigError, DataDirectoryInUse, SyncFailed
from tidemill.server.http import HttpServer
from tidemill.server.node import Node
from tidemill.server.running import run_until

LOCAL = Address("127.0.0.1", 0)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(Settings(data_dir=tmp_path / "data", listen=LOCAL, http=LOCAL))


@pytest.fixture
async def client(node: Node) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(node)
    address = await server.start(LOCAL)
    assert node.http_address == address
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as made:
        yield made
    await server.stop()


async def test_a_node_that_is_starting_lives_and_is_not_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).status_code == 200
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {
        "ready": False,
        "problems": ["the node is starting or stopping"],
        "problem_kinds": ["starting"],
    }
    assert "tidemill_ready 0" in (await client.get("/metrics")).text


async def test_a_ready_node_tells_its_problems(client: httpx.AsyncClient, node: Node) -> None:
    await node.start()
    assert (await client.get("/readyz")).json() == {"ready": True, "problems": [], "problem_kinds": []}
    await node.broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=1, replication=1))
    node.broker.find.partition(node.broker.find.topic("t"), 0).flush_failed(SyncFailed("a bad disk"))
    answer = await client.get("/readyz")
    assert answer.status_code == 200, "the other partitions still want their requests"
    assert answer.json() == {
        "ready": True,
        "problems": ["t-0 is stopped: a bad disk"],
        "problem_kinds": ["stopped"],
    }
    await node.stop()
    assert (await client.get("/readyz")).status_code == 503


async def test_whatever_the_cluster_lacks_is_no_fault_of_the_nodes_files(
    client: httpx.AsyncClient, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.start()
    problems = ["2 moves do not come closer to their end", "the metadata of node 1 is behind revision 7"]
    membership = Mock(**{"problems.return_value": problems})
    with monkeypatch.context() as patched:
        patched.setattr(node, "membership", membership)
        answer = (await client.get("/readyz")).json()
    assert (answer["problems"], answer["problem_kinds"]) == (problems, ["cluster", "cluster"])
    await node.stop()


async def test_metrics_are_in_the_format_of_prometheus(client: httpx.AsyncClient, node: Node) -> None:
    await node.start()
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = parse_metrics(answer.text)
    assert {"tidemill_ready", "tidemill_topics", "tidemill_flushes_total"} <= set(found)
    await node.stop()


async def test_an_unknown_path_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).status_code == 404


async def test_an_address_in_use_is_told(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve HTTP on 127\.0\.0\.1:{port}.*--http"):
            await HttpServer(node).start(Address("127.0.0.1", port))


async def test_run_until_serves_http_around_the_whole_life_of_the_node(node: Node) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.get_running_loop().create_task(run_until(node, stop, ready.set))
    await asyncio.wait_for(ready.wait(), 120)
    ready_before = node.ready
    async with httpx.AsyncClient(base_url=f"http://{node.http_address}", trust_env=False) as client:
        assert (await client.get("/readyz")).status_code == 200
    stop.set()
    await asyncio.wait_for(running, 120)
    assert (ready_before, node.ready) == (True, False)
    assert node.directory._lock is None


async def test_a_start_that_fails_takes_http_down_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Address("127.0.0.1", taken.getsockname()[1])
        node = Node(Settings(data_dir=tmp_path / "data", listen=listen, http=LOCAL))
        with pytest.raises(ConfigError, match="cannot listen on"):
            await run_until(node, asyncio.Event(), lambda: None)
    assert node.http_address is not None
    with pytest.raises(OSError, match=r"refused|Connect"):
        await asyncio.open_connection(node.http_address.host, node.http_address.port)


async def test_a_second_node_is_told_of_the_first_before_of_its_http_port(node: Node, tmp_path: Path) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.get_running_loop().create_task(run_until(node, stop, ready.set))
    await asyncio.wait_for(ready.wait(), 120)
    assert node.http_address is not None
    same = Settings(data_dir=node.settings.data_dir, listen=node.address, http=node.http_address)
    with pytest.raises(DataDirectoryInUse, match=rf"in use by process .* listening on {node.address}; stop"):
        await run_until(Node(same), asyncio.Event(), lambda: None)
    stop.set()
    await asyncio.wait_for(running, 120)


async def test_an_http_port_in_use_lets_go_of_the_directory_and_of_nothing_else(node: Node) -> None:
    await node.start()
    await node.stop()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = Address("127.0.0.1", taken.getsockname()[1])
        again = Node(Settings(data_dir=node.settings.data_dir, listen=LOCAL, http=http))
        with pytest.raises(ConfigError, match="cannot serve HTTP"):
            await run_until(again, asyncio.Event(), lambda: None)
    third = Node(Settings(data_dir=node.settings.data_dir, listen=LOCAL, http=None))
    await third.start()
    assert third.directory.stopped_cleanly, "the note of the orderly stop is still there"
    await third.stop()
