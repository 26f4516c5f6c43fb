"""Loads a role's model: a body that returns hidden states, and a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.seeds import derive_seed
from rlhf_hub.adapter_folders import AdapterFolder, adapter_of
from torch import nn

from rlhf_modeling.adapter_files import adapter_headers, continue_adapter, merge_adapter, saved_whole
from rlhf_modeling.adapters import add_adapters, saved_modules
from rlhf_modeling.config import Kernels, LoraOptions
from rlhf_modeling.export_files import read_generation_config
from rlhf_modeling.images.architecture import (
    auto_classes,
    classifier,
    has_vision,
    language_model,
    reads_images,
    require_images,
)
from rlhf_modeling.kernels import use_kernels
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.precision import precision_of
from rlhf_modeling.pretrained import EXPECTED, Header, headers_of, quiet, read, read_config
from rlhf_modeling.probe import probe
from rlhf_modeling.quantized import Format, quantizable, quantize_layers
from rlhf_modeling.rope import length_rope
from rlhf_modeling.stored import DTYPES, widen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of a text config with the soft cap of logits: ``softcap * tanh(logits / softcap)``."""


def load_model(
    spec: ModelSpec,
    device: torch.device,
    lora: LoraOptions | None = None,
    quantization: Format | None = None,
    kernels: Kernels = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """Load ``spec.path`` as the role's kind of model: weights in ``spec.storage``, evaluation mode, the fastest correct
    layout.

    If the checkpoint is a causal language model, a scalar or classes head is new: normal with standard deviation 1 /
    (hidden + 1), no bias, seeded by ``(spec.seed, "head", role)``. With ``lora`` the linear layers get adapters, which
    initially do not change the outputs. With ``quantization`` the linear layers except the head are quantised, each on
    ``device``.

    Raises ModelError if the path is missing or unreadable, weights are missing or have another shape, the model is not
    causal, or a separate head cannot represent it.
    """
    model = read_model(spec, merge=lora is None)
    module = model.module
    if model.fresh_head:
        draw_head(model, spec)
    if lora is not None:
        adapt(model, spec, lora, device)
    if quantization is not None:
        quantize_layers(module, quantizable(module, model.head, ()), quantization, device)
    module.eval().to(device)
    probe(model, spec)
    considered = kernels == "liger" or (kernels == "auto" and not deterministic)
    use_kernels(model, kernels, considered and precision_of(spec, device).bf16)
    return model


def read_model(spec: ModelSpec, merge: bool = True) -> LoadedModel:
    """The first part of :func:`load_model`, for trainers that divide weights over ranks, while they are read (in a
    context that transformers supports) or later. The caller does everything else, which needs whole weights:
    :func:`draw_head`, :func:`rlhf_modeling.probe.probe`, adapters and kernels.

    Args:
        merge: merge an adapter at ``spec.path``; False: the caller adds adapters (:func:`adapt`).
    """
    kind = spec.role.head
    config = read_config(spec)
    auto, from_lm = model_class(spec, config)
    options: dict[str, Any] = {"dtype": DTYPES[spec.storage], "output_loading_info": True, "use_safetensors": True}
    adapter = adapter_of(spec.path)
    if from_lm:
        options["num_labels"] = _outputs(kind)
    else:
        options["config"] = config
    with torch.random.fork_rng(devices=[]), quiet():  # draws weights that the checkpoint lacks
        module, info = read(spec, "model", auto.from_pretrained, **options)
    require_weights(spec, type(module), info, from_lm, adapter)
    require_floats(spec, module.config, read(spec, "model", headers_of))
    if adapter is not None:
        use_adapter_folder(module, spec, adapter, merge)
    model = take_apart(module, kind, spec)
    model.fresh_head, model.image_text = from_lm and not _has_head(adapter), reads_images(config, True)
    model.positions, model.rope = _learned_positions(module), length_rope(module)
    if spec.storage == "bf16":
        widen(module)
    return model


def adapt(model: LoadedModel, spec: ModelSpec, lora: LoraOptions, device: torch.device) -> None:
    """Add the role's adapters, and quantise the layers that stay frozen, each on ``device``."""
    module, kind = model.module, lora.quantization
    own_head = None if model.kind == "lm" else model.head
    saved = saved_modules(module, lora.modules_to_save or (), own_head, ())
    # Chosen before the adapters exist, because their factors are linear layers too.
    frozen = quantizable(module, model.head, saved) if kind is not None else []
    add_adapters(module, model.head, lora, derive_seed(spec.seed, "lora/" + spec.role.name))
    if kind is not None:
        quantize_layers(module, frozen, kind, device)
    if (adapter := adapter_of(spec.path)) is not None:
        continue_adapter(model, adapter)


def use_adapter_folder(module: PreTrainedModel, spec: ModelSpec, adapter: AdapterFolder, merge: bool) -> None:
    """Use the contents of an adapter's folder instead of its base's: the generation config, and with ``merge`` the
    weights. Without ``merge``, :func:`adapt` copies the folder's values into the role's adapters."""
    generation = read_generation_config(spec, str(adapter.folder)) if module.can_generate() else None
    if generation is not None:
        module.generation_config = generation
    if merge:
        merge_adapter(module, adapter)


def model_class(spec: ModelSpec, config: Any) -> tuple[Any, bool]:
    """(the class of transformers that loads the role's kind of model, whether its head is not in the checkpoint).

    Args:
        config: the model's config.

    Raises ModelError if the model is of another kind than the role, or reads no images but the run has some. Also if a
    role that is not trained would get a fresh head, which nothing would ever train.
    """
    require_images(spec, config)
    kind, outputs, architectures = spec.role.head, _outputs(spec.role.head), config.architectures or ()
    classifies = [a for a in architectures if "Classification" in a]
    if outputs is None:
        if classifies:  # with a tied head transformers would load it without an error
            raise ModelError(
                f"the model {spec.path!r} of role {spec.role.name!r} is a {classifies[0]}, which does not generate "
                "text, but the role needs a language model. Use the language model from which it was trained."
            )
        return language_model(config, spec.images), False
    if classifies and config.num_labels != outputs:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} has {config.num_labels} labels, but the role's head "
            f"is {kind!r} ({outputs}). Use a model with num_labels = {outputs}, or a causal language model to start "
            "with a new head."
        )
    has_head = bool(classifies) or _has_score(spec, outputs)
    if not has_head and not spec.role.trained and not _has_head(adapter_of(spec.path)):
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} is a {', '.join(architectures) or config.model_type}, "
            f"which has no trained {kind!r} head, and this run does not train the role: its output would be random. "
            f"Use a sequence-classification model with {outputs} label{'s' * (outputs != 1)}."
        )
    if has_head:
        config.num_labels = outputs
    return classifier(config, spec.images) or _classification(architectures), not has_head


