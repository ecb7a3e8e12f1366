"""A strict reader of Prometheus' text format: whatever a scraper may stumble over is an error here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from tidemill.coordination.metrics import Metrics
from tidemill.server.metrics import render

__all__ = ("Family", "parse_metrics", "scrape")

Labels = tuple[tuple[str, str], ...]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (-?[0-9][0-9.e+-]*)")
_ONE_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",)}


@dataclass
class Family:
    """One metric: its kind, its help, and its samples by (suffix, labels)."""

    name: str
    kind: str
    help: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def value(self, suffix: str = "", /, **labels: str) -> float:
        """The value of one sample; the order of labels does not matter."""
        (found,) = [
            value
            for (its_suffix, its_labels), value in self.samples.items()
            if its_suffix == suffix and dict(its_labels) == labels
        ]
        return found

    def check(self) -> None:
        assert self.samples, f"{self.name} has no sample"
        assert self.name.endswith("_total") == (self.kind == "counter"), f"{self.name} is a {self.kind}"
        if self.kind == "histogram":
            self._check_histogram()

    def _check_histogram(self) -> None:
        buckets: dict[Labels, list[tuple[float, float]]] = {}
        for (suffix, labels), value in self.samples.items():
            if suffix == "_bucket":
                (bound,) = [text for name, text in labels if name == "le"]
                rest = tuple(label for label in labels if label[0] != "le")
                buckets.setdefault(rest, []).append((float(bound), value))
        for rest, found in buckets.items():
            assert [bound for bound, _ in found] == sorted({bound for bound, _ in found}), self.name
            assert all(below <= above for (_, below), (_, above) in pairwise(found)), f"{self.name} {found}"
            assert found[-1] == (float("inf"), self.samples["_count", rest]), f"{self.name} {rest}"
            assert self.samples["_sum", rest] >= 0


def parse_metrics(text: str) -> dict[str, Family]:
    """The metrics by name. Fails an assertion where the text is not wholly right."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    current: Family | None = None
    help_line: tuple[str, str] | None = None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, said = line.split(" ", 3)
            assert re.fullmatch(_NAME, name), line
            assert name not in families, f"a second header, or samples apart from each other: {line}"
            assert said.strip(), line
            help_line = name, said
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert help_line is not None, line
            assert help_line[0] == name, line
            assert kind in _SUFFIXES, line
            current = families[name] = Family(name, kind, help_line[1])
        else:
            assert current is not None, line
            _add_sample(current, line)
    for family in families.values():
        family.check()
    return families


async def scrape(metrics: Metrics) -> dict[str, Family]:
    """What a page of these metrics says."""
    return parse_metrics("".join([part async for part in render(metrics)]))


def _add_sample(family: Family, line: str) -> None:
    found = _SAMPLE.fullmatch(line)
    assert found, f"not a sample: {line}"
    name, labels, value = found.groups()
    suffix = name.removeprefix(family.name)
    assert name.startswith(family.name), f"{line} is under the header of {family.name}"
    assert suffix in _SUFFIXES[family.kind], f"{line} is under the header of {family.name}"
    key = suffix, tuple(_ONE_LABEL.findall(labels or ""))
    assert len(dict(key[1])) == len(key[1]), f"a label twice: {line}"
    assert key not in family.samples, f"twice the same series: {line}"
    family.samples[key] = float(value)
