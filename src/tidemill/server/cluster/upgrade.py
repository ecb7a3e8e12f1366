"""Taking a stopped single node into a cluster: its metadata moves from SQLite to etcd, its logs stay.

Order, so that a crash at any point leaves either the single node or the cluster, and the command can be run
again:

1. The cluster's record is written to the empty prefix as that of a single node: no node of a cluster starts
   with it. With it the node's record, which names the data directory.
2. Every other key is copied.
3. All keys are read back, and both sides' digests must be equal.
4. The data directory notes which cluster it belongs to. From here on it is not started as a single node.
5. The cluster's record becomes that of a cluster, with the secret of its nodes.
6. The SQLite file is renamed, and kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

import msgspec

from tidemill.control import records
from tidemill.control.records import ClusterRecord, NodeRecord, decode, encode
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import Compare, Put, Txn
from tidemill.errors import ConfigError, CorruptData, MetadataConflict, StorageError
from tidemill.server.disk.data_directory import DirectoryIdentity

if TYPE_CHECKING:
    from tidemill.control.stores.store import MetadataStore
    from tidemill.coordination.ids import Ids
    from tidemill.server.disk.data_directory import DataDirectory

__all__ = ("Upgraded", "upgrade")

_NODES: Final = "nodes/"
_SECRET_BYTES: Final = 32
#: Below the store's limits: each key is compared and put.
_KEYS_PER_COMMIT: Final = 60
_BYTES_PER_COMMIT: Final = 1024 * 1024
_KEPT_SUFFIX: Final = ".before-cluster"


class Upgraded(NamedTuple):
    """What was taken into the cluster, and where the old file is."""

    cluster_id: str
    node_id: int
    node_name: str
    keys: int
    digest: str
    kept: Path


class _Node(NamedTuple):
    """The records of the cluster and the node; ``keys``: what both stores must have, but for ``cluster``."""

    cluster: ClusterRecord
    node_id: int
    record: NodeRecord
    keys: Mapping[str, bytes]


async def upgrade(directory: DataDirectory, target: MetadataStore, ids: Ids) -> Upgraded:
    """Move the metadata of ``directory``, which is locked and has no node, into the empty ``target``.

    Raises ``ConfigError`` if there is nothing to take, or if ``target`` is not empty.
    """
    source = await _read_source(directory)
    found = {key: entry.value for key, entry in (await target.read()).entries.items()}
    taken = _cluster_of(found)
    if taken is not None and taken.replicated and _is_finished(directory, source, taken):
        return _finish(directory, source, len(found), _digest(found))
    planned = _plan(source, found, ids)
    _check_target(planned, found)
    cluster_revision = await _begin(target, planned, found)
    await _copy(target, planned, found, cluster_revision)
    await _verify(target, planned.keys)
    identity = DirectoryIdentity(
        cluster_id=planned.cluster.cluster_id,
        directory_id=_directory_id(planned),
        node_name=planned.record.name,
    )
    directory.write_identity(identity)
    final = msgspec.structs.replace(planned.cluster, replicated=True, secret=ids.token(_SECRET_BYTES))
    put = Put(records.CLUSTER_KEY, encode(final))
    await target.commit(Txn(compares=(Compare(records.CLUSTER_KEY, cluster_revision),), puts=(put,)))
    digest = await _verify(target, {**planned.keys, records.CLUSTER_KEY: put.value})
    return _finish(directory, planned, len(planned.keys), digest)


async def _read_source(directory: DataDirectory) -> _Node:
    """The single node's metadata as SQLite has it."""
    path = directory.metadata_path
    if not path.exists():
        identity = directory.read_identity()
        if identity is not None:
            raise ConfigError(
                f"{directory.path} belongs to cluster {identity.cluster_id} already; start it with "
                f"tidemill up --cluster etcd://... --name {identity.node_name} --data {directory.path}"
            )
        raise ConfigError(f"{directory.path} has no {path.name}: no node has ever run there; check --data")
    store = SqliteStore(path)
    try:
        entries = (await store.read()).entries
    finally:
        await store.close()
    keys = {key: entry.value for key, entry in entries.items()}
    cluster = _cluster_of(keys)
    nodes = [key for key in keys if key.startswith(_NODES)]
    if cluster is None or len(nodes) != 1:
        raise CorruptData(
            f"the metadata of a single node names its cluster and one node, and this one names {len(nodes)}; "
            "start the node once on its own and stop it again",
            path=str(path),
            position=0,
        )
    record = decode(nodes[0], keys[nodes[0]], NodeRecord)
    return _Node(cluster, int(nodes[0].removeprefix(_NODES)), record, keys)


def _cluster_of(keys: Mapping[str, bytes]) -> ClusterRecord | None:
    value = keys.get(records.CLUSTER_KEY)
    return None if value is None else decode(records.CLUSTER_KEY, value, ClusterRecord)


