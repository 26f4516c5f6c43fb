"""`rlhf doctor RUN`: the gap between the log-probs of a run's generator and trainer for the same recorded tokens.

Each possible cause has one or several changes of how the trainer's log-probs are computed, or of the tokens that are
compared. A cause is named if the gap is small with its change and not small without it. All sets of causes are tried,
so causes that act together are named together. The gap is the mean of ``|generator - trainer|`` over tokens, in nats.

Shape suffixes: N tokens of a batch, A sampled tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rlhf.errors import ConfigError
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS
from rlhf.ops.sample_values import group_number
from rlhf.ops.trajectories import assemble
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory
from rlhf.types.arrays import int_array
from torch import Tensor

from rlhf_runtime.checkpoint.saved_groups import read_groups, recorded, unit_of
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.components import select
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.template import Template
from rlhf_runtime.jobs.export import loaded_policy
from rlhf_runtime.jobs.mismatch_causes import (
    ARITHMETIC,
    CAUSES,
    COMPOSITION,
    CUT,
    EARLIER,
    OTHER_DTYPE,
    ROUTING,
    STALE,
    TEMPERATURE,
    TEMPLATE,
    Cause,
    Change,
    Setting,
    arithmetic,
    of_sampling,
    older_weights,
    routing,
    stale,
    template,
)
from rlhf_runtime.jobs.mismatch_passes import BASE, Pass, Passes, logprob_head
from rlhf_runtime.output.folder_lock import LOCK, FolderLock
from rlhf_runtime.report.recorded_samples import recorded_steps

SCRATCH = ".doctor-"
"""Prefix of the names of temporary folders in a run's folder."""
ROUNDING = 1e-5
"""A gap below this is rounding in fp32 [nats]."""
SIZE_RATIO = 3
"""A gap counts as a difference of arithmetic if it is at most this many times as large as that difference."""
SMALL = 1.5
"""A set of causes explains the gap if the remaining gap is at most this many times the remaining gap of the best
set."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One cause alone."""

    cause: str
    gap: float | None
    """The remaining gap with its best change [nats]; None if the cause was not examined."""
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
    floor: float
    """A gap up to this is explained by rounding alone."""
    bins: Sequence[Bin]
    experiments: Sequence[Experiment]
    causes: Sequence[str]
    ways: Mapping[str, str]
    """{cause: how it acts}, for ``causes`` that can act in several ways."""
    left: float
    """The gap with the changes of all ``causes``."""
    unkept: Sequence[int]
    """Versions of weights that sampled some of the tokens and were not kept."""
    approximation: str
    """The generator's option that makes it compute approximately (``Generator.approximation``). It is not tried as a
    cause."""


def weights_kept(run: Path) -> list[int]:
    """Versions of the weights that can be loaded: 0 is the model that the run started from."""
    return [0, *(checkpoint.step for checkpoint in CheckpointStore(run).complete())]


def examine(
    config: RunFile, plugins: Plugins, run: Path, file: Path, step: int, max_samples: int, note: Callable[[str], None]
) -> Mismatch:
    """Compare the log-probs of the samples of ``step`` in ``file``.

    Args:
        config: the run file of the run.
        max_samples: largest number of samples that are compared, evenly spaced in the file.
        note: shows messages of the trainer.

    Raises ConfigError or CheckpointError if there is nothing to compare, or the weights of the step are not kept.
    """
    checkpoints, version = weights_kept(run), step - 1
    if version not in checkpoints:
        steps = [step for step in recorded_steps(run) if step - 1 in checkpoints]
        raise ConfigError(
            f"the weights that step {step} started with are not kept in {run}. Allowed here: "
            f"--step {', '.join(map(str, steps)) or '(none)'}. Run with --checkpoint.every 1 to keep the "
            "weights of the last steps."
        )
    samples = _Samples.read(file, max_samples)
    generator = select(plugins, "generator", config.generator)
    causes, passes, dtype = _compute(config, plugins, run, samples, version, note)
    residual = _Residual(samples, passes.table, version)
    candidates = [cause for cause in CAUSES if causes[cause].changes]
    best = {
        chosen: min(
            ((residual(changes), changes) for changes in product(*(causes[c].changes for c in chosen))),
            key=lambda pair: pair[0],
        )
        for n in range(len(candidates) + 1)
        for chosen in combinations(candidates, n)
    }
    composition = residual.difference((), COMPOSITION)
    rounding = residual.difference((), OTHER_DTYPE) if Pass(version, other_dtype=True) in passes.table else None
    floor = _floor(composition, rounding)
    chosen = _explanation({key: gap for key, (gap, _) in best.items()}, floor)
    left, changes = best[chosen]
    names = chosen
    other = rounding is not None and residual.difference(changes, OTHER_DTYPE)
    if ARITHMETIC not in chosen and floor < left <= SIZE_RATIO * other:
        names = (*chosen, ARITHMETIC)  # of that size, although the engine rounds at other places than the trainer
    trainer_A, _ = residual.trainer(Setting())
    gap_A = samples.generator_A - trainer_A
    return Mismatch(
        step=step,
        samples=len(samples.trajectories),
        tokens=len(gap_A),
        dtype=dtype,
        gap=best[()][0],
        kl=float((torch.exp(-gap_A) - 1 + gap_A).mean()),
        reproduced=_recorded_gap(samples, trainer_A),
        composition=composition,
        rounding=rounding,
        floor=floor,
        bins=list(_bins(samples.batch, gap_A.abs())),
        experiments=[_experiment(name, causes[name], residual) for name in CAUSES],
        causes=names,
        ways={cause: change.name for cause, change in zip(chosen, changes, strict=True) if change.name},
        left=left,
        unkept=sorted(set(samples.version_A.tolist()) - set(checkpoints)),
        approximation=generator.resolved.cls.approximation(generator.config),
    )


