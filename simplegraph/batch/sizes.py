"""Capture sizes: the default list, the sizes that a configuration allows, padding, and a planner."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import CaptureSizeError, ConfigError

DEFAULT_LARGEST = 512

# Sizes up to this limit are padded through a table; for a batch of a million rows a table would be too large.
_TABLE_LIMIT = 1 << 16


def default_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes captured by default: 1, 2, 4, multiples of 8 up to 256, multiples of 16 above.

    Args:
        largest: the largest size, in rows or tokens; always in the list, on the grid or not.

    Raises:
        CaptureSizeError: `largest` is below 1.

    Source: the grid that vLLM and SGLang capture; 512 gives 51 sizes.
    """
    _require_size(largest)
    grid = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return (*(size for size in grid if size < largest), largest)


def mixed_sizes(config: CudaGraphConfig) -> tuple[int, ...]:
    """Return the sizes, in tokens, of graphs that serve any batch; ascending.

    These are the configuration's `capture_sizes`, or the default list up to the smaller of `max_capture_size`
    (512 unless set) and `max_num_tokens`. With `exact_shapes` every call counts as one row.
    """
    if config.exact_shapes:
        return (1,)
    if config.capture_sizes is not None:
        return tuple(config.capture_sizes)
    largest = config.max_capture_size or DEFAULT_LARGEST
    return default_sizes(min(largest, config.max_num_tokens or largest))


