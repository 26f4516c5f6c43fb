"""Writes tiny GGUF files with the package gguf, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

F32, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
TOKENS = ["<pad>", "<eos>", "<turn>", *bytes_to_unicode().values(), "ab"]
PAD, EOS, TURN = range(3)
TEMPLATE = "{% for message in messages %}{{ message['content'] + '<turn>' }}{% endfor %}"
HIDDEN, HEADS, KEY_HEADS, LAYERS = 32, 4, 2, 2


def write_gguf(
    path: Path, architecture: str = "llama", kind: GGMLQuantizationType = F32, head: int = 8, **metadata: Any
) -> dict[str, torch.Tensor]:
    """A random model of the architecture with a tokenizer of bytes and a chat template, at ``path``.

    Args:
        kind: of the matrices; vectors are F32.
        head: dimensions of an attention head.
        metadata: further values, or others; None leaves one out. ``__`` in a name stands for a dot.

    Returns the weights that the file stands for, by transformers' names.
    """
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": len(TOKENS)}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": head}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **sizes, **heads, initializer_range=0.1, tie_word_embeddings=False)
        module = AutoModelForCausalLM.from_config(config)
    writer = GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.feed_forward_length": 64,
        f"{architecture}.rope.dimension_count": head,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KEY_HEADS,
        f"{architecture}.attention.key_length": head,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.eot_token_id": TURN,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.chat_template": TEMPLATE,
        **{name.replace("__", "."): value for name, value in metadata.items()},
    }
    for name, value in values.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    names = get_tensor_name_map(next(k for k, v in MODEL_ARCH_NAMES.items() if v == architecture), LAYERS)
    weights = {}
    for name, weight in module.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        values_here = weight.numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):  # llama.cpp's order of rotary dimensions
            count = HEADS if stem.endswith("q_proj") else KEY_HEADS
            values_here = values_here.reshape(count, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values_here.shape)
        quantised = kind != F32 and weight.ndim == 2
        data = quantize(values_here, kind) if quantised else values_here
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind if quantised else F32)
        weights[name] = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)) if quantised else weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
