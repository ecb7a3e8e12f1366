"""Message classes of the APIs that Kafka does not have: one version each, flexible, in Kafka's encoding.

``tables`` and ``cluster`` declare their fields with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.static.constants import EntityType
from kio.static.primitive import i16

from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.declare import declare

__all__ = ("OUTCOME", "Fields", "message_classes")

Fields = dict[str, Any]

#: The first fields of every response.
OUTCOME: Final[Fields] = {"error_code": "int16", "error_message": "string?"}


def message_classes(messages: Mapping[str, tuple[Fields, Fields]]) -> dict[str, type[Any]]:
    """The classes of requests and responses, whose fields are given by the API's name, by their names."""
    made = {}
    for name, (request, response) in messages.items():
        key = APIS_BY_NAME[name].key
        made[f"{name}Request"] = _message(f"{name}Request", key, EntityType.request, request)
        made[f"{name}Response"] = _message(f"{name}Response", key, EntityType.response, OUTCOME | response)
    return made


def _message(name: str, key: int, kind: EntityType, fields: Fields) -> type[Any]:
    """Make the class of one message in kio's shape; nested messages get classes of their own."""
    header = RequestHeader if kind is EntityType.request else ResponseHeader
    entity: type[Any] = declare(
        name, fields, kind=kind, constants={"__api_key__": i16(key), "__header_schema__": header}
    )
    return entity
