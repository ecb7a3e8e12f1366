"""A node whose metadata is a little old: what it refuses because something is there, or is not, is true.

Three whole nodes in one process. Changes do not reach node 3 by themselves; it can ask the store.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from support.product_cluster import ProductCluster
from support.virtual_loop import current_loop, run_virtual
from tidemill.errors import ErrorCode, TableCode

NONE = ErrorCode.none
_TOPIC, _SET = 2, 0
_LATE = 3

Story = Callable[[ProductCluster], Awaitable[None]]


def behind(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop: behind node 3's back ``old`` was deleted, and ``new`` created."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("old", partitions=1)
                cluster.ways[_LATE].deaf = True
                assert await delete(cluster, 1, "old") is NONE
                assert await create(cluster, 1, "new") is NONE
                topics = cluster.broker(_LATE).image.topics
                assert "old" in topics
                assert "new" not in topics
                await story(cluster)

        run_virtual(main, seed=1)

    del test.__wrapped__
    return test


async def create(cluster: ProductCluster, node_id: int, name: str, **options: Any) -> ErrorCode:
    wanted = {"name": name, "num_partitions": 1, "replication_factor": 3, "assignments": [], "configs": []}
    body = {"topics": [wanted], "timeout": 3_000, **options}
    return ErrorCode((await cluster.ask(node_id, "CreateTopics", 7, **body)).topics[0].error_code)


async def delete(
    cluster: ProductCluster, node_id: int, name: str | None, of: UUID | None = None
) -> ErrorCode:
    body = {"topics": [{"name": name, "topic_id": of}], "timeout": 3_000}
    return ErrorCode((await cluster.ask(node_id, "DeleteTopics", 6, **body)).responses[0].error_code)


async def grow(cluster: ProductCluster, name: str, count: int, **options: Any) -> ErrorCode:
    body = {"topics": [{"name": name, "count": count, "assignments": None}], "timeout": 3_000, **options}
    return ErrorCode((await cluster.ask(_LATE, "CreatePartitions", 3, **body)).results[0].error_code)


async def alter(cluster: ProductCluster, api: str, name: str, *, validate_only: bool = False) -> ErrorCode:
    config: dict[str, Any] = {"name": "retention.ms", "value": "100000"}
    if api == "IncrementalAlterConfigs":
        config["config_operation"] = _SET
    resource = {"resource_type": _TOPIC, "resource_name": name, "configs": [config]}
    version = 1 if api == "IncrementalAlterConfigs" else 2
    answer = await cluster.ask(_LATE, api, version, resources=[resource], validate_only=validate_only)
    return ErrorCode(answer.responses[0].error_code)


# --- what another node has just created is there


@behind
async def test_it_is_deleted_by_name(cluster: ProductCluster) -> None:
    assert await delete(cluster, _LATE, "new") is NONE


@behind
async def test_it_is_deleted_by_id(cluster: ProductCluster) -> None:
    assert await delete(cluster, _LATE, None, cluster.broker(1).image.topics["new"].id) is NONE


@behind
async def test_it_gets_more_partitions(cluster: ProductCluster) -> None:
    assert await grow(cluster, "new", 2, validate_only=False) is NONE


@behind
async def test_it_could_get_more_partitions(cluster: ProductCluster) -> None:
    assert await grow(cluster, "new", 2, validate_only=True) is NONE


@behind
async def test_it_is_configured(cluster: ProductCluster) -> None:
    assert await alter(cluster, "IncrementalAlterConfigs", "new") is NONE


@behind
async def test_it_gets_all_its_configs_anew(cluster: ProductCluster) -> None:
    assert await alter(cluster, "AlterConfigs", "new") is NONE


@behind
async def test_it_could_be_configured(cluster: ProductCluster) -> None:
    assert await alter(cluster, "AlterConfigs", "new", validate_only=True) is NONE


@behind
async def test_it_can_be_moved(cluster: ProductCluster) -> None:
    partition = {"partition_index": 0, "replicas": [1, 2]}
    answer = await cluster.ask(
        _LATE,
        "AlterPartitionReassignments",
        0,
        timeout=3_000,
        topics=[{"name": "new", "partitions": [partition]}],
    )
    assert answer.responses[0].partitions[0].error_code is NONE


# --- what another node has just deleted is gone


@behind
async def test_its_name_is_free(cluster: ProductCluster) -> None:
    assert await create(cluster, _LATE, "old") is NONE


@behind
async def test_its_name_would_be_free(cluster: ProductCluster) -> None:
    assert await create(cluster, _LATE, "old", validate_only=True) is NONE


@behind
async def test_it_cannot_be_configured(cluster: ProductCluster) -> None:
    gone = ErrorCode.unknown_topic_or_partition
    assert await alter(cluster, "IncrementalAlterConfigs", "old") is gone


# --- databases and tables


@behind
async def test_a_database_is_dropped_that_another_node_has_created(cluster: ProductCluster) -> None:
    body: dict[str, Any] = {"name": "d", "comment": None, "properties": [], "if_not_exists": False}
    assert (await cluster.ask(1, "CreateDatabase", 0, **body)).error_code == NONE
    drop = {"name": "d", "if_exists": True, "cascade": False}
    assert (await cluster.ask(_LATE, "DropDatabase", 0, **drop)).dropped
    again = await cluster.ask(_LATE, "DropDatabase", 0, **drop | {"if_exists": False})
    assert again.error_code == TableCode.database_not_found


# --- what it costs


@behind
async def test_a_request_asks_the_store_once(cluster: ProductCluster) -> None:
    way, read = cluster.ways[_LATE], cluster.ways[_LATE].read
    asked: list[str] = []

    async def counted(prefix: str = "", *, revision: int | None = None) -> Any:
        asked.append(prefix)
        return await read(prefix, revision=revision)

    way.deaf = False
    await cluster.until(lambda: "new" in cluster.broker(_LATE).image.topics)
    way.read = counted  # type: ignore[method-assign]
    topics = [{"name": f"missing-{number}", "topic_id": None} for number in range(50)]
    answer = await cluster.ask(_LATE, "DeleteTopics", 6, topics=topics, timeout=3_000)
    assert {each.error_code for each in answer.responses} == {ErrorCode.unknown_topic_or_partition}
    assert asked == ["cluster"]


@behind
async def test_without_the_store_nothing_is_refused_for_certain(cluster: ProductCluster) -> None:
    cluster.ways[_LATE].unavailable = True
    timed_out = ErrorCode.request_timed_out
    assert await delete(cluster, _LATE, "new") is timed_out
    assert await grow(cluster, "new", 2, validate_only=False) is timed_out
    assert await create(cluster, _LATE, "old") is timed_out
    assert await alter(cluster, "IncrementalAlterConfigs", "new") is timed_out
    # What is wrong whatever there is, is refused as before.
    assert await create(cluster, _LATE, "no/name") is ErrorCode.invalid_topic_exception


@behind
async def test_others_may_write_to_the_same_etcd(cluster: ProductCluster) -> None:
    """Their changes raise its revision, and no watch of this cluster brings it."""
    way, read = cluster.ways[_LATE], cluster.ways[_LATE].read

    async def ahead(prefix: str = "", *, revision: int | None = None) -> Any:
        stored = await read(prefix, revision=revision)
        return stored._replace(revision=stored.revision + 1_000 * bool(prefix))

    way.read = ahead  # type: ignore[method-assign]
    started = current_loop().now
    assert await delete(cluster, _LATE, "missing") is ErrorCode.unknown_topic_or_partition
    assert current_loop().now - started < 1
