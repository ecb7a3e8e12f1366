from __future__ import annotations

from pathlib import Path

import pytest

import tidemill

pytest_plugins = ["pytester"]


def test_the_fixtures_give_real_nodes(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The run below is in another directory, from where a relative path of the sources leads nowhere.
    monkeypatch.setenv("PYTHONPATH", str(Path(tidemill.__file__).parents[1]))
    pytester.makepyfile(
        """
        import socket

        seen = []

        def reachable(node):
            host, _, port = node.bootstrap_servers.rpartition(":")
            socket.create_connection((host, int(port)), timeout=120).close()

        def test_a_node(tidemill_node):
            reachable(tidemill_node)
            seen.append(tidemill_node.data_dir)

        def test_another_node(tidemill_node):
            reachable(tidemill_node)
            assert tidemill_node.data_dir not in seen
            assert not seen[0].exists()

        def test_the_sessions_node(tidemill_session_node):
            reachable(tidemill_session_node)
            seen.append(tidemill_session_node)

        def test_the_same_node(tidemill_session_node):
            assert seen[-1] is tidemill_session_node
        """
    )
    installed = request.config.pluginmanager.has_plugin("tidemill")
    options = [] if installed else ["-p", "tidemill.testing.plugin"]
    pytester.runpytest_subprocess(*options, "-p", "no:cacheprovider").assert_outcomes(passed=4)
