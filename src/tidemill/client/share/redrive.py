"""Redrive: send dead letters back to the topics that they came from, each once.

The dead-letter topic is read by a share group of its own, and every letter is accepted in the transaction
that writes its record back. So a letter is sent back once, also if this program dies at any moment and is run
again, and several of them may run side by side. Letters that are not chosen stay where they are: they are
locked until this member has seen all others, and come back when it leaves. A node keeps a limited number of
runs of letters in different states for a partition; what it does not hand out because of that is told.

A record that comes back has the header ``tidemill-redriven-for`` with the group that gave it up. Other groups
that read its topic see it again, too.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.client.admin.share_groups import share_records
from tidemill.client.admin.topics import LATEST, list_offsets
from tidemill.client.share.consumer import AsyncShare
from tidemill.client.share.group_configs import group_overrides
from tidemill.client.share.transaction import AsyncShareTransaction
from tidemill.config.group_keys import DEAD_LETTER_TOPIC
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.retry import is_transient
from tidemill.records.record import Record
from tidemill.share.letters import (
    LEFT_OUT,
    REDRIVE_PREFIX,
    Letter,
    read_letter,
    redriven_record,
)

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster, TopicPartition
    from tidemill.client.share.record import ShareRecord

__all__ = ("Choice", "Redriven", "redrive")

_log = logging.getLogger(__name__)

#: Letters of one transaction. So many are asked for while the transaction before ends.
_LETTERS_MAX: Final = 200
_POLL_SECONDS: Final = 0.5
_FAILURES_MAX: Final = 20
#: How long nothing may come before this gives up, although no node said that it has no more.
_PATIENCE_SECONDS: Final = 60.0


class Choice(NamedTuple):
    """Which letters of a group are sent back: all, or those that fit everything that is given."""

    group: str
    #: A part of the reason.
    reason: str | None = None
    #: The time of death, in milliseconds: from ``since_ms`` on, and before ``until_ms``.
    since_ms: int | None = None
    until_ms: int | None = None

    def fits(self, letter: Letter, died_ms: int) -> bool:
        """Whether a letter is chosen.

        >>> letter = Letter("emails", "outbox", 0, 7, 5, "no such address")
        >>> Choice("emails", reason="address").fits(letter, 5), Choice("other").fits(letter, 5)
        (True, False)
        """
        return (
            letter.group_id == self.group
            and (self.reason is None or self.reason in letter.reason)
            and (self.since_ms is None or died_ms >= self.since_ms)
            and (self.until_ms is None or died_ms < self.until_ms)
        )


@dataclass(slots=True)
class Redriven:
    """What a redrive has done, or would do."""

    #: Letters that were sent back, by the topic that they came from.
    sent: Counter[str] = field(default_factory=Counter)
    #: The same by reason.
    reasons: Counter[str] = field(default_factory=Counter)
    #: Letters that were not chosen.
    not_chosen: int = 0
    #: Letters that were chosen and do not have the contents of their record.
    without_contents: int = 0
    #: Letters that were chosen and whose topic does not exist any more.
    topic_is_gone: int = 0
    #: Offsets of the dead-letter topic that were not looked at, although they were there at the beginning.
    not_looked_at: int = 0


class _Chosen(NamedTuple):
    """A dead letter that a redrive sends back, with the record that holds it."""

    record: ShareRecord
    letter: Letter


async def redrive(
    cluster: Cluster, choice: Choice, *, dead_letters: str | None = None, execute: bool = True
) -> Redriven:
    """Send letters of a group back. ``dead_letters`` is the topic; without it, that of the group's config.

    Raises ``ApiError`` if the group has no dead-letter topic.
    """
    topic = dead_letters or (await group_overrides(cluster, choice.group)).get(DEAD_LETTER_TOPIC)
    if not topic:
        raise ApiError(
            ErrorCode.invalid_config,
            f"share group {choice.group!r} has no dead-letter topic ({DEAD_LETTER_TOPIC}); name the topic",
        )
    await cluster.topic(topic)
    done = Redriven()
    share = AsyncShare(cluster, REDRIVE_PREFIX + choice.group, [topic], concurrency=_LETTERS_MAX)
    async with share:
        ends = await _ends(cluster, topic)
        await _Run(share, choice, done, execute=execute).until_empty()
        done.not_looked_at = await _unseen(cluster, share.group, ends)
    return done


async def _ends(cluster: Cluster, topic: str) -> dict[TopicPartition, int]:
    """Where the committed letters of each partition end."""
    partitions = [(topic, index) for index in range(len((await cluster.topic(topic)).partitions))]
    found = await list_offsets(cluster, dict.fromkeys(partitions, LATEST), committed=True)
    return {partition: at.offset for partition, at in found.items()}


async def _unseen(cluster: Cluster, group: str, ends: Mapping[TopicPartition, int]) -> int:
    """How many offsets below these ends no member of the group holds or was ever given."""
    unseen = 0
    for partition, end in ends.items():
        found = await share_records(cluster, group, partition, limit=0)
        unseen += found.available + max(0, end - found.end_offset)
    return unseen


class _Run:
    """The work of one redrive: takes letters from the dead-letter topic and sends the chosen ones back."""

    def __init__(self, share: AsyncShare, choice: Choice, done: Redriven, *, execute: bool) -> None:
        self._share = share
        self._choice = choice
        self._done = done
        self._execute = execute
        #: Offsets of letters that stay, by partition: they come again when a leader moves.
        self._kept: dict[int, set[int]] = {}
        #: By name, how many partitions a topic has; 0 if it does not exist.
        self._partitions: dict[str, int] = {}
        self._failures = 0
        #: Whether the last transaction failed, so that it may be open still.
        self._must_abort = False

    async def until_empty(self) -> None:
        """Go through all letters that nobody has sent back yet."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and (not self._share.has_no_more or await self._has_pending()):
            records = await self._share.poll(_LETTERS_MAX, timeout=_POLL_SECONDS)
            fresh = [each for each in records if each.offset not in self._kept.get(each.partition, ())]
            if fresh:
                deadline = time.monotonic() + _PATIENCE_SECONDS
            chosen = [each for each in self._chosen(fresh) if await self._has_topic(each)]
            try:
                await self._send_back(chosen)
            except TidemillError as error:
                # What was not sent back comes again, when the transaction is aborted.
                self._failures += 1
                self._must_abort = True
                passes = is_transient(error) or error.code == ErrorCode.invalid_record_state
                if not passes or self._failures > _FAILURES_MAX:
                    raise
                _log.warning("letters could not be sent back, trying again: %s", error.message)

    async def _has_pending(self) -> bool:
        """Whether a transaction that failed may still hold letters, which come again when it is aborted."""
        if not self._failures:
            return False
        if self._must_abort:
            with contextlib.suppress(TidemillError):
                # The next one aborts what the last one has left open; otherwise only its timeout would.
                async with self._share.transaction():
                    self._must_abort = False
        share = self._share
        (topic,) = share.topics
        held = 0
        for index in range(len((await share.cluster.topic(topic)).partitions)):
            held += (await share_records(share.cluster, share.group, (topic, index), limit=0)).acquired
        return held > sum(map(len, self._kept.values()))

    async def _has_topic(self, chosen: _Chosen) -> bool:
        name = chosen.letter.topic
        if name not in self._partitions:
            try:
                self._partitions[name] = len((await self._share.cluster.topic(name)).partitions)
            except ApiError as error:
                if error.code != ErrorCode.unknown_topic_or_partition:
                    raise
                self._partitions[name] = 0
        if not self._partitions[name]:
            self._keep(chosen.record)
            self._done.topic_is_gone += 1
        return self._partitions[name] > 0

    def _chosen(self, records: Sequence[ShareRecord]) -> list[_Chosen]:
        chosen: list[_Chosen] = []
        for record in records:
            letter = read_letter(record.headers)
            if letter is None or not self._choice.fits(letter, record.timestamp_ms):
                self._keep(record)
                self._done.not_chosen += 1
            elif _is_without_contents(record):
                self._keep(record)
                self._done.without_contents += 1
            else:
                chosen.append(_Chosen(record, letter))
        return chosen

    def _keep(self, record: ShareRecord) -> None:
        self._kept.setdefault(record.partition, set()).add(record.offset)
        self._share.leave_locked(record)

    async def _send_back(self, chosen: Sequence[_Chosen]) -> None:
        if not chosen:
            return
        if self._execute:
            async with self._share.transaction() as transaction:
                for each in chosen:
                    await self._send_one(transaction, each)
        else:
            for record, _ in chosen:
                self._keep(record)
        for _, letter in chosen:
            self._done.sent[letter.topic] += 1
            self._done.reasons[letter.reason] += 1

    async def _send_one(self, transaction: AsyncShareTransaction, chosen: _Chosen) -> None:
        record, letter = chosen
        plain = Record(record.key, record.value, int(time.time() * 1000), record.headers)
        # Where it was: its key may have been given to a partition in another way than ours.
        partition = letter.partition if letter.partition < self._partitions[letter.topic] else None
        await transaction.send_record(letter.topic, redriven_record(plain, letter), partition)
        transaction.accept(record)


def _is_without_contents(record: ShareRecord) -> bool:
    """Whether a letter does not have the record: it was not to be copied, or was too large."""
    empty = record.key is None and record.value is None
    return empty or any(name == LEFT_OUT for name, _ in record.headers)
