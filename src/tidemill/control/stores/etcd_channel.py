"""Calls to etcd: endpoints, TLS, user and password, deadlines, and what its errors mean.

Rules:

- Every call has a deadline. It goes to one endpoint, which stays in use until it fails; then the next one is
  used.
- A request is sent only on a connection that stands. If none can be made, nothing was sent: that is
  ``StoreUnavailable`` and certain.
- A request that was sent and not answered is repeated, at another endpoint, only if the caller says that
  this does no harm. Otherwise it is ``OutcomeUnknown``. Only an answer that etcd gives before it writes
  counts as a refusal.
- A member of etcd that has lost its majority refuses calls (``hasleader``) instead of keeping them waiting.
- With a user, every call carries a token. etcd forgets tokens (after minutes, and when it restarts); then
  a new one is fetched and the call, which was refused, is made again.

Only the generated stubs of aetcd are used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from aetcd import rpc

from tidemill.config.values import Address
from tidemill.control.stores.etcd_url import EXAMPLE_URL
from tidemill.control.stores.store import (
    OutcomeUnknown,
    RevisionCompacted,
    StoreClosed,
    StoreLeaseNotFound,
    StoreUnavailable,
    TransactionTooLarge,
)
from tidemill.errors import ConfigError, TidemillError

__all__ = (
    "Endpoint",
    "EtcdChannel",
    "EtcdSettings",
    "FutureRevision",
    "Metadata",
    "is_own_cancellation",
)

_CHANNEL_OPTIONS: Final = (
    # A page of a read, or what a watch catches up with, may be larger than gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A peer that vanished without a word is noticed by pings. etcd allows one every 5 s.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without it, gRPC gives an unanswered ping a minute, whatever the line above says.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name also the time that an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # Repeating is decided here: gRPC would not tell.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)

#: Codes with which a server refuses a request that it did not carry out.
_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

Metadata = tuple[tuple[str, str], ...]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach etcd. TLS is used if one of its files is named.

    ``ca_file`` has the authorities that sign the servers' certificates (without it, those of the system);
    ``cert_file`` and ``key_file`` are what this client shows of itself. ``deadline_ms`` is the time that one
    call may take.
    """

    endpoints: tuple[Address, ...]
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    deadline_ms: int = 5_000

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError(f"no endpoint of etcd is named; write for example {EXAMPLE_URL}")
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("a client certificate for etcd needs both its file and the file of its key")
        if (self.user is None) != (self.password is None):
            raise ConfigError("a user of etcd needs both a name and a password")
        if self.deadline_ms <= 0:
            raise ConfigError(f"a deadline of {self.deadline_ms} ms leaves etcd no time; use 5000")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.ca_file is not None or self.cert_file is not None

    def __str__(self) -> str:
        return ", ".join(map(str, self.endpoints))


class FutureRevision(ValueError):
    """etcd is not at the revision that was asked for."""


class _NotSent(Exception):
    """The request did not leave: trying elsewhere is safe."""


class _NoAnswer(Exception):
    """The request may have left and was not answered."""


