"""The pieces that random programs are made of: source text, so that a failing program is its own report.

`$` in a piece stands for a number that is different for every use of it. A forward has x and y (rows of W features; y
may be None), box (a container or object, or None) and h, the value computed so far.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a forward.

    Attributes:
        forward: lines of it; setup: lines of ``__init__``.
        promise: what the library must do about it; empty for what graphs do by themselves.
    """

    forward: str
    setup: str = ""
    promise: str = ""


# ruff: noqa: E501  the text of a piece is one line where the program's is

# What can be captured as it is.
PLAIN = {
    "linear": Piece("h = self.l$(h)", "self.l$ = nn.Linear(W, W)"),
    "tanh": Piece("h = torch.tanh(h)"),
    "norm": Piece("h = self.n$(h)", "self.n$ = nn.LayerNorm(W)"),
    "batch norm": Piece("h = self.b$(h)", "self.b$ = nn.BatchNorm1d(W)"),
    "dropout": Piece("h = self.d$(h)", "self.d$ = nn.Dropout(0.3)"),
    "flip": Piece("h = h.flip(-1)"),
    "relu": Piece("h = self.a$(h)", "self.a$ = nn.ReLU()"),
    "softmax": Piece("h = h.softmax(-1)"),
    "residual": Piece("h = h + torch.tanh(self.i$(h))", "self.i$ = nn.Linear(W, W, bias=False)"),
    "second": Piece("h = h if y is None else h + 0.5 * y"),
    "plain tensor": Piece("h = h + self.t$", "self.register_buffer('t$', torch.randn(W), persistent=False)"),
    "listed": Piece("h = self.hidden$[0](h)", "self.hidden$ = [nn.Linear(W, W).to(DEVICE).requires_grad_(False)]"),
    "size": Piece("h = h / (1 + self.scale) if self.scale else h"),
    "counter": Piece("self.c$ += 1\nh = h + self.c$", "self.register_buffer('c$', torch.zeros(()))"),
    "running": Piece(
        "self.r$.mul_(0.5).add_(self.w$(h[:1]).tanh()[0])\nh = h * 0.5 + self.r$",
        "self.register_buffer('r$', torch.zeros(W)); self.w$ = nn.Linear(W, W)",
    ),
    "noise": Piece("h = h + torch.rand(W, device=h.device)"),
    "own noise": Piece(
        "h = h + torch.rand(W, device=h.device, generator=self.g$)",
        "self.g$ = torch.Generator(DEVICE).manual_seed(3)",
    ),
    "listed noise": Piece(
        "h = h + torch.rand(W, device=h.device, generator=self.g$[0].value)",
        "self.g$ = [Box(torch.Generator(DEVICE).manual_seed(3))]",
    ),
    "no grad": Piece("with torch.no_grad():\n    h = h * 2"),
    "autocast off": Piece(
        "with torch.autocast(h.device.type, enabled=False):\n    h = self.f$(h.float())", "self.f$ = nn.Linear(W, W)"
    ),
    "break": Piece("h = self.broken$(h)", "self.broken$ = sg.eager_break(lambda h: torch.tanh(h) * 0.5)"),
    "noisy break": Piece(
        "h = self.broken$(h)", "self.broken$ = sg.eager_break(lambda h: h + torch.rand(W, device=h.device))"
    ),
    "break into a buffer": Piece("o$ = torch.empty_like(h)\nattend(h, o$)\nh = o$"),
    "breaks into one buffer": Piece(
        "o$ = torch.zeros_like(h)\nattend(h, o$)\nattend(o$ + h, out=o$)\nh = o$ * 0.5 + h"
    ),
    "break into columns": Piece("o$ = h.new_empty(len(h), 2 * W)\nattend(h, o$[:, :W])\nh = o$[:, :W] * 0.5"),
    "break into listed buffers": Piece(
        "o$ = [torch.empty_like(h) for _ in range(2)]\nattend(h, *o$)\nh = o$[0] + o$[1]"
    ),
    "break into a held buffer": Piece(
        "attend(h[:1], self.o$)\nh = h + self.o$", "self.register_buffer('o$', torch.zeros(1, W))"
    ),
    "folded": Piece(
        "h = self.f$(h)",
        "self.f$ = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W)); self.f$[1].running_var.uniform_(0.5, 2)",
    ),
}

