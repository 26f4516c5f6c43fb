"""A micro-batch through a model: packed sequences, common fronts computed once, outputs read off the hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.modeling import heads as head_ops
from rlhf.modeling.attention import attend_with, current_route, packed
from rlhf.modeling.config import TrainingConfig
from rlhf.modeling.model import LoadedModel
from rlhf.modeling.prefix import share_prefixes
from rlhf.ops.batch import Batch
from rlhf.types import Head


class PackedModel(nn.Module):
    """Body, head and outputs in one ``forward``, so that a runtime that shards weights sees one call a micro-batch."""

    def __init__(self, loaded: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self.model = loaded.module
        self.loaded, self.config = loaded, config
        self.shares_prefixes = shares_prefixes(config, loaded.module)
        """Sequences of a micro-batch that share a prefix compute it once."""

    def forward(self, batch: Batch, outputs: Sequence[Head]) -> dict[str, Tensor]:
        """{output: [A, ...]}, fp32; see :func:`rlhf.modeling.heads.compute`."""
        hidden_MH, place_N = hidden_states(self.loaded, batch, self.shares_prefixes)
        return head_ops.compute(
            hidden_MH,
            batch,
            outputs,
            self.loaded.logits,
            place_N,
            tempered=self.loaded.kind == "lm",
            chunk=max(1, self.config.logits_chunk // self.loaded.head.out_features),
            head_fp32=self.config.head_fp32,
        )


def hidden_states(loaded: LoadedModel, batch: Batch, share: bool) -> tuple[Tensor, Tensor | None]:
    """([M, hidden] of a micro-batch, where each of its N tokens is among them); None: at its own place.

    With ``share`` a prefix that sequences have in common is computed once (:mod:`rlhf.modeling.prefix`).
    """
    lens = batch.lens_B.tolist()
    loaded.require_positions(lens)
    shared = share_prefixes(batch.ids_N, lens) if share else None
    if shared is None:
        return loaded.hidden(batch.ids_N, batch.position_N, lens), None
    with packed(lens, shared, loaded.attention):
        out = loaded.body(input_ids=shared.ids_M[None], position_ids=shared.position_M[None], use_cache=False)
    return out.last_hidden_state[0], shared.place_N


def shares_prefixes(config: TrainingConfig, module: nn.Module) -> bool:
    """Whether common prefixes are computed once: not where sequences would share what is drawn for each of them."""
    return config.shared_prefixes and config.neftune_alpha is None and not has_dropout(module)


def has_dropout(module: nn.Module) -> bool:
    """Sequences that share a prefix would share its dropout mask, so it is not shared where there is dropout."""
    config = getattr(module, "config", None)
    named = config.get_text_config().to_dict() if config is not None else {}
    rates = [v for k, v in named.items() if "drop" in k and isinstance(v, int | float)]
    return any(rates) or any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules())


def checkpoint_gradients(module: PreTrainedModel) -> None:
    """Compute layers again in the backward pass, under the lengths of the forward pass."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # the second pass runs inside backward(), outside of the context that holds the lengths
        return nullcontext(), attend_with(current_route())

    module.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