class Endpoint:
    """One member of etcd with its connection and stubs."""

    def __init__(self, address: Address, channel: Any) -> None:
        self.address = address
        self.channel = channel
        self.kv = rpc.KVStub(channel)
        self.leases = rpc.LeaseStub(channel)
        self.watches = rpc.WatchStub(channel)
        self.auth = rpc.AuthStub(channel)
        self._maintenance = rpc.MaintenanceStub(channel)

    async def connect(self, timeout_s: float) -> None:
        """Return when connected; ``_NotSent`` with the reason if that fails."""
        if self.channel.get_state() is grpc.ChannelConnectivity.READY:
            return
        try:
            # The state alone does not say why a connection fails; a call that changes nothing does.
            await self._maintenance.Status(rpc.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise _NotSent(f"{self.address} does not answer") from error
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise _NotSent(f"{self.address}: {_reason(error)}") from error
        except asyncio.CancelledError:
            if is_own_cancellation():
                raise
            raise _NotSent("the store was closed meanwhile") from None


Send = Callable[[Endpoint, Metadata, float], Awaitable[Result]]
"""Makes one call: gets the endpoint, the metadata and the timeout in seconds."""


class EtcdChannel:
    """Calls to whichever endpoint works. Belongs to the event loop of its first call."""

    def __init__(self, settings: EtcdSettings) -> None:
        self.settings = settings
        self._credentials = _credentials(settings)
        self._endpoints: list[Endpoint] = []
        self._current = 0
        self._token: str | None = None
        self._authenticating = asyncio.Lock()
        self._closed = False

    async def call(
        self,
        send: Send[Result],
        *,
        may_repeat: bool,
        timeout_s: float | None = None,
    ) -> Result:
        """What ``send`` returns.

        ``StoreUnavailable`` if nothing was sent or the call may be repeated, else ``OutcomeUnknown``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or self.settings.deadline_ms / 1000)
        reasons: list[str] = []
        attempts_max = len(self.settings.endpoints) + 1
        while len(reasons) < attempts_max and (left_s := deadline - loop.time()) > 0:
            endpoint = self._endpoint()
            # Time for another endpoint, if a silent one can be given up.
            attempt_s = left_s if len(reasons) + 1 >= attempts_max else left_s / 2
            try:
                await endpoint.connect(attempt_s)
                return await self._send(
                    endpoint, send, attempt_s if may_repeat else max(deadline - loop.time(), 0)
                )
            except _NotSent as error:
                reasons.append(str(error))
            except _NoAnswer as error:
                reasons.append(str(error))
                if not may_repeat:
                    self.leave(endpoint)
                    raise OutcomeUnknown(
                        f"etcd was asked to write and did not confirm it ({error}); it may have been done:"
                        " read again"
                    ) from error
            self.leave(endpoint)
        raise self._unavailable(reasons)

    def leave(self, endpoint: Endpoint) -> None:
        """Use the next endpoint from now on, if this one is in use."""
        if self._endpoints and self._endpoints[self._current] is endpoint:
            self._current = (self._current + 1) % len(self._endpoints)

    def stream_error(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> Exception:
        """What the end of a stream means; ``StoreUnavailable`` if it can be opened again."""
        if _is_stale_token(error):
            self._token = None
            return StoreUnavailable(
                f"{endpoint.address} has forgotten the token of user {self.settings.user!r}"
            )
        translated = self._translated(error, endpoint)
        return StoreUnavailable(str(translated)) if isinstance(translated, _NoAnswer) else translated

    def refusal(self, details: str) -> Exception | None:
        """The error that etcd's message about a refused request stands for; None if it is not known."""
        return next(
            (meaning(self.settings, details) for words, meaning in _MEANINGS if words in details), None
        )

    async def close(self) -> None:
        """Break the connections. Calls that are under way fail."""
        self._closed = True
        endpoints, self._endpoints = self._endpoints, []
        for endpoint in endpoints:
            await endpoint.channel.close()

    def _endpoint(self) -> Endpoint:
        if self._closed:
            raise StoreClosed("the metadata store is closed; open it again")
        if not self._endpoints:
            self._endpoints = [Endpoint(address, self._open(address)) for address in self.settings.endpoints]
        return self._endpoints[self._current]

    def _open(self, address: Address) -> Any:
        if self._credentials is None:
            return grpc.aio.insecure_channel(str(address), options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(str(address), self._credentials, options=_CHANNEL_OPTIONS)

    async def _send(self, endpoint: Endpoint, send: Send[Result], timeout_s: float) -> Result:
        deadline = asyncio.get_running_loop().time() + timeout_s
        for has_new_token in (False, True):
            token = await self._token_of(endpoint, timeout_s)
            metadata: Metadata = (("hasleader", "true"), *((("token", token),) if token else ()))
            try:
                return await send(endpoint, metadata, deadline - asyncio.get_running_loop().time())
            except grpc.aio.AioRpcError as error:
                if token and not has_new_token and _is_stale_token(error):
                    self._token = None
                    continue
                raise self._translated(error, endpoint) from error
            except asyncio.CancelledError:
                if is_own_cancellation():
                    raise
                # gRPC reports a call that ends because the channel is closed as a cancellation.
                raise _NoAnswer("the store was closed meanwhile") from None
        raise AssertionError("the second attempt returns or raises")

    async def _token_of(self, endpoint: Endpoint, timeout_s: float) -> str | None:
        if self.settings.user is None:
            return None
        async with self._authenticating:
            if self._token is None:
                request = rpc.AuthenticateRequest(name=self.settings.user, password=self.settings.password)
                try:
                    self._token = (await endpoint.auth.Authenticate(request, timeout=timeout_s)).token
                except grpc.aio.AioRpcError as error:
                    translated = self._translated(error, endpoint)
                    # Asking for a token writes nothing, and what the token was for was not sent.
                    if isinstance(translated, _NoAnswer):
                        translated = _NotSent(*translated.args)
                    raise translated from error
                except asyncio.CancelledError:
                    if is_own_cancellation():
                        raise
                    raise _NotSent("the store was closed meanwhile") from None
            return self._token

    def _translated(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> Exception:
        """What an error of gRPC or etcd means. Whatever is not known to be a refusal is ``_NoAnswer``."""
        details = error.details() or ""
        if (known := self.refusal(details)) is not None:
            return known
        if error.code() in _REFUSALS:
            return TidemillError(f"etcd at {endpoint.address} refused a request: {details}")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return _NoAnswer(f"{endpoint.address} does not answer")
        return _NoAnswer(f"{endpoint.address}: {_reason(error)}")

    def _unavailable(self, reasons: Sequence[str]) -> StoreUnavailable:
        why = "; ".join(dict.fromkeys(reasons)) or "no time was left"
        tls = "with TLS" if self.settings.tls else "without TLS"
        return StoreUnavailable(
            f"etcd cannot be reached at {self.settings} ({why}); check that most of its members run, that the"
            f" addresses are right, and that it is served {tls}"
        )


def _credentials(settings: EtcdSettings) -> Any:
    if not settings.tls:
        return None

    def content(path: Path | None) -> bytes | None:
        try:
            return None if path is None else path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}, a file for TLS with etcd, cannot be read: {error.strerror}"
            ) from error

    return grpc.ssl_channel_credentials(
        root_certificates=content(settings.ca_file),
        private_key=content(settings.key_file),
        certificate_chain=content(settings.cert_file),
    )


def _is_stale_token(error: grpc.aio.AioRpcError) -> bool:
    """Whether etcd refused a call because it has forgotten the token or changed users since."""
    details = error.details() or ""
    return "invalid auth token" in details or "revision of auth store is old" in details


def is_own_cancellation() -> bool:
    """Whether the running task is being cancelled. gRPC also raises this when only a call was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The last and most exact part of what gRPC says."""
    return str(error.details() or error.code().name).rpartition("last error: ")[2].strip()


def _too_large() -> TransactionTooLarge:
    return TransactionTooLarge("a metadata transaction is over etcd's limit; split it into several")


Meaning = Callable[[EtcdSettings, str], Exception]

#: Words in etcd's refusals and what they mean. Except for one, none of these requests was carried out.
_MEANINGS: Final[tuple[tuple[str, Meaning], ...]] = (
    (
        "requested lease not found",
        lambda _, details: StoreLeaseNotFound("the lease has expired or was revoked; grant a new one"),
    ),
    (
        "required revision has been compacted",
        lambda _, details: RevisionCompacted(
            "etcd's history does not reach back that far; read everything again and watch from there"
        ),
    ),
    ("required revision is a future revision", lambda _, details: FutureRevision(details)),
    ("request is too large", lambda _, details: _too_large()),
    ("too many operations", lambda _, details: _too_large()),
    (
        "invalid user ID or password",
        lambda settings, _: ConfigError(
            f"etcd at {settings} refuses user {settings.user!r} with this password; check both"
        ),
    ),
    (
        "user name is empty",
        lambda settings, _: ConfigError(
            f"etcd at {settings} wants a user and a password; none is configured"
        ),
    ),
    (
        "authentication is not enabled",
        lambda settings, _: ConfigError(
            f"etcd at {settings} has authentication switched off; remove user {settings.user!r} here, or"
            " switch it on there with 'etcdctl auth enable'"
        ),
    ),
    (
        "permission denied",
        lambda settings, _: ConfigError(
            f"etcd at {settings} denies user {settings.user!r} access to the keys of this cluster; grant a"
            " role with readwrite permission for their prefix"
        ),
    ),
    (
        # No refusal: the write that fills the database up is carried out, and still answered with this error.
        "database space exceeded",
        lambda settings, _: _NoAnswer(
            f"the database of etcd at {settings} is full; compact and defragment it, then disarm its alarm"
        ),
    ),
    (
        "too many requests",
        lambda settings, _: StoreUnavailable(f"etcd at {settings} is overloaded; try again later"),
    ),
)
