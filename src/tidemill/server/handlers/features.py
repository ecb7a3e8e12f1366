"""Features, which clients may rely on beyond the versions of APIs, and UpdateFeatures, which changes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import outcome, refused

__all__ = ("FEATURES", "update_features")

#: Feature → its level: with the one a consumer may use the new protocol, with the other a producer uses
#: transactions V2. They come with the release and are always on.
FEATURES: Final[Mapping[str, int]] = {"group.version": 1, "transaction.version": 2}

_FIRST_WITHOUT_RESULTS: Final = 2


async def update_features(broker: Broker, call: Call) -> dict[str, Any]:
    """The level that a feature has is confirmed; any other is refused. One refusal refuses all."""
    updates = call.request.feature_updates
    seen: set[str] = set()
    # Among more updates than there are features, one is unknown or named twice: no need to look further.
    for each in updates[: len(FEATURES) + 1]:
        error = _refusal(each, seen)
        if error is not None:
            return outcome(error)
        seen.add(each.feature)
    if call.version >= _FIRST_WITHOUT_RESULTS:
        return outcome(None)
    return {**outcome(None), "results": [{"feature": each.feature, **outcome(None)} for each in updates]}


def _refusal(update: Any, seen: set[str]) -> ApiError | None:
    name, level = update.feature[:200], update.max_version_level
    fixed = FEATURES.get(name)
    if fixed is None:
        known = ", ".join(FEATURES)
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
