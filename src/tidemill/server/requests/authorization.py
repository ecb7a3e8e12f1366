"""Authorization: Kafka's operations and resource types, and the one hook that decides who may do what.

A node without an authorizer lets everybody do everything, and asks nobody. With one, each API needs the
permissions of its row (``api_table``): an operation on a kind of resource. Where one resource is meant by the
whole request, the dispatcher asks before the handler runs; where the body names several, the handler asks for
each with ``Call.may`` or ``Call.authorize``, and answers those that are refused with Kafka's code.

- The log of a table is a topic. A permission for a table is one for the topic of the same name; the logs of
  its partitions are topics whose names begin with it.
- The transactional ids of a job begin with ``__tidemill_job:`` and its name. A permission for the job is one
  for that beginning.
- Databases have no resource of their own: they belong to the cluster.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, Protocol

from tidemill.errors import ApiError, ErrorCode

__all__ = (
    "ALTER",
    "ALTER_CONFIGS",
    "ANONYMOUS",
    "CLUSTER",
    "CLUSTER_ACTION",
    "CLUSTER_NAME",
    "CREATE",
    "DELETE",
    "DESCRIBE",
    "DESCRIBE_CONFIGS",
    "GROUP",
    "IDEMPOTENT_WRITE",
    "READ",
    "TOPIC",
    "TRANSACTIONAL_ID",
    "WRITE",
    "AclOperation",
    "Authorizer",
    "Permission",
    "Principal",
    "ResourceType",
    "for_cluster",
    "for_each",
    "for_one",
    "refusal",
)


class AclOperation(IntEnum):
    """Operations on resources, in Kafka's numbers."""

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


class ResourceType(IntEnum):
    """Types of resources that permissions are for, in Kafka's numbers."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


# Short names for the rows of APIs.
READ: Final = AclOperation.READ
WRITE: Final = AclOperation.WRITE
CREATE: Final = AclOperation.CREATE
DELETE: Final = AclOperation.DELETE
ALTER: Final = AclOperation.ALTER
DESCRIBE: Final = AclOperation.DESCRIBE
CLUSTER_ACTION: Final = AclOperation.CLUSTER_ACTION
DESCRIBE_CONFIGS: Final = AclOperation.DESCRIBE_CONFIGS
ALTER_CONFIGS: Final = AclOperation.ALTER_CONFIGS
IDEMPOTENT_WRITE: Final = AclOperation.IDEMPOTENT_WRITE
TOPIC: Final = ResourceType.TOPIC
GROUP: Final = ResourceType.GROUP
CLUSTER: Final = ResourceType.CLUSTER
TRANSACTIONAL_ID: Final = ResourceType.TRANSACTIONAL_ID

#: The name of the only resource of type CLUSTER.
CLUSTER_NAME: Final = "kafka-cluster"

_CODES: Final = {
    ResourceType.TOPIC: ErrorCode.topic_authorization_failed,
    ResourceType.GROUP: ErrorCode.group_authorization_failed,
    ResourceType.CLUSTER: ErrorCode.cluster_authorization_failed,
    ResourceType.TRANSACTIONAL_ID: ErrorCode.transactional_id_authorization_failed,
}


class Principal(NamedTuple):
    """The identity of a client, as Kafka writes it.

    >>> str(ANONYMOUS)
    'User:ANONYMOUS'
    """

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


#: The principal of clients that are not authenticated: of all, since there is no authentication yet.
ANONYMOUS: Final = Principal("User", "ANONYMOUS")


class Authorizer(Protocol):
    """Decides who may do what. It is asked on the event loop, so it answers at once, from memory."""

    def allows(
        self, principal: Principal, host: str, operation: AclOperation, resource: ResourceType, name: str
    ) -> bool:
        """Whether ``principal``, who connects from ``host``, may do this with the resource of that name."""
        ...


class Permission(NamedTuple):
    """An operation on a kind of resource that a request needs; made by the functions below.

    ``field`` of the request has the name of the resource; with None, the handler asks for each that it finds.
    """

    operation: AclOperation
    resource: ResourceType
    field: str | None


#: Stands for a field in permissions for the cluster, whose name is in no request.
_OF_CLUSTER: Final = ""


def for_one(operation: AclOperation, resource: ResourceType, field: str) -> Permission:
    """The permission for a request about one resource, named by ``field``; it is refused as a whole.

    Its answer needs an error code of its own, as ``for_cluster`` does.
    """
    return Permission(operation, resource, field)


def for_cluster(operation: AclOperation) -> Permission:
    """The permission for a request about the cluster; it is refused as a whole."""
    return Permission(operation, ResourceType.CLUSTER, _OF_CLUSTER)


def for_each(operation: AclOperation, resource: ResourceType) -> Permission:
    """The permission for a request that names several resources; its handler asks for each."""
    return Permission(operation, resource, None)


def refusal(operation: AclOperation, resource: ResourceType, name: str) -> ApiError:
    """The error for a caller that may not do this.

    >>> refusal(AclOperation.READ, ResourceType.GROUP, "kitchen").message
    "not allowed to READ group 'kitchen'"
    """
    kind = resource.name.lower().replace("_", " ")
    return ApiError(_CODES[resource], f"not allowed to {operation.name} {kind} {name[:200]!r}")
