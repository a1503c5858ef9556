"""The workloads, by name: a model, its batches, its loss and its optimizer, at a real shape or a tiny one."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK = 16  # of LoRA's two factors


class Logits(nn.Module):
    """A causal language model of transformers that returns only its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class Block(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Patches(nn.Module):
    """A vision transformer: patches, encoder layers with dropout, the mean's logits."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, stride=8)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices added."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.frozen(x) + self.up(self.down(x.float())).to(x.dtype)
        return changed


def mlp(inputs: int, width: int, outputs: int, depth: int = 2) -> nn.Module:
    """Make an MLP of the size that reinforcement learning uses."""
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def vit(tiny: bool) -> nn.Module:
    """Make timm's ViT-B/16, or a tiny vision transformer."""
    if tiny:
        return Patches(32, 2, 10)
    import timm

    model: nn.Module = timm.create_model("vit_base_patch16_224", pretrained=False)
    return model


def resnet(tiny: bool) -> nn.Module:
    """Make torchvision's ResNet-50, or a tiny residual network."""
    if tiny:
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), Block(8), *head)
    import torchvision

    model: nn.Module = torchvision.models.resnet50(weights=None)
    return model


def gpt2(tiny: bool) -> nn.Module:
    """Make GPT-2 small with its dropout, or a tiny one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
    return Logits(GPT2LMHeadModel(GPT2Config(**(shape if tiny else {}))))


def lora(tiny: bool) -> nn.Module:
    """Make a Llama of half a billion parameters in bfloat16, frozen, with peft's LoRA; tiny with one written here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 32 if tiny else 896,
        "intermediate_size": 64 if tiny else 4864,
        "num_hidden_layers": 2 if tiny else 24,
        "num_attention_heads": 4 if tiny else 14,
        "num_key_value_heads": 2,
        "vocab_size": 128 if tiny else 32000,
    }
    frozen = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().requires_grad_(False)
    if not tiny:
        from peft import LoraConfig, get_peft_model

        return Logits(get_peft_model(frozen, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])))
    for layer in frozen.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj, 4)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj, 4)
    return Logits(frozen)


def two_linears(tiny: bool) -> nn.Module:
    """Make the first model that torch tests `make_graphed_callables` with."""
    widths = (16, 8, 4) if tiny else (4096, 2048, 1024)
    pairs = [nn.Sequential(nn.Linear(into, out), nn.Dropout(0.1)) for into, out in itertools.pairwise(widths)]
    return nn.Sequential(*pairs)


def token_ids(rows: int, length: int, vocabulary: int) -> tuple[Tensor]:
    """Draw token ids, (rows, length)."""
    return (torch.randint(0, vocabulary, (rows, length)),)


Step = Callable[..., Tensor]
LEARNING_RATE = 1e-3  # large enough that a lost or repeated step shows in the next losses
POLYAK = 0.005  # how far a target network moves at each step
DISCOUNT = 0.99


