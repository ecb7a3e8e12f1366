"""Every error that Tidemill raises on purpose.

The tree::

    TidemillError                  carries a Kafka error code; ``retriable`` follows from the code
    ├── ApiError                   a request that is refused; nothing was changed
    │   ├── InvalidRecords         a batch that is refused for what its records are
    │   ├── TableError             the same for tables and scans, with a code of ``TableCode``
    │   └── UndecodableBatch       a consumer cannot take the records out of a batch; names its offsets
    ├── ProtocolError              the peer sent bytes that are not the protocol; its connection is closed
    ├── ConfigError                a setting that cannot be used
    ├── MetadataConflict           another writer changed the metadata first; read again and retry
    ├── NodeUnavailable            a client could not reach a node
    ├── ConnectionClosed           a connection that was closed, or is of another process or event loop
    └── StorageError               the disk, or what is on it, is not usable
        ├── DiskFull               the write was undone; it works again when space is free
        ├── TooManyFiles           no file could be opened; nothing was changed, it can be tried again
        ├── SyncFailed             an fsync failed: what is on disk is unknown, the partition stops
        ├── CorruptData            bytes that were durable no longer check out; names file and position
        │   └── DamagedBatch       a batch of a log does not; the rest of that log is still served
        └── DataDirectoryInUse     another process holds the data directory

``ErrorCode`` is Kafka's own table of codes; ``TableCode`` has those of what Kafka does not have.
"""

from __future__ import annotations

import errno
from typing import ClassVar

from tidemill.errors.kafka_codes import ErrorCode
from tidemill.errors.table_codes import TableCode

__all__ = (
    "ApiError",
    "ConfigError",
    "ConnectionClosed",
    "CorruptData",
    "DamagedBatch",
    "DataDirectoryInUse",
    "DiskFull",
    "ErrorCode",
    "InvalidRecords",
    "MetadataConflict",
    "NodeUnavailable",
    "ProtocolError",
    "StorageError",
    "SyncFailed",
    "TableCode",
    "TableError",
    "TidemillError",
    "TooManyFiles",
    "UndecodableBatch",
    "without_traceback",
)


class TidemillError(Exception):
    """Base of all errors of this package. ``code`` is what a Kafka client would be told."""

    code: ErrorCode = ErrorCode.unknown_server_error

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    @property
    def retriable(self) -> bool:
        """Whether the same call can succeed later without a change by the caller."""
        return self.code.retriable

    @property
    def name(self) -> str:
        """The name of the most exact code, as the command line and the logs show it."""
        return self.code.name.upper()


