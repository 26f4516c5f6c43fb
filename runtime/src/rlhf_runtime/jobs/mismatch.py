"""The gap between what a run's generator and its trainer think of the same recorded tokens: `rlhf doctor RUN`.

Each possible cause is one change of how the trainer's log-probs are computed, or of the tokens that are compared. It is
named if the gap is small with its change and is not without it. All sets of changes are tried, so causes that act
together are named together. The gap is the mean of ``|generator - trainer|`` over tokens, in nats.

Shape suffixes: N tokens of a batch, A sampled tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import ConfigError
from rlhf.ops.batch import Batch
from rlhf.ops.trajectories import assemble
from rlhf.plugins import Plugins
from rlhf.types import Group, Head, Row, Trajectory
from rlhf.types.arrays import int_array
from torch import Tensor

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.checkpoint.saved_groups import read_groups, recorded
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.template import Template
from rlhf_runtime.jobs.export import loaded_policy
from rlhf_runtime.models.roles import Role
from rlhf_runtime.report.recorded_samples import recorded_steps

STALE, ARITHMETIC, CUT, TEMPERATURE = "stale weights", "arithmetic", "cut distribution", "temperature"
TEMPLATE, ENDS = "template", "end tokens"
CAUSES = (STALE, ARITHMETIC, CUT, TEMPERATURE, TEMPLATE, ENDS)
ROUNDING = 1e-5
"""A gap below this is rounding in fp32 [nats]."""
SMALL = 1.5
"""A set of causes explains the gap if what it leaves is at most this many times what the best set leaves."""
RECORDED, RENDERED = "recorded", "rendered"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One cause alone."""

    cause: str
    gap: float | None
    """The gap that is left with its change [nats]; None if it was not examined."""
    note: str


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens at the positions ``first`` to ``last`` of their context."""

    first: int
    last: int
    tokens: int
    gap: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The result of all experiments."""

    step: int
    samples: int
    tokens: int
    dtype: str
    """The trainer's arithmetic."""
    gap: float
    kl: float
    """As ``policy/kl_generator``."""
    reproduced: float | None
    """Mean difference between the trainer's log-probs now and those that the run recorded; None if it recorded none."""
    composition: float
    """Mean difference between a sequence computed alone and packed with others."""
    rounding: float | None
    """Mean difference between bf16 and fp32; None if it was not examined."""
    bins: Sequence[Bin]
    experiments: Sequence[Experiment]
    causes: Sequence[str]
    left: float
    """The gap with the changes of all ``causes``."""
    unkept: Sequence[int]
    """Versions of the weights that sampled some of the tokens and are not kept."""

    @property
    def floor(self) -> float:
        """A gap up to this is explained by rounding alone."""
        return max(ROUNDING, 2 * self.composition)


def weights_kept(run: Path) -> list[int]:
    """Versions of the weights that can be loaded: 0 is the model that the run started from."""
    return [0, *(checkpoint.step for checkpoint in CheckpointStore(run).complete())]


