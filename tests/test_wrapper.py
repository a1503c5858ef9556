"""The three ways to give a module graphs, and what each call of one does."""

from __future__ import annotations

import collections
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg

WIDTH = 8
SIZES = [2, 4, 7]


class Mlp(nn.Module):
    """Rows are independent; a little of everything a decoder has."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MixinMlp(sg.CudaGraphWrapper, Mlp, capture_sizes=SIZES, progress=False):
    pass


@sg.cuda_graph(capture_sizes=SIZES, progress=False)
class DecoratedMlp(Mlp):
    pass


class Counting(nn.Module):
    """Counts its calls twice: on the device, and in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.python_count = 0

    def forward(self, x):
        self.count += 1
        self.python_count += 1
        return x * 2


class OldStyle(nn.Module):
    def __init__(self, scale=3.0):
        super(OldStyle, self).__init__()  # noqa: UP008 (the old style is what is tested)
        self.scale = scale

    def forward(self, x):
        return x * self.scale


OldStyle = sg.cuda_graph(OldStyle)


class Attention(nn.Module):
    """A child that is wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.proj(x))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.inner(x))


def close(actual, expected):
    # A padded batch may be given to another GEMM kernel on a GPU, so bits may differ.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def rows(count: int, device: torch.device, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, device=device)


def reasons(model) -> dict[str, int]:
    return {reason.value: count for reason, count in model.graph_stats.eager.items()}


def wrapped_mlp(device, **settings):
    module = Mlp().to(device).eval()
    return sg.wrap(module, **{"capture_sizes": SIZES, "progress": False, **settings})


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# The three ways.


@pytest.mark.parametrize("way", ["mixin", "decorator", "instance"])
def test_each_way_to_wrap_returns_what_eager_returns_at_every_size(device, way):
    reference = Mlp().to(device).eval()
    if way == "instance":
        model = sg.wrap(copy.deepcopy(reference), capture_sizes=SIZES, progress=False)
    else:
        model = {"mixin": MixinMlp, "decorator": DecoratedMlp}[way]().to(device).eval()
        model.load_state_dict(reference.state_dict())
    for size in (2, 2, 2, 4, 4, 4, 3, 3, 3, 1, 1, 7, 7, 5, 6, 9, 2, 3):
        x = rows(size, device)
        close(model(x), reference(x))
    stats = model.graph_stats
    assert {graph.size for graph in stats.graphs.values()} == {2, 4, 7}
    assert stats.replays == 18 - sum(stats.eager.values())
    assert stats.replays >= 9
    assert reasons(model)["batch_too_large"] == 1


def test_class_keywords_of_a_mixin_are_its_settings_and_subclasses_refine_them(device):
    class Small(MixinMlp, capture_sizes=[3]):
        pass

    assert MixinMlp.cuda_graph_config.capture_sizes == (2, 4, 7)
    assert Small.cuda_graph_config.capture_sizes == (3,)
    assert Small.cuda_graph_config.progress is False
    model = Small().to(device).eval()
    for _ in range(4):
        model(rows(3, device))
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [3]


def test_a_mixin_without_class_keywords_has_the_default_sizes():
    class Plain(sg.CudaGraphWrapper, Mlp):
        pass

    assert Plain.cuda_graph_config == sg.CudaGraphConfig()


def test_a_misspelt_class_keyword_is_refused():
    with pytest.raises((TypeError, sg.ConfigError), match="capture_size"):

        class Typo(sg.CudaGraphWrapper, Mlp, capture_size=[1]):
            pass


def test_an_invalid_class_keyword_names_the_field():
    with pytest.raises(sg.ConfigError, match="capture_sizes is empty"):

        class Empty(sg.CudaGraphWrapper, Mlp, capture_sizes=[]):
            pass


def test_a_mixin_on_the_wrong_side_is_refused_instead_of_never_capturing():
    with pytest.raises(sg.ConfigError, match="before"):

        class Backwards(Mlp, sg.CudaGraphWrapper):
            pass


def test_a_decorated_class_is_the_class_it_was():
    class Decoder(Mlp):
        """Decodes."""

    assert sg.cuda_graph(Decoder) is Decoder
    assert Decoder.__name__ == "Decoder"
    assert Decoder.__doc__ == "Decodes."
    assert issubclass(Decoder, (Mlp, sg.CudaGraphWrapper))
    assert list(Decoder().state_dict()) == list(Mlp().state_dict())


def test_decorating_twice_replays_once_per_call_and_adds_settings_up(device):
    @sg.cuda_graph(padding=False)
    @sg.cuda_graph(capture_sizes=[4])
    @sg.cuda_graph
    class Twice(Mlp):
        pass

    assert Twice.cuda_graph_config.capture_sizes == (4,)
    assert Twice.cuda_graph_config.padding is False
    model = Twice().to(device).eval()
    for _ in range(4):
        model(rows(4, device))
    model(rows(3, device))
    assert model.graph_stats.replays == 3
    assert reasons(model) == {"first_call": 1, "size_not_captured": 1}


def test_a_decorated_subclass_keeps_its_parents_settings(device):
    class Child(DecoratedMlp):
        def forward(self, x):
            return super().forward(x) + 1

    @sg.cuda_graph(num_warmups=0)
    class Grandchild(Child):
        pass

    assert Grandchild.cuda_graph_config.capture_sizes == (2, 4, 7)
    assert DecoratedMlp.cuda_graph_config.num_warmups == 1
    model = Grandchild().to(device).eval()
    x = rows(4, device)
    expected = Mlp.forward(model, x) + 1
    for _ in range(3):
        close(model(x), expected)
    assert model.graph_stats.replays == 2


def test_decorating_a_parent_after_its_child_works_for_both(device):
    class Parent(nn.Module):
        def forward(self, x):
            return x + 1

    @sg.cuda_graph(capture_sizes=[4])
    class Child(Parent):
        pass

    sg.cuda_graph(capture_sizes=[2])(Parent)
    for kind, size in ((Parent, 2), (Child, 4)):
        model = kind().eval()
        x = rows(size, device)
        for _ in range(3):
            assert torch.equal(model(x), x + 1)
        assert model.graph_stats.replays == 2


def test_super_with_the_class_name_still_works_in_a_decorated_class(device):
    model = OldStyle(scale=5.0).eval()
    x = rows(4, device)
    for _ in range(4):
        assert torch.equal(model(x), x * 5)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("target", [Mlp(), int, "Mlp", lambda x: x])
def test_decorating_something_that_is_no_module_class_says_so(target):
    with pytest.raises(sg.ConfigError, match=r"torch\.nn\.Module"):
        sg.cuda_graph(target)


def test_decorating_a_class_with_its_own_call_says_what_to_do():
    class Callable(nn.Module):
        def __call__(self, x):
            return x

    with pytest.raises(sg.ConfigError, match="defines __call__ itself"):
        sg.cuda_graph(Callable)


def test_a_misspelt_setting_lists_the_known_ones():
    with pytest.raises(sg.ConfigError, match="capture_sizes"):
        sg.cuda_graph(capture_size=[1])(type("Fresh", (Mlp,), {}))
    with pytest.raises(sg.ConfigError, match="capture_sizes"):
        sg.wrap(Mlp(), capture_size=[1])


@pytest.mark.parametrize("target", [Mlp, "Mlp", None])
def test_wrapping_something_that_is_no_module_says_so(target):
    with pytest.raises(sg.ConfigError, match="instance"):
        sg.wrap(target)


# Around an instance.


def test_a_wrapped_module_has_the_modules_keys_class_and_repr(device):
    module = Mlp().to(device)
    model = sg.wrap(module)
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in module.named_modules()]
    assert isinstance(model, Mlp)
    assert isinstance(model, sg.CudaGraphWrapper)
    assert type(model).__name__ == "Mlp"
    assert repr(model) == repr(module)
    assert all(mine is other for mine, other in zip(model.parameters(), module.parameters(), strict=True))


def test_weights_loaded_into_the_wrapper_are_the_modules(device):
    module, other = Mlp().to(device).eval(), Mlp().to(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        model(x)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    close(model(x), other(x))
    close(module(x), other(x))


def test_attributes_set_on_either_are_seen_on_both(device):
    module = Mlp().to(device)
    model = sg.wrap(module)
    model.label = "a"
    module.layers = 3
    model.extra = nn.Linear(2, 2)
    assert module.label == "a"
    assert model.layers == 3
    assert module.extra is model.extra
    assert "extra.weight" in module.state_dict()
    assert model.up is module.up
    del model.label
    assert not hasattr(module, "label")
    model.eval()
    assert module.training is False
    assert module.up.training is False


def test_an_unknown_attribute_of_a_wrapper_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = sg.wrap(Mlp()).no_such_thing


def test_the_wrapped_module_itself_stays_eager(device):
    module = Counting().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        model(x)
    before, replays = module.python_count, model.graph_stats.replays
    for _ in range(3):
        assert torch.equal(module(x), x * 2)
    assert module.python_count == before + 3
    assert model.graph_stats.replays == replays
    assert not isinstance(module, sg.CudaGraphWrapper)


def test_moving_the_wrapper_returns_the_wrapper_and_moves_the_module(device):
    module = Mlp().to(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        model(x)
    assert model.half() is model
    assert module.up.weight.dtype is torch.float16
    half = x.half()
    torch.testing.assert_close(model(half), module(half), rtol=1e-2, atol=1e-2)
    assert model.to(torch.float64) is model
    for _ in range(4):
        torch.testing.assert_close(model(x.double()), module(x.double()))
    assert model.float().eval() is model
    close(model(x), module(x))


def test_wrapping_a_wrapper_again_keeps_settings_and_does_not_nest(device):
    module = Mlp().to(device).eval()
    first = sg.wrap(module, capture_sizes=[4], num_warmups=0)
    second = sg.wrap(first, num_warmups=2)
    assert type(second) is type(first)
    assert sg.unwrap(second).up is module.up
    assert not isinstance(sg.unwrap(second), sg.CudaGraphWrapper)
    x = rows(4, device)
    for _ in range(4):
        close(second(x), module(x))
    assert reasons(second) == {"first_call": 1, "warmup": 1}
    assert [graph.size for graph in second.graph_stats.graphs.values()] == [4]


def test_a_config_given_to_wrap_yields_to_keywords(device):
    config = sg.CudaGraphConfig(capture_sizes=[2, 4], num_warmups=0)
    model = sg.wrap(Mlp().to(device).eval(), config, capture_sizes=[3])
    for _ in range(3):
        model(rows(3, device))
    assert reasons(model) == {"first_call": 1}
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [3]


@pytest.mark.parametrize("make", [MixinMlp, DecoratedMlp], ids=["mixin", "decorated"])
def test_wrapping_a_module_that_has_graphs_already_gives_it_other_settings(device, make):
    module = make().to(device).eval()
    model = sg.wrap(module, capture_sizes=[3])
    x = rows(3, device)
    expected = Mlp.forward(module, x)
    for _ in range(4):
        close(model(x), expected)
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [3]
    assert model.graph_stats.replays == 3
    assert module.graph_stats.replays == 0


def test_unwrap_gives_the_eager_module_and_leaves_others_alone(device):
    module = Mlp().to(device).eval()
    model = sg.wrap(module)
    plain = sg.unwrap(model)
    assert type(plain) is Mlp
    assert plain.up is module.up
    assert sg.unwrap(module) is module


def test_a_torchscript_module_is_refused_with_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch deprecate it
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(sg.ConfigError, match="TorchScript"):
        sg.wrap(scripted)


def test_a_slice_of_a_wrapped_sequential_is_callable(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    assert torch.equal(model[:2](x), module[:2](x))
    assert model[2] is module[2]
    assert len(model) == 3


def test_forward_hooks_run_as_in_eager_and_change_what_is_captured(device):
    module = Mlp().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_hook(lambda _, args, output: output + 1)
    x = rows(4, device)
    expected = Mlp.forward(module, x * 2) + 1
    for _ in range(5):
        close(model(x), expected)
    assert model.graph_stats.replays == 4


# Copies.


def _copies(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return {
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
        "torch.save": torch.load(stream, weights_only=False),
    }


@pytest.mark.parametrize("way", ["mixin", "decorator", "instance"])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_has_weights_and_settings_and_graphs_of_its_own(device, way, how):
    make = {"mixin": MixinMlp, "decorator": DecoratedMlp, "instance": Mlp}[way]
    model = make().to(device).eval()
    if way == "instance":
        model = sg.wrap(model, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        expected = model(x)
    other = _copies(model)[how]
    assert type(other) is type(model)
    assert other.graph_stats.replays == 0
    for _ in range(4):
        close(other(x), expected)
    assert [graph.size for graph in other.graph_stats.graphs.values()] == [4]
    other.down.weight.zero_()
    close(other(x), x)
    close(model(x), expected)


def test_the_module_under_a_wrapper_pickles_as_itself(device):
    module = Mlp().to(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        model(x)
    other = pickle.loads(pickle.dumps(module))
    assert type(other) is Mlp
    close(other(x), module(x))
    close(copy.deepcopy(module)(x), module(x))


def test_a_shallow_copy_does_not_share_attributes_set_later(device):
    model = wrapped_mlp(device)
    other = copy.copy(model)
    other.label = "copy"
    assert not hasattr(model, "label")
    assert other.up is model.up
    x = rows(4, device)
    close(other(x), model(x))


def test_a_parent_with_a_wrapped_child_copies_and_keeps_its_keys(device):
    parent = Outer(Attention()).to(device).eval()
    keys = list(parent.state_dict())
    parent.inner = sg.wrap(parent.inner, capture_sizes=[4])
    assert list(parent.state_dict()) == keys
    x = rows(4, device)
    expected = parent(x)
    other = copy.deepcopy(parent)
    assert isinstance(other.inner, sg.CudaGraphWrapper)
    for _ in range(4):
        close(other(x), expected)
    assert other.inner.graph_stats.replays == 3
    assert parent.inner.graph_stats.replays == 0


def test_the_environment_is_not_written_into_a_pickle(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "none")
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    assert reasons(model) == {"mode_none": 3}
    stored = pickle.dumps(model)
    monkeypatch.delenv("SIMPLEGRAPH_MODE")
    other = pickle.loads(stored)
    for _ in range(3):
        other(x)
    assert other.graph_stats.replays == 2


# Nesting.


def test_the_outer_graph_owns_the_inner(device):
    module = Outer(Attention()).to(device).eval()
    reference = copy.deepcopy(module)
    module.inner = sg.wrap(module.inner, capture_sizes=[4])
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(6):
        x = rows(4, device)
        close(model(x), reference(x))
    assert model.graph_stats.replays == 5
    assert model.inner.graph_stats.replays == 0
    assert model.inner.graph_stats.captures == 0
    assert set(reasons(model.inner)) == {"nested"}


def test_an_inner_wrapper_has_its_own_graphs_where_the_outer_has_none(device):
    module = Outer(Attention()).to(device).eval()
    reference = copy.deepcopy(module)
    module.inner = sg.wrap(module.inner, capture_sizes=[6])
    model = sg.wrap(module, capture_sizes=[4])
    for size in (4, 4, 4, 6, 6, 6, 6, 4, 6):
        x = rows(size, device)
        close(model(x), reference(x))
    assert model.graph_stats.replays == 3
    assert reasons(model)["batch_too_large"] == 5
    assert model.inner.graph_stats.replays == 4


def test_an_inner_call_on_its_own_is_still_served_by_its_graphs(device):
    module = Outer(Attention()).to(device).eval()
    module.inner = sg.wrap(module.inner, capture_sizes=[4])
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        model(x)
    expected = torch.tanh(module.inner.proj(x))
    for _ in range(4):
        close(model.inner(x), expected)
    assert model.inner.graph_stats.replays == 3


def test_two_wrappers_of_one_module_do_not_disturb_each_other(device):
    module = Mlp().to(device).eval()
    one, two = sg.wrap(module, capture_sizes=[4]), sg.wrap(module, capture_sizes=[4], outputs="static")
    for _ in range(5):
        x, y = rows(4, device), rows(4, device)
        first, second = one(x), two(y)
        close(first, module(x))
        close(second, module(y))
    assert one.graph_stats.replays == two.graph_stats.replays == 4


# The order in a call.


def test_the_order_is_first_call_warmup_capture_replay(device):
    model = wrapped_mlp(device, num_warmups=2)
    x = rows(4, device)
    states = []
    for _ in range(5):
        model(x)
        states.append((reasons(model), model.graph_stats.captures, model.graph_stats.replays))
    assert states == [
        ({"first_call": 1}, 0, 0),
        ({"first_call": 1, "warmup": 1}, 0, 0),
        ({"first_call": 1, "warmup": 1}, 1, 1),
        ({"first_call": 1, "warmup": 1}, 1, 2),
        ({"first_call": 1, "warmup": 1}, 1, 3),
    ]


@pytest.mark.parametrize(("num_warmups", "eager_calls"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_a_size_is_captured_after_as_many_eager_calls_as_configured(device, num_warmups, eager_calls):
    model = wrapped_mlp(device, num_warmups=num_warmups)
    for _ in range(8):
        model(rows(4, device))
    assert sum(reasons(model).values()) == eager_calls
    assert model.graph_stats.replays == 8 - eager_calls


def test_every_size_is_warmed_up_and_captured_for_itself(device):
    model = wrapped_mlp(device)
    for size in (2, 4, 7, 2, 4, 7, 2, 4, 7):
        model(rows(size, device))
    assert reasons(model) == {"first_call": 1, "warmup": 2}
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays == 6


def test_sizes_in_between_share_the_next_larger_graph(device):
    model = wrapped_mlp(device)
    for size in (4, 2, 4, 3, 3, 4, 3):
        model(rows(size, device))
    graphs = {graph.size: graph for graph in model.graph_stats.graphs.values()}
    assert graphs[4].replays == 5
    assert graphs[4].padded_tokens == 3
    assert model.graph_stats.padded_tokens == 3


def test_without_padding_only_exact_sizes_replay(device):
    model = wrapped_mlp(device, padding=False)
    for size in (4, 3, 4, 3, 4, 2, 2):
        close(model(x := rows(size, device)), sg.unwrap(model)(x))
    assert reasons(model) == {"first_call": 1, "size_not_captured": 2, "warmup": 1}
    assert model.graph_stats.padded_tokens == 0


def test_a_batch_above_every_size_runs_eagerly_and_is_counted(device):
    model = wrapped_mlp(device)
    x = rows(8, device)
    close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"batch_too_large": 1}


def test_an_empty_batch_runs_eagerly_and_the_next_is_right(device):
    model = wrapped_mlp(device)
    assert model(rows(0, device)).shape == (0, WIDTH)
    x = rows(4, device)
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert model(rows(0, device)).shape == (0, WIDTH)
    assert reasons(model) == {"empty_batch": 2, "first_call": 1}


@pytest.mark.parametrize("sizes", [[4], [4, 6]])
def test_every_call_runs_the_forward_exactly_once(device, sizes):
    module = Counting().to(device).eval()
    model = sg.wrap(module, capture_sizes=sizes, num_warmups=2)
    for call, size in enumerate((4, 4, 4, 3, 3, 3, 4, 2, 5, 5, 5, 5, 9, 1, 4), start=1):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
        assert module.count.item() == call
    assert model.graph_stats.replays > 5


def test_python_runs_once_per_eager_call_and_capture_and_never_at_replay(device):
    module = Counting().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    counts = []
    for _ in range(5):
        model(x)
        counts.append(module.python_count)
    assert counts == [1, 2, 2, 2, 2]
    assert module.count.item() == 5


def test_upfront_configuration_never_captures_in_a_call(device):
    model = wrapped_mlp(device, capture="upfront")
    x = rows(4, device)
    for _ in range(4):
        model(x)
    assert reasons(model) == {"not_captured_upfront": 4}
    model.capture_graphs(x)
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 1


# Around the call.


def test_inside_eager_nothing_is_captured_or_replayed(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with sg.eager():
        close(model(x), sg.unwrap(model)(x))
        with sg.eager():
            model(x)
        model(x)
    model(x)
    assert reasons(model) == {"first_call": 1, "eager_context": 3}
    assert model.graph_stats.replays == 3


def test_eager_holds_in_its_own_thread_only(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)

    def call():
        with torch.no_grad():
            model(x)

    with sg.eager():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert model.graph_stats.replays == 3
    assert reasons(model) == {"first_call": 1}


def test_eager_ends_when_the_block_raises(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    with pytest.raises(KeyError), sg.eager():
        raise KeyError
    for _ in range(3):
        model(x)
    assert model.graph_stats.replays == 2


def test_decode_only_graphs_serve_batches_described_as_uniform_decode(device):
    model = wrapped_mlp(device, mode="FULL_DECODE_ONLY")
    x = rows(4, device)
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"mixed_batch": 3}
    for _ in range(3):
        with sg.describe(num_reqs=4, uniform_query_len=1):
            close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 2
    model(x)
    assert reasons(model) == {"mixed_batch": 4, "first_call": 1}


def test_a_described_decode_batch_is_padded_to_whole_requests(device):
    model = wrapped_mlp(device, mode="FULL_DECODE_ONLY", uniform_query_len=3, capture_sizes=[6, 12])
    for requests in (4, 4, 2, 2, 3, 3, 3):
        x = rows(3 * requests, device)
        with sg.describe(num_reqs=requests, uniform_query_len=3):
            close(model(x), sg.unwrap(model)(x))
    assert {graph.size for graph in model.graph_stats.graphs.values()} == {6, 12}
    assert model.graph_stats.padded_tokens == 9


def test_a_description_that_does_not_fit_the_batch_is_an_error(device):
    model = wrapped_mlp(device)
    with sg.describe(num_reqs=3, uniform_query_len=2), pytest.raises(sg.InputError, match="num_tokens"):
        model(rows(4, device))
    x = rows(4, device)
    close(model(x), sg.unwrap(model)(x))


def test_more_loras_than_any_graph_holds_run_eagerly(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with sg.describe(num_active_loras=2):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model)["lora_count"] == 1


def test_training_runs_eagerly_and_dropout_is_active(device):
    module = nn.Sequential(nn.Dropout(0.5)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = torch.ones(4, 256, device=device)
    for _ in range(3):
        assert torch.equal(model(x), x)
    model.train()
    assert (model(x) == 0).any()
    model.eval()
    assert torch.equal(model(x), x)
    assert reasons(model) == {"first_call": 1, "training": 1}
    assert model.graph_stats.replays == 3


def test_gradients_flow_when_parameters_want_them(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with torch.enable_grad():
        model(x).sum().backward()
    assert model.up.weight.grad is not None
    assert reasons(model) == {"first_call": 1, "grad": 1}
    close(model(x), sg.unwrap(model)(x))


def test_gradients_flow_to_an_input_of_a_frozen_module(device):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    with torch.enable_grad():
        for _ in range(3):
            model(x)
        assert model.graph_stats.replays == 2
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
    assert leaf.grad.abs().sum() > 0
    assert reasons(model) == {"first_call": 1, "grad": 1}


def test_parameters_that_start_to_want_gradients_are_noticed(device):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    with torch.enable_grad():
        for _ in range(3):
            model(x)
        model.up.weight.requires_grad_()
        assert model(x).requires_grad


def test_autocast_on_and_off_give_what_eager_gives(device):
    model = wrapped_mlp(device)
    plain = sg.unwrap(model)
    x = rows(4, device)
    for turn in range(8):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=turn % 2 == 0):
            actual, expected = model(x), plain(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert model.graph_stats.captures == 2
    with torch.autocast(device.type, dtype=torch.bfloat16):
        model.up.weight.zero_()
        torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_graphs_captured_in_inference_mode_serve_calls_outside_it_and_back(device, outputs):
    model = wrapped_mlp(device, outputs=outputs)
    plain = sg.unwrap(model)
    x = rows(4, device)
    with torch.inference_mode():
        for _ in range(3):
            close(model(x), plain(x))
    close(model(x), plain(x))
    with torch.inference_mode():
        y = rows(3, device)
        close(model(y), plain(y))
        close(model(y), plain(y))
    y = rows(3, device)
    close(model(y), plain(y))
    assert model.graph_stats.replays >= 4


def test_an_output_replayed_outside_inference_mode_can_be_trained_on(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    hidden = model(x)
    with torch.enable_grad():
        head = nn.Linear(WIDTH, 1).to(device)
        head(hidden).sum().backward()
    close(head.weight.grad[0], hidden.sum(0))


def test_an_output_in_inference_mode_is_an_inference_tensor_as_in_eager(device):
    model = wrapped_mlp(device)
    with torch.inference_mode():
        x = rows(4, device)
        for _ in range(4):
            assert model(x).is_inference()
        assert model.graph_stats.replays == 3


# Settings.


def test_the_environment_switches_a_deployed_program_off(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "none")
    model = wrapped_mlp(device)
    x = rows(4, device)
    summary = model.capture_graphs(x)
    assert (summary.captured, summary.failed) == (0, {})
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"mode_none": 3}


def test_the_environment_wins_over_the_code(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_CAPTURE_SIZES", "3")
    monkeypatch.setenv("SIMPLEGRAPH_NUM_WARMUPS", "0")
    model = wrapped_mlp(device)
    for _ in range(3):
        model(rows(3, device))
    assert reasons(model) == {"first_call": 1}
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [3]


@pytest.mark.parametrize(("name", "value"), [("MODE", "fast"), ("CAPTURE_SIZES", "1,x"), ("CAPTUR_SIZES", "1")])
def test_an_invalid_environment_names_the_variable(monkeypatch, name, value):
    monkeypatch.setenv(f"SIMPLEGRAPH_{name}", value)
    with pytest.raises(sg.ConfigError, match=f"SIMPLEGRAPH_{name}"):
        sg.wrap(Mlp())


def test_settings_changed_later_take_effect_and_counters_stay(device):
    model = MixinMlp().to(device).eval()
    x = rows(4, device)
    for _ in range(3):
        model(x)
    model.configure_graphs(capture_sizes=[5])
    for _ in range(3):
        close(model(x), Mlp.forward(model, x))
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [5]
    assert model.graph_stats.replays >= 3
    assert MixinMlp.cuda_graph_config.capture_sizes == (2, 4, 7)


def test_instances_of_a_class_may_share_graph_memory_later(device):
    pool = sg.graph_pool(device)
    models = [MixinMlp().to(device).eval() for _ in range(2)]
    x = rows(4, device)
    for model in models:
        for _ in range(3):
            model(x)
        model.use_graph_pool(pool)
    for _ in range(3):
        for model in models:
            close(model(x), Mlp.forward(model, x))
    assert [model.graph_stats.captures for model in models] == [2, 2]  # once in each memory
    assert all(model._graph_runner.manager.pool is pool for model in models)


def test_an_invalid_change_of_settings_changes_nothing(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with pytest.raises(sg.ConfigError, match="num_warmups"):
        model.configure_graphs(num_warmups=-1)
    model(x)
    assert model.graph_stats.replays == 3


def test_reset_drops_graphs_and_later_calls_capture_anew(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        expected = model(x)
    model.reset_graphs()
    assert model.graph_stats.graphs == {}
    assert model.graph_stats.graph_bytes == 0
    for _ in range(3):
        close(model(x), expected)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays == 4


# All sizes up front.


def test_capture_graphs_makes_every_size_ready_for_the_first_call(device):
    model = wrapped_mlp(device)
    example = rows(3, device)
    summary = model.capture_graphs(example)
    assert summary.captured == 3
    assert summary.failed == {}
    assert summary.seconds > 0
    for size in range(1, 8):
        x = rows(size, device)
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {}
    assert model.graph_stats.replays == 7


def test_capture_graphs_again_captures_nothing_more(device):
    model = wrapped_mlp(device)
    model.capture_graphs(rows(3, device))
    assert model.capture_graphs(rows(2, device)).captured == 0
    x = rows(5, device)
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.captures == 3


def test_capture_graphs_does_not_touch_the_example(device):
    model = wrapped_mlp(device)
    example = rows(3, device)
    before = example.clone()
    model.capture_graphs(example)
    assert torch.equal(example, before)


@pytest.mark.parametrize("size", [4, 8])
def test_a_single_size_serves_smaller_batches_after_capture_graphs(device, size):
    model = wrapped_mlp(device, capture_sizes=[size])
    model.capture_graphs(rows(size, device))
    for batch in (size, 1, 3):
        x = rows(batch, device)
        close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 3


def test_a_forward_that_takes_only_multiples_is_captured_up_front(device):
    class Groups(nn.Module):
        def forward(self, x):
            return x.view(-1, 4, WIDTH).cumsum(1).view(-1, WIDTH)

    model = sg.wrap(Groups().eval(), capture_sizes=[4], progress=False)
    x = rows(4, device)
    assert model.capture_graphs(x).captured == 1
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 1


def test_capture_graphs_in_training_mode_says_to_call_eval(device):
    model = wrapped_mlp(device).train()
    with pytest.raises(sg.InputError, match="eval"):
        model.capture_graphs(rows(4, device))


def test_capture_graphs_without_tensors_says_why(device):
    model = wrapped_mlp(device)
    with pytest.raises(sg.InputError, match="tensor"):
        model.capture_graphs(3)


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_shows_only_where_it_is_wanted(device, capsys, progress):
    model = wrapped_mlp(device, progress=progress)
    model.capture_graphs(rows(4, device))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("3/3" in shown.err) is progress


# Static inputs.


class TwoInputs(nn.Module):
    def forward(self, a, b):
        return a - 2 * b


def two_inputs(device, **settings):
    return sg.wrap(TwoInputs().eval(), capture_sizes=[4, 6], progress=False, **settings)


def test_static_inputs_written_in_place_are_not_copied(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    assert {name: tuple(view.shape) for name, view in static.items()} == {"a": (4, WIDTH), "b": (4, WIDTH)}
    for _ in range(3):
        a, b = rows(4, device), rows(4, device)
        static["a"].copy_(a)
        static["b"].copy_(b)
        close(model(static["a"], static["b"]), a - 2 * b)
    assert model.graph_stats.replays == 3


def test_static_inputs_mix_with_tensors_of_the_caller_and_with_padding(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    for size in (6, 3, 5, 1, 6):
        static = model.static_inputs(size)
        a, b = rows(size, device), rows(size, device)
        static["a"].copy_(a)
        close(model(static["a"], b), a - 2 * b)
        close(model(a=a, b=b), a - 2 * b)
    assert model.graph_stats.replays >= 8


def test_swapped_static_inputs_are_swapped_and_not_mixed_up(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    a, b = rows(4, device), rows(4, device)
    static["a"].copy_(a)
    static["b"].copy_(b)
    close(model(static["b"], static["a"]), b - 2 * a)


def test_one_static_input_passed_twice_is_read_twice(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    a = rows(4, device)
    static["a"].copy_(a)
    close(model(static["a"], static["a"]), -a)


def test_rows_of_a_static_input_in_another_order_are_read_right(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(6)
    a = rows(6, device)
    static["a"].copy_(a)
    b = rows(4, device)
    close(model(static["a"][2:], b), a[2:] - 2 * b)
    static["a"].copy_(a)
    close(model(static["a"][1:5], static["a"][2:6]), a[1:5] - 2 * a[2:6])


def test_static_inputs_of_a_call_by_keywords_have_the_same_names(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    for _ in range(3):
        model(b=rows(4, device), a=rows(4, device))
    assert set(model.static_inputs(4)) == {"a", "b"}


def test_padding_rows_of_static_inputs_written_by_the_caller_are_reset(device):
    class Spread(nn.Module):
        """A mixer, so that padding rows show."""

        def forward(self, x):
            return x + x.sum(0)

    model = sg.wrap(Spread().eval(), capture_sizes=[4], progress=False)
    model.capture_graphs(rows(4, device))
    model.static_inputs(4)["x"].fill_(7.0)
    x = rows(2, device)
    close(model(x), x + x.sum(0))


def test_static_inputs_before_any_capture_say_what_to_call(device):
    with pytest.raises(sg.ReplayError, match="capture_graphs"):
        two_inputs(device).static_inputs()


def test_static_inputs_above_every_size_are_refused(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    with pytest.raises(sg.CaptureSizeError, match="7"):
        model.static_inputs(7)


def test_static_inputs_survive_a_recapture(device):
    model = wrapped_mlp(device)
    model.capture_graphs(rows(4, device))
    static = model.static_inputs(4)["x"]
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))
    for _ in range(4):
        x = rows(4, device)
        static.copy_(x)
        close(model(static), sg.unwrap(model)(x))


def test_a_wrapper_is_collected_with_its_graphs(device):
    model = wrapped_mlp(device)
    for _ in range(3):
        model(rows(4, device))
    gone = weakref.ref(model._graph_runner)
    del model
    gc.collect()
    assert gone() is None


def test_counters_of_reasons_add_up_to_the_calls(device):
    model = wrapped_mlp(device)
    calls = collections.Counter()
    for size in (4, 4, 4, 9, 0, 3, 2, 3):
        model(rows(size, device))
        calls["all"] += 1
    assert model.graph_stats.replays + sum(reasons(model).values()) == calls["all"]


# Other things that run or transform modules.


def test_vmap_and_forward_mode_derivatives_see_through_the_wrapper(device):
    model = wrapped_mlp(device).requires_grad_(False)
    plain = sg.unwrap(model)
    x, tangent = rows(4, device), rows(4, device)
    batch = torch.randn(3, 4, WIDTH, device=device)
    for _ in range(3):
        model(x)
        close(torch.vmap(model)(batch), torch.vmap(plain)(batch))
    with torch.enable_grad():
        for actual, expected in zip(
            torch.func.jvp(model, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)), strict=True
        ):
            close(actual, expected)
        close(torch.func.grad(lambda z: model(z).sum())(x), torch.func.grad(lambda z: plain(z).sum())(x))
    assert reasons(model)["transformed"] >= 4
    model(x)
    assert model.graph_stats.replays >= 1


def test_dual_numbers_keep_their_tangents(device):
    model = wrapped_mlp(device).requires_grad_(False)
    plain = sg.unwrap(model)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        actual = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
        expected = torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent
    close(actual, expected)
    assert model.graph_stats.replays == 2


@pytest.mark.parametrize("captured", [True, False])
def test_a_trace_of_a_wrapper_is_a_trace_of_the_module(device, captured):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    if captured:
        for _ in range(3):
            model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch deprecate it
        traced = torch.jit.trace(model, (x,), check_trace=False)
    y = rows(4, device)
    close(traced(y), sg.unwrap(model)(y))


@pytest.mark.parametrize("captured", [True, False])
def test_a_compiled_parent_of_a_wrapper_is_right(device, captured):
    inner = sg.wrap(Attention().to(device).eval(), capture_sizes=[4])
    parent = Outer(inner).to(device).eval()
    x = rows(4, device)
    expected = parent.head(torch.tanh(inner.proj(x)))
    if captured:
        for _ in range(3):
            inner(x)
    torch.compiler.reset()
    compiled = torch.compile(parent, backend="eager", fullgraph=True)
    for _ in range(3):
        close(compiled(x), expected)


def test_a_compiled_module_can_be_wrapped(device):
    module = Mlp().to(device).eval()
    torch.compiler.reset()
    model = sg.wrap(torch.compile(module, backend="eager"), capture_sizes=[4])
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.replays == 3


def test_a_recurrent_module_and_an_encoder_layer_are_as_in_eager(device):
    modules = [nn.LSTM(WIDTH, 5, batch_first=True), nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)]
    for module in modules:
        module = module.to(device).eval()
        model = sg.wrap(module, capture_sizes=[4, 6])
        for size in (4, 4, 4, 3, 6, 6, 6, 5, 3):
            x = torch.randn(size, 7, WIDTH, device=device)
            torch.testing.assert_close(model(x), module(x), rtol=1e-2, atol=1e-2)  # recurrent kernels use TF32
        assert model.graph_stats.replays >= 4


def test_the_first_capture_does_not_pay_for_importing_dynamo():
    program = (
        "import sys, torch, simplegraph as sg\n"
        "model = sg.wrap(torch.nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False)\n"
        "with torch.no_grad():\n"
        "    model.capture_graphs(torch.randn(2, 4))\n"
        "print(model.graph_stats.captures, 'torch._dynamo' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "False"]


def test_dynamo_does_not_trace_the_library_around_a_compiled_part_with_a_graph_break(device):
    def part(x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    class Module(nn.Module):
        def forward(self, x):
            return compiled(x)

    torch.compiler.reset()
    compiled = torch.compile(part, backend="eager")
    torch._dynamo.utils.counters.clear()
    x = torch.randn(4, 3, device=device)
    model = sg.wrap(Module().eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        model.capture_graphs(x)
        torch.testing.assert_close(model(x), x * 2 + 1)
    assert model.graph_stats.replays == 1
    assert torch._dynamo.utils.counters["frames"]["total"] <= 2  # the part and what follows its break
