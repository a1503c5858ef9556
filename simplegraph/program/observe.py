"""Observe the memory from before a run that a forward reads and writes.

Torch's dispatcher does not see launches of Triton kernels, so Triton shows an observer the tensors that a launch is
passed. A graph of operators and Triton kernels reads only tensors that one of them is passed. Other work may read any
memory.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base import patches
from simplegraph.base.errors import HostError
from simplegraph.base.failures import current_user_location, described_line, running_line
from simplegraph.base.operators import (
    OperatorMode,
    argument,
    defined,
    facts_of,
    innermost_mode,
    strided_tensors,
    without_modes,
    written_args,
)
from simplegraph.base.tensors import lies_at, storage_key
from simplegraph.device.protocol import GraphDevice
from simplegraph.program.index_ranges import IndexRanges

_grad_enabled = torch.is_grad_enabled  # looked up once
_NUMBERS = frozenset({int, float, complex})
_LIFTED = torch.ops.aten.lift_fresh.default
_SCALAR = torch.ops.aten.scalar_tensor.default
_FULL = torch.ops.aten.full.default
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default}
_PICKING = {
    *("max", "amax", "min", "amin", "aminmax", "_aminmax", "argmax", "argmin", "any", "all", "topk", "kthvalue"),
    *("median", "nanmedian", "quantile", "nanquantile", "mode"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *(f"max_pool{dims}d{kind}" for dims in (1, 2, 3) for kind in ("", "_with_indices")),
}
_SORTING = {"sort", "argsort", "msort", "topk"}
_PLACES = {"argmax", "argmin"}
_NUMBER_REMEDY = (
    "A replay of a padded batch would use the number of the padded size. Add the sizes of your batches to "
    "capture_sizes, or pass the number as a tensor. If it changed for another reason, name it in state_key."
)
_ROWS_REMEDY = "Add the sizes of your batches to capture_sizes, or pick or sort in each row."
_MAX_SIZES = 3  # batch sizes whose latest run is remembered


class PassedNumbers(NamedTuple):
    """The Python numbers that one operator is passed.

    Attributes:
        func: the operator.
        numbers: the numbers in the order of its arguments, without defaults.
        line: the file and the number of the user's line; None if there is none.
        reads: how many values the run had read back before, outside of eager breaks and in them.
    """

    func: Any
    numbers: tuple[Any, ...]
    line: tuple[str, int] | None
    reads: tuple[int, ...]


class ChosenRows(NamedTuple):
    """A call of an operator that picks values, as a maximum does, or sorts them.

    Attributes:
        func: the operator.
        given, made: the shapes of its arguments and results; for a sort, the number of values that it orders.
        memory: the storage keys of its results.
        line: the file and the number of the user's line; None if there is none.
        places: True if it finds the places of integers, such as that of a token that ends a text.
    """

    func: Any
    given: tuple[torch.Size, ...]
    made: tuple[torch.Size, ...]
    memory: frozenset[int]
    line: tuple[str, int] | None
    places: bool

    def among_others(self, other: ChosenRows) -> bool:
        """True if it picks among more or fewer values than in a run of another size, so padding rows would count."""
        given, made = (max(map(_sizes_apart, *pair), default=0) for pair in zip(self[1:3], other[1:3], strict=True))
        return given > made

    @property
    def described(self) -> str:
        """Name the operator, and the line that calls it."""
        return f"{self.func}{_place(self.line)}"


class NumbersSeen:
    """The Python numbers that a run passes to operators on floating-point tensors, in order.

    Numbers that became tensors are kept separately: a run may also make such a tensor on the device. Numbers in breaks
    do not count: breaks run at every call. Values that a run reads back are kept: numbers may be computed from these.

    Args:
        rows: the batch size of the run; 0 if it is not known.
    """

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows
        self.segments: list[PassedNumbers] = []
        self.data: list[PassedNumbers] = []
        self.choices: list[ChosenRows] = []
        self.reads: tuple[list[Any], list[Any]] = [], []  # values outside of eager breaks, and in them

    def _read_alike(self, passed: PassedNumbers, seen: NumbersSeen, other: PassedNumbers, *, in_graph: bool) -> bool:
        """True if two runs had read the same values before they passed these numbers; see `differing_numbers`."""
        before = [values[:count] for values, count in zip(self.reads, passed.reads, strict=True)]
        after = [values[:count] for values, count in zip(seen.reads, other.reads, strict=True)]
        return repr(before[in_graph:]) == repr(after[in_graph:])  # NaN differs from itself

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Note the numbers that an operator is passed beside `tensors`; this runs for every observed operator."""
        if func is _LIFTED:
            self._note_data(args[0])
        elif not _NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()) if kwargs else args)):
            numeric = [(argument(args, kwargs, *place), default) for place, default in facts_of(func).numeric]
            passed = [(number, default) for number, default in numeric if number.__class__ in _NUMBERS]
            inexact = (tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
            if passed and (_makes_number(func, args, kwargs) or any(inexact)):
                # Torch passes a default only if another argument follows it.
                numbers = tuple(number for number, default in passed if number != default)
                self.segments.append(PassedNumbers(func, numbers, running_line(), tuple(map(len, self.reads))))

    def _note_data(self, tensor: Tensor) -> None:
        """Note a number that became a tensor, if reading it does not wait for the device."""
        if tensor.dim() == 0 and tensor.is_cpu and tensor.is_floating_point():
            with without_modes():
                self.data.append(PassedNumbers(_LIFTED, (tensor.item(),), running_line(), tuple(map(len, self.reads))))

    def note_choice(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Note an operator that picks or sorts values; this runs for every observed operator.

        Only the number of sorted values counts: their order depends on the values. Sorts of integers do not count at
        all, since the integers may be groups.
        """
        name = facts_of(func).name
        if name in _PICKING or (name in _SORTING and given[0].is_floating_point()):
            passed, returned = (tuple(tensor.shape for tensor in tensors) for tensors in (given, made))
            if name in _SORTING:
                dim = 0 if name == "msort" else argument(args, kwargs, 1 + (name == "topk"), "dim")
                passed, returned = (given[0].shape[-1 if dim is None else dim :][:1],), ()
            memory = frozenset(map(storage_key, made))
            places = name in _PLACES and not given[0].is_floating_point()
            self.choices.append(ChosenRows(func, passed, returned, memory, running_line(), places))
        elif func in _READS:  # the choice decides a Python branch, which no capture can take
            read = set(map(storage_key, given))
            self.choices = [chosen for chosen in self.choices if read.isdisjoint(chosen.memory)]

    def differing_choice(self, seen: NumbersSeen, *, places: bool = True) -> ChosenRows | None:
        """Find the first operator that picks among more or fewer values in a run of another size; None if none does.

        With `places`, operators that find the places of integers count: models find a text's last token so.
        """
        if [chosen.func for chosen in self.choices] != [chosen.func for chosen in seen.choices]:
            return None
        pairs = zip(self.choices, seen.choices, strict=True)
        return next(
            (choice for choice, other in pairs if choice.among_others(other) and (places or not choice.places)), None
        )

    def differing_numbers(
        self, seen: NumbersSeen, *, in_graph: bool = False
    ) -> tuple[PassedNumbers, PassedNumbers] | None:
        """Find the first operator that two runs pass different numbers; None if none, or if the operators differ.

        Numbers after reads of different values do not count, since they may be computed from the data. With `in_graph`,
        only reads in eager breaks are such: a graph holds only reads whose values do not depend on data.
        """
        for numbers, others in ((self.segments, seen.segments), (self.data, seen.data)):
            if [passed.func for passed in numbers] == [passed.func for passed in others]:
                for one, other in zip(numbers, others, strict=True):
                    differ = repr(one.numbers) != repr(other.numbers)  # NaN differs from itself
                    if differ and self._read_alike(one, seen, other, in_graph=in_graph):
                        return one, other
        return None


class NumbersBySize:
    """The Python numbers that runs of one signature passed to operators, by batch size."""

    def __init__(self) -> None:
        self._seen: dict[int, NumbersSeen] = {}

    def clear(self) -> None:
        """Forget all numbers."""
        self._seen.clear()

    def learn(self, seen: NumbersSeen, *, in_graph: bool = False) -> tuple[str, str] | None:
        """Remember a run; return (effect of padding, remedy) if runs of two sizes show that padding has an effect.

        `in_graph` is true if the forward was captured.
        """
        rows = seen.rows
        before = self._seen.pop(rows, None)
        if before is not None and before.differing_numbers(seen, in_graph=True) is not None:
            self._seen.clear()  # numbers change without a change of the size, so other sizes show nothing
        earlier = self._seen.items()
        differences = ((size, numbers.differing_numbers(seen, in_graph=in_graph)) for size, numbers in earlier)
        differ = next(((size, *pair) for size, pair in differences if pair is not None), None)
        chosen = next(filter(None, map(seen.differing_choice, self._seen.values())), None)
        self._seen[rows] = seen
        while len(self._seen) > _MAX_SIZES:
            del self._seen[next(iter(self._seen))]
        if differ is not None:
            size, at_size, at_rows = differ
            values = {size: _text(at_size.numbers), rows: _text(at_rows.numbers)}
            said = ", ".join(f"{values[key]} for {key} rows" for key in sorted(values))
            cause = (
                f"a number that the forward computes from the batch size goes into {at_rows.func}{_place(at_rows.line)}"
            )
            return f"{cause}: {said}", _NUMBER_REMEDY
        if chosen is not None:
            verb = "picks among" if chosen.made else "sorts"
            said = f"{chosen.described} {verb} all rows, those of padding too"
            return said, _ROWS_REMEDY
        return None


def _sizes_apart(shape: torch.Size, other: torch.Size) -> int:
    """Count the sizes by which two shapes differ."""
    return sum(map(operator.ne, shape, other))


def _place(line: tuple[str, int] | None) -> str:
    return "" if line is None else f" at {described_line(*line)}"


def _makes_number(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if an operator makes a tensor of Python numbers for another operator, as torch.where does.

    The values of linspace and logspace depend on their number of steps.
    """
    if func is not _SCALAR and (func is not _FULL or args[0]):
        return facts_of(func).name.endswith("space")
    dtype = kwargs.get("dtype")
    return args[-1].__class__ is float if dtype is None else bool(dtype.is_floating_point)


def _text(numbers: tuple[Any, ...]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers) or "the default"


WHOLE = "all of it"


def _region(tensor: Tensor) -> Any:
    """Return where the elements of a tensor are in its storage; None if torch does not say."""
    if tensor.is_nested:
        return None
    is_whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    return WHOLE if is_whole else lies_at(tensor)


_OWN = __name__.partition(".")[0]  # no kernel of this library is passed an address as a number
_ADDRESSES = 1 << 32  # numbers from here on may be addresses
# Elements of other dtypes may be addresses, or parts of a descriptor that contains an address.
_NO_ADDRESSES = frozenset({torch.bool, torch.int16, torch.int32})


def _shown(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that launches Triton kernels: the innermost mode's `launching` surrounds each launch.

    `launching` is passed the tensors that the kernel can touch; None if they are not known.
    """

    def shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        launching = getattr(innermost_mode(), "launching", None)
        if launching is None:
            return run(self, *args, **kwargs)
        is_ours = str(getattr(self, "module", "")).partition(".")[0] == _OWN
        # `kwargs` also has the grid, and options of the compiler.
        given = [*args, *(value for name, value in kwargs.items() if name != "grid"), *_default_tensors(self)]
        # The tensors are known if no argument, and no element of a tensor, may be an address.
        shown_arguments = is_ours or all(map(_holds_no_address, given))
        with launching(strided_tensors(given) if shown_arguments else None):
            return run(self, *args, **kwargs)

    return shown


def _default_tensors(kernel: Any) -> list[Tensor]:
    """List the tensors that are defaults of a kernel's arguments."""
    parameters = getattr(getattr(kernel, "signature", None), "parameters", {})
    return [parameter.default for parameter in parameters.values() if isinstance(parameter.default, Tensor)]


def _holds_no_address(arg: Any) -> bool:
    if isinstance(arg, Tensor):
        if type(arg).data_ptr is not Tensor.data_ptr:  # a class that returns the address of other memory
            return False
        return arg.dtype in _NO_ADDRESSES or arg.is_floating_point()
    return abs(arg) < _ADDRESSES if isinstance(arg, int) else isinstance(arg, (float, str, torch.dtype, type(None)))


_EIGENSOLVER = "cuSOLVER waits for the device ({}), and would fail from then on if that happened in a capture"
_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default
_CUDNN_DROPOUT = (
    "cuDNN drops between the layers of a recurrent module by random numbers of its own, for which it waits for the "
    "device after every seeding (nn.Dropout between modules of one layer each draws torch's)"
)
_NOT_JOINED = "{} runs on a stream that has not waited for the captured one: it would not be recorded, but run at once"


class MemoryObserver(OperatorMode):
    """Sees every operator while active, and collects the tensors from before the run ("external" tensors).

    A CUDA graph does not keep alive the memory that it reads. The owner of the graph must keep it, wherever the forward
    found it: in an attribute, a closure or a cache.

    Args:
        device: the device of a capture, to see if it records other work than operators; None for an eager run.
        rows: the batch size of the run; 0 if it is not known.
        after: the observer of an earlier run whose memory this run uses: that memory counts as this run's own.
        before_write: called with a tensor before an operator writes to external memory; the default does nothing.

    Attributes:
        captures: True if the observed run is a capture.
        external: storage key -> a tensor in that memory, for external memory that segments read or write.
        passed: the same for external memory that eager breaks were passed.
        written: storage keys of external memory that an operator wrote to.
        regions: storage key -> the parts of that memory that segments wrote to: `WHOLE`, a result of `lies_at`, or None
            for an operator that may leave elements out. Empty for Triton launches, which may only read the memory.
        launched: storage keys of external memory that Triton launches were passed, and may write to.
        blank: storage keys of memory that the run made, and that nothing has written yet.
        given: storage keys of all memory that operators were passed, if `after` is given.
        may_draw: True if an operator draws random numbers, or may draw some without declaring it.
        indices: the values that fail on a GPU if they are out of range.
        differentiates: True if an operator outside of eager breaks ran under grad mode.
        rounds_by_group: True if an operator multiplies rows in groups, so that its rounding depends on their sizes.
        adds_in_any_order: True if an operator adds by atomics on a GPU.
        unseen: the device type ("cuda") if a capture recorded work of no operator, such as a Triton kernel; else
            empty.
        reads_anything: the device type ("cuda") if such work may read any memory there, since it did not show the
            tensors that it can touch; else empty.
        host_error: why the run cannot be captured, if it uses an operator that a capture would break for good.
        left_by_break: storage key -> the number of the eager break that made that memory and did not return it.
        uses_of_left: number of such a break -> how the forward used that memory nevertheless.
        numbers: the Python numbers that operators are passed.
        dtypes: the dtypes of results of operators; gpu: the first GPU that a result is on; None if none is.
        operators: a hash of the operators that ran, in order.
    """

    def __init__(
        self,
        device: GraphDevice | None = None,
        rows: int = 0,
        after: MemoryObserver | None = None,
        before_write: Callable[[Tensor], object] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.before_write = device, before_write
        self.captures = device is not None
        self._last: tuple[int, int] | None = None
        self.unseen = self.reads_anything = ""
        self.external: dict[int, Tensor] = {}
        self.passed: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.regions: dict[int, set[Any]] = {}
        self.launched: set[int] = set()
        self.blank: set[int] = set()
        self.given: set[int] = set()
        self.may_draw = self.rounds_by_group = self.adds_in_any_order = self.differentiates = False
        self.host_error: HostError | None = None
        self.left_by_break: dict[int, int] = {}
        self.uses_of_left: dict[int, str] = {}
        self.numbers = NumbersSeen(rows)
        self.dtypes: set[torch.dtype] = set()
        self.gpu: torch.device | None = None
        self.operators = 0
        # Keys only: a capture could not reuse memory that is held here. External memory lives during the whole run, so
        # a key that is freed and used again belongs to memory that the forward made.
        self._made: set[int] = set() if after is None else set(after._made)
        self.indices = IndexRanges(self._made)
        self._follows = after is not None
        self._made_inside: set[int] | None = None  # keys of memory made by the running break; None outside of breaks

    def made(self, tensor: Tensor) -> bool:
        """True if the observed run made the tensor's memory."""
        return tensor.layout is torch.strided and storage_key(tensor) in self._made

    def note_passed(self, tensors: Sequence[Any]) -> None:
        """Note external tensors that a break is passed."""
        for tensor in strided_tensors(tensors):
            if not self.made(tensor):
                self.passed[storage_key(tensor)] = tensor
        self.note_uses_of_left(tensors, "passes it to another break")

    @contextlib.contextmanager
    def inside_break(self) -> Iterator[set[int]]:
        """Ignore reads in the block, since no graph will make them. Writes still count.

        Yields:
            The storage keys of memory that the block makes.
        """
        self._made_inside = made = set[int]()
        try:
            yield made
        finally:
            self._made_inside = None

    def note_uses_of_left(self, tensors: Iterable[Any], use: str) -> None:
        """Note this use of those tensors that a break made and did not return."""
        for tensor in strided_tensors(tensors) if self.left_by_break else ():
            number = self.left_by_break.get(storage_key(tensor))
            if number is not None:
                self.uses_of_left.setdefault(number, use)

    def _refuse(self, cause: str) -> None:
        """Note an operator that no capture may contain; in a capture, raise the error."""
        if self._device is None:  # in a capture, the traceback of the error shows the line
            cause += f"; it is called at {current_user_location()}"
        self.host_error = HostError(cause, "", breaks=True)
        if self._device is not None:
            raise self.host_error

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and note what it reads, writes and makes."""
        facts = facts_of(func)
        if facts.may_solve and self._made_inside is None:
            if facts.is_composite:  # inference_mode does not decompose it, and its parts may not solve
                return self.take_apart(func, args, kwargs)
            self._refuse(_EIGENSOLVER.format(func))
        if func is _CUDNN_RNN and args[11] > 0 and args[12] and self._made_inside is None:  # dropout, in training
            self._refuse(_CUDNN_DROPOUT)
        self.may_draw = self.may_draw or facts.may_draw
        self.rounds_by_group = self.rounds_by_group or facts.multiplies_groups
        self.adds_in_any_order = self.adds_in_any_order or facts.adds_in_any_order
        if self._device is not None:
            if self._made_inside is None and not self._device.is_capturing():
                self._refuse(_NOT_JOINED.format(func))
            self._look_for_unseen(self._device)
        made_keys, inside, external = self._made, self._made_inside, self.external
        tensors = strided_tensors((*args, *kwargs.values()) if kwargs else args)
        given = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        if func is _LIFTED:  # the tensor was made from Python data without an operator
            made_keys.update(given)
        self._note_given(given, func)
        for tensor in strided_tensors(written_args(func, args, kwargs)):
            if (key := storage_key(tensor)) not in made_keys:
                self.before_write(tensor)
                self.written.add(key)
                if inside is None:
                    self.regions.setdefault(key, set()).add(_region(tensor) if facts.writes_all else None)
            self.blank.discard(key)
        if inside is None:
            self.numbers.note(func, args, kwargs, tensors)
            self.operators = hash((self.operators, func))
            if facts.may_fault:
                self.indices.note_fault(facts, args, kwargs)
            self.differentiates = self.differentiates or _grad_enabled()
        result = self.leave(func, args, kwargs)
        if func in _READS:
            self.numbers.reads[inside is not None].append(result)
        if self._device is not None:
            self._last = self._device.recorded()
        made = strided_tensors((result,))
        if inside is None:
            self.numbers.note_choice(func, args, kwargs, tensors, made)
        self.indices.note(facts, (*args, *kwargs.values()), made)
        for tensor in made:
            self.dtypes.add(tensor.dtype)
            if self.gpu is None and tensor.is_cuda:
                self.gpu = tensor.device
            key = tensor.untyped_storage()._cdata
            if key not in given and key not in external:  # new memory; freed memory may have had the same key
                made_keys.add(key)
                (self.blank.add if facts.is_uninitialised else self.blank.discard)(key)
                self.left_by_break.pop(key, None)
                if inside is not None:
                    inside.add(key)
        return defined(result)

    def _note_given(self, given: dict[int, Tensor], reader: Any) -> None:
        """Note the tensors, by storage key, that an operator or a kernel is passed."""
        if self._follows:
            self.given.update(given)
        if self._made_inside is None:
            if self.left_by_break:
                self.note_uses_of_left(list(given.values()), f"reads it ({reader})")
            for key, tensor in given.items():
                if key not in self._made and key not in self.external:
                    self.external[key] = tensor

    @contextlib.contextmanager
    def launching(self, tensors: Sequence[Tensor] | None) -> Iterator[None]:
        """Surround the launch of a Triton kernel that is passed these tensors, and may write to any of them."""
        device = self._device
        if device is not None:
            self._look_for_unseen(device)
        given = {storage_key(tensor): tensor for tensor in strided_tensors(tensors or ())}
        self.launched |= given.keys() - self._made
        for key in given.keys() - self._made if self._made_inside is None else ():
            self.regions.setdefault(key, set())
        self._note_given(given, "a kernel of Triton")
        shown = getattr(self._next, "launching", None)
        with contextlib.nullcontext() if shown is None else shown(tensors):
            yield
        if device is not None:
            self._look_for_unseen(device, tensors_shown=tensors is not None)
            self._last = device.recorded()  # launches by Triton's hooks during this launch count as seen

    def _look_for_unseen(self, device: GraphDevice, *, tensors_shown: bool = False) -> None:
        """Note if work was recorded since the last operator, or since the segment began.

        Args:
            device: the device of the capture.
            tensors_shown: True if the work showed the tensors that it can touch.
        """
        now, last = device.recorded(), self._last
        if now is not None and now[1] > (last[1] if last is not None and last[0] == now[0] else 0):
            self.unseen = device.torch_device.type
            if not tensors_shown:
                self.reads_anything = self.unseen

    def __enter__(self) -> MemoryObserver:
        self._kernels = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
        if self._kernels is not None:
            patches.replace(self._kernels, "run", _shown)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        if self._kernels is not None:
            patches.restore(self._kernels, "run")
        if self._device is not None:
            self._look_for_unseen(self._device)


def observed_tensors(observers: Iterable[MemoryObserver]) -> Iterator[Tensor]:
    """Yield the external tensors that observers hold."""
    for observer in observers:
        yield from (*observer.external.values(), *observer.passed.values())
