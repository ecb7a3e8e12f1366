"""What can happen to the state of tables on disk while a node is down, or while it runs.

Every function takes a random generator and the ``kv`` directory of a node's data, and says in words what it
did. Files are damaged in place, so a table file that a snapshot shares with the live state is damaged in
both, or in a copy of their own.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = (
    "DAMAGES",
    "Damage",
    "delete_everything",
    "delete_live",
    "flip_bytes",
    "flip_newest_snapshot",
    "live_files",
)

Damage = Callable[[random.Random, Path], str]


def live_files(kv: Path, pattern: str) -> list[Path]:
    """Files of live states."""
    return sorted(kv.glob(f"*/live/{pattern}"))


def flip_bytes(rng: random.Random, path: Path, *, in_place: bool, count: int = 20) -> None:
    """Turn over some bytes of a file. Not in place: under its other names it stays as it was."""
    data = bytearray(path.read_bytes())
    for _ in range(count):
        if data:
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
    if not in_place:
        path.unlink()
    with path.open("r+b" if in_place else "wb") as file:
        file.write(data)


def delete_live(rng: random.Random, kv: Path) -> str:
    gone = [path for path in sorted(kv.glob("*/live")) if rng.random() < 0.7]
    for path in gone:
        shutil.rmtree(path)
    return f"{len(gone)} live states deleted"


def flip_live(rng: random.Random, kv: Path) -> str:
    files, in_place = live_files(kv, "*.sst"), rng.random() < 0.5
    for path in rng.sample(files, min(len(files), 3)):
        flip_bytes(rng, path, in_place=in_place)
    return f"bytes of {min(len(files), 3)} live files turned over, {'in place' if in_place else 'in copies'}"


def truncate_live(rng: random.Random, kv: Path) -> str:
    files = [path for path in live_files(kv, "*") if path.suffix == ".sst" or "MANIFEST" in path.name]
    for path in rng.sample(files, min(len(files), 2)):
        data = path.read_bytes()[: rng.randrange(max(path.stat().st_size, 1))]
        path.unlink()
        path.write_bytes(data)
    return "live files cut short"


def lose_live(rng: random.Random, kv: Path) -> str:
    pattern = rng.choice(["CURRENT", "MANIFEST-*", "*.sst"])
    files = live_files(kv, pattern)
    for path in rng.sample(files, min(len(files), 2)):
        path.unlink()
    return f"live files {pattern} lost"


def flip_newest_snapshot(rng: random.Random, kv: Path) -> str:
    """The newest snapshot of each bucket; with its live state, so that the snapshot would be needed."""
    count = 0
    for bucket in sorted(kv.iterdir()):
        snapshots = sorted((bucket / "snapshots").glob("[0-9]*"), key=lambda path: int(path.name))
        if snapshots:
            path = rng.choice([each for each in sorted(snapshots[-1].iterdir()) if each.name != "LOG"])
            flip_bytes(rng, path, in_place=False)
            shutil.rmtree(bucket / "live", ignore_errors=True)
            count += 1
    return f"{count} newest snapshots damaged, and their live states deleted"


def delete_snapshots(rng: random.Random, kv: Path) -> str:
    for path in kv.glob("*/snapshots"):
        shutil.rmtree(path)
    if rng.random() < 0.5:
        return f"all snapshots deleted, {delete_live(rng, kv)}"
    return "all snapshots deleted"


def delete_everything(rng: random.Random, kv: Path) -> str:
    for path in kv.iterdir():
        shutil.rmtree(path)
    return "all state deleted"


DAMAGES: tuple[Damage, ...] = (
    delete_live,
    flip_live,
    truncate_live,
    lose_live,
    flip_newest_snapshot,
    delete_snapshots,
    delete_everything,
)
