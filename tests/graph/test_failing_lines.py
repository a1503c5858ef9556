"""The line that failed, what it asked for, and whose code it is, are found in a traceback."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.failures import called_lines, capture_error, dynamic_shape, is_printing

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WIDTH = 6
READ = "CUDA error: operation not permitted when stream is capturing"
LIBRARY = """
import torch
from torch import nn

class Router(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) if x.sum().item() < 1e9 else x

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router, self.mlp = Router(width), nn.Linear(width, width)

    def forward(self, x):
        return self.mlp(self.router(x))

class Routed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.decoder = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.decoder(x)

class Checked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.decoder = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("not a number")
        return self.decoder(self.norm(x))

class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("not a number")
        for layer in self.layers:
            x = layer(x)
        return x

class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        raise NotImplementedError("call decode")

    def decode(self, x):
        return self.linear(x) if x.sum().item() < 1e9 else x

class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.encoder, self.crf = nn.Sequential(nn.Linear(width, width), nn.ReLU()), Decoder(width)

    def forward(self, x):
        return self.crf.decode(self.encoder(x))

class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.taggers, self.last = nn.ModuleList(Tagger(width) for _ in range(2)), nn.Linear(width, width)

    def forward(self, x):
        for tagger in self.taggers:
            x = tagger(x)
        return self.last(x)

def scaled(x):
    return x / x.max().item()
