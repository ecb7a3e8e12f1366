"""The metrics of the share partitions that are loaded on a node. The lag is in ``lag``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tidemill.coordination.metrics import Metric, counters, gauge, gauges
from tidemill.coordination.share_state import DeliveryState
from tidemill.server.share.led_partition import LedSharePartition
from tidemill.server.share.service import ShareService

__all__ = ("SHARE_METRICS",)

_GROUP: Final = ("group",)

Series = Iterator[tuple[tuple[str, ...], float]]


def _total(field: str) -> Callable[[ShareService], Series]:
    def read(service: ShareService) -> Series:
        for group_id, totals in service.totals().items():
            yield (group_id,), getattr(totals, field)

    return read


def _sum(value: Callable[[LedSharePartition], float]) -> Callable[[ShareService], Series]:
    """A number of each share partition, summed up by group."""

    def read(service: ShareService) -> Series:
        found: dict[str, float] = {}
        for led in service:
            found[led.key.group_id] = found.get(led.key.group_id, 0) + value(led)
        return (((group_id,), number) for group_id, number in found.items())

    return read


def _oldest(state: DeliveryState) -> Callable[[ShareService], Series]:
    def read(service: ShareService) -> Series:
        now_ms, _ = service.times()
        found: dict[str, float] = {}
        for led in service:
            since_ms = led.machine.oldest_ms(state)
            age = 0.0 if since_ms is None else max(0, now_ms - since_ms) / 1_000
            found[led.key.group_id] = max(found.get(led.key.group_id, 0.0), age)
        return (((group_id,), number) for group_id, number in found.items())

    return read


SHARE_METRICS: Final[Sequence[Metric[ShareService]]] = (
    gauge("tidemill_share_sessions", "Open sessions of members.", lambda service: len(service.sessions)),
    gauge("tidemill_share_partitions", "Share partitions that are loaded.", len),
    counters("tidemill_share_acquired_total", "Records given to members.", _GROUP, _total("acquired")),
    counters("tidemill_share_accepted_total", "Records that were accepted.", _GROUP, _total("accepted")),
    counters("tidemill_share_released_total", "Records that were released.", _GROUP, _total("released")),
    counters("tidemill_share_rejected_total", "Records that were rejected.", _GROUP, _total("rejected")),
    counters("tidemill_share_expired_total", "Records whose lock ended.", _GROUP, _total("expired")),
    counters(
        "tidemill_share_dead_total",
        "Records that were rejected or reached the delivery limit.",
        _GROUP,
        _total("dead"),
    ),
    counters(
        "tidemill_share_lost_total",
        "Records that were not finished when the start of the log passed them.",
        _GROUP,
        _total("lost"),
    ),
    counters(
        "tidemill_share_cut_total",
        "Records that were finished when an unclean election cut them off the log.",
        _GROUP,
        _total("cut"),
    ),
    gauges(
        "tidemill_share_locked_records",
        "Records that members hold.",
        _GROUP,
        _sum(lambda led: led.machine.acquired_count),
    ),
    gauges(
        "tidemill_share_delayed_records",
        "Records that wait for their time.",
        _GROUP,
        _sum(lambda led: led.machine.delayed_count),
    ),
    gauges(
        "tidemill_share_blocked_records",
        "Records that wait for an earlier one of their key.",
        _GROUP,
        _sum(lambda led: led.machine.blocked_count),
    ),
    gauges(
        "tidemill_share_stalled_partitions",
        "Partitions that hand out nothing new: too many records are delayed, blocked or due as dead letters.",
        _GROUP,
        _sum(lambda led: led.machine.is_stalled),
    ),
    gauges(
        "tidemill_share_dead_letters_due",
        "Records that died and whose dead letters are not written yet.",
        _GROUP,
        _sum(lambda led: led.machine.due_letter_count),
    ),
    gauges(
        "tidemill_share_lock_age_seconds",
        "Age of the oldest lock.",
        _GROUP,
        _oldest(DeliveryState.ACQUIRED),
    ),
    gauges(
        "tidemill_share_oldest_waiting_seconds",
        "How long the oldest record has waited that came back, is delayed or is blocked; not those that "
        "nobody was given yet.",
        _GROUP,
        _oldest(DeliveryState.AVAILABLE),
    ),
)
