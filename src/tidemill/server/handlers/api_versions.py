"""ApiVersions: what this server speaks. Clients ask it first, and pick the newest version that both know."""

from __future__ import annotations

from typing import Any

from tidemill.errors import ErrorCode
from tidemill.wire.apis import APIS

__all__ = ("api_versions_body",)


def api_versions_body(error: ErrorCode = ErrorCode.none) -> dict[str, Any]:
    return {
        "error_code": error,
        "api_keys": [
            {"api_key": api.key, "min_version": api.min_version, "max_version": api.max_version}
            for api in APIS.values()
        ],
        "finalized_features_epoch": 0,
    }
