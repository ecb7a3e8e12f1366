"""``tidemill cluster upgrade``: take a stopped single node into a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.session import Session
from tidemill.cli.up import ConfigOption, SetOption, flags_of

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.server.cluster.upgrade import Upgraded

__all__ = ("upgrade",)


def upgrade(
    session: Session,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="ETCD", help="The etcd of the new cluster: etcd://host:port[,host:port...]."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="The data directory of the node. Default: tidemill-data."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Take a stopped single node into a new cluster: its metadata moves to etcd, its data stays where it is.

    The metadata in etcd is compared with that of the node before it counts. The old file is renamed and kept.
    An attempt that was interrupted is repeated with the same command.
    """
    import asyncio

    from tidemill.cli.output import write_json, write_line
    from tidemill.config.loading import find_config_file, load_settings

    flags = flags_of(settings, data_dir=data, cluster=cluster)
    chosen = load_settings(flags, os.environ, find_config_file(config, os.environ, Path.cwd()))
    if chosen.cluster is None:
        raise typer.BadParameter("name the etcd of the cluster: --cluster etcd://host:port")
    done = asyncio.run(_upgrade(chosen))
    if session.as_json:
        write_json({**done._asdict(), "kept": str(done.kept)})
        return
    write_line(f"{done.keys} keys of metadata are in etcd, with the same digest as here: {done.digest[:16]}")
    write_line(f"node {done.node_id} ({done.node_name}) is the first node of cluster {done.cluster_id}")
    write_line(f"the old metadata is kept as {done.kept}")
    write_line(
        f"start the node with: tidemill up --cluster {chosen.cluster} --name {done.node_name} "
        f"--data {chosen.data_dir}"
    )


async def _upgrade(settings: Settings) -> Upgraded:
    from tidemill.coordination.ids import RandomIds
    from tidemill.errors import ConfigError
    from tidemill.server.cluster.etcd import open_etcd
    from tidemill.server.cluster.upgrade import upgrade
    from tidemill.server.disk.data_directory import DataDirectory

    if not settings.data_dir.is_dir():
        raise ConfigError(f"there is no data directory {settings.data_dir}; name it with --data")
    directory = DataDirectory(settings.data_dir)
    directory.lock()
    try:
        store = open_etcd(settings)
        try:
            return await upgrade(directory, store, RandomIds())
        finally:
            await store.close()
    finally:
        directory.release()
