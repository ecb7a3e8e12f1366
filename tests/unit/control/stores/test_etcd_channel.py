"""How etcd is named and reached, without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.values import Address
from tidemill.control.stores.etcd import EtcdStore
from tidemill.control.stores.etcd_channel import EtcdChannel, EtcdSettings
from tidemill.control.stores.etcd_url import parse_etcd_url
from tidemill.control.stores.store import Put, StoreUnavailable, Txn
from tidemill.errors import ConfigError

HERE = (Address("127.0.0.1", 2379),)
#: Nobody listens there: the port needs a privileged process.
NOBODY = Address("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("etcd://h1:2379,h2:2380", [("h1", 2379), ("h2", 2380)]),
        ("etcd://h1", [("h1", 2379)]),
        ("etcd://[::1]:5,[::1]/", [("::1", 5), ("::1", 2379)]),
        ("etcd://h1:1, h2:2", [("h1", 1), ("h2", 2)]),
    ],
)
def test_a_url_names_endpoints(url: str, addresses: list[tuple[str, int]]) -> None:
    assert list(parse_etcd_url(url)) == [Address(*each) for each in addresses]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h1:2379", "does not start with etcd://"),
        ("etcd://", "is no address"),
        ("etcd://h1:2379,,h2", "is no address"),
        ("etcd://h1:99999", "is no address"),
        ("etcd://h1:0", "has port 0"),
        ("etcd://h1:2379/prod", "has a path"),
        ("etcd://root:secret@h1:2379", "no user or password"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_words(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        parse_etcd_url(url)
    assert "secret" not in raised.value.message


@given(st.text(max_size=40))
def test_no_text_is_more_than_refused(text: str) -> None:
    try:
        assert parse_etcd_url("etcd://" + text)
    except ConfigError:
        return


def test_settings_that_are_half_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="both its file and the file of its key"):
        EtcdSettings(HERE, cert_file=Path("x"))
    with pytest.raises(ConfigError, match="both a name and a password"):
        EtcdSettings(HERE, user="x")
    with pytest.raises(ConfigError, match="no endpoint"):
        EtcdSettings(())
    with pytest.raises(ConfigError, match="deadline of 0 ms"):
        EtcdSettings(HERE, deadline_ms=0)


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(EtcdSettings(HERE, user="x", password="secret"))


def test_a_file_for_tls_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.crt.*cannot be read: No such file"):
        EtcdChannel(EtcdSettings(HERE, ca_file=tmp_path / "missing.crt"))


@pytest.mark.parametrize("prefix", ["", "tidemill", "tide mill/", "tidemill/ü/", "a\n/"])
def test_a_prefix_that_keys_cannot_have_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        EtcdStore(EtcdSettings(HERE), prefix)


async def test_an_etcd_that_is_not_there_is_named_and_nothing_was_written() -> None:
    store = EtcdStore(EtcdSettings((NOBODY, Address("localhost", 1)), deadline_ms=10_000), "t/")
    async with asyncio.timeout(120):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1, localhost:1.*refused.*members run"):
            await store.commit(Txn(puts=(Put("a", b""),)))
        with pytest.raises(StoreUnavailable):
            await store.read()
        await store.close()
