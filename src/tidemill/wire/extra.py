"""Message versions that kio does not have yet, in kio's shape, so that the same machinery reads and
writes them.

ApiVersions v5 (KIP-1242): the request may name the cluster and the node that the client believes it is
talking to; the response is that of v4.

This module must not postpone the evaluation of annotations: kio reads the types of the dataclass fields.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from kio.schema.api_versions.v4 import response as _response_v4
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.types import BrokerId
from kio.static.constants import EntityType
from kio.static.primitive import i16

__all__ = ("ApiVersionsRequest", "ApiVersionsResponse")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsRequest:
    """ApiVersions request v5."""

    __type__: ClassVar = EntityType.request
    __version__: ClassVar[i16] = i16(5)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(18)
    __header_schema__: ClassVar[type[RequestHeader]] = RequestHeader
    client_software_name: str = field(metadata={"kafka_type": "string"})
    """The name of the client."""
    client_software_version: str = field(metadata={"kafka_type": "string"})
    """The version of the client."""
    cluster_id: str | None = field(metadata={"kafka_type": "string"}, default=None)
    """The cluster that the client means to reach, or null if it does not know."""
    node_id: BrokerId = field(metadata={"kafka_type": "int32"}, default=BrokerId(-1))
    """The node that the client means to reach, or -1 if it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsResponse(_response_v4.ApiVersionsResponse):
    """ApiVersions response v5: the fields of v4."""

    __version__: ClassVar[i16] = i16(5)
