"""Memory estimates for ``rlhf plan``: the memory of one rank of a trainer or generator, without loading the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FP32 = 4


@dataclass(frozen=True, slots=True)
class LayerSize:
    """One decoder layer. Widths are in elements per token."""

    parameters: int
    query: int
    """All query heads together."""
    key: int
    """All key heads together."""
    value: int
    """All value heads together."""
    heads: int
    """Query heads."""
    ffn: int
    """Width of the feed-forward layer; in a mixture of experts, of all experts that one token uses."""
    gated: bool
    """The feed-forward layer has gate, up and down matrices; otherwise it has two matrices."""
    routed: int = 0
    """Experts that one token uses; 0: the layer has no experts."""
    normed: bool = False
    """Queries and keys have a norm of their own."""
    norms: int = 2
    """Norms of whole hidden states."""
    largest: int = 0
    """Parameters of the largest tensor. The matrices of all experts together are one tensor."""


@dataclass(frozen=True, slots=True)
class VisionSize:
    """The part of an image-text model that reads images: a tower of equal layers over patches, and a projector."""

    layers: int
    hidden: int
    ffn: int
    """Width of the feed-forward layer."""
    gated: bool
    """The feed-forward layer has gate, up and down matrices; otherwise it has two matrices."""
    projector: int
    """Inputs and outputs of the linear layers that are not in the tower's layers, together."""
    pixels: int
    """Numbers in one patch."""
    patches: int
    """Patches of a large image, as the model's processor divides it."""
    tokens: int
    """Tokens of that image."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model without its values, counted from ``config.json``."""

    path: str
    architecture: str
    """``model_type`` of transformers."""
    parameters: int
    """Tied parameters count once."""
    hidden: int
    vocabulary: int
    outputs: int
    """Outputs of the head: the vocabulary, or those of a scalar or classes head."""
    tied: bool
    """The head shares its matrix with the embedding."""
    embedding: int
    """Parameters of the token embedding."""
    head: int
    """Parameters of the head's matrix, tied or not."""
    layers: tuple[LayerSize, ...]
    cache_elements: int
    """Elements of the key-value cache per token, over all layers."""
    cache_heads: int = 1
    """Largest number of devices that the cache can be split over."""
    layer_class: str = ""
    """Class of the decoder layers in transformers."""
    softcap: bool = False
    """Attention scores are soft-capped, so they are kept as matrices."""
    matrices: int = 0
    """Parameters in two-dimensional matrices of the layers (stacked experts have three dimensions)."""
    linear: tuple[tuple[str, int, int, int], ...] = ()
    """Linear layers that can have adapters: (last part of the name, sum of the inputs, sum of the outputs, number)."""
    vision: int = 0
    """Parameters of the vision tower and the projector behind it."""
    tower: VisionSize | None = None
    """Set if the run has images."""

    @property
    def widest(self) -> int:
        """Parameters of the largest part that is used at once: a layer, the embedding or the head."""
        return max([layer.parameters for layer in self.layers] + [self.embedding, self.head])

    def adapter_parameters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Parameters of adapters of ``rank`` on every linear layer, or on those named in ``targets``."""
        names = None if targets is None else set(targets)
        return rank * sum(i + o for name, i, o, _ in self.linear if names is None or name in names)

    def cache_bytes(self, element: float, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> float:
        """Bytes of the key-value cache per token and device, with ``element`` bytes per value."""
        return self.cache_elements * element / (min(tensor_parallel, self.cache_heads) * pipeline_parallel)


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """The computation of one role in a run. All counts are upper bounds."""

    longest: int
    """Tokens of the longest sequence."""
    unit: int
    """Tokens of the largest unit (a sequence, or a pair of them)."""
    units: int
    """Units of one optimizer step, or of one annotation, over all ranks of the role."""
    micro_tokens: int | None = None
    """Tokens of a micro-batch, from the run file; None: the trainer's default."""
    prompt: int = 0
    """Tokens of the prefix that neighbouring sequences of a unit share."""
    siblings: int = 1
    """Sequences that share a prefix."""
    outputs: tuple[str, ...] = ("logprobs",)
    """Model outputs that the losses read."""
    annotated: tuple[str, ...] = ()
    """Model outputs that the role computes without gradient."""
    images: int = 0
    """Images of a sequence; 0: the run has none."""
    step: int | None = None
    """Tokens that all ranks together compute in one step. A prefix that sequences of a unit share counts once. None:
    known from the other numbers only."""


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """The samples that a run requests from one engine. All counts are upper bounds."""

    samples: int
    """Samples requested at once."""
    prompts: int
    """Distinct prompts among them."""
    longest: int
    """Tokens of the longest sequence, prompt and answer together."""
    longest_prompt: int
    images: int = 0
    """Images of a prompt; 0: the run has none."""
    occupied: int | None = None
    """Bytes of a device in use by roles and processes when the engine starts; None: no role shares its devices."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Peak bytes of one rank, or of one device of an engine, during a phase."""

    device: Mapping[str, int]
    """{part: bytes} on the device. Parts: ``weights``, ``gradients``, ``optimizer``, ``activations``, ``logits``,
    ``cache`` (keys and values), ``working`` (temporaries and buffers), ``allocator`` (freed, but not given back)."""
    host: int = 0
    """Bytes in host memory, in addition to the device."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """One rank of a trainer."""

    phases: Mapping[str, PhaseMemory]
    """``load`` (the model is read), ``rest`` (between calls, after the first step), ``offloaded`` (after
    ``Offloads.offload``), ``forward`` (without gradient), ``train`` (trained roles only)."""
    micro_tokens: int
    """Largest number of tokens in one micro-batch."""
    trained: int = 0
    """Parameters that are trained."""
    bf16: bool = False
    """Arithmetic of forward and backward; otherwise fp32."""
    views: tuple[str, ...] = ("live",)
    """As in ``TrainerFacts.views``."""
    copies: bool = False
    """``weights()`` yields copies, so a weight sync needs a bucket beside the model."""
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    """{part: how its size is computed}, for messages."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One device of a generator's engine."""

    phases: Mapping[str, PhaseMemory]
    """``rest`` (awake, between calls), ``asleep`` (after ``Sleeps.sleep``), ``generate``."""
    copy: bool = True
    """It holds a copy of the weights, which the run keeps up to date."""
    sleeps: bool = False
    """``Sleeps.sleep`` gives device memory back."""
    cache_token: float = 0.0
    """Bytes of the key-value cache per token."""
    cache: int | None = None
    """Bytes that are reserved for the cache; None: the cache grows with the samples."""
    arithmetic: Mapping[str, str] = field(default_factory=dict)
    """{part: how its size is computed}, for messages."""


