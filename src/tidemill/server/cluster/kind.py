"""The kind of metadata: that of a single node, or that of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.image import MetadataImage

__all__ = ("check_kind",)


def check_kind(settings: Settings, image: MetadataImage) -> None:
    """Refuse metadata of a single node for a cluster, and the other way round. Raises ``ConfigError``."""
    if image.cluster_id is None:
        return
    if settings.cluster is None and image.replicated:
        raise ConfigError(
            f"the metadata is that of cluster {image.cluster_id}; start the node with --cluster etcd://..."
        )
    if settings.cluster is not None and not image.replicated:
        raise ConfigError(
            f"the metadata of {settings.cluster_name!r} in etcd is that of a single node; take it into a "
            "cluster with 'tidemill cluster upgrade'"
        )
