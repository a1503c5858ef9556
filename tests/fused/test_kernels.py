"""Fused operators, by Triton and by torch: as exact as the operators that a model would run, at any shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import EXACT_DTYPES, INTERPRETED, needs_triton
from torch import Tensor

from simplegraph.fused.torch_operators import ACTIVATIONS, DTYPES, FINISHES, Adapted, Grouped, Operators, RotaryWrite


def triton() -> Operators:
    from simplegraph.fused.triton_operators import TritonOperators

    return TritonOperators()


# An operator, and the dtypes in which it rounds: Triton's interpreter cuts numbers to bfloat16 off.
MAKES: list[Any] = [
    *(pytest.param(Operators, dtype, id=f"torch-{dtype}") for dtype in DTYPES),
    *(pytest.param(triton, dtype, id=f"triton-{dtype}", marks=needs_triton) for dtype in EXACT_DTYPES),
]
every = pytest.mark.parametrize(("make", "dtype"), MAKES)


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 3.0) -> Tensor:
    return (scale * torch.randn(shape, device=device)).to(dtype)


def check(found: Tensor, exact: Tensor, text: Tensor, *, kernels: bool) -> None:
    """Assert that results err by half a unit if they come from the kernels, and at most as much as the model's text."""
    assert found.dtype is text.dtype
    assert found.shape == exact.shape
    unit = torch.finfo(found.dtype).eps
    error, own = ((each.double() - exact).abs() for each in (found, text))
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert error.max() <= own.max() * 1.05 + slack
    if kernels:
        assert (error <= (4 if found.dtype is torch.float32 else 0.502) * unit * exact.abs() + slack).all()


@every
@pytest.mark.parametrize("columns", [1, 100, 2048])
@pytest.mark.parametrize("rows", [(1,), (3, 2), (65,)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_sum_and_its_rms_norm(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    columns: int,
    rows: tuple[int, ...],
    offset: float,
    device: torch.device,
) -> None:
    x, residual, weight = (
        numbers(*shape, dtype=dtype, device=device) for shape in ((*rows, columns), (*rows, columns), (columns,))
    )
    before = x.clone(), residual.clone()
    normed, total = make().add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, x + residual)  # the sum that the model's text has, to the bit
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    exact = F.rms_norm(total.double(), (columns,), weight.double() + offset, 1e-5)
    wide = total.float()
    text = weight.float() + offset
    text = (text * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5))).to(dtype)
    check(normed, exact, text, kernels=make is triton)
    assert torch.equal(make().rms_norm(total, weight, 1e-5, offset), normed)