def uniform_decode_sizes(config: CudaGraphConfig) -> tuple[int, ...]:
    """Return the sizes, in tokens, of graphs for uniform decode only; ascending multiples of `uniform_query_len`.

    Sizes above the largest possible decode batch are replaced by that batch's own size, even if it is not on the
    grid: otherwise the batches just below the limit would have no graph.

    Source: vLLM #57355.
    """
    sizes: Iterable[int] | None = config.decode_capture_sizes
    if sizes is None:  # rounded up
        sizes = (-(-size // config.uniform_query_len) * config.uniform_query_len for size in mixed_sizes(config))
    limit = _largest_decode(config)
    return tuple(sorted({size if limit is None else min(size, limit) for size in sizes}))


def _largest_decode(config: CudaGraphConfig) -> int | None:
    """Return the tokens in the largest uniform decode batch that can occur, or None if nothing bounds it."""
    query_len = config.uniform_query_len
    limits: list[int] = []
    if config.max_num_seqs is not None:
        limits.append(config.max_num_seqs * query_len)
    if config.max_num_tokens is not None:
        limits.append(config.max_num_tokens // query_len * query_len)
    return min(limits, default=None)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class PaddingMap:
    """Maps a batch size to the smallest captured size that holds it. Immutable.

    >>> PaddingMap([1, 2, 4, 8]).padded(3)
    4

    Args:
        sizes: the captured sizes, in rows or tokens, in any order; the attribute is ascending.

    Raises:
        CaptureSizeError: `sizes` is empty, or an entry is no whole number of at least 1.
    """

    sizes: Sequence[int]
    _table: tuple[int, ...] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted({_require_size(size) for size in self.sizes})))
        if not self.sizes:
            raise CaptureSizeError("there are no capture sizes to pad to; give at least one, such as [1, 2, 4, 8].")
        object.__setattr__(self, "_table", _padding_table(self.sizes, min(self.largest, _TABLE_LIMIT)))

    @property
    def largest(self) -> int:
        """The largest captured size."""
        return self.sizes[-1]

    def padded(self, size: int) -> int | None:
        """Return the smallest captured size that holds `size`, or None if all are smaller.

        Raises:
            CaptureSizeError: `size` is below 1.
        """
        if 0 < size < len(self._table):
            return self._table[size]
        index = bisect.bisect_left(self.sizes, _require_size(size))
        return self.sizes[index] if index < len(self.sizes) else None

    def __contains__(self, size: object) -> bool:
        return size in self.sizes

    def __repr__(self) -> str:
        return f"PaddingMap({list(self.sizes)})"


def _padding_table(sizes: Sequence[int], last: int) -> tuple[int, ...]:
    """Build a table whose entry n is the smallest size that holds n, for n up to `last`; entry 0 is never read."""
    table = [0]
    for size in sizes:
        table += [size] * (min(size, last) + 1 - len(table))
    return tuple(table)


def _require_size(size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CaptureSizeError(f"the batch size is {size!r}; expected a whole number of at least 1.")
    return size


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


def plan_sizes(histogram: Mapping[int, float], num_graphs: int, *, always: Sequence[int] = ()) -> SizePlan:
    """Choose the capture sizes with the fewest padding tokens; an exact optimum, not a heuristic.

    >>> plan_sizes({3: 100, 7: 10, 8: 1}, num_graphs=2).sizes
    (3, 8)

    Args:
        histogram: batch size (rows or tokens) -> how often it was seen; counts may be weights.
        num_graphs: the most sizes to choose. Fewer are chosen if more would save nothing.
        always: sizes to capture regardless of the histogram; they count towards `num_graphs`.

    Returns:
        The plan. The largest batch seen is always covered.

    Raises:
        ConfigError: the histogram is empty, a size, a count or `num_graphs` is invalid, or `num_graphs` is too
            few for `always` and the largest batch.

    Source: shortest path with a concave cost, solved one graph at a time with a monotone convex hull:
        O(num_graphs * sizes).
    """
    counts = _check_histogram(histogram)
    forced = {_plan_int("always entry", size) for size in always}
    _check_budget(_plan_int("num_graphs", num_graphs), forced, max(counts))
    points = sorted(counts.keys() | forced)
    weights, scale = _whole_weights([counts.get(point, Fraction(0)) for point in points])
    sizes = _choose_sizes(points, weights, forced, num_graphs)
    default = default_sizes(max(counts))
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


def _check_budget(num_graphs: int, forced: set[int], largest: int) -> None:
    needed = len(forced) + (max(forced, default=0) < largest)
    if num_graphs < needed:
        raise ConfigError(
            f"num_graphs is {num_graphs}, but {len(forced)} always sizes and the largest batch, {largest}, "
            f"need {needed}. Raise num_graphs, or shorten always."
        )


def _whole_weights(counts: Sequence[Fraction]) -> tuple[list[int], int]:
    """Scale counts to whole numbers, so that sums and ties are exact; return them and the factor."""
    scale = math.lcm(*(count.denominator for count in counts))
    return [int(count * scale) for count in counts], scale


def _unscale(total: int, scale: int) -> float:
    return total // scale if total % scale == 0 else total / scale


def _waste(points: Sequence[int], weights: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(weight * (_padded_size(sizes, point) - point) for point, weight in zip(points, weights, strict=True))


def _padded_size(sizes: Sequence[int], point: int) -> int:
    # A forced size above the largest batch has no weight, so it may lie beyond the default sizes.
    return sizes[min(bisect.bisect_left(sizes, point), len(sizes) - 1)]


def _choose_sizes(points: Sequence[int], weights: Sequence[int], forced: set[int], num_graphs: int) -> tuple[int, ...]:
    """Choose at most `num_graphs` points that hold all weight with the least padding."""
    layer: _Layer = [0] + [None] * len(points)
    parents: list[list[int]] = []
    best: tuple[int, int] | None = None
    for graphs in range(1, min(num_graphs, len(points)) + 1):
        layer, parent = _one_more_graph(layer, points, weights, forced)
        parents.append(parent)
        waste = layer[-1]
        if waste is not None and (best is None or waste < best[0]):
            best = waste, graphs
    chosen: list[int] = []
    position = len(points)
    for parent in reversed(parents[: best[1] if best else 0]):
        chosen.append(points[position - 1])
        position = parent[position]
    return tuple(reversed(chosen))


# Entry i: the least waste of exactly k sizes that hold the first i points, the last size being points[i - 1].
_Layer = list[int | None]


def _one_more_graph(
    previous: _Layer, points: Sequence[int], weights: Sequence[int], forced: set[int]
) -> tuple[_Layer, list[int]]:
    """Compute the layer for one more graph, and for each entry the index in `previous` that it came from."""
    layer: _Layer = [None]
    parent = [0]
    hull = _Hull()
    count = tokens = 0
    for index, (point, weight) in enumerate(zip(points, weights, strict=True)):
        if index and points[index - 1] in forced:
            hull = _Hull()  # no size may skip a forced one
        before = previous[index]
        if before is not None:
            hull.add(-count, before + tokens, index)
        count, tokens = count + weight, tokens + weight * point
        least, origin = hull.least(point)
        layer.append(None if least is None else point * count - tokens + least)
        parent.append(origin)
    return layer, parent


class _Hull:
    """The lower hull of lines that are added by falling slope, asked at rising positions."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[int, int, int]] = collections.deque()

    def add(self, slope: int, offset: int, label: int) -> None:
        while len(self._lines) > 1 and _never_lowest(self._lines[-2], self._lines[-1], (slope, offset, label)):
            self._lines.pop()
        self._lines.append((slope, offset, label))

    def least(self, position: int) -> tuple[int | None, int]:
        """Return the lowest value at `position` and its line's label; None without lines."""
        lines = self._lines
        while len(lines) > 1 and _value(lines[1], position) <= _value(lines[0], position):
            lines.popleft()
        return (_value(lines[0], position), lines[0][2]) if lines else (None, 0)


def _value(line: tuple[int, int, int], position: int) -> int:
    return line[0] * position + line[1]


def _never_lowest(first: tuple[int, int, int], middle: tuple[int, int, int], last: tuple[int, int, int]) -> bool:
    """True if `middle` is nowhere below both its neighbours."""
    return (last[1] - first[1]) * (first[0] - middle[0]) <= (middle[1] - first[1]) * (first[0] - last[0])
