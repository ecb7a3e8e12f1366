"""Seeds of tests that choose at random what happens to real processes.

CI takes the same one on every run; elsewhere each run has its own. Either is printed, and so part of what
pytest shows of a test that fails. A seed repeats the choices, not what runs at their moments.
"""

from __future__ import annotations

import os
import random

__all__ = ("choose_seed",)

_SEED_OF_CI = 1


def choose_seed(variable: str) -> int:
    """The seed in an environment variable, which repeats a run; else CI's, else a new one."""
    wanted = os.environ.get(variable)
    if wanted:
        seed = int(wanted)
    else:
        seed = _SEED_OF_CI if os.environ.get("CI") == "true" else random.randrange(2**32)
    print(f"{variable}={seed}")  # noqa: T201
    return seed
