"""Authorized operations: what a client may do with a resource, as a bit field of Kafka's operations."""

from __future__ import annotations

from typing import Final

from tidemill.server.requests.authorization import CLUSTER, GROUP, TOPIC, AclOperation, ResourceType
from tidemill.server.requests.call import Call

__all__ = ("NOT_ASKED_FOR", "authorized_operations")

_Op = AclOperation
_CONFIGS: Final = (_Op.DESCRIBE_CONFIGS, _Op.ALTER_CONFIGS)
#: Kafka's operations for each type of resource.
_OPERATIONS: Final = {
    TOPIC: (_Op.READ, _Op.WRITE, _Op.CREATE, _Op.DELETE, _Op.ALTER, _Op.DESCRIBE, *_CONFIGS),
    GROUP: (_Op.READ, _Op.DELETE, _Op.DESCRIBE, *_CONFIGS),
    CLUSTER: (_Op.CREATE, _Op.ALTER, _Op.DESCRIBE, _Op.CLUSTER_ACTION, _Op.IDEMPOTENT_WRITE, *_CONFIGS),
}
_ALL: Final = {
    resource: sum(1 << operation for operation in operations) for resource, operations in _OPERATIONS.items()
}

NOT_ASKED_FOR: Final = -(2**31)


def authorized_operations(call: Call, resource: ResourceType, name: str) -> int:
    """The bit field of the operations that the caller may do."""
    if call.authorizer is None:
        return _ALL[resource]
    return sum(1 << each for each in _OPERATIONS[resource] if call.may(each, resource, name))
