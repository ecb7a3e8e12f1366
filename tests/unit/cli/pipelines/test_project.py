"""Projects of pipelines: made from the template, found, and handed to Spark."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tidemill.cli.app import make_app
from tidemill.cli.pipelines.project import create_project, find_project
from tidemill.cli.pipelines.spark import default_configuration, server_command, spark_environment
from tidemill.errors import ConfigError


def test_a_new_project_has_its_name_and_files_that_load(tmp_path: Path) -> None:
    folder = create_project(tmp_path, "web-shop")
    project = find_project(folder)
    assert project.name == "web-shop"
    assert project.servers is None
    assert [path.name for path in project.sources()] == ["orders.py", "revenue.py"]
    for path in folder.rglob("*"):
        if path.is_file():
            assert "PIPELINE_NAME" not in path.read_text()
        if path.suffix == ".py":
            ast.parse(path.read_text())
    assert "state/" in (folder / ".gitignore").read_text()


def test_a_folder_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        create_project(tmp_path, "shop")
    assert list((tmp_path / "shop").iterdir()) == []


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "1a", "-a", "a" * 65, "ä", "a\n"])
def test_names_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        create_project(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_project_is_found_from_inside(tmp_path: Path) -> None:
    folder = create_project(tmp_path, "shop")
    assert find_project(folder / "transformations").folder == folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("just words", "must hold fields"),
        ("name: a\n", "names no files"),
        ("name: a\nlibraries: [a]\n", "every entry of 'libraries'"),
        ("name: a\nconfiguration: 3\nlibraries: []\n", "'configuration' must hold"),
    ],
)
def test_a_spec_that_cannot_be_read_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "spark-pipeline.yml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_project(tmp_path)


def test_outside_a_project_the_command_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(make_app(), ["pipeline", "run"])
    assert result.exit_code == 1
    assert "tidemill pipeline init NAME" in result.output


def test_spark_is_given_an_address_for_storage_inside_the_project(tmp_path: Path) -> None:
    project = find_project(create_project(tmp_path, "shop"))
    spec = yaml.safe_load(project.write_effective({"own.name": "x"}).read_text())
    assert spec["storage"] == f"file://{tmp_path}/shop/state/checkpoints"
    assert spec["configuration"] == {"own.name": "x"}
    assert spec["libraries"] == [{"glob": {"include": "transformations/**"}}]


def test_storage_that_is_an_address_stays(tmp_path: Path) -> None:
    folder = create_project(tmp_path, "shop")
    text = (folder / "spark-pipeline.yml").read_text().replace("state/checkpoints", "s3a://bucket/shop")
    (folder / "spark-pipeline.yml").write_text(text)
    spec = yaml.safe_load(find_project(folder).write_effective({}).read_text())
    assert spec["storage"] == "s3a://bucket/shop"


def test_the_server_gets_the_callers_settings_and_keeps_its_own(tmp_path: Path) -> None:
    given = {
        "spark.driver.extraJavaOptions": "-Xmx1g",
        "spark.connect.grpc.binding.port": "15002",
        "own.name": "x",
    }
    configuration = default_configuration(tmp_path, "local[2]") | given
    command = server_command("local[2]", configuration, tmp_path / "log4j2.properties")
    settings = {command[at + 1] for at, word in enumerate(command) if word == "--conf"}
    assert "spark.connect.grpc.binding.port=0" in settings
    assert not any(each.startswith("own.name") for each in settings)
    (options,) = (each for each in settings if each.startswith("spark.driver.extraJavaOptions="))
    assert options.endswith("-Xmx1g")
    assert "log4j2.properties" in options


def test_a_remote_spark_of_the_caller_is_not_used() -> None:
    environment = spark_environment({"SPARK_REMOTE": "sc://x", "HOME": "/h"}, "a:1", "token", local=True)
    assert "SPARK_REMOTE" not in environment
    assert environment["HOME"] == "/h"
    assert environment["TIDEMILL_SERVER"] == "a:1"