# Python-visible effects: refused, or as eager's.
STATE = {
    "python counter": Piece("self.k$ += 1\nh = h + self.k$ % 7", "self.k$ = 0", "python state"),
    "quiet counter": Piece("self.k$ += 1", "self.k$ = 0", "python state"),
    "list of numbers": Piece("self.s$.append(len(self.s$))", "self.s$ = []", "python state"),
    "dict of numbers": Piece("self.s$['seen'] = self.s$.get('seen', 0) + 1", "self.s$ = {}", "python state"),
    "object's number": Piece("self.s$.value += 1", "self.s$ = Box(0)", "python state"),
    "flag": Piece(
        "h = h * (1 if self.flag$ else 2)\nself.flag$ = not self.flag$", "self.flag$ = False", "python state"
    ),
    "own random": Piece(
        "h = h * (1 + self.r$.random())",
        "self.r$ = random.Random(3); self.seen$ = self.r$.getstate",
        "python state",
    ),
    "quiet random": Piece(
        "self.r$.random()",
        "self.r$ = r = np.random.default_rng(3); self.seen$ = lambda: str(r.bit_generator.state)",
        "python state",
    ),
    "iterator": Piece("h = h + 0.1 * next(self.i$)", "self.i$ = iter(list(range(1000)))", "python state"),
    "count": Piece("h = h + 0.1 * next(self.i$)", "self.i$ = itertools.count()", "python state"),
    "file": Piece(
        "h = h + len(self.f$.read(1 + self.f$.tell() % 3))",
        "self.f$ = io.StringIO('x' * 10000)",
        "python state",
    ),
    "bytes": Piece("self.b$[0] = (self.b$[0] + 1) % 100\nh = h + self.b$[0]", "self.b$ = bytearray(2)", "python state"),
    "array": Piece("self.b$[0] += 1\nh = h + float(self.b$[0])", "self.b$ = np.zeros(2)", "python state"),
    "closure's number": Piece(
        "h = h * (1 + self.n$() % 3)",
        "def counting(number=0):\n    def count():\n        nonlocal number\n        number += 1\n        return number\n    return count, lambda: number\nself.n$, self.seen$ = counting()",
        "python state",
    ),
    "function's number": Piece(
        "self.n$.calls += 1\nh = h * (1 + self.n$.calls % 3)",
        "self.n$ = lambda: self.n$.calls\nself.n$.calls, self.seen$ = 0, self.n$",
        "python state",
    ),
    "thread's number": Piece(
        "self.t$.calls += 1",
        "self.t$ = local = threading.local()\nlocal.calls = 0\nself.seen$ = lambda: local.calls",
        "python state",
    ),
    "event": Piece(
        "(self.e$.clear if self.e$.is_set() else self.e$.set)()\nh = h * (1 + self.e$.is_set())",
        "self.e$ = event = threading.Event()\nself.seen$ = lambda: event.is_set()",
        "python state",
    ),
    "filled once": Piece("if self.s$ is None:\n    self.s$ = [7]\nh = h * 0.1 * self.s$[0]", "self.s$ = None"),
    "list of tensors": Piece("self.s$.append(h)", "self.s$ = []", "rows"),
    "deque of tensors": Piece("self.s$.append(h)", "self.s$ = collections.deque(maxlen=2)", "rows"),
    "fresh dict": Piece("self.s$ = {'h': h}", "self.s$ = None", "rows"),
    "fresh object": Piece("self.s$ = Box(h)", "self.s$ = None", "rows"),
    "tuple": Piece("self.s$ = (h[0] * 0.5, self.s$[1])", "self.s$ = (None, 3)"),
    "two names": Piece("self.a$['h'] = h", "self.a$ = self.b$ = {}", "rows"),
    "last seen": Piece("self.last$ = h", "self.last$ = None", "rows"),
    "buffer replaced": Piece(
        "self.p$ = self.p$ * 0.5 + 1\nh = h + self.p$", "self.register_buffer('p$', torch.zeros(W))"
    ),
    "weight renormed": Piece(
        "self.l$.weight.data = self.l$.weight / self.l$.weight.norm()\nh = self.l$(h)", "self.l$ = nn.Linear(W, W)"
    ),
    "weight replaced": Piece(
        "self.l$.weight = nn.Parameter(self.l$.weight.detach() * 0.9, requires_grad=self.l$.weight.requires_grad)\nh = self.l$(h)",
        "self.l$ = nn.Linear(W, W)",
    ),
    "cache of sizes": Piece(
        "if len(h) not in self.cache$:\n    self.cache$[len(h)] = torch.arange(W, device=h.device) * 0.1\nh = h + self.cache$[len(h)]",
        "self.cache$ = {}",
        "rows",
    ),
    "module made": Piece(
        "if not hasattr(self, 'late$'):\n    self.late$ = nn.ReLU()\nh = self.late$(h)",
    ),
    "escapes to a global": Piece(
        "ESCAPED[id(self.first), $] = h", "self.seen$ = lambda: ESCAPED.get((id(self.first), $))", "escape"
    ),
    "escapes to a closure": Piece(
        "self.put$(h)",
        "cell = [None]\nself.put$ = lambda h, cell=cell: cell.__setitem__(0, h)\nself.seen$ = lambda cell=cell: cell[0]",
        "escape",
    ),
    "escapes to a deque": Piece(
        "self.put$(h)",
        "cell = collections.deque(maxlen=2)\nself.put$ = cell.append\nself.seen$ = lambda cell=cell: list(cell)",
        "escape",
    ),
    "input escapes to a global": Piece(
        "ESCAPED[id(self.first), $] = x", "self.seen$ = lambda: ESCAPED.get((id(self.first), $))", "escape"
    ),
    "view of an input escapes": Piece(
        "self.put$((x[:1], y))",
        "cell = [None]\nself.put$ = lambda h, cell=cell: cell.__setitem__(0, h)\nself.seen$ = lambda cell=cell: cell[0]",
        "escape",
    ),
    "read from a global": Piece(
        "h = h * 0.5 + ESCAPED.get((id(self.first), $), h)[:1] * 0.1\nESCAPED[id(self.first), $] = h.float()",
        "self.seen$ = lambda: ESCAPED.get((id(self.first), $))",
        "escape",
    ),
}

