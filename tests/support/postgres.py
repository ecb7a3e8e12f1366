"""A PostgreSQL server of its own for a test, from the binaries that Debian installs."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ("find_postgres", "running_postgres")


def find_postgres() -> Path | None:
    """The folder with ``initdb`` and ``postgres``; None if there is none."""
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    found = shutil.which("initdb")
    if found is not None:
        places.insert(0, Path(found).resolve().parent)
    return next(
        (place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None
    )


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Run a server that listens on a socket only; gives the connection string."""
    binaries = find_postgres()
    assert binaries is not None
    directory = Path(tempfile.mkdtemp(prefix="tm-pg-"))
    run_as: dict[str, str | int] = {}
    if os.getuid() == 0:
        # It refuses to run as root.
        nobody = pwd.getpwnam("nobody")
        os.chown(directory, nobody.pw_uid, nobody.pw_gid)
        run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid}
    data = directory / "data"

    def run(*command: str) -> None:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            cwd=directory,
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            **run_as,  # type: ignore[call-overload]
        )

    try:
        run(str(binaries / "initdb"), "-D", str(data), "-U", "test", "-A", "trust", "-N", "-E", "UTF8")
        options = f"-c listen_addresses='' -k {directory} -c fsync=off"
        log = str(directory / "log")
        run(str(binaries / "pg_ctl"), "-D", str(data), "-w", "-l", log, "-o", options, "start")
        try:
            yield f"host={directory} user=test dbname=postgres"
        finally:
            run(str(binaries / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