@every
@pytest.mark.parametrize("columns", [1, 100, 1024])
@pytest.mark.parametrize("rows", [(1,), (3, 2)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_sum_and_its_layer_norm(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    columns: int,
    rows: tuple[int, ...],
    biased: bool,
    device: torch.device,
) -> None:
    x, residual = (numbers(*rows, columns, dtype=dtype, device=device) + 5 for _ in range(2))
    weight, bias = (numbers(columns, dtype=dtype, device=device) for _ in range(2))
    given = bias if biased else None
    normed, total = make().add_layer_norm(x, residual, weight, given, 1e-5)
    assert torch.equal(total, x + residual)
    exact = F.layer_norm(total.double(), (columns,), weight.double(), bias.double() if biased else None, 1e-5)
    check(normed, exact, F.layer_norm(total, (columns,), weight, given, 1e-5), kernels=False)


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (40, 4), (320, 32), (200, 1)])
@pytest.mark.parametrize(("images", "height", "width"), [(1, 1, 2), (3, 5, 7), (2, 24, 16)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_group_norm_of_images_in_channels_last(
    dtype: torch.dtype,
    channels: int,
    groups: int,
    images: int,
    height: int,
    width: int,
    affine: bool,
    device: torch.device,
) -> None:
    """The mean is a hundred times the deviation, which sums of squares would not survive."""
    x = numbers(images, channels, height, width, dtype=dtype, device=device) + (300 if dtype is torch.float32 else 5)
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (numbers(channels, dtype=dtype, device=device) if affine else None for _ in range(2))
    found = triton().group_norm(x, Grouped(groups, 1e-5, weight, bias))
    wide = [None if each is None else each.double() for each in (weight, bias)]
    exact = F.group_norm(x.double(), groups, *wide, 1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found.dtype is dtype
    unit = torch.finfo(dtype).eps
    # Inputs of a mean of 300 are themselves known to 300 units only.
    slack = 2e-3 * exact.abs().max() if dtype is torch.float32 else 4e-6 * exact.abs().max()
    assert ((found.double() - exact).abs() <= unit * exact.abs() + slack).all()


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize(("channels", "groups"), [(32, 32), (40, 4), (320, 32)])
@pytest.mark.parametrize("given", ["row", "added", "both", "none"])
def test_a_group_norm_of_a_sum_and_its_activation(
    dtype: torch.dtype, channels: int, groups: int, given: str, device: torch.device
) -> None:
    """The sum's summand is a hundred times the deviation."""
    x = numbers(3, channels, 5, 7, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    weight, bias = (numbers(channels, dtype=dtype, device=device) for _ in range(2))
    row = numbers(channels, dtype=dtype, device=device) + 300 if given in ("row", "both") else None
    added = numbers(3, 2 * channels, dtype=dtype, device=device)[:, channels:] if given in ("added", "both") else None
    tensors = weight, bias, row, added
    found = triton().group_norm(x, Grouped(groups, 1e-5, *tensors, "silu"))
    wide = [None if each is None else each.double() for each in tensors]
    exact = Operators().group_norm(x.double(), Grouped(groups, 1e-5, *wide, "silu"))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert found.dtype is dtype
    slack = (5e-4 if row is not None and dtype is torch.float32 else 4e-6) * exact.abs().max()
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + slack).all()


ADAPTED = [
    ("weight", "bias", "row"),
    ("scale", "shift"),
    ("gate", "residual", "scale", "shift"),
    ("gate", "residual", "weight", "bias", "scale", "shift"),
    ("residual",),
]


@every
@pytest.mark.parametrize("columns", [1, 100, 1152])
@pytest.mark.parametrize("given", ADAPTED, ids="-".join)
def test_an_adaptive_norm(
    make: Callable[[], Operators], dtype: torch.dtype, columns: int, given: tuple[str, ...], device: torch.device
) -> None:
    shapes = {"weight": (columns,), "bias": (columns,), "row": (columns,), "residual": (2, 5, columns)}
    x = numbers(2, 5, columns, dtype=dtype, device=device)
    tensors = {name: numbers(*shapes.get(name, (2, columns)), dtype=dtype, device=device) for name in given}
    if "scale" in given:  # as parts of one tensor
        tensors["scale"], tensors["shift"] = numbers(2, 2 * columns, dtype=dtype, device=device).chunk(2, dim=-1)
    normed, total = make().adapt(x, Adapted(1e-5, **tensors))
    wide = {name: each.double() for name, each in tensors.items()}
    text, own_total = Operators().adapt(x, Adapted(1e-5, **tensors))
    exact_total = Operators().adapt(x.double(), Adapted(1e-5, **wide))[1]
    check(total, exact_total, own_total, kernels=make is triton and "residual" in given)
    if "residual" in given:  # the norm is that of the rounded sum
        names = ("weight", "bias", "scale", "shift")
        inner = {name: each for name, each in wide.items() if name in names}
        exact = Operators().adapt(total.double(), Adapted(1e-5, **inner))[0]
        text = Operators().adapt(total, Adapted(1e-5, **{name: tensors[name] for name in inner}))[0]
    else:
        exact = Operators().adapt(x.double(), Adapted(1e-5, **wide))[0]
    check(normed, exact, text, kernels=False)


@every
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 256), (40, 24)])
def test_a_linear_layer_and_its_gelu(
    make: Callable[[], Operators], dtype: torch.dtype, inputs: int, outputs: int, device: torch.device
) -> None:
    x = numbers(2, 3, inputs, dtype=dtype, device=device)
    weight = numbers(outputs, inputs, dtype=dtype, device=device, scale=inputs**-0.5)
    bias = numbers(outputs, dtype=dtype, device=device)
    exact = Operators().linear_gelu(x.double(), weight.double(), bias.double())
    found, text = (each.linear_gelu(x, weight, bias) for each in (make(), Operators()))
    check(found, exact, text, kernels=False)


