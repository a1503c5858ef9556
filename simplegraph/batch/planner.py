"""The planner: chooses the capture sizes with the fewest padding tokens for a histogram of batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from simplegraph.base.errors import ConfigError
from simplegraph.batch.sizes import default_sizes, padded_size


@dataclasses.dataclass(frozen=True)
class SizePlan:
    """Capture sizes chosen for a histogram of batches, and what they save.

    Attributes:
        sizes: the chosen sizes, ascending; pass them as ``capture_sizes``.
        waste_before: padding tokens with the default sizes up to the same largest batch.
        waste_after: padding tokens with `sizes`.
        tokens: real tokens in the histogram.
        num_default_sizes: the number of default sizes, hence of their graphs.
    """

    sizes: tuple[int, ...]
    waste_before: float
    waste_after: float
    tokens: float
    num_default_sizes: int

    def __str__(self) -> str:
        return (
            f"{len(self.sizes)} sizes: {', '.join(map(str, self.sizes))}\n"
            f"  padding {self._share(self.waste_after)}; {self._share(self.waste_before)} with the "
            f"{self.num_default_sizes} default sizes (real tokens: {self.tokens:,.0f})"
        )

    def _share(self, waste: float) -> str:
        return f"{waste:,.0f} tokens ({waste / self.tokens:.1%})"


def plan_sizes(histogram: Mapping[int, float], num_graphs: int) -> SizePlan:
    """Choose the capture sizes with the fewest padding tokens; the result is an exact optimum.

    >>> plan_sizes({3: 100, 7: 10, 8: 1}, num_graphs=2).sizes
    (3, 8)

    Args:
        histogram: batch size (rows or tokens) -> its count; counts may be weights.
        num_graphs: the most sizes to choose. Fewer are chosen if further sizes would save nothing.

    Returns:
        The plan. It always covers the largest batch.

    Raises:
        ConfigError: the histogram is empty, or a size, a count or `num_graphs` is invalid.

    Source: shortest path with a concave cost, solved one graph at a time by divide and conquer:
        O(num_graphs * sizes * log(sizes)).
    """
    counts = _check_histogram(histogram)
    points = sorted(counts)
    # Whole numbers, so that sums and ties are exact.
    scale = math.lcm(*(count.denominator for count in counts.values()))
    weights = [int(counts[point] * scale) for point in points]
    sizes = _choose_sizes(points, weights, _plan_int("num_graphs", num_graphs))
    default = default_sizes(points[-1])
    return SizePlan(
        sizes=sizes,
        waste_before=_unscale(_waste(points, weights, default), scale),
        waste_after=_unscale(_waste(points, weights, sizes), scale),
        tokens=_unscale(sum(map(operator.mul, points, weights)), scale),
        num_default_sizes=len(default),
    )


def _plan_int(name: str, value: Any) -> int:
    """Check for a whole number of at least 1 and return it as an int; numpy integers are accepted."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1.")
    return number


def _check_histogram(histogram: Mapping[int, float]) -> dict[int, Fraction]:
    if not isinstance(histogram, Mapping):
        raise ConfigError(f"histogram is {histogram!r}; expected a mapping from batch sizes to counts.")
    counts = {_plan_int("histogram size", size): _count(size, count) for size, count in histogram.items()}
    seen = {size: count for size, count in counts.items() if count}
    if not seen:
        raise ConfigError("the histogram has no batches; give at least one size with a count above 0.")
    return seen


def _count(size: int, count: Any) -> Fraction:
    try:
        number = float(count)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"the count of size {size} is {count!r}; expected a number of at least 0.")
    return Fraction(number)


def _unscale(total: int, scale: int) -> float:
    return total // scale if total % scale == 0 else total / scale


def _waste(points: Sequence[int], weights: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(weight * ((padded_size(sizes, at) or at) - at) for at, weight in zip(points, weights, strict=True))


def _choose_sizes(points: Sequence[int], weights: Sequence[int], num_graphs: int) -> tuple[int, ...]:
    """Choose at most `num_graphs` points that hold all weight with the least padding."""
    costs = _Costs(points, weights)
    layer = [0] + [costs.impossible] * len(points)
    parents: list[list[int]] = []
    least = []
    for _ in range(min(num_graphs, len(points))):
        layer, parent = costs.one_more_size(layer)
        parents.append(parent)
        least.append(layer[-1])
    chosen: list[int] = []
    position = len(points)
    for parent in reversed(parents[: least.index(min(least)) + 1]):
        chosen.append(points[position - 1])
        position = parent[position]
    return tuple(reversed(chosen))


class _Costs:
    """The cost of padding consecutive points to the last of them.

    Args:
        points: ascending.
        weights: the weight of each point.
    """

    def __init__(self, points: Sequence[int], weights: Sequence[int]) -> None:
        self._points = points
        self._counts = list(itertools.accumulate(weights, initial=0))
        self._tokens: list[int] = list(itertools.accumulate(map(operator.mul, points, weights), initial=0))
        self.impossible = points[-1] * self._counts[-1] + 1  # more than any possible padding

    def cost(self, start: int, end: int) -> int:
        """Return the cost of ``points[start:end]``."""
        size, count = self._points[end - 1], self._counts[end] - self._counts[start]
        return size * count - (self._tokens[end] - self._tokens[start])

    def one_more_size(self, layer: Sequence[int]) -> tuple[list[int], list[int]]:
        """Compute the least costs with one more size, and for each cost the index in `layer` from which it comes.

        Args:
            layer: entry i is the least cost of exactly k sizes for the first i points.
        """
        costs, origins = [self.impossible] * len(layer), [0] * len(layer)
        # The best index never decreases as points are added, so each entry bounds the search for its neighbours.
        ranges = [(1, len(layer), 0, len(layer) - 1)]
        while ranges:
            low, high, first, last = ranges.pop()
            if low < high:
                end = (low + high) // 2
                starts = range(first, min(end, last + 1))
                costs[end], back = min((layer[start] + self.cost(start, end), -start) for start in starts)
                origins[end] = -back
                ranges += [(low, end, first, origins[end]), (end + 1, high, origins[end], last)]
        return costs, origins
