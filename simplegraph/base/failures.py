"""Explain to a user why a capture failed: at which of their lines, why, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence

from simplegraph.base.errors import BreakError, CaptureError, EmulatorError, HostError
from simplegraph.base.user_code import (
    CalledLine,
    called_lines,
    checked_solver,
    dynamic_shape,
    failing_part,
    is_inside,
    is_printing,
    running_lines,
    users_line,
)

_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # (words any of which torch's or the emulator's message holds, cause, remedy); the first that fits is used
    (
        ("out of memory",),
        "the device ran out of memory.",
        "Capture fewer or smaller sizes (capture_sizes), or free memory first.",
    ),
    (
        ("unjoined", "streamcaptureunjoined"),
        "work was forked to another stream and not joined before the end.",
        "Call torch.cuda.current_stream().wait_stream(side) before the forward ends, and before every eager break.",
    ),
    (
        ("cpu tensor is pinned", "host memory that is not pinned"),
        "data was copied from or to host memory that is not pinned.",
        "Create it on the device, or once, outside the forward; read back in an @simplegraph.eager_break (PIECEWISE).",
    ),
    (
        ("pinned memory was allocated", "cudahostalloc"),
        "pinned memory was allocated, which synchronises.",
        "Allocate it once, outside the forward.",
    ),
    (
        ("compiled code ran",),
        "compiled code ran, whose kernels no emulator sees.",
        "On a GPU compiled kernels are captured as all others are. For the emulator, leave the compiler out.",
    ),
    (
        ("set_current_seed", "generator was reseeded"),
        "a random generator was reseeded.",
        "Seed outside the forward; a replay goes on where the last one stopped, as eager does.",
    ),
    (
        ("::current_seed", "cudageneratorimpl::get_state", "state of a random generator was read"),
        "the state of a random generator was read, which a capture does not permit.",
        "Pass preserve_rng_state=False to torch.utils.checkpoint; read the state outside the forward.",
    ),
    (
        ("offset increment outside graph capture", "cuda generator", "generator that the capture"),
        "a random generator was used that the graph does not know.",
        "Keep the generator as an attribute of the module, and seed outside the forward.",
    ),
    (
        ("beside the items of a mapping",),
        "what a mapping holds beside its items was read, which may change from call to call unnoticed.",
        "Read the items alone, or pass what is needed as an argument of its own.",
    ),
    (
        ("that an eager break returned",),
        "an object that an eager break returned was read, and each replay has another one.",
        "Read it in an eager break, or return what is read as tensors.",
    ),
    (
        ("nestedtensorimpl",),
        "torch made a nested tensor, whose sizes are read back to Python.",
        "Pass enable_nested_tensor=False to nn.TransformerEncoder.",
    ),
    (
        ("torchscript interpreter",),
        "a scripted function failed; TorchScript does not say why: most often a tensor was read back (if, .item()).",
        "Call the Python function that it was made from, or mark it with @simplegraph.eager_break (mode='PIECEWISE').",
    ),
)
# (part of a path, function or "", remedy): what torch's Python, or a library's, reads back below the user's line
_READERS = (
    ("torch/distributions/", "", "Pass validate_args=False to the distribution, which else looks at every value."),
    ("nn/modules/transformer.py", "_detect_is_causal_mask", "Pass is_causal=True, or False, beside the mask."),
    ("torch_geometric/", "", "Pass cached=True to the layer, where it has that and the edges stay the same."),
)
# Words of a read back to Python, and of a device that was waited for.
_READS = (
    *("read back", "stream is capturing", "during capture", "graph capture", "stream capture"),
    *("a capturing stream", "a capturing blocking stream"),
)
BREAK = "mark the function with @simplegraph.eager_break (mode='PIECEWISE')"
_FIX = f"Fix it, or {BREAK}."


def capture_error(error: Exception, label: str) -> CaptureError:
    """Make the error a user sees: what failed, at which of their lines, why, and what to do."""
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
    return CaptureError(f"capturing {label} failed{where}\n  {cause}\n  {remedy}", location=location, cause=cause)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it was raised from, or while handling, down to the first of them."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def release_locals(error: BaseException) -> None:
    """Clear the finished frames that an error's tracebacks hold: their tensors are memory of a capture that failed."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            # Before Python 3.13 the dict that `f_locals` made outlives the clearing; asked for again, it is emptied.
            _ = frame.f_locals


