"""Which configs of a group a program brings into force."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.client.cluster import Cluster
from tidemill.client.share.group_configs import SHARE_DEFAULTS, WORKER_DEFAULTS, GroupConfigs, named_configs
from tidemill.config.group_keys import GroupConfig
from tidemill.errors import ApiError, ConfigError, ErrorCode


class FakeCluster:
    """A group's configs."""

    def __init__(self, refusal: ErrorCode = ErrorCode.none, **overrides: str) -> None:
        self.overrides = {name.replace("_", "."): value for name, value in overrides.items()}
        self.refusal = refusal
        self.knows_kafka_only = False

    async def to_any(self, name: str, body: Any) -> Any:
        entries = [
            SimpleNamespace(name=each, value=value, config_source=8) for each, value in self.overrides.items()
        ]
        entries.append(SimpleNamespace(name="share.heartbeat.interval.ms", value="5000", config_source=5))
        return SimpleNamespace(results=[SimpleNamespace(error_code=0, error_message=None, configs=entries)])

    async def to_controller(self, name: str, body: Any) -> Any:
        (resource,) = body["resources"]
        assert resource["resource_type"] == 32
        refusal = self.refusal
        if self.knows_kafka_only and any(
            each["name"].startswith("tidemill.") for each in resource["configs"]
        ):
            refusal = ErrorCode.invalid_config
        if refusal == ErrorCode.none:
            self.overrides |= {each["name"]: each["value"] for each in resource["configs"]}
        return SimpleNamespace(responses=[SimpleNamespace(error_code=refusal, error_message="no")])

    async def retrying(self, action: Callable[[], Awaitable[Any]]) -> Any:
        return await action()


async def apply(
    cluster: FakeCluster, named: dict[str, str], defaults: Any = SHARE_DEFAULTS
) -> dict[str, str]:
    await GroupConfigs(named, defaults).apply(cast("Cluster", cluster), "emails")
    return cluster.overrides


async def test_a_group_without_configs_gets_those_of_the_program_and_the_clients_defaults() -> None:
    assert await apply(FakeCluster(), named_configs(order="key")) == {
        "tidemill.share.order": "key",
        "share.auto.offset.reset": "earliest",
    }


async def test_what_a_group_has_is_kept_where_the_program_says_nothing() -> None:
    cluster = FakeCluster(share_auto_offset_reset="latest")
    assert await apply(cluster, {}) == {"share.auto.offset.reset": "latest"}


async def test_a_program_that_contradicts_the_group_is_refused_and_nothing_is_changed() -> None:
    cluster = FakeCluster(tidemill_share_order="none")
    with pytest.raises(ConfigError, match=r"has tidemill\.share\.order=none, this program asks for key"):
        await apply(cluster, named_configs(order="key", max_deliveries=3))
    assert cluster.overrides == {"tidemill.share.order": "none"}


async def test_a_backoff_that_is_given_is_not_completed_by_the_workers_default() -> None:
    fixed = await apply(FakeCluster(), named_configs(retry_backoff=5), WORKER_DEFAULTS)
    assert fixed == {
        "tidemill.share.retry.backoff.ms": "5000",
        "tidemill.share.retry.backoff.kind": "fixed",
        "share.auto.offset.reset": "earliest",
    }
    kept = await apply(FakeCluster(tidemill_share_retry_backoff_ms="7"), {}, WORKER_DEFAULTS)
    assert kept == {"tidemill.share.retry.backoff.ms": "7", "share.auto.offset.reset": "earliest"}
    by_itself = await apply(FakeCluster(), {}, WORKER_DEFAULTS)
    assert by_itself == WORKER_DEFAULTS


async def test_a_server_that_refuses_defaults_is_left_alone_and_one_that_refuses_what_is_named_is_not() -> (
    None
):
    assert await apply(FakeCluster(ErrorCode.group_authorization_failed), {}) == {}
    with pytest.raises(ApiError, match="no"):
        await apply(FakeCluster(ErrorCode.group_authorization_failed), named_configs(order="key"))
    with pytest.raises(ConfigError, match="no"):
        await apply(FakeCluster(ErrorCode.invalid_config), named_configs(order="key"))


async def test_a_server_that_does_not_know_our_configs_gets_kafkas() -> None:
    cluster = FakeCluster()
    cluster.knows_kafka_only = True
    assert await apply(cluster, {}, WORKER_DEFAULTS) == {"share.auto.offset.reset": "earliest"}


def test_the_bound_of_waiting_records_has_a_name_in_python() -> None:
    assert named_configs(max_waiting=500) == {"tidemill.share.max.waiting.records": "500"}


_DAY_SECONDS = 24 * 60 * 60


@given(st.integers(0, 999_999_999_999))
def test_a_start_some_time_ago_is_what_the_node_reads(milliseconds: int) -> None:
    text = named_configs(start=milliseconds / 1000)["share.auto.offset.reset"]
    assert GroupConfig(share_auto_offset_reset=text).share_reset_duration_ms == milliseconds


def test_a_start_thirty_days_ago_is_written_out() -> None:
    configs = named_configs(start=30 * _DAY_SECONDS + 0.25)
    assert configs["share.auto.offset.reset"] == "by_duration:PT2592000.25S"
