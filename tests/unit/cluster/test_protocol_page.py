"""docs/cluster-protocol.md says what is sent: messages, fields, codes, limits, and its examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from msgspec import inspect

from tidemill.cluster.frames import encode
from tidemill.cluster.handshake import (
    HANDSHAKE_BYTES_MAX,
    NONCE_BYTES,
    OLDEST_VERSION,
    AskingHandshake,
    ClusterIdentity,
    ListeningHandshake,
)
from tidemill.cluster.listener import ListenerLimits
from tidemill.cluster.messages import (
    BATCH_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    REQUESTS,
    RESPONSES,
    ClusterErrorCode,
    ErrorResponse,
    HeartbeatRequest,
    HelloProofResponse,
    RequestHeader,
    ResponseHeader,
)

TEXT = (Path(__file__).parents[3] / "docs" / "cluster-protocol.md").read_text()
SIMPLE = {
    inspect.AnyType: "any",
    inspect.BoolType: "bool",
    inspect.BytesType: "bin",
    inspect.IntType: "int",
    inspect.MemoryViewType: "bin",
    inspect.RawType: "any",
    inspect.StrType: "str",
    inspect.UUIDType: "uuid",
}


def rows(text: str) -> Iterator[tuple[str, ...]]:
    """The rows of the tables in a text, without heads."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("| ") and not line.startswith("| ---") and before.startswith("|"):
            yield tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


def table_below(line: str, text: str) -> str:
    """The table two lines below a line."""
    _, _, below = text.partition(f"{line}\n\n")
    return below.partition("\n\n")[0]


def written(table: str) -> list[tuple[str, ...]]:
    """(field, type, default) as the page has them; every field has a meaning."""
    found: list[tuple[str, ...]] = [
        (name.strip("`"), kind, default) for name, kind, default, meaning in rows(table) if meaning
    ]
    assert len(found) == len(list(rows(table)))
    return found


def declared(message: type[Any], structures: dict[str, type[Any]]) -> list[tuple[str, ...]]:
    """The same as the code has them; notes the structures on the way."""
    information = inspect.type_info(message)
    assert isinstance(information, inspect.StructType)
    return [
        (field.name, kind_of(field.type, structures), default_of(field))
        for field in information.fields
        if field.name != "header" or message not in (*REQUESTS, *RESPONSES)
    ]


def kind_of(kind: inspect.Type, structures: dict[str, type[Any]]) -> str:
    match kind:
        case inspect.StructType():
            structures[kind.cls.__name__] = kind.cls
            return kind.cls.__name__
        case inspect.ListType():
            return f"[{kind_of(kind.item_type, structures)}]"
        case inspect.DictType():
            return f"map {kind_of(kind.key_type, structures)} to {kind_of(kind.value_type, structures)}"
        case inspect.UnionType():
            (inner,) = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return kind_of(inner, structures) + "?"
    return SIMPLE[type(kind)]


def default_of(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return "2^63-1" if default == 2**63 - 1 else str(default)
    return str(default) if default else "empty"


def tag(message: type[Any]) -> str:
    return str(message.__struct_config__.tag)


def test_every_message_is_there_with_all_its_fields() -> None:
    structures: dict[str, type[Any]] = {"RequestHeader": RequestHeader, "ResponseHeader": ResponseHeader}
    found = [
        (*title.split(" → "), *(table_below(f"**{side}**", part) for side in ("Request", "Response")))
        for title, _, part in (part.partition("\n") for part in TEXT.split("\n### ")[1:])
    ]
    requests = {tag(request): declared(request, structures) for request in REQUESTS}
    responses = {tag(response): declared(response, structures) for response in RESPONSES}
    assert responses.pop(tag(ErrorResponse)) == []
    assert {name: written(table) for name, _, table, _ in found} == requests
    assert {name: written(table) for _, name, _, table in found} == responses
    names = re.findall(r"^\*\*struct (\w+)\*\*$", TEXT, re.MULTILINE)
    checked: dict[str, list[tuple[str, ...]]] = {}
    while structures.keys() - checked.keys():
        name = min(structures.keys() - checked.keys())
        checked[name] = declared(structures[name], structures)
    assert {name: written(table_below(f"**struct {name}**", TEXT)) for name in names} == checked


def test_every_error_is_there() -> None:
    listed = [(int(code), name, mark == "yes") for code, name, mark, *_ in rows(section("Errors"))]
    assert listed == [(code.value, code.name, code.retriable) for code in ClusterErrorCode]


def test_the_limits_are_those_of_a_listener() -> None:
    limits = ListenerLimits()
    assert [int(value) for _, value in rows(section("Limits"))] == [
        limits.connections_max,
        limits.requests_max,
        limits.connection_bytes,
        limits.total_bytes,
        limits.unsent_bytes,
        limits.handshake_ms,
        limits.frame_ms,
        limits.unread_ms,
        limits.idle_ms,
    ]
    assert f"at most {MESSAGE_BYTES_MAX} bytes" in section("Framing")
    assert f"at most {BATCH_BYTES_MAX}" in section("Framing")
    assert f"may have {HANDSHAKE_BYTES_MAX} bytes at most" in section("Opening a connection")
    assert f"take {limits.handshake_ms // 1000} seconds" in section("Opening a connection")
    assert "There is one version, 1." in section("Versions")
    assert OLDEST_VERSION == PROTOCOL_VERSION == 1


def test_the_example_of_a_frame_is_one() -> None:
    (shown,) = re.findall(r"```\n((?:[0-9a-f]{2}.*\n)+)```", section("Framing"))
    frame = b"".join(encode(HeartbeatRequest(RequestHeader(1, 7, 2, 1_000, 31), [])))
    assert bytes.fromhex("".join(line.split("  ")[0] for line in shown.splitlines())) == frame
    assert f"this frame of {len(frame)} bytes" in section("Framing")
    assert f"{len(frame) - 4} bytes follow" in shown


def test_the_example_of_the_proofs_is_right() -> None:
    nodes = [ClusterIdentity("harbour", number, UUID(int=11), b"swordfish") for number in (1, 2)]
    one = AskingHandshake(nodes[0], 2, b"a" * NONCE_BYTES)
    two = ListeningHandshake(nodes[1], b"b" * NONCE_BYTES)
    header = RequestHeader(1, 0, 1, 1_000)
    proof = one.prove(header, two.answer(one.hello(header), 0)[0])
    answer, _ = two.answer(proof, 0)
    assert isinstance(answer, HelloProofResponse)
    text = section("Opening a connection")
    assert re.findall(r"^(?:asking|listening) +([0-9a-f]+)$", text, re.MULTILINE) == [
        proof.proof.hex(),
        answer.proof.hex(),
    ]
