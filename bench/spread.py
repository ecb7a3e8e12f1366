"""Spreads: the median of several measurements of one thing, and how far the extremes lie apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, quantiles

__all__ = ("Spread", "number", "percentile")


def number(value: float) -> str:
    """Three significant digits, without an exponent.

    >>> number(0.01234), number(1.5), number(123456.0)
    ('0.0123', '1.50', '123,456')
    """
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    decimals = 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    return f"{value:.{decimals}f}"


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which ``percent`` of all lie."""
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


class Spread:
    """Measurements of the same thing in several rounds."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = tuple(values)

    @property
    def median(self) -> float:
        return median(self.values)

    def over(self, other: Spread) -> Spread:
        """The ratios round by round, because the two sides of a round ran under the same load."""
        return Spread(
            mine / theirs if theirs else float("inf")
            for mine, theirs in zip(self.values, other.values, strict=True)
        )

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.values))} to {number(max(self.values))})"
