"""Explain a failed capture to the user: the line, the cause, and the remedy."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.errors import BreakError, CaptureError, EmulatorError, HostError

# Operations whose results' shapes depend on values.
_DYNAMIC = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
# Functions of torch.linalg that check their success on the host; a variant with the suffix _ex does not.
_CHECKED = {"solve", "inv", "cholesky", "lu_factor", "ldl_factor"}
# Functions that wait for the device if they are passed a batch. Solving two triangular systems does not wait.
_TRIANGULAR = {"cholesky_solve", "cholesky_inverse"}
_COMPARISONS = {"isnan", "isinf", "isfinite", "isin", "eq", "ne", "lt", "le", "gt", "ge", "bool", "logical_not"}
_OF_MASKS = (ast.Compare, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert)
_MASKS = (torch.bool, torch.uint8)
_CALLS = {"__call__", "_call_impl"}  # methods that run a module's forward
_BACKWARDS = {"backward", "grad", "_engine_run_backward"}  # functions of torch.autograd that run one
_TEXT = {"__repr__", "__str__", "__format__"}  # a tensor's methods that print, str and f-strings call


class CalledLine(NamedTuple):
    """One line of a traceback, and its frame."""

    frame: FrameType
    summary: traceback.FrameSummary

    @property
    def is_users(self) -> bool:
        """True if the line is neither in torch nor in this library."""
        return _is_users(self.summary.filename)

    @property
    def is_own(self) -> bool:
        """True if the line is the user's own, and in no installed package, so that its function can be decorated."""
        return is_own(self.summary.filename)

    @property
    def module(self) -> nn.Module | None:
        """The module whose method runs the line; None if there is none."""
        instance = self.frame.f_locals.get("self")
        return instance if isinstance(instance, nn.Module) else None

    def __str__(self) -> str:
        return _described(self.summary)


def called_lines(*errors: BaseException) -> list[CalledLine]:
    """Return the lines of the tracebacks of errors, outermost first; each error was raised while handling the next."""
    lines: list[CalledLine] = []
    for error in errors:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        lines += map(CalledLine, frames, traceback.extract_tb(error.__traceback__))
    return lines


def users_line(lines: Sequence[CalledLine]) -> str | None:
    """Describe the innermost user's line; if it is in an installed package, also the user's own line that called it."""
    users = [line for line in lines if line.is_users]
    own_line = next((line for line in reversed(users) if line.is_own), None)
    if not users or own_line in (None, users[-1]):
        return str(users[-1]) if users else None
    return f"{users[-1]}, called at {own_line}"


def running_lines() -> list[CalledLine]:
    """Return the lines of the current stack, outermost first."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return [CalledLine(*pair) for pair in zip(reversed(frames), traceback.extract_stack(frames[0]), strict=True)]


def running_line() -> tuple[str, int] | None:
    """Return file and number of the innermost user's line on the stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def described_line(filename: str, number: int) -> str:
    """Describe a line: its file, its number and its text."""
    return _described(traceback.FrameSummary(filename, number, ""))


def is_printing(lines: Sequence[CalledLine]) -> bool:
    """True if formatting a tensor as text failed."""
    inside = (
        line.summary
        for line in lines[_innermost_users(lines) + 1 :]
        if os.path.abspath(line.summary.filename).startswith(_TORCH)
    )
    return any(line.name in _TEXT or line.filename.endswith("_tensor_str.py") for line in inside)


def is_inside(lines: Sequence[CalledLine], path: str, name: str) -> bool:
    """True if a line below the user's own is in a file of this path, and in this function if a name is given."""
    innermost_own = max((index for index, line in enumerate(lines) if line.is_own), default=-1)
    inside = (line.summary for line in lines[innermost_own + 1 :] if path in line.summary.filename.replace(os.sep, "/"))
    return any(name in ("", line.name) for line in inside)


def checked_solver(lines: Sequence[CalledLine]) -> str | None:
    """Name the function of torch.linalg in the failing line that reads back from the device; None if there is none."""
    index = _innermost_users(lines)
    for node in _expressions(lines[index].summary) if index >= 0 else ():
        if isinstance(node, ast.Call) and _name(node.func) in _CHECKED and "linalg" in ast.unparse(node.func):
            return f"torch.linalg.{_name(node.func)}"
        if isinstance(node, ast.Call) and _name(node.func) == "inverse":  # of torch, or a tensor's own
            return "torch.linalg.inv" if not node.args or ast.unparse(node.func) == "torch.inverse" else None
    return None


