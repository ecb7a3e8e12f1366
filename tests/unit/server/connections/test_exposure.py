from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.errors import ConfigError
from tidemill.server.connections.exposure import check_exposure, exposed_listeners

LOCAL = Address("127.0.0.1", 9092)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_loopback_needs_no_permission(host: str, caplog: pytest.LogCaptureFixture) -> None:
    await check_exposure(Settings(listen=Address(host, 1), http=Address(host, 2)))
    await check_exposure(Settings(listen=Address(host, 1), http=None))
    assert not caplog.records


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
async def test_an_exposed_listener_is_refused_with_what_it_means_and_the_flag(host: str) -> None:
    exposed = Address(host, 9092)
    with pytest.raises(ConfigError) as refused:
        await check_exposure(Settings(listen=exposed, http=None))
    assert f"{exposed} (listen)" in refused.value.message
    assert "no TLS, authentication or ACL" in refused.value.message
    assert "--allow-unauthenticated" in refused.value.message


async def test_http_obeys_the_same_rule() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:9080 \(http\)"):
        await check_exposure(Settings(listen=LOCAL, http=Address("0.0.0.0", 9080)))


async def test_with_permission_one_warning_names_every_exposed_listener(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exposed = Settings(listen=Address("0.0.0.0", 1), http=Address("::", 2), allow_unauthenticated=True)
    with caplog.at_level(logging.WARNING):
        await check_exposure(exposed)
    (record,) = caplog.records
    assert "0.0.0.0:1 (listen) and [::]:2 (http)" in record.getMessage()


def test_a_name_is_as_exposed_as_the_worst_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"both": ["127.0.0.1", "10.0.0.7"], "here": ["127.0.1.1", "::1"]}

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in answers[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert exposed_listeners(Settings(listen=Address("both", 1), http=Address("here", 2))) == [
        ("listen", Address("both", 1))
    ]


async def test_a_name_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot resolve host 'nowhere\.invalid'.*--listen"):
        await check_exposure(Settings(listen=Address("nowhere.invalid", 1), http=None))