# Rows that other rows, or their number, decide.
MIXING = {
    "centred": Piece("h = h - h.mean(0)", "", "rows"),
    "softmax of rows": Piece("h = h.softmax(0)", "", "rows"),
    "cumulated": Piece("h = h.cumsum(0) * 0.1", "", "rows"),
    "reversed": Piece("h = h.flip(0)", "", "rows"),
    "last row": Piece("h = h + h[-1]", "", "rows"),
    "by count": Piece("h = h / len(h)", "", "rows"),
    "batch statistics": Piece(
        "h = nn.functional.batch_norm(h, self.m$, self.v$, training=len(h) > 1)",
        "self.register_buffer('m$', torch.zeros(W)); self.register_buffer('v$', torch.ones(W))",
        "rows",
    ),
    "branch on count": Piece("h = h * (2 if len(h) > 3 else 1)", "", "rows"),
    "branch on one count": Piece("h = h * (2 if len(h) == 6 else 1)", "", "rows"),
    "branch on few": Piece("h = h * 0.5 if len(h) <= 2 else h", "", "rows"),
    "odd count": Piece("h = torch.tanh(h) if len(h) % 2 else h", "", "rows"),
    "written for one count": Piece(
        "if len(h) == 5:\n    self.o$ += 1\nh = h + self.o$", "self.register_buffer('o$', torch.zeros(()))", "rows"
    ),
    # No factor of all features, which a norm after it takes away again but for its eps.
    "counted in ones": Piece(
        "h = h + torch.linspace(0, 3, W, device=h.device) / torch.ones_like(h[:, :1]).sum()", "", "rows"
    ),
    "spread": Piece("h = h + torch.linspace(0, 1, len(h), device=h.device)[:, None]", "", "rows"),
    "clipped by all": Piece("h = h * (0.5 / h.norm()).clamp(max=1)", "", "rows"),
    "rarely clipped by all": Piece("h = h * (5 / h.norm()).clamp(max=1)", "", "rare data"),
    "any row": Piece("h = torch.where((h > 1).any(), h * 0.5, h)", "", "rows"),
    "sorted rows": Piece("h = h[h[:, 0].argsort()]", "", "rows"),
    "expert's load": Piece(
        "expert$ = (h[:, 0] > 0).long()\nload$ = torch.zeros(2, device=h.device).index_add_(0, expert$, torch.ones(len(h), device=h.device))\nh = h / load$[expert$][:, None]",
        "",
        "rows",
    ),
    "expert's capacity": Piece(
        "expert$ = nn.functional.one_hot((h[:, 0] > 0).long(), 2)\nh = h * ((expert$.cumsum(0) * expert$).sum(-1) * 2 <= len(h))[:, None]",
        "",
        "rare data",
    ),
    "expert's mean": Piece(
        "expert$ = (h[:, 0] > 0).long()\nh = h + 0.1 * torch.zeros_like(h[:1]).repeat(2, 1).index_add_(0, expert$, h)[expert$]",
        "",
        "rows",
    ),
    "positions": Piece("h = h + self.e$[: len(h)]", "self.register_buffer('e$', torch.randn(64, W))"),
    "slots": Piece(
        "self.kv$[: len(h)] = h\nh = h + self.kv$[:1]", "self.register_buffer('kv$', torch.zeros(64, W))", "rows"
    ),
    "total": Piece(
        "self.sum$ += h.sum(0).tanh()\nh = h + self.sum$.tanh()", "self.register_buffer('sum$', torch.zeros(W))", "rows"
    ),
    "rows drawn": Piece("h = h + torch.rand_like(h)", "", "padded draws"),
    "rows dropped": Piece("h = nn.functional.dropout(h, 0.5, True)", "", "padded draws"),
}

# What cannot be captured.
TROUBLE = {
    "item": Piece("h = h * (1 if h.sum().item() > 0 else 2)", "", "rows"),
    "branch": Piece("if (h > 100).any():\n    h = h * 0", "", "rows"),
    "boolean index": Piece("h = h + h[h > 0].sum() * 0.01", "", "rows"),
    "nonzero": Piece("h = h + len(torch.nonzero(h > 0)) * 0.01", "", "rows"),
    "refuses captures": Piece("refuse_captures(h, self.tail, 100)"),
    "refuses one capture": Piece("refuse_captures(h, self.tail, 1)"),
    "item in a try": Piece(
        "try:\n    h = h * (2 if h.sum().item() > 0 else 1)\nexcept RuntimeError:\n    h = h * 3", "", "rows"
    ),
    "from the host": Piece("h = h + torch.tensor([0.5] * W, device=h.device)"),
    "reseeded": Piece("torch.manual_seed(7)\nh = h + torch.rand(W, device=h.device)"),
    "raises when small": Piece("if len(h) == 2:\n    raise LookupError('two rows')", "", "rows"),
    "raises late": Piece(
        "if float(self.c$) > 2 and len(h) == 3:\n    self.c$.zero_()\n    raise ValueError\nself.c$ += 1",
        "self.register_buffer('c$', torch.zeros(()))",
        "rows",
    ),
}

