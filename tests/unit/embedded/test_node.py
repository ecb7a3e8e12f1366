from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints
from urllib.request import urlopen

import pytest

import tidemill
from tidemill.config.schema import Kind
from tidemill.config.settings import SETTINGS
from tidemill.config.values import MIB, Address
from tidemill.embedded import node as embedded
from tidemill.embedded.keywords import SettingKeywords
from tidemill.errors import ConfigError, DataDirectoryInUse


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "tidemill-node"]


def test_an_ephemeral_node_takes_its_data_along() -> None:
    with tidemill.open() as node:
        host, _, port = node.bootstrap_servers.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert node.data_dir.is_dir()
        assert node.http_url is None
        assert node.bootstrap_servers in repr(node)
        assert str(node.data_dir) in repr(node)
    assert not node.data_dir.exists()


def test_a_node_with_a_path_keeps_its_data(tmp_path: Path) -> None:
    with tidemill.open(tmp_path / "data") as node:
        assert node.data_dir == tmp_path / "data"
    assert (tmp_path / "data" / "clean-stop").exists()
    with tidemill.open(str(tmp_path / "data")):
        pass


def test_closing_twice_is_fine() -> None:
    node = tidemill.open()
    node.close()
    node.close()
    assert not node.data_dir.exists()


def test_an_error_of_the_start_is_raised_in_the_caller(tmp_path: Path) -> None:
    with tidemill.open(tmp_path) as first:
        with pytest.raises(DataDirectoryInUse, match=first.bootstrap_servers):
            tidemill.open(tmp_path)
        with pytest.raises(ConfigError, match="cannot listen"):
            tidemill.open(listen=first.bootstrap_servers)


@pytest.mark.parametrize(
    "bad",
    [
        {"listen": "no port"},
        {"listen": 9092},
        {"http": "no port"},
        {"default_partitions": 0},
        {"advertised_listener": "no port"},
        {"kv_block_cache_bytes": "much"},
        {"topic_defaults": 5},
        {"topic_defaults": {"retention.ms": 5}},
        {"topic_defaults": {"retention.ms": "long"}},
    ],
)
def test_settings_that_are_refused_leave_no_directory_behind(
    bad: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (name,) = bad
    with pytest.raises(ConfigError, match=f"setting {'topic' if name == 'topic_defaults' else name}"):
        tidemill.open(**bad)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="path is the data directory, as text or a path, not 5"):
        tidemill.open(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("data", "the data directory is the first argument, path"),
        ("data_dir", "the data directory is the first argument, path"),
        ("default_partition", r"did you mean default_partitions\?"),
        ("zzz", "'tidemill settings' lists those that there are"),
    ],
)
def test_a_setting_that_does_not_exist_is_named(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"tidemill.open has no setting '{name}': {hint}"):
        tidemill.open(**{name: 1})  # type: ignore[arg-type]


def test_an_address_that_other_machines_can_reach_needs_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="allow_unauthenticated"):
        tidemill.open(listen="0.0.0.0:0")
    assert list(tmp_path.iterdir()) == []
    with tidemill.open(
        listen="0.0.0.0:0", advertised_listener=Address("127.0.0.1", 1), allow_unauthenticated=True
    ) as node:
        assert node._node.address.host == "0.0.0.0"


def test_a_start_that_fails_removes_the_ephemeral_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with tidemill.open() as first, pytest.raises(ConfigError):
        tidemill.open(listen=first.bootstrap_servers)
    assert list(tmp_path.iterdir()) == []


def test_http_is_served_if_it_is_asked_for() -> None:
    with tidemill.open(http="127.0.0.1:0") as node:
        assert node.http_url is not None
        with urlopen(f"{node.http_url}/readyz", timeout=120) as answer:
            assert answer.status == 200


def test_settings_reach_the_node() -> None:
    with tidemill.open(auto_create_topics=False, default_partitions=3) as node:
        assert node._node.settings.auto_create_topics is False
        assert node._node.settings.default_partitions == 3


def test_the_keyword_arguments_are_those_of_the_settings() -> None:
    """Type checkers know every setting of ``tidemill.open``, and nothing else."""
    types = {
        Kind.ADDRESS: str | Address,
        Kind.BYTES: int | str,
        Kind.COUNT: int,
        Kind.FILE: str | Path,
        Kind.FLAG: bool,
        Kind.MS: int,
        Kind.NAME: str,
        Kind.TEXT: str,
    }
    expected = {
        info.name: types[info.spec.kind] | None if info.spec.optional else types[info.spec.kind]
        for info in SETTINGS
        if info.name not in ("data_dir", "listen", "http")
    }
    assert get_type_hints(SettingKeywords) == expected | {"topic_defaults": dict[str, str]}


