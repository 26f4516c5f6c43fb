"""Adapters in PEFT's format: as part of the exports of a run with ``trainer.lora``, and as the model that a role starts
from.

A role that trains adapters continues with those of the folder. Other roles get one model with the adapters merged.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.model import ADAPTER_PREFIX
from rlhf_hub.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_HASH, AdapterFolder, adapter_of, require_base
from rlhf_hub.hub import hub_name
from rlhf_hub.published import model_folder, weights_of
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_modeling.adapters import NAME, adapted, alpha, is_adapter
from rlhf_modeling.checkpoint_tensors import Published
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.export_files import head_bias
from rlhf_modeling.loaded import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLDER = "adapter"
"""The folder inside an export."""


def write_adapter(
    path: Path,
    spec: ModelSpec,
    model: LoadedModel,
    lora: LoraOptions,
    tensors: Mapping[str, Tensor],
    classifier: str | None,
) -> None:
    """Write the trained tensors of a role as :data:`FOLDER` in the export ``path``.

    Args:
        tensors: {the module's name: whole trained tensor}.
        classifier: :func:`rlhf_modeling.export_files.token_classifier`.
    """
    import peft

    folder = path / FOLDER
    folder.mkdir()
    files = _trained(model.module, tensors)
    if classifier is not None:
        files |= head_bias(model, files["score.weight"].dtype)
    base = base_of(spec)
    hub = hub_name(base)
    # A model that was loaded from a token classifier stays one.
    of_tokens = "TokenClassification" in (classifier or type(model.module).__name__)
    kinds = {"lm": "CAUSAL_LM"}
    targets = _targets(model.module)
    ends = {name.rpartition(".")[2] for name in targets}
    misread = {end for end in ends if _taken_for_experts(model.module, end)}
    as_weights = [name for name in targets if name.rpartition(".")[2] in misread]
    config = peft.LoraConfig(
        task_type=kinds.get(model.kind, "TOKEN_CLS" if of_tokens else "SEQ_CLS"),
        base_model_name_or_path=str(Path(base).expanduser().absolute()) if hub is None else hub.name,
        revision=None if hub is None else hub.revision,
        r=lora.rank,
        lora_alpha=alpha(lora),
        lora_dropout=0.0 if as_weights else lora.dropout,  # which PEFT refuses beside target_parameters
        target_modules=[name for name in targets if name not in as_weights],
        target_parameters=[f"{name}.weight" for name in as_weights] or None,
        modules_to_save=_whole_modules(model.module, files, lora) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias="none",
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    file = folder / ADAPTER_CONFIG
    saved = json.loads(file.read_text(encoding="utf-8"))  # its sets have a different order in each process
    saved |= {name: sorted(value) for name, value in saved.items() if isinstance(value, list)}
    file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # only one field: safetensors writes several in any order
    metadata = {BASE_HASH: weights_of(Path(model_folder(base, weights=True)))}
    weights = {f"{ADAPTER_PREFIX}{name}": tensor.detach().cpu().clone().contiguous() for name, tensor in files.items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata)
    (folder / ADAPTER_WEIGHTS).chmod(0o644)


def base_of(spec: ModelSpec) -> str:
    """The model that the adapters of a role change. If the role starts from an adapter, this is the adapter's base."""
    adapter = adapter_of(spec.path)
    return spec.path if adapter is None else adapter.base


def peft_name(name: str) -> str:
    """The name of a tensor of our module in PEFT's files, without PEFT's prefix."""
    return name.replace(f".{NAME}.", ".").replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def sent_name(published: Published, name: str) -> str:
    """The name under which an engine receives a tensor of an adapter: PEFT's name, with the layers' names in
    checkpoints."""
    layer, _, factor = name.partition(".lora_")
    return f"{ADAPTER_PREFIX}{published.layer(layer)}.lora_{peft_name(factor)}"


def tensors_of(adapter: AdapterFolder) -> dict[str, Tensor]:
    """The tensors of an adapter, with names as from :func:`peft_name`. Raises ModelError if they cannot be read."""
    try:
        tensors = load_file(adapter.folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as cause:
        raise _unreadable(adapter, cause) from cause
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}


def adapter_headers(adapter: AdapterFolder) -> tuple[dict[str, tuple[int, ...]], str | None]:
    """({name as from :func:`peft_name`: shape}, the hash of the base's weights if it is recorded).

    Raises ModelError, like :func:`tensors_of`.
    """
    try:
        with safe_open(adapter.folder / ADAPTER_WEIGHTS, "pt") as file:
            names = list(file.keys())
            shapes = {name.removeprefix(ADAPTER_PREFIX): tuple(file.get_slice(name).get_shape()) for name in names}
            return shapes, (file.metadata() or {}).get(BASE_HASH)
    except (OSError, SafetensorError) as cause:
        raise _unreadable(adapter, cause) from cause


def saved_whole(names: Mapping[str, Any]) -> list[str]:
    """Names of an adapter's tensors that are weights of fully trained modules."""
    return [name for name in names if ".lora_" not in name]


@torch.no_grad()
def continue_adapter(model: LoadedModel, adapter: AdapterFolder) -> None:
    """Copy the values of ``adapter`` into the adapters and the fully trained modules of a module. All weights must be
    whole. Raises ModelError if the names or shapes differ."""
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    targets = {peft_name(name): parameter for name, parameter in parameters.items()}
    tensors = tensors_of(adapter)
    lacking = {peft_name(name) for name in parameters if is_adapter(name)} - tensors.keys()
    unknown = tensors.keys() - targets.keys() - {"score.bias"}
    wrong = [name for name in tensors.keys() & targets.keys() if tensors[name].shape != targets[name].shape]
    if problem := sorted(lacking) or sorted(unknown) or sorted(wrong):
        raise ModelError(
            f"the adapter {adapter.folder} does not match the layers that trainer.lora selects, e.g. {problem[0]!r}. "
            "Set the options of trainer.lora to those of the adapter, or merge the adapter: rlhf merge"
        )
    for name, tensor in tensors.items():
        if name in targets:
            targets[name].copy_(tensor)


def merge_adapter(module: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Add an adapter to the weights of the module, in place. Raises ModelError if the adapter belongs to another model,
    or unties its head from its embedding."""
    tied = untie(module)
    merged = merge_in_place(with_adapter_of(module, adapter))
    if tied and not tie(merged):
        raise ModelError(
            f"the adapter {adapter.folder} changes the embedding but not the head, and {adapter.base} ties these two. "
            f"Merge it first and use the new folder: rlhf merge {adapter.folder} NEW_FOLDER"
        )


def tie(module: PreTrainedModel) -> bool:
    """Undo :func:`untie`, unless head and embedding differ now. Returns whether they are tied."""
    head: Any = module.get_output_embeddings()
    embedding: Any = module.get_input_embeddings()
    equal = bool(torch.equal(head.weight, embedding.weight))
    if equal:
        head.weight = embedding.weight
    for config in (module.config, module.config.get_text_config()):
        config.tie_word_embeddings = equal  # PEFT sets it too
    return equal


def untie(module: PreTrainedModel) -> bool:
    """Give a head that is tied to the embedding a separate copy, because PEFT would merge into both. Returns whether it
    was tied."""
    head: Any = module.get_output_embeddings()
    embedding: Any = module.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    return True


def merge_in_place(model: Any) -> PreTrainedModel:
    """Add the adapter to the weights and return the module inside PEFT's wrapper, without layers of PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an untied head, which :func:`tie` undoes
        merged: PreTrainedModel = model.merge_and_unload()
    return merged


def with_adapter_of(module: PreTrainedModel, adapter: AdapterFolder) -> Any:
    """The module in PEFT's wrapper with an adapter that is not merged yet. Raises ModelError if the adapter belongs to
    another model."""
    try:
        import peft
    except ImportError:
        raise ModelError(f"{adapter.folder} is an adapter, which needs the package peft: pip install peft") from None
    require_base(adapter)
    try:
        config = peft.PeftConfig.from_pretrained(str(adapter.folder))
        config.task_type = None  # PEFT's wrapper of a task refuses the other kinds of heads
        device = str(module.device)  # by default PEFT uses the machine's GPU, also on a Mac
        model = peft.PeftModel.from_pretrained(module, str(adapter.folder), config=config, torch_device=device)
        names = {name.removeprefix(ADAPTER_PREFIX) for name in peft.get_peft_model_state_dict(model)}
    except Exception as cause:  # files of other people raise many kinds of errors
        raise ModelError(
            f"the adapter {adapter.folder} does not fit {adapter.base}: {type(cause).__name__}: {cause}"
        ) from cause
    if differing := sorted(names ^ tensors_of(adapter).keys()):
        raise ModelError(
            f"the adapter {adapter.folder} does not fit {type(module).__name__} of {adapter.base}: only one of the two "
            f"has {differing[0]!r}. Specify the base that it was trained on."
        )
    return model


def _unreadable(adapter: AdapterFolder, cause: Exception) -> ModelError:
    return ModelError(f"{adapter.folder / ADAPTER_WEIGHTS} cannot be read: {cause}. Copy the adapter again.")


def _trained(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trained tensors under PEFT's names. A tied tensor has both names, because PEFT does not tie copies of
    modules."""
    names = {id(p): name for name, p in module.named_parameters()}
    every = [(n, names[id(p)]) for n, p in module.named_parameters(remove_duplicate=False)]
    return {peft_name(alias): tensors[name] for alias, name in every if name in tensors}


def _targets(module: nn.Module) -> list[str]:
    """The adapted layers. The ends of their names are used if no other layer has them, else the whole names. PEFT also
    searches stacked experts for layers."""
    layers = [name for name, _ in adapted(module)]
    prefixes = tuple(f"{name}." for name in layers)
    linear_layers = [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and not n.startswith(prefixes)]
    ends = {name.rpartition(".")[2] for name in layers}
    unclear = {name.rpartition(".")[2] for name in linear_layers if name not in layers} & ends
    stacked = any(parameter.dim() > 2 for parameter in module.parameters())
    return layers if unclear or stacked else sorted(ends)


def _taken_for_experts(module: nn.Module, target: str) -> bool:
    """Whether PEFT would put the adapter of a layer beside the stacked experts. It does this for some mixtures, also if
    the layer is dense or a shared expert: its files may be of an older transformers, in which experts were layers."""
    import peft

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older versions convert nothing
        return False
    config = peft.LoraConfig(target_modules=[target])
    try:
        convert_peft_config_for_transformers(config, module, None)
    except ValueError:  # it stacks gate and up, so it refuses one of them alone
        return True
    return target not in (config.target_modules or ())


def _whole_modules(module: nn.Module, files: Mapping[str, Tensor], lora: LoraOptions) -> list[str]:
    """The fully trained modules. PEFT takes every module whose name ends with one of these texts, so the last part of a
    name is used only if no other module's name ends with it (as ``q_norm`` does with ``norm``)."""
    options, names = lora.modules_to_save or (), set()
    for parts in (name.split(".")[:-1] for name in saved_whole(files)):
        depth = next((number for number, part in enumerate(parts, 1) if part in options), len(parts))
        names.add(".".join(parts[:depth]))
    ends = {name.rpartition(".")[2] for name in names}
    clashes = [name for name, _ in module.named_modules() if name not in names and name.endswith(tuple(ends))]
    return sorted(names if clashes else ends)