def triangular_solver(lines: Sequence[CalledLine]) -> str | None:
    """Name the function in the failing line that two triangular solves can replace; None if there is none."""
    index = _innermost_users(lines)
    calls = (node for node in _expressions(lines[index].summary) if isinstance(node, ast.Call)) if index >= 0 else ()
    return next((f"torch.{_name(call.func)}" for call in calls if _name(call.func) in _TRIANGULAR), None)


def dynamic_shape(lines: Sequence[CalledLine]) -> str | None:
    """Name the operation in the failing line whose result has a shape that depends on values; None if there is none."""
    index = _innermost_users(lines)
    for node in _expressions(lines[index].summary) if index >= 0 else ():
        if isinstance(node, ast.Call) and _name(node.func) in _DYNAMIC:
            return _name(node.func)
        if isinstance(node, ast.Call) and _name(node.func) == "where" and len(node.args) == 1:
            return "torch.where of one argument"
        if isinstance(node, ast.Subscript) and _is_mask(node.slice, lines[index].frame):
            return "a boolean mask"
    return None


class FailingPart(NamedTuple):
    """The submodule that a failing line belongs to.

    Attributes:
        root: the outermost module that was called; for a function, the module that it reaches.
        name: the dotted name of the submodule in the root; empty for the root itself.
        decorable: True if the user's own code ran inside the submodule.
        holder: the name of the root as a child of a wrapped function; empty if a module was wrapped.
        method: the failing method of an inner submodule that was not called itself; else empty.
    """

    root: nn.Module
    name: str
    decorable: bool
    holder: str = ""
    method: str = ""

    @property
    def model(self) -> str:
        """The root's name in the user's code."""
        return self.holder.rstrip("'") or "model"

    @property
    def whole_pattern(self) -> str:
        """The part's pattern, starting at the module that was wrapped."""
        return ".".join(filter(None, (self.holder, self.name and self.pattern)))

    @property
    def pattern(self) -> str:
        """The part's pattern for `break_at`, in which a layer of a list stands for all its layers."""
        steps, named = self.name.split("."), dict(self.root.named_modules(remove_duplicate=False))
        holders = [named.get(".".join(steps[:index])) for index in range(len(steps))]
        return ".".join("*" if isinstance(it, nn.ModuleList) else step for it, step in zip(holders, steps, strict=True))


def failing_part(lines: Sequence[CalledLine]) -> FailingPart | None:
    """Return the innermost submodule whose call failed, at which `break_at` can break; None if there is none."""
    modules = [(index, line.module) for index, line in enumerate(lines) if line.module is not None]
    if not modules:
        return None
    root: Any = modules[0][1]
    is_function = getattr(root, "is_function", False)
    reached = {id(module): name for name, module in root.named_children()} if is_function else {}
    root = next((module for _, module in modules if id(module) in reached), root)
    parts = root.named_modules()
    names = {id(module): name for name, module in parts if not isinstance(module, torch.jit.ScriptModule)}
    called = {id(root), *(id(line.module) for line in lines if line.summary.name in _CALLS)}
    named = [(index, names[id(module)], id(module) in called) for index, module in modules if id(module) in names]
    name = next(name for _, name, is_called in reversed(named) if is_called)
    start = next(index for index, part, _ in named if part == name)
    innermost = named[-1][1]
    method = "" if innermost == name else next(lines[index].summary.name for index, it, _ in named if it == innermost)
    generated = (line.summary.filename.startswith("<") for line in lines[start:])
    decorable = any(generated) or any(line.is_own for line in lines[start:])
    return FailingPart(root, name, decorable, reached.get(id(root), ""), method and f"{innermost}.{method}")


