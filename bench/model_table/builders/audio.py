"""Audio models: those of transformers, torchaudio's, and trained ones that lie inside of packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.model_table.builders.model import Call, Settings, TableModel, configured, image_pairs, noise, numbers, tokens

SECOND = 16000
SPEECH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SPEECH |= {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4), "vocab_size": 32, "pad_token_id": 0}
SPEECH |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SPEECH |= {"mask_time_prob": 0.0}
AST = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
AST |= {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
ENCODEC = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 4], "codebook_size": 32, "codebook_dim": 16}
ENCODEC |= {"target_bandwidths": [30.0], "num_lstm_layers": 1}
VITS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 16}
VITS |= {"vocab_size": 100, "spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [4, 4]}
VITS |= {"upsample_kernel_sizes": [8, 8], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
VITS |= {"wavenet_dilation_rate": 1, "prior_encoder_num_wavenet_layers": 1, "posterior_encoder_num_wavenet_layers": 1}
VITS |= {"prior_encoder_num_flows": 2, "duration_predictor_num_flows": 2, "duration_predictor_filter_channels": 16}
T5_SPEECH = {"hidden_size": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 100, "num_mel_bins": 8}
T5_SPEECH |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
T5_SPEECH |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
T5_SPEECH |= {"speech_decoder_prenet_units": 16, "speech_decoder_postnet_units": 16, "speaker_embedding_dim": 8}
T5_SPEECH |= {"speech_decoder_prenet_dropout": 0.0, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
BARK = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "block_size": 64, "input_vocab_size": 100}
BARK |= {"output_vocab_size": 100}


# Of models whose dropout of elements or layers draws numbers in evaluation, too: no row may be added.
ONE_BY_ONE = {"capture_sizes": [1, 2, 3, 4]}


def _waves(tiny_samples: int, real_samples: int = SECOND, *channels: int) -> Callable[[bool, list[int], int], Call]:
    """Return what makes sound, of two lengths: short where the first row is."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        samples = (tiny_samples if tiny else real_samples) * (2 if lengths[0] % 2 else 1)
        return (), {"input_values": noise(len(lengths), *channels, samples, seed=seed)}

    return call


def _speech(kind: str, **more: Any) -> TableModel:
    return TableModel(configured(f"{kind}Config", f"{kind}Model", SPEECH | more, {}), _waves(1600), ONE_BY_ONE)


def _spectra(tiny: bool, lengths: list[int], seed: int) -> Call:
    shape = (32, 16) if tiny else (1024, 128)
    return (), {"input_values": noise(len(lengths), *shape, seed=seed)}


def _clap(tiny: bool) -> Any:
    import transformers

    words = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words |= {"intermediate_size": 64, "pad_token_id": 0, "projection_dim": 16, "max_position_embeddings": 64}
    sound = {
        "spec_size": 32,
        "num_mel_bins": 8,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "patch_embeds_hidden_size": 16,
    }
    sound |= {"depths": [1, 1], "num_attention_heads": [2, 2], "hidden_size": 32, "window_size": 4}
    sound |= {"projection_dim": 16, "enable_fusion": False}
    settings = {"text_config": words, "audio_config": sound, "projection_dim": 16}
    return transformers.ClapModel(transformers.ClapConfig(**(settings if tiny else {})))


def _clapped(tiny: bool, lengths: list[int], seed: int) -> Call:
    shape = (1, 128, 8) if tiny else (1, 1001, 64)
    return (), {
        "input_ids": numbers(100, len(lengths), 8, seed=seed),
        "input_features": noise(len(lengths), *shape, seed=seed),
    }


def _spoken(tiny: bool, lengths: list[int], seed: int) -> Call:
    texts: dict[str, Any] = tokens(tiny, lengths, seed)[1]
    speaker = {"speaker_embeddings": noise(len(lengths), 8 if tiny else 512, seed=seed)}
    bins = 8 if tiny else 80
    return (), texts | {"use_cache": False, "decoder_input_values": noise(len(lengths), 6, bins, seed=seed)} | speaker


def _bark(tiny: bool) -> Any:
    import transformers

    settings: Settings = BARK if tiny else {"input_vocab_size": 10048, "output_vocab_size": 10048}
    return transformers.BarkSemanticModel(transformers.BarkSemanticConfig(**settings))


def _ids(tiny: bool, lengths: list[int], seed: int) -> Call:
    return (), {"input_ids": numbers(100, len(lengths), 8 if tiny else 64, seed=seed), "use_cache": False}


def _musicgen(tiny: bool) -> Any:
    import transformers

    settings = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64}
    settings |= {"num_codebooks": 2, "max_position_embeddings": 64, "pad_token_id": 64, "bos_token_id": 64}
    return transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**(settings if tiny else {})))


def _codes(tiny: bool, lengths: list[int], seed: int) -> Call:
    books = 2 if tiny else 4
    return (), {"input_ids": numbers(60, len(lengths) * books, 8, seed=seed), "use_cache": False}


def _torchaudio(name: str, tiny: Settings, real: Settings | None = None) -> Callable[[bool], Any]:
    def build(is_tiny: bool) -> nn.Module:
        import torchaudio

        made: nn.Module = getattr(torchaudio.models, name)(**(tiny if is_tiny else tiny if real is None else real))
        return made

    return build


def _positional(*shape: int) -> Callable[[bool, list[int], int], Call]:
    """Return what makes one tensor by position."""
    return lambda tiny, lengths, seed: ((noise(len(lengths), *shape, seed=seed),), {})


