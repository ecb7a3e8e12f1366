"""A Spark standalone cluster: a master and workers, each a process of its own.

Workers have addresses of their own on the loopback network, for Spark runs the twin of a slow task on another
host only.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyspark

from support.processes import wait_until

__all__ = ("spark_cluster",)

_SPARK_CLASS = Path(pyspark.__file__).with_name("bin") / "spark-class"
_DEPLOY = "org.apache.spark.deploy"
_MASTER_READY = r"Starting Spark master at (spark://\S+)"
_WORKER_READY = r"(Successfully registered with master)"
_START_SECONDS = 300.0


@contextlib.contextmanager
def spark_cluster(
    directory: Path, environment: Mapping[str, str], workers: int = 2, under: Sequence[str] = ()
) -> Iterator[str]:
    """The master's address; workers have one core each. What they log is below ``directory``.

    ``under`` is a command that runs the workers, such as one that hides files from them.
    """
    directory.mkdir(parents=True)
    small = {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "SPARK_NO_DAEMONIZE": "1",
    }
    env = os.environ | environment | small
    with contextlib.ExitStack() as running:
        log = directory / "master.log"
        _start(running, env, log, _daemon("master.Master", "--host", "127.0.0.1"))
        master = _said(_MASTER_READY, log)
        logs = [directory / f"worker-{number}.log" for number in range(workers)]
        for number, log in enumerate(logs):
            options = ["--host", f"127.0.0.{number + 2}", "--cores", "1", "--memory", "600m"]
            own = ["--work-dir", str(log.with_suffix("")), master]
            _start(running, env, log, [*under, *_daemon("worker.Worker", *options, *own)])
        for log in logs:
            _said(_WORKER_READY, log)
        yield master


def _daemon(name: str, *words: str) -> list[str]:
    return [str(_SPARK_CLASS), f"{_DEPLOY}.{name}", "--port", "0", "--webui-port", "0", *words]


def _start(running: contextlib.ExitStack, env: Mapping[str, str], log: Path, command: Sequence[str]) -> None:
    """Start one, until the stack is closed."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
        )
    running.callback(process.wait)
    running.callback(process.terminate)


def _said(pattern: str, log: Path) -> str:
    found = wait_until(lambda: re.search(pattern, log.read_text()), f"{log} has {pattern!r}", _START_SECONDS)
    return str(found[1])
