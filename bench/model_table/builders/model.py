"""The parts of a row of the table: a model at a tiny and a real shape, and calls of it over ragged batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tiny_models
import torch
from torch import Tensor

Settings = dict[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
CPU = torch.device("cpu")

# Rows of different lengths in batches of different sizes; a prompt of one token among them.
RAGGED = ((7, 4, 6), (5,), (3, 8, 2, 9), (1,))
REAL_LENGTHS = 8  # lengths at a real shape are as many times longer


def real_lengths(lengths: Sequence[int]) -> list[int]:
    """Return lengths for a real shape; one token stays one."""
    return [length if length == 1 else length * REAL_LENGTHS for length in lengths]


@dataclasses.dataclass(frozen=True)
class TableModel:
    """A model of the table.

    Attributes:
        build: makes it on the default device; called with True for the tiny shape.
        call: makes arguments of one call, on the CPU in float32; called with the same flag, a length for each row,
            and a seed.
        settings: of what serves it, as its user has to give them.
        part: the part of the model that is served in place of the whole, as the report of the whole advises.
    """

    build: Callable[[bool], Any]
    call: Callable[[bool, list[int], int], Call]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    part: str = ""


def seeded(seed: int) -> torch.Generator:
    """Return a generator for a call's tensors."""
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int) -> Tensor:
    """Draw normal numbers of that shape."""
    return torch.randn(*shape, generator=seeded(seed))


def numbers(high: int, *shape: int, seed: int) -> Tensor:
    """Draw whole numbers from 3, so that none is a special token, below `high`."""
    return torch.randint(3, high, shape, generator=seeded(seed))


def prompts(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make prompts that are padded on the left."""
    return (), tiny_models.prompts(lengths, CPU, seed)


def tokens(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make texts that are padded on the right, as encoders take them."""
    return (), {name: tensor.flip(1) for name, tensor in tiny_models.prompts(lengths, CPU, seed).items()}


def image_pairs(tiny_side: int, real_side: int) -> Callable[[bool, list[int], int], Call]:
    """Return what makes two images of these sides for each row, by position."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        side = tiny_side if tiny else real_side
        return tuple(noise(len(lengths), 3, side, side, seed=seed + at).tanh() for at in (0, 100)), {}

    return call


def at_least(count: int, real: int = 0, **more: Any) -> Callable[[bool, list[int], int], Call]:
    """Return what makes texts of so many tokens at least, for encoders that fail on shorter ones, with options.

    Args:
        real: the least of the real shape, if that is another.
    """

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        least = count if tiny else real or count
        return (), tokens(tiny, [max(length, least) for length in lengths], seed)[1] | more

    return call


def configured(config: str, model: str, tiny: Settings, real: Settings | None = None) -> Callable[[bool], Any]:
    """Return a builder of a model of transformers; what `real` does not set is the config's own default."""

    def build(is_tiny: bool) -> Any:
        import transformers

        settings = tiny if is_tiny else real or {}
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def resized(make: Callable[[], Any], real: Settings, *, keep: bool = False) -> Callable[[bool], Any]:
    """Return a builder from one of a tiny model: its classes serve the real shape, too.

    Args:
        make: makes the tiny model.
        real: settings of the real one's config.
        keep: True if the settings that `real` does not have are the tiny config's, not the class's defaults.
    """

    def build(is_tiny: bool) -> Any:
        if is_tiny:
            return make()
        with torch.device("meta"):
            small = make()
        settings = _merged(small.config.to_dict(), real) if keep else real
        return type(small)(type(small.config).from_dict(settings) if keep else type(small.config)(**settings))

    return build


def _merged(settings: Settings, changes: Settings) -> Settings:
    """Return the settings with changes, those of configs inside of them included; None drops a setting."""
    found = dict(settings)
    for name, change in changes.items():
        if isinstance(change, dict) and isinstance(found.get(name), dict):
            found[name] = _merged(found[name], change)
        elif change is None:
            found.pop(name, None)
        else:
            found[name] = change
    return found
