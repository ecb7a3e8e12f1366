"""Arrow's kernels, ``pyarrow.compute``, loaded when the first of them is used.

pyarrow makes a function with a docstring for each of its kernels when that module is imported, which takes
about as long as all modules of a client together, and many processes never use one: those that plan a query
of Spark, or that only write to topics.

>>> from tidemill.records.columns import compute as pc
>>> pc.add(1, 2).as_py()
3
"""

from __future__ import annotations

from typing import Any

__all__ = ()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        # Python and its tools ask every module for such names.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pyarrow.compute

    kernel = getattr(pyarrow.compute, name)
    # Stored, so that the next access does not call this function.
    globals()[name] = kernel
    return kernel
