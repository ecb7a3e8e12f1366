"""Finding the partitions in a data directory, without its metadata.

A damaged node may have no readable metadata, so names and numbers are taken from the paths:
``logs/<topic>/<topic id>-<partition>``. Partitions whose files are gone are known from the inventory.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ApiError, DataDirectoryInUse, ErrorCode, StorageError
from tidemill.log.notes.inventory import Inventory
from tidemill.log.storage import LocalStorage
from tidemill.replication.replicas import LOGS

__all__ = (
    "PartitionFiles",
    "data_directory",
    "find_missing",
    "find_partitions",
    "owner_of",
    "refuse_if_running",
)

_DIRECTORY = re.compile(r"([0-9a-f]{32})-([0-9]{1,9})")
_WANTED = re.compile(r"([^:]+)(?::([0-9]{1,9}(?:,[0-9]{1,9})*))?")


@dataclass(frozen=True, slots=True, order=True)
class PartitionFiles:
    """The directory of a partition, relative to the data directory."""

    topic: str
    index: int
    directory: str
    log_bytes: int
    #: Offsets below this were given out, according to the inventory; 0 if it does not list the partition.
    listed_below: int = 0

    @property
    def name(self) -> str:
        """The name of the directory, which a table's state has too."""
        return self.directory.rpartition("/")[2]

    @property
    def topic_id(self) -> str:
        """The topic id in the directory's name, hexadecimal."""
        return self.name.partition("-")[0]


def data_directory(given: Path | None) -> Path:
    """The data directory: the given one, else the one in the settings. Raises ``StorageError``."""
    from tidemill.config.loading import find_config_file, load_settings

    path = given
    if path is None:
        path = load_settings({}, os.environ, find_config_file(None, os.environ, Path.cwd())).data_dir
    if not path.is_dir():
        raise StorageError(f"there is no data directory {path}; name it with --data")
    return path


def find_partitions(data: Path, wanted: Sequence[str]) -> list[PartitionFiles]:
    """The partitions that ``TOPIC`` or ``TOPIC:0,2`` name, or all; raises ``ApiError`` for a missing one."""
    every = sorted(_partitions(data))
    if not wanted:
        return every
    chosen: list[PartitionFiles] = []
    for text in wanted:
        match = _WANTED.fullmatch(text)
        topic, numbers = (match[1], match[2]) if match else (text, None)
        indexes = None if numbers is None else {int(number) for number in numbers.split(",")}
        found = [each for each in every if each.topic == topic and (indexes is None or each.index in indexes)]
        missing = (indexes or set()) - {each.index for each in found}
        if not found or missing:
            what = f"{topic}-{min(missing)}" if missing else f"topic {topic!r}"
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"there are no files of {what} in {data}; a partition has files from its first record on",
            )
        chosen += found
    return chosen


def find_missing(data: Path) -> list[PartitionFiles]:
    """The partitions that had data and have no files at all."""
    return [
        each for each in _partitions(data) if each.listed_below and not any((data / each.directory).glob("*"))
    ]


def _partitions(data: Path) -> list[PartitionFiles]:
    inventory = Inventory(LocalStorage(data), read_only=True)
    found = _on_disk(data, inventory)
    there = {each.directory for each in found}
    for directory in inventory:
        if directory not in there:
            _, topic, name = directory.split("/")
            bound = inventory.listed_below(directory)
            found.append(PartitionFiles(topic, int(name.partition("-")[2]), directory, 0, bound))
    return found


def _on_disk(data: Path, inventory: Inventory) -> list[PartitionFiles]:
    found: list[PartitionFiles] = []
    for directory in (data / LOGS).glob("*/*"):
        match = _DIRECTORY.fullmatch(directory.name)
        if match is None or not directory.is_dir():
            continue
        log_bytes = sum(file.stat().st_size for file in directory.glob("*.log"))
        relative = directory.relative_to(data).as_posix()
        bound = inventory.listed_below(relative)
        found.append(PartitionFiles(directory.parent.name, int(match[2]), relative, log_bytes, bound))
    return found


def refuse_if_running(data: Path) -> None:
    """Raise ``DataDirectoryInUse`` if a node runs on the directory."""
    owner = owner_of(data)
    if owner is not None:
        raise DataDirectoryInUse(f"the data directory {data} is in use by {owner}; stop that process first")


def owner_of(path: Path) -> str | None:
    """Who holds the lock of a data directory, in words; None if nobody does.

    The lock is tried shared and given back at once, and nothing is created, so a node that starts at the same
    moment hardly notices.
    """
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        from tidemill.server.disk.data_directory import describe_owner

        return describe_owner(os.pread(descriptor, 4096, 0))
    else:
        return None
    finally:
        os.close(descriptor)
