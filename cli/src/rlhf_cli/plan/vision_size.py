"""Reads the widths of the part of a model that reads images, and what the model's processor makes of a large image."""

from __future__ import annotations

from typing import Any

from rlhf.errors import ModelError
from rlhf.interfaces.memory import VisionSize

from rlhf_cli.plan.layer_size import first

LARGE = 2048
"""Height and width of the image, in pixels. Most processors make larger images smaller."""


def vision_size(module: Any, config: Any, path: str, trust_remote_code: bool) -> VisionSize | None:
    """None where the part has no list of layers, or no convolution that reads patches: its activations are not counted.

    Args:
        module: the model on the meta device.
        config: of the model.

    Raises ModelError: the folder has no processor of images, as the run would.
    """
    from rlhf_modeling.images.architecture import vision_prefixes
    from torch import nn

    vision = getattr(config, "vision_config", None)
    width = first(vision, "embed_dim", "hidden_size")
    prefixes = vision_prefixes(module)
    parts = [(name, m) for name, m in module.named_modules() if name.startswith(prefixes)]
    lists = [(name, m) for name, m in parts if isinstance(m, nn.ModuleList)]
    reads = [m for _, m in parts if isinstance(m, nn.Conv2d | nn.Conv3d) and m.out_channels == width]
    if width is None or not lists or not reads:
        return None
    name, layers = max(lists, key=lambda entry: len(entry[1]))
    feed = [m for at, m in layers[0].named_modules() if isinstance(m, nn.Linear) and "att" not in at]
    behind = [m for at, m in parts if isinstance(m, nn.Linear) and not at.startswith(f"{name}.")]
    pixels = reads[0].weight[0].numel()
    patches, tokens = _of_a_large_image(path, trust_remote_code, pixels)
    return VisionSize(
        layers=len(layers),
        hidden=width,
        ffn=feed[0].out_features if feed else 4 * width,
        gated=len(feed) > 2,
        projector=sum(m.in_features + m.out_features for m in behind),
        pixels=pixels,
        patches=patches,
        tokens=tokens,
    )


def _of_a_large_image(path: str, trust_remote_code: bool, pixels: int) -> tuple[int, int]:
    """(patches, tokens)."""
    from PIL import Image
    from rlhf_hub.processors import load_processor

    processor = load_processor(path, trust_remote_code)
    try:
        blank = Image.new("RGB", (LARGE, LARGE))
        inputs = processor(images=[blank], text=[processor.image_token], add_special_tokens=False, return_tensors="pt")
        return inputs["pixel_values"].numel() // pixels, inputs["input_ids"].numel()
    except Exception as error:  # of many kinds: the processor may be anybody's
        raise ModelError(
            f"cannot plan with images for {path!r}: its processor fails with an image of {LARGE}x{LARGE} pixels "
            f"({type(error).__name__}: {error})"
        ) from error
