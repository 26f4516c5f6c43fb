"""Maps Hugging Face names of tensors to vLLM's. vLLM packs several Hugging Face tensors into one parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from rlhf_plugin_vllm.versions import rename


class TensorNames:
    """The tensor names of one vLLM model."""

    def __init__(self, model: nn.Module) -> None:
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        self.parts = {name: list(parts) for name, parts in packed.items()}
        """{``qkv_proj``: [``q_proj``, ``k_proj``, ``v_proj``], ...}."""
        self.packed_names = {part: name for name, parts in packed.items() for part in parts}
        self._mapper: Any = getattr(model, "hf_to_vllm_mapper", None)

    def unpacked(self, name: str) -> list[str]:
        """The parts of a vLLM parameter: ``qkv_proj.weight`` -> ``q_proj.weight``, ``k_proj.weight``, ..."""
        *path, module, attribute = name.split(".") if name.count(".") else ("", name, "")
        return [".".join([*path, part, attribute]) for part in self.parts.get(module, [module])]

    def place(self, name: str) -> tuple[str, int | None]:
        """(vLLM's parameter of a sent tensor, index of the part; None if the tensor is the whole parameter)."""
        return self.packed(self.renamed(name))

    def packed(self, name: str) -> tuple[str, int | None]:
        """Same as :meth:`place`, for a name in vLLM's spelling."""
        *path, module, attribute = name.split(".")
        packed_module = self.packed_names.get(module)
        if packed_module is None or len(self.parts[packed_module]) == 1:
            return ".".join([*path, module, attribute]), None
        return ".".join([*path, packed_module, attribute]), self.parts[packed_module].index(module)

    def renamed(self, name: str) -> str:
        """vLLM's spelling of a sent tensor's name, before packing."""
        if self._mapper is None:
            return name
        plain = type(self._mapper)(
            orig_to_new_renaming=self._mapper.orig_to_new_renaming,
            orig_to_new_regex=self._mapper.orig_to_new_regex,
            orig_to_new_substr=self._mapper.orig_to_new_substr,
            orig_to_new_prefix=self._mapper.orig_to_new_prefix,
            orig_to_new_suffix=self._mapper.orig_to_new_suffix,
        )
        return rename(plain, name) or name

    def missing(self, needed: Sequence[str], loaded_names: Collection[str], received: Collection[str]) -> list[str]:
        """Names of tensors that did not arrive; as the trainer sends them, if that is known.

        Args:
            needed: vLLM's names of all parameters.
            loaded_names: vLLM's names of parameters that were loaded, wholly or partly.
            received: names as the trainer sent them.
        """
        arrivals = {self.renamed(name) for name in received}
        lacking = []
        for name in needed:
            parts = self.unpacked(name)
            if name not in loaded_names or (len(parts) > 1 and name not in arrivals):
                lacking += [part for part in parts if part not in arrivals]
        return lacking
