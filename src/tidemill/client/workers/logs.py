"""What workers log, with fields: the names below are attributes of the log record, as ``extra`` has them.

A formatter that writes extra attributes, such as ``JsonFormatter``, shows them; others show the message,
which says the same.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ("WORKER_LOG", "JsonFormatter", "called", "record_fields")

WORKER_LOG: Final = logging.getLogger("tidemill.worker")

_FIELDS: Final = (
    "worker",
    "group",
    "topic",
    "partition",
    "offset",
    "key",
    "delivery_count",
    "duration_ms",
    "outcome",
    "reason",
    "counts",
)


def called(name: str | None) -> str:
    """What logs and errors call a worker.

    >>> called("emails"), called(None)
    ('emails', 'without a name')
    """
    return "without a name" if name is None else name


def record_fields(worker: str, record: Any) -> dict[str, Any]:
    """The fields that name a record."""
    key: bytes | None = getattr(record, "key", None)  # A change of a table that a cursor delivers has none.
    return {
        "worker": worker,
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "key": None if key is None else key.decode("utf-8", "replace"),
        "delivery_count": getattr(record, "delivery_count", None),
    }


class JsonFormatter(logging.Formatter):
    """A log line as one JSON object: time, level, logger, message, the fields of workers, and the traceback.

    >>> entry = logging.makeLogRecord({"msg": "handled", "levelname": "INFO", "created": 0, "offset": 7})
    >>> JsonFormatter().format(entry)
    '{"time":"1970-01-01T00:00:00.000Z","level":"info","logger":"root","message":"handled","offset":7}'
    """

    def format(self, record: logging.LogRecord) -> str:
        """The log record as text."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name or "root",
            "message": record.getMessage(),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"), default=str, ensure_ascii=False)
