"""Sliding windows in the engine: tokens are those of transformers, from pages that change owners behind the windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_engine  # noqa: E402
from tiny_engine import PAGE, alone, engine, prompts  # noqa: E402

from bench.engine import Engine, EngineError, RequestError, SamplingParams  # noqa: E402
from bench.engine.pages import PageAllocator  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.engine.spec_runner import SpecRunner  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from bench.models.llama_kinds import attention_window  # noqa: E402
from simplegraph import CudaGraphMode  # noqa: E402

SHAPE: dict[str, Any] = tiny_engine.SHAPE | {"sliding_window": 10}
# The first layers of the Qwen see all keys, the others a window; a Mistral's layers all have one.
HYBRID = transformers.Qwen2Config(**SHAPE, num_hidden_layers=4, use_sliding_window=True, max_window_layers=2)
MISTRAL = transformers.MistralConfig(**SHAPE, num_hidden_layers=2)
MODELS = {"hybrid": (HYBRID, transformers.Qwen2ForCausalLM), "mistral": (MISTRAL, transformers.MistralForCausalLM)}


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> tuple[Any, Llama]:
    """A model of transformers, and the engine's with the same weights."""
    torch.manual_seed(0)
    config, kind = MODELS[request.param]
    reference = kind(config).float().eval()
    model = build_llama(config, CacheShape(1, PAGE), 1, dtype=torch.float32, random_weights=False, windows=True)
    missing, unknown = model.load_state_dict(reference.state_dict(), strict=False)
    assert not unknown
    assert not [name for name in missing if "cache" not in name and "inv_freq" not in name and "start" not in name]
    return reference, model


def poison_free_pages(served: Engine) -> None:
    """Fill every page that no request owns with NaN, before every step; page 0 is what padding reads."""
    schedule = served.scheduler.schedule

    def poisoned() -> Any:
        plan = schedule()
        for pages, backend in zip(served.scheduler.groups, served.runner.backends, strict=True):
            backend.cache._memory[:, :, pages._free] = torch.nan
        return plan

    served.scheduler.schedule = poisoned  # type: ignore[method-assign]


def check_all_free(served: Engine) -> None:
    for pages, backend in zip(served.scheduler.groups, served.runner.backends, strict=True):
        assert sorted(pages._free) == list(range(1, backend.cache.num_pages))
        assert not pages.table.any()


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"])
def test_greedy_tokens_are_those_of_transformers(both: tuple[Any, Llama], mode: str) -> None:
    """Prompts run in chunks, and every page outside the windows belongs to others or holds NaN."""
    reference, llama = both
    served = engine(llama, mode=mode)
    poison_free_pages(served)
    asked = prompts(10)
    counts = [1 + 3 * (index % 7) for index in range(10)]
    found = served.generate(asked, [SamplingParams(max_tokens=count) for count in counts])
    assert found == [alone(reference, prompt, count) for prompt, count in zip(asked, counts, strict=True)]
    check_all_free(served)
    replayed = {mode for (mode, _), graph in served.runner.manager.stats.graphs.items() if graph.replays}
    assert (CudaGraphMode.FULL in replayed) == ("FULL" in mode)
    assert (CudaGraphMode.PIECEWISE in replayed) == ("PIECEWISE" in mode)


def test_requests_that_give_way_still_get_their_tokens(both: tuple[Any, Llama]) -> None:
    reference, llama = both
    served = engine(llama, num_pages=14)
    poison_free_pages(served)
    asked = prompts(6, seed=3, longest=20)
    requests = [served.add(prompt, SamplingParams(max_tokens=20)) for prompt in asked]
    for _ in served.stream():
        pass
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == [alone(reference, prompt, 20) for prompt in asked]
    check_all_free(served)


@pytest.mark.parametrize(("window", "page_size"), [(1, 4), (3, 16), (16, 16)])
def test_a_window_of_a_page_or_less(window: int, page_size: int) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SHAPE | {"sliding_window": window}, num_hidden_layers=2)
    reference = transformers.MistralForCausalLM(config).float().eval()
    llama = build_llama(config, CacheShape(1, PAGE), 1, dtype=torch.float32, random_weights=False, windows=True)
    llama.load_state_dict(reference.state_dict(), strict=False)
    served = engine(llama, page_size=page_size, mode="FULL_DECODE_ONLY")
    poison_free_pages(served)
    asked = prompts(4, seed=2)
    assert served.generate(asked, SamplingParams(max_tokens=9)) == [alone(reference, prompt, 9) for prompt in asked]
    check_all_free(served)


