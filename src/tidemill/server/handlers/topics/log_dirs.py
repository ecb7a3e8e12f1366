"""DescribeLogDirs: the size of partitions on disk. A node has one directory, its data directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, Final

from tidemill.control.image import TopicImage
from tidemill.coordination.turns import give_way, in_slices
from tidemill.errors import ErrorCode
from tidemill.replication.replicas import partition_directory
from tidemill.server.broker import Broker
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, for_cluster
from tidemill.server.requests.call import Call

__all__ = ("describe_log_dirs",)

_SEGMENT_PATTERN: Final = "*.log"


@serves("DescribeLogDirs", for_cluster(DESCRIBE))
async def describe_log_dirs(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the sizes of partitions on this node, all or those asked for, and of the disk."""
    wanted = await _wanted(call.request.topics)
    sizes: dict[str, dict[int, int]] = {}
    lags: dict[tuple[str, int], int] = {}
    closed: list[tuple[str, int, str]] = []
    for topic in broker.image.topics.values():
        await give_way()
        for index in _held(broker, topic):
            if wanted is not None and index not in wanted.get(topic.name, ()):
                continue
            partition = broker.replicas.peek(topic.id, index)
            # A closed partition gets its entry now, so that the answer keeps the partitions' order.
            sizes.setdefault(topic.name, {})[index] = 0 if partition is None else partition.size_bytes
            if partition is not None and (lag := partition.as_follower.lag):
                lags[topic.name, index] = lag
            if partition is None:
                closed.append((topic.name, index, partition_directory(topic.name, topic.id, index)))
    root = broker.settings.data_dir.absolute()
    try:
        # There may be thousands of directories to look at, which must not hold up the others.
        on_disk, total_bytes, usable_bytes = await asyncio.to_thread(
            _look, root, [path for *_, path in closed]
        )
    except OSError:
        return {"results": [{"error_code": ErrorCode.kafka_storage_error, "log_dir": str(root)}]}
    for (name, index, _), size in zip(closed, on_disk, strict=True):
        sizes[name][index] = size
        await give_way()
    topics = ({"name": name, "partitions": _bodies(name, sizes[name], lags)} for name in sorted(sizes))
    result = {
        "error_code": ErrorCode.none,
        "log_dir": str(root),
        "topics": await in_slices(topics),
        "total_bytes": total_bytes,
        "usable_bytes": usable_bytes,
    }
    return {"error_code": ErrorCode.none, "results": [result]}


async def _wanted(topics: Any) -> dict[str, set[int]] | None:
    if topics is None:
        return None
    wanted: dict[str, set[int]] = {}
    for topic in topics:
        wanted.setdefault(topic.topic, set()).update(topic.partitions)
        await give_way()
    return wanted


def _held(broker: Broker, topic: TopicImage) -> list[int]:
    return [index for index, placed in enumerate(topic.partitions) if broker.node_id in placed.replicas]


def _bodies(topic: str, sizes: dict[int, int], lags: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    return [
        {
            "partition_index": index,
            "partition_size": size,
            "offset_lag": lags.get((topic, index), 0),
            "is_future_key": False,
        }
        for index, size in sizes.items()
    ]


def _look(root: Path, directories: list[str]) -> tuple[list[int], int, int]:
    """Sizes of these directories' segments, and the disk's total and free bytes. Runs in a thread."""
    usage = shutil.disk_usage(root)
    return [_segment_bytes(root / directory) for directory in directories], usage.total, usage.free


def _segment_bytes(directory: Path) -> int:
    total = 0
    for path in directory.glob(_SEGMENT_PATTERN):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # Retention or the deletion of the topic was faster.
            continue
    return total
