"""`check` says beforehand what would go wrong with a module under graphs."""

from __future__ import annotations

import copy
import ctypes
import itertools

import pytest
import torch
from torch import nn

import simplegraph as sg

WIDTH = 6
ROWS = 5


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def module_of(device, function):
    return Function(function).to(device).eval()


def rows(device, *shape):
    return torch.randn(*(shape or (ROWS, WIDTH)), device=device)


INDEPENDENT = {
    "linear": lambda m, x: x @ m.weight,
    "softmax over features": lambda m, x: x.softmax(-1),
    "layer norm": lambda m, x: nn.functional.layer_norm(x, (WIDTH,)),
    "batch norm with stored statistics": lambda m, x: nn.functional.batch_norm(
        x, torch.zeros_like(x[0]), torch.ones_like(x[0])
    ),
    "cumsum over features": lambda m, x: x.cumsum(-1),
    "two rows for each": lambda m, x: x.repeat_interleave(2, 0),
    "cumsum over the batch": lambda m, x: x.cumsum(0),  # a row sees only those before it, and padding comes last
    "nothing but a constant": lambda m, x: m.weight * 2,
}


def one_hot(x):
    return torch.nn.functional.one_hot(x.argmax(-1), WIDTH)


def expert_position(x):
    return (one_hot(x).cumsum(0) * one_hot(x)).sum(-1)


