"""`optimize`: rewrites a module in place, and the handle that lists and undoes it."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.errors import ConfigError, VerificationError, did_you_mean
from simplegraph.fused.choice import starting_triton
from simplegraph.fused.layers.kinds import (
    IMAGE_KINDS,
    find_layers,
    fused_forwards,
    listed,
    names_by_kind,
    operators_of,
    shortened,
)
from simplegraph.fused.layers.layer import Layer
from simplegraph.fused.optimizing.blocks import block_layer, block_trials, find_blocks, keeps_weight
from simplegraph.fused.optimizing.examples import Examples, ObservedRun, compare, numbers
from simplegraph.fused.optimizing.folded import Fold, FoldedMemory, LeftOut
from simplegraph.fused.optimizing.forwards import install_folds, install_fused, is_installed, uninstall
from simplegraph.fused.optimizing.layout import find_joined, join, restore_layout, store_channels_last
from simplegraph.fused.optimizing.pairs import (
    BATCH_NORM,
    CHANNELS_LAST,
    EPILOGUE,
    PROJECTIONS,
    REWRITES,
    Pair,
    hindrance_in,
    is_changed,
    known_pairs,
    runs_any_format,
    shared_modules,
)
from simplegraph.fused.torch_operators import KernelTrial, Operators
from simplegraph.serve.runner import OPTIMIZED
from simplegraph.serve.wrap import unwrap

__all__ = ["Optimization", "optimize"]

_UNKNOWN_FORMAT = "classes that are not known to take any format; pass example_inputs"


class Optimization(LeftOut):
    """Handle of a module that `optimize` rewrote: lists the changes, and `remove` undoes them.

    As a context manager it calls `remove` at the end. It can be dropped: the module stays as it is, and keeps it among
    its attributes, for reports; copies and pickles of the module have none.

    Attributes:
        module: the module.
        changed: the changed parts, by rewrite: folded layers and norms, weights in channels_last, fused layers.
        left_out: the reason for each rewrite that was left out, by the name of the rewrite or of the pair.
        errors: relative errors against float64 on the example inputs, before and after; None without such inputs.
    """

    __slots__ = ("_memory", "_operators", "changed", "errors", "left_out", "module")

    def __init__(
        self, module: nn.Module, pairs: Sequence[Pair], channels_last: Sequence[str], memory: FoldedMemory
    ) -> None:
        self.module, self._memory, self._operators = module, memory, ""
        self.changed = {BATCH_NORM: list(map(str, pairs)), CHANNELS_LAST: list(channels_last)}
        self.left_out: dict[str, str] = {}
        self.errors: tuple[float, float] | None = None

    @property
    def extra_bytes(self) -> int:
        """The memory that folded weights take, beside the module's own."""
        return sum(tensor.nbytes for tensor in self._memory.values())

    def refresh(self) -> None:
        """Fold again, into the same memory: after writes that torch does not count, such as those through ``.data``."""
        self._memory.refresh(everything=True)

    def remove(self) -> None:
        """Undo the rewrites, but keep the current weights; a second call does nothing."""
        if vars(self.module).get(OPTIMIZED) is self:
            _restore(self.module)

    def lines(self) -> list[str]:
        """List the rewrites, for a report."""
        lines = [listed(name, names) for name, names in self.changed.items() if names]
        lines += [f"fused operators by {self._operators}"] if self._operators else []
        lines += [f"extra memory for folded weights {self.extra_bytes / 2**20:.1f} MiB"] if self._memory else []
        reasons: dict[str, list[str]] = collections.defaultdict(list)
        for name, why in self.left_out.items():
            reasons[why].append(name)
        lines += [f"left out: {shortened(names)}: {why}" for why, names in reasons.items()]
        if self.errors is not None:
            before, after = self.errors
            lines.append(f"error against float64 on example inputs: {after:.2e}, before {before:.2e}")
        return lines or ["nothing to rewrite"]

    def __str__(self) -> str:
        return "\n  ".join([f"{type(self.module).__name__}, optimized for inference:", *self.lines()])

    __repr__ = __str__

    def __enter__(self) -> Optimization:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def optimize(module: nn.Module, example_inputs: Any = None, *, skip: Collection[str] = ()) -> Optimization:
    """Rewrite a module in place so that inference takes fewer kernels; nothing is traced or compiled.

        handle = sg.optimize(model.eval(), images)
        print(handle)  # what was done, what was left out and why, the memory that it takes
        handle.remove()

    - ``"batch_norm"``: a batch norm is folded into the convolution or linear layer before it, where that layer's output
      provably goes nowhere else: neighbours in an `nn.Sequential`, known blocks of torchvision, timm and transformers,
      and what a run on `example_inputs` shows. Folded weights have memory of their own. They are folded again when the
      module's weights are loaded, written or moved.
    - ``"channels_last"``: weights of other 2-d convolutions are stored in that format, if all classes in the module are
      known to take it, or the run on `example_inputs` succeeds.
    - ``"rms_norm"``, ``"residual"`` (a sum together with the norm after it), ``"gated"``, ``"activation"`` and
      ``"rotary"``: layers that examples prove to be known ones, mostly those of transformers, run on fused operators:
      Triton's kernels, or torch's where these do not run. In half precision they round once where the layer rounds two
      or three times. ``"group_norm"``: so do group norms where channels_last is done, by Triton's kernels only.
    - ``"epilogue"``: where channels_last is done, bias, sum and activation after a folded convolution are one, by
      Triton's kernels only: in an `nn.Sequential` and in known blocks of torchvision.
    - ``"adaptive_norm"``, ``"attention"``, ``"timesteps"``, ``"image_block"``: known layers of diffusers and
      torchvision.
    - ``"projections"``: queries, keys and values of known attentions of transformers and diffusers are one product.
      Their weights come to lie one after the other in one memory.

    Parameters, buffers and ``state_dict()`` keep their names and values. Training, and calls that want gradients of
    the weights, run as before. Copies and pickles are of the module as it was. Graphs are captured again.

    Args:
        module: a module in evaluation mode, wrapped or not. One that was optimized before is optimized anew.
        example_inputs: a tensor, a tuple of positional arguments or a mapping of keyword arguments. The module runs on
            them twice, and a copy of it in float64 once; its error may be at most 1.5 times what it was, as it is or,
            where channels_last is done, by torch's kernels for that format, for which it may run once more.
        skip: names of rewrites to leave out.

    Returns:
        A handle with `changed`, `left_out`, `extra_bytes` and `remove`; as a context manager it calls `remove`.

    Raises:
        ConfigError: it is no module, is in training mode, or is part of an optimized one; a name in `skip` is unknown.
        VerificationError: the error against float64 became too large or cannot be found. The module is as it was.
    """
    _check(module, skip)
    with starting_triton(module):  # beside the search for what can be done
        _restore_all(module)
        try:
            return _optimize(module, example_inputs, skip)
        except BaseException:
            _restore(module)
            raise


