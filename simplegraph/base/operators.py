"""A dispatch mode that sees every operator, and facts about operators."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_dispatch: Any = _python_dispatch  # typed loosely because torch leaves it untyped
without_modes = _dispatch._disable_current_modes
innermost_mode = _dispatch._get_current_dispatch_mode
_Key = torch._C.DispatchKey
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_KeySet = torch._C.DispatchKeySet
_keys_at_entry: Any = getattr(torch._C, "_RestorePythonTLSSnapshot")  # noqa: B009 - torch leaves it untyped
_AUTOCAST = {name: _KeySet(key) for name, key in vars(_Key).items() if name.startswith("Autocast")}
_ALL_AUTOCAST = functools.reduce(operator.or_, _AUTOCAST.values())
_LAZY = _KeySet(_Key.Conjugate) | _KeySet(_Key.Negative) | _KeySet(_Key.ZeroTensor)
# Only torch.cdist calls these, after its own autocast kernel. A mode sees torch.cdist itself in inference mode only.
_CAST_ALREADY = frozenset({"aten::_cdist_forward", "aten::_euclidean_dist"})


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees every operator and changes none: results are bit for bit the same as without it.

    Inside an ordinary mode, torch runs an operator without autocast and lazy conjugation, which composite operators
    need; it refuses higher-order operators; and it runs compiled functions uncompiled. In this mode all of them run as
    usual, with two exceptions: operators that ask torch if a mode is active, as torch.linalg.eigvalsh and svdvals do
    under no_grad; and torch.pinverse under a CPU's autocast, which a mode sees as torch.linalg.pinv, without autocast.
    Dynamo ignores this mode, and is not loaded for it: torch would load Dynamo at the first operator of every mode,
    which takes seconds.
    """

    supports_higher_order_operators = True
    _next: OperatorMode | None = None  # the mode that gets operators next, without another dispatch
    _cast = _KeySet(_Key.Undefined)  # autocast keys that have run for the composite operator being decomposed

    def __new__(cls, *args: Any, **kwargs: Any) -> OperatorMode:
        """Make an instance of the class, which Dynamo ignores from now on if it is loaded."""
        kind: Any = cls
        if "torch._dynamo" in sys.modules:
            _hide_from_dynamo(kind)
        mode: OperatorMode = object.__new__(kind)
        return mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled functions run compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(wrapper_class, types)):
            return NotImplemented  # the wrapper first turns it into operators on plain tensors
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # such as when DTensor plans its sharding
            return func(*args, **kwargs)
        if is_higher_order(func):
            return self.run(func, args, kwargs)
        # Set the dispatch keys that the operator has without a mode. A mode comes after autocast, and torch excludes
        # all earlier keys so that they do not run twice. Operators that this one calls need them, except autocast if
        # the operator's own autocast kernel, which excludes it, has run.
        included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with _keys_at_entry():  # the keys when Python called the operator
            excluded_before = torch._C._dispatch_tls_local_exclude_set()
        hidden = _not_run_before(func, torch.is_inference_mode_enabled()) - excluded_before - self._cast
        with torch._C._ForceDispatchKeyGuard(included, excluded - hidden):
            return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on plain tensors."""
        return self.leave(func, args, kwargs)

    def leave(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass an operator to the next mode, or run it if there is none."""
        return func(*args, **kwargs) if self._next is None else self._next.run(func, args, kwargs)

    @contextlib.contextmanager
    def before(self, mode: OperatorMode) -> Iterator[None]:
        """Pass every operator from this mode to another: as if that was entered first, but in half the time."""
        self._next = mode
        try:
            yield
        finally:
            self._next = None

    def take_apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operators that a composite operator consists of, and see each of them; call it from `run`."""
        before, self._cast = self._cast, self._cast | (_ALL_AUTOCAST - _not_run_before(func, False))
        try:
            with self:
                return func._op_dk(_Key.CompositeImplicitAutograd, *args, **kwargs)
        finally:
            self._cast = before


@functools.cache
def _hide_from_dynamo(mode: Any) -> None:
    mode.__torch_dispatch__ = torch.compiler.disable(mode.__torch_dispatch__)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4096)
def _not_run_before(func: Any, inference: bool) -> Any:
    """Return the dispatch keys before a mode's that have not run for an operator when a mode sees it."""
    name, may_run = func.name(), {} if func.name() in _CAST_ALREADY else _AUTOCAST
    if inference:  # otherwise autograd runs before a mode, and excludes this key inside operators
        may_run = may_run | {"ADInplaceOrView": _KeySet(_Key.ADInplaceOrView)}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return functools.reduce(operator.or_, (key for kind, key in may_run.items() if not has_kernel(name, kind)), _LAZY)


def wrapper_class(kind: type) -> bool:
    """True if tensors of this class have no memory of their own."""
    return hasattr(kind, "__tensor_flatten__")


def is_higher_order(func: Any) -> bool:
    """True for an operator that runs functions that it is passed, such as torch.cond; it has no schema."""
    return isinstance(func, HigherOrderOperator)


