"""Documents say what is there: protocol, errors, links, and the names of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from tidemill.errors import TableCode
from tidemill.tables.keys.codec import KeyCodec
from tidemill.tables.predicates.predicate import encode
from tidemill.tables.predicates.sql import parse_sql
from tidemill.wire.apis import APIS, request_class, response_class
from tidemill.wire.schema import EntityClass, FieldSpec, fields_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROTOCOL, TABLES = "protocol.md", "tables.md"
DOCUMENTS = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
FIRST_EXTENSION = 1_000


def sections(document: str, level: str) -> dict[str, str]:
    """The text below each heading of that level, up to the next heading of that or a higher one."""
    parts = re.split(rf"^(#{{1,{len(level)}}}) (.+)\n", (DOCS / document).read_text(), flags=re.MULTILINE)
    found = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return {title: text for marks, title, text in found if marks == level}


def rows(text: str) -> Iterator[tuple[str, ...]]:
    """The rows of the tables in a text, without heads."""
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("| ") and not line.startswith("| ---") and before.startswith("|"):
            yield tuple(cell.strip() for cell in line.strip().strip("|").split(" | "))


def test_the_guide_lists_every_error_of_tables() -> None:
    listed = [(int(code), name, mark == "yes") for code, name, mark in rows(sections(TABLES, "##")["Errors"])]
    assert listed == [(code.value, code.name.upper(), code.retriable) for code in TableCode]


def test_the_protocol_page_says_what_to_do_about_every_error() -> None:
    listed = list(rows(sections(PROTOCOL, "##")["Errors"]))
    assert [(int(code), name) for code, name, _ in listed] == [(c.value, c.name.upper()) for c in TableCode]
    again = {int(code) for code, _, advice in listed if advice.startswith("again")}
    assert again == {code.value for code in TableCode if code.retriable}


def test_the_protocol_page_has_every_field_of_every_extension_api() -> None:
    text = (DOCS / PROTOCOL).read_text()
    structures = {
        name: list(rows(body))
        for name, body in re.findall(r"^\*\*struct (\w+)\*\*\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    }
    documented = {
        title: body for title, body in sections(PROTOCOL, "###").items() if re.match(r"\d{4} ", title)
    }
    expected = {f"{api.key} {api.name}": api.key for api in APIS.values() if api.key > FIRST_EXTENSION}
    assert documented.keys() == expected.keys(), "part of the protocol: a number never gets another meaning"
    for title, key in expected.items():
        for side, entity in (("Request", request_class(key, 0)), ("Response", response_class(key, 0))):
            found = re.search(rf"^\*\*{side}\*\*\n\n((?:\|.*\n)+)", documented[title], re.MULTILINE)
            fields = list(rows(found[1])) if found else []
            written = _written_out(fields, structures)
            assert written == _spelled_out(entity, is_top=side == "Response"), f"{title}, {side.lower()}"


def _written_out(fields: list[tuple[str, ...]], structures: dict[str, list[tuple[str, ...]]]) -> list[object]:
    """Names and types of a table of fields, with those of its structures inside."""
    result: list[object] = []
    for name, kind, *_ in fields:
        inner = structures.get(kind.strip("[]?"))
        result.append(
            (name.strip("`"), kind if inner is None else _bracketed(kind, _written_out(inner, structures)))
        )
    return result


def _bracketed(kind: str, inner: list[object]) -> tuple[str, list[object]]:
    return ("array" if kind.startswith("[") else "structure"), inner


def _spelled_out(entity: EntityClass, *, is_top: bool = False) -> list[object]:
    """The same of a message class. Of a response, without the two fields that all begin with."""
    specs = [
        spec for spec in fields_of(entity) if not (is_top and spec.name in ("error_code", "error_message"))
    ]
    return [(spec.name, _kind(spec)) for spec in specs]


def _kind(spec: FieldSpec) -> object:
    if spec.struct is not None:
        return ("array" if spec.is_array else "structure"), _spelled_out(spec.struct)
    kind = f"[{spec.kafka_type}]" if spec.is_array else spec.kafka_type
    return kind + ("?" if spec.nullable else "")


def test_the_protocol_page_shows_keys_as_they_are_spelt() -> None:
    text = (DOCS / PROTOCOL).read_text()
    schema = pa.schema([pa.field("region", pa.string(), False), pa.field("id", pa.int64(), False)])
    codec = KeyCodec(schema, ["region", "id"], "json")
    columns = codec.columns_from([("eu", 7)])
    (canonical,), (state_key,) = codec.canonical(columns).to_pylist(), codec.state_keys(columns).to_pylist()
    assert f"`{canonical.decode()}`" in text
    (shown,) = re.findall(r"^```\n((?:[0-9a-f]{2} .*\n)+)```", text, re.MULTILINE)
    assert bytes.fromhex("".join(line.split("  ")[0] for line in shown.splitlines())) == state_key
    ((low, high),) = re.findall(r"from\s+`([^`]+)` to\s+before `([^`]+)`", text)
    assert (bytes.fromhex(low), bytes.fromhex(high)) == codec.prefix_bounds(["eu"])


def test_the_protocol_page_shows_a_filter_as_it_is_sent() -> None:
    text = (DOCS / PROTOCOL).read_text()
    (shown,) = re.findall(r"^```\n(\[1, \[.*\])\n```", text, re.MULTILINE)
    sent = msgspec.msgpack.decode(encode(parse_sql("region = 'eu' AND amount > 10")))
    assert sent == msgspec.json.decode(shown)


def test_no_document_has_both_sides_of_a_merge() -> None:
    marks = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
    assert not [document.name for document in DOCUMENTS if marks.search(document.read_text())]


def test_links_between_documents_lead_somewhere() -> None:
    lost = [
        f"{document.name}: {link}"
        for document in DOCUMENTS
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text())
        if not _leads_somewhere(document, link)
    ]
    assert not lost


def _leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = document if not path else (document.parent / path)
    if not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_decision_has_a_number_a_date_and_a_status_and_cites_nothing_outside() -> None:
    documents = {path.name.lower() for path in (*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md"))}
    for number, path in enumerate(sorted((DOCS / "decisions").glob("*.md")), 1):
        title, status, _ = path.read_text().split("\n\n", 2)
        assert path.name.startswith(f"{number:04d}-")
        assert title.startswith(f"# {number}. "), path.name
        assert re.match(r"Date: \d{4}-\d\d-\d\d\. Status: (accepted|superseded|withdrawn)", status), path.name
        cited = {
            Path(name).name.lower() for name in re.findall(r"[\w./-]+\.md\b", path.read_text(), re.IGNORECASE)
        }
        assert cited <= documents, path.name
        assert "shared/" not in path.read_text().lower(), path.name


#: Files that are a reader's, not this repository's: settings, parts of a pipeline's project and of data
#: directories, and what keys in etcd begin with.
OF_READERS = {"tidemill.toml", "spark-pipeline.yml", "transformations/", "prepare.py", "state/"}
OF_READERS |= {"cluster-identity.json", "tidemill/"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    sources = ROOT / "src" / "tidemill"
    lost = []
    for part in re.split(r"\n(?=\||#|\d\. |- )|\n\n", prose):
        # A name without a folder is that of a neighbour of one that was named before in the same item.
        folders = [ROOT, sources, sources / "server", document.parent]
        for name in re.findall(r"`([\w/.-]+\.(?:py|json|toml|md|yaml|yml)|[\w/-]+/)`", part):
            found = [folder / name for folder in folders if (folder / name).exists()]
            folders += [path if path.is_dir() else path.parent for path in found]
            if not found and name not in OF_READERS:
                lost.append(name)
    assert not lost