def _before_backward(lines: Sequence[CalledLine]) -> Sequence[CalledLine]:
    """Return the lines up to the outermost backward or torch.func transform; all lines if there is none."""
    for index, line in enumerate(lines):
        path = line.summary.filename.replace(os.sep, "/")
        if "torch/_functorch/" in path or ("torch/autograd/" in path and line.summary.name in _BACKWARDS):
            return lines[:index]
    return lines


def _innermost_users(lines: Sequence[CalledLine]) -> int:
    return max((index for index, line in enumerate(lines) if line.is_users), default=-1)


def _expressions(line: traceback.FrameSummary) -> Iterator[ast.AST]:
    """Yield the expression that failed; before Python 3.11, all expressions of its line."""
    source = linecache.getline(line.filename, line.lineno or 0)
    start, end = getattr(line, "colno", None), getattr(line, "end_colno", None)
    whole = start is None or getattr(line, "end_lineno", None) != line.lineno
    text = source.strip() if whole else source.encode()[start:end].decode(errors="replace")
    for complete in (text, f"{text} pass"):
        with contextlib.suppress(SyntaxError):
            body = ast.parse(complete).body
            yield from itertools.chain(*map(ast.walk, body)) if whole else (vars(it).get("value", it) for it in body)
            return


def _is_mask(index: ast.expr, frame: FrameType) -> bool:
    """True if an index consists of boolean masks, by its text or by the present values."""
    for node in ast.walk(index):
        value = _value(node, frame)
        compares = isinstance(node, ast.Call) and _name(node.func) in _COMPARISONS
        if compares or isinstance(node, _OF_MASKS) or (isinstance(value, Tensor) and value.dtype in _MASKS):
            return True
    return False


def _value(node: ast.AST, frame: FrameType) -> Any:
    """Return the value of a name, or of an attribute that can be read without running code."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute):
        return None
    attributes = getattr(_value(node.value, frame), "__dict__", {})
    return attributes.get(node.attr, attributes.get("_buffers", {}).get(node.attr))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TYPED_IN = ("<stdin>", "<ipython-input", "<python-input")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _described(line: traceback.FrameSummary) -> str:
    source = linecache.getline(line.filename, line.lineno or 0).strip()
    typed_in = line.filename.startswith("<")
    path = _package_path(line.filename) or (line.filename if typed_in else os.path.relpath(line.filename))
    return f"{path}:{line.lineno} `{source}`"


def is_own(filename: str) -> bool:
    """True for a file of the user's own, in no installed package."""
    return _is_users(filename) and _package_path(filename) is None


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = os.path.abspath(filename)
    if path.startswith(_STDLIB) and _package_path(path) is None:
        return False
    return not path.startswith((_OWN, _TORCH))


def _package_path(filename: str) -> str | None:
    """Return a file's path in the folder of installed packages; None for other files."""
    for folder in ("site-packages", "dist-packages"):
        _, separator, path = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if separator:
            return path
    return None


class Remedy(NamedTuple):
    """The remedy of a failure.

    Attributes:
        text: the change of the code, as a sentence; empty if only a break helps.
        breaks: True if an eager break around the line helps as well.
        break_scope: the code that the break must contain, as the end of the sentence.
    """

    text: str
    breaks: bool = False
    break_scope: str = ""


