"""`graph_generation`: makes a model's `generate` decode through graphs, until `remove` is called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from simplegraph.base.errors import CaptureError, ConfigError, did_you_mean
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.device.protocol import GraphPool
from simplegraph.fused.layers.kinds import KINDS, TOKEN_KINDS, listed, names_by_kind
from simplegraph.integrations.lengths import added
from simplegraph.integrations.transformers.generate.decoder import MAX_LAUNCHES, FixedCacheDecoder, doubling
from simplegraph.integrations.transformers.generate.prompt import MAX_ROWS, Prompts, PromptStep
from simplegraph.integrations.transformers.generate.served import ServedGeneration, StepLock
from simplegraph.integrations.transformers.generate.stop_checks import (
    LaunchedGeneration,
    is_known_loop,
    may_run_late,
    with_late_check,
)
from simplegraph.integrations.transformers.generate.token_step import CACHE_NAMES, ROW_INPUTS, TokenStep
from simplegraph.integrations.transformers.graphed_model import GraphedModel, check_counts, named
from simplegraph.integrations.transformers.overrides import override_forwards, restore_methods
from simplegraph.integrations.transformers.refusals import check_generation, check_model, choices, edits_steps
from simplegraph.manager.stats import CaptureSummary, GraphReport
from simplegraph.serve.wrap import check_unwrapped, wrap

_MAX_TOKENS = 64  # of a launch, since its steps attend to one number of positions
_MAX_SIGNATURES = 64  # spans times encoder lengths times flags


class GraphedGeneration(GraphedModel):
    """Handle of a model whose `generate` decodes through graphs: has its counters, and `remove` to undo it.

    Args:
        model: the model.
        step: a wrapped `TokenStep` of the model.
        prompts: runs prefills.
        decoder: decodes with that step.
        tokens_per_launch: steps that one graph takes.
    """

    def __init__(
        self, model: Any, step: Any, prompts: Prompts, decoder: FixedCacheDecoder, tokens_per_launch: int = 1
    ) -> None:
        self._prompts, self._decoder, self._tokens_per_launch = prompts, decoder, tokens_per_launch
        self._served: ServedGeneration | None = None
        self._busy = threading.RLock()  # of a generation, and of `capture`, which runs some
        self._step_lock = StepLock()
        self._choices: Hashable = None
        self._call = threading.local()
        super().__init__(
            model,
            step,
            {
                "generate": self._generate,
                "forward": self._forward,
                "_sample": self._sample,
                "_beam_search": self._beam_search,
            },
        )
        if not self._takes_tokens:
            self.stats.capture_method = ""

    def reset(self) -> None:
        """Drop the graphs and their cache; later calls make them again, as does a generation that is running.

        Between two steps any thread may call it. While graphs of several tokens run, it waits for the generation's end.

        Raises:
            CaptureError: it was called inside a step.
            StaleGraphError: the cache of a generation was changed since its last step.
        """
        with self._between_steps():
            self._drop()

    def remove(self) -> None:
        """Restore the model's own methods and drop the graphs; a second call does nothing.

        A generation that is running goes on without graphs. For when to call it, and errors, see `reset`.
        """
        with self._between_steps() as served:
            if served is not None:
                served.end()
            restore_methods(self.model, self)
            self._drop()

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[ServedGeneration | None]:
        """Keep steps from running in the block, and give the current generation, if there is one, its cache back."""
        with self._step_lock:
            served = self._served
            if served is not None:
                served.hand_back()
            yield served

    def _drop(self) -> None:
        self._decoder.reset()
        self._prompts.reset()

    def report(self) -> GraphReport:
        """Report captures, replays, eager runs with reasons, and the layers that run on fused operators in steps."""
        step = self._step
        lines = [listed(kind, names) for kind, names in names_by_kind(self.model, step.fused_layers()).items()]
        lines += [f"fused operators by {step.operators.name}"] if lines and step.store is not None else []
        report = super().report()
        return dataclasses.replace(report, optimizations=(*report.optimizations, *self._prompts.lines(), *lines))

    def capture(
        self, sizes: Sequence[int] | None = None, lengths: Sequence[int] | None = None, **settings: Any
    ) -> CaptureSummary:
        """Capture all batch sizes and lengths now, so that no later generation waits for a capture.

        Runs short generations from made-up prompts. The first steps of each batch size are still proofs,
        which run eagerly, and prefills are captured as they come.

        Args:
            sizes: batch sizes, in place of the earlier ones; earlier captures are dropped.
            lengths: tokens of the sequences that will be decoded, the shortest prompt and the longest sequence among
                them; None for all up to `max_length`.
            **settings: arguments of `generate` as later calls have them, such as `do_sample`.

        Returns:
            The captures, and the time that they took.

        Raises:
            ConfigError: the model does not generate from tokens alone, or a size or length is invalid.
            CaptureError: a generation is running.
        """
        if not self._takes_tokens:
            raise ConfigError(
                f"capture makes up prompts of tokens, and {type(self.model).__name__} takes "
                f"{self.model.main_input_name} for an encoder: call generate with inputs of each size and length."
            )
        if not self._begins():
            raise CaptureError("capture was called while a generation uses the graphs; call it before or after.")
        try:
            return self._capture(sizes, lengths, settings)
        finally:
            self._busy.release()

    def _capture(
        self, sizes: Sequence[int] | None, lengths: Sequence[int] | None, settings: Mapping[str, Any]
    ) -> CaptureSummary:
        if sizes is not None:
            check_counts("sizes", sizes)
            self._step.configure_graphs(capture_sizes=sizes)
            self.reset()
            self._decoder.use_sizes(sizes)
        if lengths is not None:
            check_counts("lengths", lengths)
        try:
            prompts = self._decoder.prompts_for(lengths)
        except CannotBind as error:
            raise ConfigError(f"lengths is {lengths!r}, but {error.detail}.") from None
        self._decoder.capturing, before = {}, self.stats.eager[Reason.SWITCHED_OFF]
        try:
            for rows, tokens in prompts:
                self._generate_once(rows, tokens, settings)
            return dataclasses.replace(
                added(self._decoder.capturing), switched_off=self.stats.eager[Reason.SWITCHED_OFF] > before
            )
        finally:
            self._decoder.capturing = None

    @property
    def _takes_tokens(self) -> bool:
        """True if the model generates from tokens alone, of which prompts can be made up."""
        return not self.model.config.is_encoder_decoder and self.model.main_input_name == "input_ids"

    def _generate_once(self, rows: int, tokens: int, settings: Mapping[str, Any]) -> None:
        """Generate from a made-up prompt enough tokens for a step of each kind."""
        ids = torch.arange(rows * tokens, device=self.model.device).view(rows, tokens)
        ids = ids.remainder(self.model.config.get_text_config().vocab_size)
        count = 3 + self._tokens_per_launch  # the prefill's, the first step's, one more and a launch
        given = {"do_sample": False, **settings, "max_new_tokens": count, "min_new_tokens": count, "max_length": None}
        self.model.generate(ids, attention_mask=torch.ones_like(ids), **given)

    # Replacements of the model's methods.

    def _generate(self, generate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a whole generation, and count it as eager if it decodes in a way that graphs do not."""
        self._call.decoded = False
        self._call.cache_is_kept = any(kwargs.get(name) is not None for name in CACHE_NAMES)
        result = generate(*args, **kwargs)
        if not self._call.decoded:
            self.stats.ran_eagerly(Reason.GENERATION, self._inner_generator())
        return result

    def _sample(self, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run greedy decoding or sampling, which need not wait for each token if that cannot be observed."""
        with self._serving(kwargs) as served:
            launched = None if served is None else self._launched(served, sample, args, kwargs)
            if launched is not None:
                result = launched.run(sample, args, kwargs)
                if launched.refused is not None:
                    self.stats.ran_slower(launched.refused.reason, launched.refused.detail)
                return result
            late = served is not None and not served.edits and may_run_late(kwargs, cache_is_kept=served.kept)
            return (with_late_check(sample) if late else sample)(*args, **kwargs)

    def _launched(
        self, served: ServedGeneration, sample: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> LaunchedGeneration | None:
        """Return the check that takes several steps at once; None if the report says why not, or tokens are too few."""
        steps = self._tokens_per_launch
        if steps == 1:
            return None
        try:
            if not is_known_loop(sample):
                raise CannotBind(Reason.ONE_TOKEN, "a _sample that is not transformers' own, or asks another check")
            if self.model._forward_hooks or self.model._forward_pre_hooks:
                raise CannotBind(Reason.ONE_TOKEN, "hooks on the model run around every step")
            editing = edits_steps(self.model)
            if editing:
                raise CannotBind(Reason.ONE_TOKEN, f"the model's own {editing} runs in Python at every step")
            ids = args[0] if args else kwargs["input_ids"]
            launched = LaunchedGeneration(served, steps, ids, kwargs)
            self._decoder.check_launch(launched.launch, len(ids), launched.max_length)
        except CannotBind as error:
            self.stats.ran_slower(error.reason, error.detail)
            return None
        # The loop makes two tokens itself: the prefill's, and that of the step which loads the cache.
        return launched if launched.max_length - ids.shape[1] >= 2 + steps else None

    def _beam_search(self, search: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a beam search, which has the cache reordered after every step."""
        with self._serving(kwargs, beams=True) as served:
            if served is None:
                return search(*args, **kwargs)
            cache = kwargs[self._decoder.cache_name]
            with override_forwards({cache: functools.partial(served.reorder, cache.reorder_cache)}, "reorder_cache"):
                return search(*args, **kwargs)

    def _inner_generator(self) -> str:
        """Advise graphs for the part of the model whose `generate` the model's own may call; "" if there is none."""
        parts = ((name, part) for name, part in self.model.named_modules() if part is not self.model)
        inner = next((name for name, part in parts if isinstance(part, PreTrainedModel) and part.can_generate()), None)
        return "" if inner is None else f"if its generate calls that of {inner}, use graph_generation(model.{inner})"

    def _forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of the model: by the current generation if there is one, else by the model's own forward."""
        served = self._served
        return forward(*args, **kwargs) if served is None else served.forward(forward, args, kwargs)

    def _serving(
        self, kwargs: Mapping[str, Any], *, beams: bool = False
    ) -> AbstractContextManager[ServedGeneration | None]:
        """Return a context in which graphs run the model's steps; None if that is not possible.

        The context returns a `ServedGeneration`, or None. No other generation is served meanwhile.
        """
        self._call.decoded = True
        config = kwargs.get("generation_config")
        try:
            check_model(self.model)
            check_generation(config, kwargs, self._decoder.cache_name)
            if beams and hasattr(self.model, "_reorder_cache"):
                raise CannotBind(Reason.GENERATION, "the model reorders its cache itself")
            if not self._begins():
                raise CannotBind(Reason.BUSY, "")
        except CannotBind as error:
            self.stats.ran_eagerly(error.reason, error.detail)
            return contextlib.nullcontext()
        # The user can see the cache if it was passed, by hooks during the generation, or in its result.
        kept = any(
            (
                getattr(self._call, "cache_is_kept", True),
                self.model._forward_hooks,
                self.model._forward_pre_hooks,
                getattr(config, "return_dict_in_generate", True),
            )
        )
        return self._served_by_graphs(kwargs[self._decoder.cache_name], kept=kept, beams=beams)

    def _begins(self) -> bool:
        """True if no generation is served, and none by other threads until this one releases `_busy`."""
        if not self._busy.acquire(blocking=False):
            return False
        if self._served is not None:  # by this thread
            self._busy.release()
        return self._served is None

    @contextlib.contextmanager
    def _served_by_graphs(self, cache: Any, *, kept: bool, beams: bool) -> Iterator[ServedGeneration]:
        """Run the model's steps on a generation's cache through graphs; the lock is held, and released at the end."""
        try:
            before, self._choices = self._choices, choices(self.model)
            if before != self._choices:
                self.reset()
            edits = bool(edits_steps(self.model))
            served = ServedGeneration(
                self._decoder, self._step_lock, self._prompts.run, cache, kept=kept, beams=beams, edits=edits
            )
            with contextlib.closing(served) as self._served:
                yield self._served
        finally:
            self._served = None
            self._busy.release()


def graph_generation(
    model: Any,
    *,
    max_batch_size: int = 8,
    max_length: int = 2048,
    max_source_length: int | None = None,
    capture_sizes: Sequence[int] | None = None,
    pool: GraphPool | None = None,
    fused_kernels: bool | Collection[str] = True,
    tokens_per_launch: int = 1,
) -> GraphedGeneration:
    """Make `model.generate(...)` decode through CUDA graphs from now on, without a compiler; results are the same.

    Every step of greedy decoding, sampling or beam search replays a graph, on a cache of fixed addresses that one
    generation at a time uses. A prefill replays a graph if the prompts have at most 256 tokens and no padding, and if
    the forward writes nothing but keys and values. The first such prefills run eagerly and are compared with a replay.
    All other prefills run eagerly. All else about `generate` is unchanged: stopping criteria, streamers, logits
    processors, masks, and the cache that it returns. Calls that graphs cannot serve (assisted decoding, longer
    sequences, offloaded models) run eagerly, with the reason in `report`.

        with graph_generation(model, max_batch_size=8, max_length=2048) as graphs:
            model.generate(**inputs, max_new_tokens=128)
            print(graphs.report())

    From the first generation on, keys and values of `max_batch_size` sequences of `max_length` tokens are allocated.
    Copies and pickles of the model have no graphs.

    Args:
        model: a model of transformers that can generate, decoder-only or encoder-decoder.
        max_batch_size: rows of the largest batch, beams and return sequences included.
        max_length: tokens of the longest sequence, prompt included.
        max_source_length: tokens of the longest encoder output; None takes the config's `max_source_positions`,
            or `max_length`.
        capture_sizes: batch sizes to capture, to which others are padded; None takes 1, 2, 4, ... up to
            `max_batch_size`. The cache has rows for the largest.
        pool: graph memory to share with other wrappers; see `graph_pool`.
        fused_kernels: True runs layers of the model that are recognized on fused kernels in captured steps; `report`
            names them. Rotary embeddings and writes to the cache are exact to the bit; norms and gated activations
            round once, where the model's code in half precision rounds two or three times. False runs the model's own
            code; names choose among "rms_norm", "residual" (sums with the norm after them), "gated", "activation",
            "rotary", "linear" (linear layers of a single row) and "one_query" (attention of one query per row).
        tokens_per_launch: tokens of greedy decoding or sampling that one graph makes, up to 64, so that a slow or busy
            host is waited for less often. Results are the same, and a streamer gets as many tokens at once. Where
            something must happen after each token (see `Reason.ONE_TOKEN`), graphs of one token serve the generation.

    Returns:
        A handle with `report`, `stats` and `remove`; as a context manager it calls `remove` at the end.

    Raises:
        ConfigError: `model` is no such model, or a size is invalid.
    """
    _check_generator(model, max_batch_size=max_batch_size, max_length=max_length, tokens_per_launch=tokens_per_launch)
    sizes = list(capture_sizes) if capture_sizes is not None else doubling(1, max_batch_size)
    # `generate` copies the logits before its next step, but other wrappers that share the pool replay at any time.
    settings: Any = {"pool": pool, "outputs": "static" if pool is None else "clone", "progress": False}
    step: Any = wrap(
        named(TokenStep, type(model).__name__)(model, not_fused=_not_fused(fused_kernels)),
        capture_sizes=sizes,
        batch_dims=ROW_INPUTS,
        max_signatures=_MAX_SIGNATURES * (1 + MAX_LAUNCHES * (tokens_per_launch > 1)),
        **settings,
    )
    source = max_source_length or getattr(model.config, "max_source_positions", None) or max_length
    few = [size for size in sizes if size <= MAX_ROWS] or [min(sizes)]
    prompt_step = wrap(
        named(PromptStep, type(model).__name__)(model),
        capture_sizes=few,
        batch_dims={"ids": 0, "positions": 0, "last": None},
        **settings,
    )
    prompt_step.graph_stats.capture_method = ""  # prefills are captured as they come
    decoder = FixedCacheDecoder(
        step, sizes, max_batch_size=max_batch_size, max_length=max_length, max_source_length=source
    )
    return GraphedGeneration(model, step, Prompts(prompt_step, few), decoder, tokens_per_launch)


def _not_fused(chosen: bool | Collection[str]) -> set[str]:
    """Return the names of layers that are not to be fused."""
    kinds = {**KINDS, **TOKEN_KINDS}
    if isinstance(chosen, bool):
        return set() if chosen else set(kinds)
    unknown = sorted({chosen} if isinstance(chosen, str) else {*chosen} - kinds.keys())
    if unknown:
        raise ConfigError(
            f"fused_kernels has {', '.join(unknown)}{did_you_mean(unknown, kinds)}; expected True, False, or a "
            f"collection of {', '.join(kinds)}."
        )
    return {*kinds} - {*chosen}


def _check_generator(model: Any, **sizes: int) -> None:
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ConfigError(
            f"graph_generation got a {type(model).__name__}; expected a model of transformers that can generate, such "
            "as AutoModelForCausalLM gives. Use simplegraph.wrap for other modules."
        )
    check_unwrapped(model, "graph_generation")
    if not hasattr(GenerationMixin, "_sample"):
        raise ConfigError("this release of transformers has no GenerationMixin._sample; transformers 5 is supported.")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"{name} is {size!r}; expected a whole number of at least 1.")
    if sizes["tokens_per_launch"] > _MAX_TOKENS:
        raise ConfigError(f"tokens_per_launch is {sizes['tokens_per_launch']}; expected at most {_MAX_TOKENS}.")