def examine(
    config: RunFile, plugins: Plugins, run: Path, file: Path, step: int, most: int, note: Callable[[str], None]
) -> Mismatch:
    """Compare the log-probs of the samples of ``step`` in ``file``.

    Args:
        config: the run's own run file.
        most: number of samples that are compared, evenly spaced in the file.
        note: shows remarks of the trainer.

    Raises ConfigError or CheckpointError where there is nothing to compare, or the weights of the step are not kept.
    """
    checkpoints, version = weights_kept(run), step - 1
    if version not in checkpoints:
        steps = [step for step in recorded_steps(run) if step - 1 in checkpoints]
        raise ConfigError(
            f"the weights that step {step} started with are not kept in {run}. Allowed here: --step "
            f"{', '.join(map(str, steps)) or '(none)'}. Run with --checkpoint.every 1 to keep those of the last steps."
        )
    trajectories = _usable(file, most)
    samples = _Samples.of(trajectories)
    others = sorted(set(samples.version_A.tolist()) - {version})
    versions = [version, *(v for v in others if v in checkpoints)]
    changes = {STALE: _stale(samples, version, others, versions), **_sampling_changes(config, samples)}
    heads = [
        _head(config, plain, cut)
        for plain in ((False, True) if changes[TEMPERATURE][0] else (False,))
        for cut in ((False, True) if changes[CUT][0] else (False,))
    ]
    with loaded_policy(config, plugins, run) as (role, _, template):
        for remark in role.facts.notes:
            note(remark)
        dtype = role.facts.dtype
        batches, differing = _batches(trajectories, samples.batch, file, template)
        tables = {False: _passes(role, run, versions, batches, heads)}
        role.budget = 1  # each sequence in a micro-batch of its own; the weights are those of the newest version
        alone_A = _sampled(samples.batch, role.forward(samples.batch, heads[:1]))["lp00"]
        composition = float((alone_A - tables[False][max(versions), RECORDED]["lp00"]).abs().mean())
    rounding, arithmetic_note = None, "the weights are stored in bf16"
    if config.policy.storage != "bf16":
        other = "fp32" if dtype == "bf16" else "bf16"
        changed = config.model_copy(update={"policy": config.policy.model_copy(update={"dtype": other})})
        with loaded_policy(changed, plugins, run) as (role, _, _):
            tables[True] = _passes(role, run, versions, batches, heads)
        difference_A = tables[True][version, RECORDED]["lp00"] - tables[False][version, RECORDED]["lp00"]
        rounding = float(difference_A.abs().mean())
        arithmetic_note = f"the trainer computes in {other} in place of {dtype}"
    changes[ARITHMETIC] = (True in tables, arithmetic_note)
    changes[TEMPLATE] = _template(len(trajectories), differing)
    examined = [cause for cause in CAUSES if changes[cause][0]]
    residual = _Residual(samples, tables, version, versions)
    gaps = {chosen: residual(chosen) for n in range(len(examined) + 1) for chosen in combinations(examined, n)}
    now_A = tables[False][version, RECORDED]["lp00"]
    floor = max(ROUNDING, 2 * composition)
    causes = _explanation(gaps, floor)
    left = gaps[causes]
    if ARITHMETIC not in causes and rounding is not None and floor < left <= 2 * rounding:
        causes = (*causes, ARITHMETIC)  # of that size, though the engine rounds elsewhere than the trainer does
    gap_A = samples.generator_A - now_A
    return Mismatch(
        step=step,
        samples=len(trajectories),
        tokens=len(gap_A),
        dtype=dtype,
        gap=gaps[()],
        kl=float((torch.exp(-gap_A) - 1 + gap_A).mean()),
        reproduced=_reproduced(file, trajectories, now_A),
        composition=composition,
        rounding=rounding,
        bins=list(_bins(samples.batch, gap_A.abs())),
        experiments=[Experiment(c, gaps[(c,)] if c in examined else None, changes[c][1]) for c in CAUSES],
        causes=causes,
        left=left,
        unkept=[other for other in others if other not in checkpoints],
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    """The sampled tokens, in the order of the batch."""

    batch: Batch
    generator_A: Tensor
    version_A: Tensor
    end_A: Tensor = field(repr=False)

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> _Samples:
        batch = _assembled(trajectories)
        versions: list[int] = []
        ends: list[bool] = []
        for turn in (turn for t in trajectories for turn in t.turns if turn.sampled):
            starts = [*(first for first, _ in turn.versions[1:]), len(turn.ids)]
            for (first, version), last in zip(turn.versions, starts, strict=True):
                versions += [version] * (last - first)
            ends += [False] * (len(turn.ids) - 1) + [turn.finish == "stop"] if turn.ids else []
        generator_A = batch.tok["gen_logprobs"][batch.tok["loss_mask"]]
        return _Samples(batch, generator_A, torch.tensor(versions), torch.tensor(ends))


_Table = Mapping[tuple[int, str], Mapping[str, Tensor]]
"""{(version, kind of prompt): {head: [A]}}"""


@dataclass(frozen=True, slots=True)
class _Residual:
    """The gap that is left with the changes of some causes."""

    samples: _Samples
    tables: Mapping[bool, _Table]
    version: int
    versions: Sequence[int]

    def __call__(self, causes: Sequence[str]) -> float:
        table = self.tables[ARITHMETIC in causes]
        head = f"lp{int(TEMPERATURE in causes)}{int(CUT in causes)}"
        prompts = RENDERED if TEMPLATE in causes else RECORDED
        own_A = self.samples.version_A
        trainer_A = table[self.version, prompts][head]
        keep_A = torch.ones_like(own_A, dtype=torch.bool)
        if STALE in causes:
            keep_A = torch.isin(own_A, torch.tensor(self.versions))
            for version in self.versions:
                trainer_A = torch.where(own_A == version, table[version, prompts][head], trainer_A)
        if ENDS in causes:
            keep_A = keep_A & ~self.samples.end_A
        gap_A = (self.samples.generator_A - trainer_A).abs()[keep_A]
        return float(gap_A.mean()) if len(gap_A) else math.inf


def _stale(samples: _Samples, version: int, others: Sequence[int], versions: Sequence[int]) -> tuple[bool, str]:
    """Whether stale weights can be examined, and how, or why not."""
    if not others:
        return False, f"all tokens are of version {version}, that of the step"
    share = float((samples.version_A != version).float().mean())
    note = f"{share:.0%} of the tokens are of the versions {list(others)}; each is compared with its own"
    if unkept := [other for other in others if other not in versions]:
        note += f"; those of {unkept}, whose weights are not kept, are left out"
    return bool(torch.isin(samples.version_A, torch.tensor(versions)).any()), note


def _template(prompts: int, differing: int) -> tuple[bool, str]:
    if differing:
        return True, f"{differing} of {prompts} prompts differ from what the template renders now, and are replaced"
    return False, "the recorded prompts are those that the template renders now, or it cannot render them again"


def _sampling_changes(config: RunFile, samples: _Samples) -> dict[str, tuple[bool, str]]:
    s, ends = config.sampling, int(samples.end_A.sum())
    cut = (s.top_p, s.top_k, s.min_p) != (1.0, 0, 0.0)
    heated = bool((samples.batch.tok["temperature"] != 1).any())
    options = f"top_p = {s.top_p:g}, top_k = {s.top_k}, min_p = {s.min_p:g}"
    return {
        CUT: (cut, f"log-probs over the tokens that {options} leave" if cut else "the run samples from all tokens"),
        TEMPERATURE: (heated, "log-probs at temperature 1" if heated else "all tokens were sampled at temperature 1"),
        ENDS: (ends > 0, f"the {ends} tokens that end a turn are left out" if ends else "no sampled token ends a turn"),
    }


def _explanation(gaps: Mapping[tuple[str, ...], float], floor: float) -> tuple[str, ...]:
    """The smallest set of causes that leaves about as little as the best one; of equally many, the one that leaves
    least."""
    enough = max(floor, SMALL * min(gaps.values()))
    return min((c for c, gap in gaps.items() if gap <= enough), key=lambda c: (len(c), gaps[c]))


def _usable(file: Path, most: int) -> list[Trajectory]:
    """Samples with log-probs of the generator and versions of its weights."""
    groups = read_groups(file, lambda source, index: Row({}, source, index))
    usable = []
    for trajectory in (t for group in groups for t in group.trajectories):
        turns = [turn for turn in trajectory.turns if turn.sampled]
        whole = all(turn.logprobs is not None and turn.versions and not turn.given for turn in turns if turn.ids)
        if trajectory.status != "failed" and trajectory.sampled_tokens and whole:
            usable.append(trajectory)
    if not usable:
        raise ConfigError(
            f"no sample in {file} has log-probs of the generator: the generator reports none, all samples failed, or "
            "their answers come from the data. There is nothing to compare."
        )
    return usable[:: math.ceil(len(usable) / most)]


def _assembled(trajectories: Sequence[Trajectory]) -> Batch:
    groups = [Group(t.row, number, [t]) for number, t in enumerate(trajectories)]
    batch = assemble(groups, scored=False)
    assert batch is not None, "every sample has a sampled token"
    return batch


def _batches(
    trajectories: Sequence[Trajectory], batch: Batch, file: Path, template: Template
) -> tuple[dict[str, Batch], int]:
    """The batch as it was recorded and, where that is something else, with prompts as the template renders them now;
    and the number of prompts that differ."""
    prompts = {tuple(line["index"]): line.get("prompt") for _, line in recorded(file) if line["sample"] is not None}
    rendered, differing = [], 0
    for trajectory in trajectories:
        prompt, turns = prompts.get(trajectory.index), trajectory.turns
        alone = not turns[0].sampled and turns[1].sampled and not turns[0].images
        ids = _prompt_ids(template, prompt) if prompt is not None and alone else None
        if ids and ids != list(turns[0].ids):
            differing += 1
            trajectory = replace(trajectory, turns=[replace(turns[0], ids=int_array(ids, "ids")), *turns[1:]])
        rendered.append(trajectory)
    batches = {RECORDED: batch}
    return ({**batches, RENDERED: _assembled(rendered)} if differing else batches), differing


def _prompt_ids(template: Template, prompt: Any) -> list[int] | None:
    """The tokens of a recorded prompt; None if it is of the other kind, text or messages, than the template renders."""
    if isinstance(prompt, str) != (template.chat is None):
        return None
    if template.chat is not None:
        return template.tokens.ids(template.chat.text(prompt, answer=True))
    ids = template.tokens.ids(prompt)
    return [*template.tokens.begin(ids), *ids]


def _passes(
    role: Role, run: Path, versions: Sequence[int], batches: Mapping[str, Batch], heads: Sequence[Head]
) -> dict[tuple[int, str], dict[str, Tensor]]:
    """The log-probs of every version and kind of prompt. The role holds the model that the run started from."""
    store = CheckpointStore(run)
    table = {}
    for version in sorted(versions):
        if version > 0:
            role.every("load", store.open(version).path / "roles" / "policy")
        for name, batch in batches.items():
            table[version, name] = _sampled(batch, role.forward(batch, heads))
    return table


def _sampled(batch: Batch, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values_N[batch.tok["loss_mask"]] for name, values_N in outputs.items()}


def _head(config: RunFile, plain: bool, cut: bool) -> Head:
    """Log-probs of the sampled tokens.

    Args:
        plain: at temperature 1.
        cut: renormalised over the tokens that ``[sampling]`` leaves.
    """
    s = config.sampling
    constants = {"top_p": s.top_p, "top_k": s.top_k, "min_p": s.min_p}
    columns = ("temperature",) if plain else ()
    return Head(f"lp{int(plain)}{int(cut)}", partial(_logprobs, cut=cut), columns=columns, constants=constants)


def _logprobs(
    logits_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Mapping[str, Any], cut: bool
) -> Tensor:
    if "temperature" in columns:
        logits_CV = logits_CV * columns["temperature"][:, None]
    if cut:
        stays_CV = _stays(logits_CV, **constants).scatter(1, ids_C[:, None], True)
        logits_CV = logits_CV.masked_fill(~stays_CV, -math.inf)
    return logits_CV.log_softmax(-1).gather(1, ids_C[:, None])[:, 0]


def _stays(logits_CV: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """bool [C, V]: the tokens that a generator draws from; top_p is a share of what top_k leaves."""
    sorted_CV = logits_CV.sort(-1, descending=True).values
    if top_k:
        sorted_CV[:, top_k:] = -math.inf
    before_CV = sorted_CV.softmax(-1).cumsum(-1).roll(1, -1)
    before_CV[:, 0] = 0.0
    count_C = ((before_CV < top_p) & (sorted_CV > -math.inf)).sum(-1).clamp(min=1)
    threshold_C1 = sorted_CV.gather(1, count_C[:, None] - 1)
    if min_p:
        threshold_C1 = torch.maximum(threshold_C1, sorted_CV[:, :1] + math.log(min_p))
    return logits_CV >= threshold_C1


def _bins(batch: Batch, gap_A: Tensor) -> Iterator[Bin]:
    """By position in the context: 0 to 15, 16 to 63, 64 to 255, ..."""
    position_A = batch.position_N[batch.tok["loss_mask"]]
    first, last = 0, 15
    while first <= int(position_A.max()):
        inside_A = (position_A >= first) & (position_A <= last)
        if inside_A.any():
            yield Bin(first, last, int(inside_A.sum()), float(gap_A[inside_A].mean()))
        first, last = last + 1, 4 * last + 3


def _reproduced(file: Path, trajectories: Sequence[Trajectory], now_A: Tensor) -> float | None:
    """Mean difference between the trainer's log-probs now and those that the step recorded."""
    values = {
        tuple(line["index"]): line.get("token_values") or {} for _, line in recorded(file) if line["sample"] is not None
    }
    differences, start = [], 0
    for trajectory in trajectories:
        end = start + trajectory.sampled_tokens
        then = values[trajectory.index].get("policy/logprobs")
        if then is not None:  # one value stands for all where they are equal
            differences.append((now_A[start:end] - torch.tensor(list(then))).abs())
        start = end
    return float(torch.cat(differences).mean()) if differences else None
