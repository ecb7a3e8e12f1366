"""Reading tables: look-ups, scans, pins, statistics, snapshots and leases."""

from __future__ import annotations

from typing import Any

from tidemill.control.table_images import LeaseImage
from tidemill.server.broker import Broker
from tidemill.server.call import Call
from tidemill.server.handlers.outcome import refused
from tidemill.server.handlers.tables import table_handler

__all__ = (
    "acquire_lease",
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


#: As many as the buckets that a table can have on one node.
_MIN_OFFSETS_MAX = 30_000
#: What an answer may have also while the node's memory for answers is used up.
_ANSWER_BYTES_MIN = 64 * 1024


@table_handler
async def look_up_kv(broker: Broker, call: Call) -> dict[str, Any]:
    """Rows by key."""
    request = call.request
    tables = await broker.tables()
    found = await tables.scans.look_up(
        tables.bucket_key(request),
        request.leader_epoch,
        request.keys,
        request.columns,
        request.min_offset,
        request.max_wait_ms,
        _room(broker, call),
    )
    return {"log_offset": found.log_offset, "records": found.records}


def _room(broker: Broker, call: Call) -> int:
    """Bytes that the next answer may have."""
    return max(broker.budget.answer_room(call.client.address), _ANSWER_BYTES_MIN)


@table_handler
async def scan_kv(broker: Broker, call: Call) -> dict[str, Any]:
    """One call of a scan: open it, go on with it, keep it alive, or close it."""
    request = call.request
    tables = await broker.tables()
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
    size = min(request.batch_size_bytes, _room(broker, call))
    if request.scanner_id is not None:
        answer = await scans.go_on(request.scanner_id, request.call_sequence, size)
    else:
        answer = await scans.open(tables.open_scan(request), request.call_sequence, size, call.client)
    return {
        "scanner_id": answer.scanner_id,
        "has_more": answer.has_more,
        "log_offset": answer.log_offset,
        "next_key": answer.next_key,
        "records": answer.records,
    }


@table_handler
async def pin_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Hold a table's state still."""
    request = call.request
    tables = await broker.tables()
    if len(request.min_offsets) > _MIN_OFFSETS_MAX:
        raise refused(f"{len(request.min_offsets)} offsets to wait for, {_MIN_OFFSETS_MAX} are the most")
    wanted = {tables.bucket_key(each, request.table_id): each.offset for each in request.min_offsets}
    pin = await tables.scans.pin(request.table_id, wanted, request.max_wait_ms, request.idle_ms, call.client)
    return {
        "pin_id": pin.id,
        "expires_in_ms": pin.idle_ms,
        "buckets": [
            {
                "partition_id": key.partition_id,
                "bucket": key.bucket,
                "leader_epoch": pin.epochs[key],
                "log_offset": view.log_offset,
            }
            for key, view in pin.views.items()
        ],
    }


@table_handler
async def release_pin(broker: Broker, call: Call) -> dict[str, Any]:
    """Let go of a pin, or say that it is still needed."""
    scans = (await broker.tables()).scans
    if call.request.keep_alive:
        scans.keep_pin(call.request.pin_id)
    else:
        scans.pins.release(call.request.pin_id)
    return {}


@table_handler
async def table_stats(broker: Broker, call: Call) -> dict[str, Any]:
    """Numbers of every bucket."""
    tables = await broker.tables()
    return {"buckets": await tables.stats(call.request.table)}


@table_handler
async def list_snapshots(broker: Broker, call: Call) -> dict[str, Any]:
    """The durable snapshots of a table."""
    tables = await broker.tables()
    return {"snapshots": await tables.list_snapshots(call.request.table)}


@table_handler
async def create_snapshot(broker: Broker, call: Call) -> dict[str, Any]:
    """Take a snapshot of every bucket."""
    tables = await broker.tables()
    return {"snapshots": await tables.create_snapshots(call.request.table)}


@table_handler
async def acquire_lease(broker: Broker, call: Call) -> dict[str, Any]:
    """Begin a lease, or renew one."""
    request = call.request
    tables = await broker.tables()
    lease = await tables.leases.acquire(
        request.table, request.lease_id, request.holder, request.duration_ms, fresh=request.fresh
    )
    return {"lease": _lease(broker, lease)}


@table_handler
async def release_lease(broker: Broker, call: Call) -> dict[str, Any]:
    """End a lease."""
    await (await broker.tables()).leases.release(call.request.lease_id)
    return {}


@table_handler
async def list_leases(broker: Broker, call: Call) -> dict[str, Any]:
    """The leases of a table, or all."""
    leases = (await broker.tables()).leases.of_table(call.request.table)
    return {"leases": [_lease(broker, lease) for lease in leases]}


def _lease(broker: Broker, lease: LeaseImage) -> dict[str, Any]:
    table = broker.image.tables_by_id.get(lease.table_id)
    return {
        "lease_id": lease.lease_id,
        "table": "" if table is None else table.name,
        "holder": lease.holder,
        "expires_at_ms": lease.expires_at_ms,
        "snapshots": [
            {
                "partition_id": held.partition_id,
                "bucket": held.bucket,
                "snapshot_id": held.snapshot_id,
                "log_offset": held.log_offset,
            }
            for held in lease.snapshots
        ],
    }
