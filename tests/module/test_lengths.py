"""Calls of any length, served by graphs of a few: right at every length, and eager where padding changes the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from simplegraph.device import saved_state
from simplegraph.integrations.lengths import SizeRule
from simplegraph.integrations.rehearsal import RunEffects, observe_run
from tests.module.answers import reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH = 4


class Frames(nn.Module):
    """Strided windows over samples, as audio models begin; padding does not reach real frames."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, WIDTH, 10, 5)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, 2)

    def forward(self, samples: Tensor) -> dict[str, Tensor]:
        hidden = self.second(self.first(samples[:, None]).relu())
        return {"frames": hidden.transpose(1, 2), "samples": samples * 2}


class Masked(nn.Module):
    """Tokens with a mask, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.table(tokens) * mask[..., None]
        return hidden, hidden.sum(1) / mask.sum(1, keepdim=True)


class Mean(nn.Module):
    """Counts its samples: padding changes the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = run_log()

    def forward(self, samples: Tensor) -> Tensor:
        self.runs()
        return samples.mean(1)


def graphed(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    common = {"capture_sizes": [2, 4], "progress": False, "length_dims": {"samples": 1}, "lengths": [64, 128]}
    return sg.wrap(module.to(device).eval(), **(common | settings))


def assert_right(model: Any, *args: Tensor) -> None:
    found, expected = model(*args), sg.unwrap(model)(*args)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


LENGTHS = [40, 50, 100, 64, 128, 61, 90, 45, 70, 40, 100]


def test_strided_frames_are_cut_to_what_the_length_gives(device: torch.device) -> None:
    model = graphed(Frames(), device)
    for number, length in enumerate([*LENGTHS, *range(41, 128, 3), *LENGTHS, *LENGTHS]):
        assert_right(model, torch.randn((2, 4, 3)[number % 3], length, device=device))
    stats = model.graph_stats
    assert stats.captures == 4  # two sizes times two lengths
    assert stats.replays >= 30
    assert reasons(model)["first_call"] < 20
    assert sum(stats.batch_sizes.values()) == stats.replays + stats.eager.total()
    assert Reason.LENGTH_PADDING not in stats.eager


def test_several_arguments_are_padded_together(device: torch.device) -> None:
    model = graphed(Masked(), device, length_dims={"tokens": 1, "mask": -1}, pad_values={"tokens": 1})
    for rows, length in [(4, 9), (4, 12), (2, 10), (3, 40), (4, 64), (2, 33), (3, 20), (4, 31), (3, 50), (2, 9)]:
        tokens = torch.randint(20, (rows, length), device=device)
        assert_right(model, tokens, torch.ones(rows, length, device=device))
    assert model.graph_stats.replays >= 2
    with pytest.raises(RuntimeError, match="must match the size"):
        model(tokens, torch.ones(2, 3, device=device))  # eager's own error
    assert reasons(model)["batch_mismatch"] == 1


def test_a_forward_that_counts_its_length_runs_as_it_is(device: torch.device) -> None:
    model = graphed(Mean(), device)
    for length in (40, 50, 40, 64, 64, 64, 64):
        assert_right(model, torch.randn(4, length, device=device))
    assert reasons(model)["length_padding"] == 2
    assert "from 40 to 64, output 0 differs" in str(model.graph_report())
    assert model.graph_stats.replays >= 1  # at a captured length nothing is padded


class Coarse(nn.Module):
    """One frame for 32 samples or a part of them."""

    def forward(self, samples: Tensor) -> Tensor:
        return samples[:, ::32] * 2


def test_two_lengths_are_compared_before_one_is_served(device: torch.device) -> None:
    class Stepwise(nn.Module):
        def forward(self, samples: Tensor) -> Tensor:
            return samples.sum(1) * (
                3 if 45 <= samples.shape[1] < 64 else 2
            )  # a length of 40 does not show it, 50 does

    model = graphed(Stepwise(), device)
    for length in (40, 50, 40, 50, 55, 60):
        assert_right(model, torch.randn(2, length, device=device))


def test_a_size_that_did_not_grow_at_first_is_not_taken_for_a_fixed_one(device: torch.device) -> None:
    """62 and 63 samples give as many frames as 64."""
    model = graphed(Coarse(), device, batch_dims={"samples": 0})
    for length in (62, 63, 61, 62, 30, 40, 20, 10, 33, 31, 127, 126, 100, 90, 80, 65, 66, 70, 5, 31, 120) * 3:
        assert_right(model, torch.randn(4, length, device=device))
    assert model.graph_stats.replays >= 3


def test_longer_calls_run_as_they_are(device: torch.device) -> None:
    model = graphed(Frames(), device)
    assert_right(model, torch.randn(4, 129, device=device))
    assert reasons(model) == {"length_too_large": 1}
    assert "captured for (the largest is 128: add 129 to lengths)" in str(model.graph_report())


def test_the_longest_call_is_what_lengths_are_advised_for(device: torch.device) -> None:
    model = graphed(Frames(), device)
    for length in (140, 150, 129):
        assert_right(model, torch.randn(4, length, device=device))
    assert "the largest is 128: add 150 to lengths" in str(model.graph_report())
    model.configure_graphs(lengths=[*model._graph_runner.settings.lengths, 150])
    for length in (140, 150, 129):
        assert_right(model, torch.randn(4, length, device=device))
    assert reasons(model)["length_too_large"] == 3  # those of before


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, samples: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        return samples + torch.rand(samples.shape[0], 1, device=samples.device) + self.calls


def test_a_rehearsal_leaves_state_and_random_numbers_as_one_run_does(device: torch.device) -> None:
    model, twin = graphed(Drawing(), device), Drawing().to(device).eval()
    for length in (40, 50):
        samples = torch.randn(4, length, device=device)
        torch.manual_seed(length)
        found = model(samples)
        torch.manual_seed(length)
        torch.testing.assert_close(found, twin(samples))
        assert (model.calls.item(), model.count) == (twin.calls.item(), twin.count)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "global"])
