"""From a request to its handler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from tidemill.coordination.log_summary import LogSummary
from tidemill.coordination.shares import share_address
from tidemill.errors import ErrorCode
from tidemill.server.answers import is_heavy
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.connection import Connection
from tidemill.server.handlers import (
    configs,
    consumer_groups,
    features,
    groups,
    jobs,
    log_dirs,
    metadata,
    offsets,
    producers,
    quorum,
    scans,
    splitting,
    tables,
    topics,
    transactions,
)
from tidemill.server.handlers.api_versions import api_versions_body
from tidemill.server.handlers.fetch import fetch
from tidemill.server.handlers.produce import produce
from tidemill.server.metrics import RequestMetrics
from tidemill.server.watchdog import LoopWatchdog
from tidemill.wire.apis import API_VERSIONS_KEY, is_served
from tidemill.wire.encode import encode_response

__all__ = ("BrokerDispatcher",)

logger = logging.getLogger(__name__)

#: How long a stop waits for the answers to requests that run.
_CLOSE_TIMEOUT_SECONDS = 1.0
_DETAIL_MAX = 200

Handler = Callable[[Broker, Call], Awaitable[dict[str, Any]]]

_HANDLERS: Final[dict[int, Handler]] = {
    2: offsets.list_offsets,
    3: metadata.metadata,
    8: groups.offset_commit,
    9: groups.offset_fetch,
    10: metadata.find_coordinator,
    11: groups.join_group,
    12: groups.heartbeat,
    13: groups.leave_group,
    14: groups.sync_group,
    15: groups.describe_groups,
    16: groups.list_groups,
    19: topics.create_topics,
    20: topics.delete_topics,
    21: offsets.delete_records,
    22: producers.init_producer_id,
    23: offsets.offset_for_leader_epoch,
    24: transactions.add_partitions_to_txn,
    25: transactions.add_offsets_to_txn,
    26: transactions.end_txn,
    27: transactions.write_txn_markers,
    28: transactions.txn_offset_commit,
    32: configs.describe_configs,
    33: configs.alter_configs,
    35: log_dirs.describe_log_dirs,
    37: topics.create_partitions,
    42: groups.delete_groups,
    43: topics.elect_leaders,
    44: configs.incremental_alter_configs,
    47: groups.offset_delete,
    55: quorum.describe_quorum,
    57: features.update_features,
    60: metadata.describe_cluster,
    61: transactions.describe_producers,
    65: transactions.describe_transactions,
    66: transactions.list_transactions,
    68: consumer_groups.consumer_group_heartbeat,
    69: consumer_groups.consumer_group_describe,
    74: configs.list_config_resources,
    75: metadata.describe_topic_partitions,
    1001: tables.create_database,
    1002: tables.drop_database,
    1003: tables.list_databases,
    1004: tables.alter_database,
    1005: tables.create_table,
    1006: tables.drop_table,
    1007: tables.describe_table,
    1008: tables.list_tables,
    1009: tables.alter_table,
    1010: tables.create_table_partition,
    1011: tables.drop_table_partition,
    1012: scans.table_stats,
    1020: scans.list_snapshots,
    1021: scans.create_snapshot,
    1022: scans.acquire_lease,
    1023: scans.release_lease,
    1024: scans.list_leases,
    1060: scans.look_up_kv,
    1061: scans.scan_kv,
    1062: scans.pin_table,
    1063: scans.release_pin,
    1064: splitting.split_bucket,
    1065: splitting.measure_log,
    1070: jobs.open_attempt,
    1071: jobs.publish_attempts,
    1072: jobs.abort_attempts,
    1073: jobs.keep_job,
    1074: jobs.list_jobs,
}

#: Produce and Fetch answer by themselves, without a task of their own.
_HOT_HANDLERS: Final[dict[int, Callable[[Broker, Call], None]]] = {0: produce, 1: fetch}


class BrokerDispatcher:
    """Runs handlers, and keeps track of the connections."""

    def __init__(self, broker: Broker, metrics: RequestMetrics, watchdog: LoopWatchdog | None = None) -> None:
        self.watchdog = watchdog or LoopWatchdog()
        self._broker = broker
        self._metrics = metrics
        self.answered = metrics.answered
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: set[Connection] = set()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._per_address: dict[str, int] = {}
        #: Of what clients can cause as often as they like.
        self._summary = LogSummary()

    # --- connections

    def opened(self, connection: Connection) -> bool:
        settings = self._broker.settings
        address = share_address(connection.host)
        here = self._per_address.get(address, 0)
        per_ip = settings.max_connections_per_ip
        if len(self.connections) >= settings.max_connections or (per_ip and here >= per_ip):
            self._metrics.connections_refused += 1
            limit = "max_connections_per_ip" if per_ip and here >= per_ip else "max_connections"
            why = f"{limit} ({getattr(settings, limit)}) are open"
            if self._note("connections refused", connection.host, why):
                logger.warning("refused a connection of %s: %s", connection.host, why)
            return False
        self.connections.add(connection)
        self._all_closed.clear()
        self._per_address[address] = here + 1
        return True

    def closed(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
            address = share_address(connection.host)
            left = self._per_address[address] - 1
            if left:
                self._per_address[address] = left
            else:
                del self._per_address[address]
            if not self.connections:
                self._all_closed.set()

    def closing(self, connection: Connection, why: str) -> None:
        self._metrics.connections_closed += 1
        if self._note("connections closed", connection.host, why, logging.INFO):
            logger.info("closing the connection of %s: %s", connection.host, why)

    def tick(self) -> None:
        """Once a second: memory for those who wait for it, and log lines that were held back."""
        now = _now()
        for account, why in self._broker.budget.stalled(now):
            account.owner.give_way(why)
        for level, line in self._summary.due(now):
            logger.log(level, line)

    def _note(self, kind: str, source: str, detail: str, level: int = logging.WARNING) -> bool:
        return self._summary.note(kind, source, detail, _now(), level)

    # --- requests

    def dispatch(self, call: Call) -> None:
        key = call.header.api_key
        self._metrics.count(key)
        call.watchdog = self.watchdog
        try:
            self._dispatch(key, call)
        finally:
            self.watchdog.end_turn(call.turn, key, call)

    def _dispatch(self, key: int, call: Call) -> None:
        hot = _HOT_HANDLERS.get(key)
        if hot is not None:
            try:
                hot(self._broker, call)
            except Exception as error:  # noqa: BLE001 - reported there
                self._failed(call, error)
        elif key == API_VERSIONS_KEY:
            _answer_api_versions(call)
        else:
            task = call.start_task(self._run(_HANDLERS[key], call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, handler: Handler, call: Call) -> None:
        try:
            body = await handler(self._broker, call)
            if is_heavy(body):
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

    def _failed(self, call: Call, error: Exception) -> None:
        # A bug must not leave the client waiting, nor reach whoever's progress started the request.
        kind = f"API {call.header.api_key} version {call.version} failed"
        if self._note(kind, call.client_host, repr(error)[:_DETAIL_MAX], logging.ERROR):
            logger.error(kind, exc_info=error)
        self._metrics.failures += 1
        call.abort()

    async def close(self) -> None:
        """Let the requests that run come to their end for a moment, then close every connection."""
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


def _answer_api_versions(call: Call) -> None:
    if is_served(call.header.api_key, call.version):
        call.reply(api_versions_body())
        return
    # A version from the future gets the table in the oldest format, from which every client can go on.
    body = api_versions_body(ErrorCode.unsupported_version)
    call.reply_buffers([encode_response(API_VERSIONS_KEY, 0, call.header.correlation_id, body)])
