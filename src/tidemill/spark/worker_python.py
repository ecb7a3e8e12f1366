"""The Python that Spark's own processes run on this machine.

Spark puts its ``pyspark.zip`` in front of everything that its Python processes import. It holds no compiled
modules, so that each process compiles PySpark anew: 0.6 to 0.8 s of processor time, for every streaming query
and for every kind of worker. Where the same PySpark is installed for the interpreter, a shell script takes
the archive out of the path and runs the interpreter.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ("installed_spark", "python_of_workers")

_SCRIPT: Final = Path(__file__).with_name("worker_python.sh")


def python_of_workers(environ: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Environment variables that name the Python of Spark's workers; none if ``environ`` names one."""
    # The script is there if this process had a local session before.
    if environ.get("PYSPARK_PYTHON", str(_SCRIPT)) != str(_SCRIPT):
        return {}
    if local and _is_installed(environ) and os.access(_SCRIPT, os.X_OK):
        return {"PYSPARK_PYTHON": str(_SCRIPT), "PYSPARK_INSTALLED_PYTHON": sys.executable}
    # Spark's own default is whatever python3 is, which need not have Tidemill.
    return {"PYSPARK_PYTHON": sys.executable}


def installed_spark() -> Path | None:
    """The folder of the installed package ``pyspark``, which is also SPARK_HOME of the Spark in it."""
    found = find_spec("pyspark")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _is_installed(environ: Mapping[str, str]) -> bool:
    """Whether Spark is the one that every process of this interpreter finds as an installed package."""
    package = installed_spark()
    if package is None:
        return False
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    home = environ.get("SPARK_HOME")
    return str(package.parent) in places and (home is None or Path(home) == package)