def test_memory_is_written_once_a_call_wherever_it_is_and_however_large(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, held: bool, large: bool
) -> None:
    calls = torch.zeros(8, device=device)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = calls if held else None

        def forward(self, samples: Tensor) -> Tensor:
            calls.add_(1)
            return samples * 2

    if large:
        monkeypatch.setattr(saved_state, "_LIMIT_BYTES", 4)
    model = graphed(Counting(), device)
    for turn, length in enumerate((40, 50, 40, 50, 64, 30), start=1):
        model(torch.randn(4, length, device=device))
        assert calls.tolist() == [turn] * 8


def test_all_lengths_are_captured_upfront(device: torch.device) -> None:
    model = graphed(Frames(), device, capture="upfront", batch_dims={"samples": 0})
    summary = model.capture_graphs(torch.randn(3, 80, device=device))
    assert (summary.captured, summary.failed) == (4, {})
    for length in LENGTHS:
        assert_right(model, torch.randn(4, length, device=device))
    assert model.graph_stats.captures == 4
    assert model.graph_stats.replays >= 3


def test_settings_belong_together() -> None:
    with pytest.raises(sg.ConfigError, match="length_dims and lengths belong together"):
        sg.wrap(Frames(), lengths=[64])
    with pytest.raises(sg.ConfigError, match="'x'}; expected argument names with a dimension"):
        sg.wrap(Frames(), lengths=[64], length_dims={"samples": "x"})  # type: ignore[dict-item]
    with pytest.raises(sg.InputError, match="length_dims\\['samples'\\] is 3"):
        sg.wrap(Frames().eval(), lengths=[64], length_dims={"samples": 3})(torch.ones(2, 64))


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (4, 4), (1, 2), (400, 320), (3, 2)])
def test_sizes_are_predicted_only_where_they_follow(window: int, stride: int) -> None:
    def size(length: int) -> int:
        return (length - window) // stride + 1

    rule = SizeRule()
    predicted = 0
    for length in (*range(500, 9000, 377), 16000, 8000, 5003, 777):
        found = rule.predict(length)
        assert found in (None, size(length))
        predicted += found is not None
        rule.learn(length, size(length))
    assert predicted >= 3


class Capped(nn.Module):
    """Gives no more than six samples."""

    def forward(self, samples: Tensor) -> Tensor:
        return samples[:, :6] * 2


@pytest.mark.parametrize("lengths", [(5, 8, 7, 2, 3, 6, 5, 7, 2), (7, 9, 2, 3, 7, 5, 1, 6, 4), (2, 16, 14, 5, 7, 3)])
def test_a_size_with_a_bound_is_cut_to_what_eager_gives(lengths: tuple[int, ...], device: torch.device) -> None:
    """No stride tells such sizes: what fits the lengths that were seen is not right at others."""
    model = graphed(Capped(), device, lengths=[4, 8, 16])
    for length in lengths * 2:
        assert_right(model, torch.randn(4, length, device=device))


