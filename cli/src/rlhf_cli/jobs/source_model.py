"""What a model of another format tells to be converted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class SourceModel(ABC):
    """A model of another format, whose facts were read and whose weights were not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:  # noqa: B027 (most need nothing)
        """Release what opening made."""

    @abstractmethod
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device. Raises ModelError where transformers makes none of it."""

    @abstractmethod
    def load(self, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
        """The model in evaluation mode, and transformers' report of weights."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None: the source has none."""

    @abstractmethod
    def save(self, module: PreTrainedModel, folder: Path) -> None:
        """Write weights, config, generation config and tokenizer."""

    def notes(self, skeleton: PreTrainedModel) -> list[str]:
        """What the folder will not have of the source, for people."""
        return []
