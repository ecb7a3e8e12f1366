"""What every MetadataStore must do. A new implementation is added to STORES and must pass unchanged."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from support.memory_store import MemoryStore
from tidemill.config.values import parse_address
from tidemill.control.stores.etcd import EtcdStore
from tidemill.control.stores.etcd_channel import EtcdSettings
from tidemill.control.stores.sqlite import SqliteStore
from tidemill.control.stores.store import (
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Change,
    ChangeBatch,
    Compare,
    Entry,
    MetadataStore,
    MetadataWentBack,
    Put,
    RevisionCompacted,
    StoreClosed,
    StoreLeaseNotFound,
    TransactionTooLarge,
    Txn,
)
from tidemill.errors import MetadataConflict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


class Clock:
    """Time that moves when a test says so."""

    #: How long the leases of a test live.
    lease_ms = 500

    def __init__(self) -> None:
        self.now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms

    async def almost_outlast(self, lease_id: int) -> None:
        """Let so much time pass that a new lease is just still there."""
        self.now_ms += self.lease_ms - 1

    async def outlast(self, lease_id: int) -> None:
        """Let so much time pass that the lease has expired."""
        self.now_ms += self.lease_ms


class EtcdClock(Clock):
    """Time that passes by itself: etcd's."""

    # Long enough for a test that is held up before it uses its lease.
    lease_ms = 3_000

    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self._server = server

    async def almost_outlast(self, lease_id: int) -> None:
        """Do nothing: how much time has passed is not known."""

    async def outlast(self, lease_id: int) -> None:
        await self._server.outlast(lease_id)


_prefixes = itertools.count(1)


def open_store(
    kind: str,
    directory: Path,
    clock: Clock,
    history_revisions: int = 1_000,
    server: EtcdServer | None = None,
) -> MetadataStore:
    if server is not None:
        settings = EtcdSettings((parse_address(server.endpoints),), deadline_ms=30_000)
        return EtcdStore(settings, f"tidemill/test-{next(_prefixes)}/", read_page_keys=3)
    if kind == "memory":
        return MemoryStore(history_revisions=history_revisions, clock_ms=clock)
    return SqliteStore(directory / "metadata.db", history_revisions=history_revisions, clock_ms=clock)


STORES = ("memory", "sqlite", "etcd")
LOCAL_STORES = ("memory", "sqlite")


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if not has_etcd():
        pytest.skip(NO_ETCD)
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> EtcdServer | None:
    """The etcd of the test, if it needs one."""
    if kind != "etcd":
        return None
    started: EtcdServer = request.getfixturevalue("etcd_server")
    return started


@pytest.fixture
def clock(server: EtcdServer | None) -> Clock:
    return Clock() if server is None else EtcdClock(server)


@pytest.fixture
def opened(
    kind: str, server: EtcdServer | None, tmp_path: Path, clock: Clock
) -> Callable[..., AbstractAsyncContextManager[MetadataStore]]:
    @asynccontextmanager
    async def context(history_revisions: int = 1_000) -> AsyncIterator[MetadataStore]:
        store = open_store(kind, tmp_path, clock, history_revisions, server)
        try:
            yield store
        finally:
            await store.close()
            if server is not None:
                await server.revoke_leases()

    return context


def put(key: str, value: bytes = b"x", lease_id: int = 0) -> Txn:
    return Txn(puts=(Put(key, value, lease_id),))


async def take(batches: AsyncIterator[ChangeBatch], count: int) -> list[ChangeBatch]:
    async with asyncio.timeout(120):
        return [await anext(batches) for _ in range(count)]


async def test_a_commit_is_read_back_with_its_revision(opened: Any) -> None:
    async with opened() as store:
        first = await store.commit(put("a/1", b"one"))
        second = await store.commit(Txn(puts=(Put("a/2", b"two"), Put("b", b"three"))))
        assert second > first
        snapshot = await store.read("a/")
        assert snapshot.revision == second
        assert snapshot.entries == {"a/1": Entry(b"one", first), "a/2": Entry(b"two", second)}
        assert set((await store.read()).entries) == {"a/1", "a/2", "b"}


