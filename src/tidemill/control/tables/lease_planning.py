"""Planning of leases of snapshots: from an image and a command to the keys to write, or to an error. Pure.

A lease is put under the guard of its table's record, so that none is renewed after the table was dropped. One
that is created while the table is being dropped may stay behind, until it is over and dropped as such.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.control.plans import Plan, guards, planner, write_one
from tidemill.control.records import encode
from tidemill.control.stores.store import TXN_OPERATIONS_MAX
from tidemill.control.tables.commands import DropExpiredLeases, DropLease, PutLease
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage
from tidemill.control.tables.records import LeaseRecord, lease_key, table_key
from tidemill.control.tables.rules import LEASES_PER_TABLE_MAX, check_lease, check_leases
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.control.image import MetadataImage
    from tidemill.control.placement import ControlLimits

__all__ = ("LEASES_PER_DROP_MAX", "first_leases")

LEASES_PER_DROP_MAX = TXN_OPERATIONS_MAX // 2
"""The most leases that one transaction drops: each takes a guard, to lose no renewal, and a delete."""

_SNAPSHOTS_PER_DROP = 5_000
"""Every node looks at all snapshots of the leases that one transaction drops, in one turn of its loop."""


def first_leases(leases: Sequence[LeaseImage], most: int) -> tuple[LeaseImage, ...]:
    """The first ``most`` of the leases, or fewer if those have very many snapshots; one at least."""
    snapshots = 0
    for count, lease in enumerate(leases[:most]):
        snapshots += len(lease.snapshots)
        if count and snapshots > _SNAPSHOTS_PER_DROP:
            return tuple(leases[:count])
    return tuple(leases[:most])


@planner.register(PutLease)
def _(command: PutLease, image: MetadataImage, limits: ControlLimits) -> Plan[LeaseImage]:
    lease = command.lease
    check_lease(lease)
    there = image.leases.get(lease.lease_id)
    if command.renew and (there is None or there.table_id != lease.table_id):
        raise _not_found(lease.lease_id)
    table = image.tables_by_id.get(lease.table_id)
    if table is None:
        raise TableError(TableCode.table_not_found, f"there is no table with the number {lease.table_id}")
    if there is not None and there.table_id != lease.table_id:
        raise ApiError(
            ErrorCode.invalid_request,
            f"lease {lease.lease_id!r} is of the table with the number {there.table_id}, not"
            f" {lease.table_id}; take a lease with another id",
        )
    if there is None and len(image.leases_of(table.id)) >= LEASES_PER_TABLE_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"table {table.name!r} has {LEASES_PER_TABLE_MAX} leases, which is the limit; release some, or"
            " wait until they are over",
        )
    if command.add and there is not None:
        lease = replace(lease, snapshots=_with_added(there.snapshots, lease.snapshots))
        check_lease(lease)
    check_leases(image.catalog, lease, there)
    key = lease_key(lease.lease_id)
    return Plan({key: encode(_record(lease))}, guards(image, (key, table_key(table.name))), lease)


@planner.register(DropLease)
def _(command: DropLease, image: MetadataImage, limits: ControlLimits) -> Plan[LeaseImage]:
    lease = image.leases.get(command.lease_id)
    if lease is None:
        raise _not_found(command.lease_id)
    return write_one(image, lease_key(lease.lease_id), None, lease)


@planner.register(DropExpiredLeases)
def _(
    command: DropExpiredLeases, image: MetadataImage, limits: ControlLimits
) -> Plan[tuple[LeaseImage, ...]]:
    over = [lease for lease in image.leases.values() if lease.expires_at_ms <= command.now_ms]
    over.sort(key=lambda lease: (lease.expires_at_ms, lease.lease_id))
    dropped = first_leases(over, LEASES_PER_DROP_MAX)
    keys = [lease_key(lease.lease_id) for lease in dropped]
    return Plan(dict.fromkeys(keys), guards(image, keys), dropped)


def _with_added(
    there: tuple[LeasedSnapshot, ...], added: tuple[LeasedSnapshot, ...]
) -> tuple[LeasedSnapshot, ...]:
    """The snapshots of both, one for each bucket: the added one where there are two."""
    by_bucket = {(each.partition_id, each.bucket): each for each in (*there, *added)}
    return tuple(by_bucket[bucket] for bucket in sorted(by_bucket))


def _not_found(lease_id: str) -> TableError:
    return TableError(
        TableCode.lease_not_found,
        f"there is no lease {lease_id[:120]!r}: it expired, was released, or never was; take a new one",
    )


def _record(lease: LeaseImage) -> LeaseRecord:
    return LeaseRecord(
        lease_id=lease.lease_id,
        table_id=lease.table_id,
        holder=lease.holder,
        expires_at_ms=lease.expires_at_ms,
        snapshots=lease.snapshots,
    )
