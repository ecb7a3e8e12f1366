"""A draft: commands planned one after the other, collected into one transaction.

Each command is planned against the image as the earlier ones of the draft will leave it. A key that the
draft has written already needs no further guard: its first guard covers the whole transaction.

A ``fence`` is one more guard: the transactions of a controller compare that it still is the controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.control.planning import Plan, plan
from tidemill.control.stores.store import (
    REQUEST_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Change,
    ChangeBatch,
    Compare,
    Put,
    Txn,
    request_bytes,
)
from tidemill.errors import ApiError, ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.control.commands import Command
    from tidemill.control.image import MetadataImage
    from tidemill.control.placement import ControlLimits

__all__ = ("Draft",)


class Draft:
    """Commands that are planned to become one transaction. Invariant: it is within the store's limits."""

    def __init__(self, image: MetadataImage, limits: ControlLimits, fence: Compare | None = None) -> None:
        self._staged = image
        self._limits = limits
        self._writes: dict[str, bytes | None] = {}
        self._guards: dict[str, int] = {} if fence is None else {fence.key: fence.mod_revision}
        self._bytes = request_bytes((key, 0) for key in self._guards)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to commit."""
        return not self._writes

    def fill(self, commands: Sequence[Command[Any]]) -> list[Any]:
        """Add commands until one does not fit; gives the result or the error of each that was handled."""
        results: list[Any] = []
        for command in commands:
            try:
                if not self._try_add(command, results):
                    break
            except TidemillError as error:
                results.append(error)
        return results

    def txn(self) -> Txn:
        """The transaction that the draft's commands make."""
        return Txn(
            compares=tuple(Compare(key, revision) for key, revision in self._guards.items()),
            puts=tuple(Put(key, value) for key, value in self._writes.items() if value is not None),
            deletes=tuple(key for key, value in self._writes.items() if value is None),
        )

    def _try_add(self, command: Command[Any], results: list[Any]) -> bool:
        planned = plan(self._staged, command, self._limits)
        writes = planned.writes
        guards = {
            key: rev
            for key, rev in planned.guards.items()
            if key not in self._writes and key not in self._guards
        }
        added_bytes = request_bytes((key, len(value or b"")) for key, value in writes.items())
        # A later command of the draft overwrites what an earlier one wrote to the same key.
        rewritten = self._writes.keys() & writes.keys()
        added_bytes -= request_bytes((key, len(self._writes[key] or b"")) for key in rewritten)
        added_bytes += request_bytes((key, 0) for key in guards)
        operations = len(self._guards) + len(guards) + len(self._writes.keys() | writes.keys())
        too_long = next((key for key, value in writes.items() if len(value or b"") > VALUE_BYTES_MAX), None)
        if too_long or operations > TXN_OPERATIONS_MAX or self._bytes + added_bytes > REQUEST_BYTES_MAX:
            if self.empty or too_long:
                raise _too_large(planned, added_bytes)
            return False
        self._writes |= writes
        self._guards |= guards
        self._bytes += added_bytes
        if writes:
            changes = tuple(Change(key, writes[key]) for key in sorted(writes))
            self._staged = self._staged.apply(ChangeBatch(self._staged.revision + 1, changes))
        results.append(planned.result)
        return True


def _too_large(planned: Plan[Any], size_bytes: int) -> ApiError:
    return ApiError(
        ErrorCode.policy_violation,
        f"the change would write {len(planned.writes)} metadata keys and {size_bytes} bytes at once, over the"
        f" limits of {TXN_OPERATIONS_MAX} operations and {VALUE_BYTES_MAX} bytes per value; ask for less",
    )
