"""The data directory: one process at a time, and a note whether the last one stopped in an orderly way.

A node of a cluster also keeps its identity there: the id of the directory, the cluster that it belongs to,
how much of the cluster's metadata it has seen, and which incarnation of the node used it last. So an older
copy of the directory is recognised; the note of an orderly stop names its incarnation, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from pathlib import Path
from uuid import UUID

import msgspec

from tidemill.errors import ConfigError, CorruptData, DataDirectoryInUse, DiskFull, StorageError

__all__ = ("DataDirectory", "DirectoryIdentity", "describe_owner")

logger = logging.getLogger(__name__)

_LOCK = "lock"
_CLEAN = "clean-stop"
_IDENTITY = "cluster-identity.json"


class DirectoryIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Which cluster a data directory belongs to.

    Attributes:
        cluster_id: The cluster.
        directory_id: Drawn when the directory was first used; a copy has the same.
        node_name: The node whose directory it is.
        seen_revision: A revision of the cluster's metadata that this directory has seen, not much older than
            the newest one. An operator sets it to 0 to accept older metadata.
        seen_key: The key that was written last when the metadata was at ``seen_revision``; empty in a
            directory of an older release.
        seen_key_revision: The revision that wrote it. Metadata that was restored may have passed
            ``seen_revision`` since, but has another history.
        incarnations: The last one that was registered for this directory, and up to two behind it that may
            have been. Empty: not known, in a directory of an older release.
    """

    cluster_id: str
    directory_id: UUID
    node_name: str
    seen_revision: int = 0
    seen_key: str = ""
    seen_key_revision: int = 0
    incarnations: tuple[UUID, ...] = ()


class DataDirectory:
    """A node's data directory, locked from ``lock`` or ``acquire`` to ``release``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        #: Whether the last owner stopped in an orderly way; true for a directory that was never used.
        self.stopped_cleanly = True
        #: The incarnation of the node that stopped in an orderly way last; None if none has noted it.
        self.clean_of: UUID | None = None

    def lock(self) -> None:
        """Create the directory if need be, and keep others out; the owner may ask again.

        Raises ``DataDirectoryInUse`` naming the owner.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"cannot use {self.path} as data directory: {error.strerror}; choose one that can be "
                "created and written"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise DataDirectoryInUse(
                f"the data directory {self.path} is in use by {describe_owner(owner)}; "
                "stop that process or give this one another --data directory"
            ) from None
        self._lock = descriptor
        self.note_owner("")

    def acquire(self) -> None:
        """``lock``, and find out how the last owner stopped."""
        self.lock()
        self._take_clean_note()

    def _take_clean_note(self) -> None:
        used_before = self.metadata_path.exists() or self._has_logs()
        note = self.path / _CLEAN
        self.stopped_cleanly = note.exists() or not used_before
        if note.exists():
            with contextlib.suppress(ValueError):
                self.clean_of = UUID(hex=note.read_text())
            note.unlink()
            self._sync()

    def read_identity(self) -> DirectoryIdentity | None:
        """The cluster that this directory belongs to; None if it belongs to none."""
        path = self.path / _IDENTITY
        try:
            return msgspec.json.decode(path.read_bytes(), type=DirectoryIdentity)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise CorruptData(
                f"the file that says which cluster this directory belongs to cannot be read: {error}; "
                "restore it, or move the directory away and let the node start with an empty one",
                path=str(path),
                position=0,
            ) from error

    def write_identity(self, identity: DirectoryIdentity) -> None:
        """Note durably which cluster this directory belongs to. Raises ``StorageError``."""
        path = self.path / _IDENTITY
        new = path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                file.write(msgspec.json.encode(identity))
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
            self._sync()
        except OSError as error:
            kind = DiskFull if error.errno in DiskFull.ERRNOS else StorageError
            raise kind(f"cannot write {path}: {error.strerror}") from error

    @property
    def metadata_path(self) -> Path:
        return self.path / "metadata.db"

    def check_alone(self) -> None:
        """Raise ``ConfigError`` if the directory belongs to a cluster: on its own it would go its own way."""
        identity = self.read_identity()
        if identity is not None:
            raise ConfigError(
                f"the data directory {self.path} is that of node {identity.node_name!r} of cluster "
                f"{identity.cluster_id}; start it with --cluster etcd://... --name {identity.node_name}. If "
                f"'tidemill cluster upgrade' was interrupted, run it again"
            )

    def check_metadata_present(self) -> None:
        """Raise if there are logs but no metadata: the node would look empty, and forget its data."""
        if not self.metadata_path.exists() and self._has_logs():
            raise CorruptData(
                "there are logs but no metadata; restore metadata.db from a backup, or move the logs away",
                path=str(self.metadata_path),
                position=0,
            )

    def _has_logs(self) -> bool:
        logs = self.path / "logs"
        return logs.exists() and any(logs.iterdir())

    def note_owner(self, listening: str) -> None:
        """Write into the lock file who holds it, for the message that a second process prints."""
        assert self._lock is not None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "listening": listening}
        data = json.dumps(owner).encode()
        # Only for a message, so a full disk is no reason to fail.
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, data, 0)
            os.ftruncate(self._lock, len(data))

    def note_clean_stop(self, incarnation: UUID | None = None) -> None:
        """Note that everything is durable and closed: the next owner has nothing to recover.

        A node of a cluster names its ``incarnation``. Without disk space for the note the next start looks
        at every log, as after a crash.
        """
        try:
            with (self.path / _CLEAN).open("w") as file:
                file.write("" if incarnation is None else incarnation.hex)
                file.flush()
                os.fsync(file.fileno())
            self._sync()
        except OSError as error:
            logger.warning("no note of the orderly stop in %s: %s", self.path, error.strerror)

    def release(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            # Unlocked explicitly: a child that was forked meanwhile has the lock file open, too, and so keeps
            # the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _sync(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def describe_owner(owner: bytes) -> str:
    """The owner of a lock in words; ``owner`` is the content of the lock file."""
    try:
        found = json.loads(owner)
        listening = f", listening on {found['listening']}" if found["listening"] else ""
        return f"process {found['pid']} on {found['host']}{listening}"
    except (ValueError, KeyError, TypeError):
        return "another process"