MIXING = {
    "mean over the batch": lambda m, x: x - x.mean(0),
    "sum over the batch": lambda m, x: x * x.sum(0),
    "largest of the batch": lambda m, x: x / x.abs().amax(),
    "smallest of the batch": lambda m, x: x - x.amin(0),
    "largest of numbers that are positive": lambda m, x: x.abs() / x.abs().amax(0),
    "batch norm in training": lambda m, x: nn.functional.batch_norm(x, None, None, training=True),
    "sorted over the batch": lambda m, x: x.sort(0).values,
    "order in the batch": lambda m, x: x[:, 0].argsort().argsort(),
    "reversed": lambda m, x: x.flip(0),
    "cumsum from the end": lambda m, x: x.flip(0).cumsum(0).flip(0),
    "softmax over the batch": lambda m, x: x.softmax(0),
    "the last row": lambda m, x: x + x[-1],
    "attention between rows": lambda m, x: (x @ x.T).softmax(-1) @ x,
    "the batch size": lambda m, x: x / x.shape[0],
    "reshaped across rows": lambda m, x: x.reshape(WIDTH, -1).t().contiguous().view(-1, WIDTH),
    "one number for all": lambda m, x: x.sum(),
    "any row": lambda m, x: torch.where((x > 20).any(), x * 2, x),
    "clipped by the norm over the batch": lambda m, x: x * (30 / x.norm()).clamp(max=1),
    "an expert's capacity": lambda m, x: x * (expert_position(x) <= 1.25 * len(x) / WIDTH)[:, None],
    "another output for few": lambda m, x: (x, x)[: 1 + (len(x) > 4)],
    "fails for few": lambda m, x: x * [1][len(x) < 4],
    "an expert's load": lambda m, x: x * (one_hot(x).sum(0)[x.argmax(-1)] <= 5)[:, None],
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_module_that_may_be_padded_passes(device, name):
    report = sg.check(module_of(device, INDEPENDENT[name]), rows(device))
    assert report, str(report)
    assert report.rows_independent is True
    assert report.capturable is True
    assert report.problem is None
    assert "yes, as far as these inputs show: answers and writes stayed the same with" in str(report)


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("seed", range(3))
def test_a_module_that_padding_would_make_wrong_is_found(device, name, seed):
    torch.manual_seed(seed)
    report = sg.check(module_of(device, MIXING[name]), rows(device))
    assert report.rows_independent is False
    assert not report
    assert report.mixing
    assert "padding=False" in str(report)


@pytest.mark.parametrize("faint", [1.0, 1e-9], ids=["plain", "faint"])
def test_a_number_of_the_batch_size_is_named_with_its_line_and_values(device, faint):
    report = sg.check(module_of(device, lambda m, x: x + faint * len(x)), rows(device))
    assert report.rows_independent is False
    assert report.mixing.startswith("a number that the forward computes from the batch size goes into aten.add.Tensor")
    assert "test_check.py:" in report.mixing
    assert "x + faint * len(x)" in report.mixing
    five, ten = (f"{faint * count:.6g}" for count in (ROWS, 2 * ROWS))
    assert report.mixing.endswith(f": {five} for 5 rows, {ten} for 10 rows")
    assert f"rows independent: no ({report.mixing}); use padding=False" in str(report)


def test_a_number_of_the_batch_size_may_be_passed_as_a_tensor(device):
    def scaled(m, x, count):
        return x / count

    report = sg.check(module_of(device, scaled), rows(device), torch.tensor(5.0, device=device))
    assert report, str(report)


def test_a_number_of_the_batch_size_in_an_eager_break_does_not_matter(device):
    @sg.eager_break
    def scaled(x):
        return x * (len(x) > 0)

    report = sg.check(module_of(device, lambda m, x: scaled(x) + 1), rows(device))
    assert report.rows_independent is True


def test_a_returned_number_of_the_batch_size_is_named_with_its_values(device):
    report = sg.check(module_of(device, lambda m, x: (x + 1, x.shape[0])), rows(device))
    assert report.mixing == "output 1 is 5 for 5 rows and 10 for 10 rows: leave out what follows the batch size"
    assert f"not padded: {report.mixing}. See: simplegraph explain output-shape-unknown" in str(report)
    assert "rows independent" not in str(report)


def test_what_check_advises_for_a_mixing_module_is_right(device):
    module = module_of(device, MIXING["mean over the batch"])
    assert sg.check(module, rows(device)).capturable
    model = sg.wrap(module, capture_sizes=[4, 8], padding=False)
    with torch.no_grad():
        for size in (4, 4, 4, 3, 8, 8, 8, 5, 4):
            x = rows(device, size, WIDTH)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays >= 4


@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_check_calls_independent_replays_padded_as_eager(device, name):
    module = module_of(device, INDEPENDENT[name])
    model = sg.wrap(module, capture_sizes=[4, 8])
    with torch.no_grad():
        for size in (4, 4, 4, 8, 8, 3, 5, 7, 1):
            x = rows(device, size, WIDTH)
            torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-5)
    assert model.graph_stats.padded_tokens > 0


def read_item(m, x):
    scale = x.sum()
    if scale.item() > 1e9:
        return x
    return x @ m.weight


