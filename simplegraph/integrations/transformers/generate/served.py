"""One generation: its prefill runs as it is, its steps of one token go through graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from simplegraph.errors import StaleGraphError
from simplegraph.module.signature import CannotBind
from simplegraph.reasons import Reason

if TYPE_CHECKING:
    from simplegraph.integrations.transformers.generate.decoder import Decoder

# Arguments that a step finds in the store instead.
_CARRIED = frozenset({"past_key_values", "attention_mask", "decoder_attention_mask", "encoder_outputs", "return_dict"})


class Session:
    """The steps of one generation, between its prefill and its end.

    The generation's own cache stays what it was at the prefill, but for the length that its first layer shows;
    `close` fills it with what was decoded. So whoever holds it finds in it what eager would have left.

    Args:
        decoder: decodes; this generation is the only one that it serves meanwhile.
        cache: the generation's `past_key_values`.
        kept: whether anybody looks at the cache after the generation.
    """

    def __init__(self, decoder: Decoder, cache: Any, *, kept: bool) -> None:
        self.cache = cache
        self._kept = kept
        self._decoder = decoder
        self._own = getattr(cache, "self_attention_cache", cache)
        self._length: int | None = None  # tokens in the store; None while the cache itself is in charge
        self._rows = self._source = 0
        self._shown: Any = None
        self._output: Any = None  # what the model's forward returns, once the prefill ran
        self._over = False
        self._unserved = 0  # calls after the prefill that were no steps of one token
        self._others = 0  # calls of this thread meanwhile, with another cache
        self._thread = threading.get_ident()

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call of the model's forward."""
        if not self._over and self._output is not None:
            try:
                if not args and self._is_step(kwargs):
                    return self._step(forward, kwargs)
                self._unserved += 1
            except CannotBind as error:
                self._give_up(error.reason, error.detail)
        self._restore()
        outputs = forward(*args, **kwargs)
        self._output = type(outputs)
        return outputs

    def note_other_cache(self) -> None:
        """The model was called with another cache: by guidance, or because it went on with a new one."""
        self._others += threading.get_ident() == self._thread

    def _give_up(self, reason: Reason, detail: str) -> None:
        self._over = True
        self._decoder.refuse(reason, detail)

    def _is_step(self, kwargs: Mapping[str, Any]) -> bool:
        ids = kwargs.get(self._decoder.ids_name)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1:
            return False
        return self._length is not None or self._own.get_seq_length() > 0

    def _step(self, forward: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        inputs = _inputs(kwargs, kwargs[self._decoder.ids_name].shape[0])
        if self._length is None:
            self._load(kwargs)
            if not self._decoder.trusted:
                return self._compared_step(forward, kwargs, inputs)
        elif self._own.layers[self._decoder.first].keys is not self._shown:
            raise StaleGraphError(
                "the generation's cache was changed between two steps, which decode graphs do not read it at. "
                "Leave it alone until generate returns, or call remove() on the graphs of this model."
            )
        length = self._length or 0
        logits = self._decoder.step(length, self._source, inputs)
        self._moved_to(length + 1)
        return self._output(logits=logits, past_key_values=self.cache)

    def _compared_step(self, forward: Callable[..., Any], kwargs: dict[str, Any], inputs: dict[str, Any]) -> Any:
        """A step both ways: whether the model answers from a cache of fixed length as it does from its own."""
        length = self._length or 0
        self._restore()
        outputs = forward(**kwargs)
        found = self._decoder.compare(length, self._source, inputs, outputs.logits)
        if found is None:
            self._moved_to(length + 1)
        else:
            self._give_up(Reason.FIXED_CACHE, found)
        return outputs

    def _moved_to(self, length: int) -> None:
        self._length = length
        self._show()
        self._over = self._decoder.stays_eager

    def _load(self, kwargs: Mapping[str, Any]) -> None:
        rows = kwargs[self._decoder.ids_name].shape[0]
        length = int(self._own.get_seq_length())
        self._source = self._decoder.load(self.cache, rows, length, kwargs)
        self._rows, self._length = rows, length
        self._show()

    def _show(self) -> None:
        if self._length is not None:
            self._shown = self._decoder.show_length(self._own, self._rows, self._length)

    def close(self) -> None:
        """The generation is over: let its cache hold everything that was decoded, if anybody keeps it."""
        served = self._length is not None
        if self._kept:
            self._restore()
        if self._unserved and not served and not self._over:
            self._give_up(Reason.OPAQUE_ARGUMENT, f"{self._unserved} steps that are not of one token a row")
        if self._others:
            self._decoder.refuse(Reason.CACHE_KIND, f"{self._others} calls of a generation came with another cache")

    def _restore(self) -> None:
        if self._length is not None:
            self._decoder.hand_back(self._own, self._rows, self._length)
            self._length = None


def _inputs(kwargs: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The arguments of a step that a graph is passed or captured for.

    Raises:
        CannotBind: one is neither a number for each row nor a plain value.
    """
    inputs = {}
    for name, value in kwargs.items():
        if name in _CARRIED:
            continue
        if isinstance(value, Tensor):
            if value.dim() != 2 or value.shape[1] != 1:
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} of shape {tuple(value.shape)} at a decode step")
            if value.shape[0] != rows:
                value = value.expand(rows, 1)  # positions may be the same for all rows
        elif not isinstance(value, (bool, int, float, str, type(None))):
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(value).__name__}")
        inputs[name] = value
    return inputs