# What a forward does to its arguments, and asks of them.
ARGUMENTS = {
    "asks for one tensor": Piece("h = h * (2 if x is y else 3)"),
    "asks for one address": Piece("h = h * (2 if y is not None and x.data_ptr() == y.data_ptr() else 3)"),
    "asks for gaps": Piece("h = h * (2 if x.is_contiguous() else 3)"),
    "asks for strides": Piece("h = h * (2 if x.stride(0) < x.stride(1) else 3)"),
    "asks for a class": Piece("h = h * (2 if isinstance(x, nn.Parameter) else 3)"),
    "like x": Piece("h = h + torch.empty_like(x).copy_(x).view(-1)[: x.shape[1]]"),
    "x written": Piece("x.mul_(0.5)"),
    "x's column written": Piece("x[:, 1] = h[:, 0]"),
    "y written": Piece("if y is not None:\n    y.add_(1)"),
    "x written after": Piece("h = h + x\nx.zero_()"),
    "x written by a break": Piece("attend(h, x)"),
    "x out": Piece("torch.mul(h, 0.5, out=x)"),
    "x unsqueezed": Piece("x.unsqueeze_(0).squeeze_(0)"),
    "x transposed": Piece("x.t_()", "", "arguments"),
    "x re-pointed": Piece("x.data = h.detach().float() * 2", "", "arguments"),
    "box item set": Piece("if isinstance(box, dict):\n    box['new'] = h * 2", "", "arguments"),
    "box number set": Piece("if isinstance(box, dict):\n    box['calls'] = box.get('calls', 0) + 1", "", "arguments"),
    "box item popped": Piece("if isinstance(box, dict):\n    box.pop('y', None)", "", "arguments"),
    "box appended": Piece("if isinstance(box, list):\n    box.append(h * 3)", "", "arguments"),
    "box item replaced": Piece("if isinstance(box, list) and box:\n    box[0] = h * 3", "", "arguments"),
    "box field set": Piece("if isinstance(box, Box):\n    box.value = h * 3", "", "arguments"),
    "box tensors written": Piece("if isinstance(box, dict) and 'y' in box:\n    box['y'].mul_(2)"),
    "box read": Piece("if isinstance(box, dict) and 'y' in box:\n    h = h + box['y'] * 0.5"),
    "box position read": Piece("if isinstance(box, dict) and 'p' in box:\n    h = h + box['p'].unsqueeze(-1) * 0.1"),
    "box list read": Piece("if isinstance(box, list) and box and torch.is_tensor(box[0]):\n    h = h + box[0] * 0.5"),
    "buffer from x": Piece(
        "self.w$.copy_(x[0])\nh = h + x * 0.1 + self.w$", "self.register_buffer('w$', torch.zeros(W))"
    ),
}

PIECES = PLAIN | STATE | MIXING | TROUBLE | ARGUMENTS

OUTPUTS = {
    "h": Piece("return h"),
    "pair": Piece("return h, h.abs().sum(-1)"),
    "dict": Piece("return {'h': h, 'n': None, 'k': 3}"),
    "list": Piece("return [h, h > 0, 'text']"),
    "two for one": Piece("return h.repeat_interleave(2, 0)"),
    "columns": Piece("return h.t()"),
    "expanded": Piece("return h[:, :1].expand(-1, W)", "", "aliases"),
    "x": Piece("return h, x", "", "aliases"),
    "x itself": Piece("return x", "", "aliases"),
    "view of x": Piece("return h, x[:, ::2]", "", "aliases"),
    "twice": Piece("return h, h", "", "aliases"),
    "views": Piece("return h, h[:, :2], h.t()", "", "aliases"),
    "y": Piece("return {'h': h, 'y': y}", "", "aliases"),
    "box": Piece("return h, box", "", "aliases"),
    "buffer": Piece("return h, self.kept", "self.register_buffer('kept', torch.ones(W))", "aliases"),
    "weight": Piece("return h, self.first.weight", "", "aliases"),
    "constant": Piece("return h, torch.ones(3, device=h.device)"),
    "python": Piece("return h, [1, 2.5, None], 'x'"),
    "count": Piece("return h, len(h)", "", "rows"),
    "total": Piece("return h, h.sum()", "", "rows"),
    "squeezed": Piece("return h.squeeze()", "", "rows"),
    "squeezed of one": Piece("return h, (h if len(h) > 1 else h[0])", "", "rows"),
    "nested by count": Piece("return (h, h * 2) if len(h) == 5 else [h, h * 2]", "", "rows"),
    "more for one count": Piece("return (h, h * 2) if len(h) == 3 else (h,)", "", "rows"),
    "generator": Piece("return h, (i for i in range(2))"),
}