class OperatorFacts(NamedTuple):
    """Facts from an operator's name, schema and kernels; the defaults are for an operator without a schema.

    Attributes:
        name: its name without ``aten::``; empty for a higher-order operator.
        is_composite: True if it consists of other operators. Under inference_mode it is dispatched as a whole.
        is_collective: True if it communicates with other ranks.
        may_draw: True if it draws random numbers, or is not torch's own and may draw some without declaring it.
        may_solve: True if it computes eigenvalues, or consists of operators that may.
        multiplies_groups: True if it multiplies rows by one matrix for each group, such as experts: the rounding then
            depends on the size of a group.
        adds_in_any_order: True if a GPU adds by atomics, so that equal runs may round differently.
        may_fault: True unless it is known to run on a GPU whatever the values of its arguments are. An index that is
            out of range or an assertion ends the process's use of the GPU.
        is_uninitialised: True if its results are uninitialised memory.
        reads_no_value: True if it returns a view of its argument, or reads only its shape, dtype and device.
        writes_all: True if it writes every element of the tensors that it writes to, whatever their values are.
        numeric: (position, name) of each argument that may be a number of its arithmetic, and the default.
        written: (position, name, flag) of each argument that it writes; with a flag, only if that argument is true.
    """

    name: str = ""
    is_composite: bool = False
    is_collective: bool = False
    may_draw: bool = True
    may_solve: bool = False
    multiplies_groups: bool = False
    adds_in_any_order: bool = False
    may_fault: bool = True
    is_uninitialised: bool = False
    reads_no_value: bool = False
    writes_all: bool = False
    numeric: tuple[tuple[tuple[int, str], Any], ...] = ()
    written: tuple[tuple[int, str, tuple[int, str] | None], ...] = ()