def test_settings_may_be_given_as_text(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with tidemill.open(
        advertised_listener="127.0.0.1:1",
        kv_block_cache_bytes="64 MiB",
        cluster_secret_file=str(secret),
        rack=None,
    ) as node:
        settings = node._node.settings
        assert settings.advertised_listener == Address("127.0.0.1", 1)
        assert settings.kv_block_cache_bytes == 64 * MIB
        assert settings.cluster_secret_file == secret


def test_topic_defaults_reach_the_topics() -> None:
    with tidemill.open(topic_defaults={"retention.ms": "3600000"}) as node:
        assert node._node.settings.topic_defaults == {"retention.ms": "3600000"}


def test_a_failure_inside_the_with_block_still_stops_the_node() -> None:
    with pytest.raises(RuntimeError, match="mine"), tidemill.open() as node:
        raise RuntimeError("mine")
    assert not node.data_dir.exists()


def test_the_package_loads_the_server_only_when_it_is_used() -> None:
    assert tidemill.EmbeddedNode is embedded.EmbeddedNode
    assert tidemill.open is embedded.open_node
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tidemill.nonsense  # type: ignore[attr-defined]  # noqa: B018


# --- without close

ENDINGS = {
    "the end of the program": "",
    "an exception": "raise ValueError('mine')",
    "sys.exit": "import sys; sys.exit(3)",
    "sys.exit on the way out of a call": "table.upsert(rows_that_exit())",
    "a second node": "other = tidemill.open(); other.create_table('a.b', 'id bigint')",
    "a follow that nobody ends": "changes = iter(table.follow()); next(changes)",
    "a lease that nobody ends": "lease = table.lease(); lease.__enter__()",
    "a client of its own": "client = tidemill.connect(db.bootstrap_servers); client.tables()",
    "a follow of a client of its own": (
        "changes = iter(tidemill.connect(db.bootstrap_servers).table('shop.orders').follow()); next(changes)"
    ),
}
UNCLOSED = """
import tidemill

def rows_that_exit():
    yield {{"id": 3}}
    raise SystemExit(3)

db = tidemill.open({path!r})
table = db.create_table("shop.orders", "id bigint", primary_key="id")
table.upsert({{"id": 1}})
print(table.lookup(1))
{ending}
"""


def run_unclosed(ending: str, tmp_path: Path, path: Path | None) -> subprocess.CompletedProcess[str]:
    """Run a program that opens a node and does not close it; temporary files are in ``tmp_path``."""
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED.format(path=path and str(path), ending=ending)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout == "{'id': 1}\n", done.stderr
    return done


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ephemeral_node_that_nobody_closes_leaves_nothing_behind(ending: str, tmp_path: Path) -> None:
    done = run_unclosed(ENDINGS[ending], tmp_path, None)
    assert list(tmp_path.iterdir()) == []
    if ending == "an exception":
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == "ValueError: mine"
    else:
        assert done.returncode == (3 if "exit" in ending else 0)
        assert done.stderr == ""


def test_a_node_with_a_path_that_nobody_closes_stops_in_an_orderly_way(tmp_path: Path) -> None:
    done = run_unclosed("", tmp_path, tmp_path / "data")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "data" / "clean-stop").exists()
    with tidemill.open(tmp_path / "data") as node:
        assert node.table("shop.orders").lookup(1) == {"id": 1}


def test_a_failure_of_the_stop_at_the_end_of_the_program_is_told(tmp_path: Path) -> None:
    ending = "def fail(): raise OSError('no more disk')\ndb._node.directory.note_clean_stop = fail"
    done = run_unclosed(ending, tmp_path, tmp_path / "data")
    assert "did not stop in an orderly way when the program ended" in done.stderr
    assert "OSError: no more disk" in done.stderr
    assert not (tmp_path / "data" / "clean-stop").exists()


def test_what_a_killed_program_left_behind_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("tidemill-mine", "tidemill-file"):
        (tmp_path / name).mkdir()
    (tmp_path / "tidemill-mine" / "lock").touch()
    (tmp_path / "tidemill-link").symlink_to(tmp_path / "tidemill-mine")
    kept = set(tmp_path.iterdir())
    run_unclosed("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path, None)
    (left,) = set(tmp_path.iterdir()) - kept
    with tidemill.open() as first:
        assert not left.exists()
        in_use = set(tmp_path.iterdir()) - kept
        with tidemill.open() as second:
            # Those of others that are in use, and what others have called so, are left alone.
            assert first.data_dir.is_dir()
            assert second.data_dir.is_dir()
            assert set(tmp_path.iterdir()) > in_use
    assert set(tmp_path.iterdir()) == kept
