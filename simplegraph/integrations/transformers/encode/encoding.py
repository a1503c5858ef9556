"""`graph_encoder`: an encoder's calls go through graphs, their batches and their lengths padded to captured ones."""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from simplegraph.errors import ConfigError
from simplegraph.graph.device import GraphPool
from simplegraph.integrations.transformers.overrides import give_methods, named, owner_of, take_back
from simplegraph.integrations.transformers.refusals import check_model
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.module.changes import Changes
from simplegraph.module.compare import first_difference
from simplegraph.module.mixin import CudaGraphWrapper, wrap
from simplegraph.module.signature import CannotBind
from simplegraph.nested import flatten
from simplegraph.reasons import Reason

_SEQUENCES = ("input_ids", "inputs_embeds")  # what says the batch and the length, the first one given
_NEVER_PADDED = ("labels", "past_key_values", "encoder_hidden_states", "encoder_attention_mask")


class GraphedEncoder:
    """What `graph_encoder` did to a model: its counters, and `remove`, which a context manager calls at its end."""

    def __init__(
        self,
        model: Any,
        *,
        lengths: Sequence[int],
        capture_sizes: Sequence[int] | None,
        max_batch_size: int,
        pool: GraphPool | None,
    ) -> None:
        self.model = model
        self._lengths = sorted(lengths)
        self._signature = inspect.signature(type(model).forward)
        self._largest = max(capture_sizes) if capture_sizes else max_batch_size
        self._checked_at = -1
        self._rules: dict[Hashable, _Rule] = {}
        settings: dict[str, Any] = {"capture_sizes": capture_sizes} if capture_sizes else {}
        self._step: Any = wrap(
            named(_Encode, type(model).__name__)(model, type(model).forward),
            pool=pool,
            max_signatures=4 * len(self._lengths),
            progress=False,
            **(settings or {"max_capture_size": max_batch_size}),
        )

    @property
    def stats(self) -> GraphStats:
        """The counters behind `report`."""
        stats: GraphStats = self._step.graph_stats
        return stats

    def report(self) -> GraphReport:
        """Captures, replays and what ran eagerly, with the reasons."""
        report: GraphReport = self._step.graph_report()
        return report

    def reset(self) -> None:
        """Drop the graphs; later calls capture anew."""
        self._step.reset_graphs()

    def remove(self) -> None:
        """Let the model's calls be what they were, and drop the graphs. Twice does no harm."""
        take_back(self.model, self)
        self._step.reset_graphs()

    def __enter__(self) -> GraphedEncoder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model."""
        try:
            self._check()
            return self._padded(forward, self._by_name(args, kwargs))
        except CannotBind as error:
            self.stats.ran_eagerly(error.reason, error.detail)
            return forward(*args, **kwargs)

    def _check(self) -> None:
        """Refuse a call because of the model's state, which is looked through only where somebody changed one."""
        if torch.is_grad_enabled():
            raise CannotBind(Reason.GRAD, "")
        if not self.stats.captures or self._checked_at != Changes.count or self.model.training:
            check_model(self.model)
            self._checked_at = Changes.count

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args:
            return kwargs
        call = self._signature.bind(self.model, *args, **kwargs)
        return dict(zip(list(self._signature.parameters)[1:], call.args[1:], strict=False)) | call.kwargs

    def _padded(self, forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        inputs, flags, (rows, length) = _read(given)
        if rows > self._largest:
            raise CannotBind(Reason.BATCH_TOO_LARGE, f"{rows} rows")
        padded = self._length_for(length)
        full = _fill(inputs, rows, length, padded)
        if padded == length:
            return self._step(**full, **flags)
        key = (tuple(inputs), tuple(sorted((name, repr(value)) for name, value in flags.items())))
        rule = self._rules.get(key)
        if rule is not None:
            rule.check()
            return rule.cut(self._step(**full, **flags), length)
        outputs = forward(**given)
        self._rules[key] = _Rule.between(outputs, self._step(**full, **flags), length, padded)
        return outputs

    def _length_for(self, length: int) -> int:
        index = bisect.bisect_left(self._lengths, length)
        if index == len(self._lengths):
            raise CannotBind(Reason.LENGTH_TOO_LARGE, f"{length} tokens")
        return self._lengths[index]


class _Encode(nn.Module):
    """The model's own forward, by name."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._forward = functools.partial(forward, model)
        self.training = False  # the model itself says whether it is

    def forward(self, **inputs: Any) -> Any:
        return self._forward(**inputs)


class _Rule:
    """Where a length is in a model's outputs: for each of them, the dimensions that grew with it.

    Args:
        dims: those dimensions, by output.
        refusal: what else padding changes, so that padded calls cannot stand for others.
    """

    def __init__(self, dims: list[tuple[int, ...]], refusal: str = "") -> None:
        self._dims = dims
        self._refusal = refusal

    @classmethod
    def between(cls, outputs: Any, padded_outputs: Any, length: int, padded: int) -> _Rule:
        """The rule that a call shows which ran both as it was and padded."""
        (leaves, spec), (padded_leaves, padded_spec) = flatten(outputs), flatten(padded_outputs)
        if spec != padded_spec:
            return cls([], "it returns something else then")
        dims = [_grown(leaf, other) for leaf, other in zip(leaves, padded_leaves, strict=True)]
        rule = cls(dims)
        found = first_difference(flatten(rule.cut(padded_outputs, length))[0], leaves)
        return rule if found is None else cls([], f"from {length} to {padded} tokens, {found}")

    def check(self) -> None:
        """Refuse the call if padding would change its answers."""
        if self._refusal:
            raise CannotBind(Reason.LENGTH_PADDING, self._refusal)

    def cut(self, outputs: Any, length: int) -> Any:
        """The outputs of the real tokens."""
        leaves, spec = flatten(outputs)
        for index, dims in enumerate(self._dims):
            for dim in dims:
                leaves[index] = leaves[index].narrow(dim, 0, length)
        return spec.unflatten(leaves)


def _grown(leaf: Any, other: Any) -> tuple[int, ...]:
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor) or leaf.dim() != other.dim():
        return ()
    return tuple(dim for dim in range(leaf.dim()) if leaf.shape[dim] < other.shape[dim])


def _read(given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], tuple[int, int]]:
    """The tensors of a call, its other arguments, and its rows and length."""
    sequence = next((given[name] for name in _SEQUENCES if given.get(name) is not None), None)
    if not isinstance(sequence, Tensor) or sequence.dim() < 2:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "neither input_ids nor inputs_embeds")
    rows, length = sequence.shape[:2]
    inputs, flags = {}, {}
    for name, value in given.items():
        if name in _NEVER_PADDED and value is not None:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} was given")
        if not isinstance(value, Tensor):
            flags[name] = value
        elif value.shape[:2] == (rows, length) and value.dim() <= sequence.dim():
            inputs[name] = value
        else:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} of shape {tuple(value.shape)}")
    return inputs, {name: value for name, value in flags.items() if value is not None}, (rows, length)


def _fill(inputs: dict[str, Tensor], rows: int, length: int, padded: int) -> dict[str, Tensor]:
    """The inputs padded with zeros, and a mask that hides them."""
    first = next(iter(inputs.values()))
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(rows, length, dtype=torch.int64, device=first.device)
    full = inputs | {"attention_mask": mask}
    if padded == length:
        return full
    return {name: F.pad(value, [0] * (2 * value.dim() - 3) + [padded - length]) for name, value in full.items()}


def graph_encoder(
    model: Any,
    *,
    max_batch_size: int = 64,
    lengths: Sequence[int] | None = None,
    capture_sizes: Sequence[int] | None = None,
    pool: GraphPool | None = None,
) -> GraphedEncoder:
    """From now on calls of the encoder go through CUDA graphs, one for every padded batch size and length.

    Sequences are padded on the right with tokens that the attention mask hides, and outputs are cut to the real ones.
    The first padded call of a kind runs twice, as it is and padded: where the answers differ, calls run as they are.

        with graph_encoder(model) as graphs:
            hidden = model(input_ids, attention_mask=mask).last_hidden_state

    Args:
        model: an encoder of transformers that takes an attention mask, with or without a head.
        max_batch_size: rows of the largest batch.
        lengths: tokens to capture; None takes an eighth of a power of two from one to the next, up to the model's
            `max_position_embeddings`, or 512.
        capture_sizes: batch sizes to capture; None takes the default ones up to `max_batch_size`.
        pool: graph memory to share with other wrappers; see `graph_pool`.

    Returns:
        A handle with `report`, `stats` and `remove`; as a context manager it removes itself at the end.

    Raises:
        ConfigError: this is no such model, or a setting is invalid.
    """
    _check(model)
    if lengths is None:
        lengths = eighths(getattr(model.config, "max_position_embeddings", None) or 512)
    if not lengths or not all(isinstance(length, int) and length > 0 for length in lengths):
        raise ConfigError(f"lengths is {lengths!r}; expected whole numbers of at least 1, such as [64, 128, 256].")
    earlier = owner_of(model)
    if earlier is not None:
        earlier.remove()
    graphs = GraphedEncoder(
        model, lengths=lengths, capture_sizes=capture_sizes, max_batch_size=max_batch_size, pool=pool
    )
    give_methods(model, graphs, {"forward": graphs.forward})
    return graphs


def eighths(largest: int) -> list[int]:
    """16, 32 and so on up to `largest`, each at most an eighth of a power of two above the one before."""
    lengths, length = [], 16
    while length < largest:
        lengths.append(length)
        length += max(16, (1 << length.bit_length() - 1) // 8)
    return [*lengths, largest]


def _check(model: Any) -> None:
    if not isinstance(model, PreTrainedModel) or isinstance(model, CudaGraphWrapper):
        raise ConfigError(f"graph_encoder got a {type(model).__name__}; expected a model of transformers, not wrapped.")
    if "attention_mask" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(f"{type(model).__name__}.forward takes no attention_mask, so its lengths cannot be padded.")
