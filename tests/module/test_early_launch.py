"""A graph may be launched before its call is checked: a discarded launch changes nothing that anybody sees."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.operators import facts_of
from simplegraph.base.tensors import storage_key
from simplegraph.guard.reading import Reading
from simplegraph.program.index_ranges import IndexRanges
from tests.module.answers import close

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH, ROWS = 8, 4


class Scaled(nn.Module):
    """A layer and a number."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x):
        return torch.relu(self.layer(x)) * self.scale


class Looked(Scaled):
    """Looks rows up in a table, below a place that a number moves."""

    def __init__(self):
        super().__init__()
        self.table, self.offset = nn.Embedding(16, WIDTH), 8

    def forward(self, at):
        return self.table(at + self.offset) * self.scale


class Gathered(Looked):
    def forward(self, at):
        return self.table.weight[at + self.offset]


class Counted(Scaled):
    """Writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


class Drawn(Scaled):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)


class Dropped(Scaled):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Ticking(Counted):
    """Takes no arguments."""

    def forward(self):
        return super().forward(self.layer.weight)


class Written(Scaled):
    """Writes to its input."""

    def forward(self, x):
        return super().forward(x.add_(1))


def inputs(device, rows=ROWS):
    return torch.randn(rows, WIDTH, device=device)


def warm(module, device, example=inputs, calls=8, **settings):
    """Wrap a module, and call it until graphs serve it."""
    model = sg.wrap(module.to(device).eval(), capture_sizes=[ROWS], progress=False, **settings)
    for _ in range(calls):
        model(example(device))
    assert model.graph_stats.replays
    return model


def discarded(model):
    return model.graph_stats.discarded_launches


def changed(model):
    """Change the number, and return how many launches of the next call are discarded."""
    model.scale += 1
    before = discarded(model)
    x = inputs(model.layer.weight.device)
    close(model(x), model.forward(x))
    return discarded(model) - before


def test_a_changed_number_is_found_while_the_graph_runs(device):
    model = warm(Scaled(), device)
    replays, eager = model.graph_stats.replays, model.graph_stats.eager.total()
    assert changed(model) == 1
    # The discarded launch is no replay.
    assert model.graph_stats.replays == replays
    assert model.graph_stats.eager.total() == eager + 1


def test_a_discarded_launch_puts_off_no_proof(device):
    model = warm(Scaled(), device, verify=16)
    graph = next(iter(model.graph_manager.table.graphs.values()))
    before = graph.replays_until_proof
    assert changed(model) == 1
    assert graph.replays_until_proof == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.layer.register_forward_hook(lambda *call: call[-1] + 1),
        lambda m: setattr(m, "layer", nn.Linear(WIDTH, WIDTH).to(m.layer.weight.device)),
        lambda m: setattr(m.layer, "forward", lambda x: x + 1),
        lambda m: setattr(type(m), "extra", 1) or setattr(m, "scale", 3.0),
        lambda m: m.layer.__dict__.update(training=True),
    ],
    ids=["hook", "layer", "forward", "class", "training"],
)
def test_other_changes_are_found_as_well(device, change):
    model = warm(Scaled(), device)
    change(model)
    for _ in range(4):
        x = inputs(device)
        close(model(x), model.forward(x))


def test_changed_settings_of_torch_are_found_as_well(device):
    class Typed(Scaled):
        def forward(self, x):
            return super().forward(x) + torch.zeros(1, device=x.device)

    model = warm(Typed(), device)
    before = discarded(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert model(inputs(device).float()).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert discarded(model) == before + 1
    for _ in range(4):
        x = inputs(device)
        close(model(x), model.forward(x))
    assert discarded(model) == before + 1  # these are checked before the launch


MOVED = {
    "data": lambda p: setattr(p, "data", p.data + 1),
    "set_": lambda p: p.set_((p + 1).untyped_storage(), 0, p.shape, p.stride()),
    "half": lambda p: setattr(p, "data", p.data[:, : WIDTH // 2]),  # at the same address
    "turned": lambda p: setattr(p, "data", p.data.t()),
}


@pytest.mark.parametrize("kind", MOVED)
def test_no_graph_is_launched_once_its_memory_moved(device, kind):
    model = warm(Scaled(), device)
    MOVED[kind](model.layer.weight)
    x = inputs(device)[:, : model.layer.weight.shape[1]]
    for _ in range(3):
        close(model(x), model.forward(x))
    assert discarded(model) == 0


def test_memory_that_was_given_back_is_not_read(device):
    """On a GPU, reading it would end the process's use of the GPU."""
    model = warm(Scaled(), device)
    weight = model.layer.weight
    weight.data = torch.empty(0, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with pytest.raises(RuntimeError):
        model(inputs(device))
    weight.data = torch.ones(WIDTH, WIDTH, device=device)
    x = inputs(device)
    close(model(x), model.forward(x))
    assert discarded(model) == 0


def test_storage_that_lost_its_memory_is_not_read(device):
    model = warm(Scaled(), device)
    storage = model.layer.weight.untyped_storage()
    size, kept = storage.nbytes(), model.layer.weight.clone()
    storage.resize_(0)
    reading = model._graph_runner.builder.state.reading
    assert reading.read_if_in_place(vars(model)) is None
    storage.resize_(size)
    model.layer.weight.copy_(kept)
    x = inputs(device)
    close(model(x), model.forward(x))
    assert discarded(model) == 0


class Deep(Scaled):
    """Has so many tensors that the allocator is asked if it released memory, instead of reading all their addresses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(24)))

    def forward(self, x):
        return super().forward(self.layers(x))


@pytest.fixture
def deep(device):
    return warm(Deep(), device)


def release(model):
    """Let the allocator return all memory that nothing uses."""
    model.graph_manager.device.release_cached_memory()


@pytest.fixture
def steps(deep, monkeypatch):
    """What calls of `deep` do: they launch a graph, and compare its tensors."""
    steps, table = [], deep.graph_manager.table
    replay, tensors = table.replay, Reading.read_if_in_place
    monkeypatch.setattr(table, "replay", lambda *call: steps.append("launch") or replay(*call))
    monkeypatch.setattr(Reading, "read_if_in_place", lambda *call: steps.append("compare") or tensors(*call))
    return steps


def test_a_deep_module_is_launched_before_its_tensors_are_compared(deep, steps, device):
    deep(inputs(device))
    assert steps == ["launch", "compare"]
    kept = deep.layers[3].weight.data
    deep.layers[3].weight.data = kept + 1
    x = inputs(device)
    close(deep(x), deep.forward(x))
    assert steps[2:4] == ["launch", "compare"]
    assert discarded(deep) == 1


@pytest.mark.parametrize("kind", ["data", "set_", "turned"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tensor_of_a_deep_module_that_moved_is_found_while_the_graph_runs(deep, device, kind, is_kept):
    """On the emulator, reading memory that was freed raises; on a GPU, it is still there."""
    kept = deep.layers[0].weight.data if is_kept else None
    MOVED[kind](deep.layers[0].weight)
    x = inputs(device)
    for _ in range(3):
        close(deep(x), deep.forward(x))
    assert discarded(deep) == int(is_kept or kind == "turned" or device.type == "cuda")
    assert kept is None or kept.shape == (WIDTH, WIDTH)


@pytest.mark.parametrize("way", ["data", "resize_"])
def test_memory_of_a_deep_module_that_was_released_is_not_read(deep, device, way):
    """On a GPU, reading it would end the process's use of the GPU."""
    weight = deep.layer.weight
    kept = weight.detach().clone()
    if way == "data":
        weight.data = torch.empty(0, device=device)
    else:
        weight.untyped_storage().resize_(0)
    release(deep)
    if way == "data":
        with pytest.raises(RuntimeError):
            deep(inputs(device))
        weight.data = kept
    else:
        weight.untyped_storage().resize_(kept.nbytes)
        weight.data.copy_(kept)
    x = inputs(device)
    close(deep(x), deep.forward(x))
    assert discarded(deep) == 0


def test_after_memory_was_released_tensors_are_compared_once_before_the_launch(deep, steps, device):
    other = torch.empty(1 << 24, device=device)
    del other
    release(deep)
    for before in ("compare", "launch"):
        steps.clear()
        x = inputs(device)
        close(deep(x), deep.forward(x))
        assert steps[0] == before
    assert deep.graph_stats.captures == 1
    assert discarded(deep) == 0


def test_memory_of_other_libraries_is_read_before_the_launch(device):
    """Torch's allocator does not know when it is freed."""
    module = Deep().to(device).eval()
    foreign = torch.from_dlpack(module.layer.weight.detach().clone())
    module.layer.weight = nn.Parameter(foreign)
    assert not module.layer.weight.untyped_storage().resizable()
    model = warm(module, device)
    model.layer.weight.data = model.layer.weight.data + 1
    x = inputs(device)
    close(model(x), model.forward(x))
    assert discarded(model) == 0


class Recurrent(Scaled):
    """Adds what an attribute holds, if it holds anything."""

    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        y = super().forward(x)
        return y if self.before is None else y + self.before.sum(0)


@pytest.mark.parametrize("way", ["passed", "held"])
def test_a_static_output_that_eager_reads_is_not_overwritten(device, way):
    model = warm(Recurrent(), device, outputs="static")
    y, x = model(inputs(device)), inputs(device)
    kept = y.clone()
    if way == "held":
        model.before = y
        close(model(x), torch.relu(model.layer(x)) + kept.sum(0))
    else:
        model.scale = 2.0
        close(model(y), model.forward(kept))
    close(y, kept)
    assert discarded(model) == 0


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_static_outputs_that_nobody_holds_are_launched_early(device, rows):
    model = warm(Scaled(), device, outputs="static", verify=0)
    for size in (ROWS, ROWS - 1) * 8:
        model(inputs(device, size))
    x = inputs(device, rows)
    assert discarded(model) == 0
    model.scale += 1
    close(model(x), model.forward(x))
    assert discarded(model) == 1


HOLDS = {
    "output": lambda y: y,
    "view": lambda y: y[1:],
    "detached": lambda y: y.detach().t(),
    "saved": lambda y: y * torch.ones(1, requires_grad=True, device=y.device),
    "array": lambda y: torch.from_dlpack(y),
    "storage": lambda y: y.untyped_storage(),
    "storage of a view": lambda y: y[1:].storage(),
}


@pytest.mark.parametrize("way", HOLDS)
@torch.enable_grad()
def test_static_outputs_that_a_caller_holds_are_checked_first(device, way):
    model = warm(Scaled().requires_grad_(False), device, outputs="static", verify=0)
    held = HOLDS[way](model(inputs(device)).requires_grad_(False))
    model.scale += 1
    x = inputs(device)
    close(model(x), model.forward(x))
    assert discarded(model) == 0
    del held
    for _ in range(4):
        model(x)
    model.scale += 1
    close(model(x), model.forward(x))
    assert discarded(model) == 1


def test_static_outputs_of_other_sizes_are_not_overwritten_by_a_discarded_launch(device):
    model = sg.wrap(Recurrent().to(device).eval(), capture_sizes=[2, ROWS], outputs="static", progress=False, verify=0)
    for rows in (2, ROWS, 1, 3) * 8:
        model(inputs(device, rows))
    for before, after in ((2, ROWS), (ROWS, 2), (1, 3), (3, 1)):
        model.before = None
        for _ in range(8):
            model(inputs(device, after))
        held = model(inputs(device, before))
        kept, x = held.clone(), inputs(device, after)
        model.before = held
        close(model(x), torch.relu(model.layer(x)) + kept.sum(0))
        close(held, kept)


def test_static_outputs_are_compared_first_with_a_torch_that_counts_no_owners(device, monkeypatch):
    monkeypatch.setattr("simplegraph.program.lent_outputs.TELLS_OWNERS", False)
    model = warm(Scaled(), device, outputs="static", verify=0)
    assert changed(model) == 0


def test_static_outputs_of_a_dropped_graph_are_released(device):
    model = warm(Scaled(), device, outputs="static", verify=0)
    programs = [graph.program for graph in model.graph_manager.table.graphs.values()]
    outputs = [weakref.ref(output) for program in programs for output in program.outputs]
    model.reset_graphs()
    gc.collect()
    assert programs
    assert [output() for output in outputs] == [None] * len(outputs)


def test_eager_results_in_static_outputs_are_not_overwritten_by_a_discarded_launch(device):
    """As those of a proof, which is the latest call."""
    model = sg.wrap(Recurrent().to(device).eval(), capture_sizes=[2, ROWS], outputs="static", progress=False, verify=4)
    for rows in (2, ROWS) * 8:
        model(inputs(device, rows))
    proven = next(graph for graph in model.graph_manager.table.graphs.values() if graph.descriptor.num_tokens == 2)
    while proven.replays_until_proof:
        model(inputs(device, 2))
    for _ in range(3):
        model(inputs(device))
    held = model(inputs(device, 2))
    kept, x = held.clone(), inputs(device)
    model.before = held
    close(model(x), torch.relu(model.layer(x)) + kept.sum(0))
    close(held, kept)


def test_static_outputs_of_a_dropped_graph_are_not_overwritten_by_a_discarded_launch(device):
    model = sg.wrap(Recurrent().to(device).eval(), capture_sizes=[2, ROWS], outputs="static", progress=False, verify=0)
    for rows in (2, ROWS) * 8:
        model(inputs(device, rows))
    held = model(inputs(device, 2))
    kept, x, table = held.clone(), inputs(device), model.graph_manager.table
    key = next(key for key, graph in table.graphs.items() if graph.descriptor.num_tokens == 2)
    table.graphs.pop(key).program.drop()
    model.before = held
    close(model(x), torch.relu(model.layer(x)) + kept.sum(0))
    close(held, kept)


def test_padding_of_a_static_input_that_eager_reads_is_not_overwritten(device):
    """Nothing is copied, but the rows of padding are set."""
    model = warm(Recurrent(), device, verify=0)
    static, full = model.static_inputs()["x"], inputs(device)
    for _ in range(8):
        static.copy_(full)
        model(static[: ROWS - 1])
    static.copy_(full)
    expected = torch.relu(model.layer(full[: ROWS - 1])) + full.sum(0)
    model.before = static
    close(model(static[: ROWS - 1]), expected)
    close(static, full)


class Divided(Scaled):
    def __init__(self):
        super().__init__()
        self.divides = True

    def forward(self, x, by):
        y = super().forward(x)
        return y + torch.remainder(by, by) if self.divides else y


def test_what_a_discarded_launch_raises_is_raised_nowhere(device):
    """On the emulator, an integer's division by zero raises."""
    model = sg.wrap(Divided().to(device).eval(), capture_sizes=[ROWS], progress=False)
    by = torch.ones(ROWS, 1, dtype=torch.int64, device=device)
    for _ in range(8):
        model(inputs(device), by)
    model.divides = False
    for _ in range(4):
        x = inputs(device)
        close(model(x, by * 0), model.forward(x, by * 0))
    model.divides = True
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            model(inputs(device), by * 0)
    x = inputs(device)
    close(model(x, by), model.forward(x, by))


def test_a_static_input_that_is_passed_shifted_is_not_overwritten(device):
    model = warm(Scaled(), device, verify=0)
    static = model.static_inputs()["x"]
    for _ in range(8):
        model(static)
        model(static[1:].clone())
    static.copy_(inputs(device))
    before = static.clone()
    for scale, passed in ((2.0, slice(1, None)), (3.0, slice(None))):
        model.scale = scale
        close(model(static[passed]), model.forward(before[passed]))
        close(static, before)


def test_an_interrupt_while_inputs_are_copied_leaves_no_padding_behind(device, monkeypatch):
    """As by Ctrl-C: the rows of a larger call would count as padding of the next one."""

    class Total(nn.Module):
        def forward(self, x, y):
            return x + y + x.sum(0, keepdim=True)

    model = sg.wrap(Total().eval(), capture_sizes=[8], pad_values={"x": 0.0, "y": 0.0}, progress=False)
    calls = {rows: [torch.ones(rows, WIDTH, device=device) for _ in range(2)] for rows in (3, 8)}
    for _ in range(10):
        for passed in calls.values():
            model(*passed)
    model(*calls[8])

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("simplegraph.call.plan._copy_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(*calls[3])
    close(model(*calls[3]), model.forward(*calls[3]))


@pytest.mark.parametrize("kind", [Looked, Gathered])
def test_what_computes_an_index_is_checked_first(device, kind):
    """On a GPU, an index that is out of range ends the process's use of the GPU."""
    model = warm(kind(), device, lambda device: torch.randint(0, 8, (ROWS,), device=device))
    for offset, first in ((4, 0), (0, 12)):
        model.offset = offset
        at = torch.arange(first, first + 4, device=device)
        for _ in range(8):
            close(model(at), model.forward(at))
    assert discarded(model) == 0


class Table(Scaled):
    """Looks up the rows that it is passed, beside others at constant places."""

    def __init__(self, look_up):
        super().__init__()
        self.table, self.look_up, self.looks_up = nn.Parameter(torch.randn(16, WIDTH)), look_up, True

    def forward(self, at, x=None):
        if not self.looks_up:
            return self.layer(at[:, None].to(torch.float32).expand(-1, WIDTH)) * self.scale
        places = torch.arange(len(at), device=at.device) * 2
        y = self.look_up(self.table, at) + self.table[places]
        return y * self.scale if x is None else y * self.scale + x


LOOK_UPS = {
    "embedding": lambda table, at: nn.functional.embedding(at, table),
    "index": lambda table, at: table[at],
    "index_select": lambda table, at: table.index_select(0, at),
    "gather": lambda table, at: table.gather(0, at[:, None].expand(-1, WIDTH)),
    "view": lambda table, at: nn.functional.embedding(at[None].clone().long(), table)[0],
    "twice": lambda table, at: table[at] + nn.functional.embedding(at, table[:12]),
}


def places(device, low=0, high=12):
    return torch.randint(low, high, (ROWS,), device=device)


@pytest.mark.parametrize("kind", LOOK_UPS)
def test_what_is_passed_its_indices_is_launched_early(device, kind):
    model = warm(Table(LOOK_UPS[kind]), device, places)
    for _ in range(4):
        at = places(device)
        close(model(at), model.forward(at))
    model.scale += 1
    at = places(device)
    close(model(at), model.forward(at))
    assert discarded(model) == 1
    if kind == "index":
        at = places(device, -16, 0)
        close(model(at), model.forward(at))


def test_indices_of_32_bits_are_launched_early(device):
    model = warm(Table(LOOK_UPS["index"]), device, lambda device: places(device).int())
    model.scale += 1
    at = places(device).int()
    close(model(at), model.forward(at))
    assert discarded(model) == 1


@pytest.mark.parametrize("kind", LOOK_UPS)
@pytest.mark.parametrize("change", ["grown", "unused"])
def test_an_index_of_another_table_does_not_stop_a_discarded_launch(device, kind, change):
    """On a GPU, an index that is out of range ends the process's use of the GPU."""
    model = warm(Table(LOOK_UPS[kind]), device, places)
    high = 12 if kind == "twice" and change == "grown" else 400
    if change == "grown":
        kept = model.table  # noqa: F841 - the graph's memory is still there
        model.table = nn.Parameter(torch.randn(400, WIDTH, device=device))
    else:
        model.looks_up = False
    for _ in range(8):
        at = places(device, high // 2, high)
        close(model(at), model.forward(at))
    assert discarded(model) == int(change == "unused")


@pytest.mark.parametrize("kind", LOOK_UPS)
@pytest.mark.parametrize("wrong", [16, 1 << 40, -17])
def test_an_index_that_is_out_of_range_fails_as_in_eager(device, kind, wrong):
    if device.type == "cuda":
        pytest.skip("it ends the process's use of the GPU, as in eager")
    model = warm(Table(LOOK_UPS[kind]), device, places)
    at = places(device)
    at[0] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        model.forward(at)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        model(at)
    at = places(device)
    close(model(at), model.forward(at))


def test_indices_beside_other_inputs_and_with_padding(device):
    model = sg.wrap(Table(LOOK_UPS["embedding"]).to(device).eval(), capture_sizes=[ROWS], progress=False)

    def call(rows):
        at, x = places(device, 0, 16)[:rows], inputs(device, rows)
        close(model(at, x=x), model.forward(at, x=x))

    for rows in (4, 2, 3) * 6:
        call(rows)
    model.scale = 3.0
    before = discarded(model)
    for rows in (3, 2, 4) * 6:
        call(rows)
    assert discarded(model) > before


def test_an_index_in_its_static_input_is_checked_first(device):
    """Limiting it there would change what the caller wrote."""
    model = warm(Table(LOOK_UPS["embedding"]), device, places)
    static = model.static_inputs()["at"]
    static.copy_(places(device))
    for _ in range(4):
        close(model(static), model.forward(static))
    model.looks_up = False
    static.fill_(100)
    close(model(static), model.forward(static))
    assert discarded(model) == 0
    assert static.tolist() == [100] * ROWS


def test_an_index_that_lies_in_its_static_input_is_checked_first(device):
    """However a caller got it."""
    model = sg.wrap(Table(LOOK_UPS["embedding"]).to(device).eval(), capture_sizes=[ROWS], progress=False)
    for _ in range(8):
        model(places(device), inputs(device))
    (held,) = model._graph_runner.builder.inputs_of.values()
    static = held.inputs["at"].view(ROWS)
    static.copy_(places(device))
    x = inputs(device)
    close(model(static, x), model.forward(static.clone(), x))


class Positioned(Table):
    """Computes its indices from two buffers, as BERT does."""

    def __init__(self, num_places=ROWS):
        super().__init__(LOOK_UPS["index"])
        self.register_buffer("at", torch.arange(num_places)[None])
        self.register_buffer("types", torch.zeros(1, num_places, dtype=torch.int64))

    def forward(self, x):
        at = self.at[:, :ROWS]
        types = torch.gather(self.types.expand(len(at), -1), 1, at)
        return x + (nn.functional.embedding(at, self.table) + self.table[types])[0] * self.scale


class Unregistered(Table):
    """Its indices are in an attribute, which is no buffer."""

    def __init__(self):
        super().__init__(LOOK_UPS["index"])
        self.at = torch.arange(ROWS)

    def forward(self, x):
        return x + self.table[self.at.to(x.device)] * self.scale


class Bucketed(Table):
    """Computes its indices from constants, by floats, flags and a write in place, as T5 does."""

    def __init__(self):
        super().__init__(LOOK_UPS["index"])

    def forward(self, x):
        distance = torch.arange(ROWS, device=x.device)
        at = torch.zeros_like(distance)
        at += (torch.log(distance.float() + 1) * 3).to(torch.int64).clamp(max=7)
        at = torch.where(distance > 1, at, distance)
        return x + self.table[at] * self.scale


def right(model, device):
    """Compare an answer with eager, and return how many launches of the call were discarded."""
    before, x = discarded(model), inputs(device)
    close(model(x), model.forward(x))
    return discarded(model) - before


@pytest.mark.parametrize("kind", [Positioned, Bucketed])
def test_indices_that_are_computed_from_buffers_or_constants_are_launched_early(device, kind):
    module = kind().to(device)
    with torch.inference_mode():  # composite operators are seen as a whole
        model = warm(module, device)
        model.scale = 2.0
        assert right(model, device) == 1


@pytest.mark.parametrize("moves", ["written", "replaced", "resized", "another module's"])
def test_indices_of_buffers_that_moved_do_not_stop_a_launch(device, moves):
    """On a GPU, an index that is out of range ends the process's use of the GPU."""
    model = warm(Positioned(), device)
    kept = model.table  # the graph's memory is still there
    model.table = nn.Parameter(torch.randn(400, WIDTH, device=device))
    if moves == "written":
        model.at.add_(300)
        model.types = model.types.repeat(1, 400)
    elif moves == "replaced":
        model.at = model.at + 300
        model.types = torch.full((1, 400), 300, device=device)
    elif moves == "resized":
        at = model.at.untyped_storage()
        at.resize_(0)
        at.resize_(8 * ROWS)
        model.at.copy_(torch.arange(ROWS))
    else:
        model.at.set_(torch.arange(100, 100 + ROWS, device=device)[None])
        model.types = model.types.repeat(1, 400)
    assert right(model, device) == 0
    del kept
    for _ in range(8):
        assert right(model, device) == 0
    model.scale = 3.0
    assert right(model, device) == 1


def test_indices_of_a_buffer_that_was_written_do_not_stop_a_launch_where_eager_does_not_look_them_up(device):
    class Skipping(Positioned):
        looks_up = True

        def forward(self, x):
            return super().forward(x) if self.looks_up else x * self.scale

    model = warm(Skipping(), device)
    model.looks_up = False
    model.at.add_(1 << 40)
    for _ in range(8):
        assert right(model, device) == 0


def test_indices_of_a_buffer_that_a_graph_writes_do_not_stop_a_launch(device, caplog):
    """Replays do not count their writes."""

    class Writing(Positioned):
        looks_up = True

        def forward(self, x, at=None, more=None):
            if at is not None:
                self.at.copy_(at)
                return x * 2
            if more is not None:
                return x + more
            return super().forward(x) if self.looks_up else x * self.scale

    model, x = warm(Writing(), device), inputs(device)
    places = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
    for passed in ({}, {"more": x}, {"at": places}, {}, {"more": x}):
        for _ in range(10):
            model(x, **passed)
    model(x, at=places + 300)
    model(x, more=x)  # launched early, as the next one would be
    model.looks_up = False
    caplog.set_level("DEBUG", "simplegraph")
    close(model(x), model.forward(x))
    assert "early launch" not in caplog.text


def test_buffers_of_indices_that_are_written_between_calls_keep_their_graph(device):
    model = warm(Positioned(), device)
    captures = model.graph_stats.captures
    for _ in range(3):
        model.at.copy_(torch.randint(0, ROWS, (1, ROWS), device=device))
        for _ in range(8):
            assert right(model, device) == 0
    assert model.graph_stats.captures == captures
    model.scale = 2.0
    assert right(model, device) == 1
    for _ in range(8):
        assert right(model, device) == 0
    model.scale = 3.0
    model.at.copy_(torch.arange(ROWS))
    assert right(model, device) == 0  # it was checked first


@torch.inference_mode()
def test_buffers_whose_writes_are_not_counted_are_checked_first(device):
    module = Positioned().to(device).eval()
    module.at = module.at.clone()  # a tensor that is made in inference mode has no version
    model = warm(module, device)
    model.scale = 2.0
    assert right(model, device) == 0


def test_large_buffers_of_indices_are_not_kept_alive(device):
    model = warm(Positioned(1 << 17), device)
    model.scale = 2.0
    assert right(model, device) == 0


class Drawing(Table):
    def forward(self, x):
        return x + self.table[torch.randint(0, 16, (ROWS,), device=x.device)] * self.scale


class Filled(Table):
    def forward(self, x):
        at = torch.zeros(ROWS, dtype=torch.int64, device=x.device)
        at.copy_(x[:, 0].abs())
        return x + self.table[at.clamp(0, 15)] * self.scale


class Taking(Table):
    """Its operator is none whose indices are known."""

    def forward(self, at):
        return self.table.take(at[:, None] * torch.ones(1, WIDTH, dtype=torch.int64, device=at.device)) * self.scale


def test_an_operator_whose_indices_are_not_known_is_checked_first(device):
    model = warm(Taking(None), device, places)
    model.scale = 2.0
    model(places(device))
    assert discarded(model) == 0


@pytest.mark.parametrize("kind", [Unregistered, Drawing, Filled])
def test_other_indices_are_checked_first(device, kind):
    module = Unregistered() if kind is Unregistered else kind(LOOK_UPS["index"])
    model = warm(module, device)
    model.scale = 2.0
    model(inputs(device))
    assert discarded(model) == 0


class Attending(nn.Module):
    """The layers of transformers that are one operator at inference, and samples at places that it computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.attention, self.scale = nn.MultiheadAttention(WIDTH, 2, batch_first=True), 1.0

    def forward(self, x):
        y = self.layer(x[:, None])
        y = self.attention(y, y, y, need_weights=False)[0]
        places = (y * self.scale)[:, :, None, :2]
        return nn.functional.grid_sample(y.reshape(len(x), 1, 2, WIDTH // 2), places, align_corners=False)[:, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 0.0])
def test_attention_and_sampling_are_launched_early_and_run_whatever_they_get(device, value):
    model = sg.wrap(Attending().to(device).eval(), capture_sizes=[ROWS], progress=False)
    for _ in range(8):
        model(inputs(device))
    for scale in (2.0, 2.0, 2.0):
        model.scale = scale
        x = torch.full((ROWS, WIDTH), value, device=device)
        torch.testing.assert_close(model(x), model.forward(x), equal_nan=True)
    assert discarded(model) == 1


@pytest.mark.parametrize("kind", [Counted, Drawn, Written])
def test_what_does_more_than_compute_is_checked_first(device, kind):
    model = warm(kind(), device)
    model.scale = 2.0
    model(inputs(device))
    assert discarded(model) == 0
    if kind is Counted:
        assert int(model.count) == 9


@torch.inference_mode()
def test_what_drops_is_checked_first(device):
    """Under inference mode torch shows one operator that may draw."""
    model = warm(Dropped(), device)
    model.scale = 2.0
    model(inputs(device))
    assert discarded(model) == 0


@torch.inference_mode()
def test_what_drops_since_the_capture_without_an_eager_run_is_checked_first(device):
    """Only the graph itself knows that it draws: its memory moved, so it was captured without another eager run."""

    class Net(Scaled):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(super().forward(x))

    model = warm(Net(), device)
    for training, calls in ((False, 1), (True, 4)):
        model.layer.weight.data = model.layer.weight.data.clone()
        model.drop.training = training
        for _ in range(calls):
            model(inputs(device))
    model.scale = 2.0
    x = inputs(device)
    torch.manual_seed(3)
    answer = model(x)
    torch.manual_seed(3)
    close(answer, model.forward(x))


def test_what_writes_without_arguments_is_checked_first(device):
    model = sg.wrap(Ticking().to(device).eval(), exact_shapes=True, progress=False)
    for _ in range(8):
        model()
    assert model.graph_stats.replays
    model.scale = 2.0
    model()
    assert discarded(model) == 0
    assert int(model.count) == 9


def test_wrappers_that_share_memory_are_checked_first(device):
    pool = sg.graph_pool(device)
    first, second = (sg.wrap(Scaled().to(device).eval(), capture_sizes=[ROWS], progress=False) for _ in range(2))
    for model in (first, second):
        model.use_graph_pool(pool)
        for _ in range(8):
            model(inputs(device))
        assert model.graph_stats.replays
        assert changed(model) == 0


def test_a_wrapper_that_another_one_joins_is_checked_first(device):
    first, second = warm(Scaled(), device), sg.wrap(Scaled().to(device).eval(), capture_sizes=[ROWS])
    second.use_graph_pool(first.graph_manager.pool)
    second(inputs(device))
    assert changed(first) == 0


def test_calls_are_checked_first_after_discarded_launches(device):
    """Values that take turns cost 1 discarded launch, then in 2 calls, in 4, in 8."""
    model = warm(Scaled(), device)
    model.scale = 2.0
    for _ in range(8):
        model(inputs(device))
    for call in range(256):
        model.scale = 1.0 + call % 2
        x = inputs(device)
        close(model(x), model.forward(x))
    assert 2 <= discarded(model) <= 2 * 8 + 2


def test_a_number_that_is_set_back_costs_nothing(device):
    model = warm(Scaled(), device)
    for _ in range(8):
        model.scale = 2.0
        model.scale = 1.0
        x = inputs(device)
        close(model(x), model.forward(x))
    assert model.graph_stats.captures == 1


def test_padded_calls(device):
    model = warm(Scaled(), device, lambda device: inputs(device, ROWS - 1), calls=12)
    model(inputs(device, ROWS))
    for rows in (3, 3, 2, 4, 3):
        x = inputs(device, rows)
        close(model(x), model.forward(x))
    model.scale = 4.0
    for rows in (3, 3, 2, 4, 3):
        x = inputs(device, rows)
        close(model(x), model.forward(x))


def test_numbers_that_a_thread_sets(device):
    """Each answer has a scale that the number had during its call."""
    model = warm(Scaled(), device)
    x, stop = inputs(device), threading.Event()
    unscaled = torch.relu(model.layer(x))

    def turn():
        while not stop.is_set():
            model.scale = 3.0 - model.scale

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        answers = [model(x) for _ in range(300)]
    finally:
        stop.set()
        thread.join()
    for answer in answers:
        assert any(torch.allclose(answer, unscaled * scale, atol=1e-5) for scale in (1.0, 2.0))


def test_debugging_compares_first(device):
    model = warm(Scaled(), device, debug=True)
    assert changed(model) == 0


class Packed(nn.Module):
    """Looks each part of an argument up in another table."""

    def __init__(self, part):
        super().__init__()
        self.words, self.places, self.scale, self.part = nn.Embedding(400, WIDTH), nn.Embedding(16, WIDTH), 1.0, part

    def forward(self, packed):
        words, places = self.part(packed)
        return (self.words(words) + self.places(places)) * self.scale


PARTS = {
    "columns": lambda packed: packed.unbind(-1),
    "clone": lambda packed: packed.clone().unbind(-1),
    "expanded": lambda packed: (packed[:, :1].expand(-1, 2)[:, 0], packed[:, 1]),
    "contiguous": lambda packed: tuple(part.contiguous() for part in packed.unbind(-1)),
}


@pytest.mark.parametrize("way", PARTS)
def test_parts_of_an_argument_that_are_looked_up_in_other_tables_are_checked_first(device, way):
    """The range of one part is not that of the whole argument."""

    def packed(device):
        words, places = torch.randint(100, 400, (ROWS,)), torch.randint(0, 16, (ROWS,))
        return torch.stack([words, places], -1).to(device)

    model = warm(Packed(PARTS[way]), device, packed)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
        model.scale = scale
        x = packed(device)
        close(model(x), model.forward(x))
    assert discarded(model) == 0


@pytest.mark.parametrize(
    ("passed", "viewed"),
    [(torch.int32, torch.int64), (torch.int64, torch.int32), (torch.uint8, torch.int64), (torch.float32, torch.int32)],
)
def test_an_argument_viewed_as_another_dtype_is_checked_first(device, passed, viewed):
    class Viewing(Table):
        def forward(self, raw):
            if not self.looks_up:
                return raw.float().sum(1, keepdim=True)
            return self.look_up(self.table, raw.view(viewed)).sum(1) * self.scale

    def raw(device):
        return torch.randint(0, 16, (ROWS, 6), device=device).to(viewed).view(passed)

    model = warm(Viewing(LOOK_UPS["embedding"]), device, raw)
    model.looks_up = False
    x = torch.full_like(raw(device), 7)
    for _ in range(4):
        close(model(x), model.forward(x))
    assert discarded(model) == 0


class Branching(Counted):
    """Does something at one batch size only, between the others."""

    def __init__(self, rare):
        super().__init__()
        self.rare, self.table = rare, nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x, at):
        y = torch.relu(self.layer(x)) * self.scale
        return self.rare(self, y, at) if len(x) == 3 else y


def test_uninitialised_integers_and_parts_of_other_widths_are_no_whole_arguments():
    x, made = torch.arange(ROWS), set()
    blank, copy, unseen = torch.empty(ROWS, dtype=torch.int64), x.clone(), x.clone()
    made |= {storage_key(blank), storage_key(copy), storage_key(unseen)}
    indices = IndexRanges(made)
    indices.note(facts_of(torch.ops.aten.empty.memory_format), ((ROWS,),), [blank])
    indices.note(facts_of(torch.ops.aten.clone.default), (x,), [copy])
    for index, may_fault, sources in (
        (blank, True, set()),
        (unseen, True, set()),  # no operator was seen that made it
        (copy, False, set()),
        (copy.view(torch.int32)[:ROWS], False, {storage_key(x)}),
        (x.as_strided((2, 2), (1, 1)), False, {storage_key(x)}),
    ):
        indices.may_fault, indices.sources = False, set()
        indices.note_fault(facts_of(torch.ops.aten.embedding.default), (torch.ones(8, WIDTH), index), {})
        assert (indices.may_fault, indices.sources) == (may_fault, sources)


RARE = {
    "write": lambda m, y, at: m.count.add_(1) + y,
    "index": lambda m, y, at: y + m.table[at],
    "index of a part": lambda m, y, at: y + m.table[at[:1]],
}


@pytest.mark.parametrize("kind", RARE)
@pytest.mark.parametrize("sizes", [4, 10])
def test_a_graph_is_launched_early_for_what_its_own_recording_shows(device, kind, sizes):
    """Of many sizes captured together, not all are observed."""
    model = sg.wrap(
        Branching(RARE[kind]).to(device).eval(),
        capture_sizes=list(range(1, sizes + 1)),
        progress=False,
        verify=0,
        padding=False,
    )

    def passed(rows):
        return inputs(device, rows), torch.randint(0, 16, (rows,), device=device)

    model.capture_graphs(*passed(sizes))
    count = int(model.count)
    for _ in range(6):
        model(*passed(3))
    model.scale = 2.0
    x, at = passed(3)
    answer = model(x, at)
    assert int(model.count) == count + 7 * (kind == "write")
    if kind != "write":
        close(answer, model.forward(x, at))
    assert discarded(model) == int(kind == "index" and sizes == 4)


class Sliced(Table):
    """Its table is as long as the batch, or not."""

    def __init__(self, grows):
        super().__init__(LOOK_UPS["embedding"])
        self.grows = grows

    def forward(self, at):
        return self.look_up(self.table[: len(at) if self.grows else 16], at) * self.scale


@pytest.mark.parametrize("grows", [True, False])
def test_each_size_limits_indices_to_its_own_table(device, grows):
    model = sg.wrap(Sliced(grows).to(device).eval(), capture_sizes=[2, 3, 4, 5, 6], progress=False, padding=False)
    model.capture_graphs(torch.zeros(6, dtype=torch.int64, device=device))
    for rows in (6, 5, 4, 3, 2) * 4:
        at = torch.arange(rows, device=device)
        close(model(at), model.forward(at))
    replays = model.graph_stats.replays
    for rows in (6, 4, 2):
        at = torch.arange(rows, device=device).flip(0)
        close(model(at), model.forward(at))
    assert model.graph_stats.replays == replays + 3
    model.scale = 2.0
    at = torch.arange(4, device=device)
    close(model(at), model.forward(at))
    assert discarded(model) == 1
    if device.type == "cpu" and grows:
        with pytest.raises(IndexError):
            model(at + 1)
