"""What ``share redrive`` and ``cursor replay`` share: show which dead letters would go back, ask, send."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tidemill.cli.session import Session, confirm

if TYPE_CHECKING:
    from collections import Counter

    from tidemill.client.cluster import Cluster

__all__ = ("send_back", "show_sent_back")

_REASONS_MAX = 20


class SentBack(Protocol):
    """Dead letters that went back, or would go back."""

    #: By the topic that they came from, how many letters.
    sent: Counter[str]
    #: The same by the reason for which their records died.
    reasons: Counter[str]


_Found = TypeVar("_Found", bound=SentBack)


def send_back(
    session: Session,
    work: Callable[[Cluster, bool], Coroutine[Any, Any, _Found]],
    *,
    execute: bool,
    yes: bool,
) -> _Found:
    """Run ``work``, which is told whether to send. People at a terminal see before it what would be sent."""
    if execute and not yes and sys.stdin.isatty():
        planned = session.run(lambda cluster: work(cluster, False))
        if planned.sent:
            count = planned.sent.total()
            topics = ", ".join(sorted(planned.sent))
            what = "1 record" if count == 1 else f"{count} records"
            confirm(f"Send {what} back to {topics}? All readers of the topic see them again.", yes=yes)
    return session.run(lambda cluster: work(cluster, execute))


def show_sent_back(
    session: Session,
    owner: Mapping[str, str],
    found: SentBack,
    others: Mapping[str, int],
    *,
    executed: bool,
) -> None:
    """Write what went back and why it had died, and by cause how many ``others`` were not sent.

    ``owner`` is whose letters they are: its kind and its name.
    """
    from tidemill.cli.output import Table, show, write_line

    rows = [("back to", topic, count) for topic, count in sorted(found.sent.items())]
    rows += [("died of", reason, count) for reason, count in found.reasons.most_common(_REASONS_MAX)]
    rows += [("not sent", why.replace("_", " "), count) for why, count in others.items() if count]
    told = {"executed": executed, "sent": dict(found.sent), "reasons": dict(found.reasons)}
    show(session, {**owner, **told, **others}, *([Table(("what", "which", "letters"), rows)] if rows else []))
    if session.as_json:
        return
    if not rows:
        whose = " ".join(word for each in owner.items() for word in each)
        write_line(f"{whose} has no dead letters that were not sent back already")
    elif found.sent and not executed:
        write_line(
            "nothing was sent back; add --execute to do it. All readers of the topic see the records again"
        )
