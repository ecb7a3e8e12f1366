"""One partition of ``__share_group_state`` and the share partitions that live in it: the shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.control.image import SHARE_STATE_TOPIC
from tidemill.coordination.shell import ShardShell
from tidemill.share.state.records import decode_record, encode_record
from tidemill.share.state.states import ShareStates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import CoordinatorLog, ReplayedMarker, ReplayedRecord
    from tidemill.errors import ErrorCode
    from tidemill.share.state.records import ShareRecord

__all__ = ("ShareStateShard",)


class ShareStateShard(ShardShell):
    """The shell of ``ShareStates``. Nothing in it has a deadline."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        updates_per_snapshot: int,
        clock: Clock,
        on_stop: Callable[[ShareStateShard], None],
    ) -> None:
        super().__init__(SHARE_STATE_TOPIC, partition, log, clock, on_stop)
        self.states = ShareStates(self._append, updates_per_snapshot)

    def complete_transaction(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """End a producer's transaction here: what it had pending counts now, or vanishes."""
        self._note_appended(
            self.log.append_marker(
                producer_id, producer_epoch, commit=commit, coordinator_epoch=coordinator_epoch
            )
        )
        self.states.replay_marker(producer_id, commit=commit)

    def prune(self) -> None:
        """Give up the part of the log that nothing is loaded from."""
        floor = self.states.floor()
        self.log.delete_below(self.log.end_offset if floor is None else floor)

    def _append(self, records: Sequence[ShareRecord], producer: tuple[int, int] | None = None) -> int:
        encoded = [encode_record(record) for record in records]
        if producer is None:
            next_offset = self.log.append(encoded)
        else:
            next_offset = self.log.append_transactional(encoded, *producer)
        self._note_appended(next_offset)
        return next_offset - len(encoded)

    def _replay_marker(self, marker: ReplayedMarker) -> None:
        self.states.replay_marker(marker.producer_id, commit=marker.commit)

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        record = decode_record(entry.key, entry.value)
        if record is not None:
            self.states.replay(record, entry.offset, entry.producer_id)
        return record is not None

    def _loaded(self, now_ms: int) -> Iterable[str]:
        return ()

    def _next_deadline_ms(self, key: str) -> int | None:
        return None

    def _tick(self, key: str, now_ms: int) -> None:
        pass

    def _die(self, code: ErrorCode) -> None:
        pass
