from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import java
from support.java import JavaMissing, java_worker_command


def put(directory: Path, name: str, script: str) -> None:
    """A program of this name that does no more than the script; what was found before is forgotten."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    java._found.cache_clear()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only directory where programs are found."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(java, "_BUILDS", tmp_path / "builds")
    java._found.cache_clear()
    yield tmp_path / "bin"
    java._found.cache_clear()


def missing() -> str:
    with pytest.raises(JavaMissing) as refused:
        java_worker_command()
    return str(refused.value)


def test_what_is_missing_is_named(path: Path) -> None:
    assert "a JDK is missing" in missing()
    put(path, "java", "exit 0")
    put(path, "javac", "echo javac 11.0.2")
    assert "Java 11; version 17 or newer" in missing()
    put(path, "javac", "echo javac 17.0.15")
    assert "Maven is missing" in missing()
    put(path, "mvn", "echo no registry answers; exit 1")
    assert "Maven cannot get Java's Kafka clients: no registry answers" in missing()


def test_a_registry_is_asked_once_and_not_for_every_test(path: Path, tmp_path: Path) -> None:
    put(path, "java", "exit 0")
    put(path, "javac", "echo javac 17.0.15")
    put(path, "mvn", f"echo asked >> {tmp_path}/asked; exit 1")
    assert missing() == missing()
    # Without a network, then with one.
    assert (tmp_path / "asked").read_text().split() == ["asked", "asked"]


def test_code_that_does_not_compile_is_no_reason_to_skip(path: Path) -> None:
    put(path, "java", "exit 0")
    put(path, "javac", 'case "$1" in -version) echo javac 17.0.15;; *) echo "; expected"; exit 1;; esac')
    put(path, "mvn", 'for each; do case "$each" in -Dmdep.outputFile=*) : > "${each#*=}";; esac; done')
    with pytest.raises(AssertionError, match="; expected"):
        java_worker_command()
