"""Forwards of which both devices must think alike: what may be captured, what a capture is refused for.

Each says what a CUDA graph does with it, as read from torch's CUDA kernels; the emulator has no other way to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.sweeps.entries import Entry, Sample

ROWS, WIDTH = 4, 8
CAPTURED, REFUSED = "replayed", "eager"

Function = Callable[[Any, Tensor], Any]


class Part(nn.Module):
    """A module whose forward is a function of itself and an input of (ROWS, WIDTH).

    Attributes:
        index: of integers below WIDTH.
        square: symmetric and positive definite.
    """

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("index", torch.arange(WIDTH).flip(0))
        self.register_buffer("square", torch.randn(ROWS, ROWS) @ torch.randn(ROWS, ROWS).mT)
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.register_buffer("lengths", torch.tensor([WIDTH, 5, 3, 2]))
        self.ends = [2, 5]

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _square(x: Tensor) -> Tensor:
    """(ROWS, ROWS), symmetric and well conditioned."""
    return x @ x.mT + 4 * torch.eye(ROWS, device=x.device)


def _batch(x: Tensor) -> Tensor:
    return torch.stack([_square(x), 2 * _square(x)])


def _choose(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x - 1


def _fill_by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = 0.0
    return y


def _assign_by_mask(x: Tensor) -> Tensor:
    y = x.clone()
    y[y < 0] = y[0, 0]
    return y


def _swallow(x: Tensor) -> Tensor:
    try:
        return x * x.sum().item()
    except RuntimeError:
        return x * 2


def _spectral(x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2, n=WIDTH)


# What is captured on a GPU.
CAPTURES: dict[str, Function] = {
    "to y.device": lambda m, x: x.to(m.weight.device) + 1,
    "to dtype": lambda m, x: x.to(torch.float64),
    "normal(mean, number)": lambda m, x: torch.normal(x, 1.0),
    "normal(mean, std)": lambda m, x: torch.normal(x, x.abs()),
    "normal(number, std)": lambda m, x: torch.normal(0.0, x.abs()),
    "normal_": lambda m, x: x.clone().normal_(),
    "bernoulli": lambda m, x: torch.bernoulli(x.sigmoid()),
    "dropout": lambda m, x: F.dropout(x, 0.5, training=True),
    "quantile": lambda m, x: x.quantile(0.3, dim=1),
    "quantiles": lambda m, x: torch.quantile(x, x[0, :2].sigmoid(), dim=1),
    "nanquantile": lambda m, x: torch.nanquantile(x, 0.5, dim=1),
    "median": lambda m, x: x.median(dim=1).values,
    "nanmedian of all": lambda m, x: x - x.nanmedian(),
    "equal to another shape": lambda m, x: x if torch.equal(x, x[0]) else -x,
    "cholesky_inverse": lambda m, x: torch.cholesky_inverse(_square(x)),
    "sort": lambda m, x: x.sort(dim=1).values,
    "topk": lambda m, x: x.topk(3, dim=1).values,
    "cumsum": lambda m, x: x.cumsum(1),
    "argsort gather": lambda m, x: x.gather(1, x.argsort(1)),
    "scatter_add": lambda m, x: torch.zeros_like(x).scatter_add_(1, m.index.expand(ROWS, -1), x),
    "index_add": lambda m, x: x.index_add(1, m.index, x),
    "index by a tensor": lambda m, x: x[:, m.index],
    "index by a list": lambda m, x: x[:, [0, 2]],
    "masked_fill": lambda m, x: x.masked_fill(m.mask, 0.0),
    "fill by a mask": lambda m, x: _fill_by_mask(x),
    "where": lambda m, x: torch.where(x > 0, x, -x),
    "one_hot with classes": lambda m, x: x @ F.one_hot(m.index, WIDTH).float(),
    "repeat_interleave with a size": lambda m, x: x.repeat_interleave(m.index, 1, output_size=28),
    "repeat_interleave by a number": lambda m, x: x.repeat_interleave(2, 1),
    "searchsorted": lambda m, x: torch.searchsorted(x.sort(1).values, x),
    "bucketize": lambda m, x: torch.bucketize(x, m.weight[0].sort().values),
    "histc": lambda m, x: torch.histc(x, 8, -3, 3),
    "cdist": lambda m, x: torch.cdist(x, x),
    "einsum": lambda m, x: torch.einsum("ij,kj->ik", x, m.weight),
    "fft": lambda m, x: _spectral(x),
    "inv_ex": lambda m, x: torch.linalg.inv_ex(_square(x))[0],
    "solve_ex": lambda m, x: torch.linalg.solve_ex(_square(x), x)[0],
    "cholesky_ex": lambda m, x: torch.linalg.cholesky_ex(_square(x))[0],
    "solve_triangular": lambda m, x: torch.linalg.solve_triangular(_square(x).tril(), x, upper=False),
    "lu_factor_ex": lambda m, x: torch.linalg.lu_factor_ex(_square(x))[0],
    "det": lambda m, x: torch.linalg.det(_square(x)),
    "slogdet": lambda m, x: torch.linalg.slogdet(_square(x))[1],
    "qr": lambda m, x: torch.linalg.qr(x.mT)[1].abs(),
    "matrix_power": lambda m, x: torch.linalg.matrix_power(_square(x), 3),
    "frobenius norm": lambda m, x: torch.linalg.matrix_norm(x),
    "cond of p": lambda m, x: torch.linalg.cond(_square(x), 1),
    "vector norm": lambda m, x: torch.linalg.vector_norm(x, dim=1),
    "matrix_exp of one element": lambda m, x: torch.matrix_exp(x[:, :1, None]),
    "tensor_split by numbers": lambda m, x: torch.tensor_split(x, 3, dim=1)[0],
    "tensor_split by a list": lambda m, x: torch.tensor_split(x, m.ends, dim=1)[1],
    "chunk": lambda m, x: x.chunk(2, 1)[1],
    "split": lambda m, x: x.split([3, 5], 1)[1],
    "arange": lambda m, x: x + torch.arange(WIDTH, device=x.device),
    "constant": lambda m, x: x + torch.tensor([1.0] * WIDTH, device=x.device),
    "read of a number": lambda m, x: x * float(torch.tensor(2.0)),
    "read of a list": lambda m, x: x * torch.tensor([3, 1]).tolist()[0],
    "tensor_split by a list made here": lambda m, x: torch.tensor_split(x, torch.tensor([2, 5]), dim=1)[1],
    "tensor_split by a number made here": lambda m, x: x.tensor_split(torch.tensor(2), dim=1)[1],
    "number": lambda m, x: x + torch.tensor(2.0),
    "number on the device": lambda m, x: x + torch.tensor(2.0, device=x.device),
    "full": lambda m, x: x + torch.full((WIDTH,), 2.0, device=x.device),
    "eye": lambda m, x: x @ torch.eye(WIDTH, device=x.device),
    "assert on the device": lambda m, x: (torch._assert_async((x * x).sum() >= 0), x * 2)[1],
    "conv1d": lambda m, x: F.conv1d(x[:, None], m.weight[:1, None, :3], padding=1),
    "layer_norm": lambda m, x: F.layer_norm(x, (WIDTH,)),
    "batch_norm": lambda m, x: F.batch_norm(x, m.weight[0], m.weight[1].abs()),
    "attention": lambda m, x: F.scaled_dot_product_attention(*(x.view(ROWS, 1, 2, 4),) * 3),
    "causal attention": lambda m, x: F.scaled_dot_product_attention(*(x.view(ROWS, 1, 2, 4),) * 3, is_causal=True),
    "cross_entropy": lambda m, x: F.cross_entropy(x, m.index[:ROWS], reduction="none"),
    "grid_sample": lambda m, x: F.grid_sample(x.view(ROWS, 1, 2, 4), x.view(ROWS, 2, 2, 2).tanh(), align_corners=False),
    "interpolate": lambda m, x: F.interpolate(x[:, None], size=12, mode="linear"),
    "embedding": lambda m, x: x + F.embedding(m.index[:1], m.weight),
    "embedding_bag": lambda m, x: x + F.embedding_bag(m.index.view(2, 4), m.weight)[:1],
    "pad": lambda m, x: F.pad(x, (1, 1)),
    "roll": lambda m, x: x.roll(1, 1),
    "tril": lambda m, x: x.tril(),
    "triu_indices": lambda m, x: x[:, torch.triu_indices(2, 3, device=x.device)[0]],
    "unfold": lambda m, x: x.unfold(1, 3, 1) * 2,
    "diff": lambda m, x: x.diff(dim=1),
    "logsumexp": lambda m, x: x.logsumexp(1),
    "nan_to_num": lambda m, x: x.nan_to_num(),
    "isin": lambda m, x: torch.isin(m.index.expand(ROWS, -1), m.index[:3]) & (x > 0),
    "complex": lambda m, x: torch.polar(x.abs(), x).abs(),
    "kthvalue": lambda m, x: x.kthvalue(2, dim=1).values,
    "mode": lambda m, x: x.round().mode(dim=1).values,
    "trapezoid": lambda m, x: torch.trapezoid(x, dim=1),
    "cross": lambda m, x: torch.linalg.cross(x[:, :3], x[:, 3:6]),
    "householder": lambda m, x: torch.linalg.householder_product(x.mT.tril(-1), x[0, :ROWS].abs()),
    "packed list": lambda m, x: rnn.pack_padded_sequence(x[..., None], [8, 5, 3, 2], batch_first=True).data * 2,
}

# What a capture on a GPU is refused, since the host would have to wait for the device.
REFUSES: dict[str, Function] = {
    "matrix_exp": lambda m, x: torch.matrix_exp(_square(x) / 99),
    "matrix_exp of a batch": lambda m, x: torch.linalg.matrix_exp(_batch(x) / 99),
    "svd": lambda m, x: torch.linalg.svd(x)[1],
    "svdvals": lambda m, x: torch.linalg.svdvals(x),
    "old svd": lambda m, x: torch.svd(x)[1],
    "eigh": lambda m, x: torch.linalg.eigh(_square(x))[0],
    "eigvalsh": lambda m, x: torch.linalg.eigvalsh(_square(x)),
    "eig": lambda m, x: torch.linalg.eig(_square(x))[0].real,
    "eigvals": lambda m, x: torch.linalg.eigvals(_square(x)).real,
    "pinv": lambda m, x: torch.linalg.pinv(x),
    "pinverse": lambda m, x: torch.pinverse(x),
    "hermitian pinv": lambda m, x: torch.linalg.pinv(_square(x), hermitian=True),
    "matrix_rank": lambda m, x: torch.linalg.matrix_rank(x),
    "cond": lambda m, x: torch.linalg.cond(_square(x)),
    "nuclear norm": lambda m, x: torch.linalg.matrix_norm(x, "nuc"),
    "spectral norm": lambda m, x: torch.linalg.matrix_norm(x, 2),
    "lstsq": lambda m, x: torch.linalg.lstsq(_square(x), x)[0].round(decimals=3),
    "inv": lambda m, x: torch.linalg.inv(_square(x)),
    "old inverse": lambda m, x: torch.inverse(_square(x)),
    "solve": lambda m, x: torch.linalg.solve(_square(x), x),
    "cholesky": lambda m, x: torch.linalg.cholesky(_square(x)),
    "old cholesky": lambda m, x: torch.cholesky(_square(x)),
    "lu_factor": lambda m, x: torch.linalg.lu_factor(_square(x))[0],
    "lu_factor_ex of an oblong": lambda m, x: torch.linalg.lu_factor_ex(x)[0],
    "cholesky_inverse of a batch": lambda m, x: torch.cholesky_inverse(_batch(x)),
    "cholesky_solve of a batch": lambda m, x: torch.cholesky_solve(_batch(x), _batch(x)),
    "mode of long rows": lambda m, x: x.round().repeat(1, 400).mode(dim=1).values,
    "ldl_factor": lambda m, x: torch.linalg.ldl_factor(_square(x))[0],
    "tensorinv": lambda m, x: torch.linalg.tensorinv(_square(x).view(2, 2, 4)),
    "item": lambda m, x: x * x.sum().item(),
    "if": lambda m, x: _choose(x),
    "int": lambda m, x: x * int(m.index[0]),
    "swallowed item": lambda m, x: _swallow(x),
    "nonzero": lambda m, x: x.abs().nonzero().sum(),
    "argwhere": lambda m, x: torch.argwhere(x).sum(),
    "masked_select": lambda m, x: x.masked_select(m.mask).sum(),
    "mask": lambda m, x: x[:, m.mask],
    "assign by a mask of many": lambda m, x: x.clone().masked_scatter(x > 9, x).index_put_((x > 0,), x[x > 0]),
    "where of one": lambda m, x: torch.where(x > 9)[0].sum(),
    "unique": lambda m, x: x.round().unique().sum(),
    "bincount": lambda m, x: x.sum() + m.index.bincount(),
    "one_hot": lambda m, x: x @ F.one_hot(m.index).float(),
    "repeat_interleave": lambda m, x: x.repeat_interleave(m.index, 1),
    "equal": lambda m, x: x if torch.equal(x, x + 0) else -x,
    "allclose": lambda m, x: x if torch.allclose(x, x) else -x,
    "tolist": lambda m, x: x + m.index.tolist()[0],
    "read of a list on the device": lambda m, x: x * torch.tensor([3.0, 1.0], device=x.device).tolist()[0],
    "read of new_tensor": lambda m, x: x * x.new_tensor([3.0, 1.0]).tolist()[0],
    "read of a moved list": lambda m, x: x * torch.tensor([3.0, 1.0]).to(x.device).tolist()[0],
    "numpy": lambda m, x: x * float(x.detach().cpu().numpy().sum()),
    "text": lambda m, x: x * len(f"{x[0, 0]}"),
    "cpu": lambda m, x: x.cpu().to(x.device) * 2,
    'to "cpu"': lambda m, x: x.to("cpu").to(x.device) * 2,
    'to device "cpu"': lambda m, x: x.to(device="cpu").to(x.device) * 2,
    "to a device made here": lambda m, x: x.to(torch.device("cpu")).to(x.device) * 2,
    "histogram of its range": lambda m, x: torch.histc(x, 4),
    "linspace of tensors": lambda m, x: torch.linspace(x[0, 0], x[0, 1], 4, device=x.device),
    "slice by a tensor": lambda m, x: x[:, : (x.sum() < 1e9).long() + 2],
    "narrow by a tensor": lambda m, x: x.narrow(1, (x.sum() > 1e9).long(), 2) * 2,
    "packed": lambda m, x: rnn.pack_padded_sequence(x[..., None], m.lengths.cpu(), batch_first=True).data * 2,
    "cov": lambda m, x: torch.cov(x),
    "nested": lambda m, x: torch.nested.nested_tensor([x[0], x[1]]).to_padded_tensor(0.0),
}


class Packed(nn.Module):
    """An LSTM on packed sequences."""

    def __init__(self, lengths: list[int], enforce_sorted: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.lengths, self.enforce_sorted = lengths, enforce_sorted

    def forward(self, x: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(
            x[..., None], self.lengths, batch_first=True, enforce_sorted=self.enforce_sorted
        )
        return rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Encoder(nn.Module):
    """Encoder layers, whose fast path takes nested tensors where rows are padded."""

    def __init__(self, *, masked: bool, nested: bool = True) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(ROWS, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        padded = torch.arange(2) >= torch.tensor([2, 2, 1, 1])[:, None]
        self.register_buffer("padded", padded if masked else None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x.view(ROWS, 2, ROWS), src_key_padding_mask=self.padded)
        return y


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "packed LSTM": (lambda: Packed([8, 5, 3, 2], True), CAPTURED),
    "packed LSTM of unsorted rows": (lambda: Packed([3, 5, 8, 2], False), REFUSED),
    "LSTM": (lambda: nn.LSTM(WIDTH, 4, batch_first=True), CAPTURED),
    "GRU": (lambda: nn.GRU(WIDTH, 4, batch_first=True), CAPTURED),
    "encoder of nested tensors": (lambda: Encoder(masked=True), REFUSED),
    "encoder of padded rows": (lambda: Encoder(masked=True, nested=False), CAPTURED),
    "encoder without a mask": (lambda: Encoder(masked=False), CAPTURED),
    "encoder layer": (_attention, CAPTURED),
}
for _name, _function in (CAPTURES | REFUSES).items():
    MODULES[_name] = functools.partial(Part, _function), CAPTURED if _name in CAPTURES else REFUSED


def named() -> list[Entry]:
    """Return the forwards of this file, as the sweeps try them."""
    return [_entry(name, make) for name, (make, _) in MODULES.items()]


def expected(name: str) -> str | None:
    """Return what a GPU is known to do with a forward of this file; None for any other."""
    found = MODULES.get(name.partition(": ")[2])
    return None if found is None else found[1]


def _entry(name: str, make: Callable[[], nn.Module]) -> Entry:
    def samples(device: torch.device, calls: int) -> Iterator[Sample]:
        inputs = [_input(seed).to(device) for seed in range(calls)]
        yield Sample(name, lambda: _made(make).to(device), [((x,), {}) for x in inputs])

    return Entry(name, samples)


def _input(seed: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()