READS = {
    "item": (read_item, "if scale.item() > 1e9:"),
    "bool": (lambda m, x: x if bool((x > 0).all()) else x * 2, "bool((x > 0).all())"),
    "tolist": (lambda m, x: x * len(x.tolist()), "x.tolist()"),
    "nonzero": (lambda m, x: x.nonzero(), "x.nonzero()"),
    "mask": (lambda m, x: x[x > 0], "x[x > 0]"),
    "print": (lambda m, x: (str(x), x)[1], "str(x)"),
    "unique": (lambda m, x: x.unique(), "x.unique()"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_back_names_the_file_and_the_line(device, name):
    function, source = READS[name]
    report = sg.check(module_of(device, function), rows(device))
    assert report.capturable is False
    assert "test_check.py:" in report.problem
    assert source in report.problem
    assert not report


def test_an_exception_in_the_forward_under_capture_is_reported_with_its_line(device):
    def refuse(m, x):
        if m.steps.numel() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError("not in a capture")
        return x.cpu().to(x.device) + 1

    report = sg.check(module_of(device, refuse), rows(device))
    assert report.capturable is False
    assert "test_check.py" in report.problem


def test_after_a_failed_check_the_device_is_as_before(device):
    sg.check(module_of(device, read_item), rows(device))
    module = module_of(device, INDEPENDENT["linear"])
    x = rows(device)
    assert torch.rand(3, device=device).shape == (3,)
    assert sg.check(module, x)
    model = sg.wrap(module, capture_sizes=[ROWS])
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 2


def test_python_state_that_changes_from_call_to_call_is_found(device):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    report = sg.check(Counts().eval(), rows(device))
    assert report.capturable is False
    assert "the forward changes `calls` whenever it runs" in report.problem


def test_state_that_is_written_is_named_and_put_back(device):
    def step(m, x):
        m.steps.add_(1)
        m.weight[0].mul_(0.5)
        return x @ m.weight

    module = module_of(device, step)
    before = copy.deepcopy(module.state_dict())
    report = sg.check(module, rows(device))
    assert report.state_written == ("steps", "weight")
    assert report.capturable
    assert "steps, weight" in str(report)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("pads", [False, True])
def test_memory_that_padding_rows_write_is_named_although_they_write_what_is_there(device, pads):
    def slots(m, x, slot):
        m.cache.index_copy_(0, slot, x)  # padding writes zeros to slot 0
        m.mean.copy_(m.mean * 0.5)
        return x * 2

    def apart(m, x, slot):
        m.cache[1] = x[0]
        return x * 2

    module = module_of(device, slots if pads else apart)
    module.register_buffer("cache", torch.zeros(3 * ROWS, WIDTH, device=device))
    module.register_buffer("mean", torch.ones(2, device=device))
    report = sg.check(module, rows(device), torch.arange(ROWS, device=device) + 2)
    assert report.rows_independent is not pads
    assert not pads or "rows of padding write to the module's memory: cache differs" in report.mixing
    assert not module.cache.any()
    assert module.mean.tolist() == [1.0, 1.0]


def test_a_cache_in_an_ordinary_attribute_is_named_and_put_back(device):
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.caches = [torch.zeros(ROWS, WIDTH, device=device)]

        def forward(self, x):
            self.caches[0][: x.shape[0]].copy_(x[:ROWS])
            return x * 2

    module = Caching().eval()
    report = sg.check(module, rows(device))
    assert report.state_written == ("caches.0",)
    assert torch.equal(module.caches[0], torch.zeros(ROWS, WIDTH, device=device))


@pytest.mark.proofs
def test_a_replay_that_writes_memory_outside_of_the_module_otherwise_is_found_as_by_its_proof(device):
    runs, log = ctypes.c_long(), torch.zeros(2, device=device)

    def step(m, x):
        runs.value += 1  # where no guard looks
        log.fill_(runs.value)
        return x * 2

    module = module_of(device, step)
    report = sg.check(module, rows(device))
    assert report.rows_independent
    assert not report.capturable
    assert "does not equal eager: memory from elsewhere differs" in report.problem
    assert "simplegraph.check" not in report.problem  # which this is
    model = sg.wrap(module, capture_sizes=[ROWS], progress=False)
    with torch.no_grad():
        for _ in range(4):
            x = rows(device)
            assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays == 0


def test_check_copies_no_weight_that_the_forward_only_reads(device, monkeypatch):
    module = module_of(device, lambda m, x: x @ m.weight)
    weight, cloned = module.weight.untyped_storage().data_ptr(), []
    clone = torch.Tensor.clone

    def noted(tensor, *args, **kwargs):
        cloned.append(tensor.untyped_storage().data_ptr())
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "clone", noted)
    assert sg.check(module, rows(device))
    assert weight not in cloned
    assert cloned


def test_memory_that_is_too_large_for_a_proof_is_compared_nevertheless(device, monkeypatch):
    @sg.eager_break
    def scaled(x):
        return x * SCALE[0]

    def step(m, x):
        m.steps += 1
        return scaled(x) + m.weight[0]

    monkeypatch.setattr("simplegraph.device.saved_state._LIMIT_BYTES", 4)
    module = module_of(device, step)
    assert sg.check(module, rows(device)).capturable

    def before(number):
        SCALE[0] = float(number + 1)

    report = sg.check(module, rows(device), others=[(rows(device),)], before=before)
    assert not report.capturable
    assert "a replay does not equal eager: output 0 differs" in report.problem
    assert module.steps.item() == 0


SCALE = torch.ones(2000).numpy()  # a guard sees so large an array, and not what it holds


def test_a_state_kept_by_assignment_is_captured_and_put_back(device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(WIDTH, device=device)

        def forward(self, x):
            self.state = torch.tanh(self.state + x[0])
            return x * self.state

    module = Recurrent().eval()
    state = module.state
    report = sg.check(module, rows(device))
    assert report.capturable is True
    assert module.state is state
    assert torch.equal(state, torch.zeros(WIDTH, device=device))


def test_inputs_are_left_alone_and_writes_to_them_are_named(device):
    def step(m, x, y):
        x.add_(1)
        return x + y

    x, y = rows(device), rows(device)
    before = x.clone()
    report = sg.check(module_of(device, step), x, y)
    assert report.inputs_written == ("args.0",)
    assert torch.equal(x, before)
    assert "writes its inputs" in str(report)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda m, x: x, ("output 0 (args.0)",)),
        (lambda m, x: (x * 2, x[:, 1:]), ("output 1 (args.0)",)),
        (lambda m, x: (m.weight[0], x + 1), ("output 0 (weight)",)),
        (lambda m, x: x.clone(), ()),
    ],
    ids=["input", "view of input", "view of a parameter", "none"],
)
def test_outputs_that_alias_are_named(device, function, expected):
    report = sg.check(module_of(device, function), rows(device))
    assert report.output_aliases == expected
    assert ("alias" in str(report)) is bool(expected)


