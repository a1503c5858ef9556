"""Recurrent layers: right in every mode beside float64; nothing but a step's own requests changes a state."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    CaptureSizeError,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    InputError,
    ReplayError,
)
from simplegraph.attention import (
    BackendGroup,
    BatchMetadata,
    Mamba2Backend,
    Mamba2Shape,
    Mamba2Weights,
    PagedKVCache,
    RecurrentBackend,
    SDPABackend,
    StateCache,
    StateMetadata,
    attend,
    attending,
    recur,
)
from tests.support.state_slots import check_continued

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
SHAPE = Mamba2Shape(num_heads=4, head_dim=8, num_groups=2, state_size=16)
LAYERS = (1, 3)
EXACT = 2e-5


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights(shape: Mamba2Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[int, Mamba2Weights]:
    """States that forget slowly, so that a wrong one shows many tokens later."""
    generator = torch.Generator(device).manual_seed(0)
    rows: dict[str, Any] = {"device": device, "generator": generator}
    found = {}
    for layer in LAYERS:
        conv, bias = torch.randn(shape.channels, shape.conv_width, **rows), torch.randn(shape.channels, **rows)
        rates = torch.linspace(-3, 1, shape.num_heads, device=device)
        skip, steps = torch.randn(shape.num_heads, **rows), torch.linspace(-4, 1, shape.num_heads, device=device)
        found[layer] = Mamba2Weights(*(one.to(dtype) for one in (conv, bias, rates, skip, steps)))
    return found


class ExactLayer:
    """One request's states of one layer in float64, advanced token by token; on the CPU."""

    def __init__(self, own: Mamba2Weights, shape: Mamba2Shape) -> None:
        self._weights = [None if one is None else one.double().cpu() for one in own]
        self._shape = shape
        self._inputs = torch.zeros(shape.conv_width, shape.channels, dtype=torch.float64)
        self._state = torch.zeros(shape.num_heads, shape.head_dim, shape.state_size, dtype=torch.float64)

    def advance(self, xbc: Tensor, dt: Tensor) -> Tensor:
        """Compute the next tokens' outputs, (tokens, num_heads * head_dim)."""
        return torch.stack([self._token(*rows) for rows in zip(xbc.double().cpu(), dt.double().cpu(), strict=True)])

    def _token(self, inputs: Tensor, dt: Tensor) -> Tensor:
        conv, bias, rates, skip, steps = self._weights
        shape, columns = self._shape, self._shape.num_groups * self._shape.state_size
        self._inputs = torch.cat((self._inputs[1:], inputs[None]))
        mixed = (self._inputs * conv.t()).sum(0) + bias  # type: ignore[union-attr]
        x, b, c = torch.split(mixed / (1 + (-mixed).exp()), [len(mixed) - 2 * columns, columns, columns])
        group = torch.arange(shape.num_heads) // (shape.num_heads // shape.num_groups)
        b, c = (part.view(shape.num_groups, shape.state_size)[group] for part in (b, c))
        x = x.view(shape.num_heads, shape.head_dim)
        step = (1 + (dt + steps).exp()).log().clamp(*shape.dt_limit)
        decay = (-step * rates.exp()).exp()  # type: ignore[union-attr]
        self._state = decay[:, None, None] * self._state + torch.einsum("h,hp,hn->hpn", step, x, b)
        return (torch.einsum("hpn,hn->hp", self._state, c) + skip[:, None] * x).flatten()  # type: ignore[index]


@dataclasses.dataclass
class Running:
    """One request: its state slot, its tokens so far, and its exact states by layer."""

    slot: int
    length: int
    exact: list[ExactLayer]


