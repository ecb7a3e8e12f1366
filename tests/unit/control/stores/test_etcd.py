"""The store in a real etcd: what only happens there. What every store must do is in ``test_store.py``."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc
from hypothesis import given
from hypothesis import strategies as st

from support.etcd import NO_ETCD, EtcdServer, has_etcd
from tidemill.config.values import Address, parse_address
from tidemill.control.stores import etcd
from tidemill.control.stores.etcd import EtcdStore, TransactionAssembler
from tidemill.control.stores.etcd_channel import EtcdSettings
from tidemill.control.stores.store import (
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Change,
    ChangeBatch,
    Compare,
    MetadataWentBack,
    OutcomeUnknown,
    Put,
    StoreClosed,
    StoreLeaseNotFound,
    StoreUnavailable,
    Txn,
    request_bytes,
)
from tidemill.errors import ConfigError, MetadataConflict

#: Nobody listens there: the port needs a privileged process.
NOBODY = Address("127.0.0.1", 1)

_prefixes = itertools.count(1)


def new_prefix() -> str:
    return f"tidemill/test-{next(_prefixes)}/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if not has_etcd():
        pytest.skip(NO_ETCD)
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def settings_of(server: EtcdServer, deadline_ms: int = 30_000) -> EtcdSettings:
    return EtcdSettings((parse_address(server.endpoints),), deadline_ms=deadline_ms)


@asynccontextmanager
async def opened(settings: EtcdSettings, prefix: str | None = None, **more: Any) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(settings, prefix or new_prefix(), **more)
    try:
        yield store
    finally:
        await store.close()


def put(key: str, value: bytes = b"x", lease_id: int = 0) -> Txn:
    return Txn(puts=(Put(key, value, lease_id),))


async def take(batches: AsyncIterator[ChangeBatch], count: int) -> list[ChangeBatch]:
    async with asyncio.timeout(120):
        return [await anext(batches) for _ in range(count)]


async def commit_once_it_works(store: EtcdStore, txn: Txn) -> int:
    """Commit as soon as the store is available again. For transactions that may be made twice."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await store.commit(txn)
            except (StoreUnavailable, OutcomeUnknown):
                await asyncio.sleep(0.02)


async def test_two_clusters_in_one_etcd_do_not_see_each_other(server: EtcdServer) -> None:
    async with (
        opened(settings_of(server), "tidemill/a/") as one,
        opened(settings_of(server), "tidemill/ab/") as other,
    ):
        watch = one.watch(1)
        await other.commit(put("k", b"other"))
        revision = await one.commit(put("k", b"one"))
        assert {key: entry.value for key, entry in (await one.read()).entries.items()} == {"k": b"one"}
        assert await take(watch, 1) == [ChangeBatch(revision, (Change("k", b"one"),))]
        await watch.aclose()


async def test_a_read_of_many_pages_is_of_one_revision(server: EtcdServer) -> None:
    async with opened(settings_of(server), read_page_keys=2) as store:
        keys = tuple(f"k{number:02}" for number in range(21))

        async def writer() -> None:
            for round_ in itertools.count():
                await store.commit(Txn(puts=tuple(Put(key, str(round_).encode()) for key in keys)))

        await store.commit(Txn(puts=tuple(Put(key, b"") for key in keys)))
        writing = asyncio.create_task(writer())
        for _ in range(20):
            stored = await store.read()
            assert tuple(stored.entries) == keys
            assert len({entry.value for entry in stored.entries.values()}) == 1
        writing.cancel()


async def test_a_read_starts_over_if_its_revision_is_compacted_between_two_pages(server: EtcdServer) -> None:
    prefix = new_prefix()
    async with opened(settings_of(server), prefix, read_page_keys=1) as store:
        await store.commit(Txn(puts=(Put("a", b"1"), Put("b", b"1"))))
        call = store._call
        pages = itertools.count(1)

        async def call_and_compact(*arguments: Any, **options: Any) -> Any:
            page = await call(*arguments, **options)
            if next(pages) == 1:
                store._call = call  # type: ignore[method-assign]
                await store.compact(await store.commit(Txn(puts=(Put("a", b"2"), Put("b", b"2")))))
            return page

        store._call = call_and_compact  # type: ignore[method-assign]
        assert {entry.value for entry in (await store.read()).entries.values()} == {b"2"}


async def test_a_transaction_of_many_keys_is_one_batch_also_for_a_watch_that_catches_up(
    server: EtcdServer,
) -> None:
    async with opened(settings_of(server)) as store:
        watch = store.watch((await store.read()).revision + 1)
        waiting = asyncio.create_task(take(watch, 1))
        await asyncio.sleep(0)
        puts = tuple(Put(f"k{number:03}", b"v" * 300) for number in range(60))
        revision = await store.commit(Txn(puts=puts))
        expected = [ChangeBatch(revision, tuple(Change(each.key, each.value) for each in puts))]
        assert await waiting == expected
        late = store.watch(revision)
        assert await take(late, 1) == expected
        await watch.aclose()
        await late.aclose()


