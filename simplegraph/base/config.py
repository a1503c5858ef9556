"""Configure captures: modes, attention support levels and the one configuration object."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import math
import os
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from simplegraph.base.errors import ConfigError, did_you_mean


class CudaGraphMode(enum.Enum):
    """Choose which graphs serve which batches.

    A mode is a pair (decode, mixed): how a uniform decode batch runs, and how every other batch
    runs. NONE, PIECEWISE and FULL treat both equally and are the only modes that a single run can have. A
    PIECEWISE run is graph segments with eager breaks between them (see `eager_break`); without breaks, one segment.

    Source: the mode names follow vLLM's ``cudagraph_mode``.
    """

    NONE = ("NONE", "NONE")
    PIECEWISE = ("PIECEWISE", "PIECEWISE")
    FULL = ("FULL", "FULL")
    FULL_DECODE_ONLY = ("FULL", "NONE")
    FULL_AND_PIECEWISE = ("FULL", "PIECEWISE")

    __repr__ = enum.Enum.__str__
    __hash__ = object.__hash__  # Enum's own hash runs Python code, several times in every replay

    def decode_mode(self) -> CudaGraphMode:
        """Return the mode of a uniform decode batch: NONE, PIECEWISE or FULL."""
        return CudaGraphMode[self.value[0]]

    def mixed_mode(self) -> CudaGraphMode:
        """Return the mode of a batch that is not uniform decode: NONE, PIECEWISE or FULL."""
        return CudaGraphMode[self.value[1]]

    def separate_routine(self) -> bool:
        """True if uniform decode and mixed batches run differently."""
        return self.decode_mode() is not self.mixed_mode()

    def has_full(self) -> bool:
        """True if any batch may run as one full graph."""
        return "FULL" in self.value

    @classmethod
    def parse(cls, value: CudaGraphMode | str) -> CudaGraphMode:
        """Return the mode of this name, in any case, "off" for NONE; a mode is returned as it is.

        Raises:
            ConfigError: the name is not a mode.
        """
        if isinstance(value, cls):
            return value
        name = str(value).upper()
        try:
            return cls["NONE" if name == "OFF" else name]
        except KeyError:
            names = ", ".join(cls.__members__)
            raise ConfigError(f"mode is {value!r}; expected one of {names}, or OFF for NONE.") from None


class AttentionCGSupport(enum.IntEnum):
    """Ranks what an attention backend can do inside a full graph; with several backends the lowest counts."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


BatchDim = int | Literal["reference"] | None
LengthDim = int | tuple[int, str]
PadRule = int | float | bool | Literal["zero", "keep", "repeat-last"]