async def test_a_deleted_key_is_gone_and_a_delete_of_nothing_changes_nothing(opened: Any) -> None:
    async with opened() as store:
        await store.commit(put("a"))
        revision = await store.commit(Txn(deletes=("a",)))
        assert (await store.read()).entries == {}
        assert await store.commit(Txn(deletes=("a", "b"))) == revision
        assert (await store.read()).revision == revision


async def test_a_read_at_a_revision_sees_the_past(opened: Any) -> None:
    async with opened() as store:
        first = await store.commit(put("a", b"old"))
        second = await store.commit(Txn(puts=(Put("a", b"new"), Put("b", b"b"))))
        await store.commit(Txn(deletes=("a",)))
        assert (await store.read(revision=first)).entries == {"a": Entry(b"old", first)}
        assert (await store.read(revision=second)).entries["a"] == Entry(b"new", second)
        with pytest.raises(ValueError, match="does not exist yet"):
            await store.read(revision=second + 100)


async def test_a_failed_compare_writes_nothing(opened: Any) -> None:
    async with opened() as store:
        revision = await store.commit(put("a"))
        txn = Txn(compares=(Compare("a", revision), Compare("b", 7)), puts=(Put("c", b"c"),), deletes=("a",))
        with pytest.raises(MetadataConflict, match="'b' is at revision 0"):
            await store.commit(txn)
        snapshot = await store.read()
        assert snapshot.revision == revision
        assert set(snapshot.entries) == {"a"}


async def test_compare_with_zero_means_absent_also_after_a_delete(opened: Any) -> None:
    async with opened() as store:
        create = Txn(compares=(Compare("a", 0),), puts=(Put("a", b"1"),))
        await store.commit(create)
        with pytest.raises(MetadataConflict):
            await store.commit(create)
        await store.commit(Txn(deletes=("a",)))
        await store.commit(create)
        assert "a" in (await store.read()).entries


async def test_of_two_writers_with_the_same_guard_one_wins(opened: Any) -> None:
    async with opened() as store:
        revision = await store.commit(put("a", b"0"))
        guarded = [Txn(compares=(Compare("a", revision),), puts=(Put("a", value),)) for value in (b"1", b"2")]
        outcomes = await asyncio.gather(*map(store.commit, guarded), return_exceptions=True)
        assert sorted(isinstance(outcome, MetadataConflict) for outcome in outcomes) == [False, True]


