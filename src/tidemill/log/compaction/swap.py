"""Replacing segments on disk by a compacted one, so that a crash leaves the old ones or the new one.

Names in a partition's directory, next to ``<base>.log`` and ``<base>.index``:

    <base>.log.cleaned      being written; worth nothing, removed at the next start
    <base>-<end>.swap       whole, checked and synced: it replaces every segment from base to end

The rename from the first to the second, once the directory is synced, is the commit. From then on the old
segments go, and ``.swap`` becomes ``.log``; if that is interrupted, the next start finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.errors import StorageError
from tidemill.log.notes.checked_file import pack_checked, read_checked
from tidemill.log.segments.segment import segment_name
from tidemill.log.storage import Storage, write_atomic

__all__ = (
    "CLEANED_ENDING",
    "CLEAN_POINT_NAME",
    "carry_out",
    "cleaned_paths",
    "commit",
    "finish_swaps",
    "list_swaps",
    "load_clean_point",
    "remove_cleaned",
    "save_clean_point",
    "swap_path",
)

CLEANED_ENDING = ".cleaned"
_SWAP_ENDING = ".swap"
CLEAN_POINT_NAME = "clean-point"
_CLEAN_POINT_KIND = 4
_OFFSET_BYTES = 8


def cleaned_paths(directory: str, base_offset: int) -> tuple[str, str]:
    """The paths to which a compacted segment and its index are written."""
    path = f"{directory}/{segment_name(base_offset)}"
    return f"{path}.log{CLEANED_ENDING}", f"{path}.index{CLEANED_ENDING}"


def commit(storage: Storage, directory: str, base_offset: int, end_offset: int) -> None:
    """Commit the replacement. If the rename fails nothing has changed."""
    log_path, _ = cleaned_paths(directory, base_offset)
    storage.rename(log_path, swap_path(directory, base_offset, end_offset))
    storage.sync_dir(directory)


def carry_out(
    storage: Storage, directory: str, base_offset: int, end_offset: int, names: Sequence[str]
) -> None:
    """Finish a committed replacement; ``names`` are those in the directory. Can be repeated after a crash."""
    for name in names:
        stem, _, ending = name.partition(".")
        if ending not in ("log", "index") or not stem.isdigit() or not base_offset <= int(stem) < end_offset:
            continue
        if ending == "index" or int(stem) != base_offset:
            storage.remove(f"{directory}/{name}")
    # If the last rename became durable before these removals did, there would be offsets twice.
    storage.sync_dir(directory)
    path = f"{directory}/{segment_name(base_offset)}.log"
    storage.rename(swap_path(directory, base_offset, end_offset), path)
    index_name = f"{segment_name(base_offset)}.index{CLEANED_ENDING}"
    if index_name in names:
        storage.rename(f"{directory}/{index_name}", f"{directory}/{segment_name(base_offset)}.index")
    storage.sync_dir(directory)


def finish_swaps(storage: Storage, directory: str) -> list[str]:
    """Finish committed replacements at the start, and remove others. Returns the names that were there."""
    names = storage.list_dir(directory)
    swaps = list_swaps(names)
    cleaned = [name for name in names if name.endswith(CLEANED_ENDING)]
    for name in cleaned:
        storage.remove(f"{directory}/{name}")
    for base_offset, end_offset in swaps:
        left = [name for name in names if name not in cleaned]
        carry_out(storage, directory, base_offset, end_offset, left)
    return names


def list_swaps(names: Sequence[str]) -> list[tuple[int, int]]:
    """(base, end) of the replacements that are committed and not finished."""
    found = []
    for name in names:
        base, _, end = name.removesuffix(_SWAP_ENDING).partition("-")
        if name.endswith(_SWAP_ENDING) and base.isdigit() and end.isdigit():
            found.append((int(base), int(end)))
    return found


def remove_cleaned(storage: Storage, directory: str, base_offset: int) -> None:
    """Remove a compacted segment that was not committed, or leave that to the next start."""
    for path in cleaned_paths(directory, base_offset):
        try:
            if storage.exists(path):
                storage.remove(path)
        except StorageError:
            continue


def swap_path(directory: str, base_offset: int, end_offset: int) -> str:
    """The path of a compacted segment that replaces all from ``base_offset`` to ``end_offset``."""
    return f"{directory}/{segment_name(base_offset)}-{segment_name(end_offset)}{_SWAP_ENDING}"


# --- the clean point


def save_clean_point(storage: Storage, directory: str, first_dirty_offset: int) -> None:
    """Note durably that no key occurs twice below the offset. Call it once that is so on disk."""
    payload = first_dirty_offset.to_bytes(_OFFSET_BYTES, "big")
    write_atomic(storage, f"{directory}/{CLEAN_POINT_NAME}", pack_checked(_CLEAN_POINT_KIND, payload))


def load_clean_point(storage: Storage, directory: str, end_offset: int) -> int:
    """The first dirty offset; 0 if it is not known, which only means more work for the next compaction."""
    path = f"{directory}/{CLEAN_POINT_NAME}"
    try:
        found = int.from_bytes(read_checked(storage, path, _CLEAN_POINT_KIND), "big")
    except StorageError:
        return 0
    if found > end_offset:
        # The log was cut by a repair. Kept, the note would be wrong once new records have these offsets.
        storage.remove(path)
        return 0
    return found
