"""The error of an answer as an exception."""

from __future__ import annotations

from typing import Any, Final

from tidemill.errors import ApiError, ErrorCode, TableError
from tidemill.errors.table_codes import table_code

__all__ = ("check", "checked")

_FIRST_TABLE_CODE: Final = 1_000


def check(code: int, message: str | None, what: str) -> None:
    """Raise ``ApiError`` unless ``code`` is none. ``what`` says what was tried, if the server does not."""
    if code != ErrorCode.none:
        error = ErrorCode(code)
        raise ApiError(error, message or f"{what}: the server answered {error.name.upper()}")


def checked(response: Any, what: str) -> Any:
    """The response, unless it is a refusal: that is raised as ``TableError`` or ``ApiError``."""
    code = response.error_code
    if code >= _FIRST_TABLE_CODE:
        known = table_code(code)
        raise TableError(known, response.error_message or f"{what}: the server answered {known.name.upper()}")
    check(code, response.error_message, what)
    return response