def _optimize(module: nn.Module, example_inputs: Any, skip: Collection[str]) -> Optimization:
    if example_inputs is None:
        return _apply(module, known_pairs(module), skip, any_format=runs_any_format(module))
    examples, observed = Examples(module, unwrap(module), example_inputs), ObservedRun(module)
    reference = examples.reference()
    before = numbers(observed.run(examples.run))
    pairs = list(dict.fromkeys([*known_pairs(module), *observed.pairs()]))
    refuted = {
        str(pair): "the example run used the layer's output otherwise" for pair in pairs if observed.contradicts(pair)
    }
    pairs = _once([pair for pair in pairs if str(pair) not in refuted])
    optimization = _apply_compared(module, pairs, skip, examples, reference, before)
    optimization.left_out |= refuted
    return optimization


def _apply_compared(
    module: nn.Module,
    pairs: Sequence[Pair],
    skip: Collection[str],
    examples: Examples,
    reference: Sequence[Tensor],
    before: Sequence[Tensor],
) -> Optimization:
    """Rewrite the module, without channels_last if it does not run with that, and compare its answers.

    Args:
        module: in evaluation mode.
        pairs: to be folded.
        skip: names of rewrites to leave out.
        examples: run the module.
        reference: its answers in float64.
        before: its answers as it was.

    Raises:
        VerificationError: the error against float64 became too large. What was rewritten stays.
    """
    optimization = _apply(module, pairs, skip, any_format=True)
    try:
        after = numbers(examples.run())
    except Exception as error:
        if not optimization.changed[CHANNELS_LAST] and not optimization.changed[BATCH_NORM]:
            raise
        _restore(module)
        optimization = _apply(module, pairs, skip, any_format=False)
        optimization.left_out[CHANNELS_LAST] = f"the module does not run with it ({type(error).__name__}: {error})"
        after = numbers(examples.run())
    try:
        optimization.errors = compare(reference, before, after)
    except VerificationError:
        if not optimization.changed[CHANNELS_LAST]:
            raise
        # Convolutions have other kernels for images in channels_last, whose error must not count as the rewrites'.
        other = _run_in_channels_last(module, examples)
        optimization = _apply(module, pairs, skip, any_format=True)
        optimization.errors = compare(reference, before, after, other)
    return optimization


def _run_in_channels_last(module: nn.Module, examples: Examples) -> list[Tensor]:
    """Run the unchanged module with only the format of its weights changed; restores it afterwards."""
    _restore(module)
    store_channels_last(module, ())
    try:
        return numbers(examples.run())
    finally:
        _restore(module)


