"""Java's own Kafka clients for the system tests: built once, run as client processes.

The programs are the Maven project in ``tests/system/java``. Maven finds the libraries, in its local
repository or else in a registry; ``javac`` compiles the few classes. Both results are kept under
``build/java-clients`` until the project changes. ``JavaMissing`` says what a machine lacks; code that does
not compile is an error like any other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

__all__ = ("JavaMissing", "java_worker_command")

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = _ROOT / "tests" / "system" / "java"
_BUILDS = _ROOT / "build" / "java-clients"
_JAVA_MIN = 17
#: Options of Maven and the time that it has: without a network first, so that a registry is asked only for
#: what is not there yet.
_MAVEN_RUNS = ((("-o",), 300.0), ((), 300.0))
_JAVAC_DEADLINE_SECONDS = 300.0
#: A JVM of these tests lives for seconds: what its second compiler makes faster, it costs first.
_JVM_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx512m")


class JavaMissing(Exception):
    """Java's clients cannot be built here; the message says what is missing."""


def java_worker_command() -> tuple[str, ...]:
    """The command of a client process; it takes the bootstrap servers as its argument."""
    found = _found()
    if isinstance(found, JavaMissing):
        raise JavaMissing(str(found))
    return found


@cache
def _found() -> tuple[str, ...] | JavaMissing:
    """What is found once holds for the session: nobody asks a registry again for every test."""
    try:
        return _find()
    except JavaMissing as missing:
        return missing


def _find() -> tuple[str, ...]:
    java, javac, maven = _tool("java"), _tool("javac"), shutil.which("mvn")
    if java is None or javac is None:
        raise JavaMissing("a JDK is missing (java and javac): apt-get install default-jdk-headless")
    if (found := _major_version(javac)) < _JAVA_MIN:
        raise JavaMissing(f"{javac} is of Java {found}; version {_JAVA_MIN} or newer is needed")
    if maven is None:
        raise JavaMissing("Maven is missing: apt-get install maven")
    class_path = _built(javac, maven)
    log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return (java, *_JVM_OPTIONS, log_level, "-cp", class_path, "tidemill.Worker")


def _tool(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    return (shutil.which(name, path=f"{home}/bin") if home else None) or shutil.which(name)


def _major_version(javac: str) -> int:
    """17 of "javac 17.0.15"; 1 of "javac 1.8.0", which is old enough."""
    found = re.search(r"javac (\d+)", _run([javac, "-version"], _JAVAC_DEADLINE_SECONDS).stdout)
    return int(found[1]) if found else 0


def _built(javac: str, maven: str) -> str:
    """The class path of the compiled project. Processes that come at the same time wait for the first."""
    sources = sorted(_PROJECT.rglob("*.java"))
    digest = hashlib.sha256()
    for path in (_PROJECT / "pom.xml", *sources):
        digest.update(path.read_bytes())
    build = _BUILDS / digest.hexdigest()[:16]
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = build / "class-path"
        if not (done.exists() and all(map(os.path.exists, done.read_text().split(os.pathsep)))):
            libraries = _libraries(maven, build / "libraries")
            classes = build / "classes"
            command = [javac, "--release", str(_JAVA_MIN), "-d", str(classes), "-cp", libraries]
            compiled = _run([*command, *map(str, sources)], _JAVAC_DEADLINE_SECONDS)
            assert compiled.returncode == 0, compiled.stdout
            done.write_text(os.pathsep.join((str(classes), libraries)))
        return done.read_text()


def _libraries(maven: str, output: Path) -> str:
    """The class path of the libraries that the project names."""
    quiet = ("-q", "-B", "-Dstyle.color=never")
    command = [maven, *quiet, "-f", str(_PROJECT / "pom.xml"), f"-Dmdep.outputFile={output}"]
    said = ""
    for options, deadline_seconds in _MAVEN_RUNS:
        try:
            done = _run([*command, *options, "dependency:build-classpath"], deadline_seconds)
        except subprocess.TimeoutExpired:
            said = f"it was not done after {deadline_seconds:.0f} s"
            continue
        if done.returncode == 0:
            return output.read_text().strip()
        said = done.stdout.strip().partition("\n")[0]
    raise JavaMissing(f"Maven cannot get Java's Kafka clients: {said[:300]}")


def _run(command: list[str], deadline_seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_seconds
    )
