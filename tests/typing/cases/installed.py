"""A project that uses the package: type checkers find the installation with its types."""

import torch
from torch import nn
from typing_extensions import assert_type

import simplegraph as sg

model = sg.wrap(nn.Linear(4, 4), capture_sizes=[1, 2])
assert_type(model.capture_graphs(torch.ones(2, 4)), sg.CaptureSummary)
