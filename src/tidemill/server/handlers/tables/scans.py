"""Reading tables: look-ups, scans, pins, statistics, snapshots and leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.control.tables.images import LeaseImage
from tidemill.coordination.turns import give_way, in_slices
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables.definitions import table_handler
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    ALTER,
    DESCRIBE,
    READ,
    TOPIC,
    AclOperation,
    for_each,
    for_one,
)
from tidemill.server.requests.call import Call

if TYPE_CHECKING:
    from tidemill.server.tables.node_tables import NodeTables
    from tidemill.tables.scanning.sessions import BucketKey

__all__ = (
    "acquire_lease",
    "authorize_table",
    "create_snapshot",
    "list_leases",
    "list_snapshots",
    "look_up_kv",
    "pin_table",
    "release_lease",
    "release_pin",
    "scan_kv",
    "table_stats",
)


#: Offsets to wait for in one request: as many as a table can have buckets on one node.
_MIN_OFFSETS_MAX = 30_000
#: The size that an answer may have even while the node's memory for answers is used up.
_ANSWER_BYTES_MIN = 64 * 1024


@serves("LookupKv", for_each(READ, TOPIC))
@table_handler
async def look_up_kv(broker: Broker, call: Call) -> dict[str, Any]:
    """Look up rows by their keys."""
    request = call.request
    authorize_table(broker, call, READ, request.table_id)
    tables = await broker.tables.load()
    found = await tables.scans.look_up(
        tables.bucket_key(request),
        request.leader_epoch,
        request.keys,
        request.columns,
        request.min_offset,
        request.max_wait_ms,
        _answer_bytes_max(broker, call),
    )
    return {"log_offset": found.log_offset, "records": found.records}


def authorize_table(broker: Broker, call: Call, operation: AclOperation, table_id: int) -> None:
    """Raise unless the caller may do this with the table; a missing table is reported later."""
    table = broker.image.tables_by_id.get(table_id)
    if table is not None:
        call.authorize(operation, TOPIC, table.name)


def _answer_bytes_max(broker: Broker, call: Call) -> int:
    """The most bytes that the next answer may have."""
    return max(broker.budget.answer_bytes_max(call.client.address), _ANSWER_BYTES_MIN)


@serves("ScanKv", for_each(READ, TOPIC))
@table_handler
async def scan_kv(broker: Broker, call: Call) -> dict[str, Any]:
    """One call of a scan: open it, go on with it, keep it alive, or close it."""
    request = call.request
    tables = await broker.tables.load()
    scans = tables.scans
    if request.close:
        if request.scanner_id is not None:
            scans.close(request.scanner_id)
        return {"log_offset": -1}
    if request.keep_alive:
        if request.scanner_id is None:
            raise refused("only a scan that is open can be kept alive: the request names none")
        scans.keep_alive(request.scanner_id)
        return {"scanner_id": request.scanner_id, "has_more": True, "log_offset": -1}
    size = min(request.batch_size_bytes, _answer_bytes_max(broker, call))
    if request.scanner_id is not None:
        answer = await scans.go_on(request.scanner_id, request.call_sequence, size)
    else:
        authorize_table(broker, call, READ, request.table_id)
        answer = await scans.open(tables.open_scan(request), request.call_sequence, size, call.client)
    return {
        "scanner_id": answer.scanner_id,
        "has_more": answer.has_more,
        "log_offset": answer.log_offset,
        "next_key": answer.next_key,
        "records": answer.records,
    }


@serves("PinTable", for_each(READ, TOPIC))
@table_handler
async def pin_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Pin a table's state."""
    request = call.request
    authorize_table(broker, call, READ, request.table_id)
    tables = await broker.tables.load()
    if len(request.min_offsets) > _MIN_OFFSETS_MAX:
        raise refused(f"{len(request.min_offsets)} offsets to wait for, {_MIN_OFFSETS_MAX} are the most")
    wanted = await in_slices(
        (tables.bucket_key(each, request.table_id), each.offset) for each in request.min_offsets
    )
    pin = await tables.scans.pin(
        request.table_id,
        dict(wanted),
        request.max_wait_ms,
        request.idle_ms,
        call.client,
        named=await tables.named_buckets(request, request.table_id),
        pin_id=request.pin_id,
    )
    return {
        "pin_id": pin.id,
        "expires_in_ms": pin.idle_ms,
        "buckets": [
            {
                "partition_id": key.partition_id,
                "bucket": key.bucket,
                "leader_epoch": pin.epochs[key],
                "log_offset": view.log_offset,
                "log_epoch": pin.log_epochs[key],
            }
            for key, view in pin.views.items()
        ],
    }


