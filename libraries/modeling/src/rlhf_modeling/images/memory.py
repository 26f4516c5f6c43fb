"""Memory of the vision tower and projector in one micro-batch. For ``rlhf plan``.

Symbols: P patches of the images of a micro-batch, T placeholder tokens of these images, H width of the tower, F width
of its feed-forward layers, b bytes of an element in matrix products (2 in bf16, else 4). Attention keeps no scores, as
with transformers' ``sdpa``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlhf.interfaces.memory import FP32, ModelSize, SamplingWork, TrainerWork, VisionSize

from rlhf_modeling.activations import Arithmetic, widest_working
from rlhf_modeling.images.pixels import CACHE_BYTES

KEPT_WIDTHS = {4: 10, 2: 13}
"""{b: hidden widths that a layer keeps per patch}. In fp32: 4 to 6 for norms, 3 to 5 for queries, keys and values, 1 or
2 for the output of attention. Classes differ in how they compute norms and rotary embeddings. In bf16 some have fp32
norms."""
WORKING_WIDTHS = 8
"""Hidden widths of a layer's temporaries per patch, during attention."""


def image_tokens(tower: VisionSize | None, images: int, longest: int, tokens: int) -> int:
    """Upper bound of T: all sequences have the maximum length, and have ``images`` large images or only tokens of
    images.

    Args:
        longest: number of tokens of a sequence.
        tokens: number of tokens of the micro-batch.
    """
    if tower is None:
        return 0
    return min(tokens, math.ceil(tokens / longest) * min(images * tower.tokens, longest))


def kept_pixels(tower: VisionSize | None, work: TrainerWork, ranks: int) -> int:
    """Bytes of pixels of a step's images that are kept in host memory on one of ``ranks``. Sequences that share a
    prefix share its images."""
    if tower is None:
        return 0
    sequences = work.units * work.unit / work.longest / work.siblings / ranks
    tokens = sequences * min(work.images * tower.tokens, work.longest)
    return min(CACHE_BYTES, int(tokens * tower.patches / tower.tokens * tower.pixels * FP32))


def patches(tower: VisionSize, a: Arithmetic) -> int:
    """P."""
    return math.ceil(a.image_tokens * tower.patches / tower.tokens)


def tower_saved(tower: VisionSize, a: Arithmetic) -> float:
    """Bytes per patch that one layer keeps for the backward pass: :data:`KEPT_WIDTHS`, and for the feed-forward layer
    4bF with a gate (gate, its activation, up, product), else 2bF."""
    return a.element * (KEPT_WIDTHS[a.element] * tower.hidden + (4 if tower.gated else 2) * tower.ffn)


def tower_activations(size: ModelSize, a: Arithmetic) -> int:
    """Bytes that live from forward to backward: pixels, layers, and the projector's inputs and outputs. With gradient
    checkpointing the layers keep only their inputs; two of them if they are in host memory. 0 if the tower is frozen.
    """
    tower = size.tower
    if tower is None or not a.trains_vision:
        return 0
    layer = tower.hidden * FP32 if a.checkpointing else tower_saved(tower, a)
    of_patches = patches(tower, a) * (tower.pixels * FP32 + (2 if a.offloads else tower.layers) * layer)
    return int(of_patches + a.image_tokens * tower.projector * a.element)


def recomputed_tower(size: ModelSize, a: Arithmetic) -> int:
    """Activations of one layer, which gradient checkpointing recomputes in the backward pass."""
    return 0 if size.tower is None or not a.checkpointing else int(patches(size.tower, a) * tower_saved(size.tower, a))


def tower_working(size: ModelSize, a: Arithmetic) -> int:
    """Largest temporaries of one layer of the tower, and the pixels."""
    if size.tower is None:
        return 0
    tower = size.tower
    feed = (3 if tower.gated else 2) * tower.ffn * a.element
    attention = WORKING_WIDTHS * tower.hidden * a.element
    return patches(tower, a) * (max(attention, feed) + 2 * tower.hidden * FP32 + tower.pixels * FP32)


def prompts_working(size: ModelSize, work: SamplingWork, a: Arithmetic) -> int:
    """Largest temporaries of one layer of the text part or the tower in the forward pass of prompts."""
    a = replace(a, image_tokens=image_tokens(size.tower, work.images, work.longest_prompt, a.tokens))
    return max(widest_working(size, a), tower_working(size, a))
