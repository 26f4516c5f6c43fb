"""Models in other formats that transformers reads: a folder with pickled weights, and a GGUF file."""

from __future__ import annotations

import importlib.util
import pickle
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError, ModelError
from rlhf_hub.published import SETTINGS, require_files
from rlhf_runtime.data.tokenizer import has_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def as_model_error(text: str, advice: str = "") -> Iterator[None]:
    """Convert any exception to a ModelError that begins with ``text``, because foreign files raise errors of any
    kind."""
    try:
        yield
    except Exception as cause:
        raise ModelError(f"{text}: {type(cause).__name__}: {cause}{advice}") from cause


class SourceModel(ABC):
    """A model in another format. Its metadata has been read, its weights have not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:  # noqa: B027 (most need nothing)
        """Release the resources of the opened source."""

    @abstractmethod
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device. Raises ModelError if transformers cannot build it."""

    @abstractmethod
    def load(self, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model in evaluation mode, and transformers' report of weights."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer; None: the source has none."""

    @abstractmethod
    def save(self, module: PreTrainedModel, folder: Path) -> None:
        """Write weights, config, generation config and tokenizer."""

    def notes(self, skeleton: PreTrainedModel) -> list[str]:
        """Messages about parts of the source that the folder will not have."""
        return []


class BinModel(SourceModel):
    """A folder with pickled weights. Raises ModelError if it holds an adapter, or files that cannot be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        require_files(path)
        if (path / "adapter_config.json").exists():
            raise ModelError(
                f"{path} holds an adapter of another model. Merge it (peft's merge_and_unload) and save the result."
            )

    def skeleton(self) -> PreTrainedModel:
        import torch
        import transformers

        with as_model_error(f"{self.path}: the config cannot be read"):
            config = transformers.AutoConfig.from_pretrained(str(self.path), trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"{self.path} holds quantised weights, which are not converted. Use the model without quantisation."
            )
        if config.is_encoder_decoder:
            raise ModelError(f"{self.path} has an encoder and a decoder; only decoder-only models are trained here.")
        name = (config.architectures or [None])[0]
        cls: Any = getattr(transformers, str(name), None) if name else transformers.AutoModelForCausalLM
        if cls is None:
            raise ModelError(
                f"{self.path} is a {name}, which is not a class of transformers {transformers.__version__}."
            )
        with as_model_error(f"{self.path}: transformers cannot build a model from the config"), torch.device("meta"):
            module: PreTrainedModel = cls(config) if name else cls.from_config(config)
        self._class: Any = type(module)
        return module

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer

        if not has_tokenizer(str(self.path)):
            return None
        with as_model_error(f"{self.path}: the tokenizer cannot be loaded"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(self.path), trust_remote_code=False)
        return tokenizer

    def load(self, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        try:
            module, report = self._class.from_pretrained(
                str(self.path),
                dtype=dtype,
                use_safetensors=False,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report
            )
        except pickle.UnpicklingError as cause:
            raise ModelError(
                f"{self.path}: its .bin files hold more than tensors, or are damaged: {cause}\nOnly tensors are read, "
                "because unpickling can run code. Use safetensors, or convert it yourself if you trust the source."
            ) from cause
        return module.eval(), report

    def save(self, module: PreTrainedModel, folder: Path) -> None:
        """All settings files except ``config.json`` are copied unchanged."""
        from rlhf_modeling.export_files import mend_generation
        from rlhf_modeling.pretrained import exporting

        if module.can_generate():
            mend_generation(module.generation_config)  # else it may not be written; the source's own is copied
        with exporting(module):
            module.save_pretrained(str(folder))
        for pattern in (*SETTINGS, "additional_chat_templates/*.jinja"):
            for path in self.path.glob(pattern):
                if path.name != "config.json" and not path.name.endswith(".bin.index.json"):
                    target = folder / path.relative_to(self.path)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)


PUBLISHER = "Use the publisher's safetensors instead."
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Metadata of tokens that end a text, a turn and a message."""
NAME = "model.gguf"


class GgufModel(SourceModel):
    """A GGUF file. Its metadata is read, and one block of every kind of quantisation is tried.

    Raises ConfigError if a package is missing, ModelError if the file is damaged, is only a part of a model, or holds
    no model.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"reading a GGUF file needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        if re.search(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", path.name):
            self._refuse_part()
        self._metadata, self._tensors = read(path)
        self.architecture = str(self._metadata.get("general.architecture"))
        kind = self._metadata.get("general.type", "model")
        if self.architecture == "clip" or kind != "model":
            part = "the vision part of a model (mmproj)" if kind in ("model", "mmproj") else f"of the type {kind!r}"
            raise ModelError(f"{path} is {part}, not a language model. Name the GGUF file of the language model.")
        if int(self._metadata.get("split.count", 1)) > 1:
            self._refuse_part()
        # The file alone, under a name that transformers knows: files beside it, such as a tokenizer_config.json, would
        # be read as well.
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-convert-")
        (Path(self._folder.name) / NAME).symlink_to(path.absolute())

    def close(self) -> None:
        self._folder.cleanup()

    def _refuse_part(self) -> None:
        raise ModelError(
            f"{self.path} is one part of a split GGUF, but transformers reads only whole files. Join the parts with "
            f"llama.cpp's `llama-gguf-split --merge FIRST_PART WHOLE.gguf`, and convert WHOLE.gguf."
        )

    @property
    def _file(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": self._folder.name, "gguf_file": NAME}

    def skeleton(self) -> PreTrainedModel:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        problem = (
            "transformers cannot build a causal language model from a GGUF file of the architecture "
            f"{self.architecture!r}"
        )
        with as_model_error(f"{self.path}: {problem}", f" {PUBLISHER}"):
            config = AutoConfig.from_pretrained(**self._file)
            with torch.device("meta"):
                module: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        self._config = config
        return module

    def notes(self, skeleton: PreTrainedModel) -> list[str]:
        scaling = [name for name in self._tensors if name.startswith(("rope_freqs", "rope_factors"))]
        scaling += [key for key in self._metadata if key.endswith(".rope.scaling.type")]
        scaling = [key for key in scaling if self._metadata.get(key) != "none"]
        rope = getattr(skeleton.config, "rope_parameters", None) or {}
        texts = []
        if scaling and rope.get("rope_type", "default") == "default":
            texts.append(
                f"{self.path} scales rotary positions ({', '.join(scaling)}), which transformers does not read. The "
                "new model does not scale them, so its answers in long contexts differ. Set rope_parameters in its "
                "config.json."
            )
        templates = [key for key in self._metadata if key.startswith("tokenizer.chat_template.")]
        if templates:
            texts.append(f"chat templates that transformers does not read are left out: {', '.join(templates)}")
        return texts

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        with as_model_error(f"{self.path}: transformers cannot read the tokenizer", f" {PUBLISHER}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**self._file)
        self._tokenizer = tokenizer
        return tokenizer

    def load(self, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        import transformers

        options: dict[str, Any] = {"config": self._config, "dtype": dtype, "output_loading_info": True}
        options["ignore_mismatched_sizes"] = True  # they are in the report
        if hasattr(transformers, "GgufConfig"):  # with the package kernels, weights would stay quantised
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        auto: Any = transformers.AutoModelForCausalLM
        module, report = auto.from_pretrained(**self._file, **options)
        return module.eval(), report

    def save(self, module: PreTrainedModel, folder: Path) -> None:
        """transformers refuses to write a model that it read from a GGUF ("quantized"), so the weights are copied into
        a model that is built from the config."""
        import torch
        from rlhf_modeling.pretrained import exporting
        from transformers import GenerationConfig

        config = module.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = type(module)(config)
        plain.load_state_dict(module.state_dict(), assign=True)
        plain.tie_weights()
        ends = [self._metadata.get(f"tokenizer.ggml.{name}") for name in ENDS]
        config_ends = config.eos_token_id
        ends = list(
            dict.fromkeys(
                end
                for end in [*ends, *(config_ends if isinstance(config_ends, list) else [config_ends])]
                if end is not None
            )
        )
        pad = self._metadata.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None)
        begin = self._metadata.get("tokenizer.ggml.bos_token_id")
        plain.generation_config = GenerationConfig(
            bos_token_id=begin, eos_token_id=ends[0] if len(ends) == 1 else ends or None, pad_token_id=pad
        )
        with exporting(plain):
            plain.save_pretrained(str(folder))
            self._tokenizer.save_pretrained(str(folder))


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The single values of the metadata, and the names of the tensors. One row of each number format is dequantised.

    Raises ModelError.
    """
    from gguf import GGUFReader, GGUFValueType, dequantize

    damaged = (
        ". It is damaged, truncated or of a version that the package gguf does not support: download it again, or "
        "update gguf."
    )
    with as_model_error(f"{path} cannot be read as a GGUF file", damaged):
        content = GGUFReader(path)
        metadata = {
            name: field.contents() for name, field in content.fields.items() if field.types[0] != GGUFValueType.ARRAY
        }
    for tensor in {tensor.tensor_type: tensor for tensor in content.tensors}.values():
        problem = f"the package gguf cannot dequantise {tensor.tensor_type.name}, the type of {tensor.name!r}"
        with as_model_error(f"{path}: {problem}", ". Use a file with another quantisation, such as Q8_0 or F16."):
            dequantize(tensor.data[:1], tensor.tensor_type)
    return metadata, [tensor.name for tensor in content.tensors]