logger = logging.getLogger("simplegraph")
ENV_PREFIX = "SIMPLEGRAPH_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Configure how a module, or an engine's manager, is captured. Every field has a default.

    Args:
        mode: a `CudaGraphMode` or its name.
        capture_sizes: batch sizes (rows, tokens) to capture. None takes `default_sizes(512)`, up to `max_num_tokens`.
        max_num_seqs: the most requests in a batch. Uniform decode sizes are at most `uniform_query_len` times that.
        max_num_tokens: the most tokens in a batch; larger `capture_sizes` are an error.
        uniform_query_len: tokens per request in a uniform decode batch (1, or 1 + draft tokens).
        batch_dims: argument name (``"positions"``, ``"states.0"``) -> batch dimension; None for a
            tensor without one, ``"reference"`` for a tensor that must never be copied (such as a KV cache that is
            passed in): its address becomes part of the key. Other dimensions are inferred.
        pad_values: argument name -> how padding rows are filled: ``"zero"`` (the default), ``"keep"``
            (not written), ``"repeat-last"``, or a number.
        length_dims: argument name -> dimension of a length, such as samples or frames, that is padded to the next of
            `lengths` (by `pad_values`); outputs are cut. If that changes the answer, calls run eagerly. Arguments with
            lengths of their own have a dimension and a name (``{"clicks": (1, "clicks"), "views": (1, "views")}``);
            all are padded to the captured length of the longest.
        lengths: the lengths to capture, each with graphs for all batch sizes.
        padding: False serves only batches whose exact size was captured.
        exact_shapes: True captures each combination of input shapes, whatever `capture_sizes`; nothing is padded.
        outputs: ``"clone"`` returns new tensors from every call; ``"static"`` returns graph memory, valid until the
            next replay of any graph in the same pool, even after its own graph is dropped; a call that is waited for
            is faster if the caller has let go of the output before. With both, inputs that the forward returns are
            returned as the caller's own tensors.
        capture: ``"lazy"`` captures a size at its second call, after the first one warmed it up; ``"upfront"`` captures
            only in `capture_graphs`, so that a later call never pays for a capture.
        num_warmups: eager runs before a capture. That many calls of a size run eagerly, then it is captured.
            `capture_graphs` runs the largest size once for all sizes, or, with a number above 1, each size that many
            times; code that tunes itself over several runs needs that. 0 is for a `CudaGraphManager` whose owner
            warmed up; a wrapper refuses it, and takes it as 1 from the environment.
        on_capture_failure: ``"eager"`` warns and runs that size eagerly from then on; ``"raise"`` raises the error.
        verify: how often graphs are proven. The first call of each batch size is, and later ones at distances that
            double, which together take at most this percentage of the time of the replays since. Such a call runs
            eagerly; then a replay starts from the same memory and random numbers. If its effects differ from eager's,
            that size (or padding) runs eagerly from then on, or `VerificationError` is raised, as `on_capture_failure`
            says. 0 proves nothing. Engines request it in `CudaGraphManager.run`.
        max_signatures: the most call signatures (dtypes, trailing shapes, non-tensor values, values of
            `state_key`) that are captured.
        on_too_many_signatures: ``"eager"`` runs calls with further signatures eagerly; ``"flush"`` drops all graphs,
            frees their memory, and starts over with the current call, which suits traffic whose shapes change over
            time.
        state_key: a function that gets the module before every call and returns the Python state that the forward
            reads (``lambda model: (model.enabled, model.scale)``). The state must be hashable and the function cheap. A
            graph is replayed only in the state that it was captured in. Plain values that the forward reads through
            Python are part of a graph's key without it; use it for state that Python objects do not show. State that
            the forward changes (``self.calls += 1``) would not change in a replay: such a size runs eagerly, and the
            report names it, unless the key contains that state; a replay then leaves it unchanged.
        decode_capture_sizes: sizes in tokens of uniform decode batches, if these run in another mode than mixed
            ones; None takes the sizes of mixed batches, rounded up to multiples of `uniform_query_len`.
        training: True captures calls under grad mode, too, as a forward and a backward graph of exactly their shapes.
        debug: True checks every captured input's address at every replay, and names those that moved; with a
            `RankGroup` it checks that all ranks replay the same graph.
        progress: True shows a progress bar while capturing several sizes, if stderr is a terminal.

    Every field with a plain value can be set from the environment as ``SIMPLEGRAPH_<FIELD>``; see `from_env`.

    Raises:
        ConfigError: a value is invalid; the message names the field, the value and what is expected.
    """

    mode: CudaGraphMode = CudaGraphMode.FULL
    capture_sizes: Sequence[int] | None = None
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None
    uniform_query_len: int = 1
    batch_dims: Mapping[str, BatchDim] = dataclasses.field(default_factory=dict)
    pad_values: Mapping[str, PadRule] = dataclasses.field(default_factory=dict)
    length_dims: Mapping[str, LengthDim] = dataclasses.field(default_factory=dict)
    lengths: Sequence[int] | None = None
    padding: bool = True
    exact_shapes: bool = False
    outputs: Literal["clone", "static"] = "clone"
    capture: Literal["lazy", "upfront"] = "lazy"
    num_warmups: int = 1
    on_capture_failure: Literal["eager", "raise"] = "eager"
    verify: int = 1
    max_signatures: int = 16
    on_too_many_signatures: Literal["eager", "flush"] = "eager"
    state_key: Callable[[Any], Hashable] | None = None
    decode_capture_sizes: Sequence[int] | None = None
    training: bool = False
    debug: bool = False
    progress: bool = True

    def __new__(cls, **settings: Any) -> CudaGraphConfig:
        """Refuse unknown settings before the generated ``__init__`` does, which suggests no correction."""
        check_settings(settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (optional, kind) in _kinds().items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if not kind.accepts(value):
                raise ConfigError(f"{name} is {value!r}; expected {kind.expected}.")
            object.__setattr__(self, name, kind.kept(value))
        if bool(self.length_dims) != bool(self.lengths):
            raise ConfigError("length_dims and lengths belong together: which dimensions, and the lengths to capture.")
        if self.lengths and self.exact_shapes:
            raise ConfigError("length_dims pads lengths, and with exact_shapes (as in train_step) nothing is padded.")
        sizes = self.decode_capture_sizes or ()
        for odd in (size for size in sizes if size % self.uniform_query_len):
            problem = f"decode_capture_sizes has {odd}; expected multiples of"
            raise ConfigError(f"{problem} uniform_query_len={self.uniform_query_len}.")
        largest = {
            "the largest of decode_capture_sizes": max(sizes, default=0),
            "uniform_query_len": self.uniform_query_len,
            "the largest capture size": max(self.capture_sizes or (), default=0),
        }
        for name, size in largest.items():
            if self.max_num_tokens is not None and size > self.max_num_tokens:
                above = f"{name} is {size}, above max_num_tokens={self.max_num_tokens}"
                raise ConfigError(f"{above}; no batch could ever use it. Lower it, or raise the limit.")

    @property
    def adds_sizes(self) -> bool:
        """True if calls that cannot be padded may have graphs of exactly their shapes: no sizes were chosen."""
        return self.capture_sizes is None and self.capture == "lazy" and self.padding and not self.lengths

    def replace(self, **changes: Any) -> CudaGraphConfig:
        """Return a copy with some fields changed, validated again.

        Raises:
            ConfigError: a name is not a field, or a value is invalid.
        """
        return dataclasses.replace(self, **changes)

    def from_env(self, environ: Mapping[str, str] | None = None) -> CudaGraphConfig:
        """Return a copy in which ``SIMPLEGRAPH_*`` environment variables replace the fields they name.

        Wrappers and managers call it once, when they are built. The environment takes precedence, so that a deployed
        program can be switched to ``SIMPLEGRAPH_MODE=none`` or ``SIMPLEGRAPH_DEBUG=1`` without an edit.

        A variable that names no setting is ignored with a warning: Kubernetes sets ``SIMPLEGRAPH_PORT`` for a service
        of that name.

        Raises:
            ConfigError: a value is invalid.
        """
        environ = os.environ if environ is None else environ
        fields = {ENV_PREFIX + field.upper(): field for field, (_, kind) in _kinds().items() if kind.parse}
        others = (f"{ENV_PREFIX}AUDIT", f"{ENV_PREFIX}AUDIT_EVERY")  # read by `sg.audit`
        unknown = [name for name in sorted(environ) if name.startswith(ENV_PREFIX) and name not in (*fields, *others)]
        if unknown:
            _warn_of_unknown(tuple(unknown), tuple(fields))
        changes, given = {}, [name for name in fields if name in environ]
        for variable in given:
            _, kind = _kinds()[fields[variable]]
            try:
                changes[fields[variable]] = (kind.parse or str)(environ[variable].strip())
            except (ValueError, LookupError):
                problem = f"{variable}={environ[variable]!r} is not valid"
                raise ConfigError(f"{problem}: expected {kind.expected}.") from None
        try:
            return self.replace(**changes) if changes else self
        except ConfigError as error:
            raise ConfigError(f"{error} (set from the environment: {', '.join(given)})") from None


def check_settings(names: Iterable[str], where: str = "") -> None:
    """Refuse names that are not fields of `CudaGraphConfig`, and name those that are. Raises ConfigError."""
    fields = CudaGraphConfig.__dataclass_fields__
    unknown = sorted(set(names) - fields.keys())
    if unknown:
        hint = did_you_mean(unknown, fields)
        raise ConfigError(f"{where}no such setting: {', '.join(unknown)}{hint}; the settings are {', '.join(fields)}.")


class _FrozenMapping(dict[str, Any]):
    """A mapping that cannot be edited after validation; it can be hashed and pickled."""

    def _refuse(self, *_: object, **__: object) -> typing.NoReturn:
        raise ConfigError("a CudaGraphConfig cannot be edited; use config.replace(...).")

    __setitem__ = __delitem__ = update = pop = clear = setdefault = popitem = _refuse
    __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]  # dict sets __hash__ to None
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return _FrozenMapping, (dict(self),)


@functools.lru_cache(maxsize=64)
def _warn_of_unknown(variables: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Warn once a process about environment variables that name no setting, or one that text cannot express."""
    for variable in variables:
        field = variable.removeprefix(ENV_PREFIX).lower()
        unreadable = f"is ignored: {field} cannot be set from the environment; pass it to wrap"
        # The prefix alone makes any two similar.
        unknown = f"names no setting{did_you_mean([variable], names, cutoff=0.9)}, and is ignored"
        logger.warning("simplegraph: %s %s.", variable, unreadable if field in _kinds() else unknown)