# No permission is asked for: a client that knows the id of a pin or scan was allowed to make it.
@serves("ReleasePin")
@table_handler
async def release_pin(broker: Broker, call: Call) -> dict[str, Any]:
    """Release a pin, or keep it from expiring."""
    scans = (await broker.tables.load()).scans
    if call.request.keep_alive:
        scans.keep_pin(call.request.pin_id)
    else:
        scans.pins.release(call.request.pin_id)
    return {}


@serves("TableStats", for_one(DESCRIBE, TOPIC, "table"))
@table_handler
async def table_stats(broker: Broker, call: Call) -> dict[str, Any]:
    """Report rows, bytes and offsets of every bucket."""
    tables = await broker.tables.load()
    named = await _named(tables, call.request)
    return {"buckets": await tables.statistics.of_buckets(call.request.table, named)}


@serves("ListSnapshots", for_one(DESCRIBE, TOPIC, "table"))
@table_handler
async def list_snapshots(broker: Broker, call: Call) -> dict[str, Any]:
    """List the durable snapshots of a table."""
    tables = await broker.tables.load()
    named = await _named(tables, call.request)
    return {"snapshots": await tables.statistics.of_snapshots(call.request.table, named)}


@serves("CreateSnapshot", for_one(ALTER, TOPIC, "table"))
@table_handler
async def create_snapshot(broker: Broker, call: Call) -> dict[str, Any]:
    """Take a snapshot of every bucket."""
    tables = await broker.tables.load()
    named = await _named(tables, call.request)
    return {"snapshots": await tables.create_snapshots(call.request.table, named)}


@serves("AcquireLease", for_one(READ, TOPIC, "table"))
@table_handler
async def acquire_lease(broker: Broker, call: Call) -> dict[str, Any]:
    """Acquire a lease, or renew one."""
    request = call.request
    tables = await broker.tables.load()
    lease = await tables.leases.acquire(
        request.table,
        request.lease_id,
        request.holder,
        request.duration_ms,
        fresh=request.fresh,
        named=await _named(tables, request),
    )
    return {"lease": await _lease(broker, lease)}


@serves("ReleaseLease", for_each(READ, TOPIC))
@table_handler
async def release_lease(broker: Broker, call: Call) -> dict[str, Any]:
    """Release a lease."""
    lease = broker.image.leases.get(call.request.lease_id)
    if lease is not None:
        authorize_table(broker, call, READ, lease.table_id)
    await (await broker.tables.load()).leases.release(call.request.lease_id)
    return {}


@serves("ListLeases", for_each(DESCRIBE, TOPIC))
@table_handler
async def list_leases(broker: Broker, call: Call) -> dict[str, Any]:
    """List the leases of a table, or all."""
    found = []
    for lease in await (await broker.tables.load()).leases.of_table(call.request.table):
        if call.may(DESCRIBE, TOPIC, _table_name(broker, lease)):
            found.append(await _lease(broker, lease))
        await give_way()
    return {"leases": found}


async def _named(tables: NodeTables, request: Any) -> list[BucketKey]:
    """The buckets that a request about a table by name is for; none if it is about all."""
    return await tables.named_buckets(request, tables.service.named(request.table).table_id)


def _table_name(broker: Broker, lease: LeaseImage) -> str:
    """The name of the lease's table; empty if the table was dropped."""
    table = broker.image.tables_by_id.get(lease.table_id)
    return "" if table is None else table.name


async def _lease(broker: Broker, lease: LeaseImage) -> dict[str, Any]:
    return {
        "lease_id": lease.lease_id,
        "table": _table_name(broker, lease),
        "holder": lease.holder,
        "expires_at_ms": lease.expires_at_ms,
        "snapshots": await in_slices(
            {
                "partition_id": held.partition_id,
                "bucket": held.bucket,
                "snapshot_id": held.snapshot_id,
                "log_offset": held.log_offset,
            }
            for held in lease.snapshots
        ),
    }
