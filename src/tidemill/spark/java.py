"""Whether there is a Java that Spark can run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tidemill.errors import ConfigError

__all__ = ("check_java",)

_JAVA_MIN: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def check_java(environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` with what to do if there is no Java that Spark can use."""
    java = _java(environ)
    if java is None:
        raise ConfigError(
            f"Spark needs Java {_JAVA_MIN} or newer, and there is none: install it (such as "
            f"openjdk-{_JAVA_MIN}-jre-headless), or set JAVA_HOME to its folder"
        )
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)  # noqa: S603
    found = _VERSION.search(said.stderr + said.stdout)
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