_CAUSES: tuple[tuple[tuple[str, ...], str, Remedy], ...] = (
    # (words, cause, remedy): the first entry is used of which torch's or the emulator's message contains a word
    (
        ("out of memory",),
        "the device ran out of memory.",
        Remedy("Capture fewer or smaller sizes (capture_sizes), or free memory first."),
    ),
    (
        ("unjoined", "streamcaptureunjoined"),
        "work was forked to another stream and not joined before the end.",
        Remedy(
            "Call torch.cuda.current_stream().wait_stream(side) before the forward ends, and before every eager break."
        ),
    ),
    (
        ("cpu tensor is pinned", "host memory that is not pinned"),
        "data was copied from or to host memory that is not pinned.",
        Remedy("Create it on the device, or once, outside the forward; read it back after the call.", breaks=True),
    ),
    (
        ("pinned memory was allocated", "cudahostalloc"),
        "pinned memory was allocated, which synchronises.",
        Remedy("Allocate it once, outside the forward."),
    ),
    (
        ("compiled code ran",),
        "compiled code ran, whose kernels no emulator sees.",
        Remedy("On a GPU compiled kernels are captured as all others are. For the emulator, leave the compiler out."),
    ),
    (
        ("set_current_seed", "generator was reseeded"),
        "a random generator was reseeded.",
        Remedy("Seed outside the forward; a replay goes on where the last one stopped, as eager does."),
    ),
    (
        ("::current_seed", "cudageneratorimpl::get_state", "state of a random generator was read"),
        "the state of a random generator was read, which a capture does not permit.",
        Remedy("Pass preserve_rng_state=False to torch.utils.checkpoint; read the state outside the forward."),
    ),
    (
        ("offset increment outside graph capture", "cuda generator", "generator that the capture"),
        "a random generator was used that the graph does not know.",
        Remedy("Keep the generator as an attribute of the module, and seed outside the forward."),
    ),
    (
        ("beside the items of a mapping",),
        "what a mapping holds beside its items was read, which may change from call to call unnoticed.",
        Remedy("Read the items alone, or pass what is needed as an argument of its own."),
    ),
    (
        ("that an eager break returned",),
        "an object that an eager break returned was read, and each replay has another one.",
        Remedy("Read it in an eager break, or return what is read as tensors."),
    ),
    (
        ("nestedtensorimpl",),
        "torch made a nested tensor, whose sizes are read back to Python.",
        Remedy("Pass enable_nested_tensor=False to nn.TransformerEncoder."),
    ),
    (
        ("torchscript interpreter",),
        "a scripted function failed; TorchScript does not say why: most often a tensor was read back (if, .item()).",
        Remedy("Call the Python function it was made of.", breaks=True),
    ),
)
# (part of a path, function or "", remedy) of Python code of torch or a library that reads back below the user's line
_CHECKS = (
    "Call torch.distributions.Distribution.set_default_validate_args(False) once, or pass validate_args=False to the "
    "distribution and to all that it makes: they look at every value."
)
_COUNTS = (
    "Pass the number of nodes or graphs to the call (dim_size=, size=, batch_size= or num_nodes=, whichever it takes): "
    "it is read from the largest index otherwise."
)
_READERS = (
    ("torch/distributions/distribution.py", "__init__", _CHECKS),
    ("torch/distributions/distribution.py", "_validate_sample", _CHECKS),
    ("nn/modules/transformer.py", "_detect_is_causal_mask", "Pass is_causal=True, or False, beside the mask."),
    (
        "torch_geometric/utils/loop.py",
        "",
        "Pass cached=True to the layer if its edges stay the same, or add_self_loops=False and edges that have their "
        "loops, where it takes these.",
    ),
    *(
        (f"torch_geometric/{path}", "", _COUNTS)
        for path in ("utils/_scatter", "utils/num_nodes", "nn/aggr/", "nn/norm/")
    ),
)
# Words in messages about a read back to Python, or a wait for the device.
_READS = (
    *("read back", "stream is capturing", "during capture", "graph capture", "stream capture"),
    *("a capturing stream", "a capturing blocking stream"),
)
_BREAK = "mark the function with @simplegraph.eager_break, and set mode='PIECEWISE'"
_MODE = "set mode='PIECEWISE', in which the function that is marked with @simplegraph.eager_break runs eagerly"
_FIX = Remedy("Fix it.", breaks=True)
_HOLD_MORE = Remedy(
    "Let the break hold more: mark a function around it, or break at the module around it (simplegraph.break_at)."
)
_EAGERLY = "Such calls run as they do without graphs."
MODE_OUTSIDE = "Call train() and eval() outside, before the call: a replay sets no mode."
OPTIMIZER_OUTSIDE = "simplegraph.wrap(model, training=True) leaves the optimizer out of graphs"


