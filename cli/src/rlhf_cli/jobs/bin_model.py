"""A folder with pickled weights, as transformers reads it: tensors only, no code in a pickle is run."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import ModelError
from rlhf_hub.published import SETTINGS, require_files
from rlhf_runtime.data.tokenizer import has_tokenizer

from rlhf_cli.jobs.source_model import SourceModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class BinModel(SourceModel):
    """Opens the folder. Raises ModelError where it holds an adapter, or files that cannot be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        require_files(path)
        if (path / "adapter_config.json").exists():
            raise ModelError(
                f"{path} holds an adapter of another model. Merge it (peft's merge_and_unload) and save that."
            )

    def skeleton(self) -> PreTrainedModel:
        import torch
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(str(self.path), trust_remote_code=False)
        except Exception as cause:  # of many kinds: no config.json, no JSON, an unknown model
            raise ModelError(f"{self.path}: the config cannot be read: {type(cause).__name__}: {cause}") from cause
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"{self.path} holds quantised weights, which are not converted. Take the model without them."
            )
        if config.is_encoder_decoder:
            raise ModelError(f"{self.path} has an encoder and a decoder; only decoder-only models are trained here.")
        name = (config.architectures or [None])[0]
        cls: Any = getattr(transformers, str(name), None) if name else transformers.AutoModelForCausalLM
        if cls is None:
            raise ModelError(f"{self.path} is a {name}, which is no class of transformers {transformers.__version__}.")
        try:
            with torch.device("meta"):
                module: PreTrainedModel = cls(config) if name else cls.from_config(config)
        except Exception as cause:
            raise ModelError(
                f"{self.path}: transformers makes no model of the config: {type(cause).__name__}: {cause}"
            ) from cause
        self._class: Any = type(module)
        return module

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer

        if not has_tokenizer(str(self.path)):
            return None
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(self.path), trust_remote_code=False)
        except Exception as cause:  # of many kinds
            raise ModelError(f"{self.path}: the tokenizer cannot be loaded: {type(cause).__name__}: {cause}") from cause
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
                f"{self.path}: its .bin files hold more than tensors, or are damaged: {cause}\nOnly tensors are "
                "read, as unpickling can run code. Take safetensors, or convert it yourself where you trust the source."
            ) from cause
        return module.eval(), report

    def save(self, module: PreTrainedModel, folder: Path) -> None:
        """All settings except ``config.json`` are copied as they are."""
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
