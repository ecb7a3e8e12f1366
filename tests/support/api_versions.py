"""Every served pair of API and version, for tests that go through all of them."""

from __future__ import annotations

from tidemill.wire.apis import APIS, Api

__all__ = ("all_versions",)


def all_versions() -> list[tuple[Api, int]]:
    return [(api, version) for api in APIS.values() for version in api.versions]