class StateEngine:
    """Two recurrent layers on random inputs; requests come, go on, end, and their slots are used again."""

    prompts: Sequence[int] = (1, 1, 2, 3, 7, 12)  # tokens of a request in a step of prompts

    def __init__(
        self,
        device: torch.device,
        shape: Mamba2Shape = SHAPE,
        dtype: torch.dtype = torch.float32,
        *,
        num_slots: int = 10,
        max_reqs: int = 8,
        max_tokens: int = 32,
        **settings: Any,
    ) -> None:
        self.shape = shape
        self.cache = StateCache(num_slots, shape.states(dtype), layers=LAYERS, device=device)
        limits: dict[str, Any] = {"max_num_tokens": max_tokens, "max_num_reqs": max_reqs, "max_model_len": 10_000}
        self.metadata = StateMetadata(**limits, device=device)
        check_continued(self.metadata)
        self.backend = Mamba2Backend(self.cache, self.metadata, shape=shape, weights=weights(shape, device, dtype))
        rows: dict[str, Any] = {"dtype": dtype, "device": device}
        self.xbc = torch.zeros(len(LAYERS), max_tokens, shape.channels, **rows)
        self.dt = torch.zeros(len(LAYERS), max_tokens, shape.num_heads, **rows)
        self.free = list(range(1, num_slots + 1))
        self.running: list[Running] = []
        settings = {"max_num_seqs": max_reqs, "max_num_tokens": max_tokens, "progress": False} | settings
        self.manager = CudaGraphManager(
            device=device, support=self.backend.support, on_capture_failure="raise", **settings
        )
        self.manager.add_hooks(self.backend)
        self.manager.capture(self.forward)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        rows = descriptor.num_tokens
        outputs = []
        with attending(self.backend, mode, descriptor):
            for number, layer in enumerate(LAYERS):
                xbc = self.xbc[number, :rows] * 1  # an intermediate of the graph
                out = xbc.new_zeros(rows, self.shape.num_heads * self.shape.head_dim)
                outputs.append(recur(layer, xbc, self.dt[number, :rows], out=out) * 1)
        return outputs

    def choose(self, draw: random.Random, decode: bool) -> tuple[list[Running], list[int]]:
        """End some requests, begin others, and choose each one's tokens of the step."""
        for gone in [one for one in self.running if draw.random() < 0.15]:
            self.running.remove(gone)
            self.free.append(gone.slot)
        draw.shuffle(self.free)
        while self.free and len(self.running) < self.metadata.max_num_reqs and draw.random() < 0.7:
            exact = [ExactLayer(self.backend.weights[layer], self.shape) for layer in LAYERS]
            self.running.append(Running(self.free.pop(), 0, exact))
        draw.shuffle(self.running)
        left, chosen, counts = self.xbc.shape[1], [], []
        for one in self.running[: draw.randint(1, self.metadata.max_num_reqs)]:
            count = 1 if decode else draw.choice(self.prompts)
            if count <= left:
                left -= count
                chosen.append(one)
                counts.append(count)
        return chosen, counts

    def step(self, seed: int, decode: bool = False) -> tuple[CudaGraphMode, float] | None:
        """Run a step, check all states that are not its own, and return its mode and largest error."""
        draw = random.Random(seed)
        chosen, counts = self.choose(draw, decode)
        if not chosen:
            return None
        generator = torch.Generator(self.xbc.device).manual_seed(seed)
        self.xbc.normal_(generator=generator)
        self.dt.normal_(generator=generator)
        tokens, places = sum(counts), torch.tensor([0, *counts]).cumsum(0).tolist()
        self.xbc[:, tokens:] = torch.nan  # what padding computes reaches nobody
        for one, count in zip(chosen, counts, strict=True):
            one.length += count
        lengths, slots = [one.length for one in chosen], [one.slot for one in chosen]
        for tensor in self.cache.tensors:
            tensor[:, self.free] = torch.nan
        before = [tensor.clone() for tensor in self.cache.tensors]
        batch = self.manager.dispatch(tokens, len(chosen), 1 if tokens == len(chosen) else None)
        reqs = batch.descriptor.num_reqs if batch.mode is FULL else len(chosen)
        self.metadata.set(counts, lengths, slots, num_tokens=batch.descriptor.num_tokens, num_reqs=reqs)
        outputs = self.manager.run(batch, self.forward)
        others = [slot for slot in range(self.cache.num_slots + 1) if slot not in slots]
        for tensor, old in zip(self.cache.tensors, before, strict=True):
            assert torch.equal(tensor[:, others].nan_to_num(7.0), old[:, others].nan_to_num(7.0))
            assert not tensor[:, 0].any()
        worst = 0.0
        for one, start, end in zip(chosen, places, places[1:], strict=False):
            for layer, output, xbc, dt in zip(one.exact, outputs, self.xbc, self.dt, strict=True):
                exact = layer.advance(xbc[start:end], dt[start:end])
                difference = output[start:end].double().cpu() - exact
                worst = max(worst, float(difference.norm() / exact.norm()))
        return batch.mode, worst


