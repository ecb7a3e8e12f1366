"""A Spark session with what the connector needs.

It is Spark's own session: everything that is set here can be set by hand, and ``conf`` wins over all of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidemill.errors import ConfigError
from tidemill.spark.worker_python import python_of_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("check_java", "session", "settings_for")

_JAVA_MIN: Final = 17
_JAVA_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
#: Set by ``spark-submit``, which also says what the master is.
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
_CONF: Final = {
    # For the option pushFilters.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
_LOCAL_CONF: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A name that does not resolve must not keep a local session from starting.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def session(
    app_name: str = "tidemill",
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    log_level: str = "ERROR",
) -> SparkSession:
    """A session, or the present one with these settings.

    Without ``master`` it is what ``spark-submit`` or ``SPARK_MASTER`` says, else all cores of this machine.
    Workers run the Python that ``PYSPARK_PYTHON`` names, else that of the caller, by its path: on a cluster
    it must be there, with Tidemill, on every machine.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError("PySpark is missing: pip install 'tidemill[spark]'") from error
    check_java(os.environ)
    settings = settings_for(master, conf, log_level)
    local = settings.get("spark.master", "").startswith("local")
    os.environ.update(python_of_workers(os.environ, local=local))
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(log_level)
    return spark


def settings_for(
    master: str | None, conf: Mapping[str, str] | None = None, log_level: str = "ERROR"
) -> dict[str, str]:
    """The Spark settings of a session that ``session`` makes."""
    given = dict(conf or {})
    chosen = master or given.get("spark.master") or os.environ.get("SPARK_MASTER")
    settings = _CONF | {_JAVA_OPTIONS: _quiet(log_level)}
    if _JAVA_OPTIONS in given:
        given[_JAVA_OPTIONS] = f"{settings[_JAVA_OPTIONS]} {given[_JAVA_OPTIONS]}"
    if chosen is None and _SUBMITTED not in os.environ:
        chosen = "local[*]"
    if chosen is not None:
        settings["spark.master"] = chosen
    if chosen is not None and chosen.startswith("local"):
        settings |= _LOCAL_CONF
        cores = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", chosen)
        # Spark's 200 is for clusters: each is a task with a state store of its own.
        settings["spark.sql.shuffle.partitions"] = cores[1] if cores else str(os.cpu_count() or 2)
    return settings | given


def _quiet(log_level: str) -> str:
    """Options of the Java machine that silence its log below a level, from the first line on."""
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    return f"-Dlog4j2.configurationFile={logging} -Dtidemill.spark.log={log_level.lower()}"


def check_java(environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` with what to do if there is no Java that Spark can use."""
    java = _java(environ)
    if java is None:
        raise ConfigError(
            f"Spark needs Java {_JAVA_MIN} or newer, and there is none: install it (such as "
            f"openjdk-{_JAVA_MIN}-jre-headless), or set JAVA_HOME to its folder"
        )
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    found = _JAVA_VERSION.search(said.stderr + said.stdout)
    if said.returncode or found is None:
        raise ConfigError(
            f"{java} does not run: '{java} -version' ended with {said.returncode}; mend JAVA_HOME"
        )
    if int(found[1]) < _JAVA_MIN:
        raise ConfigError(
            f"Spark needs Java {_JAVA_MIN} or newer, and {java} is version {found[1]}: install a newer one, "
            "or set JAVA_HOME to its folder"
        )


def _java(environ: Mapping[str, str]) -> str | None:
    if home := environ.get("JAVA_HOME"):
        java = Path(home) / "bin" / "java"
        return str(java) if os.access(java, os.X_OK) else None
    return shutil.which("java", path=environ.get("PATH"))
