"""``tidemill pipeline init | run | dry-run``: Spark's declarative pipelines, quiet and readable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.session import DEFAULT_SERVER, SERVER_VARIABLE, Session, command

__all__ = ("register",)

ProjectOption = Annotated[
    Path | None,
    typer.Option(
        "--project",
        metavar="DIR",
        help="The project folder. Default: this folder, or the nearest one above it with a spec.",
    ),
]
MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", metavar="URL", help="Where Spark runs, such as spark://host:7077. Default: local[*]."
    ),
]
ServersOption = Annotated[
    str | None,
    typer.Option(
        "--servers",
        metavar="HOST:PORT,…",
        help=f"The nodes with topics and tables. Default: --server, else ${SERVER_VARIABLE}, else the spec, "
        "else a node inside the run.",
    ),
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="NAME=VALUE", help="A setting of Spark; it overrides the spec. Repeatable."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "init")(init)
    command(app, "run")(run)
    command(app, "dry-run")(dry_run)


def init(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the pipeline and of its folder.")],
) -> None:
    """Create a folder with a small pipeline that runs without changes. Edit it to make it yours."""
    from tidemill.cli.output import write_json, write_line
    from tidemill.cli.pipelines.project import create_project

    folder = create_project(Path.cwd(), name)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if session.as_json:
        write_json({"folder": str(folder), "files": files})
        return
    write_line(f"{name}/ is made: {', '.join(files)}")
    write_line("next:")
    write_line(f"  cd {name}")
    write_line(
        "  tidemill pipeline run         # on a node of its own, with sample data; the first takes a minute"
    )
    write_line("  python prepare.py --send 500  # more sample data; a second run takes only what is new")
    write_line(
        f"  tidemill pipeline run --servers {DEFAULT_SERVER}    # the same on a node that 'tidemill up' runs"
    )


def run(
    session: Session,
    project: ProjectOption = None,
    master: MasterOption = None,
    servers: ServersOption = None,
    full_refresh: Annotated[
        list[str] | None,
        typer.Option(
            "--full-refresh",
            metavar="NAME,…",
            help="Empty these Spark tables, and compute them again.",
        ),
    ] = None,
    full_refresh_all: Annotated[
        bool,
        typer.Option(
            "--full-refresh-all", help="The same for everything; all rows are written to sinks again."
        ),
    ] = False,
    refresh: Annotated[
        list[str] | None,
        typer.Option("--refresh", metavar="NAME,…", help="Update only these Spark tables."),
    ] = None,
    conf: ConfOption = None,
) -> None:
    """Run the pipeline once: streams process new data, materialized views are computed."""
    if full_refresh_all and (full_refresh or refresh):
        raise typer.BadParameter("--full-refresh-all leaves nothing for --full-refresh and --refresh to name")
    options = ["--full-refresh-all"] if full_refresh_all else []
    options += [f"--full-refresh={names}" for names in full_refresh or ()]
    options += [f"--refresh={names}" for names in refresh or ()]
    _run(session, project, master, servers, conf, refresh=options, dry=False)


def dry_run(
    session: Session,
    project: ProjectOption = None,
    master: MasterOption = None,
    servers: ServersOption = None,
    conf: ConfOption = None,
) -> None:
    """Check the pipeline without running it: that its files load, and that its flows fit together."""
    _run(session, project, master, servers, conf, refresh=[], dry=True)


def _run(
    session: Session,
    project: Path | None,
    master: str | None,
    servers: str | None,
    conf: list[str] | None,
    *,
    refresh: list[str],
    dry: bool,
) -> None:
    from tidemill.cli.pipelines.project import find_project
    from tidemill.cli.pipelines.run import Order, run_pipeline
    from tidemill.cli.pipelines.spark import check_python
    from tidemill.cli.topics.commands import parse_assignments

    check_python()
    order = Order(
        dry=dry,
        master=master,
        servers=servers or session.named_server,
        refresh=refresh,
        configuration=dict(parse_assignments(conf, "--conf")),
    )
    code = run_pipeline(session, find_project(project or Path.cwd()), order)
    if code:
        raise typer.Exit(code)
