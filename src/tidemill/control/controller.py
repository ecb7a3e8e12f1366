"""The controller: validates commands, commits them and keeps the image.

- Submits are serialised. Each is planned against the image, committed only if the keys it looked at have not
  changed since, and planned again if they had (a bounded number of times).
- The image moves by the watch alone, in revision order, no matter which node wrote. ``submit`` returns when
  the image has its change and the subscribers have been told.
- ``submit_many`` packs commands into as few transactions as the store's limits allow. A command that is
  refused does not hinder the others. Commands of one transaction that the store could not commit fail
  together.
- On a full disk only commands that delete something, or that a start needs, may use the disk's reserve; while
  it is given up, all others are refused.
- A store that does not answer is tried again: ``trouble`` says what is wrong meanwhile, and the image stays
  as it was. If the answer to a commit was lost, the image is read anew and the commands are planned again:
  each can be done twice without harm. From then on no failure says that a command was not done: it may have
  been, by the attempt whose answer was lost. The error is ``OutcomeUnknown``.
- The image may be a little older than the store, in which other nodes write. A refusal because something is
  there, or is not, is told only after the image was caught up (``refusals``), so that it is linearizable.
- Only when the store is closed, or has gone back, the controller stops: submits raise it.
- A store goes back when it loses data, or when an older copy of it is restored. What it has then is no later
  state of the image: none of it is published, and nothing is written to it, until an operator has decided
  and the node starts anew. It is noticed when the store's revision is below the image's, or below one that
  another node has seen; and, when the store has passed those, by a key that was last written before the
  image's revision and is not so in the image. Not noticed is a store that has written or deleted, since it
  passed the image, every key that differed.
- The elected controller of a cluster (``cluster_controller``) submits with a ``fence``: nothing is committed
  once another node is the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidemill.control.draft import Draft
from tidemill.control.image import MetadataDelta, MetadataImage
from tidemill.control.placement import ControlLimits
from tidemill.control.records import CLUSTER_KEY
from tidemill.control.refusals import CatchUp, rests_on_existence
from tidemill.control.stores.store import (
    Compare,
    MetadataStore,
    MetadataWentBack,
    OutcomeUnknown,
    RevisionCompacted,
    StoreClosed,
    StoreUnavailable,
)
from tidemill.coordination.metrics import Metric, gauge
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, DiskFull, ErrorCode, MetadataConflict, TidemillError

if TYPE_CHECKING:
    from tidemill.control.commands import Command

__all__ = ("CONTROLLER_METRICS", "Controller", "Subscriber")

R = TypeVar("R")

Subscriber = Callable[[MetadataImage, MetadataImage, MetadataDelta], None]
"""Called with the old image, the new image and what differs. Must be quick and must not raise."""

COMMIT_ATTEMPTS_MAX = 8

#: How long the store is left alone after a failure: twice as long each time.
_RETRY_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.0)
_WATCH_PATIENCE_SECONDS = 5.0
"""How long a commit waits for the watch to deliver it before everything is read."""
_CATCH_UP_SECONDS = 0.1
"""How long a refusal waits for the watch. It brings nothing if others than this cluster have written."""

_log = logging.getLogger(__name__)


class Controller:
    """Validates commands, commits them to the store and keeps the image.

    ``start`` it before anything else, and ``stop`` it before the store is closed.
    """

    def __init__(
        self,
        store: MetadataStore,
        *,
        limits: ControlLimits | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._sleep = sleep
        self._limits = limits if limits is not None else ControlLimits()
        self._image = MetadataImage()
        self._subscribers: list[Subscriber] = []
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._failure: TidemillError | None = None
        #: Why the image may be old: the store cannot be read now, or went back. None while all is well.
        self.trouble: str | None = None
        #: When ``trouble`` began, in the event loop's time.
        self.trouble_since: float | None = None
        #: Why commands that make the data grow are refused now; None if they are not.
        self.growth_refusal: DiskFull | None = None
        #: Called when a command that may use the disk's reserve met a full disk; True if it freed something.
        self.give_up_reserve: Callable[[DiskFull], bool] = lambda error: False

    @property
    def image(self) -> MetadataImage:
        """The newest image. Empty before ``start``."""
        return self._image

    @property
    def failure(self) -> TidemillError | None:
        """Why commands are not accepted any more; None while they are."""
        return self._failure

    @property
    def went_back(self) -> MetadataWentBack | None:
        """How it was noticed that the store has lost data or was restored; None if it was not."""
        if not isinstance(self._failure, MetadataWentBack):
            return None
        # It is raised again and again, and would keep the frames of every time.
        return self._failure.with_traceback(None)

    async def start(self) -> None:
        """Read everything, then follow the changes. Subscribers are told of what was read."""
        if self._watcher is not None:
            raise RuntimeError("the controller is already started")
        await self._resync()
        self._watcher = asyncio.create_task(self._follow(), name="metadata-watch")

    async def stop(self) -> None:
        """Stop following. The image stays as it is; submits that are waiting raise ``StoreClosed``."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        self._fail(StoreClosed("the metadata controller was stopped"))

    async def refresh(self, seen_revision: int = 0) -> None:
        """Read everything, for instance because the watch seems to hang. Raises ``TidemillError``.

        ``seen_revision`` is one that somebody has seen in the store: it is there, unless the store went back.
        """
        if self.went_back is not None:
            raise self.went_back
        await self._resync(seen_revision)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Tell ``subscriber`` of every later image, in revision order; gives a function that ends it.

        What the image holds already is not told: read ``image`` first, in the same step.
        """
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def check(self, command: Command[R]) -> R:
        """The result that ``command`` would have now. Raises ``ApiError`` if it would be refused."""
        results: list[R | TidemillError] = Draft(self._image, self._limits).fill([command])
        return _value(results[0])

    async def submit(self, command: Command[R], *, fence: Compare | None = None) -> R:
        """Do ``command`` and give its result. Raises ``ApiError`` if it is refused."""
        (result,) = await self.submit_many([command], fence=fence)
        return _value(result)

    async def submit_many(
        self, commands: Iterable[Command[R]], *, fence: Compare | None = None
    ) -> list[R | TidemillError]:
        """Do the commands in order; gives for each its result or its error.

        With a ``fence``, the error is ``ApiError`` NOT_CONTROLLER once that key is not at that revision any
        more. Raises if nothing at all could be tried.
        """
        todo: list[Command[Any]] = list(commands)
        results: list[Any] = []
        catch_up = CatchUp(self.catch_up)
        async with self._lock:
            while len(results) < len(todo):
                try:
                    results += await self._commit_some(todo[len(results) :], fence, catch_up)
                except TidemillError as error:
                    if not results:
                        raise
                    results += [error] * (len(todo) - len(results))
        return results

    async def catch_up(self) -> None:
        """Return when the image is as new as the store was when this was called. Raises ``TidemillError``.

        Nothing need be done on a single node: nobody else writes.
        """
        if not self._image.replicated:
            return
        seen = self._image.revision
        revision = (await self._store.read(CLUSTER_KEY)).revision
        self._check_revision(revision, seen)
        if revision <= self._image.revision:
            return
        try:
            async with asyncio.timeout(_CATCH_UP_SECONDS):
                await self._reached(revision)
        except TimeoutError:
            await self._resync()

    async def _commit_some(
        self, commands: Sequence[Command[Any]], fence: Compare | None, catch_up: CatchUp
    ) -> list[Any]:
        """Commit as many of the first ``commands`` as fit into one transaction; gives their results."""
        #: Results of an attempt whose outcome is not known.
        unknown: list[Any] = []
        for attempt in range(1, COMMIT_ATTEMPTS_MAX + 1):
            refusal = self._refusal(fence)
            if refusal is not None:
                return _refused(unknown, refusal)
            draft, results = await self._plan(commands, fence, catch_up)
            _take_as_done(self._image, commands, results, unknown)
            if draft.empty:
                return results
            txn = draft.txn()
            # What is written gets a revision of its own, above all that were seen.
            least = self._image.revision + bool(txn.puts)
            try:
                revision = await self._store.commit(txn)
                self._check_revision(revision, least)
            except MetadataConflict as error:
                if attempt == COMMIT_ATTEMPTS_MAX:
                    return _failed(results, error, unknown)
                try:
                    await self._resync()
                except TidemillError as failure:
                    return _failed(results, failure, unknown)
                continue
            except OutcomeUnknown as error:
                unknown = results
                if attempt == COMMIT_ATTEMPTS_MAX or not await self._find_out():
                    return _failed(results, error)
                continue
            except DiskFull as error:
                some = commands[: len(results)]
                if not all(each.may_use_reserve for each in some) or not self.give_up_reserve(error):
                    return _failed(results, error, unknown)
                continue
            except TidemillError as error:
                return _failed(results, error, unknown)
            await self._reached(revision)
            return results
        raise AssertionError("the last attempt returns")

    async def _plan(
        self, commands: Sequence[Command[Any]], fence: Compare | None, catch_up: CatchUp
    ) -> tuple[Draft, list[Any]]:
        """A draft of the first ``commands``, and their results."""
        draft = Draft(self._image, self._limits, fence)
        results = await _fill(draft, commands, self.growth_refusal)
        if any(map(rests_on_existence, results)):
            try:
                if await catch_up.once():
                    draft = Draft(self._image, self._limits, fence)
                    results = await _fill(draft, commands, self.growth_refusal)
            except TidemillError as error:
                results = [error if rests_on_existence(each) else each for each in results]
        return draft, results

    def _refusal(self, fence: Compare | None = None) -> TidemillError | None:
        """Why nothing can be committed; None if it can."""
        if self._watcher is None:
            raise RuntimeError("the controller is not started; call start() first")
        if self.went_back is not None:
            return self.went_back
        if self._failure is not None:
            stopped = StoreClosed(f"the metadata controller has stopped: {self._failure}")
            stopped.__cause__ = self._failure
            return stopped
        return _fenced(self._image, fence)

    async def _find_out(self) -> bool:
        """Read everything after a lost answer; False if the store does not answer that either."""
        for seconds in _RETRY_SECONDS:
            try:
                await self._resync()
                return True
            except (StoreUnavailable, OutcomeUnknown) as error:
                _log.warning("the outcome of a metadata transaction is not known yet: %s", error)
                await self._sleep(seconds)
            except MetadataWentBack:
                break
        return False

    async def _follow(self) -> None:
        """Fold the watch until stopped; start over from a full read when it failed."""
        failures = 0
        while True:
            try:
                if failures:
                    await self._resync()
                    self.trouble = self.trouble_since = None
                    failures = 0
                async for batch in self._store.watch(self._image.revision + 1):
                    if self._failure is not None:
                        return
                    # A full read may have been faster than the watch.
                    if batch.revision > self._image.revision:
                        self._publish(self._image.apply(batch))
                raise StoreClosed("the metadata store was closed under the controller")
            except (StoreClosed, MetadataWentBack) as error:
                _log.error("the metadata controller stops: %s", error)
                self._fail(error)
                return
            except RevisionCompacted:
                failures = 1
            except Exception as error:  # noqa: BLE001 - whatever it is, the metadata must go on when it is over
                self._note_trouble(error)
                await self._sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                failures += 1

    def _note_trouble(self, error: Exception) -> None:
        if self.trouble is None:
            self.trouble_since = asyncio.get_running_loop().time()
            _log.warning("the metadata store cannot be followed, trying again: %s", error)
        self.trouble = f"the metadata store cannot be followed: {error}"

    async def _resync(self, seen_revision: int = 0) -> None:
        seen = self._image
        stored = await self._store.read()
        self._check_revision(stored.revision, max(seen.revision, seen_revision))
        new = MetadataImage.from_stored(stored)
        self._check_successor(seen, new)
        # The watch may have gone on during the read.
        if stored.revision > self._image.revision:
            self._publish(new)

    def _check_revision(self, revision: int, least: int) -> None:
        """Stop, and raise ``MetadataWentBack``, if the store has answered with a revision below ``least``."""
        if revision < least:
            self._fail(
                MetadataWentBack(f"the metadata is at revision {revision}, and should be at {least} at least")
            )
        if self.went_back is not None:
            raise self.went_back

    def _check_successor(self, seen: MetadataImage, new: MetadataImage) -> None:
        """Stop, and raise ``MetadataWentBack``, if ``new`` has a key that ``seen`` should have had, too."""
        for key, revision in new.key_revisions.items():
            if revision <= seen.revision and seen.key_revision(key) != revision:
                error = MetadataWentBack(
                    f"metadata key {key!r} was at revision {seen.key_revision(key)} when the metadata was at"
                    f" {seen.revision}, and the store says that it was at {revision}"
                )
                self._fail(error)
                raise error

    def _publish(self, new: MetadataImage) -> None:
        old, self._image = self._image, new
        delta = MetadataDelta.between(old, new)
        for subscriber in list(self._subscribers):
            try:
                subscriber(old, new, delta)
            except Exception:  # noqa: BLE001 - one subscriber's bug must not stop the metadata
                _log.exception("a subscriber failed at metadata revision %d; the others go on", new.revision)
        waiting, self._waiters = self._waiters, []
        for revision, waiter in waiting:
            if revision > new.revision:
                self._waiters.append((revision, waiter))
            elif not waiter.done():
                waiter.set_result(None)

    async def _reached(self, revision: int) -> None:
        """Wait until the image is at ``revision`` or later."""
        if (refusal := self._refusal()) is not None:
            raise refusal
        if self._image.revision >= revision:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((revision, waiter))
        try:
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=_WATCH_PATIENCE_SECONDS)
                if not waiter.done():
                    # The watch is late, or fails and is tried again meanwhile.
                    with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
                        await self._resync()
            await waiter
        finally:
            # If the caller was cancelled, nobody is left to hear of a stop.
            waiter.cancel()

    def _fail(self, failure: TidemillError) -> None:
        """Stop the controller for good: callers that wait for the metadata get ``failure``."""
        if self._failure is None:
            self._failure = failure
            self.trouble = str(failure)
            self.trouble_since = self.trouble_since or asyncio.get_running_loop().time()
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(failure)
        self._waiters.clear()


async def _fill(draft: Draft, commands: Sequence[Command[Any]], refusal: DiskFull | None) -> list[Any]:
    """``Draft.fill`` in short turns of the event loop: there may be very many commands.

    If there is a ``refusal``, it is the result of commands that make the data grow.
    """
    results: list[Any] = []
    for command in commands:
        if refusal is not None and not command.may_use_reserve:
            results.append(refusal)
            continue
        filled = draft.fill([command])
        if not filled:
            break
        results += filled
        await give_way()
    return results


def _fenced(image: MetadataImage, fence: Compare | None) -> ApiError | None:
    """The refusal of a controller that was replaced; None if it was not."""
    if fence is None or image.key_revision(fence.key) == fence.mod_revision:
        return None
    return ApiError(
        ErrorCode.not_controller,
        "this node is not the controller any more; send the command to the one that is",
    )


def _refused(unknown: list[Any], refusal: TidemillError) -> list[Any]:
    """The results if nothing can be committed; ``unknown`` as in ``_take_as_done``. Raises if it is empty."""
    if not unknown:
        raise refusal
    return _failed(unknown, _perhaps_done(refusal))


def _take_as_done(
    image: MetadataImage, commands: Sequence[Command[Any]], results: list[Any], unknown: Sequence[Any]
) -> None:
    """After a lost answer: a command that is refused now may have been done.

    One that is refused because it was done has the result that it had. Of others nobody knows, unless the
    image shows that it was somebody else.
    """
    for index, before in enumerate(unknown[: len(results)]):
        now = results[index]
        if not isinstance(now, TidemillError) or isinstance(before, TidemillError):
            continue
        was_done = commands[index].was_done(image, before) if isinstance(now, ApiError) else None
        if was_done:
            results[index] = before
        elif was_done is None:
            results[index] = _perhaps_done(now)


def _perhaps_done(error: TidemillError) -> OutcomeUnknown:
    """The error of a command that fails now, and may have been done by an attempt without an answer."""
    if isinstance(error, OutcomeUnknown):
        return error
    unknown = OutcomeUnknown(f"it is not known whether a change of the metadata was made: {error.message}")
    unknown.__cause__ = error
    return unknown


def _value(result: R | TidemillError) -> R:
    if isinstance(result, TidemillError):
        raise result
    return result


def _failed(results: list[Any], error: TidemillError, unknown: Sequence[Any] = ()) -> list[Any]:
    """``error`` for every command that was not refused; ``unknown`` as in ``_take_as_done``."""
    failed: list[Any] = []
    for index, result in enumerate(results):
        was_tried = index < len(unknown) and not isinstance(unknown[index], TidemillError)
        own = _perhaps_done(error) if was_tried else error
        failed.append(result if isinstance(result, TidemillError) else own)
    return failed


CONTROLLER_METRICS: Final[Sequence[Metric[Controller]]] = (
    gauge("tidemill_topics", "Topics.", lambda controller: len(controller.image.topics)),
)
