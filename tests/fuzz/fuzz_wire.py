"""A fuzzer for everything that parses untrusted bytes.

    PYTHONPATH=src:tests python tests/fuzz/fuzz_wire.py --inputs 1000000 --seed 1

Every input must parse or raise ProtocolError, nothing else, within ``MAX_INPUT_MS`` of processor time and
without memory growing by more than ``MAX_GROWTH_BYTES``. The address space is limited, so that even memory
that is only reserved counts. A target is a function that makes valid inputs and one that parses: add a
``Target`` to ``TARGETS``. ``--save`` adds the shortest input of every kind of outcome to the corpus, which
the test suite replays.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from crc32c import crc32c

from support.api_versions import all_versions
from tidemill.cluster.frames import Undecodable
from tidemill.cluster.frames import decode_request as decode_node_request
from tidemill.cluster.frames import decode_response as decode_node_response
from tidemill.cluster.messages import REQUESTS, RESPONSES, ClusterErrorCode
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ProtocolError, TableError
from tidemill.log.incoming import prepare_batch
from tidemill.records.batch import HEADER_BYTES
from tidemill.records.record import Record, build_batch, read_records
from tidemill.server.tables.definitions import schema_from_client
from tidemill.tables.definition import pack_schema, unpack_schema
from tidemill.tables.keys.codec import KeyCodec
from tidemill.tables.predicates.predicate import (
    Always,
    And,
    Compare,
    In,
    IsNull,
    Never,
    Not,
    Or,
    Predicate,
    Prefix,
    bind,
    decode,
    encode,
)
from tidemill.tables.rows.formats import make_format
from tidemill.wire.apis import is_flexible, is_served, request_class, response_class
from tidemill.wire.consumer_protocol import pack_subscription, parse_subscription
from tidemill.wire.encode import encode_request, encode_response
from tidemill.wire.guard import write_uvarint
from tidemill.wire.requests import decode_request, decode_response, parse_header
from tidemill.wire.schema import FieldSpec, fields_of

CORPUS = Path(__file__).parent / "corpus"
MAX_INPUT_MS = 50
MAX_GROWTH_BYTES = 64 * 1024 * 1024
ADDRESS_SPACE_BYTES = 2 * 1024 * 1024 * 1024
MAX_DECOMPRESSED_BYTES = 1024 * 1024
#: A topic that has every record of a batch looked at.
COMPACTED = TopicConfig(cleanup_policy=frozenset({"compact"}))

HOSTILE_NUMBERS = (
    *(value.to_bytes(size, "big", signed=True) for size in (1, 2, 4, 8) for value in (-1, -2, 0, 1, 127)),
    *(
        (sign * 2 ** (8 * size - 1) - (sign > 0)).to_bytes(size, "big", signed=True)
        for size in (2, 4, 8)
        for sign in (1, -1)
    ),
    *(write_uvarint(value) for value in (0x7F, 0x80, 2**14, 2**28, 2**31 - 1, 2**31, 2**32 - 1, 2**35 - 1)),
    b"\x80\x80\x80\x80\x80\x80\x00",
    b"\x00\x0f\x42\x40",
)


@dataclass(frozen=True)
class Target:
    """Something that parses untrusted bytes."""

    name: str
    seeds: Callable[[random.Random], list[bytes]]
    """Valid inputs, at least one of every kind. They are mutated, and cut at each byte."""
    parse: Callable[[bytes], object]
    """Must return, or raise ProtocolError."""


@dataclass
class Report:
    """What came out of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[bytes, str]] = field(default_factory=list)
    slowest_ms: float = 0.0
    kinds: dict[str, bytes] = field(default_factory=dict)
    """The shortest input of each kind of outcome."""


# ---- driver


def outcome_of(target: Target, data: bytes) -> str:
    """ "parsed", or what the ProtocolError said. Any other exception is a finding and goes through."""
    try:
        target.parse(data)
    except ProtocolError as error:
        return error.message
    return "parsed"


def processor_ms(target: Target, data: bytes) -> float:
    started = time.thread_time()
    outcome_of(target, data)
    return (time.thread_time() - started) * 1000


