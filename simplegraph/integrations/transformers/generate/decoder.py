"""Decodes token by token from a cache of fixed addresses, by a captured step."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.failures import user_location
from simplegraph.base.nested import map_leaves
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import layout_of
from simplegraph.batch.sizes import mixed_sizes
from simplegraph.fused.layers.kinds import operators_of
from simplegraph.fused.torch_operators import KernelTrial, Operators
from simplegraph.integrations.transformers.generate.cache.layers import CacheLayout
from simplegraph.integrations.transformers.generate.cache.store import CacheStore
from simplegraph.integrations.transformers.generate.launch import Launch
from simplegraph.integrations.transformers.generate.token_step import POSITIONS, SHORTEN_MASK, masks_source
from simplegraph.manager.replay_proof import EXACT, TOLERANCE, by_least_precise, leaf_difference
from simplegraph.manager.stats import CaptureSummary

_SMALLEST_SPAN = 256  # positions; attending to fewer saves no time
_SMALLEST_SOURCE = 64
_ALIGNMENT = 16  # positions; attention copies a mask of any other length in every layer
MAX_LAUNCHES = 8  # the most ways to choose tokens, such as temperatures, that get graphs
ON_THE_WAY = frozenset((Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF, Reason.OUTPUT_SHAPE_UNKNOWN))


def _has_gaps(leaf: Any) -> bool:
    return issubclass(type(leaf), Tensor) and bool(layout_of(leaf, 0 if leaf.dim() else None).gaps)


def _without_gaps(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps the stride of one row


class StepInputs(NamedTuple):
    """The model's own arguments of one step, except masks, cache and encoder outputs.

    Attributes:
        tokens: one number per row, or some; and plain values.
        carried: tensors with the rows first that are the same from step to step.
    """

    tokens: dict[str, Any]
    carried: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arguments."""
        return *self.tokens, *self.carried

    def later(self, steps: int, ids_name: str, ids: Tensor) -> StepInputs:
        """Return the arguments of the step that comes so many steps later and has the tokens `ids`."""
        positions = {name: value + steps for name in POSITIONS if (value := self.tokens.get(name)) is not None}
        return self._replace(tokens=self.tokens | positions | {ids_name: ids})

    def unlike_next(self, earlier: StepInputs, ids_name: str) -> str:
        """Name an argument that differs from the result of `earlier.later`; "" if none does. Waits for the GPU.

        Args:
            earlier: arguments of the step before.
            ids_name: name of the argument that holds the tokens.
        """
        if self.names != earlier.names:
            return "which arguments there are"
        expected = earlier.later(1, ids_name, self.tokens[ids_name])
        tensors, expected_tensors = {**self.tokens, **self.carried}, {**expected.tokens, **expected.carried}
        return next(
            (name for name in self.names if leaf_difference(tensors[name], expected_tensors[name], tolerance=EXACT)), ""
        )


