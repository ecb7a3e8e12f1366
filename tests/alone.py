"""Second look at tests that failed beside others: ``python tests/alone.py STATUS``, behind a run of pytest.

Many tests drive real processes and sockets, and the two cores of a machine are shared with all other tests.
If up to three tests failed, they run once more with the machine to themselves. A test that fails again fails
the suite, as one of pure code or with a seed always does. One that passes now is named at the end: something
in it, or in Tidemill, depends on how fast the machine is, which is a defect to mend.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_TESTS_FAILED = 1
_LOOKS_MAX = 3


def main(status: int) -> int:
    """The exit status of the suite, whose first run ended with ``status``."""
    if status != _TESTS_FAILED or not _LAST_FAILED.exists():
        return status
    failed: list[str] = sorted(json.loads(_LAST_FAILED.read_text()))
    if not 0 < len(failed) <= _LOOKS_MAX:
        return status
    print(f"\nOnce more, alone: {len(failed)} failed beside other tests", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *failed]).returncode
    if again == 0:
        print("PASSED ONLY WHEN RUN ALONE, which is a defect to mend:", *failed, sep="\n  ", flush=True)
    return again


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
