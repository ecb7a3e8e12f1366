"""Drafts: copies on which large consumer groups are changed, in a thread instead of the event loop.

Matching, assigning and encoding take up to a second for 20,000 partitions. The handlers are the same for
every group; for a large one they work on a ``GroupDraft``: a copy of the group and of the topics.
The draft replaces the group when its records are appended, if the group is still as it was; else the
work is done again. Heartbeats that change nothing go to the group itself meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.errors import ErrorCode
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.group import ConsumerGroup, Deadlines, Wait
from tidemill.groups.consumer.handlers import ConsumerGroupHandlers
from tidemill.groups.consumer.heartbeats import changes_nothing
from tidemill.groups.consumer.member import JOIN_EPOCH
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.consumer.records import ConsumerRecord
from tidemill.groups.records import encode_record
from tidemill.groups.share.group import ShareGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidemill.groups.consumer.handlers import Group, Replies
    from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import Topics

__all__ = ("GroupDraft", "is_large", "needs_draft")

T = TypeVar("T")

_LARGE: Final = 500
"""From so many topics, partitions and members on, a change of a group takes several milliseconds."""
_LARGE_PRODUCT: Final = 20_000
"""Limit of topics times members: the uniform assignor looks at each member for each topic."""
_RECORDS_BYTES_MAX: Final = 4 * 1024 * 1024
"""The most bytes of records of one change: they are appended on the event loop, in one batch."""
_BYTES_PER_NAME: Final = 16
_BYTES_PER_PARTITION: Final = 4


def needs_draft(group: Group | None, topics: Topics, request: ConsumerHeartbeatRequest) -> bool:
    """Whether a heartbeat may take long, and so needs a draft."""
    if isinstance(group, ConsumerGroup):
        if changes_nothing(group, topics, request):
            return False
    elif request.member_epoch != JOIN_EPOCH or isinstance(group, ShareGroup):
        return False
    topic_count = topics.count if request.regex else 0
    partitions = topics.partition_count if request.regex else 0
    for name in request.topics or ():
        if (topic := topics.find(name)) is not None:
            topic_count += 1
            partitions += topic.partitions
    return is_large(group, topics, topic_count, partitions)


def is_large(group: Group | None, topics: Topics, topic_count: int = 0, partitions: int = 0) -> bool:
    """Whether changes of the group take long, with so many topics and partitions besides its own."""
    members = 1
    if isinstance(group, ConsumerGroup):
        members += len(group.members)
        topic_count += len(group.subscribed_topics) + (topics.count if group.patterns else 0)
        partitions += group.partition_count
        if group.seen_revision != topics.revision and topic_count + partitions <= _LARGE:
            # Topics may have more partitions now.
            found = (topics.find(name) for name in group.subscribed_topics)
            partitions += sum(topic.partitions for topic in found if topic is not None)
            partitions += topics.partition_count if group.patterns else 0
    elif isinstance(group, ClassicGroup):
        members += len(group.members)
        # The subscriptions and assignments of a classic group would have to be parsed to be counted.
        topic_count += sum(member.metadata_bytes for member in group.members) // _BYTES_PER_NAME
        partitions += sum(len(member.assignment) for member in group.members) // _BYTES_PER_PARTITION
        # What they subscribe to may be any topic.
        partitions += topics.partition_count if group.members else 0
    return topic_count + partitions + members > _LARGE or topic_count * members > _LARGE_PRODUCT


class GroupDraft:
    """A copy of one group, with handlers that change nothing but the copy.

    Made and adopted on the event loop; ``run`` may be called in a thread.
    """

    def __init__(
        self, group_id: str, settings: GroupSettings, groups: dict[str, Group], topics: Topics, now_ms: int
    ) -> None:
        self._group_id = group_id
        self._groups = groups
        self._original = groups.get(group_id)
        self.now_ms = now_ms
        self._scratch: dict[str, Group] = {}
        self._records: list[GroupRecord] = []
        self._topics = topics.frozen()
        self.handlers = ConsumerGroupHandlers(
            settings, self._scratch, self._collect, self._collect_and_replay, self._topics
        )
        self._conversion: list[GroupRecord] = []
        self._copy: ConsumerGroup | None = None
        self._version = 0
        self._deadlines = _DeadlineChanges([])
        #: Estimate of the group's memory once the draft is adopted.
        self.size_bytes = 0
        if isinstance(self._original, ConsumerGroup):
            self._version = self._original.version
            self._deadlines = _DeadlineChanges(self._original.deadlines.due(now_ms))
            self._copy = self._scratch[group_id] = self._original.copy()
            self._copy.deadlines = self._deadlines
        elif isinstance(self._original, ClassicGroup):
            converted, self._conversion = self.handlers.convert(self._original)
            self._scratch[group_id] = converted

    @property
    def group(self) -> ConsumerGroup:
        """The copy, which must be a consumer group."""
        assert self._copy is not None, self._group_id
        return self._copy

    def run(self, event: Callable[[GroupDraft], T]) -> tuple[T, list[tuple[bytes, bytes | None]]]:
        """Apply an event to the copy; gives its result and the records to append."""
        result = event(self)
        if self._records:
            self._records[:0] = self._conversion
        group = self._scratch.get(self._group_id)
        self.size_bytes = 0 if group is None else sum(group.bytes_by_host.values())
        encoded = [encode_record(record) for record in self._records]
        size_bytes = sum(len(key) + len(value or b"") for key, value in encoded)
        if size_bytes > _RECORDS_BYTES_MAX:
            raise Refused(
                ErrorCode.invalid_request,
                f"group {self._group_id!r} would have {size_bytes} bytes of assignments to store; "
                f"{_RECORDS_BYTES_MAX} are allowed: subscribe to fewer topics, or divide them among groups",
            )
        return result, encoded

    def is_current(self) -> bool:
        """Whether the group is still the one that was copied, and unchanged."""
        if self._groups.get(self._group_id) is not self._original:
            return False
        if isinstance(self._original, ConsumerGroup):
            return self._original.version == self._version
        if not isinstance(self._original, ClassicGroup):
            return True
        try:
            return self.handlers.convert(self._original)[1] == self._conversion
        except Refused:
            return False

    def adopt(self) -> Replies:
        """Replace the group by the copy, whose records are in the log."""
        original = self._original
        if not self._records and not isinstance(original, ConsumerGroup):
            return ()
        result = self._scratch.get(self._group_id)
        if result is None:
            self._groups.pop(self._group_id, None)
            return ()
        self._groups[self._group_id] = result
        if isinstance(original, ConsumerGroup):
            if result is self._copy:
                # Members may have shown meanwhile that they are alive: their sessions stay.
                self._deadlines.make(original.deadlines)
                self._copy.deadlines = original.deadlines
        elif original is not None:
            result.start(self.now_ms)
            return original.die(ErrorCode.rebalance_in_progress)
        return ()

    def _collect(self, records: Sequence[GroupRecord]) -> None:
        self._records += records

    def _collect_and_replay(self, records: Sequence[GroupRecord], now_ms: int) -> None:
        del now_ms
        self._records += records
        for record in records:
            assert isinstance(record, ConsumerRecord), record
            self.handlers.replay(record)


class _DeadlineChanges(Deadlines[tuple[Wait, str]]):
    """Deadlines of a copy: those that were due when it was made, and changes for the group's own."""

    def __init__(self, due: list[tuple[Wait, str]]) -> None:
        super().__init__()
        self._due = due
        self._changes: list[Callable[[Deadlines[tuple[Wait, str]]], None]] = []

    def set(self, key: tuple[Wait, str], at_ms: int) -> None:
        """Set the deadline when the copy is adopted."""
        self._changes.append(lambda deadlines: deadlines.set(key, at_ms))

    def set_if_absent(self, key: tuple[Wait, str], at_ms: int) -> None:
        """Set the deadline when the copy is adopted, unless it has one by then."""
        self._changes.append(lambda deadlines: deadlines.set_if_absent(key, at_ms))

    def cancel(self, key: tuple[Wait, str]) -> None:
        """Cancel the deadline when the copy is adopted."""
        self._changes.append(lambda deadlines: deadlines.cancel(key))

    def due(self, now_ms: int) -> list[tuple[Wait, str]]:
        """The keys that were due when the copy was made."""
        del now_ms
        return self._due

    def make(self, deadlines: Deadlines[tuple[Wait, str]]) -> None:
        """Apply the changes to the group's deadlines, in their order."""
        for change in self._changes:
            change(deadlines)