def test_dropout_that_is_off_is_no_obstacle(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)).to(device).eval()
    report = sg.check(module, rows(device))
    assert report
    assert report.state_written == ()


def test_batch_norm_left_in_training_mode_is_found(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device).eval()
    module[1].train()
    before = copy.deepcopy(module.state_dict())
    report = sg.check(module, rows(device))
    assert report.rows_independent is False
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_token_ids_and_masks_stay_valid_while_rows_are_tried(device):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)

        def forward(self, ids, mask, positions):
            return self.embed(ids) * mask.unsqueeze(-1) + positions.sum(0).unsqueeze(-1)

    ids = torch.randint(11, (ROWS,), device=device)
    mask = torch.rand(ROWS, device=device) > 0.5
    report = sg.check(Decoder().to(device).eval(), ids, mask, positions=rows(device, 3, ROWS))
    assert report, str(report)


def test_declared_batch_dimensions_are_used(device):
    module = module_of(device, lambda m, x, y: x + y.sum(0).unsqueeze(-1))
    x, y = rows(device, 3, WIDTH), rows(device, 3, 3)
    with pytest.raises(sg.InputError, match=r"batch_dims"):
        sg.check(module, x, y)
    assert sg.check(module, x, y, batch_dims={"args.1": 1})


def test_a_module_in_training_mode_is_refused(device):
    with pytest.raises(sg.InputError, match="eval"):
        sg.check(nn.Linear(WIDTH, WIDTH).to(device), rows(device))


def test_an_input_on_the_cpu_of_a_module_on_another_device_is_refused_with_what_to_pass(monkeypatch):
    monkeypatch.setattr("simplegraph.doctor.check.device_of_state", lambda module: torch.device("meta"))
    model = module_of("cpu", lambda m, x: x.to("meta") @ m.weight.to("meta"))
    with pytest.raises(sg.InputError, match=r"args.0 is on the CPU: pass args.0.to\('meta'\)"):
        sg.check(model, rows("cpu"))


