"""The modules of an example are those of a program: they are found beside each other."""

from __future__ import annotations

import sys
from pathlib import Path

for _example in ("shop", "cluster"):
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / _example))
