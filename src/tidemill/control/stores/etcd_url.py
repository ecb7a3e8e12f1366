"""Where an etcd is, ``etcd://host:port[,host:port…]``, and where a cluster's keys are in it."""

from __future__ import annotations

from typing import Final

from tidemill.config.values import Address, parse_address
from tidemill.errors import ConfigError

__all__ = ("EXAMPLE_URL", "metadata_prefix", "parse_etcd_url")

_DEFAULT_PORT: Final = 2379
_SCHEME: Final = "etcd://"
EXAMPLE_URL: Final = "etcd://host1:2379,host2:2379"


def metadata_prefix(cluster_name: str) -> str:
    """What all keys of a cluster's metadata begin with.

    >>> metadata_prefix("tidemill")
    'tidemill/tidemill/'
    """
    return f"tidemill/{cluster_name}/"


def parse_etcd_url(url: str) -> tuple[Address, ...]:
    """The endpoints in ``etcd://host:port,…``. A missing port is etcd's own, 2379.

    >>> [str(address) for address in parse_etcd_url("etcd://a:2379,b")]
    ['a:2379', 'b:2379']
    """
    if not url.startswith(_SCHEME):
        raise ConfigError(
            f"the cluster {url!r} does not start with {_SCHEME}; write for example {EXAMPLE_URL}"
        )
    rest = url.removeprefix(_SCHEME).removesuffix("/")
    if "@" in rest:
        raise ConfigError(f"{_SCHEME} URLs hold no user or password; they have settings of their own")
    if "/" in rest:
        raise ConfigError(
            f"the cluster {url!r} has a path; only hosts belong there, the cluster's name has its own setting"
        )
    return tuple(_endpoint(part.strip(), url) for part in rest.split(","))


def _endpoint(text: str, url: str) -> Address:
    has_port = ":" in text.rpartition("]")[2]
    try:
        address = parse_address(text if has_port else f"{text}:{_DEFAULT_PORT}")
    except ValueError as error:
        raise ConfigError(f"{text!r} in the cluster {url!r} is no address: it must be {error}") from error
    if address.port == 0:
        raise ConfigError(f"{text!r} in the cluster {url!r} has port 0; name the port that etcd listens on")
    return address