def _is_finished(directory: DataDirectory, source: _Node, taken: ClusterRecord) -> bool:
    """Whether an earlier attempt has done everything but put the SQLite file away."""
    identity = directory.read_identity()
    return identity is not None and source.cluster.cluster_id == identity.cluster_id == taken.cluster_id


def _plan(source: _Node, found: Mapping[str, bytes], ids: Ids) -> _Node:
    """The source with an id of its data directory: that of an earlier attempt, or a new one."""
    key = records.node_key(source.node_id)
    directory_id: UUID | None = None
    if key in found:
        directory_id = decode(key, found[key], NodeRecord).directory_id
    record = msgspec.structs.replace(source.record, directory_id=directory_id or ids.uuid())
    return source._replace(record=record, keys={**source.keys, key: encode(record)})


def _directory_id(planned: _Node) -> UUID:
    assert planned.record.directory_id is not None
    return planned.record.directory_id


def _check_target(planned: _Node, found: Mapping[str, bytes]) -> None:
    """Refuse to write where something else is. What an earlier attempt has written may be there."""
    foreign = sorted(key for key, value in found.items() if planned.keys.get(key) != value)
    if foreign:
        raise ConfigError(
            f"etcd has {len(found)} keys of this cluster's name already, and {foreign[0]!r} is not this "
            "node's: nothing was changed. Name another cluster with --set cluster_name=NAME; or, if an "
            "earlier attempt was interrupted and the node has run since, delete the keys below "
            "tidemill/<cluster name>/ in etcd and try again"
        )


async def _begin(target: MetadataStore, planned: _Node, found: Mapping[str, bytes]) -> int:
    """Claim the prefix for this node; returns the revision of the cluster's record."""
    if records.CLUSTER_KEY in found:
        return (await target.read(records.CLUSTER_KEY)).entries[records.CLUSTER_KEY].mod_revision
    first = (records.CLUSTER_KEY, records.node_key(planned.node_id))
    try:
        return await target.commit(
            Txn(
                compares=tuple(Compare(key, 0) for key in first),
                puts=tuple(Put(key, planned.keys[key]) for key in first),
            )
        )
    except MetadataConflict as error:
        raise ConfigError("somebody else writes this cluster to etcd at the same time; look who") from error


async def _copy(
    target: MetadataStore, planned: _Node, found: Mapping[str, bytes], cluster_revision: int
) -> None:
    present = {*found, records.CLUSTER_KEY, records.node_key(planned.node_id)}
    missing = {key: value for key, value in sorted(planned.keys.items()) if key not in present}
    claim = Compare(records.CLUSTER_KEY, cluster_revision)
    for some in _commits(missing):
        guards = (claim, *(Compare(put.key, 0) for put in some))
        await target.commit(Txn(compares=guards, puts=tuple(some)))


def _commits(keys: Mapping[str, bytes]) -> Iterator[list[Put]]:
    """Split keys into transactions that the store takes."""
    some: list[Put] = []
    size_bytes = 0
    for key, value in keys.items():
        if some and (len(some) == _KEYS_PER_COMMIT or size_bytes + len(value) > _BYTES_PER_COMMIT):
            yield some
            some, size_bytes = [], 0
        some.append(Put(key, value))
        size_bytes += len(value)
    if some:
        yield some


async def _verify(target: MetadataStore, wanted: Mapping[str, bytes]) -> str:
    """Read everything back; returns the digest, which both sides share. Raises ``StorageError`` if not."""
    found = {key: entry.value for key, entry in (await target.read()).entries.items()}
    ours, theirs = _digest(wanted), _digest(found)
    if ours != theirs:
        different = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
        raise StorageError(
            f"etcd has other metadata than {len(wanted)} keys that were written (digest {theirs[:16]}, and "
            f"not {ours[:16]}): the first key that differs is {different[0]!r}; somebody else writes there"
        )
    return ours


def _digest(keys: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(keys.items()):
        digest.update(f"{len(key)} {key} {len(value)} ".encode() + value)
    return digest.hexdigest()


def _finish(directory: DataDirectory, source: _Node, keys: int, digest: str) -> Upgraded:
    """Put the SQLite file away: it is kept, and no node reads it any more."""
    path = directory.metadata_path
    kept = path.with_name(path.name + _KEPT_SUFFIX)
    try:
        # Files of SQLite that are beside it belong to it.
        for suffix in ("-wal", "-shm", ""):
            beside = path.with_name(path.name + suffix)
            if beside.exists():
                beside.rename(kept.with_name(kept.name + suffix))
        descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"cannot rename {path} to {kept}: {error.strerror}; rename it") from error
    return Upgraded(source.cluster.cluster_id, source.node_id, source.record.name, keys, digest, kept)
