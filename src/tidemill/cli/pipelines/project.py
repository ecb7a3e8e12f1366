"""A pipeline's project: its folder, its spec, and what a run of it uses.

A project is a folder with ``spark-pipeline.yml``, which is Spark's, and with two additions that are ours:

- ``storage`` may be a folder inside the project. Spark wants an absolute address, which would tie the
  project to one machine; so Spark is given a copy of the spec, beside it, in which the address is whole.
- the configuration ``spark.tidemill.servers`` says where topics and tables are; ``embedded``, and nothing,
  mean a node inside the run, with its data in the project.

Everything that runs make is in the project's folder ``state``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ("EMBEDDED", "SERVERS_KEY", "SPEC_NAMES", "Project", "create_project", "find_project")

EMBEDDED: Final = "embedded"
SERVERS_KEY: Final = "spark.tidemill.servers"
SPEC_NAMES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_PLACEHOLDER: Final = "PIPELINE_NAME"
#: Under another name in the package, where ".gitignore" would apply to this repository.
_RENAMED: Final = {"gitignore": ".gitignore"}
_EFFECTIVE: Final = ".spark-pipeline.run.yml"
_HAS_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


@dataclass(frozen=True, slots=True)
class Project:
    """The folder of a project, and its spec as the file has it."""

    folder: Path
    spec_path: Path
    spec: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return str(self.spec.get("name", self.folder.name))

    @property
    def state(self) -> Path:
        """The folder of everything that runs create."""
        return self.folder / "state"

    @property
    def configuration(self) -> dict[str, str]:
        """The spec's configuration of Spark."""
        return {str(key): str(value) for key, value in (self.spec.get("configuration") or {}).items()}

    @property
    def servers(self) -> str | None:
        """The servers that the spec names; None: a node inside the run."""
        found = self.configuration.get(SERVERS_KEY, EMBEDDED).strip()
        return None if found in ("", EMBEDDED) else found

    def sources(self) -> list[Path]:
        """The files that may define flows."""
        found: list[Path] = []
        for entry in self.spec.get("libraries") or ():
            pattern = str(entry["glob"]["include"])
            found += self.folder.glob(f"{pattern}/*" if pattern.endswith("**") else pattern)
        return sorted(path for path in found if path.suffix in (".py", ".sql") and path.is_file())

    def write_effective(self, configuration: Mapping[str, str]) -> Path:
        """Write the spec for Spark, with that configuration instead of its own. The caller deletes it."""
        import yaml

        whole = {**self.spec, "configuration": dict(configuration)}
        storage = str(whole.get("storage", "state/checkpoints"))
        if not _HAS_SCHEME.match(storage):
            whole["storage"] = (self.folder / storage).absolute().as_uri()
        path = self.folder / _EFFECTIVE
        path.write_text(yaml.safe_dump(whole, sort_keys=False, allow_unicode=True), "utf-8")
        return path


def find_project(start: Path) -> Project:
    """The project whose folder is ``start``, or contains it."""
    for folder in (start.resolve(), *start.resolve().parents):
        found = [folder / name for name in SPEC_NAMES if (folder / name).is_file()]
        if len(found) > 1:
            raise ConfigError(f"{folder} has both {' and '.join(SPEC_NAMES)}: delete one of them")
        if found:
            return Project(folder, found[0], _load(found[0]))
    raise ConfigError(
        f"there is no {SPEC_NAMES[0]} in {start.resolve()} nor above it: go to a pipeline's folder, name it "
        "with --project, or make one with 'tidemill pipeline init NAME'"
    )


def _load(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        spec = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(spec, dict):
        raise ConfigError(
            f"{path} must hold fields such as 'name: shop' and 'libraries:', and holds {spec!r}"
        )
    if not isinstance(spec.get("configuration") or {}, dict):
        raise ConfigError(
            f"{path}: 'configuration' must hold lines such as 'spark.sql.shuffle.partitions: \"4\"'"
        )
    try:
        patterns = [entry["glob"]["include"] for entry in spec.get("libraries") or ()]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: every entry of 'libraries' must be 'glob:' with 'include:' below it, as in "
            "'- glob: {include: transformations/**}'"
        ) from error
    if not patterns:
        raise ConfigError(
            f"{path} names no files: add 'libraries: [{{glob: {{include: transformations/**}}}}]'"
        )
    return spec


def create_project(parent: Path, name: str) -> Path:
    """Create the folder of a new project. Does not touch existing files."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"a pipeline cannot be called {name!r}: take up to 64 letters, digits, '_', '-', a letter first"
        )
    folder = parent / name
    try:
        folder.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{folder} is there already and stays as it is: take another name, or remove it first"
        ) from None
    _copy(resources.files("tidemill.cli.pipelines") / "template", folder, name)
    return folder


def _copy(template: Traversable, folder: Path, name: str) -> None:
    for entry in template.iterdir():
        if entry.name == "__pycache__":
            continue
        target = folder / _RENAMED.get(entry.name, entry.name)
        if entry.is_dir():
            target.mkdir()
            _copy(entry, target, name)
        else:
            target.write_text(entry.read_text("utf-8").replace(_PLACEHOLDER, name), "utf-8")