def require_weights(
    spec: ModelSpec, model: type, info: Mapping[str, Any], from_lm: bool, adapter: AdapterFolder | None = None
) -> None:
    """Raise ModelError if the checkpoint lacks weights.

    Args:
        model: the class that was loaded.
        info: transformers' report (``output_loading_info``).
        from_lm: the model's head is not in the checkpoint.
        adapter: has weights that its base may lack, such as a head.
    """
    adapter_names = () if adapter is None else saved_whole(adapter_headers(adapter)[0])
    missing = sorted({*info["missing_keys"]} - {*adapter_names})
    if from_lm:
        missing = [name for name in missing if not name.startswith("score.")]
    damaged = missing or sorted(str(m) for m in info["mismatched_keys"])
    if damaged:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} lacks {len(damaged)} weights of a "
            f"{model.__name__} or has them in another shape, e.g. {damaged[0]!r}. {EXPECTED}"
        )


def require_floats(spec: ModelSpec, config: Any, headers: Mapping[str, Header]) -> None:
    """Raises ModelError if a weight in a file is stored as integers, which transformers would convert. Quantised
    weights are integers, and buffers may be."""
    if getattr(config, "quantization_config", None) is not None:
        return
    wrong = [
        name for name, header in headers.items() if name.endswith("weight") and not header.dtype.startswith(("F", "BF"))
    ]
    if wrong:
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r}: the weights file stores {wrong[0]!r} as integers "
            f"({headers[wrong[0]].dtype}). Weights must be floating-point numbers. {EXPECTED}"
        )


