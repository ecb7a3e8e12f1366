"""Hypothesis profiles: no deadline (two cores are shared), and in CI the same inputs on every run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tidemill.config.settings import Settings

settings.register_profile("local", deadline=None, max_examples=60)
settings.register_profile(
    "ci", deadline=None, max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

# A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process that a test
# starts: those that test Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Spark's processes live for seconds here: what Java's second compiler makes faster, it costs first.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# The directories of some thousand nodes are kept for a while after the tests: each with a small reserve.
assert Settings.__init__.__kwdefaults__ is not None
Settings.__init__.__kwdefaults__["disk_reserve_bytes"] = 1024 * 1024


#: Files whose tests share the one Spark session of the suite.
_ON_SPARK = ("test_spark_reading.py", "test_spark_streams.py", "test_spark_writing.py")


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types.
    """Tests of one file run in one process, and those that share the Spark session all in the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", maxsplit=1)[0]
        return "spark" if file.endswith(_ON_SPARK) else file


def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores: tests of real processes spend most of their time waiting."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist itself looks there.
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            assert item.path.name in _ON_SPARK, (
                f"{item.path.name} uses the Spark session: name it in _ON_SPARK"
            )