def run_steps(served: StateEngine, steps: int, kinds: Sequence[bool]) -> tuple[set[CudaGraphMode], float]:
    found = [one for seed in range(steps) if (one := served.step(seed, kinds[seed % len(kinds)])) is not None]
    return {mode for mode, _ in found}, max(error for _, error in found)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_outputs_are_float64s_whoever_had_the_slot_before(device: torch.device, mode: str) -> None:
    """Prompts in chunks beside decoding requests; free slots hold NaN, padding rows too; slot 0 stays zero."""
    served = StateEngine(device, mode=mode, capture_sizes=[4, 8, 32])
    modes, error = run_steps(served, 30, [False, True])
    assert error <= EXACT
    assert modes == {CudaGraphMode[mode].decode_mode(), CudaGraphMode[mode].mixed_mode()}


@pytest.mark.parametrize(
    "shape",
    [
        Mamba2Shape(num_heads=1, head_dim=1, num_groups=1, state_size=1, conv_width=2),
        Mamba2Shape(num_heads=6, head_dim=5, num_groups=3, state_size=7, conv_width=3),
        Mamba2Shape(num_heads=2, head_dim=24, num_groups=1, state_size=40, dt_limit=(0.01, 0.3)),
    ],
)
def test_other_shapes(device: torch.device, shape: Mamba2Shape) -> None:
    _, error = run_steps(StateEngine(device, shape, mode="FULL", capture_sizes=[8, 32]), 12, [False, True])
    assert error <= EXACT


def state_of(served: StateEngine) -> list[Tensor]:
    return [tensor.nan_to_num(7.0) for tensor in served.cache.tensors]


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_more_requests_than_state_slots_are_refused_and_the_others_go_on(device: torch.device, mode: str) -> None:
    served = StateEngine(device, mode=mode, num_slots=4, max_reqs=4, capture_sizes=[4, 8])
    run_steps(served, 3, [True])
    before = state_of(served)
    with pytest.raises(CaptureSizeError, match="the step has 5 requests, but states for 4 at most; let"):
        served.metadata.set(1, [1] * 5, [1, 2, 3, 4, 5])
    assert all(torch.equal(old, new) for old, new in zip(before, state_of(served), strict=True))
    assert run_steps(served, 6, [True])[1] <= EXACT


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([1, 5], r"slots\[1\] is 5; expected 1 to 4: slot 0 is for padding"),
        ([0, 1], r"slots\[0\] is 0; expected 1 to 4"),
        ([-1, 1], r"slots\[0\] is -1"),
        ([2, 2], "requests 0 and 1 both have state slot 2; give each its own"),
        ([1.5, 2], "expected one whole number per request"),
        ([1], "slots"),
    ],
)
def test_slots_that_are_not_the_requests_own_are_refused(device: torch.device, slots: list[Any], words: str) -> None:
    served = StateEngine(device, mode="NONE", num_slots=4, max_reqs=4)
    before = served.metadata.batch.version
    with pytest.raises(InputError, match=words):
        served.metadata.set(1, [1, 1], slots)
    assert served.metadata.batch.version == before


