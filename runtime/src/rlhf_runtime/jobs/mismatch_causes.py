"""Causes of a gap between generator and trainer, for :mod:`rlhf_runtime.jobs.mismatch`. Each cause is tried by changes
of the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.jobs.mismatch_passes import LIVE, ROUNDED

STALE, ARITHMETIC, CUT, TEMPERATURE = "stale weights", "arithmetic", "cut distribution", "temperature"
TEMPLATE, ENDS, ADAPTERS, ROUTING = "template", "end tokens", "adapters", "experts"
CAUSES = (STALE, ARITHMETIC, CUT, TEMPERATURE, TEMPLATE, ENDS, ADAPTERS, ROUTING)
EARLIER = (1, 2)
"""Numbers of missed syncs to try. An engine may have missed them silently."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How the trainer's log-probs are computed, and which tokens are compared."""

    other_dtype: bool = False
    """In bf16 instead of fp32, or the reverse."""
    unbatched: bool = False
    """Each sequence in its own micro-batch."""
    plain: bool = False
    """At temperature 1."""
    cut: bool = False
    """Renormalised over the tokens that ``[sampling]`` leaves."""
    rendered: bool = False
    """With the prompts that the template renders now."""
    without_ends: bool = False
    """Tokens that end a turn are left out."""
    by_token: bool = False
    """With the weights that sampled the token, instead of the step's weights."""
    earlier: int = 0
    """With weights that are this many versions older."""
    first: bool = False
    """With the weights that the run started from. New adapters then add nothing to them."""
    weights: str = LIVE
    rerouted: bool = False
    """With the recorded experts instead of the trainer's experts, or the reverse if the trainer replays records."""


@dataclass(frozen=True, slots=True)
class Change:
    """One way in which a cause may act."""

    values: Mapping[str, Any]
    """{field of :class:`Setting`: value}."""
    name: str = ""
    """Empty if the cause can act in only one way."""


OTHER_DTYPE = Change({"other_dtype": True})
COMPOSITION = Change({"unbatched": True}, "batch composition")


@dataclass(frozen=True, slots=True)
class Cause:
    """The changes to try for a cause."""

    changes: Sequence[Change]
    """Empty: the cause cannot be examined."""
    note: str = ""

    @staticmethod
    def of(examined: bool, setting: str, note: str) -> Cause:
        """A cause with one change, which sets the field ``setting``."""
        return Cause((Change({setting: True}),) if examined else (), note)


def stale(shares: Mapping[int, float], version: int, checkpoints: Sequence[int]) -> Cause:
    """The cause that recorded versions of weights differ from the step's version.

    Args:
        shares: {version: share of the tokens}.
        version: version of the weights with which the step started.
        checkpoints: versions whose weights can be loaded.
    """
    other_versions = sorted(set(shares) - {version})
    if not other_versions:
        return Cause((), f"all tokens are of version {version}, the version of the step")
    note = (
        f"{1 - shares.get(version, 0.0):.0%} of the tokens are of other versions, {other_versions}; each is compared "
        "with the weights of its version"
    )
    if unkept := [v for v in other_versions if v not in checkpoints]:
        note += f"; tokens of the versions {unkept} are left out, because their weights are not kept"
    return Cause((Change({"by_token": True}, "as recorded"),) if set(shares) & set(checkpoints) else (), note)


def older_weights(
    causes: Mapping[str, Cause], earlier: Sequence[int], adapters: bool, merged: bool
) -> dict[str, Cause]:
    """The causes with weights that are older than recorded, and with other adapters.

    Args:
        earlier: numbers of versions.
        adapters: whether only adapters are trained, so that older weights are older adapters.
        merged: whether the generator gets a model to which the adapters were added.
    """
    names = {n: f"{n} {'version' if n == 1 else 'versions'} older than recorded" for n in earlier}
    if not adapters:
        older = [Change({"by_token": True, "earlier": n}, name) for n, name in names.items()]
        changes = (*causes[STALE].changes, *older)
        return {**causes, STALE: Cause(changes, causes[STALE].note), ADAPTERS: Cause((), "the run trains no adapters")}
    changes = (Change({"first": True}, "absent"), *(Change({"earlier": n}, name) for n, name in names.items()))
    return {
        **causes,
        ADAPTERS: Cause((*changes, Change({"weights": ROUNDED}, "merged in bf16")) if merged else changes),
    }


def arithmetic(dtype: str, examined: bool) -> Cause:
    """``dtype``: dtype of the trainer. ``examined``: whether the trainer can compute in the other dtype."""
    if not examined:
        return Cause((COMPOSITION,), "the weights are stored in bf16")
    return Cause((replace(OTHER_DTYPE, name="fp32" if dtype == "bf16" else "bf16"), COMPOSITION))


def template(prompts: int, differing: int) -> Cause:
    note = "the recorded prompts equal what the template renders now, or it cannot render them again"
    if differing:
        note = f"{differing} of {prompts} prompts differ from what the template renders now, and are replaced"
    return Cause.of(differing > 0, "rendered", note)


def of_sampling(config: RunFile, heated: bool, ends: int) -> dict[str, Cause]:
    """``heated``: whether a token was sampled at a temperature other than 1. ``ends``: number of tokens that end a
    turn."""
    s = config.sampling
    cut = (s.top_p, s.top_k, s.min_p) != (1.0, 0, 0.0)
    options = f"top_p = {s.top_p:g}, top_k = {s.top_k}, min_p = {s.min_p:g}"
    cut_note = f"log-probs over the tokens that {options} keep" if cut else "the run samples from all tokens"
    heat_note = "log-probs at temperature 1" if heated else "all tokens were sampled at temperature 1"
    ends_note = f"the {ends} tokens that end a turn are left out" if ends else "no sampled token ends a turn"
    return {
        CUT: Cause.of(cut, "cut", cut_note),
        TEMPERATURE: Cause.of(heated, "plain", heat_note),
        ENDS: Cause.of(ends > 0, "without_ends", ends_note),
    }


def routing(config: RunFile, batch: Batch) -> tuple[RunFile, bool, Cause]:
    """(run file with which the trainer can replay the experts of the samples, whether the run's trainer replays them,
    the cause that it should or should not)."""
    if EXPERTS not in batch.tok:
        note = "no sample records its experts; trainer.router_replay records them for a mixture of experts"
        return config, False, Cause((), note)
    options = {**config.trainer.options, **config.policy.trainer}
    if options.get("router_replay"):
        note = "the experts that the trainer chooses, instead of the recorded experts"
        return config, True, Cause.of(True, "rerouted", note)
    policy = config.policy.model_copy(update={"trainer": {**options, "router_replay": True}})
    note = "the recorded experts, instead of the experts that the trainer chooses"
    return config.model_copy(update={"policy": policy}), False, Cause.of(True, "rerouted", note)
