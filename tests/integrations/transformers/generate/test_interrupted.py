"""Graphs are removed, dropped, replaced and captured while a generation runs, whose tokens and cache stay right."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed, inputs  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

FAMILIES = MODELS | tiny_states.MODELS
WHOLE = GREEDY | {"return_dict_in_generate": True}
Act = Callable[[Any, Any], Any]  # gets the handle and the model

ACTS: dict[str, Act] = {
    "remove": lambda graphs, model: graphs.remove(),
    "exit": lambda graphs, model: graphs.__exit__(None, None, None),
    "second": lambda graphs, model: graphed(model),
    "reset": lambda graphs, model: graphs.reset(),
}


class At:
    """A logits processor that calls a function in the middle of a generation, in its thread or in another one."""

    def __init__(self, act: Callable[[], Any], step: int, *, threads: bool) -> None:
        self._act, self._left, self._threads = act, step, threads
        self.error: BaseException | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            if self._threads:
                thread = threading.Thread(target=self._try)
                thread.start()
                thread.join(timeout=60)
                assert not thread.is_alive()
            else:
                self._try()
        return scores

    def _try(self) -> None:
        try:
            with torch.inference_mode(self._threads):  # whatever mode the other thread is in
                self._act()
        except BaseException as error:
            self.error = error


def layers(result: Any) -> list[Any]:
    cache = result.get(CACHE, result.get("cache_params"))
    return list(getattr(cache, "self_attention_cache", cache).layers)


def check_same(found: Any, expected: Any) -> None:
    """The sequences, and all tensors of all layers of the caches."""
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(layers(found), layers(expected), strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(other).items():
            for part, known in (value if isinstance(value, dict) else {None: value}).items():
                if isinstance(known, torch.Tensor):
                    got = getattr(one, name) if part is None else getattr(one, name)[part]
                    torch.testing.assert_close(got, known, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "Mamba2", "Zamba2"])
def test_a_generation_whose_graphs_go_meanwhile_gives_plain_tokens_and_leaves_a_plain_cache(
    name: str, act: str, threads: bool, device: torch.device
) -> None:
    plain, model = (tiny.build(FAMILIES[name], device) for _ in range(2))
    batch = inputs(name, [7, 4], device)
    expected = plain.generate(**batch, **WHOLE)
    with graphed(model) as graphs:
        check_same(model.generate(**batch, **WHOLE), expected)
        at = At(lambda: ACTS[act](graphs, model), TOKENS // 2, threads=threads)
        check_same(model.generate(**batch, **WHOLE, logits_processor=[at]), expected)
        assert at.error is None
        check_same(model.generate(**batch, **WHOLE), expected)
        if act == "reset":  # the generation goes on through new graphs
            assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF}
        else:
            assert graphs.stats.eager[Reason.GENERATION] == 1
            assert "its graphs were removed meanwhile" in str(graphs.report())


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_beam_search_whose_graphs_go_meanwhile(
    step: int, act: str, llama: Any, plain: Any, device: torch.device
) -> None:
    batch, beams = tiny.prompts([7, 4], device), {"num_beams": 2}
    expected = plain.generate(**batch, **WHOLE, **beams)
    with graphed(llama) as graphs:
        at = At(lambda: ACTS[act](graphs, llama), step, threads=True)
        check_same(llama.generate(**batch, **WHOLE, **beams, logits_processor=[at]), expected)
        assert at.error is None


@pytest.mark.parametrize("act", ["remove", "reset", "second"])
def test_graphs_that_go_at_any_moment(act: str, llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4], device)
    settings = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    expected = plain.generate(**batch, **settings)
    graphs = graphed(llama)
    llama.generate(**batch, **settings)
    stop, found, errors = threading.Event(), [], []

    def generate() -> None:
        try:
            while not stop.is_set():
                found.append(llama.generate(**batch, **settings))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for turn in range(12):
            time.sleep(0.003 * turn)
            ACTS[act](graphs, llama)
            if act == "remove":
                graphs = graphed(llama)
    finally:
        stop.set()
        thread.join(timeout=60)
    assert not errors
    assert found
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("threads", [True, False])
def test_capture_while_a_generation_runs_is_refused(
    threads: bool, llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([7, 4], device)
    expected = plain.generate(**batch, **GREEDY)
    with graphed(llama) as graphs:
        at = At(lambda: graphs.capture(sizes=[2]), 5, threads=threads)
        assert torch.equal(llama.generate(**batch, **GREEDY, logits_processor=[at]), expected)
        assert isinstance(at.error, sg.CaptureError)
        assert "call it before or after" in str(at.error)
        assert graphs.capture(sizes=[2]).captured >= 1  # after it, as the message says
        assert torch.equal(llama.generate(**batch, **GREEDY), expected)


def test_generations_of_other_threads_during_a_capture_run_eagerly(
    llama: Any, plain: Any, device: torch.device
) -> None:
    batch, found = tiny.prompts([7, 4], device), []
    expected = plain.generate(**batch, **GREEDY)
    with graphed(llama) as graphs:
        generate = At(lambda: found.append(llama.generate(**batch, **GREEDY)), 2, threads=True)
        summary = graphs.capture(sizes=[4], lengths=[1, 20], logits_processor=[generate])
        assert generate.error is None
        assert torch.equal(found[0], expected)
        assert summary.captured >= 1
        assert graphs.stats.eager[Reason.BUSY] == 1


def test_a_generation_inside_another_one_runs_eagerly(llama: Any, plain: Any, device: torch.device) -> None:
    batch, found = tiny.prompts([7, 4], device), []
    expected = plain.generate(**batch, **GREEDY)
    with graphed(llama) as graphs:
        inner = At(lambda: found.append(llama.generate(**batch, **GREEDY)), 5, threads=False)
        assert torch.equal(llama.generate(**batch, **GREEDY, logits_processor=[inner]), expected)
        assert torch.equal(found[0], expected)
        assert graphs.stats.eager[Reason.BUSY] == 1


def crops(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]


def test_a_cache_may_be_changed_once_the_graphs_are_removed(device: torch.device) -> None:
    """As the error advises that says that it was changed."""
    batch, found = tiny.prompts([6], device), []
    for has_graphs in (False, True):
        model = tiny.build(MODELS["gpt2"], device)
        cache = transformers.DynamicCache(config=model.config)
        graphs: Any = graphed(model) if has_graphs else contextlib.nullcontext()

        def act(graphs: Any = graphs, cache: Any = cache, has_graphs: bool = has_graphs) -> None:
            if has_graphs:
                graphs.remove()
            crops(cache)

        at = At(act, 5, threads=False)
        found.append(model.generate(**batch, **GREEDY, **{CACHE: cache}, logits_processor=[at]))
        assert at.error is None
    assert torch.equal(*found)


def test_graphs_are_not_removed_once_the_cache_was_changed(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    cache = transformers.DynamicCache(config=llama.config)
    with graphed(llama) as graphs:

        def act() -> None:
            crops(cache)
            graphs.remove()

        at = At(act, 5, threads=False)
        with pytest.raises(sg.StaleGraphError, match="changed between two steps"):
            llama.generate(**batch, **GREEDY, **{CACHE: cache}, logits_processor=[at])
        assert isinstance(at.error, sg.StaleGraphError)
        graphs.remove()  # as the message says
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))


def test_graphs_are_not_dropped_inside_a_step(llama: Any, plain: Any, device: torch.device) -> None:
    batch, errors = tiny.prompts([6], device), []
    with graphed(llama, fused_kernels=False) as graphs:
        own = llama.lm_head.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            for act in (graphs.remove, graphs.reset):
                with pytest.raises(sg.CaptureError, match="inside one of its steps") as raised:
                    act()
                errors.append(raised.value)
            return own(x)

        llama.lm_head.forward = forward
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        del llama.lm_head.forward
        assert len(errors) >= 4
        graphs.remove()  # as the message says
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))


class Stream(BaseStreamer):
    """Calls a function with the number of tokens that it was given."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act, self._given = act, 0

    def put(self, value: torch.Tensor) -> None:
        self._given += 1
        self._act(self._given)

    def end(self) -> None: ...