def test_graphs_for_more_requests_than_slots_are_not_captured(device: torch.device) -> None:
    """The manager is told by its hooks; graph sizes between the slots end at their number."""
    words = r"Mamba2Backend takes 4 requests at most, .* for max_num_seqs=64; pass max_num_seqs=4"
    with pytest.raises(ConfigError, match=words):
        StateEngine(device, mode="FULL", num_slots=4, max_reqs=4, max_num_seqs=64)
    with pytest.raises(ConfigError, match="max_num_seqs=None"):
        StateEngine(device, mode="FULL_DECODE_ONLY", num_slots=4, max_reqs=4, max_num_seqs=None)
    served = StateEngine(device, mode="FULL_AND_PIECEWISE", num_slots=6, max_reqs=6, capture_sizes=[1, 2, 4, 8, 16])
    sizes: dict[CudaGraphMode, list[int]] = {FULL: [], PIECEWISE: []}
    for mode, descriptor in served.manager.programs:
        sizes[mode].append(descriptor.num_tokens)
    assert sorted(sizes[FULL]) == [1, 2, 4, 6]
    assert sorted(sizes[PIECEWISE]) == [1, 2, 4, 8, 16]  # prompts are longer than slots are many


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_replay_is_proven_with_the_states_put_back(device: torch.device, mode: str) -> None:
    served = StateEngine(device, mode=mode, capture_sizes=[4])
    plain = StateEngine(device, mode="NONE")
    for one in (served, plain):
        for length in (1, 2, 3):
            generator = torch.Generator(device).manual_seed(length)
            one.xbc.normal_(generator=generator)
            batch = one.manager.dispatch(3, 3, 1)
            one.metadata.set(
                1, [length] * 3, [3, 1, 2], num_tokens=batch.descriptor.num_tokens, num_reqs=batch.descriptor.num_reqs
            )
            one.manager.run(batch, one.forward, verify=one is served, state=one.cache.tensors)
    assert [graph.proof for graph in served.manager.stats.graphs.values()] == ["exact"]
    for mine, theirs in zip(served.cache.tensors, plain.cache.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=EXACT, atol=EXACT)


