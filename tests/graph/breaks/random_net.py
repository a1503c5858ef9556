"""A net of random steps, many of them eager breaks, that can raise where it is told to."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools

import torch
from torch import nn
from torch.nn.functional import linear, pad, softsign

import simplegraph as sg
from simplegraph.base.nested import flatten

WIDTH = 6
LARGEST = 6
CALLS = 16
SIZES = [[6], [3, 6], [2, 4, 6], [1, 3, 6], [1, 2, 3, 4, 5, 6]]
EXPECTED = {sg.Reason.FIRST_CALL, sg.Reason.WARMUP, sg.Reason.OUTPUT_SHAPE_UNKNOWN, sg.Reason.BATCH_DIM_UNCONFIRMED}
EXPECTED.add(sg.Reason.SIZE_NOT_CAPTURED)


_library = torch.library.Library("sgrandom", "FRAGMENT")


_library.define("unsafe(Tensor a, Tensor b, Tensor(c!) out) -> ()", tags=[torch.Tag.cudagraph_unsafe])


_library.define("named(Tensor a, Tensor b) -> Tensor", tags=[torch.Tag.cudagraph_unsafe])


for _key in ("CPU", "CUDA"):
    _library.impl("unsafe", lambda a, b, out: (out.copy_(a * 0.5 - b * 0.25), None)[1], _key)
    _library.impl("named", lambda a, b: a * 0.25 + b * 0.5, _key)


class Trouble(Exception):
    """Raised on demand."""


class Fatal(BaseException):
    """The same, and no `Exception`."""


class World:
    """A plain object that a net's breaks read and write, live at every replay."""

    def __init__(self):
        self.scale = 1.0
        self.log = []
        self.seen = []
        self.trouble = None  # (how many notes later, the exception), in breaks
        self.stumble = None  # (before which step, the exception), in a segment's Python

    def begin(self, scale, trouble=None, stumble=None):
        self.log, self.seen = [], []
        self.scale, self.trouble, self.stumble = scale, trouble, stumble

    def note(self, what, kind):
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.log.append((what, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast))
        if self.trouble is not None and len(self.log) > self.trouble[0]:
            raise self.trouble[1]

    def step(self, index):
        if self.stumble is not None and index >= self.stumble[0]:
            _, error = self.stumble
            self.stumble = None
            raise error


def breaking(function):
    """An eager break that notes when it begins and ends, and in which modes; it raises there what it is told to."""

    @sg.eager_break
    @functools.wraps(function)
    def noted(net, *args, **kwargs):
        net.world.note("begin", net.count.device.type)
        result = function(*args, **kwargs)
        net.world.note("end", net.count.device.type)
        return result

    return noted


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Work:
    """A handle that one break makes and another one waits for."""

    def __init__(self, value):
        self.value = value


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, a, b):
        return softsign(a * self.weight - b), None


# What breaks return, and how the segment after them uses it.
RESULTS = {
    "a new tensor": (lambda a, b: softsign(a - b), lambda r, a, b: r),
    "its argument": (lambda a, b: a, lambda r, a, b: r),
    "its argument, written": (lambda a, b: a.mul_(0.5).add_(b, alpha=0.25), lambda r, a, b: r),
    "its arguments, swapped": (lambda a, b: (b, a), lambda r, a, b: r[0] * 0.5 - r[1] * 0.25),
    "a view": (lambda a, b: a[:, 1:4], lambda r, a, b: pad(r, (1, 2)) + b * 0.5),
    "a view, written": (lambda a, b: a[:, 1:4].mul_(0.5), lambda r, a, b: pad(r, (2, 1)) + a * 0.5),
    "a transposed view": (lambda a, b: a.t(), lambda r, a, b: r.t() * 0.5),
    "a transposed tensor": (lambda a, b: (a * 0.5).t(), lambda r, a, b: r.t()),
    "an expanded tensor": (lambda a, b: a[:, :1].clone().expand(-1, WIDTH), lambda r, a, b: r * 0.5 + b * 0.25),
    "indices": (lambda a, b: torch.arange(WIDTH, device=a.device).flip(0), lambda r, a, b: a[:, r]),
    "nested": (
        lambda a, b: {"a": [a * 0.5, None], "b": (b, True, 2), "none": a[:0] * 2},
        lambda r, a, b: r["a"][0] + r["b"][0] / (2 * r["b"][2]) if r["b"][1] else None,
    ),
    "a dataclass": (lambda a, b: Pair(a * 0.5, b), lambda r, a, b: r.left - r.right * 0.5),
    "None": (lambda a, b: None, lambda r, a, b: a * 0.5 if r is None else None),
    "True": (lambda a, b: True, lambda r, a, b: b * 0.5 if r else None),
    "an int": (lambda a, b: 2, lambda r, a, b: a * 0.25 * r),
}


