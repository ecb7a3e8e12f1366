"""ApiVersions v5, which kio does not have."""

from __future__ import annotations

import pytest

from tidemill.errors import ErrorCode
from tidemill.wire.encode import encode_request, encode_response
from tidemill.wire.requests import decode_request, decode_response, parse_header


def test_the_bytes_of_a_request_are_those_of_kip_1242() -> None:
    body = {"client_software_name": "a", "client_software_version": "b", "cluster_id": "c", "node_id": 7}
    frame = encode_request(18, 5, 1, "me", body)[4:]
    header = parse_header(frame)
    assert bytes(frame[header.body_offset :]) == b"\x02a\x02b\x02c\x00\x00\x00\x07\x00"
    request = decode_request(header, frame)
    assert (request.cluster_id, request.node_id) == ("c", 7)


def test_a_client_may_leave_out_where_it_means_to_be() -> None:
    frame = encode_request(18, 5, 1, "me", {})[4:]
    header = parse_header(frame)
    assert bytes(frame[header.body_offset :]) == b"\x01\x01\x00\xff\xff\xff\xff\x00"
    assert decode_request(header, frame).cluster_id is None


@pytest.mark.parametrize("error", [ErrorCode.none, ErrorCode.unsupported_version])
def test_the_response_is_that_of_version_4(error: ErrorCode) -> None:
    body = {
        "error_code": error,
        "api_keys": [{"api_key": 18, "max_version": 5}],
        "finalized_features_epoch": 3,
    }
    frame = encode_response(18, 5, 1, body)
    assert frame == encode_response(18, 4, 1, body)
    assert decode_response(18, 5, frame[4:])[1].api_keys[0].max_version == 5