@contextlib.contextmanager
def joined(target: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=target)
    yield thread
    thread.join(timeout=60)
    assert not thread.is_alive()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("given", [2, 3, 7])
def test_graphs_of_several_tokens_go_when_their_generation_has_ended(
    given: int, act: str, llama: Any, plain: Any, device: torch.device
) -> None:
    """A launch takes steps that the loop does not know of, so that it cannot go on without them."""
    batch, settings = tiny.prompts([6], device), GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30}
    expected = plain.generate(**batch, **settings)
    with graphed(llama, tokens_per_launch=4) as graphs:
        for _ in range(2):
            assert torch.equal(llama.generate(**batch, **settings), expected)
        with joined(lambda: ACTS[act](graphs, llama)) as thread:
            stream = Stream(lambda count: thread.start() if count == given else None)
            assert torch.equal(llama.generate(**batch, **settings, streamer=stream), expected)
        assert torch.equal(llama.generate(**batch, **settings), expected)


def test_graphs_of_several_tokens_are_not_dropped_by_their_own_streamer(
    llama: Any, plain: Any, device: torch.device
) -> None:
    batch, errors = tiny.prompts([6], device), []
    settings = GREEDY | {"max_new_tokens": 30, "min_new_tokens": 30}
    expected = plain.generate(**batch, **settings)
    with graphed(llama, tokens_per_launch=4) as graphs:
        llama.generate(**batch, **settings)

        def act(count: int) -> None:
            if count == 12:
                with pytest.raises(sg.CaptureError, match="inside one of its steps") as raised:
                    graphs.remove()
                errors.append(raised.value)

        assert torch.equal(llama.generate(**batch, **settings, streamer=Stream(act)), expected)
        assert errors
        graphs.remove()
        assert torch.equal(llama.generate(**batch, **settings), expected)
