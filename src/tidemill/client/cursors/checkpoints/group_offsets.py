"""The position of a cursor as offsets of a group that belongs to it: Kafka commits those in transactions.

Beside each offset stands a checkpoint of one partition: the name of the cursor, a digest of its region, the
origin of the position, the position and the offsets that are finished above it. An origin names the last time
that the position was set from outside (``tidemill cursor reset``, or deleted and begun anew): offsets of
another origin are of before that, and do not count any more.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.cluster import Mark
from tidemill.cursors.checkpoint import Checkpoint, Entry
from tidemill.cursors.errors import CheckpointCorrupt, CheckpointRegionMismatch
from tidemill.cursors.region import Region
from tidemill.cursors.stored import NO_ORIGIN
from tidemill.net.answers import check
from tidemill.net.connection import Versions
from tidemill.wire.jobs import CURSOR_GROUP_PREFIX

__all__ = ("GroupOffsets",)

# Newer versions name topics by id only.
_FETCH_VERSIONS: Final[Versions] = (8, 9)
_DIGEST_BYTES: Final = 32
_ORIGIN_BYTES: Final = 16
_SHOWN_CHARACTERS: Final = 40


class _Committed(NamedTuple):
    entry: Entry
    origin: UUID
    digest: bytes


class GroupOffsets:
    """The offsets of the group of cursor ``name`` over ``topic``; ``identity`` is that of its region."""

    def __init__(self, cluster: Cluster, name: str, topic: str, identity: bytes, *, where: str) -> None:
        from hashlib import sha256

        self._cluster = cluster
        self._name = name
        self._topic = topic
        # The identity may be long, and what is kept beside an offset may not.
        self._identity = identity
        self._digest = sha256(identity).digest()
        self._where = where
        #: Of the group, and of the producer of the cursor's transactions.
        self.id = f"{CURSOR_GROUP_PREFIX}{name}"

    async def read(self, origins: Mapping[int, UUID]) -> dict[int, Entry]:
        """What is committed of these partitions and of their origins, once no open transaction can change it.

        Raises ``CheckpointCorrupt`` or ``CheckpointRegionMismatch``.
        """
        body = {
            "groups": [{"group_id": self.id, "topics": [_asked(self._topic, origins)]}],
            "require_stable": True,
        }
        reading = f"reading the position of {self._where}"

        async def ask() -> dict[int, _Committed]:
            answer = await self._cluster.to_coordinator(
                self.id, "OffsetFetch", body, versions=_FETCH_VERSIONS
            )
            (found,) = answer.groups
            check(found.error_code, None, reading)
            committed: dict[int, _Committed] = {}
            for each in (entry for topic in found.topics for entry in topic.partitions):
                check(each.error_code, None, reading)
                if each.committed_offset >= 0:
                    committed[each.partition_index] = self._decoded(each)
            return committed

        found = await self._cluster.retrying(ask)
        valid = {each: committed for each, committed in found.items() if committed.origin == origins[each]}
        for partition, committed in valid.items():
            self._check_region(partition, committed.digest)
        return {partition: committed.entry for partition, committed in valid.items()}

    async def latest(self, shown: Mapping[int, Entry], marks: Mapping[int, Mark]) -> dict[int, Entry]:
        """What is committed, or what the coordinator of cursors shows where that was set since.

        Raises ``CheckpointCorrupt`` or ``CheckpointRegionMismatch``.
        """
        committed = await self.read({partition: marks[partition].origin for partition in shown})
        for partition, entry in shown.items():
            if partition not in committed and marks[partition].moved:
                raise CheckpointCorrupt(
                    f"the position of partition {partition} is gone: the offsets of group {self.id!r} were "
                    "deleted",
                    where=self._where,
                    stored="nothing",
                    expected=f"about offset {entry.position.offset}",
                )
        return {**shown, **committed}

    def body(self, partition: int, entry: Entry, origin: UUID) -> dict[str, Any]:
        """What TxnOffsetCommit is asked to store of a partition."""
        checkpoint = Checkpoint(self._name, self._digest + origin.bytes, {partition: entry})
        return {
            "partition_index": partition,
            "committed_offset": entry.position.offset,
            "committed_leader_epoch": entry.position.leader_epoch,
            "committed_metadata": base64.b64encode(checkpoint.encode()).decode(),
        }

    def _check_region(self, partition: int, digest: bytes) -> None:
        if digest != self._digest:
            raise CheckpointRegionMismatch(
                f"the position of partition {partition} is of another region; give this cursor another name, "
                "or delete the other",
                where=self._where,
                stored=f"a region with the digest {digest.hex()}",
                expected=f"{self._region()}, with the digest {self._digest.hex()}",
            )

    def _region(self) -> str:
        try:
            return str(Region.from_identity(self._identity))
        except ValueError:
            return f"topic {self._topic}"

    def _decoded(self, each: Any) -> _Committed:
        try:
            data = base64.b64decode(each.metadata or "", validate=True)
        except ValueError as error:
            raise CheckpointCorrupt(
                f"the position of partition {each.partition_index} cannot be read: {error}; to begin anew, "
                f"delete the offsets of group {self.id!r}, and then the cursor",
                where=self._where,
                stored=repr(each.metadata[:_SHOWN_CHARACTERS]),
                expected="a checkpoint in base64",
            ) from error
        checkpoint = Checkpoint.decode(data, self._where)
        digest, origin = checkpoint.identity[:_DIGEST_BYTES], checkpoint.identity[_DIGEST_BYTES:]
        if checkpoint.name != self._name:
            raise CheckpointRegionMismatch(
                f"the position of partition {each.partition_index} is of another cursor",
                where=self._where,
                stored=checkpoint.name,
                expected=self._name,
            )
        if len(checkpoint.identity) not in (_DIGEST_BYTES, _DIGEST_BYTES + _ORIGIN_BYTES):
            raise CheckpointCorrupt(
                f"the position of partition {each.partition_index} cannot be read",
                where=self._where,
                stored=f"a digest and an origin of {len(checkpoint.identity)} bytes",
                expected=f"{_DIGEST_BYTES} or {_DIGEST_BYTES + _ORIGIN_BYTES} bytes",
            )
        entry = checkpoint.entries.get(each.partition_index)
        if entry is None or entry.position.offset != each.committed_offset:
            raise CheckpointCorrupt(
                "the position does not fit its checkpoint",
                where=self._where,
                stored=f"offset {each.committed_offset}",
                expected="nothing" if entry is None else f"offset {entry.position.offset}",
            )
        return _Committed(entry, UUID(bytes=origin) if origin else NO_ORIGIN, digest)


def _asked(topic: str, partitions: Iterable[int]) -> dict[str, Any]:
    return {"name": topic, "partition_indexes": list(partitions)}
