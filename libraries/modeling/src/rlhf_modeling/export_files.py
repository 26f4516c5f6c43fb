"""The files of an export beside its weights: config, generation config, tokenizer. Before the first step, a trainer
writes them once to a temporary folder. So files that cannot be written are detected at the start, not at the end of a
run."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.paths import disk_is_full

from rlhf_modeling.pretrained import copy_processor, exporting, quiet

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from rlhf_modeling.loaded import LoadedModel

GENERATION_CONFIG = "generation_config.json"
_MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")
"""Fields that decide which other fields transformers accepts."""


def write_configs(path: Path, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write everything except the weights. Without a tokenizer, write only the configs."""
    with exporting(module):
        module.save_pretrained(str(path), state_dict={})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))


def try_export(
    spec: ModelSpec, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[str, ...]:
    """Write the files of an export and delete them. A generation config that transformers refuses to write is changed
    to one that it accepts. Returns descriptions of the changes.

    Raises ModelError if a file cannot be written.
    """
    with quiet():  # transformers warns about every value that it does not write
        changes = mend_generation(module.generation_config) if module.can_generate() else []
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf-export-") as folder:
            write_configs(Path(folder), module, tokenizer)
            copy_processor(spec, Path(folder))
    except Exception as cause:  # of many kinds: the model may have custom code
        if disk_is_full(cause):  # not a fault of the model; the run reports a full disk when it writes its own files
            return (
                f"the export could not be tested before the first step: {tempfile.gettempdir()}: {cause}. The disk is "
                "full: free some space there, or set TMPDIR to a folder on another disk",
            )
        raise ModelError(
            f"the model {spec.path!r} of role {spec.role.name!r} could not be exported after its training: its config "
            f"or tokenizer cannot be written: {type(cause).__name__}: {cause}\n"
            "Change these files in the model's folder, or use another model."
        ) from cause
    if not changes:
        return ()
    return (
        f"the {GENERATION_CONFIG} of {spec.path!r} has values that transformers refuses to write; exports "
        f"{' and '.join(changes)}",
    )


def token_classifier(model: LoadedModel) -> str | None:
    """The transformers class under which a new head of classes is exported. It returns the outputs at every token; the
    class from which the model was loaded reads only one token. None for other heads, and if transformers has no such
    class with a bias in its head (:func:`head_bias`)."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING as CLASSES

    config = model.module.config
    if not (model.kind.startswith("classes") and model.fresh_head) or type(config) not in CLASSES:
        return None
    cls: Any = CLASSES[type(config)]
    with torch.device("meta"), quiet():
        model = cls(config)
    bias = getattr(getattr(model, "score", None), "bias", None)
    return None if bias is None else type(model).__name__


def head_bias(model: LoadedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The bias of zeros of the head when it is exported as :func:`token_classifier`."""
    return {"score.bias": torch.zeros(model.head.out_features, dtype=dtype)}


def read_generation_config(spec: ModelSpec, folder: str) -> GenerationConfig | None:
    """The generation config in a model's folder, or None. Raises ModelError if it cannot be read, because transformers
    would refuse the model or use the fields of ``config.json`` instead."""
    from transformers import GenerationConfig

    if not (Path(folder) / GENERATION_CONFIG).is_file():
        return None
    try:
        with quiet():
            return GenerationConfig.from_pretrained(folder)
    except Exception as cause:  # a value of another type raises the error of its comparison
        raise ModelError(
            f"the {GENERATION_CONFIG} of the model {spec.path!r} of role {spec.role.name!r} cannot be read: "
            f"{type(cause).__name__}: {cause}\nChange this value, or delete the file."
        ) from cause


def mend_generation(config: GenerationConfig) -> list[str]:
    """Change a generation config that transformers does not write into one that it writes. Returns descriptions of the
    changes.

    Sampling values without ``do_sample`` mean that answers are sampled, so it is set. If it is ``False``, they are
    removed. All other refused values, such as a negative pad token, are removed too.
    """
    if _writable(config):
        return []
    plain = type(config)()
    fields = {name: value for name, value in config.to_diff_dict().items() if name[0] != "_"}
    trial, left_out, samples = copy.deepcopy(plain), dict[str, Any](), False
    for name in sorted(fields, key=lambda name: name not in _MODES):
        if _writable(trial, **{name: fields[name]}):
            setattr(trial, name, fields[name])
        elif config.do_sample is None and _writable(trial, do_sample=True, **{name: fields[name]}):
            trial.do_sample, samples = True, True
            setattr(trial, name, fields[name])
        else:
            left_out[name] = fields[name]
    for name in left_out:
        if hasattr(plain, name):
            setattr(config, name, getattr(plain, name))
        else:
            delattr(config, name)
    if samples:
        config.do_sample = True
    words = ", ".join(f"{name} = {value!r}" for name, value in left_out.items())
    return (["set do_sample = True"] if samples else []) + ([f"omit {words}"] if words else [])


def _writable(config: GenerationConfig, **changes: Any) -> bool:
    """Whether transformers would write the config with these changes."""
    trial = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(trial, name, value)
    try:
        trial.validate(strict=True)
    except Exception:  # a value of another type raises the error of its comparison
        return False
    return True