def whole_copy(size: ModelSize, work: TrainerWork, *, trained: bool, checkpointing: bool, ranks: int) -> TrainerMemory:
    """The default estimate of a trainer class: a whole fp32 model on every rank, trained by AdamW.

    Activations per token and layer: four hidden states, queries, keys, values, the attention's output and four widths
    of the feed-forward layer. The head keeps four copies of the logits.
    """
    count = size.parameters
    # A micro-batch holds at least one whole unit, and at most all units of the rank.
    tokens = min(max(work.micro_tokens or 2048, work.unit), work.unit * max(1, -(-work.units // ranks)))
    layers = [4 * size.hidden + 2 * x.query + x.key + x.value + 4 * x.ffn for x in size.layers]
    activations = size.hidden * len(layers) + max(layers) if checkpointing else sum(layers)
    logits = 4 * tokens * size.outputs * FP32
    rest = {"weights": count * FP32} | ({"optimizer": 2 * count * FP32} if trained else {})
    phases = {
        "load": PhaseMemory({"weights": count * FP32}),
        "rest": PhaseMemory(rest),
        "offloaded": PhaseMemory(rest),
        "forward": PhaseMemory(rest | {"working": tokens * max(layers) * FP32, "logits": logits // 2}),
    }
    if trained:
        train = {"gradients": count * FP32, "activations": tokens * activations * FP32, "logits": logits}
        phases["train"] = PhaseMemory(rest | train)
    return TrainerMemory(phases, tokens, count if trained else 0)
