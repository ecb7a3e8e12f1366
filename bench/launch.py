"""Starts ``tidemill`` as it runs where only its own dependencies are installed.

kio imports hypothesis when it finds it. It finds it here, because the tests use it; a user who installs
tidemill does not have it, and pays neither the time nor the memory.

With ``BENCH_MODULES_FILE=FILE`` in the environment, the names of all modules loaded at the end are written
to that file, in the order of their loading.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

__all__ = ("MODULES_VARIABLE",)

MODULES_VARIABLE = "BENCH_MODULES_FILE"

if __name__ == "__main__":
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    if MODULES_VARIABLE in os.environ:
        modules_file = Path(os.environ[MODULES_VARIABLE])
        atexit.register(lambda: modules_file.write_text("\n".join(sys.modules)))
    from tidemill.cli import main

    main()