"""


def error_of(run: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    return caught.value


X, MASK, INDEX = torch.ones(3), torch.ones(4, dtype=torch.bool), torch.tensor([7])


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", MASK)

    def select(self) -> Tensor:
        return X[self.mask]


def assign() -> None:
    X[MASK] = torch.ones(2)


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda: X[MASK], "a boolean mask"),
        (lambda: X[MASK & MASK], "a boolean mask"),
        (lambda: X[~MASK], "a boolean mask"),
        (lambda: X[MASK != 2], "a boolean mask"),
        (lambda: X[None, MASK], "a boolean mask"),
        (lambda: X[MASK.isfinite()], "a boolean mask"),
        (Holder().select, "a boolean mask"),
        (assign, "a boolean mask"),
        (lambda: torch.masked_select(X, MASK), "masked_select"),
        (lambda: X[INDEX], None),
        (lambda: X[3], None),
        (lambda: X.view(2, 2), None),
    ],
)
def test_operations_whose_shape_depends_on_values_are_found_in_the_failing_line(run: Any, found: str | None) -> None:
    assert dynamic_shape(called_lines(error_of(run))) == found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have no columns")
def test_only_the_expression_that_failed_counts() -> None:
    assert dynamic_shape(called_lines(error_of(lambda: X[X > 0].view(2, 2)))) is None


@pytest.mark.parametrize("show", [print, str, repr, "{}".format, lambda x: f"{x}"])
def test_text_made_of_a_tensor_is_recognised(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._tensor_str.PRINT_OPTS, "threshold", "none")
    assert is_printing(called_lines(error_of(lambda: show(X))))
    assert not is_printing(called_lines(error_of(lambda: X.view(2, 2))))


def test_a_message_of_cudas_on_a_line_with_a_mask_speaks_of_the_mask() -> None:
    def fails() -> None:
        X[MASK]

    error = RuntimeError(READ).with_traceback(error_of(fails).__traceback__)
    message = str(capture_error(error, "batch size 8"))
    assert "test_failing_lines.py" in message
    assert "`X[MASK]`" in message
    assert "a boolean mask gives as many elements as the values say" in message
    assert f"(RuntimeError: {READ})" in message
    assert "torch.where(mask, x, 0)" in message
    assert "@simplegraph.eager_break" in message


def raising(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("how", ["from", "while handling"])
def test_a_chained_error_is_followed_to_what_broke_the_capture(how: str) -> None:
    def forward() -> None:
        try:
            raising(RuntimeError(READ))
        except RuntimeError as error:
            if how == "from":
                raise ValueError("no statistics") from error
            raise ValueError("no statistics")  # noqa: B904

    message = str(capture_error(error_of(forward), "batch size 8"))
    assert "`raise error`" in message
    assert "read back" in message
    assert "torch.where" in message


def test_an_unknown_cause_is_named_beside_the_error_that_it_became() -> None:
    def forward() -> None:
        try:
            json.loads("{")
        except ValueError as error:
            raise LookupError("no settings") from error

    caught = capture_error(error_of(forward), "batch size 8")
    assert caught.cause is not None
    assert caught.cause.startswith("LookupError: no settings (caused by JSONDecodeError: Expecting property name")
    assert caught.location is not None
    assert 'json.loads("{")' in caught.location


def test_an_error_whose_context_is_suppressed_is_not_followed() -> None:
    def forward() -> None:
        try:
            raising(RuntimeError(READ))
        except RuntimeError:
            raise ValueError("no statistics") from None

    assert capture_error(error_of(forward), "batch size 8").cause == "ValueError: no statistics"


# Code that users cannot decorate.


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package as pip installs it, with forwards that read values back."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "routing_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("routing_library")
    del sys.modules["routing_library"]


class Mine(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def replays(model: nn.Module, device: torch.device, **settings: Any) -> Any:
    """The wrapped model, called with rows that must give what eager gives."""
    wrapped: Any = sg.wrap(model, capture_sizes=[4], progress=False, **settings)
    x = torch.randn(4, WIDTH, device=device)
    expected = model(x)
    for _ in range(4):
        torch.testing.assert_close(wrapped(x), expected)
    return wrapped


PARTS = "give graphs to the parts that can have them: simplegraph.wrap_parts(model, inputs)"


def failure(model: nn.Module, device: torch.device) -> str:
    wrapped: Any = sg.wrap(model, capture_sizes=[4], progress=False)
    return str(wrapped.capture_graphs(torch.randn(4, WIDTH, device=device)).failed["batch size 4"])


def test_a_librarys_part_that_fails_is_named_with_what_breaks_there(library: Any, device: torch.device) -> None:
    model = library.Routed(WIDTH).to(device).eval()
    message = failure(model, device)
    assert "failed at routing_library.py:11 `return self.linear(x) if x.sum().item() < 1e9 else x`" in message
    assert "simplegraph.break_at(model, \"layers.*.router\") and mode='PIECEWISE'" in message
    assert f"; or {PARTS}." in message
    assert "mark the function" not in message
    sg.break_at(model, "layers.*.router")
    assert replays(model, device, mode="PIECEWISE").graph_stats.replays > 0


def test_the_line_that_called_a_library_is_named_too(library: Any, device: torch.device) -> None:
    message = failure(Mine(library.Routed(WIDTH)).to(device).eval(), device)
    assert "failed at routing_library.py:11 `" in message
    assert "test_failing_lines.py" in message
    assert "called at" in message
    assert "`return self.head(self.backbone(x))`" in message
    assert 'break_at(model, "backbone.layers.*.router")' in message
    assert f"; or {PARTS}." in message


def test_a_library_whose_own_forward_fails_can_be_wrapped_in_parts(library: Any, device: torch.device) -> None:
    model = library.Checked(WIDTH).to(device).eval()
    message = failure(model, device)
    assert "break_at" not in message
    assert f"The code is a library's; {PARTS}." in message
    model.decoder = nn.Sequential(model.decoder, nn.ReLU()).eval()  # a single layer is not worth a graph
    graphs = sg.wrap_parts(model, torch.randn(4, WIDTH, device=device), min_operators=1)
    assert "decoder" in graphs.parts


def test_layers_in_a_list_are_wrapped_each(library: Any, device: torch.device) -> None:
    message = failure(library.Stack(WIDTH).to(device).eval(), device)
    assert f"{PARTS}." in message
    model = library.Stack(WIDTH).to(device)
    model.layers = nn.ModuleList(nn.Sequential(layer, nn.ReLU()) for layer in model.layers)
    graphs = sg.wrap_parts(model.eval(), torch.randn(4, WIDTH, device=device), min_operators=1)
    assert list(graphs.parts) == ["layers.0", "layers.1"]


def test_a_part_of_a_sequence_is_named_by_its_index(library: Any, device: torch.device) -> None:
    model = nn.Sequential(library.Router(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device).eval()
    message = failure(model, device)
    assert 'simplegraph.break_at(model, "0")' in message
    assert f"; or {PARTS}." in message
    assert sg.break_at(model, "0") == ["0"]
    assert replays(model, device, mode="PIECEWISE").graph_stats.replays > 0


class Trainer:
    def __init__(self, net: nn.Module) -> None:
        self.net = net


def test_a_library_module_that_a_functions_object_holds_is_named_as_the_function_has_it(
    library: Any, device: torch.device
) -> None:
    w = Trainer(library.Routed(WIDTH).to(device).eval())

    def doubled(x: Tensor) -> Tensor:
        return w.net(x) * 2

    x = torch.randn(4, WIDTH, device=device)
    served = sg.wrap(doubled, capture_sizes=[4], progress=False)
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(served(x), doubled(x))
        message = str(served.capture_graphs(x).failed["batch size 4"])
    assert "simplegraph.break_at(w.net, \"layers.*.router\") and mode='PIECEWISE'" in message
    assert "simplegraph.wrap_parts(w.net, inputs)" in message
    sg.break_at(w.net, "layers.*.router")
    again = sg.wrap(doubled, capture_sizes=[4], progress=False, mode="PIECEWISE")
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(again(x), doubled(x))
    assert again.graph_stats.replays > 0


def test_a_library_module_whose_own_forward_fails_in_a_function_is_called_in_a_break(
    library: Any, device: torch.device
) -> None:
    w = Trainer(library.Router(WIDTH).to(device).eval())

    def doubled(x: Tensor) -> Tensor:
        return w.net(x) * 2

    x = torch.randn(4, WIDTH, device=device)
    with torch.inference_mode():
        failed = sg.wrap(doubled, capture_sizes=[4], progress=False).capture_graphs(x).failed
    advised = "call w.net in a function of your own, marked @simplegraph.eager_break, and set mode='PIECEWISE'"
    assert advised in str(failed["batch size 4"])

    @sg.eager_break
    def routed(x: Tensor) -> Tensor:
        routes: Tensor = w.net(x)
        return routes

    again = sg.wrap(lambda x: routed(x) * 2, capture_sizes=[4], progress=False, mode="PIECEWISE")
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(again(x), doubled(x))
    assert again.graph_stats.replays > 0


def test_a_method_that_no_call_leads_to_is_broken_with_the_part_that_calls_it(
    library: Any, device: torch.device
) -> None:
    """`break_at` breaks at calls of modules, and `crf.decode` is none."""
    model = library.Reader(WIDTH).to(device).eval()
    message = failure(model, device)
    assert "simplegraph.break_at(model, \"taggers.*\") and mode='PIECEWISE'" in message
    sg.break_at(model, "taggers.*")
    assert replays(model, device, mode="PIECEWISE").graph_stats.replays > 0


def test_a_method_of_a_part_that_only_the_whole_calls_is_said_to_be_out_of_reach(
    library: Any, device: torch.device
) -> None:
    model = library.Tagger(WIDTH).to(device).eval()
    message = failure(model, device)
    assert "break_at(" not in message
    assert "The code is a library's, and crf.decode is no call of a module, at which simplegraph.break_at" in message
    assert f"; {PARTS}." in message
    graphs = sg.wrap_parts(model, torch.randn(4, WIDTH, device=device), min_operators=1)
    assert list(graphs.parts) == ["encoder"]


def test_a_method_of_a_library_that_the_users_own_code_calls_is_called_in_a_break(
    library: Any, device: torch.device
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.crf = nn.Linear(WIDTH, WIDTH), library.Decoder(WIDTH)
            self.decode = self.crf.decode

        def forward(self, x: Tensor) -> Tensor:
            decoded: Tensor = self.decode(self.encoder(x)) * 2
            return decoded

    model = Own().to(device).eval()
    advised = "call it in a function of your own, marked @simplegraph.eager_break, and set mode='PIECEWISE'."
    assert advised in failure(model, device)
    model.decode = sg.eager_break(lambda x: model.crf.decode(x))
    assert replays(model, device, mode="PIECEWISE").graph_stats.replays > 0


@pytest.mark.parametrize("how", ["step", "training"])
def test_a_librarys_part_that_fails_in_training_is_told_to_get_graphs_for_parts(
    library: Any, how: str, device: torch.device
) -> None:
    def train(how: str) -> tuple[Tensor, Any]:
        torch.manual_seed(0)
        model: Any = library.Routed(WIDTH).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        served = called = sg.wrap(model, training=True, progress=False) if how == "training" else model
        if how == "parts":
            served = model.decoder = sg.wrap(model.decoder, training=True, progress=False)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run: Any = step
        if how == "step":
            run = served = sg.train_step(step, optimizers=optimizer, progress=False)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(7):
                loss = run(torch.randn(4, WIDTH, device=device))
        return loss.detach(), served

    (message,) = train(how)[1].graph_stats.failures.values()
    assert "give graphs to the parts that can have them: simplegraph.wrap(part, training=True) in its place." in message
    assert not any(word in message for word in ("eager_break", "break_at", "PIECEWISE", "wrap_parts"))
    loss, served = train("parts")
    torch.testing.assert_close(loss, train("eager")[0])
    assert served.graph_stats.replays > 0


def test_memory_that_ran_out_in_a_library_is_no_reason_to_break_there(library: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = library.Routed(WIDTH).eval()
    code = library.Router.forward.__code__
    library.Router.forward.__code__ = forward.__code__.replace(co_filename=code.co_filename)
    try:
        message = str(capture_error(error_of(lambda: model(torch.ones(4, WIDTH))), "batch size 8"))
    finally:
        library.Router.forward.__code__ = code
    assert message.endswith("Capture fewer or smaller sizes (capture_sizes), or free memory first.")


def test_a_break_of_the_capture_that_shows_later_blames_no_part(device: torch.device) -> None:
    def forward() -> None:
        nn.Linear(2, 3)(torch.ones(4))

    later = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    message = str(capture_error(later.with_traceback(error_of(forward).__traceback__), "batch size 8"))
    assert "something before it was refused, and the error swallowed" in message
    assert "break_at" not in message


def test_a_librarys_function_is_called_in_one_of_the_users_own(library: Any, device: torch.device) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return library.scaled(x) * 2

    message = failure(Scaled().to(device).eval(), device)
    assert "call it in a function of your own, marked @simplegraph.eager_break, and set mode='PIECEWISE'." in message
