"""Small convolution models whose norms have statistics that matter."""

from __future__ import annotations

import torch
from torch import nn

SHAPE = (2, 3, 8, 8)


def settle(module):
    """Give norms statistics and weights that are not their defaults, and return the module for inference."""
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm):
            if each.running_mean is not None:
                each.running_mean.normal_(0, 0.5)
                each.running_var.uniform_(0.5, 2)
            if each.weight is not None:
                nn.init.uniform_(each.weight, 0.5, 1.5)
                nn.init.normal_(each.bias)
    return module.eval()


def new_state(module):
    return {
        name: value if value.dtype is torch.int64 else torch.rand_like(value) + 0.5
        for name, value in module.state_dict().items()
    }


def stack(conv_bias=True, affine=True):
    """Every layer is known: neighbours in a Sequential."""
    return settle(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=conv_bias),
            nn.BatchNorm2d(8, affine=affine),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False, padding_mode="circular"),
            nn.BatchNorm2d(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
            nn.BatchNorm1d(5),
        )
    )


class Block(nn.Module):
    """A residual block of an unknown class: its pairs are seen only by running it."""

    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.other = nn.BatchNorm2d(width)

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        return self.other(self.second(y)) + x


class Net(nn.Module):
    """Has a pair of its own, blocks, and a head."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