def test_inputs_without_a_tensor_are_refused(device):
    with pytest.raises(sg.InputError, match="tensor"):
        sg.check(module_of(device, lambda m, n: n), 3)
    with pytest.raises(sg.InputError, match="no tensor was passed, so there is no batch dimension: pass"):
        sg.check(module_of(device, lambda m: m.weight))


@pytest.mark.parametrize("way", ["wrap", "mixin"])
def test_checking_a_wrapped_module_leaves_its_graphs_and_counters_alone(device, way):
    class Mixin(sg.CudaGraphWrapper, nn.Linear, capture_sizes=[ROWS], verify=0):
        pass

    if way == "wrap":
        model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[ROWS])
    else:
        model = Mixin(WIDTH, WIDTH).to(device).eval()
    assert sg.check(model, rows(device))
    assert model.graph_stats.captures == 0
    assert model.graph_stats.replays == 0
    with torch.no_grad():
        for _ in range(3):
            x = rows(device)
            torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert model.graph_stats.replays == 2
    assert sg.check(model, rows(device))
    assert model.graph_stats.replays == 2


def test_check_needs_no_grad_mode_of_the_caller_and_leaves_it(device):
    module = module_of(device, INDEPENDENT["linear"])
    assert torch.is_grad_enabled()
    assert sg.check(module, rows(device))
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert sg.check(module, rows(device))


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_random_numbers_are_no_obstacle_and_the_callers_are_not_drawn(device):
    x = torch.randn(5, 32, device=device)
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    assert sg.check(Noisy().eval(), x).capturable
    assert torch.equal(torch.rand(4, device=device), expected)


class Opaque:
    def __init__(self, x):
        self.x = x


class ReturnsObject(nn.Module):
    def forward(self, x):
        return x * 2, Opaque(x * 3)


def test_an_object_that_a_replay_cannot_return_is_named(device):
    report = sg.check(ReturnsObject().eval(), torch.randn(5, 8, device=device))
    assert not report.capturable
    assert "Opaque" in report.problem
    assert report.rows_independent


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_python_state_is_put_back_and_not_taken_for_rows_that_mix(device):
    module = Counts().eval()
    report = sg.check(module, torch.randn(5, 8, device=device))
    assert not report.capturable
    assert report.rows_independent is True
    assert module.calls == 0


def test_eager_runs_that_differ_for_other_causes_say_nothing_of_rows(device):
    numbers = itertools.count(1)
    report = sg.check(module_of(device, lambda m, x: x * next(numbers)), rows(device))
    assert report.rows_independent is None
    assert "two eager runs" in str(report)


def test_a_function_that_wrap_refuses_is_refused(device):
    with pytest.raises(sg.ConfigError, match=r"check got .*put it into a function of your own"):
        sg.check(torch.relu, torch.randn(2, 3, device=device))


def test_the_memory_of_the_sizes_asked_for_is_measured_and_nothing_is_left(device):
    module = module_of(device, lambda m, x: (x @ m.weight).relu())
    report = sg.check(module, rows(device), capture_sizes=[2, 64, 16])
    assert report.memory.graphs == 3
    assert report.memory.bytes == report.memory.first_bytes + 2 * report.memory.next_bytes
    assert report.memory.first_bytes > 0 or device.type == "cuda", "a device's free memory comes in larger steps"
    assert "memory of 3 graphs" in str(report)
    assert "memory of 1 graph: " in str(sg.check(module, rows(device), capture_sizes=[2]))
    assert sg.check(module, rows(device)).memory is None


def test_the_memory_that_check_says_is_near_what_capturing_takes(device):
    if device.type == "cuda":
        pytest.skip("a few KiB, in a device's steps of 2 MiB")
    module = module_of(device, lambda m, x: (x @ m.weight).relu())
    sizes = [1, 2, 4, *range(8, 257, 8)]
    report = sg.check(module, rows(device), capture_sizes=sizes)
    model = sg.wrap(module, capture_sizes=sizes, progress=False)
    with torch.no_grad():
        assert model.capture_graphs(rows(device)).captured == len(sizes)
    assert abs(report.memory.bytes - model.graph_stats.graph_bytes) <= 0.05 * model.graph_stats.graph_bytes
    assert "(emulated: tensors only)" in str(report)