def test_a_long_request_owns_only_the_pages_of_its_window(both: tuple[Any, Llama]) -> None:
    """A request above the windowed cache's size is served; the pages of the layers that see all keys are kept."""
    reference, llama = both
    served = engine(llama, max_num_seqs=1, max_num_tokens=4, capture_sizes=(1, 4))
    windowed, *_ = (one for one in served.runner.backends if one.window is not None)
    assert windowed.cache.num_pages == 1 + (3 + 2) + 1
    (prompt,) = prompts(1, seed=4, longest=30)
    request = served.add(prompt, SamplingParams(max_tokens=30))
    most: dict[int | None, int] = {}
    while not served.idle:
        served.step()
        for pages, backend in zip(served.scheduler.groups, served.runner.backends, strict=True):
            owned = pages.num_pages - pages.num_free
            most[backend.window] = max(most.get(backend.window, 0), owned)
    assert request.output == alone(reference, prompt, 30)
    assert most[10] <= 5
    assert most.get(None, 99) >= -(-(len(prompt) + 29) // PAGE)


def test_a_step_that_fails_can_be_tried_again(both: tuple[Any, Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the failed step gave back is not needed by the one that follows."""
    reference, llama = both
    served = engine(llama)
    poison_free_pages(served)
    (prompt,) = prompts(1, seed=6, longest=30)
    request = served.add(prompt, SamplingParams(max_tokens=20))

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    while not served.idle:
        with monkeypatch.context() as patch:
            patch.setattr(served.runner.manager, "run", fail)
            if request.num_left:
                with pytest.raises(MemoryError):
                    served.step()
        served.step()
    assert request.output == alone(reference, prompt, 20)


def test_a_request_that_no_group_can_hold_is_refused(both: tuple[Any, Llama]) -> None:
    _, llama = both
    with pytest.raises(RequestError, match=r"may need .* pages of 4 tokens, the cache has 3"):
        engine(llama, num_pages=4, mode="NONE").add([1] * 30, SamplingParams(max_tokens=11))


def test_pages_of_a_slot_come_back_once() -> None:
    pages = PageAllocator(8, 1, 10, 4, 5)
    assert pages.grow(0, 0, 5)
    for computed, gone in ((4, 0), (7, 0), (8, 1), (8, 1), (12, 2), (11, 2)):
        pages.give_back(0, computed)
        assert [int(page) == 0 for page in pages.table[0, :5]] == [column < gone for column in range(5)]
    pages.free(0, 5)
    assert sorted(pages._free) == list(range(1, 8))
    assert pages.grow(0, 0, 2)
    assert pages.table[0, :2].all()


def test_speculation_is_refused_by_name(both: tuple[Any, Llama]) -> None:
    _, llama = both
    draft: Any = None
    with pytest.raises(EngineError, match=r"sliding_window is \{10\}; expected None: rounds advance their steps"):
        SpecRunner(llama, draft, SpecConfig(max_num_tokens=512))


def test_a_step_that_knows_no_windows_is_refused(both: tuple[Any, Llama]) -> None:
    """The plain decoding Llama attends to the whole context; its answers would be wrong without a word."""
    _, llama = both
    ids, lengths = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with torch.inference_mode(), pytest.raises(ValueError, match="sliding_window=10; LlamaDecodeStep attends"):
        llama(ids, ids, ids, lengths, table)


def test_windows_follow_the_config() -> None:
    assert [attention_window(HYBRID, layer) for layer in range(4)] == [None, None, 10, 10]
    assert [attention_window(MISTRAL, layer) for layer in range(2)] == [10, 10]
    plain = transformers.Qwen2Config(**SHAPE, num_hidden_layers=2)
    assert [attention_window(plain, layer) for layer in range(2)] == [None, None]
    assert attention_window(transformers.LlamaConfig(), 0) is None
