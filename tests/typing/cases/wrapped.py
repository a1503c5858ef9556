"""`wrap` returns a wrapper of the same type as its module; `E:` marks what mypy must refuse."""

import torch
from torch import nn
from typing_extensions import assert_type

import simplegraph as sg


class Decoder(nn.Module):
    """A model with an attribute and a method of its own."""

    width: int = 4

    def greet(self) -> str:
        """Return something that is no tensor."""
        return "hello"


def takes_a_decoder(decoder: Decoder) -> None: ...
def takes_a_wrapper(wrapper: sg.CudaGraphWrapper) -> None: ...


model = sg.wrap(Decoder(), capture_sizes=[1, 2])
assert_type(model.capture_graphs(torch.ones(2, 4)), sg.CaptureSummary)
assert_type(model.capture_next(torch.ones(2, 4)), sg.CaptureSummary)
assert_type(model.graph_stats.replays, int)
assert_type(model.graph_report().to_json(), str)
assert_type(model.static_inputs(2), dict[str, torch.Tensor])
assert_type(model.graph_report(pointers=True).to_json(), str)
model.graph_report(True)  # E: Too many positional arguments for "graph_report"
model.reset_graphs("now")  # E: Too many arguments for "reset_graphs"

takes_a_decoder(model)
takes_a_wrapper(model)
takes_a_decoder(nn.Linear(1, 1))  # E: Argument 1 to "takes_a_decoder" has incompatible type "Linear"
decoder: Decoder = model
module: nn.Module = model.eval().to("cpu")
model.eval().capture_graphs(torch.ones(2, 4))
greeting: str = model.greet()
assert_type(sg.unwrap(model), Decoder)
assert_type(sg.unwrap(decoder), Decoder)
print(sg.unwrap(model).greeting)  # nn.Module answers any name, so that this one is not refused


class Mixed(sg.CudaGraphWrapper, Decoder): ...


assert_type(Mixed().graph_stats.replays, int)
assert_type(Mixed().greet(), str)


@sg.wrap
def double(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    """Return a multiple."""
    return x * times


assert_type(double(torch.ones(2), times=3), torch.Tensor)
assert_type(double.graph_stats.replays, int)
assert_type(double.graph_report(), sg.GraphReport)
assert_type(double.graph_stats, sg.GraphStats)
assert_type(double.capture_graphs(torch.ones(2)), sg.CaptureSummary)
assert_type(double.static_inputs(2), dict[str, torch.Tensor])
step = sg.train_step(double, optimizers=[torch.optim.SGD(model.parameters())])
assert_type(step.graph_report(), sg.GraphReport)
double.graph_rport()  # E: has no attribute "graph_rport"
double(3)  # E: Argument 1 to "__call__" of "GraphedFunction"
sg.wrap("Decoder")  # E: No overload variant of "wrap"
