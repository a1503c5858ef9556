"""Serves one generation: its prefill, and its steps of one token, which go through graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from simplegraph.base.errors import CaptureError, StaleGraphError
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.device.select import graph_device
from simplegraph.integrations.rehearsal import Start
from simplegraph.integrations.transformers.generate.cache.layers import cached_length
from simplegraph.integrations.transformers.generate.decoder import FixedCacheDecoder, StepInputs
from simplegraph.integrations.transformers.generate.token_step import CACHE_NAMES, ROW_INPUTS, TOKEN_TYPES

# Arguments that a step replaces by the store's.
_REPLACED = CACHE_NAMES | {"attention_mask", "decoder_attention_mask", "encoder_outputs", "return_dict"}
# They tell where images are in the prompt. A step that is passed positions and no images does not need them.
_GRIDS = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts"})


class StepLock:
    """Lets a step of a generation end before its graphs are dropped, and the reverse; refuses one inside the other."""

    def __init__(self) -> None:
        self._lock, self._holder = threading.Lock(), 0

    def __enter__(self) -> None:
        """Wait for other threads.

        Raises:
            CaptureError: this thread is inside a step already.
        """
        thread = threading.get_ident()
        if self._holder == thread:
            raise CaptureError(
                "the graphs of a generation were to be dropped inside one of its steps. Call remove(), reset() and "
                "capture() between two steps, as logits processors run, or when generate has returned."
            )
        self._lock.acquire()
        self._holder = thread

    def __exit__(self, *exc_info: object) -> None:
        self._holder = 0
        self._lock.release()


class ServedGeneration:
    """Serves the steps of one generation, between its prefill and its end.

    During the generation its own cache stays as the prefill left it, except that its first layer shows the current
    length. `close` fills it with the decoded tokens, as an eager generation leaves it.

    Args:
        decoder: the decoder, which serves no other generation meanwhile.
        lock: held in each step, and by whoever drops the graphs of the generation.
        prefill: runs a prefill: the model's own forward, and its keyword arguments -> its outputs.
        cache: the generation's own.
        kept: True if the user can see the cache, during or after the generation.
        beams: True if rows are beams, whose order changes between steps.
        edits: True if the masks of a step may differ from the masks of the step before by more than one visible token.

    Attributes:
        lock, kept, edits: as above.
        words: size of the vocabulary; 0 before the prefill.
        over: True once the generation goes on without graphs: they cannot serve it, or its last step or launch ran
            eagerly and the next one would, too.
    """

    def __init__(
        self,
        decoder: FixedCacheDecoder,
        lock: StepLock,
        prefill: Callable[..., Any],
        cache: Any,
        *,
        kept: bool,
        beams: bool,
        edits: bool,
    ) -> None:
        self._decoder, self.lock, self._prefill, self._cache, self.kept = decoder, lock, prefill, cache, kept
        self._self_attention = getattr(cache, "self_attention_cache", cache)
        self._store: Any = None  # the decoder's; has the cache's tokens from the first step on
        self._length = 0  # tokens in the store; 0 while the generation's own cache is used
        self._rows = self._source = 0
        self._shown: Any = None
        self._inputs: StepInputs | None = None  # of the last step that the model's own loop took
        self._earlier: StepInputs | None = None  # of the one before
        self._base = 0  # tokens in the store at that step
        self._output: Any = None  # makes outputs of the prefill's class from a step's logits; set by the prefill
        self._given: dict[str, torch.Size] = {}  # shapes of the prefill's arguments
        self.over, self.words = False, 0
        self._unserved = 0  # calls after the prefill that are no steps of one token
        self._beams, self.edits = beams, edits
        self._same_order: Any = None  # (rows,) int32, the index of each row; None if rows keep their places
        self._order: Any = None  # of the same kind: the row that each row goes on from
        # Kinds of cache in calls of this thread with another one: guidance makes such calls, or it was replaced.
        self._others: list[str] = []
        self._thread = threading.get_ident()

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call of the model's forward."""
        if kwargs.get(self._decoder.cache_name) is not self._cache:
            if threading.get_ident() == self._thread:
                self._others.append(type(kwargs.get(self._decoder.cache_name)).__name__)
            return forward(*args, **kwargs)
        with self.lock:
            return self._serve(forward, args, kwargs)

    def _serve(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.over and self._output is not None:
            try:
                if not args and self._is_step(kwargs):
                    return self._step(forward, kwargs)
                self._unserved += 1
            except CannotBind as error:
                self._give_up(error.reason, error.detail)
        self._restore()
        run = forward if args or self._output is not None else functools.partial(self._prefill, forward)
        outputs: Any = run(*args, **kwargs)
        kind: Any = type(outputs)
        cache: Any = getattr(outputs, self._decoder.cache_name, None)
        if type(cache) is EncoderDecoderCache and cache.self_attention_cache is self._cache:
            self._cache = cache  # which the model made around the generation's, to cache its cross-attention as well
        carried = {} if cache is None else {self._decoder.cache_name: self._cache}
        self._output = functools.partial(kind, **carried)
        self.words = outputs.logits.shape[-1] if isinstance(getattr(outputs, "logits", None), Tensor) else 0
        self._given = {name: value.shape for name, value in kwargs.items() if isinstance(value, Tensor)}
        return outputs

    def reorder(self, original: Callable[[Tensor], None], order: Tensor) -> None:
        """Continue each row from the row that `order` (rows,) names, beginning with the next step."""
        with self.lock:
            if self._length:
                self._order = self._order.index_select(0, order)
            else:
                original(order)

    def _give_up(self, reason: Reason, detail: str) -> None:
        self.over = True
        self._decoder.stats.ran_eagerly(reason, detail)

    def _is_step(self, kwargs: Mapping[str, Any]) -> bool:
        ids = kwargs.get(self._decoder.ids_name)
        one_token = isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == 1
        return one_token and (self._length or cached_length(self._self_attention)) > 0

    def _step(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        decoder, rows = self._decoder, kwargs[self._decoder.ids_name].shape[0]
        source = {"encoder_hidden_states"} if type(self._cache) is EncoderDecoderCache else set()
        unread = _REPLACED | source | (_GRIDS if _knows_positions(kwargs) else set())
        inputs = _inputs({name: kwargs[name] for name in kwargs.keys() - unread}, rows, self._given)
        if not self._length:
            length = cached_length(self._self_attention)
            self._store, self._source = decoder.load(self._cache, rows, length, kwargs)
            self._rows = rows
            if self._beams:
                self._order = self._same_order = torch.arange(
                    rows, dtype=torch.int32, device=self._store.position.device
                )
            self._move_to(length)
        elif self.edits:
            decoder.load_masks(kwargs, rows, self._length)
        self._earlier, self._inputs, self._base = self._inputs, inputs, self._length
        if not decoder.trusts(self._length):
            return self._compared_step(forward, kwargs, inputs)
        return self._output(logits=self._run(inputs))

    def _run(self, inputs: StepInputs, steps: int = 1, **launch: Any) -> Any:
        """Run a step, or a launch of several, and return its result."""
        self._check_unchanged()
        length = self._length
        result = self._decoder.step(length, self._source, inputs, self._order, **launch)
        self._move_to(length + steps)
        return result

    def _check_unchanged(self) -> None:
        """Refuse to go on from a cache that was changed since the last step.

        Raises:
            StaleGraphError: it was.
        """
        if self._store.shown(self._self_attention) is not self._shown:
            raise StaleGraphError(
                "the generation's cache was changed between two steps, but decode graphs read their own copy. "
                "Do not change it until generate returns, or call remove() on the graphs of this model before."
            )

    # Steps that the model's own loop does not take.

    @property
    def has_states(self) -> bool:
        """True if the cache has states, which steps overwrite."""
        return self._store is not None and self._store.layout.has_states

    def may_go_on(self, steps: int) -> bool:
        """True if the next steps can be taken without the model's loop; called after each step of the loop.

        Args:
            steps: most steps that are left.

        Raises:
            CannotBind: they never can: the model's arguments change in another way than is known, or there is no room.
        """
        last, advances = self._inputs, self._decoder.advances
        if not self._length or self.over or last is None:
            return False
        self._decoder.check_room(self._length + steps)
        if last.names not in advances and self._earlier is not None:
            advances[last.names] = last.unlike_next(self._earlier, self._decoder.ids_name)
        unlike = advances.get(last.names, "")
        if unlike:
            raise CannotBind(Reason.ONE_TOKEN, f"{unlike} changes from step to step in a way of its own")
        return last.names in advances and self._decoder.trusts(self._length, steps)

    def fits(self, steps: int) -> bool:
        """True if this many steps may be one launch."""
        return self._decoder.fits(self._length, steps)

    def go_on(self, ids: Tensor, steps: int = 1, **launch: Any) -> Any:
        """Take the next steps from the tokens `ids` (rows, 1); returns the result of `FixedCacheDecoder.step`."""
        inputs: Any = self._inputs
        return self._run(inputs.later(self._length - self._base, self._decoder.ids_name, ids), steps, **launch)

    def take_back(self, steps: int) -> None:
        """Leave out the last steps of a generation that ends before them."""
        self._move_to(self._length - steps)

    def _compared_step(self, forward: Callable[..., Any], kwargs: dict[str, Any], inputs: StepInputs) -> Any:
        """Run a step on both caches, to check that the model gives the same logits on one of fixed length."""
        length = self._length
        self._check_unchanged()
        self._restore()
        start = Start(self._decoder.model, self._store.position.device)
        outputs = forward(**kwargs)
        with start.again() as difference:  # a model may keep states: the second step must not see the first one's
            problem = self._decoder.compare(length, self._source, inputs, self._order, outputs.logits) or difference()
        if problem is None:
            self._decoder.trust(length)
            self._move_to(length + 1)
        else:
            past = " past a window of its layers" if self._decoder.windows_left(length) else ""
            self._give_up(Reason.GENERATION, f"on a cache of fixed length{past}, {problem}")
        return outputs

    def _move_to(self, length: int) -> None:
        self._length, self.over = length, self._decoder.stays_eager
        self._order = self._same_order
        self._shown = self._store.show_length(self._self_attention, self._rows, length)

    def hand_back(self) -> None:
        """Fill the generation's cache with the decoded tokens, so that it can go on without the store; hold the lock.

        Raises:
            StaleGraphError: the cache was changed since the last step.
        """
        if self._length:
            self._check_unchanged()
            # This may be another thread than the generation's, in another mode and on another stream.
            synchronize = graph_device(self._store.position.device).synchronize
            synchronize()
            with torch.inference_mode(False), torch.no_grad():
                self._restore()
            synchronize()

    def end(self) -> None:
        """Go on without graphs, which are removed; call `hand_back` before."""
        self._give_up(Reason.GENERATION, "its graphs were removed meanwhile")

    def close(self) -> None:
        """Fill the generation's cache with the decoded tokens if the user can see it; count calls that ran eagerly."""
        served = bool(self._length)
        if self.kept:
            with self.lock:
                self._restore()
        if self._unserved and not served and not self.over:
            self._give_up(Reason.OPAQUE_ARGUMENT, f"{self._unserved} steps that are not of one token per row")
        if self._others:
            self._give_up(
                Reason.GENERATION,
                f"{len(self._others)} calls of a generation had another cache, a {self._others[0]}",
            )

    def _restore(self) -> None:
        if self._length:
            if self._order is not self._same_order:
                self._store.reorder(self._rows, self._length, self._order)
                self._order = self._same_order
            self._store.hand_back(self._self_attention, self._rows, self._length)
            self._length = 0


def _knows_positions(kwargs: Mapping[str, Any]) -> bool:
    """True if a step is passed its positions, and no images or videos."""
    return (
        isinstance(kwargs.get("position_ids"), Tensor)
        and kwargs.get("pixel_values") is None
        and kwargs.get("pixel_values_videos") is None
    )


def _inputs(kwargs: Mapping[str, Any], rows: int, given: Mapping[str, Any]) -> StepInputs:
    """Return the arguments of a step that are passed to the graph or are part of its key.

    Args:
        kwargs: the arguments.
        rows: of the batch.
        given: shapes of the prefill's arguments.

    Raises:
        CannotBind: one is neither a number for each row, nor the same as at the prefill, nor a plain value.
    """
    inputs = StepInputs({}, {})
    for name, value in sorted(kwargs.items()):  # transformers passes them in one order or another
        if not isinstance(value, Tensor):
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(value).__name__}")
            inputs.tokens[name] = value
        elif value.dim() == 2 and value.shape[1] == 1:
            inputs.tokens[name] = value if value.shape[0] == rows else value.expand(rows, 1)  # the same for all rows
        elif name in TOKEN_TYPES and value.dim() == 2 and value.shape[0] == rows:
            inputs.tokens[name] = value[:, -1:]  # older releases pass the positions of all tokens
        elif name in ROW_INPUTS and value.dim() == 3 and value.shape[2] == 1:
            inputs.tokens[name] = value.expand(-1, rows, 1).transpose(0, 1)
        elif name not in ROW_INPUTS and value.dim() and value.shape[0] == rows and given.get(name) == value.shape:
            inputs.carried[name] = value
        else:
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} of shape {tuple(value.shape)} at a decode step")
    return inputs
