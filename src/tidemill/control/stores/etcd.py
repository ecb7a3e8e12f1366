"""A ``MetadataStore`` in etcd: the store of a cluster of several nodes.

Rules, beside those of ``MetadataStore``:

- All keys live below one prefix, and a caller sees them without it. Revisions are etcd's own and count the
  changes of everybody who uses that etcd; a watch leaves out those that are not below the prefix.
- A large read is made in pages, all of the revision of the first one.
- ``commit`` is one transaction of etcd. Where its guards fail, the same transaction reads what they found.
- A watch asks etcd again from the revision behind the last whole transaction, whatever happened to the
  connection. It compares one key that it has seen with what etcd has, so that it does not go on in an etcd
  that was restored from an older copy, though that may have passed its revision by then. Not noticed is an
  etcd that was restored and has written that key at that very revision again; or, if only deletions came
  last, one that has deleted it, too. etcd's cluster id is not compared: a restored etcd has the same one if
  its members are called the same, and one that was moved with nothing lost has another.
- etcd's leases last whole seconds, and at least one and a half times its election timeout (2 s by default).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from aetcd import rpc

from tidemill.control.stores.etcd_channel import (
    Endpoint,
    EtcdChannel,
    EtcdSettings,
    FutureRevision,
    Metadata,
    is_own_cancellation,
)
from tidemill.control.stores.store import (
    Change,
    ChangeBatch,
    Compare,
    Entry,
    MetadataWentBack,
    RevisionCompacted,
    StoreClosed,
    StoredKeys,
    StoreLeaseNotFound,
    StoreUnavailable,
    Txn,
    check_txn,
)
from tidemill.errors import ConfigError, MetadataConflict

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("EtcdStore", "TransactionAssembler")

READ_PAGE_KEYS = 256
"""Keys per page of a read. Most values have a few kilobytes."""

_READ_ATTEMPTS_MAX = 5
_WATCH_PAUSE_SECONDS_MIN = 0.05
_WATCH_PAUSE_SECONDS_MAX = 1.0

_log = logging.getLogger(__name__)


class EtcdStore:
    """A ``MetadataStore`` in etcd, below ``prefix``. Belongs to the event loop of its first call.

    Connects with the first call. The contract of each method is ``MetadataStore``'s.
    """

    def __init__(self, settings: EtcdSettings, prefix: str, *, read_page_keys: int = READ_PAGE_KEYS) -> None:
        if not (prefix.isascii() and prefix.isprintable() and prefix.endswith("/")) or " " in prefix:
            raise ConfigError(
                f"the prefix {prefix!r} of keys in etcd is not printable ASCII that ends with /"
            )
        self._channel = EtcdChannel(settings)
        self._prefix = prefix.encode()
        self._read_page_keys = read_page_keys
        self._deadline_s = settings.deadline_ms / 1000
        #: Times to live of the leases that this store has granted, to renew them in time.
        self._lease_seconds: dict[int, int] = {}
        self._watches: set[_WatchStream] = set()
        self._closed = asyncio.Event()

    async def read(self, prefix: str = "", *, revision: int | None = None) -> StoredKeys:
        """All keys under ``prefix``, now or as of ``revision``."""
        for _ in range(_READ_ATTEMPTS_MAX):
            try:
                # Revision 0 is the newest one to etcd. Its own first revision is 1, and has no keys.
                stored = await self._read_pages(prefix, 0 if revision is None else max(revision, 1))
            except FutureRevision as error:
                raise ValueError(f"metadata revision {revision} does not exist yet") from error
            except RevisionCompacted:
                if revision is not None:
                    raise RevisionCompacted(
                        f"metadata revision {revision} is gone from etcd's history"
                    ) from None
                # Somebody compacted between two pages: the next attempt is at a newer revision.
                continue
            return stored if revision is None else StoredKeys(revision, stored.entries)
        raise StoreUnavailable("etcd is compacted faster than the metadata can be read; compact less often")

    async def commit(self, txn: Txn) -> int:
        """Commit and return the revision."""
        check_txn(txn)
        request = rpc.TxnRequest(
            compare=[_guard(self._key(guard.key), guard.mod_revision) for guard in txn.compares],
            success=[
                *(
                    rpc.RequestOp(
                        request_put=rpc.PutRequest(
                            key=self._key(put.key), value=put.value, lease=put.lease_id
                        )
                    )
                    for put in txn.puts
                ),
                *(
                    rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._key(key)))
                    for key in txn.deletes
                ),
            ],
            failure=[
                rpc.RequestOp(request_range=rpc.RangeRequest(key=self._key(guard.key), keys_only=True))
                for guard in txn.compares
            ],
        )
        response = await self._call(lambda endpoint: endpoint.kv.Txn, request, may_repeat=False)
        if not response.succeeded:
            raise _conflict(txn.compares, response.responses)
        return int(response.header.revision)

    async def watch(self, from_revision: int) -> AsyncGenerator[ChangeBatch]:
        """Every transaction from ``from_revision`` on."""
        next_revision = max(from_revision, 1)
        witness: _Witness | None = None
        failures = 0
        while not self._closed.is_set():
            stream = _WatchStream(self._channel, self._prefix, next_revision, self._deadline_s)
            self._watches.add(stream)
            assembler = TransactionAssembler()
            try:
                await stream.open()
                witness = await self._check_history(next_revision - 1, witness)
                failures = 0
                while True:
                    response = await stream.next()
                    for batch in assembler.add(map(self._event, response.events), more=response.fragment):
                        yield batch
                        witness = _Witness.of(batch)
                        next_revision = batch.revision + 1
            except StoreUnavailable as error:
                failures += 1
                level = logging.WARNING if failures == 1 else logging.DEBUG
                _log.log(level, "the metadata watch goes on from revision %d: %s", next_revision, error)
            except StoreClosed:
                return
            finally:
                self._watches.discard(stream)
                stream.cancel()
            await self._pause(failures)

    async def compact(self, revision: int) -> None:
        """Forget the history before ``revision``: that of everybody who uses this etcd."""
        if revision < 1:
            return
        try:
            await self._call(
                lambda endpoint: endpoint.kv.Compact,
                rpc.CompactionRequest(revision=revision),
                may_repeat=True,
            )
        except RevisionCompacted:
            return
        except FutureRevision as error:
            raise ValueError(f"metadata revision {revision} does not exist yet") from error

    async def grant_lease(self, ttl_ms: int) -> int:
        """Grant a new store lease."""
        if ttl_ms <= 0:
            raise ValueError(f"a lease of {ttl_ms} ms would be over before it began; ask for at least 1 ms")
        request = rpc.LeaseGrantRequest(TTL=-(-ttl_ms // 1000))
        # Repeating is safe: a lease that nobody knows of holds no keys and expires.
        response = await self._call(lambda endpoint: endpoint.leases.LeaseGrant, request, may_repeat=True)
        self._lease_seconds[response.ID] = response.TTL
        return int(response.ID)

    async def keep_alive(self, lease_id: int) -> None:
        """Renew the store lease for its time to live."""
        request = rpc.LeaseKeepAliveRequest(ID=lease_id)

        async def send(endpoint: Endpoint, metadata: Metadata, timeout_s: float) -> Any:
            call = endpoint.leases.LeaseKeepAlive(iter((request,)), timeout=timeout_s, metadata=metadata)
            try:
                return await call.read()
            finally:
                call.cancel()

        # An answer that comes when the lease may be over is of no use.
        timeout_s = min(self._deadline_s, self._lease_seconds.get(lease_id, self._deadline_s) / 2)
        response = await self._channel.call(send, may_repeat=True, timeout_s=timeout_s)
        if response is grpc.aio.EOF:
            raise StoreUnavailable("etcd did not answer the renewal of a lease; try again")
        if response.TTL <= 0:
            self._lease_seconds.pop(lease_id, None)
            raise StoreLeaseNotFound(f"lease {lease_id} has expired or was revoked; grant a new one")

    async def revoke(self, lease_id: int) -> None:
        """End the store lease and delete its keys."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        await self._call(lambda endpoint: endpoint.leases.LeaseRevoke, request, may_repeat=False)
        self._lease_seconds.pop(lease_id, None)

    async def close(self) -> None:
        """Break the connections and end the watches."""
        self._closed.set()
        for stream in list(self._watches):
            stream.cancel()
        await self._channel.close()

    async def _call(self, method: Callable[[Endpoint], Any], request: Any, *, may_repeat: bool) -> Any:
        async def send(endpoint: Endpoint, metadata: Metadata, timeout_s: float) -> Any:
            return await method(endpoint)(request, timeout=timeout_s, metadata=metadata)

        return await self._channel.call(send, may_repeat=may_repeat)

    async def _read_pages(self, prefix: str, revision: int) -> StoredKeys:
        start, end = self._key(prefix), _after_prefix(self._key(prefix))
        entries: dict[str, Entry] = {}
        while True:
            page = await self._call(
                lambda endpoint: endpoint.kv.Range,
                rpc.RangeRequest(key=start, range_end=end, revision=revision, limit=self._read_page_keys),
                may_repeat=True,
            )
            # The first page says which revision it is of, and all others are read as of that.
            revision = revision or page.header.revision
            for kv in page.kvs:
                entries[self._name(kv.key)] = Entry(kv.value, kv.mod_revision)
            if not page.more:
                return StoredKeys(revision, entries)
            start = page.kvs[-1].key + b"\0"

    async def _check_history(self, before: int, witness: _Witness | None) -> _Witness | None:
        """See that etcd has all that comes behind revision ``before``; gives a witness of that revision.

        Raises ``RevisionCompacted`` if etcd may leave out something. It says so itself for the revisions
        before the compacted one; of that one it delivers the writes but not the deletions, which are gone.
        Raises ``MetadataWentBack`` if etcd is not there yet, or has not what the ``witness`` has seen.
        """
        if before < 1:
            return None
        if witness is None:
            # The key that was written last: an etcd that has it lacks deletions at most.
            start, end = self._prefix, _after_prefix(self._prefix)
        else:
            start, end = self._key(witness.key), b""
        request = rpc.RangeRequest(
            key=start,
            range_end=end,
            revision=before,
            keys_only=True,
            sort_target=rpc.RangeRequest.MOD,
            sort_order=rpc.RangeRequest.DESCEND,
            limit=1,
        )
        try:
            kvs = (await self._call(lambda endpoint: endpoint.kv.Range, request, may_repeat=True)).kvs
        except RevisionCompacted:
            raise _compacted(before + 1) from None
        except FutureRevision as error:
            raise MetadataWentBack(f"metadata revision {before} was seen, and is not in etcd") from error
        if witness is None:
            return _Witness(self._name(kvs[0].key), kvs[0].mod_revision) if kvs else None
        found = kvs[0].mod_revision if kvs else 0
        if found != witness.mod_revision:
            raise MetadataWentBack(
                f"metadata key {witness.key!r} was at revision {witness.mod_revision} when the metadata was"
                f" at {before}, and etcd says that it was at {found}"
            )
        return witness

    async def _pause(self, failures: int) -> None:
        """Wait before asking again, longer and longer."""
        pause_s = min(_WATCH_PAUSE_SECONDS_MIN * 2 ** min(failures, 10), _WATCH_PAUSE_SECONDS_MAX)
        try:
            async with asyncio.timeout(pause_s):
                await self._closed.wait()
        except TimeoutError:
            return

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _name(self, key: bytes) -> str:
        return key[len(self._prefix) :].decode()

    def _event(self, event: Any) -> tuple[int, Change]:
        value = None if event.type == rpc.Event.DELETE else event.kv.value
        return event.kv.mod_revision, Change(self._name(event.kv.key), value)


