"""The checkpoint of a partition: a small file that says what of its log is known to be durable.

Three slots, each in a page of its own. Slots 0 and 1 take turns and are synced with every write, and one is
only overwritten when the other is durable: so at least one of them is always whole. Slot 2 is a hint: it is
written after every flush and never synced. A hint only ever speaks of data that is durable already, so it is
safe to believe if its checksum fits, and safe to lose; it keeps the recovery point close behind the log
for the price of one small write.

A slot has two parts, each with its own checksum: what the first release wrote, and the high watermark behind
it. Either release reads the other's files: the first one never looks at the second part, and a second part
that does not belong to the first (another sequence number) counts as missing. The high watermark is a lower
bound: it is what the owner knew when something else made a slot be written.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, replace

from tidemill.errors import CorruptData, StorageError, SyncFailed
from tidemill.log.storage import Storage, StorageFile, write_atomic
from tidemill.records.checksum import crc32c

__all__ = (
    "CHECKPOINT_NAME",
    "Checkpoint",
    "CheckpointFile",
    "damaged_slots",
    "read_checkpoint",
    "read_high_watermark",
)

CHECKPOINT_NAME = "checkpoint"

_SLOT_STRIDE_BYTES = 4096
_HINT_SLOT = 2
_FORMAT = struct.Struct(">4sQqqBqq")
_MAGIC = b"TMC1"
_SLOT_BYTES = _FORMAT.size + 4
#: The high watermark, and the CRC-32C of the whole slot in front of this checksum.
_EXTENSION = struct.Struct(">qI")
_EXTENDED_BYTES = _SLOT_BYTES + _EXTENSION.size


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Log start, recovery point, high watermark, and whether the last stop was orderly."""

    log_start_offset: int = 0
    #: Everything below was fdatasynced.
    recovery_point: int = 0
    #: Set by an orderly stop: the log ended in this segment with this many bytes.
    clean: bool = False
    active_base_offset: int = 0
    active_size_bytes: int = 0
    #: Everything below was committed; None if it was never noted.
    high_watermark: int | None = None


