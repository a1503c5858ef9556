"""A callback of the `Trainer` of transformers: the base model's forward and backward are replays while it trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import simplegraph as sg


# Recipe
class GraphCallback(TrainerCallback):
    """Gives the base model graphs, for training and evaluation. A model with a cache needs `use_cache=False`."""

    def on_train_begin(self, *args: Any, model: PreTrainedModel, **others: Any) -> None:
        self.plain = model.base_model  # on its device by now
        self.graphed = sg.wrap(self.plain, training=True)
        setattr(model, model.base_model_prefix, self.graphed)

    def on_train_end(self, *args: Any, model: PreTrainedModel, **others: Any) -> None:
        setattr(model, model.base_model_prefix, self.plain)


# Comparison
def trained(*callbacks: TrainerCallback) -> PreTrainedModel:
    """Train from the same seed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(num_attention_heads=4, **sizes))
    mask = torch.ones(16, dtype=torch.long)
    data = [{"input_ids": torch.randint(99, (16,)), "attention_mask": mask, "labels": at % 2} for at in range(80)]
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(folder, num_train_epochs=3, eval_strategy="epoch", seed=0, **quiet)
        Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks)).train()
    return model


def main() -> dict[str, Callable[[], object]]:
    """Compare what was trained, and return a forward and backward of each model, to be timed."""
    callback = GraphCallback()
    plain, graphed = trained(), trained(callback)
    torch.testing.assert_close(graphed.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)
    assert graphed.base_model is callback.plain, "the callback leaves the model as it was"
    print(callback.graphed.graph_report())
    assert callback.graphed.graph_stats.replays > 50
    ids = torch.randint(99, (8, 16), device=plain.device)
    models = {"plain": plain.base_model, "graphs": sg.wrap(graphed.base_model, training=True)}
    return {kind: lambda model=model: model(ids).pooler_output.sum().backward() for kind, model in models.items()}


if __name__ == "__main__":
    main()
