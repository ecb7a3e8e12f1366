"""What a user finds in ``tidemill`` before having read anything: names, signatures, types."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
import rlcompleter
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tidemill
from tidemill.client import sync_client, sync_table
from tidemill.client.async_client import AsyncTidemill
from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction
from tidemill.client.cursors.cursor import AsyncCursor
from tidemill.client.cursors.sync_cursor import Cursor, CursorTransaction
from tidemill.client.share.consumer import AsyncShare
from tidemill.client.share.transaction import AsyncShareTransaction
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_share import Share, ShareTransaction
from tidemill.client.sync_table import BucketScanner, Follow, Scan, Table, TableLease
from tidemill.client.sync_worker import Worker
from tidemill.client.tables.bucket_scanner import AsyncBucketScanner
from tidemill.client.tables.follow import AsyncFollow
from tidemill.client.tables.lease import AsyncLease
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.table_scan import AsyncScan
from tidemill.client.workers.worker import AsyncWorker
from tidemill.embedded import node as embedded

ROOT = Path(__file__).parents[3]

#: Each class of the blocking client with its twin.
TWINS = (
    (Tidemill, AsyncTidemill),
    (Table, AsyncTable),
    (Scan, AsyncScan),
    (Share, AsyncShare),
    (Worker, AsyncWorker),
    (TableLease, AsyncLease),
    (Follow, AsyncFollow),
    (BucketScanner, AsyncBucketScanner),
    (Cursor, AsyncCursor),
    (CursorTransaction, AsyncCursorTransaction),
    (ShareTransaction, AsyncShareTransaction),
)
#: What the parts of the async client ask each other for.
INNER_NAMES = {
    "begin",
    "confirm",
    "go_to",
    "go_to_stored",
    "plan_commit",
    "store",
    "committed_ends",
    "held_by",
    "pin",
    "release_pin",
    "renew",
    "starts",
    "topic_of",
    "topic_partitions",
}
#: What links, workers and records ask of a share consumer.
SHARE_INNER_NAMES = {
    "check_held",
    "ended_in_transaction",
    "failed",
    "fetched",
    "give_back",
    "hand_over",
    "holds_of",
    "has_no_more",
    "is_drained",
    "leave_locked",
    "lost",
    "moved",
    "records",
    "renew",
    "settle",
    "settled",
    "take_blocking",
    "took",
    "until_failed",
    "wake_threads",
    "wanted",
}


def test_the_package_shows_its_names_without_loading_what_is_behind_them() -> None:
    program = (
        "import sys, tidemill; before = set(sys.modules); print(*dir(tidemill));"
        "assert set(sys.modules) == before and 'pyarrow' not in before and 'tidemill.server' not in before"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.split()
    assert set(tidemill.__all__) <= set(shown)
    assert not [name for name in shown if name.startswith("_") and not name.startswith("__")]
    assert "Any" not in shown


def test_every_name_that_is_shown_is_there_and_documented() -> None:
    for name in tidemill.__all__:
        assert inspect.getdoc(getattr(tidemill, name)), name
    assert "spark" in dir(__import__("tidemill.spark"))


@pytest.mark.parametrize("module", [tidemill, sync_client, sync_table, embedded])
def test_the_examples_in_docstrings_do_what_they_say(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


def test_completion_offers_the_names() -> None:
    offered = rlcompleter.Completer({"tidemill": tidemill}).attr_matches("tidemill.")
    assert {"tidemill.open(", "tidemill.connect(", "tidemill.Table("} <= {
        each.rstrip(")") for each in offered
    }


def test_a_misspelt_name_is_answered_with_the_one_that_was_meant() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import tidemill; tidemill.conect()"], capture_output=True, text=True
    )
    assert "has no attribute 'conect'. Did you mean: 'connect'?" in done.stderr


# --- the blocking client and its twin


def public_names(kind: type) -> set[str]:
    """Methods and properties for users."""
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("plain", "awaiting", "only_plain", "only_awaiting"),
    [
        # Attributes of objects are no names of classes.
        (Tidemill, AsyncTidemill, {"ping", "run", "iterate", "bootstrap_servers"}, set()),
        (Table, AsyncTable, {"definition"}, INNER_NAMES),
        # A stream of batches for whoever reads Arrow cannot be awaited.
        (Scan, AsyncScan, {"to_reader"}, {"batches"}),
        (Share, AsyncShare, set(), SHARE_INNER_NAMES),
        # The blocking one begins and measures through these.
        (Worker, AsyncWorker, {"name", "topic"}, {"begin", "engine"}),
        (TableLease, AsyncLease, set(), set()),
        (Follow, AsyncFollow, set(), {"batches"}),
        (BucketScanner, AsyncBucketScanner, {"state", "log_offset", "next_key"}, set()),
    ],
)
def test_sync_and_async_clients_have_the_same_names(
    plain: type, awaiting: type, only_plain: set[str], only_awaiting: set[str]
) -> None:
    assert public_names(plain) - only_plain == public_names(awaiting) - only_awaiting


def methods_of_both() -> list[tuple[str, object, object]]:
    found = []
    for plain, awaiting in TWINS:
        for name in sorted(public_names(plain) & public_names(awaiting)):
            ours, theirs = getattr(plain, name), getattr(awaiting, name)
            if isinstance(ours, property):
                ours, theirs = ours.fget, theirs.fget
            found.append((f"{plain.__name__}.{name}", ours, theirs))
    return [*found, ("connect", tidemill.connect, tidemill.connect_async)]


@pytest.mark.parametrize(
    ("ours", "theirs"), [pytest.param(ours, theirs, id=name) for name, ours, theirs in methods_of_both()]
)
def test_sync_and_async_calls_take_and_give_the_same(ours: object, theirs: object) -> None:
    """Names, order, kinds, defaults and types of all parameters, and the type of the result."""
    assert callable(ours)
    assert callable(theirs)
    shown = str(inspect.signature(ours))
    assert shown == in_plain_words(str(inspect.signature(theirs)))
    assert "**" not in shown
    assert inspect.getdoc(ours), "has no docstring"


def in_plain_words(text: str) -> str:
    """The same with the names of the blocking client."""
    for plain, awaiting in TWINS:
        text = re.sub(rf"\b{awaiting.__name__}\b", plain.__name__, text)
    return text


def test_help_shows_methods_as_those_of_the_blocking_client() -> None:
    shown = pydoc.plain(pydoc.render_doc(Table))
    assert "scan(self, columns: 'Sequence[str] | None' = None, where: 'Any' = None" in shown
    assert "-> 'Scan'" in shown
    assert "``where`` is a SQL predicate or a pyarrow expression" in shown
    assert "Async" not in shown
    assert Table.scan.__qualname__ == "Table.scan"


def test_docstrings_stand_for_themselves() -> None:
    for plain, _ in TWINS:
        for name in public_names(plain):
            text = inspect.getdoc(getattr(plain, name)) or ""
            assert not re.search(r"\bSee ``", text), f"{plain.__name__}.{name} sends its reader elsewhere"


PROGRAM = """
import tidemill

