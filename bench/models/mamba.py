"""Mamba2 layers as hybrid models have them (Bamba): projections and a gated norm around a recurrence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simplegraph.attention import Mamba2Shape, Mamba2Weights
from simplegraph.fused.torch_operators import Operators

if TYPE_CHECKING:
    from transformers import BambaConfig

    from bench.models.llama import LlamaStep


_TORCH = Operators()


class Mamba2(nn.Module):
    """One layer's recurrence; its states are the step's. Weights carry the names of Hugging Face checkpoints.

    Ranks that share a model have all of it each, and compute the same.
    """

    def __init__(self, config: BambaConfig, index: int) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act is {config.hidden_act!r}; this Mamba2 knows 'silu'.")
        self.index, self.shape = index, mamba2_shape(config)
        heads, channels, inner = self.shape.num_heads, self.shape.channels, self.shape.num_heads * self.shape.head_dim
        self.in_proj = nn.Linear(config.hidden_size, inner + channels + heads, bias=config.mamba_proj_bias)
        width, bias = self.shape.conv_width, config.mamba_conv_bias
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=bias)  # holds weights; never called
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(heads)) for _ in range(3))
        self.norm = GatedNorm(inner, self.shape.num_groups, config.rms_norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.mamba_proj_bias)

    def forward(self, hidden: Tensor, step: LlamaStep, operators: Operators = _TORCH) -> Tensor:
        if not hasattr(step, "recur"):
            raise ValueError(
                f"layer {self.index} is recurrent; {type(step).__name__} has no states. Serve this model with "
                "bench.engine."
            )
        inner = self.out_proj.in_features
        sizes = (inner, self.shape.channels, self.shape.num_heads)
        gate, xbc, dt = self.in_proj(hidden).split(sizes, dim=-1)
        # Allocated outside the operator, as attention's output is; padding rows stay zero.
        out = hidden.new_zeros(hidden.shape[0], inner)
        step.recur(self, xbc, dt, out)
        return self.out_proj(self.norm(out, gate, operators))

    @property
    def weights(self) -> Mamba2Weights:
        """Return the recurrence's weights."""
        return Mamba2Weights(self.conv1d.weight[:, 0], self.conv1d.bias, self.A_log, self.D, self.dt_bias)

    def reset_rates(self) -> None:
        """Give heads the rates that training begins with: from states that last for a thousand tokens to a few."""
        heads = torch.arange(1, self.shape.num_heads + 1, device=self.A_log.device)
        self.A_log.copy_(heads.float().log())
        steps = torch.logspace(math.log10(1e-3), math.log10(1e-1), len(heads), device=self.A_log.device)
        self.dt_bias.copy_(steps.expm1().log())  # softplus gives the steps again
        self.D.fill_(1.0)


class GatedNorm(nn.Module):
    """RMSNorm of each group's columns, of values times SiLU of a gate."""

    def __init__(self, size: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.num_groups, self.eps = num_groups, eps

    def forward(self, hidden: Tensor, gate: Tensor, operators: Operators) -> Tensor:
        return operators.gated_rms_norm(hidden, gate, self.weight, self.eps, self.num_groups)


def mamba2_shape(config: BambaConfig) -> Mamba2Shape:
    """Read the shape of the recurrence from a config."""
    limit = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return Mamba2Shape(
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        (float(limit[0]), float(limit[1])),
    )
