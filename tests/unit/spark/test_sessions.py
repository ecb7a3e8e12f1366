"""Sessions of Spark: what they are set to, and the Java that they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.config.loading import load_settings
from tidemill.errors import ConfigError
from tidemill.spark.sessions import check_java, settings_for
from tidemill.spark.worker_python import python_of_workers


@pytest.fixture(autouse=True)
def _no_spark_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARK_MASTER", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_session_is_local_unless_it_is_said() -> None:
    assert settings_for(None)["spark.master"] == "local[*]"
    assert settings_for("local[3]")["spark.sql.shuffle.partitions"] == "3"
    elsewhere = settings_for("spark://host:7077")
    assert elsewhere["spark.master"] == "spark://host:7077"
    assert "spark.driver.host" not in elsewhere


def test_what_spark_submit_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert "spark.master" not in settings_for(None)
    assert settings_for("local[2]")["spark.master"] == "local[2]"


def test_the_environment_names_the_master_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_MASTER", "spark://host:7077")
    assert settings_for(None)["spark.master"] == "spark://host:7077"


def test_settings_of_the_caller_win() -> None:
    settings = settings_for("local[2]", {"spark.sql.shuffle.partitions": "9"})
    assert settings["spark.sql.shuffle.partitions"] == "9"


def test_options_of_java_are_added_to_those_for_the_log() -> None:
    settings = settings_for("local[2]", {"spark.driver.extraJavaOptions": "-Xss8m"}, "INFO")
    assert settings["spark.driver.extraJavaOptions"].endswith("-Dtidemill.spark.log=info -Xss8m")


def test_workers_of_a_local_session_import_the_installed_pyspark(tmp_path: Path) -> None:
    chosen = python_of_workers({}, local=True)
    assert chosen["PYSPARK_INSTALLED_PYTHON"] == sys.executable
    archives = f"/spark/python/lib/pyspark.zip:/a b:/spark/python/lib/py4j-0.10.9.9-src.zip:{tmp_path}"
    show = "import os, sys; print(os.environ['PYTHONPATH'], sys.executable, sys.argv[1:])"
    shown = subprocess.run(
        [chosen["PYSPARK_PYTHON"], "-c", show, "of spark", "*"],
        env=chosen | {"PYTHONPATH": archives},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"/a b:{tmp_path} {sys.executable} ['of spark', '*']\n"


@pytest.mark.parametrize("environ", [{"SPARK_HOME": "/opt/spark"}, {}])
def test_another_spark_and_other_machines_get_the_plain_interpreter(environ: dict[str, str]) -> None:
    local = bool(environ)
    assert python_of_workers(environ, local=local) == {"PYSPARK_PYTHON": sys.executable}
    before = python_of_workers({}, local=True)
    assert python_of_workers(before | environ, local=local) == {"PYSPARK_PYTHON": sys.executable}


def test_a_node_can_be_started_from_the_environment_of_a_session() -> None:
    load_settings({}, python_of_workers({}, local=True))


def test_the_python_that_the_caller_names_is_left_alone() -> None:
    assert python_of_workers({"PYSPARK_PYTHON": "/usr/bin/python3"}, local=True) == {}


def fake_java(folder: Path, script: str) -> dict[str, str]:
    java = folder / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return {"JAVA_HOME": str(folder)}


@pytest.mark.parametrize("version", ["1.8.0_402", "11.0.2"])
def test_java_that_is_too_old_is_named(tmp_path: Path, version: str) -> None:
    environ = fake_java(tmp_path, f"echo 'openjdk version \"{version}\"' >&2")
    with pytest.raises(ConfigError, match=r"needs Java 17 or newer, and .*/bin/java is version"):
        check_java(environ)


def test_java_of_the_right_age_is_taken(tmp_path: Path) -> None:
    check_java(fake_java(tmp_path, "echo 'openjdk version \"21\" 2023-09-19' >&2"))


def test_without_java_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install it"):
        check_java({"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="install it"):
        check_java({"JAVA_HOME": str(tmp_path)})


def test_java_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not run"):
        check_java(fake_java(tmp_path, "exit 1"))
