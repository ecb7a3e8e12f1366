"""A second database beside an open one, made of hard links, without holding Python's lock for long.

RocksDB's own checkpoint does the same, but rocksdict holds the lock through its syncs, which wait for what
compactions write: 2 ms on a quiet disk, 100 to 400 ms on a busy one. This is how it goes here:

1. Nobody writes, and the memtable was flushed: the state is in the files.
2. Copy the list of files (``MANIFEST``), then link every table file (``.sst``). Table files never change, and
   one that the copied list names goes away only after RocksDB has added to its list.
3. Open the copy for reading. That checks that every file on the list is there in its full size, and says
   which ones those are. If a compaction came in between, a file is missing: start again. What is wrong
   every time, with all files there, is damage.
4. Writers go on. Remove what is not on the list: files that a compaction was writing, and rocksdict's own.

So what is returned was opened, and was found to have the applied offset and the identity of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.errors import CorruptData, StorageError
from tidemill.kv.contract import TABLE_SUFFIX
from tidemill.kv.files import Files

__all__ = ("copy_database", "keep_only")

_CURRENT_NAME = "CURRENT"
_MANIFEST_PREFIX = "MANIFEST-"
_TRIES_MAX = 10


def copy_database(
    source: Path, target: Path, files: Files, inspect: Callable[[Path], frozenset[str]]
) -> frozenset[str]:
    """Copy ``source``, which nobody writes to, to ``target``, by hard links. Nothing is synced yet.

    ``inspect`` opens the copy and returns the names of its table files; ``CorruptData`` if it is not whole.
    Returns the names of the files that belong to the copy. Raises ``CorruptData`` if a table file of
    ``source`` is damaged.
    """
    failures: list[CorruptData] = []
    for _ in range(_TRIES_MAX):
        try:
            files.remove_tree(target)
            files.make_directory(target)
            manifest = _copy_once(source, target, files)
            return inspect(target) | {_CURRENT_NAME, manifest}
        except CorruptData as error:
            failures.append(error)
    last = failures[-1]
    if str(last) == str(failures[-2]) and files.stat(Path(last.path)) is not None:
        name = Path(last.path).name
        path = source / name if name.endswith(TABLE_SUFFIX) else source
        raise CorruptData(f"it cannot be copied: {last}", path=str(path), position=last.position)
    raise StorageError(
        f"no copy of {source} succeeded in {_TRIES_MAX} tries, because its files change too fast or one is "
        f"lost: {last}"
    )


def keep_only(directory: Path, names: frozenset[str], files: Files) -> None:
    """Remove all files of a directory but those in ``names``."""
    for name in files.names(directory):
        if name not in names:
            files.remove(directory / name)


def _copy_once(source: Path, target: Path, files: Files) -> str:
    current = files.read(source / _CURRENT_NAME) or b""
    manifest = current.decode("ascii", "replace").strip()
    if not manifest.startswith(_MANIFEST_PREFIX):
        raise CorruptData("CURRENT names no list of files", path=str(source / _CURRENT_NAME), position=0)
    content = files.read(source / manifest)
    if content is None:
        raise CorruptData("the list of files was replaced", path=str(source / manifest), position=0)
    files.write(target / manifest, content)
    files.write(target / _CURRENT_NAME, current)
    for name in files.names(source):
        if name.endswith(TABLE_SUFFIX):
            files.link(source / name, target / name)
    return manifest
