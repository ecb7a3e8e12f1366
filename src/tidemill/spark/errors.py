"""Errors of the connector. Their messages make sense as the last line of a Spark trace."""

from __future__ import annotations

from tidemill.errors import ApiError, ErrorCode

__all__ = ("DataLost", "InvalidOption", "SchemaMismatch")


class InvalidOption(ApiError):
    """An option, or several together, that the connector cannot work with."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.invalid_config, message)

    def __reduce__(self) -> tuple[type[InvalidOption], tuple[str]]:
        return type(self), (self.message,)


class SchemaMismatch(ApiError):
    """Columns of a DataFrame that do not match what is read or written."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.invalid_record, message)

    def __reduce__(self) -> tuple[type[SchemaMismatch], tuple[str]]:
        return type(self), (self.message,)


class DataLost(ApiError):
    """Records that a query has not read yet are gone."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.offset_out_of_range, message)

    def __reduce__(self) -> tuple[type[DataLost], tuple[str]]:
        return type(self), (self.message,)
