"""What the connector refuses, in words that end a Spark trace well."""

from __future__ import annotations

from tidemill.errors import ApiError, ErrorCode

__all__ = ("DataLost", "InvalidOption", "SchemaMismatch")


class InvalidOption(ApiError):
    """An option that says nothing that can be done."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.invalid_config, message)

    def __reduce__(self) -> tuple[type[InvalidOption], tuple[str]]:
        return type(self), (self.message,)


class SchemaMismatch(ApiError):
    """Columns of a DataFrame that are not those of what is read or written."""

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