class FixedCacheDecoder:
    """Decodes with graphs, for one generation at a time.

    Args:
        step: a wrapped `TokenStep`.
        capture_sizes: batch sizes that the step captures.
        max_batch_size: rows of the largest batch; max_length: tokens of the longest sequence, prompt included.
        max_source_length: tokens of the longest encoder output.

    Attributes:
        stats: the step's counters.
        ids_name: name of the argument that holds a step's tokens; cache_name: name of the one that holds the cache.
        trusted: numbers of windows that a step was past which has given the same logits on the store as on the model's
            own cache; see `windows_left`.
        advances: names of a step's arguments -> the name of one that changes in an unknown way between steps, or "".
        capturing: receives the summaries of captures ahead of each step; None while steps are only run.
        stays_eager: True if the last step ran eagerly and the next one would as well; the report has the reason.
    """

    def __init__(
        self, step: Any, capture_sizes: Sequence[int], *, max_batch_size: int, max_length: int, max_source_length: int
    ) -> None:
        self._step, self.stats, self.model = step, step.graph_stats, step.model
        self.ids_name, self.cache_name = step.ids_name, step.cache_name
        self.trusted: set[int] = set()
        self.stays_eager = False
        self.advances: dict[tuple[str, ...], str] = {}
        self._launches: set[Launch] = set()
        # Graphs read tensors of the processors that they were captured with, which each generation makes anew.
        self._captured_with: dict[Launch, Launch] = {}
        self._progress = 0
        self.capturing: dict[str, CaptureSummary] | None = None
        self._length, self._source_length = max_length, max_source_length
        self.use_sizes(capture_sizes, max_batch_size)
        self._spans = doubling(_SMALLEST_SPAN, -(-max_length // _ALIGNMENT) * _ALIGNMENT)
        self._sources = doubling(_SMALLEST_SOURCE, max_source_length) if masks_source(step.model) else []

    def use_sizes(self, capture_sizes: Sequence[int], max_batch_size: int = 1) -> None:
        """Pad batches to these sizes from the next store on."""
        # The store needs rows for the largest padded batch, and sizes may also come from the environment.
        sizes = mixed_sizes(CudaGraphConfig(capture_sizes=capture_sizes).from_env())
        self._sizes, self._rows = frozenset(sizes), max(max_batch_size, *sizes)

    def prompts_for(self, lengths: Sequence[int] | None) -> list[tuple[int, int]]:
        """Return rows and tokens of prompts whose first steps cover all steps of sequences of some lengths.

        Args:
            lengths: the shortest and the longest, among others; None for all up to `max_length`.

        Raises:
            CannotBind: a length is above `max_length`.
        """
        ends = [self._span(length - 1, grows=True) for length in lengths or (1, self._length)]
        pairs = zip([1, *self._spans], self._spans, strict=False)  # tokens with which each span begins
        return [(self._rows, tokens) for tokens, span in pairs if min(ends) <= span <= max(ends)][::-1]

    def load(self, cache: Any, rows: int, length: int, kwargs: Mapping[str, Any]) -> tuple[CacheStore, int]:
        """Copy a prefilled cache to the store.

        Args:
            cache: the generation's own.
            rows: rows of the cache.
            length: tokens of each row.
            kwargs: keyword arguments of the model's forward.

        Returns:
            The store, and the padded length of the encoder's outputs, 0 without an encoder.

        Raises:
            CannotBind: the cache is too large, or of another kind.
        """
        if rows > self._rows:
            raise CannotBind(Reason.BATCH_TOO_LARGE, f"{rows} rows, the largest is {self._rows}: raise max_batch_size")
        self.stays_eager = False
        self_attention, cross = (
            getattr(cache, "self_attention_cache", cache),
            getattr(cache, "cross_attention_cache", None),
        )
        hidden = None if cross is None else _encoder_hidden(kwargs)
        source = 0 if hidden is None else self._padded_source(hidden.shape[1])
        outputs = kwargs.get("encoder_outputs")
        kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
        layout = CacheLayout.of(self_attention, cross, hidden, kind)
        self._span(length, grows=layout.first is not None)
        self._use_store(layout)
        store: CacheStore = self._step.store
        masks = self._masks(kwargs, rows, length)
        self._step._graph_runner.announce_write()
        store.load(self_attention, rows, length)
        if hidden is not None:
            store.load_source(cross, hidden)
        self._load_masks(*masks, rows, length)
        return store, source

    def load_masks(self, kwargs: Mapping[str, Any], rows: int, length: int) -> None:
        """Copy the masks of the next step, which has `length` tokens before it; `load` does it for a new store.

        Raises:
            CannotBind: one is of another kind.
        """
        masks = self._masks(kwargs, rows, length)
        self._step._graph_runner.announce_write()
        self._load_masks(*masks, rows, length)

    def _load_masks(self, mask: Tensor | None, source_mask: Tensor | None, source: int, rows: int, length: int) -> None:
        store: CacheStore = self._step.store
        if store.first is not None:
            store.load_mask(mask, rows, length)
        if source:
            store.load_source_mask(source_mask, rows, source)

    def _masks(self, kwargs: Mapping[str, Any], rows: int, length: int) -> tuple[Tensor | None, Tensor | None, int]:
        """Return the masks of the tokens and of the encoder's outputs, and how many outputs there are."""
        store: CacheStore = self._step.store
        name = self.ids_name.replace("input_ids", "attention_mask")
        mask = None if store.first is None else _checked(kwargs.get(name), name, rows, length, longer=True)
        if store.layout.hidden is None:
            return mask, None, 0
        source, outputs = _encoder_hidden(kwargs).shape[1], kwargs.get("encoder_outputs")
        # Encoders that shorten their input return the mask of their outputs.
        masks: Any = outputs if getattr(outputs, "attention_mask", None) is not None else kwargs
        source_mask = self._short_mask(masks.get("attention_mask"), source) if self._sources else None
        return mask, _checked(source_mask, "attention_mask", rows, source, longer=False), source

    def _short_mask(self, mask: Any, length: int) -> Any:
        """Shorten a mask of an encoder's inputs as the model does, to the `length` of the outputs."""
        shortening = self._step.shortening
        if shortening and isinstance(mask, Tensor) and mask.shape[1:] != (length,):
            return getattr(shortening[0], SHORTEN_MASK)(length, mask)
        return mask

    def step(self, length: int, source: int, inputs: StepInputs, order: Tensor | None, **launch: Any) -> Any:
        """Compute the logits, (rows, 1, vocabulary), of the token at position `length`; valid until the next step.

        Args:
            length: tokens in the store.
            source: positions of the encoder's outputs.
            inputs: the model's own arguments.
            order: (rows,), the row whose tokens each row goes on from; None if each goes on from its own.
            **launch: `launch` and `rows` of `TokenStep`, to take the steps of a launch that `fits`.

        Returns:
            The logits; `Launched` of a launch.

        Raises:
            CannotBind: the cache is full.
        """
        step = self._step
        store: CacheStore = step.store
        if launch:
            launch["launch"] = self._captured_with.setdefault(launch["launch"], launch["launch"])
        # Tokens are often the last of more, or one for all rows: without gaps they are of the captured layout.
        tokens, carried, launch = map_leaves((inputs.tokens, inputs.carried, launch), _has_gaps, _without_gaps)
        grows = store.first is not None
        span = self._span(length, grows=grows)
        if grows:
            step._graph_runner.announce_write()
            store.position.fill_(length)
        # Warmups change states, which are compared before.
        if self.capturing is not None and self.trusts(length):
            self.capturing[f"{span} positions, step {len(self.capturing)}"] = step.capture_graphs(
                span, source, order, carried, **launch, **tokens
            )
            if grows:
                store.position.fill_(length)  # the warmups of a launch moved it
        result = step(span, source, order, carried, **launch, **tokens)
        if store.ran:
            store.ran = False
            # Graphs, and eager steps that lead to one, such as warmups.
            progress = self.stats.captures + sum(self.stats.eager[reason] for reason in ON_THE_WAY)
            before, self._progress = self._progress, progress
            self.stays_eager = self._progress == before
        return result

    def fits(self, length: int, steps: int) -> bool:
        """True if this many steps from position `length` on all attend to the same number of positions."""
        if self._step.store.first is None:
            return True
        return length + steps <= self._length and self._span(length, grows=True) >= length + steps

    def check_room(self, length: int) -> None:
        """Refuse launches of several steps if a cache of so many tokens is too long.

        Raises:
            CannotBind: it is.
        """
        store: CacheStore | None = self._step.store
        if length > self._length and (store is None or store.first is not None):
            raise CannotBind(Reason.ONE_TOKEN, f"the cache may get {length} tokens; raise max_length")

    def check_launch(self, launch: Launch, rows: int, length: int) -> None:
        """Refuse a launch of several steps in a generation.

        Args:
            launch: how tokens are chosen.
            rows: of the batch.
            length: most tokens of its sequences, the last one included, which no step is passed.

        Raises:
            CannotBind: the reason.
        """
        self.check_room(length - 1)
        if launch.samples and rows not in self._sizes:
            raise CannotBind(Reason.ONE_TOKEN, f"padding draws other tokens: add {rows} rows to capture_sizes")
        unlike = next(filter(None, self.advances.values()), None)
        if unlike is not None:
            raise CannotBind(Reason.ONE_TOKEN, f"{unlike} changes from step to step in a way of its own")
        if launch not in self._launches and len(self._launches) == MAX_LAUNCHES:
            raise CannotBind(Reason.ONE_TOKEN, f"{MAX_LAUNCHES} ways to choose tokens have graphs already")
        self._launches.add(launch)

    def compare(
        self, length: int, source: int, inputs: StepInputs, order: Tensor | None, expected: Tensor
    ) -> str | None:
        """Say how a step on the store differs from `expected`, logits on the model's own cache; None if it does not.

        A step that fails counts as different: many models need to know the length of their cache in Python.
        """
        try:
            logits = self.step(length, source, inputs, order)
        except Exception as error:
            return f"{type(error).__name__}: {error} at {user_location(error)}"
        dtypes = {expected.dtype, self.model.dtype}  # some return logits of half precision as float32
        tolerance = by_least_precise(TOLERANCE, dtypes)
        texts = (leaf_difference(*pair, tolerance=tolerance) for pair in zip(logits, expected, strict=True))
        differences = [text for text in texts if text is not None]
        # In half precision, rounding may route a row to another expert.
        allowed = 0 if dtypes.isdisjoint({torch.float16, torch.bfloat16}) else len(logits) // 2
        return differences[0] if len(differences) > allowed else None

    def trust(self, length: int) -> None:
        """Let steps from position `length` on, until another window is left, be served without a comparison."""
        self.trusted.add(self.windows_left(length))

    def windows_left(self, length: int) -> int:
        """Return how many of the layers' windows the token at position `length` is past, so that they hide a token."""
        return bisect.bisect_right(self._step.store.layout.windows, length)

    def trusts(self, length: int, steps: int = 1) -> bool:
        """True if steps on the store from position `length` on need no comparison with the model's own."""
        return self.trusted.issuperset(range(self.windows_left(length), self.windows_left(length + steps - 1) + 1))

    def reset(self) -> None:
        """Drop the graphs and the store; later generations make them again."""
        self._step.reset_graphs()
        self._step.store = None
        self.trusted.clear()
        self._launches.clear()

    def _span(self, length: int, *, grows: bool) -> int:
        """Return the number of positions that a step attends to whose token is at position `length`.

        States do not grow with the sequence, so that a cache of states only is never full.
        """
        if not grows:
            return 0
        if length >= self._length:
            raise CannotBind(Reason.LENGTH_TOO_LARGE, f"max_length is {self._length}: raise it")
        return self._spans[bisect.bisect_left(self._spans, length + 1)]

    def _padded_source(self, source: int) -> int:
        if source > self._source_length:
            raise CannotBind(
                Reason.LENGTH_TOO_LARGE,
                f"the encoder's outputs have {source} tokens, max_source_length is {self._source_length}: raise it",
            )
        return self._sources[bisect.bisect_left(self._sources, source)] if self._sources else source

    def _operators(self, device: torch.device, dtype: torch.dtype, elements: int) -> Operators:
        """Return the operators of steps on a cache; torch's if nothing in the model is fused."""
        if not self._step.fuses:
            return Operators()
        text = self.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_attention_heads", None) or 1
        group = max(1, heads // (getattr(text, "num_key_value_heads", None) or heads))
        attending = (
            KernelTrial("attend", (group, elements, 1, keys))
            for keys in (256, 1024, 2048)  # with more keys, a row's attention is another variant
            if keys <= max(256, self._spans[-1])
        )
        return operators_of(
            self._step.fused_layers(), device, dtype, KernelTrial("write_pages", (elements, "HND")), *attending
        )

    def _use_store(self, layout: CacheLayout) -> None:
        """Have the step decode from a store of this layout: the last one, or a new one if that has another."""
        step = self._step
        if step.store is None or step.store.layout != layout:
            self.reset()
            elements, dtype, device = layout.kept
            step.operators = self._operators(device, dtype, elements)
            source = self._source_length if layout.hidden is not None else 0
            try:
                step.store = CacheStore(layout, self._rows, self._spans[-1], source, triton=step.operators.triton)
            except torch.OutOfMemoryError:
                shape = f"{self._rows} sequences of {self._length} tokens; lower max_batch_size or max_length"
                raise CannotBind(Reason.LENGTH_TOO_LARGE, f"no memory for {shape}") from None


def doubling(smallest: int, largest: int) -> list[int]:
    """List `smallest` and its doubles below `largest`, then `largest` itself."""
    return [*(smallest << power for power in range(64) if smallest << power < largest), largest]


def _checked(mask: Any, name: str, rows: int, length: int, *, longer: bool) -> Tensor | None:
    """Return a mask, or None, unchanged; refuse it if it has not `length` tokens per row. `longer` allows more."""
    if mask is None:
        return None
    plain = isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == rows
    if not plain or mask.shape[1] < length or (mask.shape[1] > length and not longer):
        raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is not a mask of {rows} rows and {length} tokens")
    return mask  # type: ignore[no-any-return]


def _encoder_hidden(kwargs: Mapping[str, Any]) -> Tensor:
    outputs = kwargs.get("encoder_outputs")
    hidden = outputs[0] if outputs is not None else kwargs.get("encoder_hidden_states")
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, "encoder_outputs without hidden states")
    return hidden