class Flat(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        return samples.reshape(-1, 1) * 2


def test_what_is_right_for_one_row_is_not_taken_for_right_for_several(device: torch.device) -> None:
    model = graphed(Flat(), device, capture_sizes=[1, 2, 4])
    for number, rows in enumerate((1, 1, 1, 1, 4, 2, 3, 4)):
        assert_right(model, torch.randn(rows, 40 + number, device=device))


class Writing(nn.Module):
    """Writes to the samples, and to an argument without a length."""

    def __init__(self, *, samples: bool) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, samples: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        result = samples * 2 + calls
        return result + samples.mul_(3) if self.samples else result


@pytest.mark.parametrize("samples", [True, False])
def test_arguments_are_written_to_as_eager_does(samples: bool, device: torch.device) -> None:
    model, twin = graphed(Writing(samples=samples), device), Writing(samples=samples)
    calls = [torch.zeros(4, 1, device=device) for _ in range(2)]
    for length in (40, 50, 45, 60, 100, 90, 61, 45, 95, 50):
        one = torch.randn(4, length, device=device)
        other = one.clone()
        torch.testing.assert_close(model(one, calls[0]), twin(other, calls[1]))
        assert torch.equal(one, other)
        assert torch.equal(*calls)
    assert (model.graph_stats.replays > 0) is not samples


class Leaving(nn.Module):
    """Leaves its hidden states for others to look at."""

    last: Tensor

    def forward(self, samples: Tensor) -> Tensor:
        self.last = samples * 2
        return samples + 1


def test_what_a_forward_leaves_has_the_callers_length(device: torch.device) -> None:
    model = graphed(Leaving(), device)
    for length in (40, 50, 45, 60, 45, 61, 40):
        samples = torch.randn(4, length, device=device)
        assert_right(model, samples)
        model(samples)
        assert torch.equal(model.last, samples * 2)


class Noisy(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        return samples + torch.rand_like(samples)


def test_random_numbers_that_follow_the_length_are_those_of_eager(device: torch.device) -> None:
    """Those of one row are the same when it is padded, but not what is drawn next."""
    model, twin = graphed(Noisy(), device, capture_sizes=[1, 2]), Noisy()
    for length in (40, 50, 45, 60, 45, 61, 40):
        samples = torch.randn(1, length, device=device)
        found = []
        for module in (model, twin):
            torch.manual_seed(length)
            found.append([module(samples), torch.rand(3, device=device)])
        torch.testing.assert_close(*found)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(100.0))

    def forward(self, samples: Tensor) -> Tensor:
        return samples + self.positions.expand(4, -1).gather(1, torch.arange(samples.shape[1]).expand(4, -1))


def test_a_forward_that_takes_no_padded_length_runs_as_it_is() -> None:
    model = graphed(Bounded(), torch.device("cpu"))
    for length in (40, 99, 100, 50, 99):
        assert_right(model, torch.randn(4, length))
    assert "from 99 to 128, it fails with" in str(model.graph_report())


def test_cut_outputs_have_no_gaps_where_eager_has_none(device: torch.device) -> None:
    model = graphed(Frames(), device)
    for length in (40, 50, 100, 61, 90, 45, 70, 40, 100, 61, 90, 45, 70):
        samples = torch.randn(4, length, device=device)
        found, expected = model(samples), sg.unwrap(model)(samples)
        assert {name: part.stride() for name, part in found.items()} == {n: p.stride() for n, p in expected.items()}
    assert model.graph_stats.replays >= 3


def test_the_report_says_how_much_of_the_lengths_is_padding(device: torch.device, tmp_path: Path) -> None:
    model = sg.wrap(
        Masked().to(device).eval(),
        capture_sizes=[2],
        length_dims={"tokens": 1, "mask": 1},
        lengths=[8, 16],
        progress=False,
    )
    for length in (4, 6, 8, 16) * 5:
        tokens = torch.randint(0, 20, (2, length), device=device)
        model(tokens, torch.ones(2, length, device=device))
    assert model.graph_stats.lengths == {
        (4, 8): 4,
        (6, 8): 4,
        (8, 8): 5,
        (16, 16): 5,
    }  # the first of each kind are compared
    report = model.graph_report()
    assert report.to_dict()["lengths"] == [[4, 8, 4], [6, 8, 4], [8, 8, 5], [16, 16, 5]]
    said = "lengths x calls: 8 at 8 x 5, 16 at 16 x 5, 4 at 8 x 4, 6 at 8 x 4; 13% of what was served is padding"
    assert said in str(report)
    report.save(page := tmp_path / "graphs.html")
    assert said in page.read_text(encoding="utf-8")


def test_a_rehearsal_is_undone_on_the_device_of_the_weights_where_inputs_are_on_the_cpu(monkeypatch):
    gpu, rehearsed = torch.device("cuda", 0), []

    def rehearse(*args: Any) -> None:
        rehearsed.append(args[-1])
        raise RuntimeError("there is no such device here")

    def observe(module: nn.Module, run: Any, _: torch.device) -> RunEffects:
        return observe_run(module, run, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("simplegraph.serve.runner.device_of_state", lambda module: gpu)
    monkeypatch.setattr("simplegraph.integrations.lengths.rehearse", rehearse)
    monkeypatch.setattr("simplegraph.integrations.lengths.observe_run", observe)
    model = sg.wrap(nn.Linear(4, 4).eval(), length_dims={"input": 1}, lengths=[8], capture_sizes=[2], progress=False)
    assert model(torch.randn(2, 5, 4)).shape == (2, 5, 4)
    assert rehearsed == [gpu]


class Choosing(nn.Module):
    """Picks among frames of two channels."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, samples: Tensor) -> Tensor:
        return self.function(samples)


ALONG = {
    "amax": lambda x: x.amax(1),
    "max of all": lambda x: x.flatten(1).amax(1),
    "argmin": lambda x: x.argmin(1),
    "pool": lambda x: nn.functional.adaptive_max_pool1d(x.transpose(1, 2), 1),
    "sort": lambda x: x.sort(1)[0][:, -2:],
    "topk": lambda x: x.topk(2, 1)[0],
    "any": lambda x: (x >= 0).any(1),
    "pairs": lambda x: (x @ x.transpose(1, 2)).amax(2),
}


@pytest.mark.parametrize("function", ALONG.values(), ids=ALONG)
def test_a_choice_along_the_length_is_found_though_padding_is_seldom_chosen(
    function: Any, device: torch.device
) -> None:
    """Zeros are the largest of values that are all below: 18 of 480 such calls were wrong."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = graphed(Choosing(function), device, lengths=[8, 16])
        for number in range(30):
            offset = -2 if number > 20 else 1  # what is not seen at first
            assert_right(model, torch.randn(1 + number % 4, 3 + number % 13, 2, device=device) + offset)
        assert reasons(model)["length_padding"] > 10


def test_the_report_names_what_picks_along_the_length(device: torch.device) -> None:
    model = graphed(Choosing(lambda x: x.amax(1)), device, lengths=[8])
    for _ in range(2):
        model(torch.ones(2, 5, 2, device=device))
    said = str(model.graph_report())
    assert "from 5 to 8, aten.amax.default at " in said
    assert "test_lengths.py" in said
    assert "picks from the whole length, its padding too" in said


def test_a_choice_is_padded_with_what_was_declared(device: torch.device) -> None:
    settings: dict[str, Any] = {"lengths": [8, 16], "pad_values": {"samples": float("-inf")}}
    model = graphed(Choosing(ALONG["amax"]), device, batch_dims={"samples": 0}, **settings)
    for number in range(60):
        assert_right(model, torch.randn(2 + number % 3, 4 + number % 6 * 2, 2, device=device) - 2)
    assert "length_padding" not in reasons(model)
    assert model.graph_stats.replays > 20


WITHIN = {
    "in each frame": lambda x: x.amax(2, keepdim=True) * 2,
    "sorted frames": lambda x: x.sort(2)[0],
    "windows": lambda x: nn.functional.max_pool1d(x.transpose(1, 2), 2),
    "experts": lambda x: x.flatten(0, 1).topk(1)[0].view(*x.shape[:2], 1),
}


@pytest.mark.parametrize("function", WITHIN.values(), ids=WITHIN)
def test_a_choice_in_each_frame_is_padded(function: Any, device: torch.device) -> None:
    model = graphed(Choosing(function), device, lengths=[8, 16], batch_dims={"samples": 0})
    for number in range(60):
        assert_right(model, torch.randn(2 + number % 3, 4 + number % 6 * 2, 2, device=device))
    assert "length_padding" not in reasons(model)
    assert model.graph_stats.replays > 20


def test_the_place_of_the_last_token_is_padded(device: torch.device) -> None:
    """As text encoders find it: the largest of the ids ends a text."""

    def last(x: Tensor, tokens: Tensor) -> Tensor:
        return x[torch.arange(len(x), device=x.device), tokens.argmax(1)]

    class Text(nn.Module):
        def forward(self, samples: Tensor, tokens: Tensor) -> Tensor:
            return last(samples, tokens)

    model = graphed(Text(), device, length_dims={"samples": 1, "tokens": 1}, lengths=[8, 16])
    for number in range(40):
        rows, length = 2 + number % 3, 5 + number % 9
        tokens = torch.randint(1, 9, (rows, length), device=device)
        assert_right(model, torch.randn(rows, length, 2, device=device), tokens)
    assert "length_padding" not in reasons(model)
    assert model.graph_stats.replays > 10


class Seldom(nn.Module):
    """Averages over its frames where a value is large."""

    def forward(self, samples: Tensor) -> Tensor:
        return torch.where(samples[:, :1] > 5, samples.mean(1, keepdim=True), samples)


def test_each_length_is_compared_again_now_and_then(device: torch.device) -> None:
    model = graphed(Seldom(), device, verify=100_000, batch_dims={"samples": 0})
    for number in range(60):
        assert_right(model, torch.rand(4, 40 + number % 9, device=device))
    served = reasons(model)["proof"]
    for _ in range(300):
        model(torch.rand(4, 45, device=device) + 6)
    assert reasons(model)["length_padding"] > 100
    assert reasons(model)["proof"] > served > 2  # of batch sizes, too
    assert "calls ago, and answers since then may be wrong" in str(model.graph_report())
    assert_right(model, torch.rand(4, 45, device=device) + 6)


def test_nothing_is_compared_again_without_verify(device: torch.device) -> None:
    model = graphed(Seldom(), device, verify=0, batch_dims={"samples": 0})
    for number in range(200):
        assert_right(model, torch.rand(4, 40 + number % 9, device=device))
    assert "proof" not in reasons(model)


class Sets(nn.Module):
    """Sets an item of the dict that it is passed, and returns that dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["hidden"] = self.layer(batch["samples"])
        return batch


def test_items_that_a_forward_sets_are_set_in_the_callers_dict(device: torch.device) -> None:
    model = graphed(Sets(), device, lengths=[4, 8], length_dims={"batch.samples": 1})
    for length in (3, 5, 3, 4, 5):
        batch = {"samples": torch.randn(2, length, WIDTH, device=device)}
        assert model(batch) is batch
        assert torch.equal(batch["hidden"], model.layer(batch["samples"]))
    assert reasons(model)["length_padding"] == 3
    assert "it sets items of an argument" in str(model.graph_report())


class Attending(nn.Module):
    """Attention over the length: padding reaches no real place while it looks back alone."""

    def __init__(self) -> None:
        super().__init__()
        self.causal, self.last = True, nn.Identity()

    def forward(self, samples: Tensor) -> Tensor:
        hidden = nn.functional.scaled_dot_product_attention(samples, samples, samples, is_causal=self.causal)
        return self.last(hidden)


class Centered(nn.Module):
    """Takes the mean over the length off."""

    def forward(self, samples: Tensor) -> Tensor:
        return samples - samples.mean(1, keepdim=True)


def _look_ahead(module: Any) -> None:
    module.causal = not module.causal


def _center(module: Any) -> None:
    module.last = Centered() if type(module.last) is nn.Identity else nn.Identity()


@pytest.mark.parametrize("change", [_look_ahead, _center])
def test_padding_is_compared_again_once_python_state_changed(change: Any, device: torch.device) -> None:
    module = Attending()
    model = graphed(module, device, lengths=[8, 16])
    for number in range(60):
        if number in (25, 40):
            change(module)
        before = model.graph_stats.replays
        assert_right(model, torch.randn(2, 3 + number % 5, WIDTH, device=device))
    assert model.graph_stats.replays > before
    assert reasons(model)["length_padding"] == 15 - 1  # the first one of them shows it


def test_a_number_that_every_call_changes_is_no_padded_call(device: torch.device) -> None:
    module = Attending()
    module.scale = 1.0
    module.last.register_forward_pre_hook(lambda _, args: (args[0] * module.scale,))
    model = graphed(module, device, lengths=[8, 16])
    for number in range(340):
        module.scale = float(min(number, 40))
        assert_right(model, torch.randn(2, 3 + number % 5, WIDTH, device=device))
    assert reasons(model)["python_state"] > 200
    assert model.graph_stats.replays > 5  # once it rested
