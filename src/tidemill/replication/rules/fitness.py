"""Whether a replica's disk is good enough to lead. Pure."""

from __future__ import annotations

from tidemill.errors import StorageError

__all__ = ("UNFIT_AFTER_S", "unfit_reason")

#: A flush that hangs, or a full disk, is waited for this long.
UNFIT_AFTER_S = 5.0


def unfit_reason(
    failure: StorageError | None, *, refused_for_s: float | None, flushing_for_s: float | None
) -> str | None:
    """Why a replica should not lead: its disk failed, is full, or hangs; None if it can.

    >>> unfit_reason(None, refused_for_s=None, flushing_for_s=7.0)
    'a flush has hung for 7 s'
    """
    if failure is not None:
        return f"its storage has stopped: {failure}"
    if refused_for_s is not None and refused_for_s >= UNFIT_AFTER_S:
        return f"its disk has taken no writes for {refused_for_s:.0f} s"
    if flushing_for_s is not None and flushing_for_s >= UNFIT_AFTER_S:
        return f"a flush has hung for {flushing_for_s:.0f} s"
    return None
