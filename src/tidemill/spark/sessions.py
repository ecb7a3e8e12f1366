"""A Spark session with what the connector needs.

It is Spark's own session: everything that is set here can be set by hand, and ``conf`` wins over all of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("JAVA_MIN", "check_java", "session", "settings_for")

JAVA_MIN: Final = 17
_CONF: Final = {
    # Without it Spark keeps all filters to itself.
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
    check_java()
    # Spark's own default is whatever python3 is, which need not have Tidemill.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings_for(master, conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel(log_level)
    return spark


def settings_for(master: str | None, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """What ``session`` sets."""
    given = dict(conf or {})
    submitted = bool(os.environ.get("SPARK_ENV_LOADED")) and "SPARK_MASTER" not in os.environ and not master
    chosen = master or given.get("spark.master") or os.environ.get("SPARK_MASTER")
    settings = dict(_CONF)
    if not submitted:
        chosen = chosen or "local[*]"
        settings["spark.master"] = chosen
    if chosen is not None and chosen.startswith("local"):
        settings |= _LOCAL_CONF
        cores = re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", chosen)
        # Spark's 200 is for clusters: each is a task with a state store of its own.
        settings["spark.sql.shuffle.partitions"] = cores[1] if cores else str(os.cpu_count() or 2)
    return settings | given


def check_java() -> None:
    """Raises ``ConfigError`` if there is no Java that Spark can run on."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        raise ConfigError(
            f"Spark needs Java {JAVA_MIN} or newer, and there is none"
            f"{f' in JAVA_HOME={home}' if home else ''}: apt-get install openjdk-17-jre-headless, or set "
            "JAVA_HOME"
        )
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr  # noqa: S603
    found = re.search(r'version "(\d+)', answer)
    if found is not None and int(found[1]) < JAVA_MIN:
        raise ConfigError(
            f"Spark needs Java {JAVA_MIN} or newer, and {java} is Java {found[1]}: install a newer one and "
            "set "
            "JAVA_HOME"
        )
