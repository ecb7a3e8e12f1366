from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

from tidemill.records import checksum


def test_it_is_crc_32c() -> None:
    # The check value of the algorithm, CRC-32C (Castagnoli).
    assert checksum.crc32c(b"123456789") == 0xE3069283
    assert checksum.crc32c(b"6789", checksum.crc32c(b"12345")) == 0xE3069283


def test_neither_the_package_nor_what_it_loads_is_loaded_with_it() -> None:
    program = "import sys, tidemill.records.checksum; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"crc32c", "argparse", "importlib.metadata"} & set(done.stdout.split())


def test_without_the_extension_under_its_usual_name_it_comes_out_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder, "find_spec", lambda name, path=None: None if "." in name else find(name, path)
    )
    assert checksum._load().crc32c(b"123456789") == 0xE3069283
