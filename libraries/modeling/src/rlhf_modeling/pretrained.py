"""Reads and writes models and tokenizers in Hugging Face format, with our messages and without progress bars.

The modules of this package import transformers inside functions. Its import takes seconds, and reading options does not
need it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf_hub.published import INDEX, looks_local, model_folder, require_names, tokenizer_folder
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
TOKENIZER = "tokenizer"
EXPECTED = "Expected a folder with config.json and *.safetensors in Hugging Face format, or a hub name."


def read(spec: ModelSpec, label: str, reader: Any, **options: Any) -> Any:
    """Call ``reader(folder, **options)`` (a ``from_pretrained``) for the files that ``spec`` names. ``label`` is for
    messages.

    Raises ModelError if the folder does not exist or its files cannot be read.
    """
    if looks_local(spec.path) and not Path(spec.path).expanduser().exists():
        raise ModelError(
            f"the folder {spec.path!r} for the {label} of role {spec.role.name!r} does not exist. {EXPECTED}"
        )
    place = model_folder(spec.path, weights="use_safetensors" in options, code=spec.trust_remote_code)
    if label == TOKENIZER:
        place = tokenizer_folder(spec.path, code=spec.trust_remote_code)
    try:
        return reader(place, trust_remote_code=spec.trust_remote_code, **options)
    except Exception as cause:  # parsers of damaged files raise any exception
        damaged = isinstance(cause, SafetensorError)  # for example after an interrupted download
        raise ModelError(
            f"cannot load the {label} {spec.path!r} of role {spec.role.name!r}: {type(cause).__name__}: {cause}\n"
            f"{'A file of weights is damaged or incomplete: download or copy it again.' if damaged else EXPECTED}"
        ) from cause


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a tensor in a safetensors file: its shape and its number format (``F32``)."""

    shape: tuple[int, ...]
    dtype: str


def headers_of(place: str, **_: Any) -> dict[str, Header]:
    """{name: header} of all tensors in the folder's safetensors files. For an adapter, in the files of its base."""
    folder = Path(model_folder(place, weights=True))  # refuses a folder that has only pickles
    names = ["model.safetensors"]
    if not (folder / names[0]).is_file() and (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    headers = {}
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the file {name} is missing")
        with safe_open(folder / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(key)
                headers[key] = Header(tuple(part.get_shape()), part.get_dtype())
    return headers


def read_config(spec: ModelSpec) -> Any:
    """The model's config. Raises ModelError as :func:`read`."""
    from transformers import AutoConfig

    config = read(spec, "model", AutoConfig.from_pretrained)
    require_names(config.architectures, spec.path)
    return config


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder."""
    from transformers import AutoTokenizer

    return read(spec, TOKENIZER, AutoTokenizer.from_pretrained)


def eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a text, from the generation config (else the model's config) and the tokenizer."""
    ids: list[int] = []
    for config in (module.generation_config if module.can_generate() else None, module.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            ids += ends if isinstance(ends, (list, tuple)) else [ends]
            break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def set_exported_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Name the number format of an export's weights in its ``config.json``."""
    set_exported(folder, dtype=str(dtype).removeprefix("torch."))


def set_exported(folder: Path, **fields: Any) -> None:
    """Set fields of an export's ``config.json``."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), **fields}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_processor(spec: ModelSpec, folder: Path) -> None:
    """Copy the files of the model's image processor, if it has one, into an export."""
    place = Path(model_folder(spec.path, code=spec.trust_remote_code))
    for name in PROCESSOR_FILES:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)


@contextmanager
def exporting(module: PreTrainedModel) -> Iterator[None]:
    """Context for writing the config without the names of attention functions and without a progress bar. Other
    programs do not know our functions."""
    from transformers import modeling_utils

    chosen = [(config, config._attn_implementation) for config in _parts(module.config)]
    module.config._attn_implementation = None  # and of all parts
    # Our modules have no wrapper. To look for one, transformers imports DeepSpeed if it is installed, and everything
    # that DeepSpeed imports, which takes seconds at every start.
    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, recursive=False: model
    try:
        with quiet():
            yield
    finally:
        for config, name in chosen:  # a vision tower has a different one
            config._attn_implementation_internal = name
        modeling_utils.unwrap_model = unwrap


def _parts(config: Any) -> Iterator[Any]:
    """A config and its parts, at every depth."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bar and its report of missing weights, which :mod:`rlhf_modeling.model`
    checks."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_MEANT_FOR_PADDING = ("pad", "reserved", "unused")


def set_padding(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Set one pad token, which does not end texts, in model and tokenizer, so that padded batches are scored at their
    last real tokens. transformers' sequence classification reads the last token that is not the pad token, regardless
    of the attention mask. If the pad token were also the end token, it would read the token before the end.

    The tokenizer's pad token is used unless it ends texts (``ends``), else its unknown token, else a special token
    whose name marks it as padding or as spare. If there is none, the model gets no pad token. transformers then refuses
    batches of more than one instead of reading them wrongly.
    """
    pad = pad_token(tokenizer, ends, _rows(module))
    module.config.pad_token_id = module.config.get_text_config().pad_token_id = pad
    if pad is not None and tokenizer.pad_token_id != pad:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], rows: int) -> int | None:
    """The pad token for :func:`set_padding`; its id must be below ``rows``."""
    special = {token: i for i, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)}
    added = {str(t.content): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    spares = [i for t, i in {**special, **added}.items() if any(word in t.lower() for word in _MEANT_FOR_PADDING)]
    for candidate in (tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(spares)):
        if candidate is not None and candidate not in ends and candidate < rows:
            return int(candidate)
    return None


def _rows(module: PreTrainedModel) -> int:
    embedding: Any = module.get_input_embeddings()
    return int(embedding.num_embeddings)
