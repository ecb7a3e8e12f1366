"""The error of an answer is raised, with the server's words where it has some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.net.answers import check, checked


def test_check_gives_the_servers_words_or_else_says_what_was_tried() -> None:
    check(0, None, "anything")
    with pytest.raises(ApiError, match="no such luck"):
        check(ErrorCode.invalid_request, "no such luck", "trying")
    with pytest.raises(ApiError, match="trying: the server answered INVALID_REQUEST") as caught:
        check(ErrorCode.invalid_request, None, "trying")
    assert caught.value.code == ErrorCode.invalid_request


def test_an_answer_without_an_error_is_given_on() -> None:
    answer = SimpleNamespace(error_code=0, error_message=None)
    assert checked(answer, "anything") is answer


def test_codes_of_tables_become_errors_of_tables() -> None:
    refused = SimpleNamespace(error_code=int(TableCode.table_not_found), error_message=None)
    with pytest.raises(TableError, match="describing: the server answered TABLE_NOT_FOUND") as caught:
        checked(refused, "describing")
    assert caught.value.table_code is TableCode.table_not_found
    with pytest.raises(ApiError, match="not here") as other:
        checked(SimpleNamespace(error_code=3, error_message="not here"), "describing")
    assert other.value.code is ErrorCode.unknown_topic_or_partition