# Arguments of a call.
CALLS = {
    "x": "x",
    "x by name": "x=x",
    "x, y": "x, y",
    "y by name": "x, y=y",
    "x twice": "x, x",
    "y twice": "x=y, y=y",
    "x and a view": "x, x[:, :]",
    "x and its first column": "x, x[:, :1].expand(-1, W)",
    "a parameter": "nn.Parameter(x, requires_grad=False)",
    "a parameter and x": "nn.Parameter(x, requires_grad=False), x",
    "rows of one base": "base[:n], base[1 : n + 1]",
    "columns of another": "torch.cat([x, y], 1)[:, :W]",
    "transposed": "x.t().contiguous().t()",
    "every other column": "torch.cat([x, y], 1)[:, ::2]",
    "transposed columns": "torch.cat([x, y], 1).t().contiguous().t()[:, W:]",
    "expanded": "x[:, :1].expand(-1, W)",
    "double": "x.double().float()",
    "dict": "x, box={'y': y}",
    "dict with an int key": "x, box={1: y, '1': y * 2, 'y': y}",
    "dict and x": "x, box={'y': x}",
    "nested": "x, box={'y': y, 'deep': [y * 2, {'k': None}], 'n': 3}",
    "indices": "x, box={'at': torch.randint(0, len(m.looked_up), (n,), device=device)}",
    "position": "x, box={'p': torch.arange(1.0, device=device)}",
    "as many as rows": "x, box={'p': torch.arange(float(n), device=device)}",
    "list": "x, box=[y]",
    "list and y": "x, y, box=[y, None]",
    "empty list": "x, box=[]",
    "object": "x, box=Box(3)",
    "object with y": "x, box=Box(y)",
    "earlier output": "kept",
    "earlier output and x": "x, kept if kept.shape == x.shape else x",
    "buffer": "m.rows[:n]",
    "buffer as y": "x, m.rows[:n]",
    "parameter": "m.first.weight",
    "inputs in place": "in_place(m, x)",
    "first rows in place": "in_place(m, x, largest=True)",
    "inputs in place and y": "in_place(m, x), y",
    "too wide": "torch.cat([x, y], 1)",
    "empty": "x[:0]",
    "integers": "(x * 3).long().float()",
    "half": "x.half().float()",
    "requires grad": "x.requires_grad_()",
    "raises at the end": "x, box='raise'",
}

CHANGES = {
    "weight data": "m.first.weight.data = torch.randn_like(m.first.weight)",
    "weight data, transposed": "m.first.weight.data = m.first.weight.data.t()",
    "weight in place": "m.first.weight.mul_(0.5)",
    "weight filled": "m.first.weight.data.fill_(0.1)",
    "weight replaced": "m.first.weight = nn.Parameter(torch.randn_like(m.first.weight), requires_grad=m.first.weight.requires_grad)",
    "weight and old kept": "m.old = m.first.weight; m.first.weight = nn.Parameter(m.old.detach() + 1, requires_grad=m.old.requires_grad)",
    "weight set_": "m.first.weight.data.set_(torch.randn_like(m.first.weight).untyped_storage(), 0, (W, W), (W, 1))",
    "bias None": "m.first.bias = None",
    "bias again": "m.first.bias = nn.Parameter(torch.randn(W, device=device), requires_grad=m.first.weight.requires_grad)",
    "optimizer, loop": "descend(m, torch.optim.SGD, foreach=False)",
    "optimizer, foreach": "descend(m, torch.optim.Adam, foreach=True)",
    "optimizer, fused": "descend(m, torch.optim.AdamW, fused=True)",
    "optimizer, fused SGD": "descend(m, torch.optim.SGD, fused=True)",
    "training steps": "train(m)",
    "load": "m.load_state_dict({k: v + 0.1 if v.is_floating_point() else v for k, v in m.state_dict().items()})",
    "load, assign": "m.load_state_dict({k: (v + 0.1 if v.is_floating_point() else v).clone() for k, v in m.state_dict().items()}, assign=True); m.requires_grad_(m.grads)",
    "swap": "torch.utils.swap_tensors(m.first.weight, nn.Parameter(torch.randn_like(m.first.weight), requires_grad=m.first.weight.requires_grad))",
    "swap, other way": "torch.utils.swap_tensors(nn.Parameter(torch.randn_like(m.first.weight), requires_grad=m.first.weight.requires_grad), m.first.weight)",
    "to and back": "m.to(torch.float64).to(torch.float32)",
    "through _parameters": "m.first._parameters['bias'] = nn.Parameter(torch.randn(W, device=device), requires_grad=m.first.weight.requires_grad)",
    "_parameters replaced": "m.first._parameters = dict(m.first._parameters, bias=nn.Parameter(torch.randn(W, device=device), requires_grad=m.first.weight.requires_grad))",
    "buffer replaced": "m.shift = torch.randn(W, device=device)",
    "buffer in place": "m.shift.add_(1)",
    "buffer resized": "m.shift.resize_(2 * W).fill_(0.5); m.shift.resize_(W)",
    "plain tensor replaced": "m.table = torch.randn(W, device=device)",
    "plain tensor in a list": "m.tables[0] = torch.randn(W, device=device)",
    "plain tensor's data": "m.tables[0].data = torch.randn(W, device=device)",
    "key in an empty dict": "m.late['a'] = torch.randn(W, device=device)",
    "key in a dict of numbers": "m.more['a'] = torch.randn(W, device=device)",
    "item in an empty list": "m.listed[0].append(torch.randn(W, device=device))",
    "attribute of an empty object": "m.bare.value = torch.randn(W, device=device)",
    "tensor of a callable": "m.scaling.value = torch.randn(W, device=device)",
    "None becomes a tensor": "m.maybe = torch.randn(W, device=device)",
    "tensor becomes None": "m.maybe = None",
    "hidden weight": "m.unlisted[0].weight.data = torch.randn(W, W, device=device)",
    "hidden module": "m.unlisted[0] = nn.Linear(W, W, device=device).requires_grad_(m.grads)",
    "hidden bias in place": "m.unlisted[0].bias.add_(1)",
    "hook": "m.hook = m.first.register_forward_hook(lambda mod, args, out: out * 2)",
    "pre-hook": "m.hook = m.first.register_forward_pre_hook(lambda mod, args: (args[0] * 2,))",
    "hook on the module": "m.hook = m.register_forward_hook(lambda mod, args, out: out)",
    "global hook": "nn.modules.module.register_module_forward_hook(lambda mod, args, out, first=m.first: out * 1.1 if mod is first else None)",
    "hook removed": "m.hook = m.hook and m.hook.remove()",
    "hook that stays": "m.first.register_forward_hook(lambda mod, args, out: out + 1)",
    "child's forward": "m.tail.forward = lambda h: torch.tanh(h) * 0.5",
    "child's forward again": "m.tail.__dict__.pop('forward', None)",
    "child trains": "m.drop.training = True",
    "child evaluates": "m.drop.training = False",
    "trains": "m.train()",
    "evaluates": "m.eval()",
    "submodule replaced": "m.tail = nn.Sigmoid() if isinstance(m.tail, nn.Tanh) else nn.Tanh()",
    "submodule in a container": "m.blocks[0] = nn.Linear(W, W, device=device).requires_grad_(m.grads)",
    "submodule appended": "m.blocks.append(nn.Tanh()) if len(m.blocks) < 4 else None",
    "parametrized": "torch.nn.utils.parametrize.is_parametrized(m.param) or torch.nn.utils.parametrize.register_parametrization(m.param, 'weight', nn.Tanh())",
    "requires grad": "m.grads = not m.grads; m.requires_grad_(m.grads)",
    "generator replaced": "vars(m).update({k: torch.Generator(device).manual_seed(9) for k, v in vars(m).items() if isinstance(v, torch.Generator)})",
    "generator in a list replaced": "[setattr(v[0], 'value', torch.Generator(device).manual_seed(9)) for k, v in vars(m).items() if k[0] == 'g' and isinstance(v, list)]",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default dtype again": "torch.set_default_dtype(torch.float32)",
    "float32 precision": "torch.backends.mkldnn.set_flags(_enabled=True)",
}