_EIGEN = {"_linalg_eigh", "linalg_eig", "linalg_eigvals", "_linalg_eigvals"}
_MADE_OF_EIGEN = {"linalg_eigh", "linalg_eigvalsh", "linalg_matrix_rank", "linalg_pinv"}  # may be
_ADDING = {"scatter_add", "index_add", "scatter_reduce"}
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_FILLING = {"copy_", "fill_", "zero_"}
# Beside pointwise operators and views. None of them takes an index or asserts; each may be in place.
_NEVER_FAULTING = frozenset(
    {
        *_UNINITIALISED,
        *("_to_copy", "to", "contiguous", "copy", "fill", "zero", "detach", "lift_fresh", "dropout", "alias_copy"),
        *("zeros", "ones", "full", "arange", "linspace", "eye", "scalar_tensor", "cat", "stack", "repeat", "tile"),
        *("zeros_like", "ones_like", "full_like", "type_as", "diff", "sort", "argsort", "cumprod", "norm", "cross"),
        *("new_zeros", "new_ones", "new_full", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "split_copy"),
        *(
            "split_with_sizes_copy",
            "as_strided",
            "_local_scalar_dense",
            "is_nonzero",
            "item",
        ),  # no graph holds the last three
        *("reshape", "_unsafe_view", "flatten", "unflatten", "flip", "roll", "tril", "triu", "constant_pad_nd", "pad"),
        *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "pixel_shuffle"),
        *("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "matmul", "linear", "_addmm_activation", "einsum"),
        *("addbmm", "addmv", "addr", "outer", "tensordot"),
        *("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_relu"),
        *("conv_transpose1d", "conv_transpose2d", "cudnn_convolution_transpose", "_conv_depthwise2d", "im2col"),
        *("batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"),
        *("_batch_norm_impl_index", "layer_norm", "native_layer_norm", "group_norm", "native_group_norm"),
        *("rms_norm", "_fused_rms_norm", "instance_norm", "linalg_vector_norm", "_weight_norm_interface"),
        *("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "glu", "prelu", "_prelu_kernel"),
        *("hardswish", "channel_shuffle", "log_sigmoid_forward", "_cudnn_rnn", "_thnn_fused_lstm_cell"),
        *("_thnn_fused_gru_cell", "scaled_dot_product_attention", "_scaled_dot_product_attention_math"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool2d_with_indices"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "upsample_nearest1d"),
        *("upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
        *("upsample_nearest3d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        *("max_pool3d", "max_pool3d_with_indices", "adaptive_max_pool2d", "_adaptive_avg_pool3d", "pixel_unshuffle"),
        *("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
        *("sum", "mean", "prod", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "cumsum"),
        *("var", "std", "var_mean", "std_mean", "logsumexp", "topk"),
    }
)
_NUMERIC = ("Tensor", "number", "float")  # an operator's int is a dimension, a size or an index


@functools.lru_cache(maxsize=4096)
def facts_of(func: Any) -> OperatorFacts:
    """Return the facts about an operator."""
    if is_higher_order(func):
        return OperatorFacts()
    schema, has_kernel = func._schema, torch._C._dispatch_has_kernel_for_dispatch_key
    name: str = schema.name.removeprefix("aten::")
    bare = name.rpartition("::")[2]
    results = [result.alias_info for result in schema.returns]
    is_view = bool(results) and all(alias is not None and not alias.is_write for alias in results)
    places = [(at, arg.name, str(arg.type).removeprefix("Optional[")) for at, arg in enumerate(schema.arguments)]
    return OperatorFacts(
        name,
        is_composite=has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU"),
        is_collective=func.namespace in ("c10d", "_c10d_functional"),
        may_draw=func.namespace not in ("aten", "prims", "prim") or torch.Tag.nondeterministic_seeded in func.tags,
        may_solve=name in _EIGEN | _MADE_OF_EIGEN,
        multiplies_groups="grouped_mm" in name,
        adds_in_any_order=name.removesuffix("_") in _ADDING,
        # A polynomial takes as many steps as a value says.
        may_fault=func.namespace != "aten"
        or "polynomial" in name
        or not (is_view or torch.Tag.pointwise in func.tags or name.removesuffix("_") in _NEVER_FAULTING),
        is_uninitialised=name in _UNINITIALISED,
        reads_no_value=is_view or bare.endswith("_like") or bare.startswith(("new_", "empty", "sym_", "is_pinned")),
        writes_all=torch.Tag.pointwise in func.tags or name in _FILLING or name.startswith("_foreach_"),
        numeric=tuple(
            ((at, name), schema.arguments[at].default_value)
            for at, name, kind in places
            if kind.rstrip("]") in _NUMERIC or name == "steps"
        ),
        written=_written(schema, is_c10d=func.namespace == "c10d"),
    )


def _written(schema: Any, *, is_c10d: bool) -> tuple[tuple[int, str, tuple[int, str] | None], ...]:
    arguments = [(index, argument.name) for index, argument in enumerate(schema.arguments)]
    aliases = [argument.alias_info for argument in schema.arguments]
    # The schemas of collectives do not declare their outputs, which come first.
    always = {index for index, alias in enumerate(aliases) if alias is not None and alias.is_write}
    always |= {0} if is_c10d else set()
    # Batch norm updates its statistics without declaring it in its schema, but only in training.
    flag = next((place for place in arguments if place[1] in ("training", "use_input_stats")), None)
    flagged = {index for index, name in arguments if flag is not None and name in ("running_mean", "running_var")}
    return tuple(
        (index, name, None if index in always else flag) for index, name in arguments if index in always | flagged
    )


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Return the argument of an operator at this position, or by this name; None if it is not passed."""
    return args[position] if position < len(args) else kwargs.get(name)


def written_args(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to."""
    for position, name, flag in facts_of(func).written:
        if flag is not None and not argument(args, kwargs, *flag):
            continue
        value = argument(args, kwargs, position, name)
        if value is not None:
            yield value


def strided_tensors(values: Iterable[Any]) -> list[Tensor]:
    """List the strided tensors among arguments, lists of them included; this runs for every operator observed."""
    tensors: list[Tensor] = []
    for value in values:
        if issubclass(type(value), Tensor):
            if value.layout is torch.strided:
                tensors.append(value)
        elif issubclass(type(value), (list, tuple)):
            tensors += strided_tensors(value)
    return tensors


def defined(result: Any) -> Any:
    """Return an operator's result; in a list, replace None, an undefined tensor, by an empty tensor."""
    return [torch.empty(0) if item is None else item for item in result] if type(result) is list else result


_BY_DIM = frozenset(
    {
        *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
        *("gather", "scatter", "scatter_add", "scatter_reduce"),
    }
)
_BY_LIST = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
_BY_ROW = frozenset({"embedding", "embedding_renorm", "_embedding_bag", "_embedding_bag_forward_only"})
_BY_ELEMENT = frozenset({"take", "put"})
_BY_CLASS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
INDICES = frozenset({torch.int64, torch.int32})  # dtypes of indices


class Index(NamedTuple):
    """An index of a dimension, and the valid range of its values."""

    values: Tensor
    first: int
    size: int
    ignored: int | None = None


def indices_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Index]:
    """Yield the indices that an operator of this name is passed: (values, first, size, ignored)."""
    if name in _BY_DIM:
        tensor, dim, index = (argument(args, kwargs, *place) for place in ((0, "self"), (1, "dim"), (2, "index")))
        if isinstance(dim, int):
            yield Index(index, 0, tensor.shape[dim] if tensor.dim() else 1)
    elif name in _BY_LIST:
        tensor, indices = args[:2]
        dim = 0
        for index in indices:
            is_index = index is not None and index.dtype in INDICES
            if is_index:
                yield Index(index, -tensor.shape[dim], tensor.shape[dim])
            dim += 1 if index is None or is_index else index.dim()  # a mask has several
    elif name in _BY_ROW:
        yield Index(args[1], 0, args[0].shape[0])
    elif name in _BY_ELEMENT:
        yield Index(args[1], -args[0].numel(), args[0].numel())
    elif name in _BY_CLASS:
        yield Index(args[1], 0, args[0].shape[1 if args[0].dim() > 1 else 0], args[4])
