"""Merges an adapter into its base, and compares the result: `rlhf merge`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_hub.adapter_folders import ADAPTER_CONFIG, AdapterFolder, adapter_of, require_base
from rlhf_hub.published import model_folder
from rlhf_runtime.checkpoint.atomic_files import publish_folder
from rlhf_runtime.data.tokenizer import has_tokenizer

from rlhf_cli.jobs.conversion import outputs, require_disk, require_new_folder
from rlhf_cli.jobs.source_models import as_model_error

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

TOLERANCE = 1e-3
"""Largest difference of outputs in fp32. The merged sums are rounded at other places: 5e-5 in a model of 30 layers."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A written model."""

    architecture: str
    base: str
    dtype: str
    difference: float
    """Largest difference between the outputs of the merged model and those of base and adapter together, in fp32."""
    generates: bool

    @property
    def outputs(self) -> str:
        return "log-probs" if self.generates else "outputs"


def merge(path: Path, folder: Path, base: str | None, dtype: str | None) -> Merged:
    """Write the model of base and adapter to the new folder ``folder``.

    Args:
        base: base model, instead of the one that the adapter names.
        dtype: ``fp32`` or ``bf16``; None: that of the base.

    Raises ConfigError or ModelError. They are raised before weights are read if the adapter is of another base or the
    disk is full.
    """
    import torch
    from rlhf_modeling.adapter_check import require_same_base
    from rlhf_modeling.adapter_files import merge_in_place, tie, with_adapter_of
    from rlhf_modeling.pretrained import quiet

    path, folder = path.expanduser(), folder.expanduser()
    require_new_folder(folder)
    adapter = adapter_of(str(path))
    if adapter is None:
        raise ConfigError(
            f"{path} is not an adapter: it has no {ADAPTER_CONFIG}, or it also has the weights of a whole model. Name "
            "a folder in PEFT format, such as model/adapter of a run."
        )
    if base is not None:
        adapter = replace(adapter, config={**adapter.config, "base_model_name_or_path": base, "revision": None})
    require_base(adapter)
    require_same_base(adapter, ModelSpec(RoleSpec("policy"), adapter.base))
    place = model_folder(adapter.base, weights=True)

    def write(target: Path) -> Merged:
        module, tied = _load(adapter, place)
        name = dtype or ("bf16" if module.config.dtype == torch.bfloat16 else "fp32")
        number_format = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
        require_disk(folder, sum(weight.numel() for weight in module.parameters()) * number_format.itemsize)
        # Compare twice, each time in fp32: the sums before rounding, and the rounded weights after they were written.
        wrapped = with_adapter_of(module, adapter).eval()
        expected = outputs(wrapped.get_base_model(), path)
        merged = merge_in_place(wrapped).eval()
        _require_equal(outputs(merged, path), expected, f"{path} merged into {adapter.base}")
        _round(merged, number_format)
        rounded = outputs(merged, path)
        for parameter in merged.parameters():
            parameter.data = parameter.data.to(number_format)
        if tied:
            tie(merged)
        _write(merged, adapter, place, target)
        copy = type(merged).from_pretrained(str(target), dtype=torch.float32, use_safetensors=True).eval()
        of_copy = outputs(copy, target)
        _require_equal(of_copy, rounded, "the written model")
        return Merged(
            architecture=type(merged).__name__,
            base=adapter.base,
            dtype=name,
            difference=float((of_copy - expected).abs().max()),
            generates=copy.can_generate(),
        )

    with quiet():
        return publish_folder(folder, write)


def _load(adapter: AdapterFolder, place: str) -> tuple[PreTrainedModel, bool]:
    """(the base in fp32 as the class that the adapter was trained on, whether its head was tied to its embedding). The
    base's config holds its number format."""
    import torch
    from rlhf_modeling.adapter_files import adapter_headers, saved_whole, untie
    from rlhf_modeling.images.architecture import auto_classes, classifier, language_model
    from transformers import AutoConfig

    shapes, _ = adapter_headers(adapter)
    folder = str(adapter.folder) if adapter.has_config else place
    with as_model_error(f"{folder}: the config cannot be read"):
        # Not its default, with which transformers asks on a terminal whether to run Python files of the model.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        stored = AutoConfig.from_pretrained(place, trust_remote_code=False).dtype
    images = hasattr(config, "vision_config")
    if "score.weight" in shapes:
        tokens = adapter.config.get("task_type") == "TOKEN_CLS"
        classes = auto_classes()
        auto = classes.AutoModelForTokenClassification if tokens else classes.AutoModelForSequenceClassification
        auto = classifier(config, images) or auto
        config.num_labels = shapes["score.weight"][0]
    else:
        auto = language_model(config, images)
    with as_model_error(f"{adapter.base}: cannot load the weights"):
        module, report = auto.from_pretrained(
            place, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    if lacking := sorted({*report["missing_keys"]} - {*saved_whole(shapes)}):
        raise ModelError(f"{adapter.base} lacks {len(lacking)} weights, e.g. {lacking[0]!r}. Copy it again.")
    module.config.dtype = stored
    return module.eval(), untie(module)


def _require_equal(values: torch.Tensor, expected: torch.Tensor, subject: str) -> None:
    difference = float((values - expected).abs().max())
    # Not `>`: a difference that is NaN is refused too.
    if not difference <= TOLERANCE:
        raise ModelError(
            f"the outputs of {subject} differ from those of base and adapter together by up to {difference:g}; at most "
            f"{TOLERANCE:g} is allowed. peft or transformers does not merge this architecture; nothing was written."
        )


def _round(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights, which stay fp32, so that their outputs can be compared in fp32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype).float()


def _write(module: PreTrainedModel, adapter: AdapterFolder, place: str, target: Path) -> None:
    import shutil

    from rlhf_hub.published import add_older_names, tokenizer_folder
    from rlhf_modeling.export_files import GENERATION_CONFIG, mend_generation
    from rlhf_modeling.pretrained import PROCESSOR_FILES, exporting, set_exported_dtype
    from transformers import AutoTokenizer, GenerationConfig

    if module.can_generate():
        if (adapter.folder / GENERATION_CONFIG).is_file():
            module.generation_config = GenerationConfig.from_pretrained(str(adapter.folder))
        mend_generation(module.generation_config)
    with exporting(module):
        module.save_pretrained(str(target))
    set_exported_dtype(target, next(module.parameters()).dtype)
    tokenizer = str(adapter.folder) if adapter.has_tokenizer else tokenizer_folder(adapter.base)
    if has_tokenizer(tokenizer):
        with as_model_error(f"{tokenizer}: the tokenizer cannot be loaded"):
            AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False).save_pretrained(str(target))
    add_older_names(target)
    for name in PROCESSOR_FILES:
        if (Path(place) / name).is_file():
            shutil.copyfile(Path(place) / name, target / name)
    # safetensors writes files that only their owner may read.
    for file in target.glob("*.safetensors"):
        file.chmod(0o644)
