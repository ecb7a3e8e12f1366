from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.values import Address, parse_address, parse_flag, parse_size, parse_whole


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9092", Address("127.0.0.1", 9092)),
        (" broker-1.example:0 ", Address("broker-1.example", 0)),
        ("[::1]:9092", Address("::1", 9092)),
        ("[fe80::1%eth0]:65535", Address("fe80::1%eth0", 65535)),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: Any) -> None:
    assert parse_address(text) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "localhost",
        "localhost:",
        ":9092",
        "::1:9092",
        "[::1]",
        "[localhost]:1",
        "a b:1",
        "h:65536",
        "h:-1",
        "h:٣",
    ],
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_address_round_trips(ip: Any, port: int) -> None:
    address = Address(str(ip), port)

    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17 B", 17),
        ("512 KiB", 2**19),
        ("512MiB", 2**29),
        ("1 gib", 2**30),
        ("2 GB", 2 * 10**9),
    ],
)
def test_a_size_is_read_with_and_without_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5 GiB", "1 MiBs", "1 Mi", "1_000", "١"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "1.0", "1_0", "0x10", "9" * 5000])
def test_a_malformed_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_whole(text)


def test_flags_are_read_in_the_usual_words() -> None:
    assert [parse_flag(word) for word in ("true", "YES", "on", "1")] == [True] * 4
    assert [parse_flag(word) for word in ("false", "No", "off", " 0 ")] == [False] * 4
    with pytest.raises(ValueError, match="true or false"):
        parse_flag("maybe")
