"""What is in the files of a node, read without it."""

from __future__ import annotations

from support.processes import NodeProcess
from tidemill.log.segments.segment_walk import walk
from tidemill.log.storage import LocalStorage
from tidemill.records.batch import BatchHeader

__all__ = ("stored_batches", "stored_codecs")

_CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")


def stored_batches(node: NodeProcess, topic: str, partition: int = 0) -> list[BatchHeader]:
    """The header of every batch, in order."""
    directory = node.partition_dir(topic, partition)
    storage = LocalStorage(directory)
    headers: list[BatchHeader] = []
    for path in sorted(directory.glob("*.log")):
        file = storage.open(path.name)
        headers += [header for _, header in walk(file, 0, file.size(), verify=True)]
        file.close()
    return headers


def stored_codecs(node: NodeProcess, topic: str) -> set[str]:
    """The names of the codecs of all batches."""
    return {_CODEC_NAMES[header.codec] for header in stored_batches(node, topic)}
