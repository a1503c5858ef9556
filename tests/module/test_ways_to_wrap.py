"""The three ways to give a module graphs: a mixin, a decorator, a wrapper around an instance."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph import ConfigError
from tests.module.answers import close, reasons
from tests.module.models import SIZES, WIDTH, Counting, DecoratedMlp, MixinMlp, Mlp, rows

pytestmark = pytest.mark.usefixtures("no_grad")


class OldStyle(nn.Module):
    def __init__(self, scale=3.0):
        super(OldStyle, self).__init__()  # noqa: UP008 (the old style is what is tested)
        self.scale = scale

    def forward(self, x):
        return x * self.scale


OldStyle = sg.cuda_graph(OldStyle)


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
    assert stats.replays >= 8
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
    with pytest.raises(sg.ConfigError, match=r"capture_sizes is \[\]; expected a list of whole numbers"):

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

    @sg.cuda_graph(max_signatures=3)
    class Grandchild(Child):
        pass

    assert Grandchild.cuda_graph_config.capture_sizes == (2, 4, 7)
    assert DecoratedMlp.cuda_graph_config.max_signatures == 16
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
    first = sg.wrap(module, capture_sizes=[4])
    second = sg.wrap(first, max_signatures=3)
    assert type(second) is type(first)
    assert sg.unwrap(second).up is module.up
    assert not isinstance(sg.unwrap(second), sg.CudaGraphWrapper)
    x = rows(4, device)
    for _ in range(4):
        close(second(x), module(x))
    assert reasons(second) == {"first_call": 1}
    assert [graph.size for graph in second.graph_stats.graphs.values()] == [4]


def test_a_config_given_to_wrap_yields_to_keywords(device):
    config = sg.CudaGraphConfig(capture_sizes=[2, 4])
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


@pytest.mark.parametrize("use", ["wrap", "break_at"])
def test_a_class_that_no_module_has_any_more_is_freed(use):
    """A notebook, or a factory of classes, defines a class again and again."""

    def used():
        class Local(nn.Module):
            def forward(self, x):
                return x * 2

        module = Local().eval()
        if use == "wrap":
            assert type(sg.wrap(module)) is type(sg.wrap(Local().eval()))
        else:
            sg.break_at(nn.Sequential(module), "0")
        return weakref.ref(Local)

    kind = used()
    gc.collect()
    assert kind() is None


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


LAZY = {
    "linear": (lambda: nn.LazyLinear(4), (2, 3)),
    "conv": (lambda: nn.LazyConv1d(4, 3), (2, 3, 8)),
    "batch norm": (lambda: nn.LazyBatchNorm1d(), (2, 3)),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_that_is_not_initialised_can_be_wrapped(device: torch.device, name: str) -> None:
    make, shape = LAZY[name]
    model = sg.wrap(make().to(device).eval(), capture_sizes=[2], progress=False)
    eager = type(model).cls_to_become
    for _ in range(5):
        x = torch.randn(shape, device=device)
        with torch.no_grad():
            torch.testing.assert_close(model(x), eager.forward(model, x))
    assert model.graph_stats.replays >= 2
    assert not model.has_uninitialized_params()


@pytest.mark.parametrize("setting", ["batch_dims", "pad_values"])
def test_a_name_that_the_forward_does_not_take_is_refused_by_wrap(setting: str) -> None:
    """Later, the error would come out of the first call, far from the line with the mistake."""
    with pytest.raises(ConfigError, match=rf"{setting} names 'positons.0' \(did you mean positions\?\)"):
        sg.wrap(Positioned(), **{setting: {"positons.0": 0}})
    with pytest.raises(ConfigError, match=rf"{setting} names 'scale', but forward takes x\."):
        sg.wrap(lambda x: x * 2, **{setting: {"scale": 0}})


class Positioned(nn.Module):
    def forward(self, x, positions):
        return x + positions