@dataclasses.dataclass(frozen=True)
class Workload:
    """One kind of training.

    Args:
        build: makes the model; called with True for the tiny shape.
        batch: draws a batch on the CPU; called with the same flag and the batch's size.
        loss: of a task and a batch; calls the model as `task.call`.
        size, tiny_size: what `batch` gets: rows, or tokens of a row.
        autocast: forward and loss run under bfloat16 autocast.
        packages: needed for the real shape; those of `always` for the tiny one, too.
        target: keep a second network that follows the first.
        forward_backward: measured only to compare arms that leave the optimizer outside of their graphs.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[bool, int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    size: int
    tiny_size: int
    autocast: bool = True
    packages: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    target: bool = False
    forward_backward: bool = False

    def available(self, tiny: bool) -> bool:
        """True if the packages of this shape are installed."""
        needed = self.always if tiny else (*self.packages, *self.always)
        return all(importlib.util.find_spec(name) for name in needed)


class Task:
    """One model in training.

    Args:
        workload: what is trained.
        device: where.
        tiny: the tiny shape.
        capturable: give the optimizer the settings that a graph needs: `capturable`, a learning rate on the device.

    Attributes:
        call: what a step calls in place of the model; an arm may put a graph of it there.
        cache_casts: autocast keeps casts of weights for the rest of the forward.
    """

    def __init__(self, workload: Workload, device: torch.device, tiny: bool, capturable: bool) -> None:
        torch.manual_seed(0)
        self.workload, self.device, self.tiny = workload, device, tiny
        with device:
            self.model = workload.build(tiny).to(device).train()
        self.target = copy.deepcopy(self.model).requires_grad_(False) if workload.target else None
        self.call: Callable[..., Any] = self.model
        self.cache_casts = True
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        settings: dict[str, Any] = {"lr": LEARNING_RATE, "fused": True}
        if capturable:
            settings |= {"lr": torch.tensor(LEARNING_RATE, device=device), "capturable": device.type == "cuda"}
        self.optimizer = torch.optim.AdamW(trained, **settings)
        self._trained = trained

    def batch(self, size: int | None = None) -> tuple[Tensor, ...]:
        """Draw a batch on the task's device."""
        size = size or (self.workload.tiny_size if self.tiny else self.workload.size)
        return tuple(tensor.to(self.device) for tensor in self.workload.batch(self.tiny, size))

    def autocast(self) -> torch.autocast:
        """Make the context that forwards run in."""
        kind, on = self.device.type, self.workload.autocast
        return torch.autocast(kind, torch.bfloat16, enabled=on, cache_enabled=self.cache_casts)

    def step(self, *batch: Tensor) -> Tensor:
        """Do one step: forward, backward, clipping, the optimizer, the target network; return the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.workload.loss(self, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self.optimizer.step()
        if self.target is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.target.parameters()), list(self.model.parameters()), POLYAK)
        return loss.detach()


def _classes(task: Task, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(task.call(images), labels)


def _values(task: Task, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(task.call(x), y)


def _next_tokens(task: Task, ids: Tensor) -> Tensor:
    return F.cross_entropy(task.call(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _q_values(task: Task, seen: Tensor, action: Tensor, reward: Tensor, then: Tensor, done: Tensor) -> Tensor:
    assert task.target is not None
    with torch.no_grad():
        wanted = reward + DISCOUNT * (1 - done) * task.target(then).max(1).values
    return F.huber_loss(task.call(seen).gather(1, action[:, None])[:, 0], wanted)


def _images(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    side, classes = (32, 10) if tiny else (224, 1000)
    return torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,))


def _regression(inputs: int, outputs: int) -> Callable[[bool, int], tuple[Tensor, ...]]:
    return lambda tiny, rows: (torch.randn(rows, inputs), torch.randn(rows, outputs))


def _experience(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    done = torch.rand(rows).gt(0.9).float()
    return torch.randn(rows, 17), torch.randint(0, 6, (rows,)), torch.randn(rows), torch.randn(rows, 17), done


def _vit(size: int) -> Workload:
    return Workload(vit, _images, _classes, size, 4, packages=("timm",))


def _two_linears(autocast: bool) -> Workload:
    def batch(tiny: bool, rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, 16 if tiny else 4096), torch.randn(rows, 4 if tiny else 1024)

    return Workload(two_linears, batch, _values, 640, 8, autocast=autocast, forward_backward=True)


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload(lambda tiny: mlp(17, 256, 6), _regression(17, 6), _values, 256, 64, autocast=False),
    "vit-b 8": _vit(8),
    "vit-b 64": _vit(64),
    "gpt2": Workload(
        gpt2,
        lambda tiny, length: token_ids(4, length, 128 if tiny else 50257),
        _next_tokens,
        256,
        32,
        always=("transformers",),
    ),
    "resnet50": Workload(resnet, _images, _classes, 16, 4, packages=("torchvision",)),
    "dqn": Workload(lambda tiny: mlp(17, 256, 6), _experience, _q_values, 256, 64, autocast=False, target=True),
    "lora": Workload(
        lora,
        lambda tiny, length: token_ids(2, length, 128 if tiny else 32000),
        _next_tokens,
        256,
        32,
        packages=("peft",),
        always=("transformers",),
    ),
    "two linears": _two_linears(autocast=False),
    "two linears, autocast": _two_linears(autocast=True),
}


def available(tiny: bool) -> list[str]:
    """List the names of workloads whose packages are installed."""
    return [name for name, workload in WORKLOADS.items() if workload.available(tiny)]
