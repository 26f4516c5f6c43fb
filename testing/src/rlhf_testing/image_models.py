"""Tiny image-text models with their processors, on disk, for tests.

The five families cover the relevant differences. Qwen2.5-VL and Qwen3-VL number the tokens of an image in two
dimensions (M-RoPE). Idefics3 cuts large images into tiles, with markers around each. LLaVA has a fixed number of tokens
per image. InternVL cuts images into tiles only because its processor passes this setting to its image processor. The
last three number all tokens consecutively.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_testing.tiny import CHARS, EOS, PAD, UNK

QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILES = tuple(f"<row_{r + 1}_col_{c + 1}>" for r in range(4) for c in range(4))
IDEFICS = ("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>", *TILES)
LLAVA = ("<|im_start|>", "<|im_end|>", "<image>")
INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
"""{attribute of the tokenizer: token}."""

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM supports on a CPU
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.1,
}
_NORM = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True}


def image_template(image: str) -> str:
    """A chat template with image parts: content is text, or parts of which each image is written as ``image``."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        f"{{% if part.type == 'image' %}}{{{{ '{image}' }}}}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
        f"{{% endfor %}}{{% endif %}}{{{{ '{EOS}\\n' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def tiny_image_model(
    path: str | Path, family: str = "qwen2_5_vl", seed: int = 0, vision: Mapping[str, Any] | None = None, **text: Any
) -> Path:
    """Save a random image-text model with the tokenizer, chat template and processor of its family.

    The tokenizer has one token per character of :data:`~rlhf_testing.tiny.CHARS` and the family's special tokens.
    An image of 32 x 32 pixels becomes 4 tokens (``qwen2_5_vl``, ``qwen3_vl``; with markers ``internvl``), 16 tokens
    (``llava``), or 4 tokens for each of four tiles and for the whole, with markers around them (``idefics3``).

    Args:
        path: folder, created if absent.
        family: one of :data:`FAMILIES`.
        vision: fields of the vision part's config that replace its defaults.
        text: fields of the text part's config that replace its defaults.

    Returns: ``path``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    special, fields, processor, image = FAMILIES[family]
    ids = _tokenizer(path, special, image_template(image))
    config = fields({**_TEXT, "vocab_size": len(ids), **text}, ids)
    config["vision_config"].update(vision or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
    model.save_pretrained(str(path))
    (path / "processor_config.json").write_text(json.dumps(processor, indent=2))
    return path


def drawing(width: int = 32, height: int = 32, colour: str = "red", form: str = "PNG") -> bytes:
    """The file of an image of one colour with a black diagonal."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), colour)
    ImageDraw.Draw(image).line((0, 0, width, height), "black", 3)
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def _tokenizer(path: Path, special: tuple[str, ...] | dict[str, str], chat_template: str) -> dict[str, int]:
    """Saves the tokenizer; returns the id of each token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    attributes, special = (special, tuple(special.values())) if isinstance(special, dict) else ({}, special)
    ids = {token: i for i, token in enumerate([PAD, EOS, UNK, *special, *CHARS])}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in (PAD, EOS, UNK, *special)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_specific_special_tokens=attributes,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(path))
    return ids


def _qwen(text: Mapping[str, Any], ids: Mapping[str, int], newer: bool) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 8,
        "initializer_range": 0.1,
    }
    if newer:
        rope["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    return {
        "text_config": {"rope_parameters": rope, "tie_word_embeddings": True, **text},
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": True,
    }


def _qwen_processor(name: str) -> dict[str, Any]:
    pixels = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, **_NORM}
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}  # numbers of pixels
    return {
        "processor_class": name,
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **pixels},
        "video_processor": {
            "video_processor_type": name.replace("2_5_VL", "2VL").replace("Processor", "VideoProcessor")
        }
        | {"size": size, **pixels},
    }


def _siglip(ids: Mapping[str, int]) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "image_size": 32, "patch_size": 8, "initializer_range": 0.1}


def _idefics3(text: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": _siglip(ids),
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def _llava(text: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **text},
        "vision_config": {"model_type": "clip_vision_model", **_siglip(ids), "projection_dim": 32},
        "image_token_id": ids["<image>"],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 16,
        "tie_word_embeddings": False,
    }


def _internvl(text: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "qwen2", **text},
        "vision_config": _siglip(ids),
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }


FAMILIES: dict[str, tuple[tuple[str, ...] | dict[str, str], Any, dict[str, Any], str]] = {
    "qwen2_5_vl": (
        QWEN,
        lambda text, ids: _qwen(text, ids, newer=False),
        _qwen_processor("Qwen2_5_VLProcessor"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": (
        QWEN,
        lambda text, ids: _qwen(text, ids, newer=True),
        _qwen_processor("Qwen3VLProcessor"),
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "idefics3": (
        IDEFICS,
        _idefics3,
        {
            "processor_class": "Idefics3Processor",
            "image_seq_len": 4,
            "image_processor": {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 64},
                "max_image_size": {"longest_edge": 32},
                "do_image_splitting": True,
                **_NORM,
            },
        },
        "<image>",
    ),
    "llava": (
        LLAVA,
        _llava,
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
            "image_processor": {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 32},
                "crop_size": {"height": 32, "width": 32},
                **_NORM,
            },
        },
        "<image>",
    ),
    "internvl": (
        INTERN,
        _internvl,
        {
            "processor_class": "InternVLProcessor",
            "image_seq_length": 4,
            "image_processor": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": {"height": 32, "width": 32},
                **_NORM,
            },
        },
        "<IMG_CONTEXT>",
    ),
}
"""By ``model_type``: special tokens, fields of the config, of the processor, and an image in the chat template."""
