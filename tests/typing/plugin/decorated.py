"""A decorated class has the wrapper's methods and its own; `E:` marks what mypy must refuse."""

import torch
from torch import nn
from typing_extensions import assert_type

import simplegraph as sg


@sg.cuda_graph
class Net(nn.Module):
    """A model with a method of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def extra(self) -> str:
        """Return something that is no tensor."""
        return "extra"


@sg.cuda_graph(capture_sizes=[1, 2])
class Sized(nn.Module): ...


class Child(Net): ...


assert_type(Net(4).graph_report().to_json(), str)
extra: str = Net(4).extra()
assert_type(Child(4).capture_graphs(torch.ones(2, 4)), sg.CaptureSummary)
assert_type(Sized().graph_stats.replays, int)
print(Net(4).graph_report(True))  # E: Too many positional arguments for "graph_report"
Net("4")  # E: Argument 1 to "Net" has incompatible type "str"