def _framed(tiny: bool, lengths: list[int], seed: int) -> Call:
    frames = torch.tensor([8 + 4 * (length % 5) for length in lengths])
    frames[0] = 24
    return (noise(len(lengths), 24, 16, seed=seed), frames), {}


def _tacotron(tiny: bool, lengths: list[int], seed: int) -> Call:
    rows = len(lengths)
    return (
        numbers(30, rows, 8, seed=seed),
        torch.full((rows,), 8),
        noise(rows, 80, 12, seed=seed),
        torch.full((rows,), 12),
    ), {}


def _wavernn(tiny: bool, lengths: list[int], seed: int) -> Call:
    return (noise(len(lengths), 1, 300, seed=seed), noise(len(lengths), 1, 16, 7, seed=seed)), {}


def _crepe(tiny: bool) -> nn.Module:
    import torchcrepe

    torchcrepe.load.model(torch.get_default_device() if hasattr(torch, "get_default_device") else "cpu", "tiny")
    model: nn.Module = torchcrepe.infer.model
    return model


def _pesto(tiny: bool) -> nn.Module:
    """Load a trained estimator of pitch; its weights lie in its package."""
    import pesto

    model: nn.Module = pesto.load_model("mir-1k_g7", step_size=10.0, sampling_rate=SECOND)
    return model


def _tones(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make a tone for each row, as many tenths of a second as the longest, and five at least."""
    moments = torch.arange(max(*lengths, 5) * SECOND // 10) / SECOND
    pitches = [110.0 * (1 + length % 5) + seed for length in lengths]
    return (torch.stack([(2 * torch.pi * pitch * moments).sin() for pitch in pitches]),), {"convert_to_freq": True}


def _vocos(tiny: bool) -> nn.Module:
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    width, layers = (16, 2) if tiny else (512, 8)
    backbone = VocosBackbone(
        input_channels=16 if tiny else 100, dim=width, intermediate_dim=2 * width, num_layers=layers
    )
    return nn.Sequential(backbone, ISTFTHead(dim=width, n_fft=64 if tiny else 1024, hop_length=16 if tiny else 256))


def _silero(tiny: bool) -> Any:
    import silero_vad

    return silero_vad.load_silero_vad()


def _lpips(tiny: bool) -> nn.Module:
    import lpips

    model: nn.Module = lpips.LPIPS(net="squeeze" if tiny else "vgg", pretrained=True, pnet_rand=True, verbose=False)
    return model


MODELS = {
    "wav2vec2": _speech("Wav2Vec2"),
    "hubert": _speech("Hubert"),
    "wavlm": _speech("WavLM", num_buckets=16, max_bucket_distance=32),
    "ast": TableModel(configured("ASTConfig", "ASTForAudioClassification", AST, {}), _spectra),
    "clap": TableModel(_clap, _clapped),
    "encodec": TableModel(configured("EncodecConfig", "EncodecModel", ENCODEC, {}), _waves(640, 24000, 1)),
    "vits": TableModel(configured("VitsConfig", "VitsModel", VITS, {"vocab_size": 100}), tokens),
    "speecht5": TableModel(
        configured("SpeechT5Config", "SpeechT5ForTextToSpeech", T5_SPEECH, {"vocab_size": 100}), _spoken, ONE_BY_ONE
    ),
    "bark": TableModel(_bark, _ids),
    "musicgen": TableModel(_musicgen, _codes, {"capture_sizes": [2, 4, 8, 16]}),
    "torchaudio_wav2vec2": TableModel(
        _torchaudio("wav2vec2_base", {}),
        lambda tiny, lengths, seed: ((noise(len(lengths), 1600 if tiny else SECOND, seed=seed),), {}),
    ),
    "torchaudio_conformer": TableModel(
        _torchaudio(
            "Conformer",
            {"input_dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 2, "depthwise_conv_kernel_size": 7},
        ),
        _framed,
    ),
    "torchaudio_conv_tasnet": TableModel(
        _torchaudio(
            "ConvTasNet",
            {"enc_num_feats": 16, "msk_num_feats": 8, "msk_num_hidden_feats": 16, "msk_num_layers": 2}
            | {"msk_num_stacks": 1},
            {},
        ),
        _positional(1, 1600),
    ),
    "torchaudio_tacotron2": TableModel(_torchaudio("Tacotron2", {"n_symbol": 40}), _tacotron),
    "torchaudio_wavernn": TableModel(
        _torchaudio(
            "WaveRNN",
            {"upsample_scales": [5, 5, 4], "n_classes": 16, "hop_length": 100, "n_res_block": 2, "n_rnn": 16}
            | {"n_fc": 16, "n_freq": 16, "n_hidden": 16, "n_output": 16},
        ),
        _wavernn,
    ),
    "torchcrepe_pitch": TableModel(_crepe, _positional(1024)),
    "pesto_pitch": TableModel(_pesto, _tones),
    "vocos_vocoder": TableModel(
        _vocos, lambda tiny, lengths, seed: ((noise(len(lengths), 16 if tiny else 100, 20, seed=seed),), {})
    ),
    "silero_vad_vad": TableModel(
        _silero, lambda tiny, lengths, seed: ((noise(len(lengths), 512, seed=seed).tanh(), 16000), {})
    ),
    "lpips_perceptual": TableModel(_lpips, image_pairs(64, 224)),
}
