"""Dead letters: what a record becomes when its share group gives it up, under KIP-1191's header names. Pure.

A letter has the record's key, value and headers, and says in headers of its own where the record was, which
group gave it up, why, and after how many deliveries. All of these headers are text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.records.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidemill.records.record import Header

__all__ = (
    "GROUP_HEADER",
    "LEFT_OUT",
    "LETTER_HEADERS",
    "REDRIVEN_FOR",
    "REDRIVE_PREFIX",
    "SHARE_PREFIX",
    "Letter",
    "letter_record",
    "read_letter",
    "redriven_record",
)

_TOPIC: Final = "__dlq.errors.topic"
_PARTITION: Final = "__dlq.errors.partition"
_OFFSET: Final = "__dlq.errors.offset"
GROUP_HEADER: Final = "__dlq.errors.group"
_COUNT: Final = "__dlq.errors.delivery.count"
_REASON: Final = "__dlq.errors.message"
LETTER_HEADERS: Final = frozenset({_TOPIC, _PARTITION, _OFFSET, GROUP_HEADER, _COUNT, _REASON})
#: What the transactional ids begin with under which nodes write dead letters. No client gets such an id.
SHARE_PREFIX: Final = "__tidemill_share:"
#: Of a letter whose record was too large for the dead-letter topic: the size of its value. Ours.
LEFT_OUT: Final = "tidemill-dlq-value-bytes"
#: What the names of share groups begin with that read dead letters to send them back.
REDRIVE_PREFIX: Final = "__tidemill_redrive:"
#: Of a record that was sent back to its topic: the group that it is for. Ours.
REDRIVEN_FOR: Final = "tidemill-redriven-for"


class Letter(NamedTuple):
    """What a dead letter says of its record."""

    group_id: str
    topic: str
    partition: int
    offset: int
    delivery_count: int
    reason: str


def letter_record(
    record: Record, letter: Letter, *, copy: bool, now_ms: int, left_out: bool = False
) -> Record:
    """The dead letter of a record. ``copy``: with its contents; ``left_out``: the rest is too large."""
    headers: list[Header] = []
    if copy:
        # A record that dies again says of its last death only.
        headers += [each for each in record.headers if each[0] not in LETTER_HEADERS]
    headers += [
        (_TOPIC, letter.topic.encode()),
        (_PARTITION, str(letter.partition).encode()),
        (_OFFSET, str(letter.offset).encode()),
        (GROUP_HEADER, letter.group_id.encode()),
        (_COUNT, str(letter.delivery_count).encode()),
        (_REASON, letter.reason.encode()),
    ]
    if left_out:
        headers.append((LEFT_OUT, str(len(record.value or b"")).encode()))
    key = record.key if copy else None
    value = record.value if copy and not left_out else None
    # The time of death: letters are kept and found by it.
    return Record(key, value, now_ms, tuple(headers))


def read_letter(headers: Iterable[Header]) -> Letter | None:
    """What the headers of a record say if it is a dead letter; None if it is none."""
    found = {name: value for name, value in headers if name in LETTER_HEADERS and value is not None}
    try:
        return Letter(
            found[GROUP_HEADER].decode(),
            found[_TOPIC].decode(),
            int(found[_PARTITION]),
            int(found[_OFFSET]),
            int(found.get(_COUNT, b"0")),
            found.get(_REASON, b"").decode(errors="replace"),
        )
    except (KeyError, ValueError):
        return None


def redriven_record(record: Record, letter: Letter) -> Record:
    """The record as it is sent back: without the headers of the letter, and with the group that it is for."""
    headers = [each for each in record.headers if each[0] not in LETTER_HEADERS | {REDRIVEN_FOR}]
    headers.append((REDRIVEN_FOR, letter.group_id.encode()))
    return Record(record.key, record.value, record.timestamp_ms, tuple(headers))