class _Witness(NamedTuple):
    """A key that was seen as it was at some revision; ``mod_revision`` 0 if it was absent."""

    key: str
    mod_revision: int

    @classmethod
    def of(cls, batch: ChangeBatch) -> _Witness:
        """The witness for the revision of a batch: a key that the batch has written, if there is one."""
        written = next((change.key for change in batch.changes if change.value is not None), None)
        return cls(batch.changes[0].key, 0) if written is None else cls(written, batch.revision)


class TransactionAssembler:
    """Puts the events of a watch together to whole transactions.

    etcd sends whole revisions, unless that makes a message too large: then it sends fragments, of which all
    but the last say that there is more. A revision is given out when it is certain to be whole.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Change]] = []

    def add(self, events: Iterable[tuple[int, Change]], *, more: bool) -> list[ChangeBatch]:
        """Take the (revision, change) pairs of one message; gives the transactions that are whole now."""
        self._waiting += events
        groups = [list(group) for _, group in groupby(self._waiting, key=lambda each: each[0])]
        self._waiting = groups.pop() if more and groups else []
        # No two changes of a revision have the same key, so sorting never compares values.
        return [ChangeBatch(group[0][0], tuple(sorted(change for _, change in group))) for group in groups]


class _WatchStream:
    """One stream of etcd's watch service with one watch."""

    def __init__(self, channel: EtcdChannel, prefix: bytes, from_revision: int, deadline_s: float) -> None:
        self._channel = channel
        self._prefix = prefix
        self._from_revision = from_revision
        self._deadline_s = deadline_s
        self._request = rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(
                # No progress notifications: some versions of etcd send them ahead of events they include.
                key=prefix,
                range_end=_after_prefix(prefix),
                start_revision=from_revision,
                fragment=True,
            )
        )
        self._endpoint: Endpoint
        self._call: Any = None
        self._cancelled = False

    async def open(self) -> None:
        """Return when etcd has created the watch; ``StoreUnavailable`` if it does not."""

        async def find(endpoint: Endpoint, metadata: Metadata, timeout_s: float) -> tuple[Endpoint, Metadata]:
            # A watch with a stale token ends like one that is not permitted. A read is told the difference.
            request = rpc.RangeRequest(key=self._prefix, count_only=True)
            await endpoint.kv.Range(request, timeout=timeout_s, metadata=metadata)
            return endpoint, metadata

        self._endpoint, metadata = await self._channel.call(find, may_repeat=True)
        if self._cancelled:
            raise StoreClosed("the watch was ended")
        self._call = self._endpoint.watches.Watch(metadata=metadata)
        try:
            # A stream that stays silent from the start is given up; later, pings find a dead connection.
            async with asyncio.timeout(self._deadline_s):
                await self._next(write=self._request)
        except TimeoutError as error:
            self._channel.leave(self._endpoint)
            raise StoreUnavailable(f"{self._endpoint.address} does not answer") from error

    async def next(self) -> Any:
        """The next message; ``StoreUnavailable`` if the connection is lost, ``StoreClosed`` if cancelled."""
        return await self._next()

    def cancel(self) -> None:
        """End the stream, also for somebody who is waiting for its next message."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def _next(self, write: Any = None) -> Any:
        try:
            if write is not None:
                await self._call.write(write)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._channel.leave(self._endpoint)
            raise self._channel.stream_error(error, self._endpoint) from error
        except asyncio.CancelledError:
            if self._cancelled and not is_own_cancellation():
                raise StoreClosed("the watch was ended") from None
            raise
        if response is grpc.aio.EOF:
            self._channel.leave(self._endpoint)
            raise StoreUnavailable(f"{self._endpoint.address} has ended the stream")
        if response.compact_revision:
            raise _compacted(self._from_revision)
        if response.canceled:
            raise self._channel.refusal(response.cancel_reason) or StoreUnavailable(response.cancel_reason)
        return response


def _guard(key: bytes, mod_revision: int) -> Any:
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key, mod_revision=mod_revision)


def _conflict(guards: Sequence[Compare], answers: Sequence[Any]) -> MetadataConflict:
    """Say which guard failed, from what the transaction has read instead of writing."""
    for guard, answer in zip(guards, answers, strict=True):
        kvs = answer.response_range.kvs
        found = kvs[0].mod_revision if kvs else 0
        if found != guard.mod_revision:
            return MetadataConflict(
                f"metadata key {guard.key!r} is at revision {found}, not {guard.mod_revision};"
                " read it again and retry"
            )
    raise AssertionError("etcd refused a transaction whose guards all hold")


def _compacted(from_revision: int) -> RevisionCompacted:
    return RevisionCompacted(
        f"etcd's history is compacted and a watch asked for revision {from_revision};"
        " read everything again and watch from there"
    )


def _after_prefix(prefix: bytes) -> bytes:
    """The least key behind all that start with ``prefix``, which is ASCII."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
