"""The trainer's log-probs of recorded samples with several weights, prompts and experts, for
:mod:`rlhf_runtime.jobs.mismatch`.

Shape suffixes: N tokens of a batch, A sampled tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Head
from torch import Tensor

from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.sections import SamplingSection
from rlhf_runtime.models.roles import Role

LIVE, BASE, ROUNDED = "live", "base", "rounded"
"""Weights: the trainer's weights, its weights without adapters, and weights to which the adapters were added in
bf16."""


@dataclass(frozen=True, slots=True)
class Pass:
    """How log-probs are computed."""

    version: int
    other_dtype: bool = False
    """bf16 instead of fp32, or the reverse."""
    unbatched: bool = False
    """Each sequence in its own micro-batch."""
    weights: str = LIVE
    rendered: bool = False
    """The prompts are rendered by the current template, instead of the recorded prompts."""
    rerouted: bool = False
    """Tokens are routed to the trainer's experts instead of the recorded experts, or the reverse."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Log-probs of the sampled tokens."""

    run: Path
    batches: Mapping[tuple[bool, bool], Batch]
    """{(rendered, rerouted): the samples}."""
    heads: Sequence[Head]
    exports: Mapping[int, Path]
    """{version: new folder for its model}: versions with the weights ROUNDED."""
    table: dict[Pass, Mapping[str, Tensor]] = field(default_factory=dict)
    """{pass: {name of a head: [A]}}."""

    def compute(self, role: Role, versions: Sequence[int], other_dtype: bool = False) -> None:
        """Compute the log-probs of versions, in ascending order. The role must hold the model that the run started
        from."""
        store = CheckpointStore(self.run)
        # Version 0 is in no checkpoint, so it is computed before another version is loaded.
        for version in versions:
            if version > 0:
                role.every("load", store.open(version).path / "roles" / "policy")
            self._add(role, Pass(version, other_dtype))
            if version in self.exports and not other_dtype:
                self.exports[version].mkdir()
                role.every("export", self.exports[version])
        if self.exports and not other_dtype:
            self._round(role)

    def compute_alone(self, role: Role, version: int) -> None:
        """Compute the log-probs of ``version``, with each sequence in its own micro-batch. The role must hold this
        version."""
        # A sequence longer than the budget has a micro-batch to itself.
        role.budget = 1
        self._add(role, Pass(version, unbatched=True))

    def compute_rounded(self, role: Role, version: int, other_dtype: bool) -> None:
        """Compute the log-probs of a role that holds the export of ``version``."""
        self._add(role, Pass(version, other_dtype, weights=ROUNDED))

    def _add(self, role: Role, key: Pass) -> None:
        for (rendered, rerouted), batch in self.batches.items():
            outputs = role.forward(batch, self.heads)
            sampled = {name: values_N[batch.tok["loss_mask"]] for name, values_N in outputs.items()}
            self.table[replace(key, rendered=rendered, rerouted=rerouted)] = sampled

    def _round(self, role: Role) -> None:
        """Change the exports as an engine with a bf16 model does. The contribution of the adapters is the difference of
        the two models, each rounded to bf16. The rounding error of the base itself is not counted."""
        with TemporaryDirectory(dir=next(iter(self.exports.values())).parent) as base:
            role.every("export", Path(base), BASE)
            for folder in self.exports.values():
                for path in sorted(folder.glob("*.safetensors")):
                    _add_rounded(path, Path(base) / path.name)


def _add_rounded(path: Path, base: Path) -> None:
    """Replace each tensor in the file ``path`` by the tensor of ``base`` plus the difference of both in bf16."""
    from safetensors.torch import load_file, save_file

    tensors, base_tensors = load_file(path), load_file(base)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            base_tensor = base_tensors[name].float()
            tensors[name] = (base_tensor + tensor.bfloat16().float() - base_tensor.bfloat16().float()).to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def logprob_head(sampling: SamplingSection, plain: bool, cut: bool) -> Head:
    """Log-probs of the sampled tokens.

    Args:
        plain: whether to compute at temperature 1.
        cut: whether to renormalise over the tokens that ``[sampling]`` leaves.
    """
    s = sampling
    constants = {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    columns = ("temperature",) if plain else ()
    return Head(f"lp{int(plain)}{int(cut)}", partial(_logprobs, cut=cut), columns=columns, constants=constants)


def _logprobs(
    logits_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Mapping[str, Any], cut: bool
) -> Tensor:
    # The trainer has divided the logits by the temperature.
    if "temperature" in columns:
        logits_CV = logits_CV * columns["temperature"][:, None]
    if cut:
        # The sampled token was left in, but at the edge of the cut rounding could take it out here.
        stays_CV = _stays(logits_CV, **constants).scatter(1, ids_C[:, None], True)
        logits_CV = logits_CV.masked_fill(~stays_CV, -math.inf)
    return logits_CV.log_softmax(-1).gather(1, ids_C[:, None])[:, 0]


def _stays(logits_CV: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """bool [C, V]: the tokens from which a generator draws. top_p is a share of the tokens that top_k leaves."""
    sorted_CV = logits_CV.sort(-1, descending=True).values
    if top_k:
        sorted_CV[:, top_k:] = -math.inf
    # The probability of all tokens before each one, so that the token at which the sum reaches top_p stays.
    before_CV = sorted_CV.softmax(-1).cumsum(-1).roll(1, -1)
    before_CV[:, 0] = 0.0
    count_C = ((before_CV < top_p) & (sorted_CV > -math.inf)).sum(-1).clamp(min=1)
    threshold_C1 = sorted_CV.gather(1, count_C[:, None] - 1)
    if min_p:
        threshold_C1 = torch.maximum(threshold_C1, sorted_CV[:, :1] + math.log(min_p))
    return logits_CV >= threshold_C1
