"""Converts a model of another format into a folder with safetensors: `rlhf convert`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.errors import ConfigError, ModelError
from rlhf_hub.other_formats import BIN_FILES, is_gguf, refuse_other_formats
from rlhf_hub.published import add_older_names
from rlhf_runtime.checkpoint.atomic_files import publish_folder
from rlhf_runtime.data.tokenizer import load_tokenizer

from rlhf_cli.jobs.source_models import BinModel, GgufModel, SourceModel, as_model_error

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["fp32", "bf16"]
TEXT = "The 3 capitals: Paris, 東京 and São Paulo!\n\n  def f(x):\treturn x+1"
"""Text that the tokenizers of source and folder must encode to the same ids."""
TOKENS, TOLERANCE = 16, 1e-4
"""Number of tokens whose outputs are compared, and the largest allowed difference."""


@dataclass(frozen=True, slots=True)
class Converted:
    """A written model."""

    architecture: str
    parameters: int
    bytes: int
    texts: str
    """Description of its tokenizer and chat template."""
    generates: bool

    @property
    def outputs(self) -> str:
        return "log-probs" if self.generates else "outputs"


def convert(source: Path, folder: Path, dtype: Dtype, note: Callable[[str], None]) -> Converted:
    """Write the model in ``source`` to the new folder ``folder``.

    Raises ConfigError or ModelError. They are raised before weights are read if the format of the source is not
    supported, a package is missing, transformers does not read the architecture, or the disk is too small.
    """
    import torch
    from rlhf_modeling.pretrained import quiet

    source, folder = source.expanduser(), folder.expanduser()
    require_new_folder(folder)
    number_format = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with closing(open_source(source)) as model, quiet():
        skeleton = model.skeleton()
        parameters = sum(weight.numel() for weight in skeleton.parameters())
        tokenizer = model.tokenizer()
        if tokenizer is not None and tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer of {source} has no end token, so no answer could end: it cannot be used.")
        require_disk(folder, parameters * number_format.itemsize)
        for text in model.notes(skeleton):
            note(text)

        def write(place: Path) -> tuple[str, bool]:
            with as_model_error(f"{source}: cannot load the weights"):
                module, report = model.load(number_format)
            require_weights(source, module, report, note)
            require_shapes(source, module, skeleton)
            expected = outputs(module, source)
            model.save(module, place)
            add_older_names(place)
            # safetensors writes files that only their owner may read.
            for path in place.glob("*.safetensors"):
                path.chmod(0o644)
            kind = type(module)
            del module  # only one model is in memory at a time
            texts = compare_tokenizers(source, tokenizer, place, note)
            copy = kind.from_pretrained(str(place), dtype=number_format, use_safetensors=True).eval()
            difference = float((outputs(copy, place) - expected).abs().max())
            # Not `>`: a difference that is NaN is refused too.
            if not difference <= TOLERANCE:
                raise ModelError(
                    f"the outputs of the written model differ from those of {source} by up to {difference:g}. "
                    "transformers does not write this architecture as it reads it; use the publisher's safetensors."
                )
            return texts, copy.can_generate()

        texts, generates = publish_folder(folder, write)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Converted(type(skeleton).__name__, parameters, size, texts, generates)


def require_new_folder(folder: Path) -> None:
    """Raises ConfigError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"FOLDER {folder} exists. Name a new folder, or delete this one.")


def open_source(path: Path) -> SourceModel:
    """The model at the path. Raises ModelError if its format is not supported."""
    if path.is_file():
        if not is_gguf(path):
            raise ModelError(
                f"{path} is not a GGUF file: it does not begin with the letters GGUF. A source is a GGUF file, or a "
                "folder with pytorch_model.bin. If it should be a GGUF file, download it again."
            )
        return GgufModel(path)
    if not path.is_dir():
        raise ModelError(f"there is no file or folder {path}. Give a GGUF file, or a folder with pytorch_model.bin.")
    names = {entry.name for entry in path.iterdir()}
    if any(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{path} already has safetensors: use it as the model, without a conversion.")
    if {*BIN_FILES} & names:
        return BinModel(path)
    refuse_other_formats(str(path))
    raise ModelError(f"{path} holds no weights: neither pytorch_model.bin nor pytorch_model.bin.index.json.")


def require_disk(folder: Path, need: int) -> None:
    """Raises ModelError if fewer than ``need`` bytes are free at the place of ``folder``."""
    place = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < need:
        raise ModelError(
            f"{folder} needs {need / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free in {place}. Free some space, "
            "name a folder on another disk, or halve the size with --dtype bf16."
        )


def require_weights(source: Path, module: PreTrainedModel, report: dict[str, Any], note: Callable[[str], None]) -> None:
    """Raises ModelError if the source lacks weights. Notes weights that the model does not have."""
    damaged = sorted(report["missing_keys"]) or sorted(str(name) for name, *_ in report["mismatched_keys"])
    if damaged:
        raise ModelError(
            f"{source} lacks {len(damaged)} weights of a {type(module).__name__} or has them in another shape, e.g. "
            f"{damaged[0]!r}. Download or copy it again; if it is complete, transformers does not read this variant."
        )
    unread = sorted(report["unexpected_keys"])
    if unread:
        note(f"{len(unread)} weights of {source} are not in the new folder, because a {type(module).__name__} does not "
             f"have them: {', '.join(unread[:5])}")  # fmt: skip


def require_shapes(source: Path, module: PreTrainedModel, skeleton: PreTrainedModel) -> None:
    """Raises ModelError if the shape of a weight differs from the config, because transformers does not check the
    shapes of a GGUF."""
    shapes = {name: tuple(weight.shape) for name, weight in skeleton.state_dict().items()}
    for name, weight in module.state_dict().items():
        if tuple(weight.shape) != shapes[name]:
            raise ModelError(
                f"{source}: {name!r} has the shape {tuple(weight.shape)}, but {shapes[name]} in the config that "
                f"transformers builds. transformers does not read this variant of {type(module).__name__}."
            )


def outputs(module: PreTrainedModel, path: Path) -> torch.Tensor:
    """Log-probs over the vocabulary for a few tokens, or the outputs of a classifier. Raises ModelError if they are not
    finite."""
    import torch

    embedding: Any = module.get_input_embeddings()
    rows = embedding.weight.shape[0]
    ids = torch.arange(1, TOKENS + 1)[None] * 37 % rows
    with as_model_error(f"the model of {path} cannot compute"), torch.no_grad():  # it may need more than text
        logits = module(input_ids=ids)[0].float()
    values = logits.log_softmax(-1) if module.can_generate() else logits
    if not bool(values.isfinite().all()):
        raise ModelError(f"the model of {path} gives outputs that are not finite; it cannot be used.")
    return values


def compare_tokenizers(
    source: Path, tokenizer: PreTrainedTokenizerBase | None, folder: Path, note: Callable[[str], None]
) -> str:
    """Description of the texts that the folder supports. Raises ModelError if its tokenizer differs from the
    source's."""
    if tokenizer is None:
        note(f"{source} has no tokenizer, which runs need: copy one into the new folder.")
        return "without a tokenizer"
    copy = load_tokenizer(str(folder))
    if copy(TEXT)["input_ids"] != tokenizer(TEXT)["input_ids"] or copy.chat_template != tokenizer.chat_template:
        raise ModelError(f"the written tokenizer encodes text differently from that of {source}: it cannot be used.")
    return f"tokenizer of {len(copy):,} tokens {'with a' if copy.chat_template else 'without'} chat template"
