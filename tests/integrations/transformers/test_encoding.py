"""An encoder's calls through graphs, padded in two dimensions, give what its calls give without."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder  # noqa: E402
from simplegraph.integrations.transformers.encoding import eighths  # noqa: E402

HEADS = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification")
SHAPES = ((3, 10), (3, 10), (2, 17), (2, 17), (4, 32), (4, 32), (1, 5), (1, 5), (1, 5), (3, 30), (3, 9), (4, 31))


def bert(device: torch.device, head: str = "BertModel") -> Any:
    return tiny.build(lambda: getattr(transformers, head)(transformers.BertConfig(**tiny.BERT)), device)


def batch(rows: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random tokens, the last row half padded, and segments."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, (length + 1) // 2 :] = 0
    return {
        "input_ids": torch.randint(3, tiny.VOCABULARY, (rows, length), generator=generator).to(device),
        "attention_mask": mask.to(device),
        "token_type_ids": torch.randint(0, 2, (rows, length), generator=generator).to(device),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        pairs = zip(found[name], wanted, strict=True) if isinstance(wanted, tuple) else [(found[name], wanted)]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_ragged_batches_of_many_shapes(head: str, device: torch.device) -> None:
    plain, model = bert(device, head), bert(device, head)
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[2, 4]) as graphs, torch.inference_mode():
        for rows, length in SHAPES * 2:
            inputs = batch(rows, length, device)
            assert_same(model(**inputs), plain(**inputs))
        assert not graphs.stats.failures
        assert graphs.stats.captures == 4  # two sizes times two lengths
        assert graphs.stats.replays > len(SHAPES)
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.OUTPUT_SHAPE_UNKNOWN}


def test_hidden_states_and_attentions_are_cut_in_every_dimension(device: torch.device) -> None:
    plain, model = bert(device), bert(device)
    for one in (plain, model):
        one.set_attn_implementation("eager")
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]) as graphs, torch.no_grad():
        for rows, length in ((3, 10), (2, 12), (4, 20), (3, 9), (1, 16)):
            inputs = batch(rows, length, device)
            settings = {"output_hidden_states": True, "output_attentions": True}
            found, expected = model(**inputs, **settings), plain(**inputs, **settings)
            assert found.attentions[0].shape[-2:] == (length, length)
            assert_same(found, expected)
        assert not graphs.stats.failures or "torch.tensor(0.0" in "".join(graphs.stats.failures.values())


def test_without_a_mask_and_by_position(device: torch.device) -> None:
    plain, model = bert(device), bert(device)
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for rows, length in ((3, 10), (2, 12), (4, 15), (4, 16), (1, 3)):
            ids = batch(rows, length, device)["input_ids"]
            assert_same(model(ids), plain(ids))
            assert torch.equal(*(one(ids, return_dict=False)[1] for one in (plain, plain)))
        assert graphs.stats.replays >= 2


def test_a_batch_as_wide_as_the_model_is_not_cut_where_it_should_not_be(device: torch.device) -> None:
    plain, model = bert(device), bert(device)
    with graph_encoder(model, lengths=[64], capture_sizes=[2]) as graphs, torch.no_grad():
        for length in (50, 64, 60, 64):  # the hidden size is 64 too
            inputs = batch(2, length, device)
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.replays >= 2


class Counting(transformers.BertModel):
    """Counts its tokens, padding included."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        outputs.pooler_output = outputs.pooler_output + input_ids.shape[1]
        return outputs


