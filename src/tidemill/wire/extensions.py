"""Message classes of the APIs that Kafka does not have: flexible, in Kafka's encoding.

``tables``, ``cluster`` and ``share`` declare their fields with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.static.constants import EntityType
from kio.static.primitive import i16

from tidemill.wire.apis import APIS_BY_NAME, class_name
from tidemill.wire.declare import declare

__all__ = ("OUTCOME", "Fields", "message_classes")

Fields = dict[str, Any]

_SIDES: Final = (EntityType.request, EntityType.response)
#: The first fields of every response.
OUTCOME: Final[Fields] = {"error_code": "int16", "error_message": "string?"}


def message_classes(messages: Mapping[str, tuple[Fields, Fields]]) -> dict[str, type[Any]]:
    """The classes of requests and responses, by ``class_name``, whose fields are given by the API's name.

    Each version of an API has classes of its own, with the same fields unless a ``Field`` says when it came.
    """
    made = {}
    for name, fields in messages.items():
        api = APIS_BY_NAME[name]
        for version in range(api.min_version, api.max_version + 1):
            for kind, declared in zip(_SIDES, (fields[0], OUTCOME | fields[1]), strict=True):
                message = f"{name}{kind.name.capitalize()}"
                made[class_name(message, version)] = _message(message, api.key, version, kind, declared)
    return made


def _message(name: str, key: int, version: int, kind: EntityType, fields: Fields) -> type[Any]:
    """Make the class of one message in kio's shape; nested messages get classes of their own."""
    header = RequestHeader if kind is EntityType.request else ResponseHeader
    entity: type[Any] = declare(
        name,
        fields,
        version=version,
        kind=kind,
        constants={"__api_key__": i16(key), "__header_schema__": header},
    )
    return entity