# Changes that are taken back later; `was...` are the things from before, which are alive meanwhile.
AND_BACK = {
    "weight replaced": (
        "was_weight = m.first.weight; m.first.weight = nn.Parameter(torch.randn_like(was_weight), requires_grad=was_weight.requires_grad)",
        "m.first.weight = was_weight",
    ),
    "a longer table": (
        "was_looked_up = m.looked_up; m.looked_up = nn.Parameter(torch.randn(900, W, device=device), requires_grad=was_looked_up.requires_grad)",
        "m.looked_up = was_looked_up",
    ),
    "a place in a longer table": (
        "was_placed, was_place = m.placed, m.place.clone(); m.placed = nn.Parameter(torch.randn(900, W, device=device), requires_grad=was_placed.requires_grad); m.place.fill_(899)",
        "m.place.copy_(was_place); m.placed = was_placed",
    ),
    "a place written": ("m.place.fill_(3)", "m.place.fill_(1)"),
    "weight data": (
        "was_data = m.first.weight.data; m.first.weight.data = torch.randn_like(was_data)",
        "m.first.weight.data = was_data",
    ),
    "weight data, a transposed view": (
        "was_view = m.first.weight.data; m.first.weight.data = was_view.t()",
        "m.first.weight.data = was_view",
    ),
    "weight transposed in place": ("m.first.weight.t_()", "m.first.weight.t_()"),
    "weight in one storage": (
        "was_own = m.first.weight.data; both = torch.randn(2, W, W, device=device); m.first.weight.data = both[0]",
        "m.first.weight.data = was_own",
    ),
    "weight at another place of its storage": (
        "both = torch.randn(2, W, W, device=device); m.first.weight.data = both[0]",
        "m.first.weight.data = both[1]",
    ),
    "storage set_": (
        "was_set = m.shift.clone(); m.shift.set_(torch.randn(W, device=device))",
        "m.shift.set_(was_set)",
    ),
    "buffer resized to nothing": ("m.shift.resize_(0)", "m.shift.resize_(W).fill_(0.5)"),
    "buffer gone and there again": ("was_shift = m.shift; del m.shift", "m.register_buffer('shift', was_shift)"),
    "bias removed": ("was_bias = m.first.bias; m.first.bias = None", "m.first.bias = was_bias"),
    "submodule replaced": (
        "was_tail = m.tail; m.tail = nn.Sigmoid()",
        "m.tail = was_tail",
    ),
    "submodule of other weights": (
        "was_param = m.param; m.param = copy.deepcopy(m.param); m.param.bias.data += 1",
        "m.param = was_param",
    ),
    "submodule behind an attribute": ("vars(m)['tail'] = nn.Sigmoid()", "vars(m).pop('tail', None)"),
    "weight behind an attribute": (
        "vars(m.first)['weight'] = torch.randn(W, W, device=device)",
        "vars(m.first).pop('weight', None)",
    ),
    "submodules in another order": (
        "len(m.blocks) > 1 or m.blocks.append(nn.Tanh()); m.blocks._modules['0'] = m.blocks._modules.pop('0')",
        "m.blocks._modules['1'] = m.blocks._modules.pop('1')",
    ),
    "a submodule moved to the end": (
        "len(m.blocks) > 1 or m.blocks.append(nn.Tanh()); m.blocks._modules = OrderedDict(m.blocks._modules); m.blocks._modules.move_to_end('0')",
        "m.blocks._modules.move_to_end('1')",
    ),
    "submodules appended and removed": ("m.blocks.append(nn.Sigmoid())", "del m.blocks[-1]"),
    "attributes in an equal dict": (
        "was_dict = vars(m.first); m.first.__dict__ = dict(was_dict)",
        "m.first.__dict__ = was_dict",
    ),
    "attributes in a dict with another bias": (
        "was_vars = vars(m.first); m.first.__dict__ = was_vars | {'_parameters': was_vars['_parameters'] | {'bias': nn.Parameter(torch.randn(W, device=device), requires_grad=m.grads)}}",
        "m.first.__dict__ = was_vars",
    ),
    "own attributes in an equal dict": (
        "was_own_dict = vars(m); m.__dict__ = dict(was_own_dict)",
        "m.__dict__ = was_own_dict",
    ),
    "own attributes in a dict with another table": (
        "was_own_vars = vars(m); m.__dict__ = was_own_vars | {'table': torch.randn(W, device=device)}",
        "m.__dict__ = was_own_vars",
    ),
    "registry in an equal dict": (
        "was_registry = m.first._parameters; m.first._parameters = dict(was_registry)",
        "m.first._parameters = was_registry",
    ),
    "object's attributes in another dict": (
        "was_value = vars(m.scaling); m.scaling.__dict__ = {'value': torch.randn(W, device=device)}",
        "m.scaling.__dict__ = was_value",
    ),
    "another class": ("m.tail.__class__ = nn.Sigmoid", "m.tail.__class__ = nn.Tanh"),
    "an object's other class": ("m.scaling.__class__ = Shifting", "m.scaling.__class__ = Scaling"),
    "a function in an attribute": (
        "m.tail.forward = lambda h: torch.tanh(h) * 0.5",
        "m.tail.__dict__.pop('forward', None)",
    ),
    "hook with another": (
        "hooks = [m.first.register_forward_hook(lambda mod, args, out, f=f: f(out)) for f in (torch.tanh, lambda h: h + 1)]",
        "[hook.remove() for hook in hooks]",
    ),
    "hooks in another order": (
        "hooked = [m.first.register_forward_hook(lambda mod, args, out, f=f: f(out)) for f in (torch.tanh, lambda h: h + 1)]",
        "m.first._forward_hooks.move_to_end(hooked[0].id)",
    ),
    "hook by hand beside another": (
        "first_hook = m.first.register_forward_hook(lambda mod, args, out: out + 1)",
        "m.first._forward_hooks and m.first._forward_hooks.update({-1: lambda mod, args, out: out * 2})",
    ),
    "hook again": (
        "first_hook = m.first.register_forward_hook(lambda mod, args, out: out * 2)",
        "first_hook.remove()",
    ),
    "mode of a child": ("m.drop.training = True", "m.drop.training = False"),
    "mode of all": ("m.train()", "m.eval()"),
    "a layer's setting": (
        "[setattr(each, 'eps', 0.7) for each in m.modules() if isinstance(each, (nn.LayerNorm, nn.BatchNorm1d))]",
        "[setattr(each, 'eps', 1e-5) for each in m.modules() if isinstance(each, (nn.LayerNorm, nn.BatchNorm1d))]",
    ),
    "list in another order": (
        "m.tables.append(torch.randn(W, device=device)); m.tables.reverse()",
        "m.tables.reverse(); m.tables.pop()",
    ),
    "item of a list": (
        "was_table = m.tables[0]; m.tables[0] = torch.randn(W, device=device)",
        "m.tables[0] = was_table",
    ),
    "list replaced by an equal one": ("was_tables = m.tables; m.tables = list(was_tables)", "m.tables = was_tables"),
    "key in a dict": ("m.late['a'] = torch.randn(W, device=device)", "m.late.clear()"),
    "dict replaced": ("was_late = m.late; m.late = {'b': torch.randn(W, device=device)}", "m.late = was_late"),
    "attribute of an object": ("m.bare.value = torch.randn(W, device=device)", "del m.bare.value"),
    "children's names swapped": (
        "children = [({'blocks': 'param', 'param': 'blocks'}.get(name, name), child) for name, child in m._modules.items()]; m._modules.clear(); m._modules.update(children)",
        "children = [({'blocks': 'param', 'param': 'blocks'}.get(name, name), child) for name, child in m._modules.items()]; m._modules.clear(); m._modules.update(children)",
    ),
    "buffer negated by a view": (
        "m.shift.data = torch._neg_view(m.shift.data)",
        "m.shift.data = torch._neg_view(m.shift.data)",
    ),
    "table negated by a view": (
        "m.table.data = torch._neg_view(m.table.data)",
        "m.table.data = torch._neg_view(m.table.data)",
    ),
    "one attribute for another": (
        "vars(m.tail)['note'] = 1",
        "vars(m.tail).pop('note', None); m.tail.forward = lambda h: torch.tanh(h) * 0.5",
    ),
    "one key for another": (
        "m.more.pop('n', None); m.more['a'] = torch.randn(W, device=device)",
        "m.more.pop('a', None); m.more['n'] = 1",
    ),
    "one attribute of an object for another": (
        "vars(m.bare).pop('value', None); m.bare.note = 1",
        "vars(m.bare).pop('note', None); m.bare.value = torch.randn(W, device=device)",
    ),
    "None and a tensor": ("m.maybe = torch.randn(W, device=device)", "m.maybe = None"),
    "stored again": (
        "m.table = m.table; m.tail = m.tail; m.first.weight = m.first.weight",
        "m.tables[0] = m.tables[0]",
    ),
    "unread attribute": ("m.note = 'seen'", "del m.note"),
    "unread module's number": ("vars(m.tail)['note'] = 1", "vars(m.tail).pop('note', None)"),
    "default dtype": ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    "matrix products' precision": (
        "torch.set_float32_matmul_precision('high')",
        "torch.set_float32_matmul_precision('highest')",
    ),
    "deterministic": (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.use_deterministic_algorithms(False)",
    ),
}
# Changes after which freed memory is not what it was: filled, given back to the device, or given back and taken again.
_FILL = "trash = [torch.full((W, W), float('nan'), device=device) for _ in range(16)] + [torch.full((W,), float('nan'), device=device) for _ in range(16)]"
_GIVE_BACK = "gc.collect(); torch.cuda.is_available() and torch.cuda.empty_cache()"
CHANGES |= {
    "weights replaced, freed and filled": f"m.first.weight, m.first.bias = (nn.Parameter(torch.randn_like(each), requires_grad=each.requires_grad) for each in (m.first.weight, m.first.bias if m.first.bias is not None else m.shift)); {_FILL}",
    "weight data, freed and filled": f"m.first.weight.data = torch.randn_like(m.first.weight); {_FILL}",
    "buffer set_, freed and filled": f"m.shift.set_(torch.randn(W, device=device)); {_FILL}",
    "weight data, freed and given back": f"m.first.weight.data = torch.randn_like(m.first.weight); {_GIVE_BACK}",
    "submodule replaced, freed and given back": f"m.param = nn.Linear(W, W, device=device).requires_grad_(m.grads); {_GIVE_BACK}; {_FILL}",
    "storage resized to 0 and again": f"storage = m.first.weight.untyped_storage(); size = storage.nbytes(); storage.resize_(0); {_FILL}; {_GIVE_BACK}; storage.resize_(size); torch.empty(0, device=device).set_(storage).fill_(0.2); m.first.weight.data.copy_(torch.randn(W, W, device=device))",
    "storage enlarged": "m.shift.untyped_storage().resize_(4096); m.shift.copy_(torch.randn(W, device=device))",
    "memory given back": _GIVE_BACK,
    **{f"{name} (and back)": there for name, (there, _) in AND_BACK.items()},
    **{f"{name}, back": back for name, (_, back) in AND_BACK.items()},
}
# Those that mean nothing to any answer: graphs serve on.
HARMLESS = frozenset(
    {
        "a place written",
        "attributes in an equal dict",
        "own attributes in an equal dict",
        "registry in an equal dict",
        "list replaced by an equal one",
        "stored again",
        "unread attribute",
        "unread module's number",
    }
)
# Those of what is around a call, which is part of its signature.
AROUND = frozenset({"mode of all", "default dtype", "matrix products' precision", "deterministic"})
# Of a wrapper these part it from its module, whose dict it shares: only modules that have graphs themselves keep them.
OWN_DICT = frozenset({"own attributes in an equal dict", "own attributes in a dict with another table"})

