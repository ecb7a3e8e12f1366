"""What is read from kio's classes."""

from __future__ import annotations

import pytest

from support.api_versions import all_versions
from tidemill.wire.apis import request_class, response_class
from tidemill.wire.encode import encode_entity
from tidemill.wire.schema import MISSING, fields_of, min_size

VERSIONS = [pytest.param(api.key, version, id=f"{api.name}-v{version}") for api, version in all_versions()]


def test_fields_say_type_nullability_tag_and_default() -> None:
    fetch = {spec.name: spec for spec in fields_of(request_class(1, 18))}
    assert fetch["max_wait"].kafka_type == "timedelta_i32"
    assert fetch["max_wait"].default is MISSING
    assert (fetch["max_bytes"].default, fetch["max_bytes"].fixed_size) == (2**31 - 1, 4)
    assert (fetch["cluster_id"].tag, fetch["cluster_id"].nullable, fetch["cluster_id"].fixed_size) == (
        0,
        True,
        None,
    )
    assert fetch["topics"].is_array
    assert fetch["topics"].struct is not None
    assert not fetch["topics"].nullable


def test_an_array_may_be_nullable_while_its_elements_are_not() -> None:
    (topics,) = (spec for spec in fields_of(request_class(3, 9)) if spec.name == "topics")
    assert (topics.is_array, topics.nullable) == (True, True)
    (topics,) = (spec for spec in fields_of(request_class(3, 0)) if spec.name == "topics")
    assert (topics.is_array, topics.nullable) == (True, False)


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
def test_no_message_is_smaller_than_its_smallest_size(api_key: int, version: int) -> None:
    for entity in (request_class(api_key, version), response_class(api_key, version)):
        out = bytearray()
        encode_entity(entity, {}, out)
        # The message of defaults has empty strings and arrays, which are as small as null.
        assert min_size(entity) == max(1, len(out))
