"""The stored state of a share partition, read by the leader of its data: with nothing of another log in it.

A state tells of records by their offsets. After an unclean election other records may have these offsets:
they would pass for finished, and nobody would be given them. So a leader writes with the state how far its
log goes, and in which epochs it was written (``LogPosition``). The next one compares that with its own log,
and takes what was cut off the log out of the state before it serves.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.coordination.share_state import (
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    ShareState,
)
from tidemill.errors import ApiError
from tidemill.log.epochs import EpochHistory
from tidemill.share.partition.machine import finished_from

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition
    from tidemill.server.share.service import ShareService

__all__ = ("KeptState", "LoadedState")

#: How many leader epochs of the log a state keeps: the newest.
_EPOCHS_KEPT: Final = 32

logger = logging.getLogger(__name__)


class LoadedState(NamedTuple):
    """A state of the leader's own log, and how many finished records were taken out of it."""

    state: ShareState
    cut: int = 0


class KeptState:
    """The state of one share partition where it is kept, for the leader of the data at one leader epoch."""

    def __init__(self, service: ShareService, key: SharePartitionKey, partition: Partition) -> None:
        self._service = service
        self._key = key
        self._partition = partition
        self._leader_epoch = partition.leader_epoch
        #: Whether the state has the epochs of this leader's log.
        self._has_history = False

    async def load(self, name: str) -> LoadedState:
        """Read the state; what is not of this log is taken out of it. Raises ``TidemillError``."""
        state = await self._read()
        cut = self._divergence(state)
        if cut is None:
            return LoadedState(state)
        self.check_leads()
        finished = finished_from(state, cut)
        logger.warning(
            "%s: the log was cut at offset %d, by an unclean election or because data was lost. The group "
            "forgets what it had done with the records from there on (%d were finished), and gets those that "
            "were written in their place",
            *(name, cut, finished),
        )
        persister, position = self._service.persister, self._position(cut)
        await persister.write_state(
            self._key, state.state_epoch, self._leader_epoch, NO_START, -1, (), position, cut
        )
        self.written()
        return LoadedState(await persister.read_state(self._key, self._leader_epoch), finished)

    async def _read(self) -> ShareState:
        """The state; letters that an earlier leader was writing are decided on first."""
        read, letters = self._service.persister.read_state, self._service.dead_letters
        state = await read(self._key, self._leader_epoch)
        if letters is None or not any(
            batch.producer_id >= 0 and batch.state is DeliveryState.ARCHIVED for batch in state.batches
        ):
            return state
        with contextlib.suppress(ApiError):
            await letters.take_over(self._key, self._leader_epoch)
        return await read(self._key, self._leader_epoch)

    def check_leads(self) -> None:
        """Raise unless this node leads the data, in the epoch in which the state is read."""
        self._partition.check_leads()
        if self._partition.leader_epoch != self._leader_epoch:
            raise self._partition.not_leader()

    # --- the log that it is of

    def position(self, end_offset: int) -> LogPosition:
        """The position to write with a state that tells of records below ``end_offset``."""
        return self._position(min(end_offset, self._partition.log_end_offset))

    def written(self) -> None:
        """Note that a position was written: the stored state has the log's epochs from now on."""
        self._has_history = True

    def _position(self, offset: int) -> LogPosition:
        return LogPosition(offset, self._partition.epochs.epoch_at(offset - 1), self._history())

    def _history(self) -> bytes:
        """The epochs of the log, for the state to keep; empty once it has them."""
        if self._has_history:
            return b""
        epochs = self._partition.epochs.extended(self._leader_epoch, self._partition.log_end_offset)
        return EpochHistory(list(epochs.entries[-_EPOCHS_KEPT:])).to_bytes()

    def _divergence(self, state: ShareState) -> int | None:
        """The offset from which on the state tells of records of another log; None if there is none."""
        offset, leader_epoch, history = state.log_position
        if leader_epoch < 0 or offset <= self._partition.log_start_offset:
            return None
        diverging = self._partition.divergence(leader_epoch, offset)
        if diverging is None:
            return None
        # At least the record below the position is another one.
        cut = min(diverging[1], offset - 1)
        if history:
            # The epoch that both have may go further here: then it is the writer's log that was cut in it.
            epochs, log_end = self._partition.epochs, self._partition.log_end_offset
            cut = min(cut, epochs.parted_from(EpochHistory.from_bytes(history), log_end, offset))
        end = max(state.start_offset, *(batch.last_offset + 1 for batch in state.batches), 0)
        return cut if cut < end else None