with tidemill.open() as db:
    reveal_type(db)  # N: tidemill.embedded.node.EmbeddedNode
    orders = db.table("shop.orders")

with tidemill.connect("127.0.0.1:9092") as other:
    reveal_type(other)  # N: tidemill.client.sync_client.Tidemill

tidemill.open(auto_create_topic=True)  # E: Unexpected keyword argument "auto_create_topic"
tidemill.open(default_partitions="3")  # E: Argument "default_partitions" to "open_node" has
tidemill.open("./data", kv_block_cache_bytes="64 MiB", advertised_listener="127.0.0.1:9092", rack=None)
tidemill.opne()  # E: Module has no attribute "opne"
orders.scan(colums=["id"])  # E: Unexpected keyword argument "colums"
orders.scan(limit="ten")  # E: Argument "limit" has incompatible type "str"; expected "int | None"
orders.follow(untilnow=True)  # E: Unexpected keyword argument "untilnow"
orders.bucket_scanner(0, start="x")  # E: Unexpected keyword argument "start"
orders.head(colum="id")  # E: Unexpected keyword argument "colum"
orders.lookup(None)  # E: No overload variant matches argument type "None"
reveal_type(orders.lookup(1))  # N: dict[str, Any] | None
reveal_type(orders.lookup(("eu", 1)))  # N: dict[str, Any] | None
reveal_type(orders.lookup({"id": 1}))  # N: dict[str, Any] | None
reveal_type(orders.lookup("eu"))  # N: dict[str, Any] | None
orders.lookup(1)["id"]  # E: Value of type "dict[str, Any] | None" is not indexable
orders.lookup([1, 2]).column("id")
reveal_type(orders.count(where="id > 1"))  # N: int
rows = iter(orders.scan())
rows.close()
for batch in orders.follow():
    reveal_type(batch.bucket)  # N: int


async def ask() -> None:
    async with await tidemill.connect_async("127.0.0.1:9092") as awaited:
        table = await awaited.table("shop.orders")
        reveal_type(await table.lookup(1))  # N: dict[str, Any] | None
        table.scan(colums=["id"])  # E: Unexpected keyword argument "colums"
"""


def test_mypy_knows_every_argument_and_what_a_look_up_gives(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is installed with the extra 'dev'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-codes"]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, *options, str(program)], cwd=ROOT, capture_output=True, text=True)
    said: dict[int, list[str]] = {}
    for output in done.stdout.splitlines():
        _, at, kind, text = output.split(":", 3)
        if kind.strip() == "error" or "Revealed type" in text:
            said.setdefault(int(at), []).append(f"{kind.strip()[0].upper()}:{text}")
    for number, line in enumerate(PROGRAM.splitlines(), start=1):
        _, _, expected = line.partition("  # ")
        found = said.pop(number, [])
        assert len(found) == bool(expected), f"{line}\n{found}"
        if expected:
            kind, text = expected.split(": ", 1)
            assert found[0].startswith(kind), f"{line}\n{found}"
            assert text in found[0], f"{line}\n{found}"
    assert not said, done.stdout + done.stderr