class CheckpointFile:
    """Reads and writes the slots of a checkpoint. The next start finds ``current``, or something newer."""

    def __init__(self, file: StorageFile, checkpoint: Checkpoint, sequence: int, slot: int) -> None:
        self._file = file
        self._sequence = sequence
        self._slot = slot
        # Flushes write hints from a pool thread while the owner saves from its own.
        self._lock = threading.Lock()
        self._sync_failed = False
        self.current = checkpoint
        #: The high watermark for the next write of any slot. Set by the log's owner.
        self.high_watermark = checkpoint.high_watermark

    @classmethod
    def create(cls, storage: Storage, directory: str, checkpoint: Checkpoint) -> CheckpointFile:
        """Make the file, whole or not at all: one without a whole slot is always damage.

        All slots get their disk space now, so that a full disk never keeps a log from being opened.
        """
        path = f"{directory}/{CHECKPOINT_NAME}"
        size = _HINT_SLOT * _SLOT_STRIDE_BYTES + _EXTENDED_BYTES
        write_atomic(storage, path, _pack_slot(1, checkpoint).ljust(size, b"\0"))
        return cls(storage.open(path), checkpoint, 1, 0)

    @classmethod
    def load(cls, storage: Storage, directory: str) -> CheckpointFile:
        """Open an existing file; ``CorruptData`` if no synced slot is whole."""
        file = storage.open(f"{directory}/{CHECKPOINT_NAME}")
        slots = [_read_slot(file, slot) for slot in range(3)]
        whole = [(found[0], slot, found[1]) for slot, found in enumerate(slots[:2]) if found]
        if not whole:
            file.close()
            raise CorruptData(
                "no slot of the checkpoint is whole; run 'tidemill log repair'", path=file.path, position=0
            )
        sequence, slot, checkpoint = max(whole)
        hint = slots[_HINT_SLOT]
        if hint and hint[0] > sequence:
            sequence, hinted = hint
            high_watermark = hinted.high_watermark
            if high_watermark is None:
                high_watermark = checkpoint.high_watermark
            checkpoint = replace(
                checkpoint, recovery_point=hinted.recovery_point, clean=False, high_watermark=high_watermark
            )
        return cls(file, checkpoint, sequence, slot)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write and sync. Call only when everything it says is durable already."""
        with self._lock:
            self._save(checkpoint)

    def save_recovery_point(self, recovery_point: int) -> None:
        """Write and sync a new recovery point; the log start stays what the owner made it meanwhile."""
        with self._lock:
            self._insist_on_syncs()
            self._save(Checkpoint(self.current.log_start_offset, recovery_point))

    def save_log_start(self, log_start_offset: int) -> None:
        """Write and sync a new log start; a recovery point below it moves along."""
        with self._lock:
            self._save(Checkpoint(log_start_offset, max(self.current.recovery_point, log_start_offset)))

    def lower(self, recovery_point: int) -> None:
        """Write and sync a recovery point that is not higher than now: what is above is about to be cut."""
        with self._lock:
            lowered = min(self.current.recovery_point, recovery_point)
            self._save(Checkpoint(self.current.log_start_offset, lowered))

    def hint(self, recovery_point: int) -> None:
        """Note a new recovery point without syncing."""
        with self._lock:
            self._insist_on_syncs()
            self.current = replace(
                self.current, recovery_point=recovery_point, clean=False, high_watermark=self.high_watermark
            )
            self._write_slot(_HINT_SLOT, self.current)

    def sync_beside_flushes(self, file: StorageFile) -> None:
        """Sync a file that a flush may be syncing at the same time.

        A failure is told to one of the two only: if it is this one, the other's success proves nothing, and
        what it takes for the new recovery point is refused with ``SyncFailed``.
        """
        with self._lock:
            try:
                file.sync()
            except StorageError:
                self._sync_failed = True
                raise

    def close(self) -> None:
        self._file.close()

    def _insist_on_syncs(self) -> None:
        if self._sync_failed:
            raise SyncFailed(
                f"{self._file.path}: a sync beside the flush has failed, so it is not known what is on disk; "
                "check the disk and restart the node"
            )

    def _save(self, checkpoint: Checkpoint) -> None:
        checkpoint = replace(checkpoint, high_watermark=self.high_watermark)
        slot = 1 - self._slot
        self._write_slot(slot, checkpoint)
        self._file.sync()
        self._slot = slot
        self.current = checkpoint

    def _write_slot(self, slot: int, checkpoint: Checkpoint) -> None:
        self._sequence += 1
        self._file.write(slot * _SLOT_STRIDE_BYTES, [_pack_slot(self._sequence, checkpoint)])


def read_checkpoint(storage: Storage, directory: str) -> Checkpoint | None:
    """The checkpoint as the next start would read it; None if there is none that is whole."""
    try:
        file = CheckpointFile.load(storage, directory)
    except StorageError:
        return None
    file.close()
    return file.current


def read_high_watermark(storage: Storage, directory: str) -> int | None:
    """The high watermark of a log that is not open; 0 if it was never written, None if it is damaged.

    Releases that did not note one had one replica of everything, so there it is the recovery point.
    """
    if not storage.exists(f"{directory}/{CHECKPOINT_NAME}"):
        return 0
    try:
        file = CheckpointFile.load(storage, directory)
    except StorageError:
        return None
    file.close()
    current = file.current
    if current.high_watermark is None:
        return current.recovery_point
    return max(current.high_watermark, current.log_start_offset)


def _pack_slot(sequence: int, checkpoint: Checkpoint) -> bytes:
    body = _FORMAT.pack(
        _MAGIC,
        sequence,
        checkpoint.log_start_offset,
        checkpoint.recovery_point,
        checkpoint.clean,
        checkpoint.active_base_offset,
        checkpoint.active_size_bytes,
    )
    slot = body + struct.pack(">I", crc32c(body))
    if checkpoint.high_watermark is None:
        # Zeros, so that no older second part is left behind a first part that it does not belong to.
        return slot + bytes(_EXTENSION.size)
    return slot + _pack_extension(slot, checkpoint.high_watermark)


def _pack_extension(slot: bytes, high_watermark: int) -> bytes:
    crc = crc32c(slot + high_watermark.to_bytes(8, "big", signed=True))
    return _EXTENSION.pack(high_watermark, crc)


def damaged_slots(file: StorageFile) -> list[int]:
    """Positions of the slots that hold something, but not a whole checkpoint: torn in a crash, or damaged."""
    positions = [slot * _SLOT_STRIDE_BYTES for slot in range(3)]
    return [
        position
        for slot, position in enumerate(positions)
        if any(file.read(position, _SLOT_BYTES)) and _read_slot(file, slot) is None
    ]


def _read_slot(file: StorageFile, slot: int) -> tuple[int, Checkpoint] | None:
    found = file.read(slot * _SLOT_STRIDE_BYTES, _EXTENDED_BYTES)
    data, extension = found[:_SLOT_BYTES], found[_SLOT_BYTES:]
    if len(data) != _SLOT_BYTES or struct.unpack(">I", data[-4:])[0] != crc32c(data[:-4]):
        return None
    magic, sequence, start, point, clean, base, size = _FORMAT.unpack(data[:-4])
    if magic != _MAGIC:
        return None
    return sequence, Checkpoint(start, point, bool(clean), base, size, _read_extension(data, extension))


def _read_extension(slot: bytes, extension: bytes) -> int | None:
    if len(extension) != _EXTENSION.size:
        return None
    high_watermark: int = _EXTENSION.unpack(extension)[0]
    return high_watermark if _pack_extension(slot, high_watermark) == extension else None
