"""The dispatcher: takes requests of all connections to their handlers, and answers back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from tidemill.coordination.fair_shares import share_address
from tidemill.coordination.log_summary import LogSummary
from tidemill.coordination.metrics import Metric, gauge
from tidemill.coordination.turns import begin_slice, free_in_slices, give_way
from tidemill.errors import ApiError
from tidemill.server.broker import Broker
from tidemill.server.connections.connection import Connection
from tidemill.server.requests import api_table
from tidemill.server.requests.api_table import OVERLAPPING, ServedApi, load_first, served_api
from tidemill.server.requests.authorization import CLUSTER, CLUSTER_NAME, Authorizer, refusal
from tidemill.server.requests.call import Call
from tidemill.server.traffic import Traffic
from tidemill.server.watchdog import LoopWatchdog
from tidemill.wire.apis import response_class
from tidemill.wire.encode import encode_response
from tidemill.wire.schema import EntityClass, fields_of

__all__ = ("CONNECTION_METRICS", "BrokerDispatcher")

logger = logging.getLogger(__name__)

#: How long a stop waits for the answers to requests that run.
_CLOSE_TIMEOUT_SECONDS = 1.0
_DETAIL_MAX = 200
_ISOLATED: Final = "this node reaches neither etcd nor another node; another one serves its clients"

#: An answer with more elements than this is encoded in a thread.
_HEAVY_ELEMENTS: Final = 1_000
#: So many characters of text count as one element.
_TEXT_PER_ELEMENT: Final = 4_096
#: Made once, because every field of an answer is compared with them.
_TEXTS: Final = (str, bytes)
_ARRAYS: Final = (list, tuple)


class BrokerDispatcher:
    """Runs handlers, and keeps track of the connections."""

    def __init__(
        self,
        broker: Broker,
        traffic: Traffic,
        watchdog: LoopWatchdog | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        self.watchdog = watchdog or LoopWatchdog()
        self._broker = broker
        self._traffic = traffic
        self.answered = traffic.answered
        #: Asked before requests are worked on; None lets everybody do everything.
        self.authorizer = authorizer
        load_first()
        self.overlapping = OVERLAPPING
        self.is_loaded = api_table.is_loaded
        self.load = api_table.load
        # In order, so that what is done to all has one order in a simulation, too.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.connections: dict[Connection, None] = {}
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._per_address: dict[str, int] = {}
        #: Sums up log lines that clients can cause as often as they like.
        self._summary = LogSummary()

    # --- connections

    def opened(self, connection: Connection) -> bool:
        settings = self._broker.settings
        address = share_address(connection.host)
        here = self._per_address.get(address, 0)
        per_ip = settings.max_connections_per_ip
        why = ""
        if self._broker.find.is_isolated:
            why = _ISOLATED
        elif len(self.connections) >= settings.max_connections or (per_ip and here >= per_ip):
            limit = "max_connections_per_ip" if per_ip and here >= per_ip else "max_connections"
            why = f"{limit} ({getattr(settings, limit)}) are open"
        if why:
            self._traffic.connections_refused += 1
            if self._note("connections refused", connection.host, why):
                logger.warning("refused a connection of %s: %s", connection.host, why)
            return False
        self.connections[connection] = None
        self._all_closed.clear()
        self._per_address[address] = here + 1
        return True

    def closed(self, connection: Connection) -> None:
        if connection in self.connections:
            del self.connections[connection]
            self._broker.sharing.connection_closed(connection.id)
            address = share_address(connection.host)
            left = self._per_address[address] - 1
            if left:
                self._per_address[address] = left
            else:
                del self._per_address[address]
            if not self.connections:
                self._all_closed.set()

    def closing(self, connection: Connection, why: str) -> None:
        self._traffic.connections_closed += 1
        if self._note("connections closed", connection.host, why, logging.INFO):
            logger.info("closing the connection of %s: %s", connection.host, why)

    def tick(self) -> None:
        """Called once a second: frees memory that others wait for, and logs lines that were held back."""
        now = _now()
        for account, why in self._broker.budget.stalled(now):
            account.owner.give_way(why)
        for level, line in self._summary.due(now):
            logger.log(level, line)

    async def leave_to_others(self) -> None:
        """Close all connections while this node is isolated: their clients go to other nodes."""
        begin_slice()
        for connection in list(self.connections):
            if not self._broker.find.is_isolated:
                return
            self.closing(connection, _ISOLATED)
            connection.close()
            await give_way()

    def _note(self, kind: str, source: str, detail: str, level: int = logging.WARNING) -> bool:
        return self._summary.note(kind, source, detail, _now(), level)

    # --- requests

    def dispatch(self, call: Call) -> None:
        key = call.header.api_key
        self._traffic.count(key)
        call.watchdog = self.watchdog
        try:
            self._dispatch(key, call)
        finally:
            self.watchdog.end_turn(call.turn, key, call)

    def _dispatch(self, key: int, call: Call) -> None:
        served = served_api(key)
        if self.authorizer is not None:
            call.authorizer = self.authorizer
            error = _refusal(served, call)
            if error is not None:
                call.reply(_refused_whole(call, error))
                return
        if served.in_task:
            task = call.start_task(self._run(served, call))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
            return
        try:
            served.handler(self._broker, call)
        except Exception as error:  # noqa: BLE001 - reported there
            self._failed(call, error)

    async def _run(self, served: ServedApi, call: Call) -> None:
        try:
            body = await served.handler(self._broker, call)
            if _is_heavy(body):
                await self._reply_from_thread(call, body)
            else:
                call.reply(body)
        except Exception as error:  # noqa: BLE001 - reported there
            self._failed(call, error)

    async def _reply_from_thread(self, call: Call, body: dict[str, Any]) -> None:
        header = call.header
        encode = partial(encode_response, header.api_key, header.api_version, header.correlation_id, body)
        frame = await asyncio.get_running_loop().run_in_executor(None, encode)
        call.reply_buffers([frame])
        await free_in_slices(body)

    def _failed(self, call: Call, error: Exception) -> None:
        # A bug must neither leave the client waiting nor disturb the code that happened to start the request.
        kind = f"API {call.header.api_key} version {call.version} failed"
        if self._note(kind, call.client_host, repr(error)[:_DETAIL_MAX], logging.ERROR):
            logger.error(kind, exc_info=error)
        self._traffic.failures += 1
        call.abort()

    async def close(self) -> None:
        """Wait a short time for requests that run, then close every connection."""
        for connection in list(self.connections):
            connection.close_when_answered()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed.wait(), _CLOSE_TIMEOUT_SECONDS)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for level, line in self._summary.rest(_now()):
            logger.log(level, line)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _refusal(served: ServedApi, call: Call) -> ApiError | None:
    """The error if a request is refused as a whole; None if it is not."""
    if call.request is None:
        return None  # The version is not served; only an ApiVersions request gets this far then.
    for operation, resource, field in served.permissions:
        if field is None:
            continue  # The handler asks for each resource.
        name = CLUSTER_NAME if resource is CLUSTER else getattr(call.request, field) or ""
        if not call.may(operation, resource, name):
            return refusal(operation, resource, name)
    return None


def _refused_whole(call: Call, error: ApiError) -> dict[str, Any]:
    """The answer to a request that is refused as a whole: the error, and otherwise empty."""
    body = {"error_code": error.code, "error_message": error.message}
    entity: EntityClass = response_class(call.header.api_key, call.version)
    known = {spec.name for spec in fields_of(entity)}
    return {name: value for name, value in body.items() if name in known}


def _is_heavy(body: Mapping[str, Any]) -> bool:
    """Whether an answer has so many elements that encoding it would take the loop some milliseconds.

    >>> _is_heavy({"topics": [{"partitions": [{}] * 100}] * 9}), _is_heavy({"topics": [{}] * 1_001})
    (False, True)
    >>> _is_heavy({"assignment": {"partitions": [1] * 1_001}})
    True
    """
    return _count(body, _HEAVY_ELEMENTS) > _HEAVY_ELEMENTS


def _count(body: Mapping[str, Any], enough: int) -> int:
    """Elements of all arrays in the body, counted until there are more than enough; long texts count, too."""
    total = 0
    for value in body.values():
        if value is None or isinstance(value, int):
            continue  # Most fields are numbers.
        if isinstance(value, _TEXTS):
            total += len(value) // _TEXT_PER_ELEMENT
        elif isinstance(value, dict):
            total += _count(value, enough - total)
            if total > enough:
                break
        elif isinstance(value, _ARRAYS):
            total += len(value)
            if total > enough:
                break
            for element in value:
                if not isinstance(element, dict):
                    break
                total += _count(element, enough - total)
                if total > enough:
                    return total
    return total


CONNECTION_METRICS: Final[Sequence[Metric[BrokerDispatcher]]] = (
    gauge("tidemill_connections", "Open client connections.", lambda dispatcher: len(dispatcher.connections)),
)
