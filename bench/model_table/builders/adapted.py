"""Models with adapters of peft, and sentence encoders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models

from bench.model_table.builders.decoders import ENDS, WIDE
from bench.model_table.builders.model import Call, TableModel, prompts, resized
from bench.model_table.builders.vision import PATCHES, images

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
LLAMA = resized(tiny_models.DECODERS["llama"], WIDE | ENDS)


def _llama(adapter: Callable[[], Any], *, merge: bool = False) -> TableModel:
    """Return a Llama with an adapter whose weights are random, merged into its own or beside them."""

    def build(tiny: bool) -> Any:
        import peft

        model = peft.get_peft_model(LLAMA(tiny), adapter())
        return model.merge_and_unload() if merge else model

    return TableModel(build, _without_a_cache)


def _without_a_cache(tiny: bool, lengths: list[int], seed: int) -> Call:
    return (), prompts(tiny, lengths, seed)[1] | {"use_cache": False}


def _lora(**more: Any) -> Any:
    import peft

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | more
    return peft.LoraConfig(**settings)


def _ia3() -> Any:
    import peft

    return peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )


def _prefix() -> Any:
    import peft

    return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def _vit(tiny: bool) -> Any:
    import peft
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(**(PATCHES if tiny else {})))
    linear = [name for name, module in model.named_modules() if name.endswith(("query", "value", "q_proj", "v_proj"))]
    return peft.get_peft_model(model, _lora(target_modules=linear))


def _sentences(kind: str = "Bert", *, cross: bool = False, **real: Any) -> TableModel:
    """Return a sentence encoder, or one of pairs, with random weights and a vocabulary of letters."""

    def build(tiny: bool) -> Any:
        import sentence_transformers
        import transformers

        head = "ForSequenceClassification" if cross else "Model"
        classes = {"num_labels": 1} if cross else {}
        config = getattr(transformers, f"{kind}Config")(**((tiny_models.BERT if tiny else real) | classes))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
            transformers.BertTokenizer(str(Path(folder, "vocab.txt"))).save_pretrained(folder)
            getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
            library = sentence_transformers.CrossEncoder if cross else sentence_transformers.SentenceTransformer
            return library(folder)

    return TableModel(build, _pairs if cross else _texts, part="model" if cross else "")


def _pairs(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make pairs of sentences."""
    (texts,), _ = _texts(tiny, lengths, seed)
    return ([(text, texts[0]) for text in texts],), {}


def _texts(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make sentences of as many words."""
    words = ["ab", "cad", "e", "fig", "hi", "jam", "k"]
    return ([" ".join(words[(seed + at) % 7] for at in range(length)) for length in lengths],), {}


MODELS = {
    "peft_lora_llama": _llama(_lora),
    "peft_lora_merged": _llama(_lora, merge=True),
    "peft_dora": _llama(lambda: _lora(use_dora=True)),
    "peft_ia3": _llama(_ia3),
    "peft_prefix_tuning": _llama(_prefix),
    "peft_lora_vit": TableModel(_vit, images),
    "sentence_transformers_minilm": _sentences(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    ),
    "sentence_transformers_mpnet": _sentences("MPNet"),
    "sentence_transformers_e5": _sentences(),
    "sentence_transformers_crossencoder": _sentences(cross=True),
}
