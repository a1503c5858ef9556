"""Settings are known by name and type wherever they are given; `E:` marks what mypy has to refuse."""

import torch
from torch import nn
from typing_extensions import Unpack, assert_type

import simplegraph as sg

module = nn.Linear(4, 4)

model = sg.wrap(module, mode="PIECEWISE", capture_sizes=[1, 2, 4], batch_dims={"input": 0}, outputs="static")
sg.wrap(module, capture_size=[1, 2, 4])  # E: No overload variant of "wrap"
sg.wrap(module, capture_sizes=["1"])  # E: List item 0 has incompatible type "str"; expected "int"
sg.wrap(module, outputs="statc")  # E: No overload variant of "wrap"
sg.wrap(module, mode="PIECWISE")  # E: No overload variant of "wrap"

model.configure_graphs(padding=False, verify=0)
model.configure_graphs(pading=False)  # E: Unexpected keyword argument "pading"


class Mixed(sg.CudaGraphWrapper, nn.Module, capture_sizes=[1, 2]): ...


class MixedTypo(sg.CudaGraphWrapper, nn.Module, capturesizes=[1]):  # E: Unexpected keyword argument "capturesizes"
    ...


@sg.cuda_graph(capture_sizes=[1, 2], on_capture_failure="raise", num_warmups=3)
class Decorated(nn.Module): ...


@sg.cuda_graph(on_capture_failures="raise")  # E: "cuda_graph"
class DecoratedTypo(nn.Module): ...


sg.CudaGraphManager(device="cpu", capture_sizes=[1, 2], max_num_seqs=2)
manager = sg.CudaGraphManager(device="cpu", mode="OFF")


def forward(mode: sg.CudaGraphMode, batch: sg.BatchDescriptor) -> list[torch.Tensor]:
    """Run a model of an engine's."""
    return [torch.ones(batch.num_tokens)]


assert_type(manager.run(manager.dispatch(2), forward), list[torch.Tensor])
sg.CudaGraphManager(device="cpu", max_num_seq=2)  # E: Unexpected keyword argument "max_num_seq"


def own_wrapper(**settings: Unpack[sg.CudaGraphSettings]) -> torch.Tensor:
    """Settings are handed on with their types."""
    answer: torch.Tensor = sg.wrap(module, **settings)(torch.ones(2, 4))
    return answer


own_wrapper(pad_values={"input": "zero"})
own_wrapper(pad_values={"input": "zeros"})  # E: Dict entry 0 has incompatible type