def _learned_positions(module: PreTrainedModel) -> int | None:
    """Number of learned positions: rows of the second embedding table (OPT's has two extra rows)."""
    positions = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    text = module.get_decoder() if has_vision(module) else module
    tables = (m for m in text.modules() if isinstance(m, nn.Embedding) and m is not module.get_input_embeddings())
    sizes = {int(table.num_embeddings) for table in tables}
    return positions if positions and sizes & {positions, positions + 2} else None


def _has_score(spec: ModelSpec, outputs: int) -> bool:
    """Whether the checkpoint has a head ``score``, whatever its config calls the model: OpenRLHF writes RewardModel."""
    header = read(spec, "model", headers_of).get("score.weight")
    return header is not None and header.shape[0] == outputs


def _has_head(adapter: AdapterFolder | None) -> bool:
    """Whether an adapter has the head that its base lacks. PEFT writes no ``config.json`` that would tell this."""
    return adapter is not None and "score.weight" in adapter_headers(adapter)[0]


def draw_head(model: LoadedModel, spec: ModelSpec) -> None:
    """Draw the weights of a new head, which must be whole."""
    head = model.head
    # Drawn on the CPU, so that every device and every division of the model gets the same values.
    generator = torch.Generator().manual_seed(derive_seed(spec.seed, "head/" + spec.role.name))
    with torch.no_grad():
        head.weight.copy_(
            torch.empty(head.weight.shape).normal_(0.0, 1.0 / (head.in_features + 1), generator=generator)
        )
        if head.bias is not None:
            head.bias.zero_()


def _classification(architectures: Sequence[str]) -> Any:
    """The body and a linear head named ``score``. The head of a token-classification model has a bias."""
    tokens = any("TokenClassification" in name for name in architectures)
    classes = auto_classes()
    return classes.AutoModelForTokenClassification if tokens else classes.AutoModelForSequenceClassification


def _outputs(kind: str) -> int | None:
    """Outputs of the head; None for a language model."""
    if kind == "lm":
        return None
    if kind == "scalar":
        return 1
    name, _, count = kind.partition(":")
    if name == "classes" and count.isdecimal() and int(count) > 0:
        return int(count)
    raise ModelError(f"head {kind!r} is not known: use 'lm', 'scalar' or 'classes:N' with N > 0")


def take_apart(module: PreTrainedModel, kind: str, spec: ModelSpec) -> LoadedModel:
    """The body and the head of a model, whose weights may be on the meta device.

    Raises ModelError if the class stores them differently, or has an encoder beside its decoder.
    """
    body = getattr(module, module.base_model_prefix, None) or getattr(module, "model", None)
    head = module.get_output_embeddings() if kind == "lm" else getattr(module, "score", None)
    label = f"{type(module).__name__} ({spec.path!r}, role {spec.role.name!r})"
    if module.config.is_encoder_decoder or module.config.get_text_config().is_encoder_decoder:
        raise ModelError(f"{label} has an encoder and a decoder of text; use a decoder-only architecture")
    if (
        not isinstance(body, nn.Module)
        or not isinstance(head, nn.Linear)
        # products with the head's weights are computed here too, which Dory's own class scales
        or type(head).forward is not nn.Linear.forward
    ):
        raise ModelError(
            f"{label} does not consist of a body and one linear "
            f"{'language-model head' if kind == 'lm' else 'head named score'}; use a decoder-only architecture"
        )
    text = module.config.get_text_config()
    caps = [getattr(text, name, None) for name in SOFTCAPS] if kind == "lm" else []
    softcap = next((cap for cap in caps if cap), None)
    return LoadedModel(module, body, head, kind, softcap)
