"""Hypothesis profiles: no deadline (two cores are shared), and in CI the same inputs on every run."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file run in one process, and those that need the Spark session all in the same one."""
    for item in items:
        shares_session = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if shares_session else item.nodeid.split("::")[0]))
        if shares_session:
            # The first of them starts Spark.
            item.add_marker(pytest.mark.timeout(300))
