"""ApiVersions: what this server speaks. Clients ask it first, and pick the newest version that both know."""

from __future__ import annotations

from typing import Any

from tidemill.errors import ErrorCode
from tidemill.server.handlers.features import FEATURES
from tidemill.wire.apis import APIS, Api

__all__ = ("api_versions_body",)

_PRODUCE_KEY = 0


def api_versions_body(error: ErrorCode = ErrorCode.none) -> dict[str, Any]:
    """The table of APIs, with the error of a request whose version is unknown."""
    return {
        "error_code": error,
        "api_keys": [
            {"api_key": api.key, "min_version": _advertised_min(api), "max_version": api.max_version}
            for api in APIS.values()
        ],
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level} for name, level in FEATURES.items()
        ],
        "finalized_features_epoch": 0,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in FEATURES.items()
        ],
    }


def _advertised_min(api: Api) -> int:
    # librdkafka takes a minimum above 2 to mean that the old codecs are gone, and stops compressing. Kafka 4
    # therefore claims version 0 as well, which nobody sends.
    return 0 if api.key == _PRODUCE_KEY else api.min_version
