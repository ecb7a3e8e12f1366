"""Spark for a pipeline's run: checks that it is installed, its settings, and the commands that start it.

A run has two processes of Spark: a Connect server, which does the work, on a free port that only this machine
and the run's token can use; and ``spark-pipelines``, which reads the project and tells the server what to
run. They are started apart because ``spark-pipelines`` by itself takes one fixed port, so that only one could
run on a machine, and cannot be given a master.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tidemill.errors import ConfigError
from tidemill.spark.worker_python import installed_spark, python_of_workers

__all__ = (
    "SERVER_READY",
    "check_python",
    "client_command",
    "default_configuration",
    "is_local",
    "server_command",
    "spark_environment",
    "write_logging",
)

_INSTALL: Final = "pip install 'tidemill[spark]'"
_MODULES: Final = ("pyspark", "pyspark.pipelines", "grpc", "grpc_status", "pandas", "yaml")
_SERVER_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
#: The line in the server's log that tells where it listens.
SERVER_READY: Final = re.compile(r"Spark Connect server started at: .*:(\d+)\s*$")
_PROGRESS_LOGGER: Final = "org.apache.spark.sql.execution.streaming.runtime.ProgressReporter"
#: Layout of a log message without line ends. In a file of properties a backslash is doubled.
_ONE_LINE: Final = r"%replace{%m}{[\\r\\n]+}{ }%n"
_LOGGING: Final = f"""\
rootLogger.level = warn
rootLogger.appenderRef.log.ref = log
appender.log.type = Console
appender.log.name = log
appender.log.target = SYSTEM_ERR
appender.log.layout.type = PatternLayout
appender.log.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
logger.server.name = {_SERVER_CLASS}
logger.server.level = info
# On one line, so that it can be told apart from everything else.
appender.progress.type = Console
appender.progress.name = progress
appender.progress.target = SYSTEM_ERR
appender.progress.layout.type = PatternLayout
appender.progress.layout.pattern = {_ONE_LINE}
logger.progress.name = {_PROGRESS_LOGGER}
logger.progress.level = info
logger.progress.additivity = false
logger.progress.appenderRef.progress.ref = progress
"""


def check_python() -> None:
    """Raise ``ConfigError`` if Spark's packages are not installed."""
    missing = [name for name in _MODULES if not _is_there(name)]
    if missing:
        raise ConfigError(
            f"pipelines need Spark, and Python does not find {', '.join(missing)}: {_INSTALL} installs it"
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def is_local(master: str) -> bool:
    """Whether Spark's tasks run on this machine."""
    return master.startswith("local")


def default_configuration(state: Path, master: str) -> dict[str, str]:
    """The configuration that a run uses unless the project or the caller sets something else.

    Spark's own catalog forgets its tables when it ends, and the next run then trips over their files; so
    tables are remembered in the project.
    """
    metastore = f"jdbc:derby:;databaseName={state / 'metastore'};create=true"
    chosen = {
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": (state / "warehouse").as_uri(),
        "spark.hadoop.javax.jdo.option.ConnectionURL": metastore,
        "spark.ui.showConsoleProgress": "false",
    }
    if is_local(master):
        chosen |= {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
        # Flows that begin at one moment in a new session can break Spark's own serialization for good
        # ("Illegal size 5 of collection, expected 6"). On one machine they gain little side by side.
        chosen["spark.sql.pipelines.execution.maxConcurrentFlows"] = "1"
    return chosen


def write_logging(state: Path) -> Path:
    """Write the settings of Spark's log; gives their path."""
    path = state / "log4j2.properties"
    path.write_text(_LOGGING, "utf-8")
    return path


def server_command(master: str, configuration: Mapping[str, str], logging: Path) -> list[str]:
    """The command that starts the Connect server, which prints to stderr when it is ready, and where."""
    java_options = [
        f"-Dlog4j2.configurationFile={logging.as_uri()}",
        f"-Dderby.stream.error.file={logging.with_name('derby.log')}",
    ]
    own = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.extraJavaOptions": " ".join(
            [*map(shlex.quote, java_options), configuration.get("spark.driver.extraJavaOptions", "")]
        ).strip(),
    }
    command = [str(_spark_home() / "bin" / "spark-submit"), "--class", _SERVER_CLASS, "--master", master]
    for key, value in {**configuration, **own}.items():
        # Spark takes no others here; the rest reaches the pipeline through its spec.
        if key.startswith("spark."):
            command += ["--conf", f"{key}={value}"]
    return [*command, "spark-internal"]


def client_command(spec: Path, *, dry: bool, refresh: Sequence[str] = ()) -> list[str]:
    """The command that runs ``spark-pipelines`` on a spec. ``refresh``: its options of what to recompute."""
    what = ["dry-run"] if dry else ["run", *refresh]
    return [sys.executable, "-u", "-m", "pyspark.pipelines.cli", *what, "--spec", str(spec)]


def spark_environment(environ: Mapping[str, str], servers: str, token: str, *, local: bool) -> dict[str, str]:
    """The environment of everything that a run starts."""
    unwanted = (
        "SPARK_REMOTE",
        "SPARK_API_MODE",
        "SPARK_CONNECT_MODE_ENABLED",
        "MASTER",
        "PYSPARK_SUBMIT_ARGS",
    )
    kept = {name: value for name, value in environ.items() if name not in unwanted}
    if local:
        # The caller's choice counts for other machines only, where Python may be elsewhere.
        kept.pop("PYSPARK_PYTHON", None)
    kept["SPARK_HOME"] = str(_spark_home())
    chosen = python_of_workers(kept, local=local) | {
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
        "TIDEMILL_SERVER": servers,
    }
    if local:
        chosen["SPARK_LOCAL_IP"] = kept.get("SPARK_LOCAL_IP", "127.0.0.1")
    return kept | chosen


def _spark_home() -> Path:
    home = installed_spark()
    assert home is not None, "checked by check_python"
    return home
