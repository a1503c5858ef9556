"""The drafter: the drafts of every request are those of the draft alone, without cache, graphs or padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplegraph import (
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    InputError,
    ReplayError,
)
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attend
from simplegraph.spec_decode import EagleDrafter, Proposals

VOCAB, HEADS, HEAD_DIM, STATE, PAGE = 50, 2, 8, 12, 4
MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Draft(nn.Module):
    """One attention layer; what it answers follows from tokens, positions, states and everything before."""

    state_size, hidden_size = STATE, HEADS * HEAD_DIM

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        sizes = {"fusing": (STATE, 16), "embedding": (VOCAB, 16), "placing": (300, 16), "q": (16, 16), "k": (16, 16)}
        for name, size in (sizes | {"v": (16, 16), "head": (16, VOCAB)}).items():
            self.register_buffer(name, torch.randn(*size, generator=generator).to(device))

    def fuse(self, states: Tensor) -> Tensor:
        return states @ self.fusing

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(input_ids, positions, hidden, lambda q, k, v: attend(q, k, v, 0))

    def run(self, ids: Tensor, positions: Tensor, hidden: Tensor, attention: Callable[..., Tensor]) -> Any:
        x = (hidden + self.embedding[ids] + self.placing[positions]).tanh()
        q, k, v = ((x @ weight).view(-1, HEADS, HEAD_DIM) for weight in (self.q, self.k, self.v))
        carried = x + attention(q, k, v).reshape(-1, 16)
        return carried * 2, carried

    def choose(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.head).argmax(-1)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [part.transpose(0, 1) for part in (q, k, v)]
    return nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)


def drafts_alone(model: Draft, ids: list[int], states: Tensor, count: int) -> list[int]:
    """Return the drafts after these tokens, for one request, with everything computed from scratch."""
    found: list[int] = []
    hidden, ids = model.fuse(states), list(ids)
    for _ in range(count):
        device = states.device
        out, carried = model.run(torch.tensor(ids, device=device), torch.arange(len(ids)), hidden, dense)
        found.append(int(model.choose(out[-1:])))
        ids.append(found[-1])
        hidden = torch.cat((hidden, carried[-1:]))
    return found


class Harness:
    """Requests that grow by random numbers of tokens a round, as if a target had accepted so many drafts."""

    def __init__(self, device: torch.device, count: int = 3, **settings: Any) -> None:
        self.device, self.count = device, count
        max_len, reqs = settings.pop("max_model_len", 64), settings.pop("max_num_reqs", 8)
        backend = settings.pop("backend", SDPABackend)
        most = settings.pop("most", count)
        self.cache = PagedKVCache(1, 200, PAGE, HEADS, HEAD_DIM, dtype=torch.float32, device=device)
        self.metadata, own = (
            BatchMetadata(max_num_tokens=64, max_num_reqs=reqs, max_model_len=max_len, page_size=PAGE, device=device)
            for _ in range(2)
        )
        self.backends = [backend(self.cache, metadata, num_heads=HEADS) for metadata in (self.metadata, own)]
        self.model = Draft(device)
        self.proposals = settings.pop("proposals", None) or Proposals(reqs, most, device)
        self.drafter = EagleDrafter(
            self.model,
            *self.backends,
            self.proposals,
            num_draft_tokens=count,
            **{"mode": "FULL_AND_PIECEWISE", "capture_sizes": (1, 2, 4, 8)} | settings,
        )
        self.max_len = max_len
        self.draw = random.Random(0)
        self.ids: dict[int, list[int]] = {}  # by slot: the token after each position
        self.states: dict[int, Tensor] = {}
        self.pages = list(range(1, 200))
        self.table: dict[int, list[int]] = {}

    def start(self, slot: int, length: int) -> None:
        """A request whose prompt is computed with the next prompt step."""
        self.ids[slot], self.states[slot] = [], torch.zeros(0, STATE, device=self.device)
        self.table[slot] = [self.pages.pop(self.draw.randrange(len(self.pages))) for _ in range(self.max_len // PAGE)]
        self.prompts = {**getattr(self, "prompts", {}), slot: length}

    def run_prompts(self) -> None:
        lengths = list(self.prompts.values())
        self._step(list(self.prompts), lengths, [length - 1 for length in lengths], None)
        self.prompts = {}

    def run_round(self, slots: list[int], taken: list[int] | None = None) -> list[int]:
        taken = taken or [self.draw.randint(0, self.count) for _ in slots]
        self._step(slots, [self.count + 1] * len(slots), taken, self.count + 1)
        return taken

    def _step(self, slots: list[int], queries: list[int], kept: list[int], uniform: int | None) -> None:
        """Compute `queries` positions of each request; those up to `kept` count."""
        starts = [len(self.ids[slot]) for slot in slots]
        ids = [[self.draw.randrange(VOCAB) for _ in range(query)] for query in queries]
        states = torch.randn(sum(queries), STATE, generator=torch.Generator().manual_seed(self.draw.randrange(10**6)))
        states = states.to(self.device)
        positions = [start + place for start, query in zip(starts, queries, strict=True) for place in range(query)]
        firsts = [sum(queries[:row]) for row in range(len(queries))]
        last = torch.tensor([first + keep for first, keep in zip(firsts, kept, strict=True)], device=self.device)
        table = [self.table[slot] for slot in slots]
        batch = self.drafter.dispatch(sum(queries), len(slots), uniform).descriptor
        reqs = max(batch.num_reqs or 0, self.drafter.padded_reqs(len(slots)))
        seq_lens = [start + query for start, query in zip(starts, queries, strict=True)]
        shape = {"num_tokens": batch.num_tokens, "num_reqs": reqs}
        self.metadata.set(queries, seq_lens, table, ahead=self.count - 1, **shape)
        flat = torch.tensor([token for row in ids for token in row], device=self.device)
        self.drafter.load(
            flat, torch.tensor(positions, device=self.device), states, last, torch.tensor(slots, device=self.device)
        )
        self.drafter.draft(sum(queries), len(slots), uniform)
        for slot, first, row, keep in zip(slots, firsts, ids, kept, strict=True):
            self.ids[slot] += row[: keep + 1]
            self.states[slot] = torch.cat((self.states[slot], states[first : first + keep + 1]))

    def check(self, slots: list[int]) -> None:
        for slot in slots:
            alone = drafts_alone(self.model, self.ids[slot], self.states[slot], self.count)
            room = self.max_len - len(self.ids[slot]) + 1  # the first draft is written nowhere
            found = self.proposals.tokens[slot].tolist()
            assert found[: self.count][:room] == alone[:room], slot
            assert found[self.count :] == [-1] * (len(found) - self.count)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_those_of_the_draft_alone_with_ragged_acceptance(
    device: torch.device, mode: str, count: int
) -> None:
    served = Harness(device, count, mode=mode)
    assert all(summary.failed == {} for summary in served.drafter.capture())
    for slot, length in ((2, 3), (0, 9), (5, 1)):
        served.start(slot, length)
    served.run_prompts()
    served.check([2, 0, 5])
    taken = set()
    for slots in ([2, 0, 5], [5, 2, 0], [0], [2, 5], [5, 2, 0]):
        taken |= set(served.run_round(slots))
        served.check(slots)
    assert len(taken) > 1
    served.start(7, 6)
    served.run_prompts()
    served.run_round([7, 0, 5, 2])
    served.check([7, 0, 5, 2])
    ran = {
        key[0]
        for manager in (served.drafter.prefill_manager, served.drafter.decode_manager)
        if manager is not None
        for key, graph in manager.stats.graphs.items()
        if graph.replays
    }
    assert ran == {"NONE": set(), "PIECEWISE": {PIECEWISE}, "FULL_DECODE_ONLY": {FULL}}.get(mode, {FULL, PIECEWISE})


def test_all_decode_steps_are_one_replay(device: torch.device) -> None:
    served = Harness(device, 5)
    served.drafter.capture()
    served.start(0, 4)
    served.run_prompts()
    served.run_round([0])
    manager = served.drafter.decode_manager
    assert manager is not None
    assert sum(graph.replays for graph in manager.stats.graphs.values()) == 2


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_a_request_at_its_limit_writes_nothing_beyond_and_leaves_the_others_alone(
    device: torch.device, mode: str
) -> None:
    served = Harness(device, 5, mode=mode, max_model_len=24)
    served.drafter.capture()
    served.start(1, 12)
    served.start(4, 3)
    served.run_prompts()
    before = served.cache._memory.clone()
    served.run_round([1, 4], [5, 1])  # 18 tokens and 5; the next round would go to 24 and 11
    served.run_round([1, 4], [5, 2])
    served.check([1, 4])
    owned = {page for pages in served.table.values() for page in pages}
    foreign = [page for page in range(200) if page not in owned]
    assert torch.equal(served.cache._memory[:, :, foreign], before[:, :, foreign])
    assert len(served.ids[1]) == 24
    with pytest.raises(InputError, match="above max_model_len=24"):
        served.run_round([1, 4])
    served.run_round([4])
    served.check([4])


def test_k_may_change_from_round_to_round_on_one_pool(device: torch.device) -> None:
    five = Harness(device, 5, most=5)
    three = EagleDrafter(
        five.model,
        *five.backends,
        five.proposals,
        num_draft_tokens=3,
        mode="FULL_DECODE_ONLY",
        capture_sizes=(1, 2, 4, 8),
        pool=five.drafter.prefill_manager.pool,
    )
    drafters = {5: five.drafter, 3: three}
    for drafter in drafters.values():
        assert all(summary.failed == {} for summary in drafter.capture())
    assert len({id(drafter.prefill_manager.pool) for drafter in drafters.values()}) == 1
    five.start(0, 4)
    five.start(3, 2)
    five.run_prompts()
    for count in (5, 3, 3, 5, 3):
        five.count, five.drafter = count, drafters[count]
        five.run_round([3, 0])
        five.check([3, 0])
    for drafter in drafters.values():
        for manager in (drafter.prefill_manager, drafter.decode_manager):
            assert manager is not None
            assert sum(graph.replays for graph in manager.stats.graphs.values()) >= 2
    assert five.metadata.max_model_len >= max(len(ids) for ids in five.ids.values())


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "PIECEWISE"])
def test_padding_leaves_the_drafts_of_other_slots_alone(device: torch.device, mode: str) -> None:
    served = Harness(device, 2, mode=mode, capture_sizes=(8,), mixed_capture_sizes=(24,))
    for slot in range(5):
        served.start(slot, 2 + slot)
    served.run_prompts()
    served.drafter.capture()  # its warmups write to the scratch slot
    served.check(list(range(5)))
    served.run_round([0, 1, 2, 3, 4])
    before = served.proposals.tokens.clone()
    served.run_round([3])
    served.check([3])
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(served.proposals.tokens[others], before[others])


def test_the_target_and_the_draft_may_share_a_pool_and_no_output(device: torch.device) -> None:
    target = CudaGraphManager(device=device, mode="FULL", capture_sizes=[24])
    served = Harness(device, 3, pool=target.pool)
    weight = torch.randn(STATE, STATE, device=device)
    source = torch.randn(24, STATE, device=device)
    target.capture(lambda mode, descriptor: source @ weight)
    served.drafter.capture()
    served.start(0, 5)
    served.run_prompts()
    verified = target.run(target.dispatch(24), lambda mode, descriptor: source @ weight)
    expected = verified.clone()
    buffers = served.drafter._buffers
    assert torch.equal(expected, source @ weight)
    taken = served.run_round([0])
    assert taken
    served.check([0])
    kept = (buffers.states, buffers.input_ids, buffers.hidden, served.proposals.tokens)
    assert all(not target.device.in_pool(target.pool, tensor) for tensor in kept)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 0, "most": 1}, "num_draft_tokens is 0; expected a whole number of at least 1"),
        ({"count": 64, "max_model_len": 400}, "expected at most 63"),
        ({"count": 20, "max_model_len": 16}, "expected at most 15"),
        ({"count": 5, "most": 3}, "proposals holds 3"),
        ({"mode": "FULL"}, "mode is FULL; a drafter runs in one of NONE"),
    ],
)
def test_settings_that_cannot_be_are_refused(device: torch.device, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Harness(device, **settings)


def test_backends_that_do_not_belong_together_are_refused(device: torch.device) -> None:
    served = Harness(device)
    prefill, decode = served.backends
    with pytest.raises(ConfigError, match="give decode a separate one"):
        EagleDrafter(served.model, prefill, prefill, served.proposals, num_draft_tokens=2)
    other = PagedKVCache(1, 200, PAGE, HEADS, HEAD_DIM, dtype=torch.float32, device=device)
    stranger = SDPABackend(other, decode.metadata, num_heads=HEADS)
    with pytest.raises(ConfigError, match="different caches"):
        EagleDrafter(served.model, prefill, stranger, served.proposals, num_draft_tokens=2)
    short = BatchMetadata(max_num_tokens=8, max_num_reqs=8, max_model_len=32, page_size=PAGE, device=device)
    behind = SDPABackend(served.cache, short, num_heads=HEADS)
    with pytest.raises(ConfigError, match="max_model_len of decode's metadata is 32, prefill's is 64"):
        EagleDrafter(served.model, prefill, behind, served.proposals, num_draft_tokens=2)
    few = BatchMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=64, page_size=PAGE, device=device)
    behind = SDPABackend(served.cache, few, num_heads=HEADS)
    with pytest.raises(ConfigError, match="max_num_reqs of decode's metadata is 4, below prefill's 8"):
        EagleDrafter(served.model, prefill, behind, served.proposals, num_draft_tokens=2)


def test_states_of_another_target_are_refused(device: torch.device) -> None:
    served = Harness(device)
    numbers = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(InputError, match=r"states is \(4, 99\).*trained for this target"):
        served.drafter.load(numbers, numbers, torch.zeros(4, 99, device=device), numbers[:1], numbers[:1])
    many = numbers[:1].repeat(9)
    with pytest.raises(InputError, match="9 requests; the drafter holds 64 and 8"):
        served.drafter.load(many, many, torch.zeros(9, STATE, device=device), many, many)


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_a_step_that_does_not_fit_what_is_drafted_for_is_refused(device: torch.device, mode: str) -> None:
    served = Harness(device, 3, mode=mode)
    served.drafter.capture()
    served.start(0, 5)
    served.run_prompts()
    served.run_round([0])
    # No step was set since.
    with pytest.raises(ReplayError, match="ran already"):
        served.drafter.draft(4, 1, 4)
    # A batch in which one request is still in its prompt is no uniform one.
    served.metadata.set([4, 2], [13, 2], [served.table[0], served.table[0][5:]], num_tokens=8, num_reqs=2)
    with pytest.raises(
        InputError, match=r"uniform_query_len is 4, .* requests of \[2, 4\] tokens. Run prompts in a separate step"
    ):
        served.drafter.draft(8, 2, 4)
    served.run_round([0])
    served.check([0])


def test_a_piecewise_graph_drafts_for_the_real_requests_only(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Harness(device, 3, mode="PIECEWISE", mixed_capture_sizes=(8, 32))
    served.drafter.capture()
    for slot in range(4):
        served.start(slot, 5)
    served.run_prompts()
    before = served.proposals.tokens.clone()
    chosen, choose = [], served.model.choose
    monkeypatch.setattr(served.model, "choose", lambda hidden: chosen.append(len(hidden)) or choose(hidden))
    # One request in a graph of eight rows; what the step before left of the other requests is still there.
    served.start(6, 3)
    served.run_prompts()
    assert chosen == [1]
    served.check([6])
    assert torch.equal(served.proposals.tokens[:4], before[:4])
    assert [key.num_tokens for _, key in served.drafter.prefill_manager.programs] == [32, 8]
    assert served.drafter.prefill_manager.stats.padded_tokens == 12 + 5


def test_missing_pages_are_named_before_anything_is_written_there(device: torch.device) -> None:
    served = Harness(device, 5, mode="FULL_DECODE_ONLY")
    served.drafter.capture()
    served.start(0, 5)
    served.run_prompts()
    served.table[0] = served.table[0][:3]  # 12 places; the drafts need 5 + 6 + 4
    with pytest.raises(InputError, match="needs 4 pages"):
        served.run_round([0])


def test_a_step_without_room_for_the_drafts_is_refused(device: torch.device) -> None:
    served = Harness(device, 3, mode="FULL_DECODE_ONLY")
    served.metadata.set([4], [8], [[1, 2, 3]], ahead=1)
    with pytest.raises(InputError, match=r"set with ahead=1 and 1 requests, .* need ahead=2 and num_reqs=1 at least"):
        served.drafter.draft(4, 1, 4)
    # Three requests decode in a graph of four, which reads the fourth's length.
    served.metadata.set([4] * 3, [8] * 3, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], ahead=2)
    with pytest.raises(InputError, match=r"ahead=2 and 3 requests, .* num_reqs=4 at least"):
        served.drafter.draft(12, 3, 4)


def test_a_capture_between_rounds_writes_no_keys_and_leaves_the_drafts_alone(device: torch.device) -> None:
    served = Harness(device, 4, mixed_capture_sizes=(2, 8))
    for slot in range(3):
        served.start(slot, 5)
    served.run_prompts()
    served.run_round([0, 1, 2])  # its last rows are beyond those of the smallest graphs
    pages = served.cache._memory[:, :, :200]  # without the one that takes what is left out
    cache, drafts = pages.clone(), served.proposals.tokens.clone()
    assert all(summary.failed == {} for summary in served.drafter.capture())
    assert torch.equal(pages, cache)
    assert torch.equal(served.proposals.tokens[:8], drafts[:8])
    served.run_round([0, 1, 2])
    served.check([0, 1, 2])


def test_attention_that_plans_on_the_host_is_refused_for_several_steps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SDPABackend, "reads_lengths_on_device", False)
    with pytest.raises(ConfigError, match="decode is SDPA, which plans on the host"):
        Harness(device, 2)
    Harness(device, 1)  # has no decode steps