def returning(function, use):
    broken = breaking(function)
    return lambda net, a, b: use(broken(net, a, b), a, b)


@breaking
def write(a, b, out):
    torch.sub(a * 0.5, b * 0.25, out=out)


@breaking
def write_columns(part):
    part.mul_(0.25)


@breaking
def count(net):
    net.count.add_(1)
    return net.count


@breaking
def scaled(a, world):
    return softsign(a * world.scale)


@breaking
def noisy(a):
    return a * 0.5 + torch.rand(WIDTH, device=a.device) * 0.25


@breaking
def look(a, world):
    world.seen.append(a.clone())


@breaking
def gather(parts, extra=None, *, named):
    total = parts[0] * 0.5 + named["pair"].left * named["factor"]
    return total - named["pair"].right * (extra[0][0] if extra else 0.25)


plain = breaking(lambda a, b: softsign(a + b))


outer = breaking(lambda net, a, b: plain(net, b, a) * 0.5)


start = breaking(lambda a: Work(a * 0.5))


finish = breaking(lambda work, b: work.value - b * 0.25)


def into_new_memory(net, a, b):
    out = torch.empty_like(a)
    write(net, a, b, out=out)
    return out


def into_a_buffer(net, a, b):
    out = net.scratch[: a.shape[0]]
    write(net, a, b, out)
    return out


def into_columns(net, a, b):
    write_columns(net, a[:, 2:5])
    return a + b * 0.125


def observed(net, a, b):
    look(net, a * 0.5, net.world)
    return b


def counted(net, a, b):
    return a * 0.5 + count(net, net) * 0.01


def gathered(net, a, b):
    return gather(net, [a, b], [(0.5, b * 2), None], named={"pair": Pair(b, a * 0.5), "factor": 0.25})


def by_operator(net, a, b):
    out = torch.empty_like(a)
    torch.ops.sgrandom.unsafe(a, b, out)
    return out


def looped(net, a, b):
    for part in (a, b):
        a = plain(net, a, part)
    return a


def overlapped(net, a, b):
    work = start(net, a)
    other = softsign(b) * 0.5
    return finish(net, work, other)


def around(*contexts):
    """A break in a block that changes modes, and what is computed in there, as a tensor of the modes around."""

    def run(net, a, b):
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context(a.device.type))
            exact = linear(torch.ones_like(a), net.eighths)  # of another dtype under autocast, and exact in both
            result = plain(net, a, exact.float() * 0.125)
        return result + b * 0.25

    return run


def autocast(kind):
    return torch.autocast(kind, dtype=torch.bfloat16)


# Each takes the net and two values made before it, and makes another one.
BREAKS = {
    **{f"returns {name}": returning(*pair) for name, pair in RESULTS.items()},
    "into new memory": into_new_memory,
    "into a buffer": into_a_buffer,
    "into columns": into_columns,
    "observed": observed,
    "counted": counted,
    "gathered": gathered,
    "scaled": lambda net, a, b: scaled(net, a, net.world) + b * 0.125,
    "noisy": lambda net, a, b: noisy(net, a),
    "nested": lambda net, a, b: outer(net, net, a, b),
    "looped": looped,
    "overlapped": overlapped,
    "a submodule": lambda net, a, b: net.inner(a, b)[0],
    "an operator": by_operator,
    "a named operator": lambda net, a, b: torch.ops.sgrandom.named(a, b),
    "no_grad": around(lambda kind: torch.no_grad()),
    "enable_grad": around(lambda kind: torch.enable_grad()),
    "inference_mode": around(lambda kind: torch.inference_mode()),
    "out of inference_mode": around(lambda kind: torch.inference_mode(False)),
    "no_grad out of inference_mode": around(lambda kind: torch.inference_mode(False), lambda kind: torch.no_grad()),
    "autocast": around(autocast),
    "inference_mode with autocast": around(lambda kind: torch.inference_mode(), autocast),
}