def test_sizes_that_are_none_are_refused(device):
    with pytest.raises(sg.ConfigError, match="capture_sizes"):
        sg.check(module_of(device, lambda m, x: x * 2), rows(device), capture_sizes=[0, 4])


def test_a_module_is_checked_as_if_nothing_were_set_in_the_environment(device, monkeypatch):
    """Who switched graphs off may want to know if they could be on."""
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "off")
    monkeypatch.setenv("SIMPLEGRAPH_CAPTURE_SIZES", "3")
    report = sg.check(module_of(device, lambda m, x: (x @ m.weight).relu()), rows(device), capture_sizes=[2, 4])
    assert report.capturable
    assert report.memory.graphs == 2


def test_a_setting_is_not_passed_to_the_forward(device):
    with pytest.raises(sg.InputError, match=r"check got mode, outputs, which the forward does not take"):
        sg.check(module_of(device, lambda m, x: x * 2), rows(device), mode="PIECEWISE", outputs="static")


class Scaled(nn.Module):
    """Divides by an attribute."""

    def __init__(self, depth=0):
        super().__init__()
        self.temperature, self.unread, self.training_steps = 1.5, 2.5, 3
        self.inner = Scaled(depth - 1) if depth else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) / self.temperature


def test_attributes_whose_values_count_are_named(device):
    module = Scaled(depth=8).to(device).eval()
    report = sg.check(module, rows(device))
    assert report.counts == ("Scaled.temperature=1.5",)  # not torch's own layers, nor what no forward names
    assert "values that graphs depend on: Scaled.temperature=1.5" in str(report)
    plain = sg.check(nn.Linear(WIDTH, WIDTH).to(device).eval(), rows(device))
    assert "counts" not in str(plain)


def test_attributes_that_a_parents_forward_names_are_named(device):
    class Doubled(Scaled):
        def forward(self, x):
            return super().forward(x) * 2

    assert sg.check(Doubled().to(device).eval(), rows(device)).counts == ("Doubled.temperature=1.5",)


def test_a_scripted_submodule_is_checked(device):
    module = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH).eval())).to(device).eval()
    report = sg.check(module, rows(device))
    assert report.capturable
    assert report.rows_independent


class Encoding(Function):
    """Its callers use methods, as those of many encoders do."""

    def encode(self, x):
        self.steps += 1
        return x @ self.weight

    def centred(self, x):
        return x - x.mean(0)

    def clipped(self, x):
        return x if x.abs().max().item() < 1 else x.tanh()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_method_is_checked_as_the_forward_is(device, wrapped):
    module = Encoding(lambda m, x: x).to(device).eval()
    check = (
        (lambda method: sg.check(sg.wrap(method), rows(device)))
        if wrapped
        else (lambda method: sg.check(method, rows(device)))
    )
    report = check(module.encode)
    assert report
    assert [name.rpartition(".")[2] for name in report.state_written] == ["steps"]
    assert module.steps == 0
    assert check(module.centred).rows_independent is False
    problem = check(module.clipped).problem
    assert "return x if x.abs().max().item() < 1 else x.tanh()" in problem
    assert sg.check(lambda x: module.encode(x) * 2, rows(device), capture_sizes=[2, ROWS]).memory is not None


@pytest.mark.parametrize("what", [3, nn.Linear])
def test_what_is_neither_a_module_nor_a_function_is_refused(what):
    with pytest.raises(sg.InputError, match=r"expected a torch\.nn\.Module instance, a function or a method first"):
        sg.check(what, torch.randn(4, 2))