def _check(module: Any, skip: Collection[str]) -> None:
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"optimize got a {type(module).__name__}; expected an nn.Module that runs Python code.")
    unknown = sorted({skip} if isinstance(skip, str) else {*skip} - REWRITES.keys())
    if unknown:
        raise ConfigError(
            f"optimize(skip=...) got {', '.join(unknown)}{did_you_mean(unknown, REWRITES)}; expected a collection of "
            f"{', '.join(REWRITES)}."
        )
    training = next((name for name, child in module.named_modules() if child.training), None)
    if training is not None:
        raise ConfigError(
            f"optimize got a module in training mode ({training or type(module).__name__}); it is for inference only. "
            "Call eval() on the whole module first."
        )


def _apply(module: nn.Module, pairs: Sequence[Pair], skip: Collection[str], *, any_format: bool) -> Optimization:
    """Rewrite the module, and keep the list of changes among its attributes."""
    shared = shared_modules(module)
    hindrances = {} if BATCH_NORM in skip else {pair: hindrance_in(module, pair, shared) for pair in pairs}
    usable = [pair for pair, why in hindrances.items() if not why]
    channels_last = any_format and CHANNELS_LAST not in skip
    layers = find_layers(module, skip, images=channels_last)
    folds = {pair: Fold(module, pair, channels_last) for pair in usable}
    owners: dict[nn.Module, list[Fold]] = collections.defaultdict(list)
    for pair, fold in folds.items():
        owners[module.get_submodule(pair.owner)].append(fold)
    blocks = find_blocks(module, owners) if channels_last and EPILOGUE not in skip else []
    operators = _operators(module, layers, block_trials(module, blocks))
    blocks = blocks if operators.triton else []  # torch has no kernel for more than one of a block's steps
    for block in blocks:
        for fold in owners.get(block, ()):
            fold.keeps_weight = keeps_weight(fold, block)
    copied = {fold.layer for fold in folds.values() if not fold.keeps_weight}
    stored = store_channels_last(module, copied) if channels_last else []
    stored += [pair.layer for pair, fold in folds.items() if fold.in_channels_last() and pair.layer not in stored]
    memory = FoldedMemory(list(folds.values()))  # of weights in their present memory
    optimization = Optimization(module, usable, stored, memory)
    optimization.left_out |= {str(pair): why for pair, why in hindrances.items() if why}
    # Inside the owners' forwards, which provide the folds of the modules that a block calls.
    install_fused(fused_forwards({block: block_layer(block) for block in blocks}, operators))
    install_folds(owners, memory)
    _fuse(module, {child: layer for child, layer in layers.items() if not is_changed(child)}, operators, optimization)
    names = {child: name for name, child in module.named_modules()}
    for attention, parts in [] if PROJECTIONS in skip else list(find_joined(module)):
        install_fused(fused_forwards(join(attention, parts), operators))
        optimization.changed.setdefault(PROJECTIONS, []).append(f"{names[attention]}.{'+'.join(parts)}")
    if blocks:
        optimization.changed[EPILOGUE] = [names[block] or type(block).__name__ for block in blocks]
        optimization._operators = operators.name
    if not any_format and CHANNELS_LAST not in skip and any(type(child) is nn.Conv2d for child in module.modules()):
        optimization.left_out[CHANNELS_LAST] = _UNKNOWN_FORMAT
    vars(module)[OPTIMIZED] = optimization
    return optimization


def _operators(module: nn.Module, layers: dict[nn.Module, Layer], trials: Sequence[KernelTrial]) -> Operators:
    """Return the operators for the module's device and dtype, after the trials of the operators that it will run."""
    weight = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    if weight is None or not (layers or trials):
        return Operators()
    return operators_of(layers, weight.device, weight.dtype, *trials)


def _fuse(module: nn.Module, layers: dict[nn.Module, Layer], operators: Operators, optimization: Optimization) -> None:
    """Run recognized layers on fused operators."""
    if not operators.triton:  # torch has no faster group norm
        layers = {child: layer for child, layer in layers.items() if layer.kind not in IMAGE_KINDS}
    if layers:
        optimization.changed |= names_by_kind(module, layers)
        optimization._operators = operators.name
        install_fused(fused_forwards(layers, operators))


def _once(pairs: Sequence[Pair]) -> list[Pair]:
    """Keep one pair of each layer: known ones come first, and their owner is the closest."""
    return list({pair.layer: pair for pair in reversed(pairs)}.values())[::-1]


def _restore(module: nn.Module) -> None:
    vars(module).pop(OPTIMIZED, None)
    uninstall(module)
    restore_layout(module)


def _restore_all(module: nn.Module) -> None:
    """Undo all changes of the module, and of modules in it.

    Raises:
        ConfigError: the module is part of a module that was optimized as a whole.
    """
    optimized = [child for child in module.modules() if vars(child).get(OPTIMIZED) is not None]
    for child in optimized:
        _restore(child)
    if is_installed(module):
        raise ConfigError(
            f"optimize got a {type(module).__name__} that is part of an optimized module; remove() that one's handle "
            "first, or leave this module to it."
        )