SEVERAL = {"looped": 2, "overlapped": 2}  # breaks in one step
SEGMENTS = {
    # Summed in float64, so that a row of a padded batch is rounded as it is without padding.
    "linear": lambda net, a, b: softsign(net.linear(a.double()).float()),
    "norm": lambda net, a, b: a / (1 + a.square().sum(-1, keepdim=True)),
    "in place": lambda net, a, b: a.mul_(0.5).sub_(b, alpha=0.25),
    "through a view": lambda net, a, b: a[:, ::2].mul_(0.5).sum(-1, keepdim=True) * 0.25 + b * 0.5,
    "noise": lambda net, a, b: b * 0.5 + torch.rand(WIDTH, device=a.device) * 0.25,
    "total": lambda net, a, b: a * 0.5 + net.total.mul_(0.5).add_(1) * 0.125,
}


STEPS = BREAKS | SEGMENTS
FORMS = {
    "tensor": lambda x, total, values: total,
    "last": lambda x, total, values: values[-1],
    "tuple": lambda x, total, values: (total, values[-1], values[len(values) // 2]),
    "dict": lambda x, total, values: {"total": total, "list": values[-3:], "x": x, "n": None},
}


class Net(nn.Module):
    """Steps by name, each with the places of the two values that it takes."""

    def __init__(self, steps, form):
        super().__init__()
        self.steps, self.form = tuple(steps), form
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inner = Inner()
        self.register_buffer("eighths", torch.randint(-8, 9, (WIDTH, WIDTH)) / 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("scratch", torch.zeros(LARGEST, WIDTH), persistent=False)  # padding rows differ
        self.world = World()
        self.requires_grad_(False)
        sg.break_at(self, "inner")

    @property
    def num_breaks(self):
        return sum(SEVERAL.get(name, 1) for name, _, _ in self.steps if name in BREAKS)

    def forward(self, x):
        values = [x]
        for index, (name, first, second) in enumerate(self.steps):
            self.world.step(index)
            values.append(STEPS[name](self, values[first], values[second]))
        total = sum(value * (0.5 + index) for index, value in enumerate(values))
        return FORMS[self.form](x, total, values)


def random_steps(rng, num_breaks):
    """Breaks in random order and company; their arguments are mostly recent, sometimes much older values."""
    names = []
    for name in rng.choices(sorted(BREAKS), k=num_breaks):
        names += [*rng.choices(sorted(SEGMENTS), k=rng.choice([0, 0, 1, 2])), name]
    names += rng.choices(sorted(SEGMENTS), k=rng.choice([0, 1, 3]) if names else 3)
    recent = lambda index: rng.randint(max(0, index - 3) if rng.random() < 0.7 else 0, index)  # noqa: E731
    return [(name, recent(index), recent(index)) for index, name in enumerate(names)]


class Churn:
    """Allocates and frees tensors full of garbage, and keeps some of them for a while."""

    def __init__(self, rng, device):
        self.rng, self.device = rng, device
        self.kept = collections.deque(maxlen=12)

    def __call__(self):
        sizes = self.rng.choices([1, 6, 24, 36, 64, 300, 4000], k=10)
        made = [torch.full((size,), self.rng.choice([float("nan"), 1e30, -7.0]), device=self.device) for size in sizes]
        made.append(torch.full((self.rng.randint(1, LARGEST), WIDTH), float("nan"), device=self.device))
        self.kept.extend(self.rng.sample(made, 3))


def same(actual, expected):
    """Equal in every bit on the emulator, which runs eager's own kernels; in what they round on a GPU."""
    (leaves, spec), (others, other_spec) = flatten(actual), flatten(expected)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
        elif other.is_cuda:
            torch.testing.assert_close(one, other)
        else:
            assert one.shape == other.shape
            assert torch.equal(one, other)
