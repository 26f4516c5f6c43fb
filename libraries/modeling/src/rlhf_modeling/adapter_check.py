"""Checks an adapter's folder that a role starts from, before a model is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import LowRankAdapters, ModelSpec
from rlhf_hub.adapter_folders import AdapterFolder, adapter_of, require_base
from rlhf_hub.hub import hub_name
from rlhf_hub.published import model_folder, weights_of
from torch import nn

from rlhf_modeling.adapter_files import adapter_headers, base_of, saved_whole
from rlhf_modeling.adapters import adaptable, alpha, matching, saved_modules, scaling
from rlhf_modeling.checkpoint_tensors import Published
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.skeleton import known_skeleton
from rlhf_modeling.state import named_tensors

_OTHER_FORM = (
    "rank_pattern", "alpha_pattern", "layer_replication", "alora_invocation_tokens", "use_qalora", "kasa_config",
    "monteclora_config", "use_bdlora", "arrow_config",
)  # fmt: skip
"""Fields of PEFT's settings with which a layer computes something else than W + s B A, or has another rank."""
_OWN_START = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave W as it is. With others (``pissa``, ``olora``) PEFT subtracts the initial
product from W, also when it loads the adapter."""


def check_adapter(spec: ModelSpec, lora: LoraOptions | None) -> None:
    """Check the adapter's folder if the model is one. It is refused if its base is missing or different, or if it
    cannot be trained with these options.

    Args:
        lora: the options of a role that trains adapters; None: the adapter is merged when the model is loaded.

    Raises ModelError or ConfigError.
    """
    adapter = adapter_of(spec.path)
    if adapter is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{spec.path} is an adapter, which needs the package peft: pip install peft")
    require_base(adapter)
    module = require_same_base(adapter, spec)
    if lora is not None:
        require_options(adapter, spec, lora, module)


def separable_adapters(lora: LoraOptions, spec: ModelSpec) -> LowRankAdapters:
    """See :meth:`rlhf.interfaces.Trainer.adapters`."""
    reasons = {
        "use_dora: the rows are scaled after the adapter is added": lora.use_dora,
        "modules_to_save: weights of the base change too": lora.modules_to_save,
        "vision: engines take adapters of the text part only": lora.vision,
    }
    if refused := next((f"trainer.lora.{reason}" for reason, used in reasons.items() if used), ""):
        return LowRankAdapters(lora.rank, scaling(lora), merged_only=refused)
    if (module := known_skeleton(base_of(spec), spec.trust_remote_code, spec.images)) is None:
        refused = "transformers cannot build this model from its config alone, so the names of its layers are not known"
        return LowRankAdapters(lora.rank, scaling(lora), merged_only=refused)
    head: Any = module.get_output_embeddings()
    names = matching([name for name, _ in adaptable(module, head)], lora.targets, type(module).__name__)
    published = Published(module, {name: tensor.shape for name, tensor in named_tensors(module).items()})
    odd = next((name for name in names if published.layer(name) is None), None)
    refused = f"checkpoints hold the weight of {odd!r} in another shape" if odd is not None else ""
    layers = tuple(sorted({name.rpartition(".")[2] for name in names}))
    return LowRankAdapters(lora.rank, scaling(lora), layers, refused)


def require_same_base(adapter: AdapterFolder, spec: ModelSpec) -> nn.Module | None:
    """Raise ModelError if the weights of the base differ from those that a run recorded, or if an adapter's tensors do
    not fit its layers. Returns the base without values, or None if transformers cannot build it."""
    shapes, recorded = adapter_headers(adapter)
    base = adapter.base
    if recorded is not None and (hub_name(base) is None or Path(base).expanduser().is_dir()):
        content = weights_of(Path(model_folder(base, weights=True)))
        if content != recorded:
            raise ModelError(
                f"{adapter.folder} is an adapter of a different base than {base}: the weights of that base have the "
                f"hash {content[:12]}, but the adapter was trained on weights with the hash {recorded[:12]}. Specify "
                "the base that it was trained on."
            )
    if (module := known_skeleton(base, spec.trust_remote_code, spec.images)) is None:
        return None
    layers = {name: tuple(m.weight.shape) for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    for name, shape in shapes.items():
        layer, _, factor = name.partition(".lora_")
        if factor not in ("A.weight", "B.weight") or len(shape) != 2:
            continue
        inner = shape[1] if factor == "A.weight" else shape[0]
        outer = layers.get(layer, (0, 0))[1 if factor == "A.weight" else 0]
        if inner != outer:
            expected = f"has a layer of width {outer}" if layer in layers else "has no such layer"
            raise ModelError(
                f"{adapter.folder} is an adapter of a different base than {base}: its {name!r} is for a layer of width "
                f"{inner}, but that base {expected}. Specify the base that it was trained on."
            )
    return module


def require_options(adapter: AdapterFolder, spec: ModelSpec, lora: LoraOptions, module: nn.Module | None) -> None:
    """Raises ConfigError if ``trainer.lora`` does not match the adapter, ModelError if the adapter is of another
    kind."""
    config = adapter.config
    merge = f"or merge the adapter first and train a new one: rlhf merge {adapter.folder} NEW_FOLDER"
    other = [name for name in _OTHER_FORM if config.get(name)]
    other += ["init_lora_weights"] if config.get("init_lora_weights") not in _OWN_START else []
    if config.get("peft_type") != "LORA" or other:
        fields = "".join(f", {name} = {config[name]!r}" for name in other)
        raise ModelError(
            f"the adapter {adapter.folder} (peft_type {config.get('peft_type')!r}{fields}) cannot be trained: only "
            "LORA with the same rank in all layers, beside the base's own weights, is supported. Remove trainer.lora, "
            f"{merge}"
        )
    options: dict[str, Any] = {
        "rank": lora.rank, "alpha": alpha(lora), "use_rslora": lora.use_rslora, "use_dora": lora.use_dora
    }  # fmt: skip
    of_adapter = {
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "use_rslora": config.get("use_rslora", False),
        "use_dora": config.get("use_dora", False),
    }
    for name, value in of_adapter.items():
        if options[name] != value:
            raise ConfigError(
                f"trainer.lora.{name} is {options[name]}, but the adapter {adapter.folder} of role "
                f"{spec.role.name!r} has {value}. Set trainer.lora.{name} = {str(value).lower()}, {merge}"
            )
    if module is None:
        return
    shapes, _ = adapter_headers(adapter)
    adapters = {name.partition(".lora_")[0] for name in shapes if ".lora_" in name}
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    linear = [name for name, _ in adaptable(module, head, lora.vision)]
    layers = set(matching(linear, lora.targets, type(module).__name__))
    if differing := sorted(layers ^ adapters):
        ends = sorted({name.rpartition(".")[2] for name in adapters})
        raise ConfigError(
            f"trainer.lora.targets selects {len(layers)} layers, but the adapter {adapter.folder} of role "
            f"{spec.role.name!r} has {len(adapters)}; only one of the two has {differing[0]!r}. Set "
            f"trainer.lora.targets = {ends}, {merge}"
        )
    modules = {name.rpartition(".")[0].rpartition(".")[2] for name in saved_whole(shapes)} - {"score"}
    saved = saved_modules(module, lora.modules_to_save or (), None, ())
    trained = {id(parameter) for name in saved for parameter in module.get_submodule(name).parameters()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # A frozen one would keep the adapter's values, but the new adapter would not have them.
    if frozen := [name for name in saved_whole(shapes) if name in parameters and id(parameters[name]) not in trained]:
        raise ConfigError(
            f"the adapter {adapter.folder} of role {spec.role.name!r} has fully trained modules, e.g. {frozen[0]!r}. "
            f"Set trainer.lora.modules_to_save = {sorted(modules)}, {merge}"
        )
