"""Any message between nodes: strategies for all of them, made from their declarations."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tidemill.cluster.messages import REQUESTS, RESPONSES, ClusterRequest, ClusterResponse

__all__ = ("any_of", "any_request", "any_response")

#: What a command or its result may be; the messages do not look into it.
_ANYTHING = st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5)


def any_of(message: type[Any]) -> st.SearchStrategy[Any]:
    """Any value of a message class, or of a part of a message."""
    return _values(inspect.type_info(message))


def any_request() -> st.SearchStrategy[ClusterRequest]:
    return st.one_of([any_of(request) for request in REQUESTS])


def any_response() -> st.SearchStrategy[ClusterResponse]:
    return st.one_of([any_of(response) for response in RESPONSES])


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            fields = {field.name: _values(field.type) for field in kind.fields}
            return st.builds(kind.cls, **fields)
        case inspect.ListType():
            return st.lists(_values(kind.item_type), max_size=4)
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=4)
        case inspect.UnionType():
            return st.one_of([_values(each) for each in kind.types])
    return _SIMPLE[type(kind)]


_SIMPLE: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.AnyType: _ANYTHING,
    inspect.BoolType: st.booleans(),
    inspect.BytesType: st.binary(max_size=40),
    inspect.IntType: st.integers(-(2**63), 2**63 - 1),
    inspect.MemoryViewType: (
        st.binary(max_size=40) | st.sampled_from((65_535, 65_536, 200_000)).map(bytes)
    ).map(memoryview),
    inspect.NoneType: st.none(),
    inspect.RawType: _ANYTHING.map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value))),
    inspect.StrType: st.text(max_size=10),
    inspect.UUIDType: st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number)),
}