def _compute(
    config: RunFile,
    plugins: Plugins,
    run: Path,
    samples: _Samples,
    version: int,
    note: Callable[[str], None],
) -> tuple[Mapping[str, Cause], Passes, str]:
    """The changes to try for every cause, the log-probs that they need, and the trainer's arithmetic."""
    checkpoints, every = weights_kept(run), {version, *samples.version_A.tolist()}
    versions = sorted(every & set(checkpoints))
    earlier = [n for n in EARLIER if n <= version and all(max(v - n, 0) in checkpoints for v in every)]
    all_versions = sorted({*versions, *(max(v - n, 0) for v in versions for n in earlier)})
    config, replays, experts = routing(config, samples.batch)
    heated = bool((samples.batch.tok["temperature"] != 1).any())
    causes = {
        STALE: stale(samples.shares, version, checkpoints),
        **of_sampling(config, heated, int(samples.end_A.sum())),
        ROUTING: experts,
    }
    heads = [
        logprob_head(config.sampling, plain, cut)
        for plain in ((False, True) if causes[TEMPERATURE].changes else (False,))
        for cut in ((False, True) if causes[CUT].changes else (False,))
    ]
    with ExitStack() as files:
        with loaded_policy(config, plugins, run) as (role, _, prompts):
            for remark in role.facts.notes:
                note(remark)
            dtype, adapters = role.facts.dtype, BASE in role.facts.views
            batches, differing = _batches(samples, prompts, replays)
            merged = adapters and config.sync.adapters == "merged" and role.facts.experts is None
            exports = {}
            if merged:
                folder = files.enter_context(_scratch(run))
                exports = {version: folder / str(version) for version in versions}
            all_versions = sorted({*all_versions, *([0] if adapters else [])})
            passes = Passes(run, batches, heads, exports)
            passes.compute(role, all_versions)
            passes.compute_alone(role, version)
        dtypes = {False: config}
        if config.policy.storage != "bf16":
            policy = config.policy.model_copy(update={"dtype": "fp32" if dtype == "bf16" else "bf16"})
            dtypes[True] = config.model_copy(update={"policy": policy})
            with loaded_policy(dtypes[True], plugins, run) as (role, _, _):
                passes.compute(role, all_versions, other_dtype=True)
        for (exported, path), (other_dtype, run_config) in product(exports.items(), dtypes.items()):
            with loaded_policy(run_config, plugins, run, path) as (role, _, _):
                passes.compute_rounded(role, exported, other_dtype)
    causes |= {TEMPLATE: template(len(samples.trajectories), differing), ARITHMETIC: arithmetic(dtype, len(dtypes) > 1)}
    if adapters:  # version 0 has no adapters
        earlier = [n for n in earlier if n < version]
    return older_weights(causes, earlier, adapters, merged), passes, dtype


@contextmanager
def _scratch(run: Path) -> Iterator[Path]:
    """A temporary folder in ``run``, whose disk has room for models. Temporary folders of killed processes are deleted
    first."""
    for file in run.glob(f"{SCRATCH}*/{LOCK}"):
        if not FolderLock.is_held(file.parent):
            shutil.rmtree(file.parent, ignore_errors=True)
    with TemporaryDirectory(prefix=SCRATCH, dir=run) as name:
        lock = FolderLock(Path(name))
        try:
            yield Path(name)
        finally:
            lock.release()