async def test_a_watch_that_catches_up_with_more_than_a_message_holds_gets_whole_transactions(
    server: EtcdServer,
) -> None:
    """etcd then sends fragments, whose borders are not those of the transactions."""
    async with opened(settings_of(server)) as store:
        batches = []
        for letter in b"abcdefgh":
            puts = tuple(Put(f"k{number:02}", bytes([letter]) * 40_000) for number in range(30))
            revision = await store.commit(Txn(puts=puts))
            batches.append(ChangeBatch(revision, tuple(Change(each.key, each.value) for each in puts)))
        watch = store.watch(batches[0].revision)
        assert await take(watch, len(batches)) == batches
        await watch.aclose()


@pytest.mark.parametrize("operations", [2, TXN_OPERATIONS_MAX])
async def test_whatever_is_within_the_limits_fits_into_a_request_of_etcd(
    server: EtcdServer, operations: int
) -> None:
    """The prefix comes on top of the keys, and each guard's key is sent twice."""
    prefix = f"tidemill/{'n' * 64}/"
    guards = tuple(Compare("g" * 500 + f"{number:03}", 0) for number in range(operations // 2))
    names = tuple("k" * 500 + f"{number:03}" for number in range(operations // 2))
    overhead = request_bytes([(guard.key, 0) for guard in guards] + [(name, 0) for name in names])
    size = min((REQUEST_BYTES_MAX - overhead) // len(names), 1024 * 1024)
    txn = Txn(compares=guards, puts=tuple(Put(name, bytes(size)) for name in names))
    async with opened(settings_of(server), prefix) as store:
        await store.commit(txn)
        await store.commit(Txn(deletes=names))


async def test_etcd_killed_and_restarted_under_a_watch_loses_nothing_and_repeats_nothing(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        async with opened(settings_of(own)) as store:
            batches: list[ChangeBatch] = []
            last = first = (await store.read()).revision
            watch = store.watch(first + 1)
            numbers = iter(range(100))
            for _ in range(4):
                for _ in range(10):
                    # If its outcome is unknown it is made again, so that a number may be there twice.
                    last = await commit_once_it_works(store, put("k", b"%d" % next(numbers)))
                while not batches or batches[-1].revision < last:
                    batches += await take(watch, 1)
                waiting = asyncio.create_task(take(watch, 1))
                await asyncio.sleep(0)
                own.kill()
                with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                    await store.commit(put("never", b""))
                own.restart()
                await commit_once_it_works(store, put("k", b"%d" % next(numbers)))
                batches += await waiting
            await watch.aclose()
            found = [batch.revision for batch in batches]
            assert found == list(range(first + 1, found[-1] + 1))
            values = [int(batch.changes[0].value or b"") for batch in batches]
            assert [value for value, _ in itertools.groupby(values)] == list(range(values[-1] + 1))
            assert values[-1] == 43


async def test_an_etcd_that_does_not_answer_leaves_a_commit_unknown_and_works_again_later(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        prefix = new_prefix()
        async with (
            opened(settings_of(own, deadline_ms=500), prefix) as hasty,
            opened(settings_of(own), prefix) as store,
        ):
            lease = await commit_lease(store)
            await commit_once_it_works(hasty, put("a", b"1"))
            own.pause()
            async with asyncio.timeout(120):
                with pytest.raises(OutcomeUnknown, match=f"{own.endpoints} does not answer.*read again"):
                    await hasty.commit(put("a", b"2"))
                with pytest.raises(StoreUnavailable, match=r"does not answer.*members run"):
                    await hasty.read()
                with pytest.raises(StoreUnavailable):
                    await hasty.keep_alive(lease)
                with pytest.raises(OutcomeUnknown):
                    await hasty.revoke(lease)
            own.resume()
            await commit_once_it_works(hasty, put("b", b"3"))
            # The commit that was not answered is one of the possible two, and what came later is there.
            entries = (await store.read()).entries
            assert entries["a"].value in (b"1", b"2")
            assert entries["b"].value == b"3"


async def commit_lease(store: EtcdStore) -> int:
    lease = await store.grant_lease(600_000)
    await store.commit(put("leased", b"", lease))
    return lease


async def test_a_renewal_is_given_up_before_the_lease_is_over(tmp_path: Path, server: EtcdServer) -> None:
    with EtcdServer(tmp_path / "own") as own:
        async with opened(settings_of(own, deadline_ms=600_000)) as store:
            lease = await store.grant_lease(2_000)
            own.pause()
            async with asyncio.timeout(120):
                with pytest.raises(StoreUnavailable):
                    await store.keep_alive(lease)
            own.resume()


async def test_an_etcd_that_has_no_connection_is_reported_as_unavailable_and_nothing_is_written(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        async with opened(settings_of(own)) as store:
            await store.commit(put("a", b"1"))
            own.kill()
            # The first call may find the connection not yet broken.
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                await store.commit(put("a", b"2"))
            with pytest.raises(StoreUnavailable, match=own.endpoints):
                await store.commit(put("a", b"3"))
            own.restart()
            await commit_once_it_works(store, put("b", b"4"))
            assert (await store.read()).entries["a"].value == b"1"


async def test_a_watch_gives_up_a_connection_that_has_fallen_silent(
    tmp_path: Path, server: EtcdServer
) -> None:
    """The connection stays open, so that only unanswered pings show it. That takes nine seconds."""
    given_up = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            given_up.set()

    log, listener = logging.getLogger(etcd.__name__), Listener()
    with EtcdServer(tmp_path / "own") as own:
        async with opened(settings_of(own)) as store:
            watch = store.watch(await store.commit(put("a")))
            await take(watch, 1)
            waiting = asyncio.create_task(take(watch, 1))
            own.pause()
            log.addHandler(listener)
            try:
                async with asyncio.timeout(120):
                    await given_up.wait()
            finally:
                log.removeHandler(listener)
                own.resume()
            revision = await commit_once_it_works(store, put("b"))
            assert [batch.revision for batch in await waiting] <= [revision]
            await watch.aclose()


async def test_a_dead_endpoint_is_passed_over(server: EtcdServer) -> None:
    here = parse_address(server.endpoints)
    settings = replace(settings_of(server), endpoints=(NOBODY, here, Address("localhost", 1)))
    async with opened(settings) as store:
        watch = store.watch((await store.read()).revision + 1)
        revision = await store.commit(put("a"))
        assert [batch.revision for batch in await take(watch, 1)] == [revision]
        await store.keep_alive(await store.grant_lease(60_000))
        await watch.aclose()


async def test_a_silent_endpoint_is_left_for_the_next_within_the_deadline(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        endpoints = (parse_address(own.endpoints), parse_address(server.endpoints))
        async with opened(EtcdSettings(endpoints, deadline_ms=4_000)) as store:
            await store.read()
            own.pause()
            await store.read()
            own.resume()


async def test_an_etcd_that_has_lost_its_data_stops_the_watch_with_words(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        async with opened(settings_of(own)) as store:
            revisions = [await store.commit(put("k")) for _ in range(10)]
            watch = store.watch(revisions[-1])
            await take(watch, 1)
            own.kill()
            own.restart(lose_data=True)
            with pytest.raises(MetadataWentBack, match="lost data or was restored"):
                await take(watch, 1)


async def test_deletions_of_the_compacted_revision_are_not_left_out_in_silence(server: EtcdServer) -> None:
    """etcd itself delivers that revision without them."""
    prefix = new_prefix()
    async with opened(settings_of(server), prefix) as store:
        await store.commit(put("a"))
        revision = await store.commit(Txn(deletes=("a",)))
        await store.commit(put("b"))
        await store.compact(revision)
        with pytest.raises(Exception, match="read everything again"):
            await take(store.watch(revision), 1)


async def test_a_call_that_is_under_way_when_the_store_is_closed_says_so(
    tmp_path: Path, server: EtcdServer
) -> None:
    with EtcdServer(tmp_path / "own") as own:
        store = EtcdStore(settings_of(own), "t/")
        await store.read()
        own.pause()
        commit, read = asyncio.create_task(store.commit(put("a"))), asyncio.create_task(store.read())
        await asyncio.sleep(0)
        await store.close()
        async with asyncio.timeout(120):
            with pytest.raises(OutcomeUnknown):
                await commit
            with pytest.raises(StoreClosed):
                await read


async def test_concurrent_guarded_increments_of_two_stores_are_linearizable(server: EtcdServer) -> None:
    """Each success is the successor of exactly one state, in the order of revisions."""
    prefix = new_prefix()
    rng = random.Random(20)
    async with opened(settings_of(server), prefix) as one, opened(settings_of(server), prefix) as other:
        first = await one.commit(put("n", b"0"))
        done: list[tuple[int, int]] = []

        async def increment(store: EtcdStore) -> None:
            for _ in range(40):
                value, revision = (await store.read("n")).entries["n"]
                # What was committed before the read began is what it must see, at least.
                assert revision >= first
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
                seen = max((each for each, _ in done), default=first)
                incremented = int(value) + 1
                try:
                    committed = await store.commit(
                        Txn(compares=(Compare("n", revision),), puts=(Put("n", str(incremented).encode()),))
                    )
                except MetadataConflict:
                    continue
                assert committed > seen, "a commit that began after another one ended is later"
                done.append((committed, incremented))

        await asyncio.gather(*(increment(store) for store in (one, one, other, other)))
        assert [value for _, value in sorted(done)] == list(range(1, len(done) + 1))
        assert (await other.read("n")).entries["n"].value == str(len(done)).encode()
        watch = other.watch(first + 1)
        assert [batch.revision for batch in await take(watch, len(done))] == [
            each for each, _ in sorted(done)
        ]
        await watch.aclose()


async def test_tls_with_certificates_of_both_sides(tmp_path: Path, server: EtcdServer) -> None:
    with EtcdServer(tmp_path / "tls", tls=True) as secured:
        settings = replace(
            settings_of(secured),
            ca_file=secured.ca_file,
            cert_file=secured.cert_file,
            key_file=secured.key_file,
        )
        async with opened(settings) as store:
            watch = store.watch(1)
            revision = await store.commit(put("a"))
            assert [batch.revision for batch in await take(watch, 1)] == [revision]
            await watch.aclose()
        async with opened(settings_of(secured)) as store:
            with pytest.raises(StoreUnavailable, match="without TLS"):
                await store.read()
        stranger = EtcdServer(tmp_path / "stranger", tls=True)
        async with opened(replace(settings, ca_file=stranger.ca_file)) as store:
            with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                await store.read()


async def forget_tokens(server: EtcdServer) -> None:
    """Switch authentication off and on."""
    async with grpc.aio.insecure_channel(server.endpoints) as channel:
        auth = rpc.AuthStub(channel)
        token = (await auth.Authenticate(rpc.AuthenticateRequest(name="root", password="right"))).token
        await auth.AuthDisable(rpc.AuthDisableRequest(), metadata=(("token", token),))
        await auth.AuthEnable(rpc.AuthEnableRequest())


async def test_user_and_password(tmp_path: Path, server: EtcdServer) -> None:
    with EtcdServer(tmp_path / "own") as own:
        plain = settings_of(own)
        node = replace(plain, user="node", password="right")
        async with opened(node) as store:
            with pytest.raises(ConfigError, match="authentication switched off; remove user 'node'"):
                await store.read()
        await own.enable_authentication("tidemill/mine/")
        async with opened(plain, "tidemill/mine/") as store:
            with pytest.raises(ConfigError, match="wants a user and a password"):
                await store.read()
            with pytest.raises(ConfigError, match="wants a user and a password"):
                await take(store.watch(1), 1)
        async with opened(replace(node, password="wrong"), "tidemill/mine/") as store:
            with pytest.raises(ConfigError, match="refuses user 'node' with this password"):
                await store.read()
        async with opened(node, "tidemill/other/") as store:
            with pytest.raises(ConfigError, match="denies user 'node'"):
                await store.commit(put("a"))
        async with opened(node, "tidemill/mine/") as store, opened(node, "tidemill/mine/") as follower:
            watch = follower.watch(1)
            first = await store.commit(put("a"))
            assert [batch.revision for batch in await take(watch, 1)] == [first]
            # It knows no token any more, and the watch must be opened again.
            await forget_tokens(own)
            own.kill()
            own.restart()
            second = await commit_once_it_works(store, put("a"))
            lease = await store.grant_lease(60_000)
            await store.keep_alive(lease)
            await store.revoke(lease)
            with pytest.raises(StoreLeaseNotFound):
                await store.keep_alive(lease)
            (batch,) = await take(watch, 1)
            assert first < batch.revision <= second
            await watch.aclose()


@given(st.data())
def test_fragments_are_put_together_to_the_transactions_that_they_were_cut_from(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=8))
    batches = [
        ChangeBatch(revision, tuple(Change(f"k{number}", b"") for number in range(size)))
        for revision, size in enumerate(sizes, start=10)
    ]
    events = [(batch.revision, change) for batch in batches for change in reversed(batch.changes)]
    assembler, found, sent, delivered = TransactionAssembler(), [], 0, 0
    while sent < len(events):
        # Whole messages end where a transaction does; inside, fragments are cut anywhere.
        ends = [end for end in itertools.accumulate(sizes) if end > sent]
        end = data.draw(st.sampled_from(ends))
        cuts = sorted({*data.draw(st.lists(st.integers(sent + 1, end), max_size=4)), end})
        for cut in cuts:
            found += assembler.add(events[sent:cut], more=cut < end)
            sent = cut
            delivered = sum(len(batch.changes) for batch in found)
            assert delivered <= sent
        assert delivered == end
    assert found == batches


def test_tidemill_without_a_cluster_does_not_load_grpc() -> None:
    script = "import sys, tidemill.server.node, tidemill.server.runtime; print('grpc' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