def capture_error(error: Exception, label: str, *, trains: bool = False) -> CaptureError:
    """Make the error that the user sees: the failed capture, the user's line, the cause, and the remedy.

    Args:
        error: the exception that a run raised.
        label: the name of the capture in messages.
        trains: True for a training step, or a forward or backward for training, whose graph can contain no break.
    """
    chain = list(_chain(error))
    cause = _said(error) if len(chain) == 1 else f"{_said(error)} (caused by {_said(chain[-1])})"
    lines, remedy = called_lines(*chain), _FIX
    for end in range(len(chain), 0, -1):
        explained = _explained(chain[end - 1], called_lines(*chain[:end]))
        if explained is not None:
            lines, (cause, remedy) = called_lines(*chain[:end]), explained
            break
    location = users_line(lines)
    where = f" at {location}" if location else ""
    shown = () if cause.startswith(_SWALLOWED) else lines
    part, advice = failing_part(_before_backward(shown)), remedy_in_reach(remedy, shown, trains=trains)
    message = f"capturing {label} failed{where}\n  {cause}\n  {advice}"
    return CaptureError(message, location=location, cause=cause, part="" if part is None else part.whole_pattern)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then the errors that it was raised from or while handling, down to the first one."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def release_locals(error: BaseException) -> None:
    """Clear the finished frames of an error's tracebacks, whose tensors hold memory of the failed capture."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            # Before Python 3.13 the dict of `f_locals` is not cleared with the frame, but by reading it again.
            _ = frame.f_locals


def release_frames(error: BaseException) -> None:
    """Remove the tracebacks of a kept error that is not raised again: its frames hold the callers' arguments."""
    release_locals(error)
    for link in _chain(error):
        link.__traceback__ = None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _explained(error: BaseException, lines: Sequence[CalledLine]) -> tuple[str, Remedy] | None:
    """Return an error's cause and remedy; None if the cause is unknown."""
    if isinstance(error, BreakError):
        return str(error), _HOLD_MORE
    if isinstance(error, HostError):
        return f"{error}.", Remedy(error.remedy, error.breaks)
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    for words, cause, remedy in _CAUSES:
        if any(word in text for word in words):
            return str(error) if isinstance(error, EmulatorError) else f"{cause} ({_said(error)})", remedy
    if not any(word in text for word in _READS):
        return None
    if "previous error" in text:  # the error is reported at another line than the one that caused it
        return f"{_SWALLOWED} ({_said(error)}).", Remedy("Look for an except that hides it; take it out.", breaks=True)
    return _explained_read(error, lines)


_SWALLOWED = "something before it was refused, and the error swallowed: a tensor read back, or the device synchronised"


def _explained_read(error: BaseException, lines: Sequence[CalledLine]) -> tuple[str, Remedy]:
    """Return the cause and the remedy of a failure by a value that was read back."""
    emulated = isinstance(error, EmulatorError)
    said = "" if emulated else f" ({_said(error)})"
    if is_printing(lines):
        cause = "a tensor was made into text (print, an f-string, logging), and while captured it has no values"
        return f"{cause}{said}.", Remedy("Print its shape, or print outside the forward.", breaks=True)
    checked = checked_solver(lines)
    if checked is not None:
        cause = f"{checked} reads back from the device if it succeeded"
        return f"{cause}{said}.", Remedy(f"Call {checked}_ex, which returns that in a tensor.", breaks=True)
    solver = triangular_solver(lines)
    if solver is not None:
        cause = f"{solver} of a batch waits for the device"
        return f"{cause}{said}.", Remedy("Solve by torch.linalg.solve_triangular, twice, in its place.", breaks=True)
    library_remedy = next((Remedy(remedy) for path, name, remedy in _READERS if is_inside(lines, path, name)), None)
    operation = "a boolean mask" if "boolean mask" in str(error) else dynamic_shape(lines)
    if operation is None:
        cause = "Python read back the value of a tensor, which has none while it is captured, or waited for the device"
        remedy = library_remedy or Remedy(
            "Test it on the device (torch.where), or return the tensor and read it after the call.", breaks=True
        )
        return str(error) if emulated else f"{cause}{said}.", remedy
    cause = f"{operation} gives as many elements as the values say, and no shape in a graph depends on values{said}."
    shapes = "torch.where(mask, x, 0) for x[mask], and x = torch.where(mask, y, x) for x[mask] = y"
    if operation != "a boolean mask":
        shapes = "use operations of fixed shape, such as torch.where(mask, x, y) or topk"
    break_scope = ": one that holds everything up to where shapes are fixed again"
    return cause, library_remedy or Remedy(f"Keep the shape: {shapes}.", breaks=True, break_scope=break_scope)