@dataclass(frozen=True, slots=True)
class _Samples:
    """Recorded samples, and their sampled tokens in the order of the batch."""

    trajectories: Sequence[Trajectory]
    lines: Sequence[Mapping[str, Any]]
    """The recorded values of each sample."""
    batch: Batch
    generator_A: Tensor
    version_A: Tensor
    end_A: Tensor = field(repr=False)

    @property
    def shares(self) -> dict[int, float]:
        """{version: share of the tokens}."""
        versions, counts = self.version_A.unique(return_counts=True)
        return dict(zip(versions.tolist(), (counts / len(self.version_A)).tolist(), strict=True))

    @staticmethod
    def read(file: Path, max_samples: int) -> _Samples:
        """Samples with log-probs of the generator and versions of its weights, evenly spaced in the file."""
        groups = read_groups(file, lambda source, index: Row({}, source, index))
        usable = []
        for trajectory in (t for group in groups for t in group.trajectories):
            turns = [turn for turn in trajectory.turns if turn.sampled]
            is_usable = all(
                turn.logprobs is not None and turn.versions and not turn.is_demonstration for turn in turns if turn.ids
            )
            if trajectory.status != "failed" and trajectory.sampled_tokens and is_usable:
                usable.append(trajectory)
        if not usable:
            raise ConfigError(
                f"no sample in {file} has log-probs of the generator: the generator reports none, all samples failed, "
                "or their answers come from the data. There is nothing to compare."
            )
        trajectories = usable[:: math.ceil(len(usable) / max_samples)]
        lines_of_units = {unit_of(line): line for _, line in recorded(file) if line["sample"] is not None}
        lines = [lines_of_units[group_number(t.index[0], t.agent), t.index[1]] for t in trajectories]
        batch = _assemble(trajectories)
        versions: list[int] = []
        ends: list[bool] = []
        for turn in (turn for t in trajectories for turn in t.turns if turn.sampled and turn.ids):
            starts = [*(first for first, _ in turn.versions[1:]), len(turn.ids)]
            for (first, version), last in zip(turn.versions, starts, strict=True):
                versions += [version] * (last - first)
            ends += [False] * (len(turn.ids) - 1) + [turn.finish == "stop"]
        generator_A = batch.tok["gen_logprobs"][batch.tok["loss_mask"]]
        version_A, end_A = torch.tensor(versions), torch.tensor(ends)
        return _Samples(trajectories, lines, batch, generator_A, version_A, end_A)


@dataclass(frozen=True, slots=True)
class _Residual:
    """Computes the gap that remains with changes."""

    samples: _Samples
    table: Mapping[Pass, Mapping[str, Tensor]]
    version: int
    """Version of the step's weights."""

    def __call__(self, changes: Iterable[Change]) -> float:
        s = _setting(changes)
        trainer_A, keep_A = self.trainer(s)
        if s.without_ends:
            keep_A = keep_A & ~self.samples.end_A
        gap_A = (self.samples.generator_A - trainer_A).abs()[keep_A]
        return float(gap_A.mean()) if len(gap_A) else math.inf

    def difference(self, changes: Iterable[Change], change: Change) -> float:
        """Mean difference of the trainer's log-probs with and without one more change."""
        (before_A, keep_A), (after_A, _) = self.trainer(_setting(changes)), self.trainer(_setting([*changes, change]))
        return float((after_A - before_A).abs()[keep_A].mean())

    def trainer(self, s: Setting) -> tuple[Tensor, Tensor]:
        """(log-probs, whether they are known) of the tokens: [A], bool [A]."""
        version_A = self.samples.version_A
        if s.first or not s.by_token:
            version_A = torch.full_like(version_A, 0 if s.first else self.version)
        trainer_A, known_A = torch.zeros(len(version_A)), torch.zeros(len(version_A), dtype=torch.bool)
        for sample_version in version_A.unique().tolist():
            version = max(sample_version - s.earlier, 0)
            outputs = self.table.get(Pass(version, s.other_dtype, s.unbatched, s.weights, s.rendered, s.rerouted))
            if outputs is not None:
                mask_A = version_A == sample_version
                trainer_A = torch.where(mask_A, outputs[f"lp{int(s.plain)}{int(s.cut)}"], trainer_A)
                known_A |= mask_A
        return trainer_A, known_A


def _setting(changes: Iterable[Change]) -> Setting:
    return Setting(**{name: value for change in changes for name, value in change.values.items()})