def release_frames(error: BaseException) -> None:
    """Let an error that is kept, and not raised again, go without tracebacks: callers' frames hold their arguments."""
    release_locals(error)
    for link in _chain(error):
        link.__traceback__ = None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _explained(error: BaseException, lines: Sequence[CalledLine]) -> tuple[str, str] | None:
    """Return an error's cause and remedy; None if it is not known."""
    if isinstance(error, BreakError):
        return str(error), _FIX
    if isinstance(error, HostError):
        return f"{error}.", _remedy_in_reach(error.remedy, lines)
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    for words, cause, remedy in _CAUSES:
        if any(word in text for word in words):
            return str(error) if isinstance(error, EmulatorError) else f"{cause} ({_said(error)})", remedy
    if not any(word in text for word in _READS):
        return None
    if "previous error" in text:  # whatever line it shows at is not the one
        cause = (
            "something before it was refused, and the error swallowed: a tensor read back, or the device synchronised"
        )
        return f"{cause} ({_said(error)}).", f"Look for an except that hides it; take it out, or {BREAK}."
    cause, remedy = _explained_read(error, lines)
    return cause, _remedy_in_reach(remedy, lines)


def _explained_read(error: BaseException, lines: Sequence[CalledLine]) -> tuple[str, str]:
    """Tell apart the ways in which values come to be read back."""
    emulated = isinstance(error, EmulatorError)
    said = "" if emulated else f" ({_said(error)})"
    if is_printing(lines):
        cause = "a tensor was made into text (print, an f-string, logging), and while captured it has no values"
        return f"{cause}{said}.", f"Print its shape, or print outside the forward; or {BREAK}."
    checked = checked_solver(lines)
    if checked is not None:
        cause = f"{checked} reads back from the device if it succeeded"
        return f"{cause}{said}.", f"Call {checked}_ex, which returns that in a tensor; or {BREAK}."
    operation = "a boolean mask" if "boolean mask" in str(error) else dynamic_shape(lines)
    if operation is None:
        cause = "a tensor was read back to Python while its value does not exist yet, or the device was synchronised"
        known = (remedy for path, name, remedy in _READERS if is_inside(lines, path, name))
        remedy = next(known, f"Test it on the device (torch.where), read it after the call, or {BREAK}.")
        return str(error) if emulated else f"{cause}{said}.", remedy
    cause = f"{operation} gives as many elements as the values say, and no shape in a graph depends on values{said}."
    remedy = "torch.where(mask, x, 0) for x[mask], and x = torch.where(mask, y, x) for x[mask] = y"
    if operation != "a boolean mask":
        remedy = "use operations of fixed shape, such as torch.where(mask, x, y) or topk"
    return cause, f"Keep the shape: {remedy}; or {BREAK}."


def _remedy_in_reach(remedy: str, lines: Sequence[CalledLine]) -> str:
    """Return a remedy that needs no edit of code which is not the user's."""
    if any(remedy == known for *_, known in _READERS):
        return remedy
    part = failing_part(lines)
    if part is not None and not getattr(part.root, "takes_settings", True):
        return "Such calls run as they do without graphs."
    if part is None or part.decorable:
        inner = next((line for line in reversed(lines) if line.is_users), None)
        own = inner is None or inner.is_own
        return remedy if own else remedy.replace("mark the function with", "call it in a function of your own, marked")
    ways = []
    if part.name:
        ways.append(f"run that part eagerly: simplegraph.break_at(model, \"{part.pattern}\") and mode='PIECEWISE'")
    if any(True for _ in part.root.children()):
        ways.append("give graphs to the parts that can have them: simplegraph.wrap_parts(model, inputs)")
    return f"The code is a library's; {'; or '.join(ways)}." if ways else remedy


def user_location(error: BaseException) -> str | None:
    """``file:line `source` `` of the innermost frame of an error that is neither torch's nor this library's."""
    return users_line(called_lines(error))


def current_user_location() -> str:
    """``file:line `source` `` of the running line that is neither torch's nor this library's."""
    return users_line(running_lines()) or "an unknown line"