def run(target: Target, inputs: Iterable[bytes], report: Report) -> None:
    for data in inputs:
        started = time.perf_counter()
        try:
            outcome = outcome_of(target, data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            report.findings.append((data, f"{type(error).__name__}: {error}"))
            continue
        elapsed_ms = (time.perf_counter() - started) * 1000
        if elapsed_ms > MAX_INPUT_MS:
            # The machine may have been busy: only processor time, taken again, counts.
            elapsed_ms = min(processor_ms(target, data) for _ in range(3))
            if elapsed_ms > MAX_INPUT_MS:
                report.findings.append((data, f"took {elapsed_ms:.0f} ms"))
        report.slowest_ms = max(report.slowest_ms, elapsed_ms)
        report.outcomes["parsed" if outcome == "parsed" else "refused"] += 1
        kind = f"{target.name}: {re.sub(r'-?[0-9]+', 'N', outcome)}"[:120]
        known = report.kinds.get(kind)
        if known is None or len(data) < len(known):
            report.kinds[kind] = data


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A valid input with up to four wounds."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        wound = rng.randrange(7)
        if wound == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif wound == 1:
            number = rng.choice(HOSTILE_NUMBERS)
            data[at : at + len(number)] = number
        elif wound == 2:
            data[at:at] = rng.choice(HOSTILE_NUMBERS)
        elif wound == 3:
            del data[at : at + rng.randint(1, 8)]
        elif wound == 4:
            data[at:at] = data[at : at + rng.randint(1, 32)]
        elif wound == 5:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


def inputs_for(rng: random.Random, seeds: list[bytes], count: int) -> Iterator[bytes]:
    """Cuts of the seeds at each byte, up to half of ``count``; the rest is random and mutated."""
    left = count
    for seed in seeds:
        if left <= count // 2:
            break
        yield from (seed[:end] for end in range(len(seed) + 1))
        left -= len(seed) + 1
    for _ in range(left):
        if rng.random() < 0.1:
            start = rng.choice(seeds)
            yield start[: rng.randrange(min(24, len(start) + 1))] + rng.randbytes(rng.randrange(64))
        else:
            yield mutated(rng, seeds)


def fuzz(target: Target, count: int, seed: int) -> Report:
    rng = random.Random(f"{target.name}-{seed}")
    seeds = target.seeds(rng)
    report = Report()
    for valid in seeds:  # The first use of a message class imports it; that is not the time that is measured.
        assert outcome_of(target, valid) == "parsed", (target.name, valid.hex(), outcome_of(target, valid))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run(target, inputs_for(rng, seeds, count), report)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if growth > MAX_GROWTH_BYTES:
        report.findings.append((b"", f"memory grew by {growth} bytes"))
    return report


# ---- corpus: one JSON object per line, {"target": ..., "outcome": ..., "hex": ...}


def read_corpus() -> Iterator[tuple[str, str, bytes]]:
    """(target, outcome, input) of everything that is kept."""
    for path in sorted(CORPUS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            yield entry["target"], entry["outcome"], bytes.fromhex(entry["hex"])


def save_corpus(target: Target, kinds: dict[str, bytes], max_input_bytes: int = 120) -> None:
    entries = {data: outcome for name, outcome, data in read_corpus() if name == target.name}
    known = {re.sub(r"-?[0-9]+", "N", outcome) for outcome in entries.values()}
    for data in kinds.values():
        outcome = outcome_of(target, data)
        if len(data) <= max_input_bytes and re.sub(r"-?[0-9]+", "N", outcome) not in known:
            entries[data] = outcome
    lines = [
        json.dumps({"target": target.name, "outcome": outcome, "hex": data.hex()})
        for data, outcome in sorted(entries.items(), key=lambda entry: (entry[1], entry[0]))
    ]
    (CORPUS / f"{target.name}.jsonl").write_text("".join(line + "\n" for line in lines))


# ---- targets: Kafka messages


def random_value(rng: random.Random, spec: FieldSpec) -> Any:
    if spec.nullable and rng.random() < 0.2:
        return None
    if spec.is_array:
        return [random_element(rng, spec) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    return random_element(rng, spec)


def random_element(rng: random.Random, spec: FieldSpec) -> Any:
    if spec.struct is not None:
        return random_body(rng, spec.struct)
    kind = spec.kafka_type
    if kind == "string":
        return "".join(rng.choices("abcé☃.", k=rng.choice((0, 3, 8, 150))))
    if kind in ("bytes", "records"):
        return rng.randbytes(rng.choice((0, 5, 61, 200)))
    if kind == "uuid":
        return uuid.UUID(int=rng.getrandbits(128))
    if kind == "error_code":
        return rng.randint(-1, 100)
    return rng.randrange(2) if kind == "bool" else rng.randrange(100)


def random_body(rng: random.Random, entity: Any) -> dict[str, Any]:
    return {
        spec.name: random_value(rng, spec)
        for spec in fields_of(entity)
        if spec.tag is None or rng.random() < 0.5
    }


def request_seeds(rng: random.Random) -> list[bytes]:
    seeds = []
    for _ in range(3):
        for api, version in all_versions():
            body = random_body(rng, request_class(api.key, version))
            client = rng.choice(("me", "", None))
            seeds.append(bytes(encode_request(api.key, version, rng.getrandbits(31), client, body)[4:]))
            if is_flexible(api.key, version):
                untagged = {
                    spec.name for spec in fields_of(request_class(api.key, version)) if spec.tag is None
                }
                body = {name: value for name, value in body.items() if name in untagged}
                # The last byte says that there are no tagged fields: let there be one that nobody knows.
                frame = bytes(encode_request(api.key, version, 1, "me", body)[4:-1])
                seeds.append(frame + b"\x01\x63\x03xyz")
    rng.shuffle(seeds)
    return seeds


def parse_request(data: bytes) -> object:
    header = parse_header(data)
    return decode_request(header, data) if is_served(header.api_key, header.api_version) else header


def response_seeds(rng: random.Random) -> list[bytes]:
    seeds = []
    for api, version in all_versions():
        body = random_body(rng, response_class(api.key, version))
        awaited = api.key.to_bytes(2, "big") + bytes((version,))
        seeds.append(awaited + encode_response(api.key, version, rng.getrandbits(31), body)[4:])
    rng.shuffle(seeds)
    return seeds


def parse_response(data: bytes) -> object:
    """The first three bytes say which response our client waits for (API key, version), not from the wire."""
    awaited = int.from_bytes(data[:2], "big"), int.from_bytes(data[2:3], "big")
    # Always the same one in place of one that there is not: the corpus must not depend on how many there are.
    api_key, version = awaited if is_served(*awaited) else (3, 12)
    return decode_response(api_key, version, data[3:])


# ---- targets: record batches and member metadata


def batch_seeds(rng: random.Random) -> list[bytes]:
    """A flag (see ``parse_batch``) and a batch of every codec."""
    seeds = []
    for codec in range(5):
        for producer_id in (-1, 7):
            records = [
                Record(
                    rng.choice((b"key", rng.randbytes(20))),
                    rng.choice((None, b"", b"value", rng.randbytes(100))),
                    timestamp_ms=1_000 + number,
                    headers=(("name", b"x"), ("empty", None)) if number % 2 else (),
                )
                for number in range(rng.randint(1, 5))
            ]
            sequence = 0 if producer_id >= 0 else -1
            batch = build_batch(
                records, codec=codec, producer_id=producer_id, producer_epoch=sequence, base_sequence=sequence
            )
            seeds += [b"\x00" + batch, b"\x01" + batch]
    return seeds


def parse_batch(data: bytes) -> object:
    """With the flag 1, length and checksum are made to fit first: or else nothing behind them is reached."""
    flag, batch = data[:1], bytearray(data[1:])
    if flag == b"\x01" and len(batch) >= HEADER_BYTES:
        batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
        batch[17:21] = crc32c(memoryview(batch)[21:]).to_bytes(4, "big")
    try:
        prepared, _ = prepare_batch(bytes(batch), COMPACTED, 10_000, MAX_DECOMPRESSED_BYTES)
        return list(read_records(prepared, MAX_DECOMPRESSED_BYTES))
    except ApiError as error:
        raise ProtocolError(f"{error.code.name}: {error.message}") from error


def member_seeds(rng: random.Random) -> list[bytes]:
    topics = ["orders", "", "é☃", "a" * 249]
    return [pack_subscription(rng.sample(topics, rng.randint(0, 4))) for _ in range(10)]


def parse_member(data: bytes) -> object:
    return parse_subscription(data)


# ---- targets: tables

#: A column of every kind that a row, a key or a filter reads in its own way.
TABLE_COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("flag", pa.bool_()),
        pa.field("amount", pa.float64()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("data", pa.binary()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([pa.field("x", pa.float32()), pa.field("label", pa.string())])),
        pa.field("counts", pa.map_(pa.string(), pa.int32())),
    ]
)
KEYS = (
    KeyCodec(TABLE_COLUMNS, ("id",), "raw"),
    KeyCodec(TABLE_COLUMNS, ("name",), "raw"),
    KeyCodec(TABLE_COLUMNS, ("name", "id"), "json"),
)


ROWS = {name: make_format(name, {0: TABLE_COLUMNS}, 0, ()) for name in ("row", "json")}


@cache
def table_rows() -> pa.RecordBatch:
    empty = dict.fromkeys(TABLE_COLUMNS.names) | {"id": 0, "name": ""}
    full = {
        "id": -7,
        "name": "é☃",
        "flag": True,
        "amount": 1.5,
        "price": Decimal("12345678.90"),
        "day": date(2024, 2, 29),
        "at": datetime(2024, 2, 29, 23, 59, tzinfo=UTC),
        "data": b"\x00\xff",
        "tags": ["a", None, ""],
        "place": {"x": 0.5, "label": "here"},
        "counts": [("one", 1), ("none", None)],
    }
    return pa.RecordBatch.from_pylist([full, empty], TABLE_COLUMNS)


@cache
def good_rows(row_format: str) -> tuple[bytes, ...]:
    return tuple(ROWS[row_format].from_batch(table_rows()).to_pylist())


def parse_value(row_format: str, data: bytes) -> object:
    """A row between two good ones: what is wrong with it must not spill over."""
    first, last = good_rows(row_format)
    rows = [first, data, last]
    ends = np.cumsum([len(row) for row in rows])
    starts = ends - [len(row) for row in rows]
    with table_errors():
        batch = ROWS[row_format].to_batch(b"".join(rows), starts, ends)
    batch.validate(full=True)
    assert batch.take([0, 2]).equals(table_rows()), "the good rows are as they were"
    return batch


def value_target(row_format: str) -> Target:
    return Target(row_format, lambda _: list(good_rows(row_format)), partial(parse_value, row_format))


def key_seeds(rng: random.Random) -> list[bytes]:
    """The number of a codec, and a canonical key."""
    rows = table_rows()
    return [
        bytes((number,)) + key
        for number, codec in enumerate(KEYS)
        for key in codec.canonical([rows.column(name) for name in codec.primary_key]).to_pylist()
        if key
    ]


def parse_key(data: bytes) -> object:
    codec, key = KEYS[int.from_bytes(data[:1], "big") % len(KEYS)], data[1:]
    with table_errors():
        columns = codec.parse(pa.array([key], pa.binary()))
    assert codec.canonical(columns).to_pylist() == [key], "a key that is taken has no other spelling"
    return columns


def predicate_seeds(rng: random.Random) -> list[bytes]:
    trees: list[Predicate] = [
        Compare(("id",), ">=", 2**70),
        Compare(("place", "label"), "=", "here"),
        Not(Or((In(("name",), ("a", "b", None), negated=True), IsNull(("data",))))),
        And((Prefix(("name",), "é"), Compare(("amount",), "<", 0.5), Compare(("flag",), "!=", True))),
        And((Compare(("price",), "<=", Decimal("1.25")), Compare(("day",), ">", date(2024, 2, 29)))),
        In(("data",), (b"", b"\x00"), negated=False),
        Always(),
        Never(),
    ]
    return [encode(tree) for tree in trees]


def parse_predicate(data: bytes) -> object:
    with table_errors():
        tree = decode(data)
        assert decode(encode(tree)) == tree
        bound = bind(tree, TABLE_COLUMNS)
        bound.key_bounds(("name", "id"))
    return bound.mask(table_rows())


def schema_seeds(rng: random.Random) -> list[bytes]:
    small = pa.schema([pa.field("a", pa.int8(), metadata={"comment": "b"})], metadata={"c": "d"})
    return [pack_schema(TABLE_COLUMNS), pack_schema(small)]


def parse_schema(data: bytes) -> object:
    with table_errors():
        schema = schema_from_client(data)
    assert unpack_schema(pack_schema(schema)).equals(schema)
    return schema


# ---- targets: messages between nodes


def random_node_value(rng: random.Random, kind: msgspec.inspect.Type) -> Any:
    match kind:
        case msgspec.inspect.StructType():
            return kind.cls(**{each.name: random_node_value(rng, each.type) for each in kind.fields})
        case msgspec.inspect.ListType():
            return [random_node_value(rng, kind.item_type) for _ in range(rng.randrange(3))]
        case msgspec.inspect.DictType():
            return {rng.randrange(100): rng.randrange(100) for _ in range(rng.randrange(3))}
        case msgspec.inspect.UnionType():
            return random_node_value(rng, rng.choice(kind.types))
        case msgspec.inspect.MemoryViewType() | msgspec.inspect.BytesType():
            return rng.randbytes(rng.choice((0, 5, 32)))
        case msgspec.inspect.UUIDType():
            return uuid.UUID(int=rng.getrandbits(128))
        case msgspec.inspect.StrType():
            return rng.choice(("", "orders", "é☃"))
        case msgspec.inspect.BoolType():
            return rng.random() < 0.5
        case msgspec.inspect.IntType():
            return rng.choice((-1, 0, 1, 2**40, 2**63 - 1))
        case msgspec.inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({"a": [1, "b"]}))
    return None


def node_seeds(messages: Iterable[type[Any]], rng: random.Random) -> list[bytes]:
    encode_node = msgspec.msgpack.Encoder(uuid_format="bytes").encode
    return [
        encode_node(random_node_value(rng, msgspec.inspect.type_info(message)))
        for message in messages
        for _ in range(5)
    ]


def parse_node_request(data: bytes) -> object:
    """What can be answered is refused with the code of the answer, what cannot with none."""
    try:
        return decode_node_request(memoryview(data))
    except Undecodable as error:
        raise ProtocolError(ClusterErrorCode(error.answer.header.error_code).name) from error
    except ProtocolError as error:
        raise ProtocolError(error.message.partition(":")[0]) from error


def parse_node_response(data: bytes) -> object:
    try:
        return decode_node_response(memoryview(data))
    except ProtocolError as error:
        raise ProtocolError(error.message.partition(":")[0]) from error


#: What a message repeats of the input, or of what a library says: without it there are few kinds of messages.
QUOTED = re.compile(
    r"""(?<=no predicate: ).*|(?<=IPC schema: ).*|(?<=column ).*(?= does not exist)|(?<=table has it: ).*"""
    r"""|b?(["'])(?:\\.|(?!\1).)*(?:\1|…)"""
)


@contextmanager
def table_errors() -> Iterator[None]:
    """What tables refuse, as this driver wants it."""
    try:
        yield
    except TableError as error:
        raise ProtocolError(f"{error.name}: {QUOTED.sub('…', error.message)}") from error


TARGETS = {
    target.name: target
    for target in (
        Target("request", request_seeds, parse_request),
        Target("response", response_seeds, parse_response),
        Target("batch", batch_seeds, parse_batch),
        Target("member", member_seeds, parse_member),
        value_target("row"),
        value_target("json"),
        Target("key", key_seeds, parse_key),
        Target("predicate", predicate_seeds, parse_predicate),
        Target("schema", schema_seeds, parse_schema),
        Target("node_request", partial(node_seeds, REQUESTS), parse_node_request),
        Target("node_response", partial(node_seeds, RESPONSES), parse_node_response),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="default: all")
    parser.add_argument("--save", action="store_true", help="add new kinds of outcomes to the corpus")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    failed = False
    for name in options.target or TARGETS:
        started = time.monotonic()
        report = fuzz(TARGETS[name], options.inputs, options.seed)
        sys.stdout.write(
            f"{name}: seed {options.seed}, {dict(report.outcomes)}, {len(report.kinds)} kinds of outcomes, "
            f"slowest {report.slowest_ms:.1f} ms, {time.monotonic() - started:.0f} s, "
            f"{len(report.findings)} findings\n"
        )
        for data, problem in report.findings[:20]:
            sys.stdout.write(f"  {problem}\n    {data[:400].hex()}\n")
        failed = failed or bool(report.findings)
        if options.save:
            save_corpus(TARGETS[name], report.kinds)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
