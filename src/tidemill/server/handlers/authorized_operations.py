"""What a client may do with a resource, as a bit field of Kafka's operations.

Nobody is refused anything yet, so whoever asks may do all that Kafka knows for that type of resource.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

__all__ = ("CLUSTER_OPERATIONS", "GROUP_OPERATIONS", "NOT_ASKED_FOR", "TOPIC_OPERATIONS")


class AclOperation(IntEnum):
    """Kafka's numbers of operations; a field of operations has the bit of each number set."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


def _field(operations: Iterable[AclOperation]) -> int:
    return sum(1 << operation for operation in operations)


_Op = AclOperation
_CONFIGS: Final = (_Op.DESCRIBE_CONFIGS, _Op.ALTER_CONFIGS)

NOT_ASKED_FOR: Final = -(2**31)
TOPIC_OPERATIONS: Final = _field(
    (_Op.READ, _Op.WRITE, _Op.CREATE, _Op.DELETE, _Op.ALTER, _Op.DESCRIBE, *_CONFIGS)
)
GROUP_OPERATIONS: Final = _field((_Op.READ, _Op.DELETE, _Op.DESCRIBE, *_CONFIGS))
CLUSTER_OPERATIONS: Final = _field(
    (_Op.CREATE, _Op.ALTER, _Op.DESCRIBE, _Op.CLUSTER_ACTION, _Op.IDEMPOTENT_WRITE, *_CONFIGS)
)
