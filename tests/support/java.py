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
import shutil
import subprocess
from functools import cache
from pathlib import Path

__all__ = ("JavaMissing", "java_worker_command")

_ROOT = Path(__file__).resolve().parents[2]
_PROJECT = _ROOT / "tests" / "system" / "java"
_BUILDS = _ROOT / "build" / "java-clients"
_MAVEN_DEADLINE_SECONDS = 240.0
_JAVAC_DEADLINE_SECONDS = 120.0
#: A JVM of these tests lives for seconds: what its second compiler makes faster, it costs first.
_JVM_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", "-Xmx512m")


class JavaMissing(Exception):
    """Java's clients cannot be built here; the message says what is missing."""


@cache
def java_worker_command() -> tuple[str, ...]:
    """The command of a client process; it takes the bootstrap servers as its argument."""
    java, javac, maven = _tool("java"), _tool("javac"), shutil.which("mvn")
    if java is None or javac is None:
        raise JavaMissing("a JDK is missing (java and javac): apt-get install default-jdk-headless")
    if maven is None:
        raise JavaMissing("Maven is missing: apt-get install maven")
    class_path = _built(javac, maven)
    log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
    return (java, *_JVM_OPTIONS, log_level, "-cp", class_path, "tidemill.Worker")


def _tool(name: str) -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which(name, path=f"{home}/bin") if home else shutil.which(name)


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
            command = [
                javac,
                "--release",
                "17",
                "-Xlint:all",
                "-Werror",
                "-d",
                str(classes),
                "-cp",
                libraries,
            ]
            compiled = _run([*command, *map(str, sources)], _JAVAC_DEADLINE_SECONDS)
            assert compiled.returncode == 0, compiled.stdout
            done.write_text(os.pathsep.join((str(classes), libraries)))
        return done.read_text()


def _libraries(maven: str, output: Path) -> str:
    """The class path of the libraries that the project names."""
    command = [maven, "-q", "-B", "-f", str(_PROJECT / "pom.xml"), f"-Dmdep.outputFile={output}"]
    said = ""
    # Without a network first: a registry is asked only for what is not there yet.
    for options in (("-o",), ()):
        try:
            done = _run([*command, *options, "dependency:build-classpath"], _MAVEN_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            said = f"Maven was not done after {_MAVEN_DEADLINE_SECONDS:.0f} s"
            continue
        if done.returncode == 0:
            return output.read_text().strip()
        said = done.stdout.strip().partition("\n")[0]
    raise JavaMissing(f"Maven cannot get Java's Kafka clients: {said[:300]}")


def _run(command: list[str], deadline_seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=deadline_seconds
    )