@every
@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize(("biased", "added"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(1, 24, 1, 1), (2, 64, 5, 7), (1, 3, 40, 30)])
def test_what_follows_a_convolution(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    kind: str,
    biased: bool,
    added: bool,
    scaled: bool,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    x, residual = (
        numbers(*shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    bias, factor = (numbers(shape[1], dtype=torch.float32 if scaled else dtype, device=device) for _ in range(2))
    given = bias if biased else None, residual if added else None, kind, factor if scaled else None
    exact = x.double() * (factor.double().view(-1, 1, 1) if scaled else 1)
    exact = exact + (bias.double().view(-1, 1, 1) if biased else 0) + (residual.double() if added else 0)
    exact = FINISHES[kind](exact)
    text = Operators().finish(x.clone(), *given)
    found = make().finish(x.clone(), *given)
    check(found, exact, text, kernels=make is triton)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.isnan(make().finish(torch.full_like(x, torch.nan), *given)).all()


@every
@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_a_convolution_of_pixels(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    kind: str,
    biased: bool,
    channels_last: bool,
    device: torch.device,
) -> None:
    x, weight = (numbers(*shape, dtype=dtype, device=device) for shape in ((2, 24, 5, 7), (40, 24, 1, 1)))
    x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    bias = numbers(40, dtype=dtype, device=device) if biased else None
    exact = Operators().pointwise(x.double(), weight.double(), bias.double() if bias is not None else None, kind)
    found, text = (each.pointwise(x, weight, bias, kind) for each in (make(), Operators()))
    check(found, exact, text, kernels=False)


@every
@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 0), (2, 2, 1)])
@pytest.mark.parametrize("shape", [(1, 40, 6, 5), (3, 16, 7, 9)])
@pytest.mark.parametrize("by_window", [True, False])
def test_a_depthwise_convolution(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    kind: str,
    size: int,
    stride: int,
    padding: int,
    shape: tuple[int, ...],
    by_window: bool,
    device: torch.device,
) -> None:
    x = numbers(*shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    weight = numbers(size, size, 1, shape[1], dtype=dtype, device=device, scale=1 / size).permute(3, 2, 0, 1)
    weight = weight if by_window else weight.contiguous()
    bias = numbers(shape[1], dtype=dtype, device=device)
    found = make().depthwise(x, weight, bias, stride, padding, kind)
    exact = Operators().depthwise(x.double(), weight.double(), bias.double(), stride, padding, kind)
    if by_window and 2 * padding < size:  # else torch convolves, and rounds in between
        check(found, exact, Operators().depthwise(x, weight, bias, stride, padding, kind), kernels=False)
    torch.testing.assert_close(found, exact.to(dtype), rtol=0.02, atol=0.02)
    assert found.is_contiguous(memory_format=torch.channels_last)
    unknown = torch.full_like(x, torch.nan)
    assert torch.isnan(make().depthwise(unknown, weight, bias, stride, padding, kind)[:, :, 1:-1, 1:-1]).all()


@every
@pytest.mark.parametrize("kind", ["relu", "silu"])
@pytest.mark.parametrize(("channels", "squeezed"), [(96, 4), (1152, 48), (100, 10)])
@pytest.mark.parametrize("images", [1, 3])
def test_squeeze_and_excitation(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    kind: str,
    channels: int,
    squeezed: int,
    images: int,
    device: torch.device,
) -> None:
    means = numbers(images, channels, dtype=dtype, device=device)
    narrow, wide = (
        (numbers(many, few, dtype=dtype, device=device, scale=few**-0.5), numbers(many, dtype=dtype, device=device))
        for many, few in ((squeezed, channels), (channels, squeezed))
    )
    double = [tuple(each.double() for each in layer) for layer in (narrow, wide)]
    exact = Operators().excite(means.double(), *double, kind)
    found = make().excite(means, narrow, wide, kind)
    text = Operators().excite(means, narrow, wide, kind)
    check(found, exact, text, kernels=False)


@every
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("columns", [1, 100, 1500])
@pytest.mark.parametrize("joined", [True, False])
def test_a_gated_activation(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    kind: str,
    columns: int,
    joined: bool,
    device: torch.device,
) -> None:
    both = numbers(5, 2, 2 * columns, dtype=dtype, device=device, scale=4)
    gate, up = both.chunk(2, dim=-1) if joined else (part.contiguous() for part in both.chunk(2, dim=-1))
    found = make().gated(gate, up, kind)
    assert found.is_contiguous()
    exact = ACTIVATIONS[kind](gate.double()) * up.double()
    # torch's own GELU by tanh loses the small results of large negative gates.
    check(found, exact, ACTIVATIONS[kind](gate) * up, kernels=make is triton and kind == "silu")


def rotated(heads: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@every
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "elements"), [(4, 2, 64), (7, 1, 16), (3, 3, 24)])
def test_rotation_and_cache_write(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    normed: bool,
    heads: int,
    kv_heads: int,
    elements: int,
    device: torch.device,
) -> None:
    """Heads of 24 elements are for torch; a row without a slot leaves every page alone."""
    tokens, page, num_pages = 9, 4, 5
    rows = {"dtype": dtype, "device": device}
    wide = numbers(tokens, heads + 2 * kv_heads + 1, elements, **rows)
    qkv, norms = wide[:, :-1], tuple(numbers(elements, **rows) for _ in range(2))
    beside = wide[:, -1].clone()
    angles = torch.arange(32, device=device)[:, None] / 10 ** torch.linspace(0, 2, elements // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    positions = torch.randint(0, 32, (tokens,), device=device)
    slots = torch.randperm(num_pages * page, device=device)[:tokens]
    slots[[2, 7]] = -1
    memory = numbers(2, num_pages + 1, page, kv_heads, elements, **rows)
    q, k, v = (part.double() for part in qkv.split((heads, kv_heads, kv_heads), dim=1))
    if normed:
        q, k = (F.rms_norm(part, (elements,), norm.double(), 1e-5) for part, norm in zip((q, k), norms, strict=True))
    q, k = (rotated(part, table, positions) for part in (q, k))
    kept = memory[:, :num_pages].flatten(1, 2).double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kept[0, slot], kept[1, slot] = k[row], v[row]
    pages = (memory[0], memory[1])
    make().rotate_and_write(qkv, RotaryWrite(positions, table, pages, slots, heads, norms if normed else None, 1e-5))
    unit = torch.finfo(dtype).eps
    for found, exact in ((qkv[:, :heads], q), (memory[:, :num_pages].flatten(1, 2), kept)):
        torch.testing.assert_close(found.double(), exact, rtol=2 * unit, atol=6 * unit)
    assert torch.equal(memory[1, :num_pages].flatten(0, 1).double(), kept[1])  # values are copied
    assert torch.equal(wide[:, -1], beside)


@every
@pytest.mark.parametrize("columns", [1, 100, 2048])
@pytest.mark.parametrize("rows", [(1,), (3, 2), (65,)])
@pytest.mark.parametrize("gaps", ["none", "between rows", "between columns"])
def test_a_gated_norm(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    columns: int,
    rows: tuple[int, ...],
    gaps: str,
    device: torch.device,
) -> None:
    """The gate is a part of a wider projection's rows in most models."""
    x, weight = (numbers(*shape, dtype=dtype, device=device) for shape in ((*rows, columns), (columns,)))
    wide = numbers(*rows, 2 * columns, dtype=dtype, device=device)
    gate = {"none": x.flip(0), "between rows": wide[..., columns:], "between columns": wide[..., ::2]}[gaps]
    before = x.clone(), gate.clone()
    found = make().gated_rms_norm(x, gate, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(gate, before[1])

    def text(product: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return weight * (product * torch.rsqrt(product.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)

    exact = text(x.double() * F.silu(gate.double()), weight.double(), torch.float64)
    kernels = make is triton and gaps != "between columns"
    check(found, exact, text(x.float() * F.silu(gate.float()), weight, dtype), kernels=kernels)


@every
@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24)])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_gated_norm_of_no_rows(
    make: Callable[[], Operators], dtype: torch.dtype, shape: tuple[int, ...], groups: int, device: torch.device
) -> None:
    x, weight = torch.zeros(shape, dtype=dtype, device=device), torch.ones(24, dtype=dtype, device=device)
    found = make().gated_rms_norm(x, x, weight, 1e-5, groups)
    assert (found.shape, found.dtype) == (shape, dtype)


@pytest.mark.parametrize("make", [Operators, pytest.param(triton, marks=needs_triton)])
@pytest.mark.parametrize(("value", "gate"), [(1e34, -1e5), (3e38, -100.0), (-1e38, -90.0), (3e38, -2.0), (1e38, -88.0)])
def test_a_gated_norm_of_huge_numbers_is_finite_where_its_text_is(
    make: Callable[[], Operators], value: float, gate: float, device: torch.device
) -> None:
    x, gates = torch.randn(2, 1, 8, device=device)
    x[0, 3], gates[0, 3] = value, gate
    product = x * F.silu(gates)
    expected = product * torch.rsqrt(product.pow(2).mean(-1, keepdim=True) + 1e-5)
    found = make().gated_rms_norm(x, gates, torch.ones(8, device=device), 1e-5)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("groups", [2, 4])
@needs_triton
def test_a_gated_norm_in_groups_is_for_torch(groups: int, device: torch.device) -> None:
    x, gate, weight = (numbers(*shape, dtype=torch.float32, device=device) for shape in ((3, 8), (3, 8), (8,)))
    found = triton().gated_rms_norm(x, gate, weight, 1e-5, groups)
    for part in range(groups):
        columns = slice(part * 8 // groups, (part + 1) * 8 // groups)
        alone = Operators().gated_rms_norm(x[:, columns], gate[:, columns], weight[columns], 1e-5)
        torch.testing.assert_close(found[:, columns], alone)


@needs_triton
@pytest.mark.parametrize("case", ["gradient", "float64", "another dtype", "no rows", "another shape"])
def test_what_the_kernels_do_not_take_is_for_torch(case: str, device: torch.device) -> None:
    given = {"dtype": torch.float64 if case == "float64" else torch.float32, "device": device}
    x, residual = torch.randn(0 if case == "no rows" else 3, 8, **given), torch.randn(1, 8, **given)
    if case != "another shape":
        residual = residual.expand_as(x)
    weight = torch.randn(8, **given).to(torch.bfloat16 if case == "another dtype" else given["dtype"])
    if case == "another dtype":
        x, residual = x.to(torch.bfloat16), residual.float()
    x.requires_grad_(case == "gradient")
    expected = Operators().add_rms_norm(x, residual, weight, 1e-5)
    found = triton().add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(found, expected)
    assert found[0].requires_grad is (case == "gradient")
    gate = x if case != "another dtype" else residual
    wide = residual.double()
    assert torch.equal(triton().gated(gate, wide, "silu"), Operators().gated(gate, wide, "silu"))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on a CPU")
@needs_triton
def test_tensors_that_were_moved_to_a_cpu_are_for_torch() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert torch.equal(triton().rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))


@every
@pytest.mark.parametrize(("outputs", "inputs"), [((1,), 1), ((37, 5), 100), ((2, 9, 3), 2500), ((5,), 4100)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers_of_one_row(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    outputs: tuple[int, ...],
    inputs: int,
    biased: bool,
    device: torch.device,
) -> None:
    x = numbers(1, 1, inputs, dtype=dtype, device=device)
    # Rows of larger matrices.
    weights = [numbers(size, inputs + 3, dtype=dtype, device=device)[:, :inputs] for size in outputs]
    biases = [numbers(size, dtype=dtype, device=device) if biased else None for size in outputs]
    found = make().linears(x, weights, biases)
    for one, weight, bias in zip(found, weights, biases, strict=True):
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert one.shape == exact.shape
        sizes = F.linear(x.double().abs(), weight.double().abs())  # what float32 rounds is of these
        error = (one.double() - exact).abs()
        rounded = 0.51 * exact.abs()
        if make is Operators and bias is not None:  # cuBLAS may round the product, too
            rounded += 0.51 * (exact - bias.double()).abs()
        assert (error <= torch.finfo(dtype).eps * rounded + 1e-5 * sizes).all()


@every
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (37, 100), (6, 4100)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_of_two_linear_layers_of_one_row_is_that_of_the_gate_alone(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    kind: str,
    biased: bool,
    device: torch.device,
) -> None:
    x = numbers(1, 1, inputs, dtype=dtype, device=device)
    weights = [numbers(outputs, inputs, dtype=dtype, device=device) for _ in range(2)]
    biases = [numbers(outputs, dtype=dtype, device=device) if biased else None for _ in range(2)]
    gate, up, product = make().linears(x, weights, biases, kind)
    assert [gate.shape, up.shape, product.shape] == 3 * [(1, 1, outputs)]
    assert all(map(torch.equal, (gate, up), make().linears(x, weights, biases)))
    assert torch.equal(product, make().gated(gate, up, kind))


@every
@pytest.mark.parametrize(
    ("heads", "kv_heads", "elements", "keys"), [(4, 2, 8, 10), (4, 4, 40, 300), (40, 2, 24, 1100), (2, 1, 64, 2100)]
)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_attention_of_one_query(
    make: Callable[[], Operators],
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    elements: int,
    keys: int,
    masked: bool,
    biased: bool,
    device: torch.device,
) -> None:
    rows, made = 2, {"dtype": dtype, "device": device}
    q = numbers(rows, heads, 1, elements, scale=1.0, **made)
    cache = numbers(2, rows, kv_heads, keys + 7, elements, scale=1.0, **made)
    k, v = cache[:, :, :, :keys]
    mask = torch.rand(rows, 1, 1, keys, device=device) > 0.3 if masked else None
    if mask is not None:  # what nobody has written yet
        v.masked_fill_(mask.logical_not().transpose(2, 3), float("nan"))
    bias = numbers(1, heads, 1, keys, **made) if biased else None
    if masked and make is Operators:
        v.nan_to_num_()
    found = make().attend(q, k, v, mask, bias, 0.3)
    group = heads // kv_heads
    wide = [each.double().nan_to_num().repeat_interleave(group, 1) for each in (k, v)]
    scores = 0.3 * q.double() @ wide[0].transpose(2, 3) + (0 if bias is None else bias.double())
    scores = scores if mask is None else scores.masked_fill(mask.logical_not(), float("-inf"))
    exact = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
    assert found.shape == (rows, 1, heads, elements)
    assert (found.double() - exact).abs().max() <= max(2 * torch.finfo(dtype).eps, 1e-5) * exact.abs().max()


@every
def test_a_query_that_sees_no_key_is_no_reason_to_be_wrong_for_others(
    make: Callable[[], Operators], dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = (numbers(2, 2, keys, 16, dtype=dtype, device=device, scale=1.0) for keys in (1, 600, 600))
    mask = torch.zeros(2, 1, 1, 600, dtype=torch.bool, device=device)
    mask[0, ..., 5] = True
    found = make().attend(q, k, v, mask, None, 1.0)
    # Torch's kernels for float32 on a GPU multiply in parts.
    exact = dtype is not torch.float32 or make is not Operators
    torch.testing.assert_close(found[0, 0], v[0, :, 5], **({"rtol": 0, "atol": 0} if exact else {}))


@every
def test_attention_adds_its_parts_up_in_float32_whatever_the_default_is(
    make: Callable[[], Operators], dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v = (numbers(1, 2, keys, 16, dtype=dtype, device=device, scale=4.0) for keys in (1, 2000, 2000))
    expected = make().attend(q, k, v, None, None, 1.0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = make().attend(q, k, v, None, None, 1.0)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


@needs_triton
@pytest.mark.parametrize("case", ["another device", "negated by a flag"])
def test_tensors_whose_memory_says_something_else_are_for_torch(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators: Any = triton()
    monkeypatch.setattr(operators._one_row, "linear", lambda *given: pytest.fail("a kernel got them"))
    x, weight = numbers(1, 64, dtype=torch.float32, device=device), torch.ones(8, 64, device=device)
    if case == "another device":
        with contextlib.suppress(RuntimeError):  # as torch says it
            operators.linears(x, [weight.to("meta")], [None])
    else:
        found = operators.linears(torch._neg_view(x), [weight], [None])[0]
        torch.testing.assert_close(found, -F.linear(x, weight))