def _experiment(name: str, cause: Cause, residual: _Residual) -> Experiment:
    """Try one cause alone."""
    if not cause.changes:
        return Experiment(name, None, cause.note)
    gaps = {change.name: residual([change]) for change in cause.changes}
    ways = [f"{way}: {gap:.3g}" for way, gap in gaps.items() if way]
    return Experiment(name, min(gaps.values()), "; ".join([cause.note, *ways] if cause.note else ways))


def _floor(composition: float, rounding: float | None) -> float:
    """The effect of packing counts as rounding, but only up to the effect of the other arithmetic."""
    return max(ROUNDING, 2 * (composition if rounding is None else min(composition, rounding)))


def _explanation(gaps: Mapping[tuple[str, ...], float], floor: float) -> tuple[str, ...]:
    """The smallest set of causes whose remaining gap is about as small as that of the best set. Among sets of equal
    size, the one with the smallest remaining gap."""
    limit = max(floor, SMALL * min(gaps.values()))
    return min((c for c, gap in gaps.items() if gap <= limit), key=lambda c: (len(c), gaps[c]))


def _assemble(trajectories: Sequence[Trajectory]) -> Batch:
    groups = [Group(t.row, number, [t]) for number, t in enumerate(trajectories)]
    batch = assemble(groups, scored=False)
    assert batch is not None, "every sample has a sampled token"
    return batch


def _batches(samples: _Samples, template: Template, replays: bool) -> tuple[dict[tuple[bool, bool], Batch], int]:
    """{(rendered, rerouted): batch}, and the number of prompts that the template now renders differently. The batch is
    as recorded and, if prompts differ, also with the new prompts. Each is with and without recorded experts, if there
    are any.

    Args:
        replays: whether the run's trainer replays the recorded experts.
    """
    batch, rendered, differing = samples.batch, [], 0
    for trajectory, line in zip(samples.trajectories, samples.lines, strict=True):
        prompt, turns = line.get("prompt"), trajectory.turns
        has_text_prompt = not turns[0].sampled and turns[1].sampled and not turns[0].images
        ids = _prompt_ids(template, prompt) if prompt is not None and has_text_prompt else None
        if ids and ids != list(turns[0].ids):
            differing += 1
            answer, record = turns[1], turns[1].experts
            if record is not None:  # it has more tokens than an engine that reads this prompt
                surplus = max(0, record.tokens - len(ids) - len(answer.ids) + 1)
                record = replace(record, choices=record.choices[surplus * record.token_bytes :])
            first, answer = replace(turns[0], ids=int_array(ids, "ids")), replace(answer, experts=record)
            trajectory = replace(trajectory, turns=[first, answer, *turns[2:]])
        rendered.append(trajectory)
    batches = {(False, False): batch, **({(True, False): _assemble(rendered)} if differing else {})}
    if EXPERTS not in batch.tok:
        return batches, differing
    plain = {kind: replace(b, tok={k: v for k, v in b.tok.items() if k != EXPERTS}) for kind, b in batches.items()}
    present, rerouted_batches = (batches, plain) if replays else (plain, batches)
    return {**present, **{(kind, True): b for (kind, _), b in rerouted_batches.items()}}, differing


def _prompt_ids(template: Template, prompt: Any) -> list[int] | None:
    """The tokens of a recorded prompt; None if the prompt is text and the template renders messages, or the reverse."""
    if isinstance(prompt, str) != (template.chat is None):
        return None
    if template.chat is not None:
        return template.tokens.ids(template.chat.text(prompt, answer=True))
    ids = template.tokens.ids(prompt)
    return [*template.tokens.begin(ids), *ids]


def _bins(batch: Batch, gap_A: Tensor) -> Iterator[Bin]:
    """By position in the context: 0 to 15, 16 to 63, 64 to 255, ..."""
    position_A = batch.position_N[batch.tok["loss_mask"]]
    first, last = 0, 15
    while first <= int(position_A.max()):
        inside_A = (position_A >= first) & (position_A <= last)
        if inside_A.any():
            yield Bin(first, last, int(inside_A.sum()), float(gap_A[inside_A].mean()))
        first, last = last + 1, 4 * last + 3


def _recorded_gap(samples: _Samples, trainer_A: Tensor) -> float | None:
    """Mean difference between the trainer's log-probs now and those that the step recorded."""
    differences, start = [], 0
    for trajectory, line in zip(samples.trajectories, samples.lines, strict=True):
        end = start + trajectory.sampled_tokens
        step_logprobs = (line.get("token_values") or {}).get("policy/logprobs")
        if step_logprobs is not None:  # one value stands for all if they are equal
            differences.append((trainer_A[start:end] - torch.tensor(list(step_logprobs))).abs())
        start = end
    return float(torch.cat(differences).mean()) if differences else None