class ApiError(TidemillError):
    """A request that is refused with a Kafka error code. The refusal changed nothing.

    >>> error = ApiError(ErrorCode.invalid_topic_exception, "topic name 'a b' has a space")
    >>> error.code.name, error.retriable
    ('invalid_topic_exception', False)
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message, code=code)


class InvalidRecords(ApiError):
    """A producer's batch that is refused because of its records.

    ``record_errors`` has (index of the record in its batch, what is wrong with it) for those at fault, as far
    as they are known.

    >>> error = InvalidRecords("record 3 has no key", record_errors=((3, "it has no key"),))
    >>> error.code.name, error.record_errors
    ('invalid_record', ((3, 'it has no key'),))
    """

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.invalid_record,
        record_errors: tuple[tuple[int, str], ...] = (),
    ) -> None:
        super().__init__(code, message)
        self.record_errors = record_errors


class TableError(ApiError):
    """A request about a table, a scan or a snapshot that is refused. The refusal changed nothing.

    ``code`` is what a Kafka client is told, ``table_code`` says it exactly. ``index`` is the number of the
    first row at fault, where a row is; ``record_errors`` has the others too, as far as they are known, each
    with what is wrong with it.

    >>> error = TableError(TableCode.too_many_scanners, "8 scans of bucket 0 are open")
    >>> error.table_code.value, error.retriable, error.name
    (1069, True, 'TOO_MANY_SCANNERS')
    """

    def __init__(
        self,
        table_code: TableCode,
        message: str,
        *,
        index: int | None = None,
        record_errors: tuple[tuple[int, str], ...] = (),
    ) -> None:
        super().__init__(table_code.kafka, message)
        self.table_code = table_code
        self.index = index
        self.record_errors = record_errors or (() if index is None else ((index, message),))

    @property
    def retriable(self) -> bool:
        return self.table_code.retriable

    @property
    def name(self) -> str:
        return self.table_code.name.upper()


class UndecodableBatch(ApiError):
    """A batch that a consumer has read and whose records cannot be taken out of it.

    It holds the offsets from ``base_offset`` to ``last_offset``; what is behind can be read.

    >>> error = UndecodableBatch("orders", 0, 5, 9, "no codec")
    >>> error.message
    'orders-0: the batch of offsets 5 to 9 cannot be decoded: no codec; reading can go on at offset 10'
    """

    def __init__(self, topic: str, partition: int, base_offset: int, last_offset: int, reason: str) -> None:
        super().__init__(
            ErrorCode.corrupt_message,
            f"{topic}-{partition}: the batch of offsets {base_offset} to {last_offset} cannot be decoded: "
            f"{reason}; reading can go on at offset {last_offset + 1}",
        )
        self.topic = topic
        self.partition = partition
        self.base_offset = base_offset
        self.last_offset = last_offset


class ProtocolError(TidemillError):
    """The peer broke the protocol. Its connection is closed; nobody else is affected."""

    code = ErrorCode.invalid_request


class ConfigError(TidemillError):
    """A setting that is unknown, malformed or out of range."""

    code = ErrorCode.invalid_config


class MetadataConflict(TidemillError):
    """A guarded metadata transaction lost against another writer."""

    code = ErrorCode.concurrent_transactions


class NodeUnavailable(TidemillError):
    """No node answered at the given address."""

    code = ErrorCode.broker_not_available


class ConnectionClosed(TidemillError):
    """A connection that cannot be used any more, or not here.

    This program has closed it, or it was opened in the process that this one was forked from, or in another
    event loop. Open another one.
    """

    code = ErrorCode.invalid_request


class StorageError(TidemillError):
    """A file operation failed."""

    code = ErrorCode.kafka_storage_error


class DiskFull(StorageError):
    """The disk was too full for a write; the file is as it was before."""

    #: How the operating system says so.
    ERRNOS: ClassVar = frozenset({errno.ENOSPC, errno.EDQUOT})


class TooManyFiles(StorageError):
    """No file could be opened: as many are open as may be. Nothing was changed; it can be tried again."""


class SyncFailed(StorageError):
    """An fsync failed. It is never tried again: the kernel may have dropped the pages."""


class CorruptData(StorageError):
    """Data that had been made durable does not check out any more."""

    def __init__(self, message: str, *, path: str, position: int) -> None:
        super().__init__(f"{message} ({path} at byte {position})")
        self.path = path
        self.position = position


class DamagedBatch(CorruptData):
    """Durable batches of a log do not check out. What lies before and behind them is still served.

    Offsets from ``first_offset`` up to, not including, ``next_offset`` cannot be read. The code is one that
    Kafka's clients show to their application; KAFKA_STORAGE_ERROR they would retry for ever without a word.
    """

    code = ErrorCode.corrupt_message

    def __init__(self, reason: str, *, path: str, position: int, first_offset: int, next_offset: int) -> None:
        last = next_offset - 1
        which = f"offsets {first_offset} … {last} are" if last > first_offset else f"offset {first_offset} is"
        super().__init__(
            f"{which} damaged and cannot be read: {reason}; stop the node, then run 'tidemill log verify' "
            "and 'tidemill log repair'",
            path=path,
            position=position,
        )
        self.reason = reason
        self.first_offset = first_offset
        self.next_offset = next_offset


class DataDirectoryInUse(StorageError):
    """A second process tried to use a data directory."""


def without_traceback(error: TidemillError) -> TidemillError:
    """The error without its traceback, which would keep large data in memory.

    The way leads to frames that hold the error and the data: a circle, which would keep the bytes of a
    request, up to 100 MB, in memory and outside of the budget until the next collection.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error
