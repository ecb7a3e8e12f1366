"""What a handler can say about its record other than by returning."""

from __future__ import annotations

from tidemill.client.arguments import millis

__all__ = ("Reject", "Retry")


class Reject(Exception):
    """Raised by a handler: the record cannot be processed, now or later.

    It goes to the group's dead-letter topic with the reason, or away if the group has none.

    >>> str(Reject("no such address"))
    'no such address'
    """


class Retry(Exception):
    """Raised by a handler: the record is to be delivered again.

    ``delay`` in seconds says when; without it the group's backoff decides.

    >>> Retry("the mail server is busy", delay=30).delay
    30
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        super().__init__(reason)
        if delay is not None:
            millis("delay", delay)
        self.delay = delay
