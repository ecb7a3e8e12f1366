"""ApiVersions and UpdateFeatures: what this server speaks, and what clients may rely on beyond that.

Clients ask for the versions first, and pick the newest of each API that both know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome, refused
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import ALTER, for_cluster
from tidemill.server.requests.call import Call
from tidemill.wire.apis import API_VERSIONS_KEY, APIS, PRODUCE, Api, is_served
from tidemill.wire.encode import encode_response

__all__ = ("api_versions", "api_versions_body", "update_features")

_FIRST_UPDATE_WITHOUT_RESULTS: Final = 2
#: Feature → its level: a consumer may use the new protocol, a share consumer may join, a producer uses
#: transactions V2. They come with the release and are always on.
_FEATURES: Final[Mapping[str, int]] = {"group.version": 1, "share.version": 1, "transaction.version": 2}


@serves("ApiVersions")
def api_versions(broker: Broker, call: Call) -> None:
    """Answer with the table of APIs, also to a client that asks with a version from the future."""
    if is_served(API_VERSIONS_KEY, call.version):
        call.reply(api_versions_body())
        return
    # In the oldest format, from which every client can go on.
    body = api_versions_body(ErrorCode.unsupported_version)
    call.reply_buffers([encode_response(API_VERSIONS_KEY, 0, call.header.correlation_id, body)])


def api_versions_body(error: ErrorCode = ErrorCode.none) -> dict[str, Any]:
    """The table of APIs, with the error of a request whose version is unknown."""
    return {
        "error_code": error,
        "api_keys": [
            {"api_key": api.key, "min_version": _advertised_min(api), "max_version": api.max_version}
            for api in APIS.values()
            if not api.nodes_only
        ],
        "supported_features": [
            {"name": name, "min_version": 0, "max_version": level} for name, level in _FEATURES.items()
        ],
        "finalized_features_epoch": 0,
        "finalized_features": [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, level in _FEATURES.items()
        ],
    }


def _advertised_min(api: Api) -> int:
    # librdkafka takes a minimum above 2 to mean that the old codecs are gone, and stops compressing. Kafka 4
    # therefore claims version 0 as well, which nobody sends.
    return 0 if api.key == PRODUCE else api.min_version


@serves("UpdateFeatures", for_cluster(ALTER))
async def update_features(broker: Broker, call: Call) -> dict[str, Any]:
    """Confirm the level that a feature has, and refuse any other. One refusal refuses all."""
    updates = call.request.feature_updates
    seen: set[str] = set()
    # Among more updates than there are features, one is unknown or named twice: no need to look further.
    for each in updates[: len(_FEATURES) + 1]:
        error = _refusal(each, seen)
        if error is not None:
            return outcome(error)
        seen.add(each.feature)
    if call.version >= _FIRST_UPDATE_WITHOUT_RESULTS:
        return outcome(None)
    return {**outcome(None), "results": [{"feature": each.feature, **outcome(None)} for each in updates]}


def _refusal(update: Any, seen: set[str]) -> ApiError | None:
    name, level = update.feature[:200], update.max_version_level
    fixed = _FEATURES.get(name)
    if fixed is None:
        known = ", ".join(_FEATURES)
        return ApiError(
            ErrorCode.invalid_update_version, f"there is no feature {name!r} here; there are {known}"
        )
    if name in seen:
        return refused(f"feature {name!r} is named more than once")
    if level != fixed:
        return ApiError(
            ErrorCode.invalid_update_version,
            f"feature {name!r} is always at level {fixed} in this release and cannot be set to {level}",
        )
    return None