class TwoKinds:
    """Layer 0 attends, layer 1 recurs."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        rows: dict[str, Any] = {"dtype": torch.float32, "device": device}
        limits: dict[str, Any] = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 48, "device": device}
        self.pages = BatchMetadata(**limits, page_size=4)
        keys = PagedKVCache(1, 20, 4, 2, 8, **rows)
        attention = SDPABackend(keys, self.pages, num_heads=4)
        self.states = StateMetadata(**limits)
        cache = StateCache(4, SHAPE.states(torch.float32), layers=LAYERS, device=device)
        self.memory = [keys._memory, *cache.tensors]
        recurrent = Mamba2Backend(cache, self.states, shape=SHAPE, weights=weights(SHAPE, device))
        self.group = BackendGroup({0: attention, 1: recurrent})
        self.hidden = torch.randn(8, SHAPE.channels, **rows)
        settings = {"max_num_seqs": 4, "max_num_tokens": 8, "progress": False} | settings
        self.manager = CudaGraphManager(device=device, support=self.group.support, **settings)
        self.manager.add_hooks(self.group)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        hidden = self.hidden[: descriptor.num_tokens]
        with attending(self.group, mode, descriptor):
            q, k, v = torch.split(hidden[:, :64].unflatten(1, (8, 8)), [4, 2, 2], dim=1)
            out = attend(q, k, v, 0).flatten(1)
            return recur(1, hidden, hidden[:, :4], out=hidden.new_zeros(len(hidden), 32)) + out


def test_a_group_of_attention_and_states_is_set_to_one_step(device: torch.device) -> None:
    served = TwoKinds(device, mode="FULL", capture_sizes=[2, 4])
    assert served.group.max_num_reqs == 4
    served.manager.capture(served.forward)
    batch = served.manager.dispatch(2, 2, 1)
    shape = {"num_tokens": 2, "num_reqs": 2}
    served.pages.set(1, [1, 1], [[1], [2]], **shape)
    served.states.set(1, [1], [1], num_tokens=2, num_reqs=2)
    with pytest.raises(ReplayError, match="set to 2 requests and 2 tokens, another to 1 and 1"):
        served.manager.run(batch, served.forward)
    served.states.set(1, [1, 1], [4, 1], **shape)
    found = served.manager.run(batch, served.forward).clone()
    plain = TwoKinds(device, mode="NONE")
    plain.hidden = served.hidden
    plain.pages.set(1, [1, 1], [[1], [2]])
    plain.states.set(1, [1, 1], [4, 1])
    torch.testing.assert_close(found, plain.manager.run(plain.manager.dispatch(2, 2, 1), plain.forward))


def test_a_step_of_attention_and_states_is_proven(device: torch.device) -> None:
    """The step runs twice, eagerly and replayed from where that began, and counts once."""
    served = TwoKinds(device, mode="FULL_AND_PIECEWISE", capture_sizes=[2, 4])
    served.manager.capture(served.forward)
    for length, kind in ((1, 1), (2, 1), (3, None)):
        batch = served.manager.dispatch(2, 2, kind)
        served.pages.set(1, [length] * 2, [[1], [2]], num_tokens=2, num_reqs=2)
        served.states.set(1, [length] * 2, [4, 1], num_tokens=2, num_reqs=2)
        served.manager.run(batch, served.forward, verify=True, state=served.memory)
        with pytest.raises(ReplayError, match="this step ran already"):
            served.manager.run(batch, served.forward)
    assert {graph.proof for graph in served.manager.stats.graphs.values()} == {"exact", ""}
    assert not served.manager.stats.failures


def test_layers_of_the_wrong_kind_are_refused(device: torch.device) -> None:
    served = TwoKinds(device, mode="NONE")
    rows = served.hidden[:1]
    with pytest.raises(ReplayError, match="recur was called outside"):
        recur(1, rows, out=rows)
    served.pages.set(1, [1], [[1]])
    served.states.set(1, [1], [1])
    with attending(served.group, NONE, BatchDescriptor(1, 1)):
        with pytest.raises(ConfigError, match="recur was called for layer 0, which SDPA serves"):
            recur(0, rows, out=rows)
        with pytest.raises(ConfigError, match="attend was called for layer 1, which Mamba2 serves"):
            attend(rows[:, :32].view(1, 4, 8), None, None, 1)
        with pytest.raises(InputError, match=r"out has shape \(2, .*; the step has 1 rows"):
            recur(1, rows, rows[:, :4], out=served.hidden[:2])
        with pytest.raises(InputError, match=r"have columns \[\(96,\), \(5,\), \(32,\)\]; expected \(96, 4, 32\)"):
            recur(1, rows, rows[:, :5], out=rows[:, :32])
        with pytest.raises(InputError, match=r"xbc is torch.float64"):
            recur(1, rows.double(), rows[:, :4], out=rows[:, :32])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": 3}, "max_num_reqs=4 requests, the cache has 3 state slots"),
        ({"slots": 0}, "num_slots is 0"),
        ({"layers": [1, 1]}, "no layer twice"),
        ({"shape": SHAPE._replace(head_dim=16)}, "the cache has states"),
        ({"shape": SHAPE._replace(num_groups=3)}, "num_groups that divides num_heads"),
        ({"layers": [1, 2]}, "weights of layer 2 are missing"),
        ({"rates": torch.zeros(5)}, r"A_log of layer 1 is \(5,\) on cpu; expected \(4,\) on cpu"),
    ],
)
def test_states_and_weights_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    cpu = torch.device("cpu")
    own = weights(SHAPE, cpu)
    if "rates" in change:
        own[1] = own[1]._replace(A_log=change["rates"])

    def build() -> None:
        layers = change.get("layers", LAYERS)
        cache = StateCache(change.get("slots", 4), SHAPE.states(torch.float32), layers=layers, device=cpu)
        metadata = StateMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=64, device=cpu)
        Mamba2Backend(cache, metadata, shape=change.get("shape", SHAPE), weights=own)

    with pytest.raises(ConfigError, match=words):
        build()


def test_a_backend_of_ones_own_declares_its_support() -> None:
    def run(self: Any, *_: Any) -> None: ...

    with pytest.raises(ConfigError, match="does not declare support and name"):
        type("Undeclared", (RecurrentBackend,), {"run": run})
    declared = {"run": run, "support": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "name": "declared"}
    assert type("Declared", (RecurrentBackend,), declared).name == "declared"  # type: ignore[attr-defined]
