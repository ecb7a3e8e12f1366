"""Error codes of what Kafka does not have: tables, scans, snapshots.

From 1000 up, so that none is Kafka's. The numbers are part of the protocol and never change their meaning.
"""

from __future__ import annotations

import enum

from tidemill.errors.kafka_codes import ErrorCode

__all__ = ("TableCode", "table_code")


class TableCode(enum.IntEnum):
    """A code with two properties: whether the same call can succeed later, and Kafka's nearest code.

    >>> TableCode.too_many_scanners.value, TableCode.too_many_scanners.retriable
    (1069, True)
    """

    retriable: bool
    kafka: ErrorCode

    def __new__(cls, value: int, retriable: bool, kafka: ErrorCode = ErrorCode.invalid_request) -> TableCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.retriable = retriable
        code.kafka = kafka
        return code

    database_not_found = 1001, False
    database_already_exists = 1002, False
    database_not_empty = 1003, False
    table_not_found = 1004, False, ErrorCode.unknown_topic_or_partition
    table_already_exists = 1005, False, ErrorCode.topic_already_exists
    invalid_schema = 1006, False
    """A schema, primary key, routing or property that no table can have."""
    row_refused = 1007, False, ErrorCode.invalid_record
    """A row that does not fit its table's schema."""
    key_refused = 1008, False, ErrorCode.invalid_record
    """A key that is not spelt canonically, or differs from the key columns of its row."""
    wrong_bucket = 1009, False, ErrorCode.invalid_record
    """A key in a bucket that it does not belong to."""
    not_a_primary_key_table = 1010, False
    partition_not_found = 1011, False, ErrorCode.unknown_topic_or_partition
    """The table has no partition of that value or number."""
    bucket_not_found = 1012, False, ErrorCode.unknown_topic_or_partition
    snapshot_not_found = 1013, False
    lease_not_found = 1014, False
    """A lease that expired, was released, or never was."""
    state_not_ready = 1015, True, ErrorCode.leader_not_available
    """The bucket's state is being brought up to date; try again in a moment."""
    invalid_predicate = 1016, False
    pin_not_found = 1017, False
    """A pin that expired, was released, or never was. Start the scan again."""
    too_many_pins = 1018, True
    state_damaged = 1019, True, ErrorCode.kafka_storage_error
    """The bucket's state does not check out; it is being built again from a snapshot and the log."""
    answer_too_large = 1020, False
    """The rows of so many keys are too much for one answer: look up fewer at a time."""
    scanner_expired = 1066, False
    """The session was idle for too long, or its leader changed. Start the scan again."""
    unknown_scanner_id = 1067, False
    invalid_scan_request = 1068, False
    too_many_scanners = 1069, True
    """There is no capacity for another session now: back off, and open it again."""
    cursor_not_found = 1101, False, ErrorCode.group_id_not_found
    cursor_fenced = 1102, False, ErrorCode.fenced_member_epoch
    """Another process has taken the cursor over, or somebody has reset it: open it again."""
    cursor_moved = 1103, False
    """The stored position is not the one that a commit goes on from."""
    cursor_region_mismatch = 1104, False
    """The cursor of that name reads another region."""
    cursor_in_use = 1105, False
    """Another process owns the cursor, and has given a sign of life lately."""


def table_code(number: int) -> TableCode:
    """The code of that number; a number from a newer server is an error that cannot be tried again."""
    return _BY_NUMBER.get(number, TableCode.invalid_scan_request)


_BY_NUMBER = {code.value: code for code in TableCode}
