"""The elected controller: one node does ``duties`` for the whole cluster.

Every node runs a ``ClusterController``. The one that first writes the key ``controller``, bound to its
session, is the controller; the key's revision is the controller epoch. Every transaction of the controller
compares the key at its epoch, so that nothing of a former one is committed.

Duties are looked for after every change that can bring some, first of the partitions that changed, and of all
when nodes came or went. They are committed a chunk of partitions at a time, and others have their turn in
between. Commands that other nodes propose go through ``submit``, which is fenced in the same way. Those that
come while one is being committed are committed together: after a node's restart there is one for each
partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidemill.control.commands import Command, Election, ElectLeaders, SettlePartitions
from tidemill.control.duties import duties, not_admitted
from tidemill.control.insync import LEADERLESS
from tidemill.control.records import CONTROLLER_KEY, ControllerRecord, encode
from tidemill.control.stores.store import Compare, OutcomeUnknown, Put, Txn
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, TidemillError

if TYPE_CHECKING:
    from tidemill.control.controller import Controller
    from tidemill.control.image import MetadataDelta, MetadataImage
    from tidemill.control.session import Session
    from tidemill.control.stores.store import MetadataStore

__all__ = ("ClusterController",)

R = TypeVar("R")

_RETRY_SECONDS: Final = 0.5
_TICK_SECONDS: Final = 1.0
"""How often it looks without news: the session may have got its lease after the news of it."""
_COMPACT_SECONDS: Final = 300.0
_NAMED_MAX: Final = 20
#: Proposals that are committed together: others have their turn in between.
_TOGETHER_MAX: Final = 500

_log = logging.getLogger(__name__)


class _Proposed(NamedTuple):
    """A command that was proposed to the controller, with the future that its caller waits for."""

    command: Command[Any]
    result: asyncio.Future[Any]

    def end(self, result: Any) -> None:
        """Give the waiting caller the result or the error, unless it has one or waits no more."""
        if self.result.done():
            return
        if isinstance(result, Exception):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


class ClusterController:
    """One node's share in electing the controller, and the controller's work while this node is it.

    Attributes:
        suspects: Gives the nodes that should not become leaders now.
        trouble: Why the last attempt to be or to work as the controller failed; None if it did not.
    """

    def __init__(
        self,
        controller: Controller,
        store: MetadataStore,
        session: Session,
        node_id: int,
        *,
        suspects: Callable[[], frozenset[int]] = frozenset,
        compact_seconds: float = _COMPACT_SECONDS,
    ) -> None:
        self._controller = controller
        self._store = store
        self._session = session
        self._node_id = node_id
        self._compact_seconds = compact_seconds
        self._epoch: int | None = None
        self._news = asyncio.Event()
        self._topics: set[str] = set()
        self._all_topics = True
        self._tasks: list[asyncio.Task[None]] = []
        self._unsubscribe: Callable[[], None] | None = None
        #: What was proposed and is not being committed yet.
        self._proposed: deque[_Proposed] = deque()
        self._committing: asyncio.Task[None] | None = None
        self.suspects = suspects
        self.trouble: str | None = None

    @property
    def epoch(self) -> int | None:
        """The controller epoch while this node is the controller, else None."""
        return self._epoch

    def start(self) -> None:
        """Take part in elections from now on. The metadata client and the session are started before."""
        self._unsubscribe = self._controller.subscribe(self._note)
        self._all_topics = True
        self._news.set()
        self._tasks = [
            asyncio.create_task(self._run(), name="cluster-controller"),
            asyncio.create_task(self._compact_now_and_then(), name="metadata-compaction"),
        ]

    async def stop(self) -> None:
        """Stop, and let another node be the controller at once."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        committing = self._committing
        if committing is not None:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
        epoch, self._epoch = self._epoch, None
        if epoch is not None and self._controller.went_back is None:
            # If it cannot be deleted, it goes with the session.
            txn = Txn(compares=(Compare(CONTROLLER_KEY, epoch),), deletes=(CONTROLLER_KEY,))
            with contextlib.suppress(TidemillError):
                await self._store.commit(txn)

    async def submit(self, command: Command[R]) -> R:
        """Commit a command as the controller. Raises ``ApiError`` NOT_CONTROLLER if another node is the
        controller."""
        if self._epoch is None:
            raise self._not_controller()
        if isinstance(command, ElectLeaders) and command.election is Election.UNCLEAN:
            _log.warning(
                "unclean election: %s asks node %s to lead partitions %s of topic %r, whatever it has lost",
                command.who or "an unnamed operator",
                command.leader,
                list(command.partitions),
                command.name,
            )
        proposed = _Proposed(command, asyncio.get_running_loop().create_future())
        self._proposed.append(proposed)
        if self._committing is None:
            self._committing = asyncio.create_task(self._commit_proposed(), name="proposals")
        result: R = await proposed.result
        return result

    async def _commit_proposed(self) -> None:
        """Commit everything that was proposed. What comes meanwhile is committed together, next."""
        some: list[_Proposed] = []
        try:
            while self._proposed:
                some = [self._proposed.popleft() for _ in range(min(_TOGETHER_MAX, len(self._proposed)))]
                for each, result in zip(
                    some, await self._results([each.command for each in some]), strict=True
                ):
                    each.end(result)
        finally:
            # Only if this was cancelled is anything left.
            for each in some:
                each.end(OutcomeUnknown(f"node {self._node_id} stopped while it committed this proposal"))
            for each in self._proposed:
                each.end(self._not_controller())
            self._proposed.clear()
            self._committing = None

    async def _results(self, commands: list[Command[Any]]) -> list[Any]:
        if self._epoch is None:
            return [self._not_controller()] * len(commands)
        try:
            fence = Compare(CONTROLLER_KEY, self._epoch)
            return await self._controller.submit_many(commands, fence=fence)
        except Exception as error:  # noqa: BLE001 - whoever waits has to hear of it
            return [error] * len(commands)

    def _not_controller(self) -> ApiError:
        return ApiError(ErrorCode.not_controller, f"node {self._node_id} is not the controller")

    def look_again(self) -> None:
        """Look at all partitions again, for instance because the suspects changed."""
        self._all_topics = True
        self._news.set()

    def _note(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        """Note the partitions for which the change may bring duties."""
        if old.alive != new.alive or old.admitted != new.admitted or delta.nodes_changed:
            self._all_topics = True
        if delta.node_configs_changed or old.replicated != new.replicated:
            self._all_topics = True
        self._topics.update(topic.name for topic in delta.created)
        self._topics.update(delta.new_partitions, delta.config_changed)
        self._topics.update(each.topic for each in (*delta.leader_changed, *delta.replicas_changed))
        if self._epoch is not None:
            _log_leaderless(new, delta)
        self._news.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._news.wait()
            self._news.clear()
            try:
                if await self._is_controller():
                    await self._work()
                self.trouble = None
            except Exception as error:  # noqa: BLE001 - the cluster needs a controller, whatever went wrong
                self._note_failure(error)
                self._all_topics = True
                self._news.set()
                await asyncio.sleep(_RETRY_SECONDS)

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, ApiError) and error.code is ErrorCode.not_controller:
            _log.warning("node %d is not the controller any more", self._node_id)
            self._epoch = None
            return
        if self.trouble is None:
            _log.warning("the work of the controller failed and is tried again: %s", error)
        self.trouble = str(error) or type(error).__name__

    async def _is_controller(self) -> bool:
        """Whether this node is the controller by the newest image. If nobody is, try to become it."""
        if self._controller.went_back is not None:
            self._epoch = None
            raise self._controller.went_back
        image = self._controller.image
        current = image.controller
        if not image.replicated or not self._session.lease_id:
            self._epoch = None
            return False
        if current is None:
            self._epoch = None
            await self._campaign()
            # The image will show who has won.
            return False
        mine = (current.node_id, current.incarnation) == (self._node_id, self._session.incarnation)
        if mine and self._epoch is None:
            _log.info("node %d is the controller at epoch %d", self._node_id, current.epoch)
            self._all_topics = True
        self._epoch = current.epoch if mine else None
        return mine

    async def _campaign(self) -> None:
        session = self._session
        record = ControllerRecord(node_id=self._node_id, incarnation=session.incarnation)
        txn = Txn(
            compares=(Compare(CONTROLLER_KEY, 0),),
            puts=(Put(CONTROLLER_KEY, encode(record), session.lease_id),),
        )
        # The image tells who was first, also if no answer came: the record names the incarnation.
        with contextlib.suppress(MetadataConflict):
            await self._store.commit(txn)

    async def _work(self) -> None:
        """Do the duties that are due now. The watch brings back what that changes."""
        image, suspects = self._controller.image, self.suspects()
        topics = None if self._all_topics else frozenset(self._topics)
        self._all_topics = False
        self._topics.clear()
        begin_slice()
        found: list[list[Command[Any]]] = []
        for commands in duties(image, suspects, topics):
            if commands:
                found.append(commands)
            await give_way()
        for commands in found:
            await self._submit_all(commands)
        settles = any(isinstance(commands[0], SettlePartitions) for commands in found)
        if topics is None and settles and not_admitted(image):
            # Nodes that are not admitted wait for what was changed just now.
            self.look_again()

    async def _submit_all(self, commands: list[Command[Any]]) -> None:
        if self._epoch is None:
            raise self._not_controller()
        fence = Compare(CONTROLLER_KEY, self._epoch)
        for command, result in zip(
            commands, await self._controller.submit_many(commands, fence=fence), strict=True
        ):
            if isinstance(result, ApiError) and result.code is ErrorCode.stale_broker_epoch:
                # The node is gone meanwhile: the image says so soon.
                _log.info("%s came too late: %s", type(command).__name__, result)
            elif isinstance(result, TidemillError):
                raise result

    async def _compact_now_and_then(self) -> None:
        """While this is the controller, let the store forget history that is older than one interval."""
        compact = getattr(self._store, "compact", None)
        old_revision = 0
        while compact is not None:
            await asyncio.sleep(self._compact_seconds)
            if self._epoch is not None and old_revision:
                try:
                    await compact(old_revision)
                except (TidemillError, TimeoutError, ValueError) as error:
                    # ValueError: the revision does not exist any more. The watch finds out why.
                    _log.warning("the metadata store could not be compacted: %s", error)
            old_revision = self._controller.image.revision


def _log_leaderless(image: MetadataImage, delta: MetadataDelta) -> None:
    leaderless = [
        f"{name}-{index}"
        for name, index in delta.leader_changed
        if image.topics[name].partitions[index].leader == LEADERLESS
    ]
    if leaderless:
        _log.warning(
            "%d partitions have no leader, because no live node has all their records: %s%s",
            len(leaderless),
            ", ".join(leaderless[:_NAMED_MAX]),
            "" if len(leaderless) <= _NAMED_MAX else ", ...",
        )
