"""What a node can say is wrong with it: a sentence for people, and its kind for programs.

``tidemill doctor`` decides by the kind what to advise, never by the words.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ("Problem", "ProblemKind")


class ProblemKind(StrEnum):
    """What a problem is about, as ``/readyz`` names it."""

    #: The node starts or stops.
    STARTING = "starting"
    #: Writes are refused until there is room on the disk.
    DISK_FULL = "disk-full"
    #: Partitions are not opened, because too many files are open.
    OPEN_FILES = "open-files"
    #: A partition is out of service: its disk failed, or its files are damaged or missing.
    STOPPED = "stopped"
    #: A part of a log is damaged; the rest is served.
    DAMAGE = "damage"
    #: There are directories of no known topic.
    UNKNOWN_DIRECTORIES = "unknown-directories"
    #: The state of a table cannot be read.
    TABLE_STATE = "table-state"
    #: The metadata cannot be changed any more.
    METADATA = "metadata"
    #: Other nodes, etcd, replicas or moves are not as they should be; the files of this node are.
    CLUSTER = "cluster"


class Problem(NamedTuple):
    """Something that is wrong with a node."""

    kind: ProblemKind
    text: str