@pytest.mark.parametrize(
    "txn",
    [
        Txn(puts=tuple(Put(f"k{i}", b"") for i in range(TXN_OPERATIONS_MAX + 1))),
        Txn(
            compares=tuple(Compare(f"k{i}", 0) for i in range(100)), deletes=tuple(f"k{i}" for i in range(29))
        ),
        put("k", bytes(VALUE_BYTES_MAX + 1)),
        Txn(puts=tuple(Put(f"k{i}", bytes(REQUEST_BYTES_MAX // 2)) for i in range(2))),
    ],
    ids=["operations", "compares count", "value", "request"],
)
async def test_a_transaction_over_a_limit_is_refused_before_anything_happens(opened: Any, txn: Txn) -> None:
    async with opened() as store:
        with pytest.raises(TransactionTooLarge, match="over the limit"):
            await store.commit(txn)
        assert (await store.read()).entries == {}


async def test_a_transaction_at_the_limits_is_accepted(opened: Any) -> None:
    async with opened() as store:
        await store.commit(put("k", bytes(VALUE_BYTES_MAX)))
        await store.commit(Txn(puts=tuple(Put(f"k{i}", b"") for i in range(TXN_OPERATIONS_MAX))))
        assert len((await store.read()).entries) == TXN_OPERATIONS_MAX + 1


@pytest.mark.parametrize("key", ["", "with space", "ü", "a\n", "k" * 513])
async def test_a_key_that_is_not_short_printable_ascii_is_refused(opened: Any, key: str) -> None:
    async with opened() as store:
        with pytest.raises(ValueError, match="printable ASCII"):
            await store.commit(put(key))


async def test_a_transaction_that_writes_a_key_twice_is_refused(opened: Any) -> None:
    async with opened() as store:
        with pytest.raises(ValueError, match="same key twice"):
            await store.commit(Txn(puts=(Put("a", b""),), deletes=("a",)))


async def test_a_watch_delivers_past_and_future_transactions_whole_and_in_order(opened: Any) -> None:
    async with opened() as store:
        await store.commit(put("before"))
        first = await store.commit(Txn(puts=(Put("b", b"2"), Put("a", b"1"))))
        watch = store.watch(first)
        assert await take(watch, 1) == [ChangeBatch(first, (Change("a", b"1"), Change("b", b"2")))]
        waiting = asyncio.create_task(take(watch, 2))
        await asyncio.sleep(0)
        second = await store.commit(Txn(puts=(Put("c", b"3"),), deletes=("a",)))
        third = await store.commit(put("c", b"4"))
        assert await waiting == [
            ChangeBatch(second, (Change("a", None), Change("c", b"3"))),
            ChangeBatch(third, (Change("c", b"4"),)),
        ]
        await watch.aclose()


async def test_a_slow_watch_misses_nothing_of_many_transactions(opened: Any) -> None:
    async with opened() as store:
        watch = store.watch(1)
        revisions = [await store.commit(put("k", str(i).encode())) for i in range(150)]
        batches = await take(watch, 150)
        assert [batch.revision for batch in batches] == revisions
        assert [batch.changes[0].value for batch in batches] == [str(i).encode() for i in range(150)]
        await watch.aclose()


async def test_a_watch_from_a_compacted_revision_says_so(opened: Any) -> None:
    async with opened() as store:
        await store.commit(put("a"))
        revision = await store.commit(Txn(puts=(Put("b", b"b"),), deletes=("a",)))
        after = await store.commit(put("c"))
        await store.compact(revision)
        for gone in (revision - 1, revision):
            with pytest.raises(RevisionCompacted, match="read everything again"):
                await take(store.watch(gone), 1)
        with pytest.raises(RevisionCompacted):
            await store.read(revision=revision - 1)
        assert set((await store.read(revision=revision)).entries) == {"b"}
        watch = store.watch(revision + 1)
        assert await take(watch, 1) == [ChangeBatch(after, (Change("c", b"x"),))]
        await watch.aclose()


async def test_a_watch_behind_a_revision_that_the_store_does_not_have_says_that_it_went_back(
    opened: Any,
) -> None:
    async with opened() as store:
        revision = await store.commit(put("a"))
        with pytest.raises(MetadataWentBack, match="lost data or was restored"):
            await take(store.watch(revision + 100), 1)
        watch = store.watch(revision + 1)
        waiting = asyncio.create_task(take(watch, 1))
        await asyncio.sleep(0)
        after = await store.commit(put("b"))
        assert [batch.revision for batch in await waiting] == [after]
        await watch.aclose()


async def test_what_is_compacted_stays_so_and_what_is_not_there_yet_cannot_be(opened: Any) -> None:
    async with opened() as store:
        await store.commit(put("a", b"1"))
        revision = await store.commit(put("a", b"2"))
        await store.compact(revision)
        await store.compact(revision)
        await store.compact(revision - 1)
        with pytest.raises(ValueError, match="does not exist yet"):
            await store.compact(revision + 100)
        assert (await store.read()).entries == {"a": Entry(b"2", revision)}


@pytest.mark.parametrize("kind", LOCAL_STORES, indirect=True)
async def test_old_history_is_compacted_without_being_told(opened: Any) -> None:
    async with opened(history_revisions=10) as store:
        revisions = [await store.commit(put(f"k{i % 3}")) for i in range(50)]
        with pytest.raises(RevisionCompacted, match="read everything again"):
            await take(store.watch(revisions[0]), 1)
        with pytest.raises(RevisionCompacted):
            await store.read(revision=revisions[0])
        watch = store.watch(revisions[-10])
        assert [batch.revision for batch in await take(watch, 10)] == revisions[-10:]
        await watch.aclose()


@pytest.mark.parametrize("kind", LOCAL_STORES, indirect=True)
async def test_a_watch_that_falls_behind_the_history_says_so_instead_of_skipping(opened: Any) -> None:
    async with opened(history_revisions=10) as store:
        first = await store.commit(put("k"))
        watch = store.watch(first)
        await take(watch, 1)
        for _ in range(50):
            await store.commit(put("k"))
        with pytest.raises(RevisionCompacted):
            await take(watch, 1)


async def test_compaction_keeps_the_state_and_the_reads_of_kept_revisions(opened: Any) -> None:
    async with opened(history_revisions=10) as store:
        old = await store.commit(Txn(puts=(Put("stays", b"s"), Put("goes", b"g"))))
        await store.commit(Txn(deletes=("goes",)))
        revisions = [await store.commit(put("k", str(i).encode())) for i in range(50)]
        await store.compact(revisions[-10])
        assert (await store.read()).entries == {
            "k": Entry(b"49", revisions[-1]),
            "stays": Entry(b"s", old),
        }
        past = await store.read(revision=revisions[-5])
        assert past.entries == {"k": Entry(b"45", revisions[-5]), "stays": Entry(b"s", old)}


async def test_keys_of_a_lease_disappear_together_when_it_expires(
    opened: Any, clock: Clock, server: EtcdServer | None
) -> None:
    async with opened() as store:
        lease = await store.grant_lease(clock.lease_ms)
        revision = await store.commit(
            Txn(puts=(Put("a", b"", lease), Put("b", b"", lease), Put("free", b"")))
        )
        await clock.almost_outlast(lease)
        # How much time has passed at etcd nobody knows: there it may have expired by now.
        newest = None if server is None else revision
        assert set((await store.read(revision=newest)).entries) == {"a", "b", "free"}
        await clock.outlast(lease)
        assert set((await store.read()).entries) == {"free"}
        watch = store.watch(revision + 1)
        assert [batch.changes for batch in await take(watch, 1)] == [(Change("a", None), Change("b", None))]
        await watch.aclose()


async def test_a_waiting_watch_sees_a_lease_expire_without_any_other_call(opened: Any, clock: Clock) -> None:
    async with opened() as store:
        revision = await store.commit(put("other"))
        watch = store.watch(revision + 1)
        waiting = asyncio.create_task(take(watch, 2))
        await asyncio.sleep(0)
        lease = await store.grant_lease(clock.lease_ms)
        await store.commit(put("a", b"", lease))
        clock.now_ms += clock.lease_ms
        assert [batch.changes for batch in await waiting] == [(Change("a", b""),), (Change("a", None),)]
        await watch.aclose()


async def test_a_lease_that_is_kept_alive_lives_on(opened: Any, clock: Clock) -> None:
    async with opened() as store:
        lease = await store.grant_lease(clock.lease_ms)
        await store.commit(put("a", b"", lease))
        for _ in range(3):
            await clock.almost_outlast(lease)
            await store.keep_alive(lease)
        assert "a" in (await store.read()).entries


async def test_a_lease_that_is_gone_cannot_be_used(opened: Any, clock: Clock) -> None:
    async with opened() as store:
        expired, revoked = await store.grant_lease(clock.lease_ms), await store.grant_lease(60_000)
        await store.commit(put("a", b"", revoked))
        await store.revoke(revoked)
        await clock.outlast(expired)
        assert (await store.read()).entries == {}
        for lease in (expired, revoked, 999):
            with pytest.raises(StoreLeaseNotFound):
                await store.keep_alive(lease)
            with pytest.raises(StoreLeaseNotFound):
                await store.commit(Txn(puts=(Put("a", b"free"), Put("b", b"", lease))))
            with pytest.raises(StoreLeaseNotFound):
                await store.revoke(lease)
        assert (await store.read()).entries == {}


async def test_a_put_without_the_lease_unbinds_the_key(opened: Any, clock: Clock) -> None:
    async with opened() as store:
        lease = await store.grant_lease(clock.lease_ms)
        await store.commit(put("a", b"", lease))
        await store.commit(put("a", b"mine"))
        await clock.outlast(lease)
        assert "a" in (await store.read()).entries


async def test_closing_ends_watches_and_refuses_calls(opened: Any) -> None:
    async with opened() as store:
        watch = store.watch(1)
        waiting = asyncio.create_task(anext(watch, None))
        await asyncio.sleep(0)
        await store.close()
        async with asyncio.timeout(120):
            assert await waiting is None
        with pytest.raises(StoreClosed):
            await store.commit(put("a"))
        with pytest.raises(StoreClosed):
            await store.read()


KEYS = st.sampled_from(["a", "a/b", "a/c", "b", "c/d"])


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls against a dictionary, with a watch that must rebuild the dictionary."""

    kind = "memory"
    history_revisions = 8
    server: EtcdServer | None = None

    @initialize()
    def open(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.store = open_store(self.kind, self.directory, self.clock, self.history_revisions, self.server)
        self.model: dict[str, tuple[bytes, int, int]] = {}
        # etcd's revisions go on from those of other tests.
        self.revision = self.first_revision = self.run(self.store.read()).revision
        self.past: dict[int, dict[str, Entry]] = {self.revision: {}}
        self.leases: dict[int, int] = {}
        self.watch = self.store.watch(self.revision + 1)
        self.watched: dict[str, bytes] = {}
        self.watched_revision = self.revision

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.watch.aclose())
            self.loop.run_until_complete(self.store.close())
            if self.server is not None:
                self.loop.run_until_complete(self.server.revoke_leases())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            shutil.rmtree(self.directory)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def state(self) -> dict[str, Entry]:
        return {key: Entry(value, revision) for key, (value, revision, _) in self.model.items()}

    def moved(self) -> None:
        self.revision += 1
        self.past[self.revision] = self.state()

    def expire(self) -> None:
        for lease in [lease for lease, deadline in self.leases.items() if deadline <= self.clock.now_ms]:
            self.end_lease(lease)

    def end_lease(self, lease: int) -> None:
        del self.leases[lease]
        bound = [key for key, (_, _, holder) in self.model.items() if holder == lease]
        for key in bound:
            del self.model[key]
        if bound:
            self.moved()

    @rule(
        puts=st.dictionaries(KEYS, st.binary(max_size=4), max_size=3),
        deletes=st.sets(KEYS, max_size=3),
        compares=st.dictionaries(KEYS, st.booleans(), max_size=2),
        with_lease=st.booleans(),
    )
    def commit(self, puts: Any, deletes: Any, compares: Any, with_lease: Any) -> None:
        self.expire()
        deletes = deletes - puts.keys()
        lease = max(self.leases) if with_lease and self.leases else 0
        seen = {key: self.model[key][1] if key in self.model else 0 for key in compares}
        txn = Txn(
            compares=tuple(
                Compare(key, seen[key] if right else seen[key] + 1) for key, right in compares.items()
            ),
            puts=tuple(Put(key, value, lease) for key, value in puts.items()),
            deletes=tuple(deletes),
        )
        if not all(compares.values()):
            with pytest.raises(MetadataConflict):
                self.run(self.store.commit(txn))
            return
        changed = bool(puts) or any(key in self.model for key in deletes)
        for key, value in puts.items():
            self.model[key] = (value, self.revision + 1, lease)
        for key in deletes:
            self.model.pop(key, None)
        if changed:
            self.moved()
        assert self.run(self.store.commit(txn)) == self.revision

    @rule(ttl_ms=st.integers(1, 50))
    def grant(self, ttl_ms: int) -> None:
        self.expire()
        if self.server is not None:
            # Its time is not the test's: let no lease expire by itself.
            ttl_ms += 600_000
        lease = self.run(self.store.grant_lease(ttl_ms))
        assert lease not in self.leases
        self.leases[lease] = self.clock.now_ms + ttl_ms

    @rule(elapsed_ms=st.integers(1, 40))
    def time_passes(self, elapsed_ms: int) -> None:
        self.clock.now_ms += elapsed_ms

    @rule()
    def revoke_oldest(self) -> None:
        self.expire()
        if self.leases:
            lease = min(self.leases)
            self.run(self.store.revoke(lease))
            self.end_lease(lease)

    @rule()
    def compact(self) -> None:
        self.expire()
        self.run(self.store.read())
        self.run(self.store.compact(max(self.first_revision, self.revision - self.history_revisions)))

    @rule(prefix=st.sampled_from(["", "a", "a/", "c", "z"]))
    def read(self, prefix: str) -> None:
        self.expire()
        snapshot = self.run(self.store.read(prefix))
        assert snapshot.revision == self.revision
        assert snapshot.entries == {k: e for k, e in self.state().items() if k.startswith(prefix)}

    @rule(back=st.integers(0, 8))
    def read_past(self, back: int) -> None:
        self.expire()
        revision = max(self.first_revision, self.revision - back)
        assert self.run(self.store.read(revision=revision)).entries == self.past[revision]

    @rule()
    def follow_the_watch(self) -> None:
        self.expire()
        self.run(self.store.read())
        while self.watched_revision < self.revision:
            try:
                (batch,) = self.run(take(self.watch, 1))
            except RevisionCompacted:
                assert self.revision - self.watched_revision > self.history_revisions
                self.run(self.watch.aclose())
                self.watched = {key: entry.value for key, entry in self.state().items()}
                self.watched_revision = self.revision
                self.watch = self.store.watch(self.revision + 1)
                return
            assert batch.revision == self.watched_revision + 1
            for change in batch.changes:
                if change.value is None:
                    del self.watched[change.key]
                else:
                    self.watched[change.key] = change.value
            self.watched_revision = batch.revision
        assert self.watched == {key: entry.value for key, entry in self.state().items()}

    @invariant()
    def revisions_of_keys_are_not_above_the_store(self) -> None:
        if hasattr(self, "model"):
            assert all(revision <= self.revision for _, revision, _ in self.model.values())


class SqliteMachine(StoreMachine):
    kind = "sqlite"

    @rule()
    def reopen(self) -> None:
        """All is there again, except what was bound to a lease."""
        self.expire()
        self.run(self.store.read())
        self.run(self.watch.aclose())
        self.run(self.store.close())
        self.store = open_store(self.kind, self.directory, self.clock, self.history_revisions)
        bound = [key for key, (_, _, lease) in self.model.items() if lease]
        for key in bound:
            del self.model[key]
        if bound:
            self.moved()
        self.leases.clear()
        self.watch = self.store.watch(self.watched_revision + 1)


class EtcdMachine(StoreMachine):
    kind = "etcd"


TestMemoryStoreAgainstDictionary = StoreMachine.TestCase
TestMemoryStoreAgainstDictionary.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSqliteStoreAgainstDictionary = SqliteMachine.TestCase
TestSqliteStoreAgainstDictionary.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.usefixtures("etcd_of_the_machine")
class TestEtcdStoreAgainstDictionary(EtcdMachine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


@pytest.fixture(scope="class")
def etcd_of_the_machine(etcd_server: EtcdServer) -> Iterator[None]:
    EtcdMachine.server = etcd_server
    yield
    EtcdMachine.server = None