# Changes that are not the same as a refusal, by the promise they need.
CHANGE_PROMISES = {
    "global hook": "staleness",
    "generator replaced": "staleness",
    "generator in a list replaced": "staleness",
    "hidden weight": "hidden modules",
    "hidden module": "hidden modules",
    "swap, other way": "staleness",
    "_parameters replaced": "staleness",
    "buffer resized": "staleness",
    "hook set directly": "staleness",
    "child's forward": "staleness",
    "child's forward again": "staleness",
    "child trains": "staleness",
    "child evaluates": "staleness",
    "None becomes a tensor": "staleness",
    "tensor becomes None": "staleness",
    "parametrized": "staleness",
    "default dtype": "staleness",
    "default dtype again": "staleness",
}
_ENDS = " (and back)", ", back"
# Changes that guards miss, by what they would have to look at.
GAPS: dict[str, str] = {}
CHANGE_PROMISES |= {f"{name}{end}": promise for name, promise in GAPS.items() for end in _ENDS}
CHANGE_PROMISES |= {f"{name}{end}": "own dict" for name in OWN_DICT for end in _ENDS}

CALL_PROMISES = {"expanded": "overlap", "earlier output": "lent", "earlier output and x": "lent"}

# Promises that the library does not keep; programs that need them are left out, unless asked for. "rare data": rows
# that meet only for some data are found when a call with such data is compared, and answers before may be wrong. "own
# dict": see `OWN_DICT`. Gaps of the guards, of `GAPS`, belong here, too.
PENDING: frozenset[str] = frozenset({"rare data", "own dict"})

# Where the module was built in a block of `sg.sleepable`, beside what a change has put elsewhere, which stays awake.
SLEEP = "asleep for a while"
GRAPHS = {
    "reset": "m.reset_graphs()",
    "configured": "m.configure_graphs(max_signatures=16)",
    "static inputs looked at": "m.graph_stats.graphs and m.graph_report()",
    SLEEP: "with contextlib.suppress(sg.ConfigError): m.sleep(); m.wake()",
}
