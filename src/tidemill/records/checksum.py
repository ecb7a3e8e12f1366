"""CRC-32C, the checksum of record batches and of Tidemill's own files.

The package ``crc32c`` has it in an extension module. To import the package is to run its ``__init__``, too,
which loads a command line of its own and what reads the metadata of packages: 38 modules, 2.5 MB and 8 ms of
every process that has to do with records. So the extension is loaded alone where it has its usual name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Final

__all__ = ("crc32c",)

_PACKAGE: Final = "crc32c"


def _load() -> ModuleType:
    package = PathFinder.find_spec(_PACKAGE)
    if package is not None:
        extension = PathFinder.find_spec(f"{_PACKAGE}._crc32c", package.submodule_search_locations)
        if extension is not None and extension.loader is not None:
            module = module_from_spec(extension)
            extension.loader.exec_module(module)
            return module
    return import_module(_PACKAGE)


crc32c: Final[Callable[..., int]] = _load().crc32c
"""The checksum of the bytes, or of those before them and these: ``crc32c(data, checksum_so_far)``."""