def remedy_in_reach(remedy: Remedy, lines: Sequence[CalledLine] = (), *, trains: bool = False) -> str:
    """Return a remedy without edits of other people's code, including an eager break if it helps."""
    if not remedy.breaks:
        return remedy.text
    outside = _before_backward(lines)
    if any(isinstance(line.frame.f_locals.get("self"), Optimizer) and not line.is_own for line in outside):
        return f"The optimizer's code is a library's; {OPTIMIZER_OUTSIDE}."
    part = failing_part(outside)
    if part is not None and not getattr(part.root, "takes_settings", True):
        return _EAGERLY
    if part is not None and not part.decorable:
        return _for_libraries(part, trains=trains) or remedy.text or _EAGERLY
    if trains:
        return remedy.text or _EAGERLY
    inner = next((line for line in reversed(outside) if line.is_users), None)
    advice = _BREAK
    if _in_plain_break(outside):
        return f"{remedy.text[:-1]}; or {_MODE}." if remedy.text else f"{_MODE[0].upper()}{_MODE[1:]}."
    if inner is not None and not inner.is_own:
        advice = _BREAK.replace("mark the function with", "call it in a function of your own, marked")
    elif len(outside) < len(lines):
        advice = _BREAK.replace("function", "function that runs the whole backward, or calls torch.func,")
    both = f"{remedy.text[:-1]}; or {advice}" if remedy.text else f"{advice[0].upper()}{advice[1:]}"
    return f"{both}{remedy.break_scope}."


def _in_plain_break(lines: Sequence[CalledLine]) -> bool:
    """True if a function that is marked as an eager break was called as a plain function, as in mode FULL."""
    return any(
        line.summary.name == "breaking" and line.summary.filename.startswith(_OWN) and inner.is_users
        for line, inner in itertools.pairwise(lines)
    )


def remedy_for_library(root: nn.Module, place: str, *, trains: bool = False) -> str:
    """Return the remedy for a place that a library's module sets; empty if the module is torch's or the user's own.

    Args:
        root: the module that was wrapped.
        place: the place's dotted name in it, such as "encoder.0.state".
        trains: see `capture_error`.
    """
    name, modules = place.rpartition(".")[0], dict(root.named_modules())
    while name not in modules:
        name = name.rpartition(".")[0]
    path = getattr(sys.modules.get(type(modules[name]).__module__), "__file__", None) or ""
    if path.startswith(_TORCH) or _package_path(path) is None:
        return ""
    holder, _, inner = name.partition(".") if getattr(root, "is_function", False) else ("", "", name)
    return _for_libraries(FailingPart(modules[holder], inner, decorable=False, holder=holder), trains=trains)


def _for_libraries(part: FailingPart, *, trains: bool) -> str:
    """Return the remedy for a failure inside a library's module; empty if there is none."""
    ways, model = [], part.model
    has_parts = any(True for _ in part.root.children())
    if trains and has_parts:
        ways.append("give graphs to the parts that can have them: simplegraph.wrap(part, training=True) in its place")
    elif part.name and not trains:
        ways.append(
            f"run that part eagerly: simplegraph.break_at({model}, \"{part.pattern}\") and mode='PIECEWISE' "
            "(simplegraph.check says if that is enough, or which parts are)"
        )
    elif part.holder and not trains:
        marked = "a function of your own, marked @simplegraph.eager_break"
        ways.append(f"call {model} in {marked}, and set mode='PIECEWISE'")
    if has_parts and not trains:
        ways.append(f"give graphs to the parts that can have them: simplegraph.wrap_parts({model}, inputs)")
    whose = "The code is a library's"
    if part.method and not part.name:
        whose += f", and {part.method} is no call of a module, at which simplegraph.break_at could break"
    return f"{whose}; {'; or '.join(ways)}." if ways else ""


def user_location(error: BaseException) -> str | None:
    """``file:line `source` `` of the innermost frame of an error that is neither torch's nor this library's."""
    return users_line(called_lines(error))


def current_user_location() -> str:
    """``file:line `source` `` of the running line that is neither torch's nor this library's."""
    return users_line(running_lines()) or "an unknown line"
