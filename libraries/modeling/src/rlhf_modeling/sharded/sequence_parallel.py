"""Which ranks divide the tokens of a row (``sequence_parallel``), and which models support this.

Adjacent ranks form a group: ranks 0 to N - 1, N to 2 N - 1 and so on. Weights, gradients and optimizer state are
divided over all ranks, as they are without groups.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import ModelSpec
from torch import Tensor, nn

from rlhf_modeling.attention import PackedAttention, attend_with, use_packed_attention
from rlhf_modeling.images.architecture import is_image_text
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.pretrained import quiet, read_config
from rlhf_modeling.probe_rows import probe_rows, short_lengths, wrong
from rlhf_modeling.rope import length_rope
from rlhf_modeling.skeleton import known_skeleton
from rlhf_modeling.stored import in_fp32
from rlhf_modeling.token_parts import TokenGroup, heads_refused

_groups: dict[int, Any] = {}
"""{ranks of a group: this rank's process group}; all roles of a process have the same ranks."""

PART = 6
"""Number of tokens of a part in the probe. It is small, so that a wrong first token of each part is detected."""


def check_sequence_parallel(spec: ModelSpec, ranks: int) -> None:
    """Raises CapabilityError if ``ranks`` does not divide the role's ranks or the model's attention heads, or if the
    model's code shows that its rows cannot be divided. A model that transformers cannot build from its config alone is
    checked when it is loaded (:func:`divide_rows`)."""
    if ranks == 1:
        return
    if spec.world_size % ranks:
        raise CapabilityError(
            f"sequence_parallel = {ranks} does not divide the {spec.world_size} ranks of role {spec.role.name!r}: set "
            f"placement.{spec.role.name}.ranks = {-(-spec.world_size // ranks) * ranks}, or another sequence_parallel "
            "(a role's own trainer section may set 1)"
        )
    if is_image_text(spec):
        raise CapabilityError(
            f"sequence_parallel = {ranks} divides rows of text, but role {spec.role.name!r} has an image-text model, "
            "which needs whole rows. Set sequence_parallel = 1."
        )
    settings = read_config(spec)
    model = " or ".join(settings.architectures or [spec.path])
    heads = getattr(settings.get_text_config(), "num_attention_heads", None)
    if isinstance(heads, int) and heads % ranks:
        raise CapabilityError(heads_refused(model, heads, ranks))
    if (module := known_skeleton(spec.path, spec.trust_remote_code)) is None:
        return
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        raise _refused(model, ranks, "it has recurrent or convolutional layers")
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):  # transformers has no other name
        raise _refused(model, ranks, "it has attention sinks, which packed attention does not support")
    if length_rope(module) is not None:
        raise _refused(
            model, ranks, "the frequencies of its rotary embedding depend on the length of the whole sequence"
        )
    try:
        use_packed_attention(module)
    except ModelError as cause:
        raise _refused(model, ranks, str(cause)) from cause


def _refused(name: str, ranks: int, reason: str) -> CapabilityError:
    return CapabilityError(
        f"sequence_parallel = {ranks}: a row of {name} cannot be divided over ranks ({reason}). Set "
        "sequence_parallel = 1 for this role, or use a model whose layers mix tokens in attention only."
    )


def divide_rows(model: LoadedModel, spec: ModelSpec, ranks: int, seconds: float) -> None:
    """Make groups of ``ranks`` ranks divide every row from now on; 1: change nothing. Every rank of the role must call
    this function, after its process group was created.

    Args:
        seconds: timeout of the group's collectives.
    """
    if ranks > 1:
        first = spec.rank // ranks * ranks
        if ranks not in _groups:  # every rank creates every group, in the same order, as torch requires
            for start in range(0, spec.world_size, ranks):
                group = dist.new_group(list(range(start, start + ranks)), timeout=timedelta(seconds=seconds))
                if start == first:
                    _groups[ranks] = group
        model.divided_over = TokenGroup(_groups[ranks], spec.rank - first, ranks)


# --------------------------------------------------------------------------------------------------- probe


def require_divisible(model: LoadedModel, ranks: int) -> None:
    """Raises CapabilityError if a row cannot be divided over ``ranks`` ranks: a part of its tokens, with the attention
    of the whole row, has other hidden states than in the whole row. Call this function after
    :func:`rlhf_modeling.probe.probe`, with weights that are whole or gathered by hooks. It does not communicate with
    other ranks."""
    if ranks == 1:
        return
    name = type(model.module).__name__
    if model.rope is not None:
        raise _refused(
            name, ranks, "the frequencies of its rotary embedding depend on the length of the whole sequence"
        )
    if model.layout == "alone" or model.boundaries:
        raise _refused(name, ranks, "; ".join(model.notes) or "its recurrent layers carry a state from token to token")
    with torch.no_grad(), quiet(), short_lengths(model.module), in_fp32(model.module):
        rows = probe_rows(model)
        ids_N, lens = torch.cat(rows), [len(ids) for ids in rows]
        position_N = torch.cat([torch.arange(n, device=ids_N.device) for n in lens])
        row = _WholeRow(lens)
        with attend_with(row):
            want_NH = _body(model, ids_N, position_N)
        if uneven := next((heads for heads in row.heads if heads % ranks), 0):
            raise CapabilityError(heads_refused(name, uneven, ranks))
        parts = [slice(start, start + PART) for start in range(0, len(ids_N), PART)]
        try:
            hidden = [_on_part(model, ids_N, position_N, row, part) for part in parts]
        except Exception as cause:  # any exception: the model's code is not ours
            raise _refused(name, ranks, f"{type(cause).__name__}: {cause}") from cause
        if wrong(torch.cat(hidden), want_NH):
            raise _refused(name, ranks, "parts of its layers other than attention depend on other tokens")


def _on_part(model: LoadedModel, ids_N: Tensor, position_N: Tensor, row: _WholeRow, part: slice) -> Tensor:
    with attend_with(_PartOfRow(row, part)):
        return _body(model, ids_N[part], position_N[part])


def _body(model: LoadedModel, ids_N: Tensor, position_N: Tensor) -> Tensor:
    out: Any = model.body(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)
    hidden_NH: Tensor = out.last_hidden_state[0].float()
    return hidden_NH


class _WholeRow(PackedAttention):
    """Stores the outputs of each layer's attention."""

    def __init__(self, lens: list[int]) -> None:
        super().__init__(lens)
        self.outputs: list[Tensor] = []
        self.heads: list[int] = []

    def __call__(self, module: Any, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        out, _ = super().__call__(module, q, *args, **options)
        self.outputs.append(out)
        self.heads.append(q.shape[1])
        return out, None


class _PartOfRow(PackedAttention):
    """Returns a part of the attention outputs of the whole row, layer by layer."""

    def __init__(self, row: _WholeRow, part: slice) -> None:
        super().__init__(row.lens)
        self.part, self._next = part, iter(row.outputs)

    def __call__(self, module: Any, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        return next(self._next)[:, self.part], None