def test_a_model_that_counts_its_tokens_is_not_padded(device: torch.device) -> None:
    plain, model = (tiny.build(lambda: Counting(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for length in (10, 12, 14):
            ids = batch(3, length, device)["input_ids"]
            assert_same(model(ids), plain(ids))
        assert graphs.stats.eager[Reason.LENGTH_PADDING] == 2
        assert graphs.stats.replays == 0


class Noisy(transformers.BertModel):
    """Counts its runs in a buffer, draws random numbers, and fails with as many tokens as `worst`."""

    worst = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        self.runs += 1
        outputs.pooler_output = outputs.pooler_output + self.runs + torch.rand((), device=input_ids.device)
        if input_ids.shape[1] == self.worst:
            raise ValueError("too many tokens")
        return outputs


@pytest.mark.parametrize("worst", [0, 16], ids=["returns", "raises"])
def test_a_padded_run_beside_a_call_leaves_no_effect(worst: int, device: torch.device) -> None:
    plain, model = (tiny.build(lambda: Noisy(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    model.worst = worst
    with graph_encoder(model, lengths=[16], capture_sizes=[3]) as graphs, torch.no_grad():
        for length in (10, 12, 14, 10, 12):
            ids = batch(3, length, device)["input_ids"]
            torch.manual_seed(length)
            found = model(ids)
            torch.manual_seed(length)
            assert_same(found, plain(ids))
            assert model.runs.item() == plain.runs.item()
        assert (graphs.stats.replays > 0) is not bool(worst)


def test_what_capture_learns_from_made_up_tokens_leaves_no_effect(device: torch.device) -> None:
    model = tiny.build(lambda: Noisy(transformers.BertConfig(**tiny.BERT)), device)
    with graph_encoder(model, lengths=[16], capture_sizes=[3]) as graphs:
        graphs.capture(inputs=["input_ids", "attention_mask"])
        assert model.runs.item() == 2  # those of `capture_graphs`, with a mask and without


@pytest.mark.parametrize("hides", [True, False])
def test_a_length_that_cannot_be_padded_gets_graphs_when_it_comes_again(hides: bool, device: torch.device) -> None:
    plain, model = (tiny.build(lambda: Counting(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for number in range(18):
            inputs = batch(4 - number % 2, (10, 12, 14)[number % 3], device)
            del inputs["token_type_ids"]
            if not hides:
                inputs["attention_mask"].fill_(1)
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.eager[Reason.LENGTH_PADDING] == 3
        assert graphs.stats.captures == 3
        assert graphs.stats.replays >= 6


def test_no_message_advises_a_setting_that_graph_encoder_does_not_have(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = bert(device, "BertForMaskedLM"), bert(device, "BertForMaskedLM")
    inputs = batch(3, 10, device)
    with graph_encoder(model, lengths=[16], capture_sizes=[2, 4]) as graphs, torch.no_grad():
        for more in ({"labels": inputs["input_ids"]}, {"tags": {1, 2}}):
            assert torch.equal(model(**inputs, **more).logits, plain(**inputs, **more).logits)
        model(**batch(5, 10, device))
        assert graphs.stats.eager[Reason.OPAQUE_ARGUMENT] == 2
        said = caplog.text + str(graphs.report())
    assert "graphs of this model do not support an argument (labels was given)" in said
    assert "(tags is a set)" in said
    assert "5 rows, the largest is 4: raise max_batch_size, or capture_sizes where given" in said
    offered = inspect.signature(graph_encoder).parameters
    settings = {field.name for field in dataclasses.fields(sg.CudaGraphConfig)} - offered.keys()
    assert {name for name in settings - {"mode", "capture", "padding"} if name in said} == set()


def test_the_longest_call_is_what_lengths_are_advised_for(device: torch.device) -> None:
    plain, model = bert(device, "BertForMaskedLM"), bert(device, "BertForMaskedLM")
    with graph_encoder(model, lengths=[16], capture_sizes=[2]) as graphs, torch.no_grad():
        for length in (30, 20, 17):
            inputs = batch(2, length, device)
            assert_same(model(**inputs), plain(**inputs))
        assert "the largest is 16: add 30 to lengths" in str(graphs.report())
    with graph_encoder(model, lengths=[16, 30], capture_sizes=[2]) as graphs, torch.no_grad():
        for length in (30, 20, 17):
            inputs = batch(2, length, device)
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.eager[Reason.LENGTH_TOO_LARGE] == 0


def test_a_report_advises_a_method_that_its_handle_has(device: torch.device) -> None:
    model, inputs = bert(device, "BertForMaskedLM"), batch(2, 16, device)
    with graph_encoder(model, lengths=[16], capture_sizes=[2]) as graphs, torch.no_grad():
        for _ in range(4):
            model(**inputs)
        assert graphs.stats.longest_stall
        said = str(graphs.report())
        assert "; capture does that before the first call" in said
        assert "capture_graphs" not in said
    with graph_encoder(model, lengths=[16], capture_sizes=[2]) as graphs, torch.no_grad():
        assert graphs.capture().captured
        for _ in range(4):
            model(**inputs)
        assert not graphs.stats.longest_stall


def test_what_graphs_cannot_serve_runs_as_it_is(device: torch.device) -> None:
    plain, model = bert(device, "BertForMaskedLM"), bert(device, "BertForMaskedLM")
    inputs = batch(3, 10, device)
    with graph_encoder(model, lengths=[16], capture_sizes=[2, 4]) as graphs:
        stats = graphs.stats
        assert_same(model(**inputs), plain(**inputs))
        assert stats.eager[Reason.GRAD] == 1
        with torch.no_grad():
            found, expected = (one(**inputs, labels=inputs["input_ids"]) for one in (model, plain))
            assert torch.equal(found.loss, expected.loss)
            assert stats.eager[Reason.OPAQUE_ARGUMENT] == 1
            for rows, length, reason in ((5, 10, Reason.BATCH_TOO_LARGE), (3, 20, Reason.LENGTH_TOO_LARGE)):
                other = batch(rows, length, device)
                assert_same(model(**other), plain(**other))
                assert stats.eager[reason] == 1
            for _ in range(4):
                model(**inputs)
            replays = stats.replays
            assert replays
            fired: list[int] = []
            handle = model.bert.encoder.layer[0].register_forward_hook(lambda *args: fired.append(1))
            assert_same(model(**inputs), plain(**inputs))
            assert (len(fired), stats.eager[Reason.HOOKS], stats.replays) == (1, 1, replays)
            handle.remove()
            model.train()
            model(**inputs)
            assert stats.eager[Reason.TRAINING] == 1
            model.eval()
            assert_same(model(**inputs), plain(**inputs))


def test_a_weight_that_was_replaced_is_noticed(device: torch.device) -> None:
    plain, model = bert(device), bert(device)
    inputs = batch(3, 10, device)
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for _ in range(4):
            model(**inputs)
        assert graphs.stats.replays
        weight = torch.randn_like(model.pooler.dense.weight)
        for one in (plain, model):
            one.pooler.dense.weight = torch.nn.Parameter(weight.clone())
        for _ in range(4):
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.recaptures == 1


def test_remove_gives_the_model_back(device: torch.device) -> None:
    model = bert(device)
    kind = type(model)
    with graph_encoder(model) as graphs, torch.no_grad():
        model(**batch(2, 10, device))
    assert type(model) is kind
    calls = sum(graphs.stats.eager.values())
    with torch.no_grad():
        model(**batch(2, 10, device))
    assert sum(graphs.stats.eager.values()) == calls


def test_lengths_are_an_eighth_apart() -> None:
    lengths = eighths(512)
    assert lengths[:3] == [16, 32, 48]
    assert lengths[-1] == 512
    assert all(after - before <= max(16, before / 8) for before, after in itertools.pairwise(lengths))
    assert eighths(10) == [10]


def test_settings_that_make_no_sense_are_refused(device: torch.device) -> None:
    with pytest.raises(sg.ConfigError, match="lengths is"):
        graph_encoder(bert(device), lengths=[])
    with pytest.raises(sg.ConfigError, match="expected a model of transformers"):
        graph_encoder(torch.nn.Linear(2, 2))


def deberta(device: torch.device) -> Any:
    settings = {"position_buckets": 8, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config = transformers.DebertaV2Config(**tiny.BERT, **settings, type_vocab_size=0, position_biased_input=False)
    return tiny.build(lambda: transformers.DebertaV2Model(config), device)


@pytest.mark.parametrize("hidden_first", [True, False])
def test_tokens_that_the_callers_mask_hides_do_not_decide_what_is_padded(
    hidden_first: bool, device: torch.device
) -> None:
    """What DeBERTa returns for them follows from the length: the order of calls may not decide if graphs serve it."""
    plain, model = deberta(device), deberta(device)
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for number, length in enumerate((10, 12, 9, 12, 10)):
            inputs = batch(4, length, device)
            del inputs["token_type_ids"]
            if number == 0 and not hidden_first:
                inputs["attention_mask"].fill_(1)
            shown = inputs["attention_mask"].bool()
            found, expected = (one(**inputs).last_hidden_state[shown] for one in (model, plain))
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert graphs.stats.replays >= 2
        assert Reason.LENGTH_PADDING not in graphs.stats.eager


def test_a_batch_of_full_lengths_runs_without_the_mask_as_in_eager(device: torch.device) -> None:
    """With one, attention takes slower kernels; a mask that hides tokens goes in, whatever came before."""
    plain, model = bert(device), bert(device)
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for number in range(12):
            inputs = batch(4, 16, device)
            if number % 3:
                inputs["attention_mask"].fill_(1)
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.captures == 2
        assert graphs.stats.replays >= 6
        full, masked = sorted(graphs.stats.graphs.values(), key=lambda graph: len(graph.inputs))
        assert "attention_mask" in str(masked.inputs)
        assert "attention_mask" not in str(full.inputs)
        assert (full.nodes or 0) < (masked.nodes or 1)


def test_a_model_that_reads_its_mask_keeps_it(device: torch.device) -> None:
    class Pooling(transformers.BertModel):
        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            outputs = super().forward(input_ids, attention_mask=attention_mask)
            if attention_mask is not None:
                outputs.pooler_output = outputs.pooler_output * attention_mask.sum()
            return outputs

    plain, model = (tiny.build(lambda: Pooling(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for _ in range(5):
            inputs = {"input_ids": batch(4, 16, device)["input_ids"]}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.replays >= 1


def test_outputs_that_are_pooled_along_the_length_are_not_cut(device: torch.device) -> None:
    sizes = {"block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64}
    config = transformers.FunnelConfig(vocab_size=tiny.VOCABULARY, **sizes)
    plain, model = (tiny.build(lambda: transformers.FunnelBaseModel(config), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for length in (10, 12, 10, 16, 16, 16):
            inputs = batch(4, length, device)
            assert_same(model(**inputs), plain(**inputs))
        # The model notes its latest length, and padding is compared again with each state.
        assert graphs.stats.eager[Reason.LENGTH_PADDING] == 1
        assert "an output of shape (4, 5, 32) has shape (4, 8, 32)" in str(graphs.report())


@pytest.mark.proofs
def test_an_output_that_grows_only_up_to_a_length_is_never_returned_padded(device: torch.device) -> None:
    class First(transformers.BertModel):
        """Returns the hidden states of the first 20 tokens."""

        def forward(self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None) -> Any:
            return super().forward(input_ids, attention_mask, token_type_ids).last_hidden_state[:, :20]

    plain, model = (tiny.build(lambda: First(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]), torch.no_grad():
        for length in (10, 12, 24, 26, 12):  # padding from 24 changes no shape
            inputs = batch(4, length, device)
            assert model(**inputs).shape == plain(**inputs).shape


def test_a_classifier_that_returns_a_cache_is_told_how_not_to(device: torch.device) -> None:
    config = transformers.GPT2Config(**(tiny.GPT2 | {"pad_token_id": 3}), num_labels=3)
    plain, model = (tiny.build(lambda: transformers.GPT2ForSequenceClassification(config), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.no_grad():
        for length in (10, 12, 16, 16, 9):
            ids = batch(4, length, device)["input_ids"].clamp(4)
            assert torch.equal(model(ids).logits, plain(ids).logits)
        assert graphs.stats.replays == 0
        assert "a DynamicCache; pass use_cache=False" in str(graphs.report())
        for length in (10, 12, 16, 16, 9, 12, 16):
            ids = batch(4, length, device)["input_ids"].clamp(4)  # padded with the model's own padding token
            assert_same(model(ids, use_cache=False), plain(ids, use_cache=False))
        assert graphs.stats.replays >= 2


def test_models_that_take_no_tokens_are_refused(device: torch.device) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    audio = transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            **sizes, conv_dim=(8,), conv_kernel=(4,), conv_stride=(2,), num_feat_extract_layers=1
        )
    )
    with pytest.raises(sg.ConfigError, match="forward takes input_values, neither input_ids nor inputs_embeds"):
        graph_encoder(audio)
    with pytest.raises(sg.ConfigError, match="forward takes pixel_values"):
        graph_encoder(transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32)))


def test_a_handle_says_what_it_is(device: torch.device) -> None:
    with graph_encoder(bert(device)) as graphs:
        assert repr(graphs) == "<GraphedEncoder of BertModel: 0 graphs, 0 replays, 0 eager calls>"


@pytest.mark.proofs
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_after_capture_forty_varied_calls_are_replays_but_for_the_proofs(attention: str, device: torch.device) -> None:
    """29 of 40 ran eagerly while graphs were still to be captured, and requests waited for captures."""
    plain, model = bert(device), bert(device)
    for one in (plain, model):
        one.set_attn_implementation(attention)
    with graph_encoder(model) as graphs, torch.inference_mode():
        summary = graphs.capture(sizes=[1, 2, 4], lengths=[16, 24, 32])
        assert graphs.stats.captures == 3 * 3 * (2 if attention == "sdpa" else 1) >= summary.captured > 0
        assert not summary.failed
        assert (graphs.stats.replays, graphs.stats.eager, graphs.stats.batch_sizes) == (0, {}, {})
        captured = graphs.stats.captures
        for call in range(40):
            inputs = batch(1 + call % 4, 5 + call * 7 % 28, device)
            if call % 5 == 0:
                inputs["attention_mask"].fill_(1)
            assert_same(model(**inputs), plain(**inputs))
        late = graphs.stats.eager
        assert set(late) <= {Reason.PROOF}, graphs.report()
        assert graphs.stats.captures == captured
        assert graphs.stats.replays == 40 - late.total()
        with pytest.raises(sg.ConfigError, match=r"lengths is \[\]"):
            graphs.capture(lengths=[])


def test_capture_passes_the_tensors_that_calls_pass(device: torch.device) -> None:
    model = bert(device)
    with graph_encoder(model, lengths=[16], capture_sizes=[2]) as graphs, torch.inference_mode():
        graphs.capture(inputs=["input_ids"])
        captured = graphs.stats.captures
        for length in (16, 9):
            model(batch(2, length, device)["input_ids"])
        assert graphs.stats.captures == captured
        assert graphs.stats.replays == 2


class Wide(transformers.BertModel):
    """Answers otherwise where its input is 32 tokens wide."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        outputs.pooler_output = outputs.pooler_output + (input_ids.shape[1] == 32)
        return outputs


@pytest.mark.proofs
@pytest.mark.parametrize("upfront", [True, False], ids=["upfront", "lazy"])
def test_each_captured_length_is_compared_at_its_first_call(upfront: bool, device: torch.device) -> None:
    plain, model = (tiny.build(lambda: Wide(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]) as graphs, torch.inference_mode():
        if upfront:
            graphs.capture(inputs=["input_ids", "attention_mask"])
        for number in range(24):
            inputs = batch(3, (10, 20, 12, 30)[number % 4], device)
            del inputs["token_type_ids"]
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.eager[Reason.LENGTH_PADDING] > 0
        assert "to 32 tokens, output 1 differs" in str(graphs.report())


class Highest(transformers.BertModel):
    """Pools by the largest values of real tokens, which padding seldom exceeds."""

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        outputs.pooler_output = (outputs.last_hidden_state * attention_mask[..., None]).amax(1)
        return outputs


def test_a_maximum_over_the_tokens_is_found_though_padding_is_seldom_chosen(device: torch.device) -> None:
    plain, model = (tiny.build(lambda: Highest(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    for one in (plain, model):
        one.encoder.layer[-1].output.LayerNorm.bias.data.fill_(3.5)
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]) as graphs, torch.no_grad():
        for number in range(20):
            inputs = batch(4, (12, 15, 3, 20)[number % 4], device)
            inputs["attention_mask"].fill_(1)
            del inputs["token_type_ids"]
            if number == 10:
                for one in (plain, model):
                    one.encoder.layer[-1].output.LayerNorm.bias.data.fill_(-9)  # now it would be
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.eager[Reason.LENGTH_PADDING] > 0
        assert "aten.amax.default at " in str(graphs.report())
        assert "picks from the whole length, its padding too" in str(graphs.report())


@pytest.mark.proofs
def test_lengths_of_an_encoder_are_compared_again_now_and_then(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seldom(transformers.BertModel):
        """Counts its tokens where the first one is 5."""

        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            outputs = super().forward(input_ids, attention_mask=attention_mask)
            counted = (input_ids[:, :1] == 5) * input_ids.shape[1]
            outputs.pooler_output = outputs.pooler_output + counted
            return outputs

    monkeypatch.setenv("SIMPLEGRAPH_VERIFY", "100000")
    plain, model = (tiny.build(lambda: Seldom(transformers.BertConfig(**tiny.BERT)), device) for _ in range(2))
    with graph_encoder(model, lengths=[16], capture_sizes=[4]) as graphs, torch.inference_mode():
        for number in range(60):
            inputs = batch(4, 12, device)
            del inputs["token_type_ids"]
            inputs["input_ids"][:, 0] = 5 if number > 20 else 6
            found = model(**inputs)
        assert_same(found, plain(**inputs))
        assert graphs.stats.eager[Reason.LENGTH_PADDING] > 0
        assert "calls ago, and answers since then may be wrong" in str(graphs.report())


def test_a_changed_padding_token_counts_as_in_eager(device: torch.device) -> None:
    """A classifier of whole texts looks for the last token that is no padding."""
    config = tiny.COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "use_cache": False}
    make = transformers.GPT2ForSequenceClassification
    plain, model = (tiny.build(lambda: make(transformers.GPT2Config(**config)), device) for _ in range(2))
    with graph_encoder(model, lengths=[8, 16], capture_sizes=[2]) as graphs, torch.inference_mode():
        for number in range(30):
            plain.config.pad_token_id = model.config.pad_token_id = 5 if 8 <= number < 20 else 0
            inputs = batch(2, 3 + number % 5, device)
            del inputs["token_type_ids"]
            assert_same(model(**inputs), plain(**inputs))
        assert graphs.stats.replays > 8
