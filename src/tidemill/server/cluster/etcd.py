"""The cluster's etcd, as the settings name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import ConfigError
from tidemill.server.cluster.joining import read_file

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.stores.store import MetadataStore

__all__ = ("open_etcd",)


def open_etcd(settings: Settings) -> MetadataStore:
    """The metadata of the cluster that the settings name. Raises ``ConfigError``."""
    try:
        from tidemill.control.stores.etcd import EtcdStore
        from tidemill.control.stores.etcd_channel import EtcdSettings
        from tidemill.control.stores.etcd_url import metadata_prefix, parse_etcd_url
    except ImportError as error:
        raise ConfigError(
            f"a cluster needs the package {error.name!r}; install it with: pip install 'tidemill[cluster]'"
        ) from error
    assert settings.cluster is not None
    password = None
    if settings.etcd_password_file is not None:
        password = read_file("etcd_password_file", settings.etcd_password_file).decode().strip()
    return EtcdStore(
        EtcdSettings(
            parse_etcd_url(settings.cluster),
            ca_file=settings.etcd_tls_ca,
            cert_file=settings.etcd_tls_cert,
            key_file=settings.etcd_tls_key,
            user=settings.etcd_user,
            password=password,
        ),
        metadata_prefix(settings.cluster_name),
    )