class _Kind(NamedTuple):
    """The values that settings of one type may have.

    Attributes:
        accepts: returns True for valid values.
        expected: describes valid values in messages.
        parse: reads a value from an environment variable; None if that is impossible.
        kept: converts a valid value to the one that is stored.
    """

    accepts: Callable[[Any], bool]
    expected: str
    parse: Callable[[str], Any] | None = None
    kept: Callable[[Any], Any] = lambda value: value


def _is_int(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_length_dim(value: Any) -> bool:
    return _is_int(value) or (
        isinstance(value, tuple) and len(value) == 2 and _is_int(value[0]) and isinstance(value[1], str)
    )


def _are_sizes(value: Any) -> bool:
    listed = isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes))
    return listed and bool(value) and all(_is_int(size, 1) for size in value)


def _mapping_to(is_valid: Callable[[Any], bool], expected: str) -> _Kind:
    """Make the kind of a mapping from arguments' names to valid values."""

    def accepts(value: Any) -> bool:
        items = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(isinstance(name, str) and is_valid(item) for name, item in items)

    return _Kind(accepts, f"argument names with {expected}, such as {{'x': 0}}", kept=_FrozenMapping)


_SPELLED = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_KINDS: dict[Any, _Kind] = {
    CudaGraphMode: _Kind(lambda _: True, "a mode", str, CudaGraphMode.parse),  # `parse` refuses other values
    int: _Kind(lambda value: _is_int(value, 1), "a whole number of at least 1", int),
    bool: _Kind(lambda value: isinstance(value, bool), "True or False", lambda text: _SPELLED[text.lower()]),
    Sequence[int]: _Kind(
        _are_sizes,
        "a list of whole numbers of at least 1, such as [1, 2, 4]",
        lambda text: tuple(map(int, text.strip("[]()").split(","))),
        lambda sizes: tuple(sorted(set(sizes))),
    ),
    Mapping[str, BatchDim]: _mapping_to(
        lambda item: item in (None, "reference") or _is_int(item), "a dimension, None or 'reference'"
    ),
    Mapping[str, LengthDim]: _mapping_to(_is_length_dim, "a dimension, or a dimension and the name of the length"),
    Mapping[str, PadRule]: _mapping_to(
        lambda item: isinstance(item, (int, float)) or item in ("zero", "keep", "repeat-last"),
        "'zero', 'keep', 'repeat-last' or a number",
    ),
    Callable[[Any], Hashable]: _Kind(callable, "a function of the module"),
    **dict.fromkeys(
        ("verify", "num_warmups"), _Kind(lambda value: _is_int(value, 0), "a whole number of at least 0", int)
    ),
}


@functools.cache
def _kinds() -> dict[str, tuple[bool, _Kind]]:
    """Return for each field if it may be None, and its kind, as its annotation says."""
    kinds = {}
    for name, hint in typing.get_type_hints(CudaGraphConfig).items():
        arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        choices = typing.get_args(arms[0])
        choice = _Kind(choices.__contains__, " or ".join(map(repr, choices)), str)
        kinds[name] = type(None) in arms, _KINDS.get(name) or _KINDS.get(arms[0]) or choice
    return kinds
