"""Teachers: models whose outputs at the sampled tokens are read. Their log-probs there serve as credit.

A teacher is a frozen role (one per data source is possible), a server (a reward that teaches), or the policy itself
with its weights before the run, its current weights or an average of both. A role may read a text that the policy does
not see. The batch then has one more sequence per sample, with the same answer after the teacher's prompt, until the
teacher's log-probs have been read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rlhf.errors import ConfigError, TrainingError, brief
from rlhf.ops.batch import Batch, concat
from rlhf.ops.experts import EXPERTS, UNKNOWN
from rlhf.ops.heads import resolve_head
from rlhf.ops.sample_values import ENV, group_number, name_of
from rlhf.ops.spans import masked
from rlhf.ops.trajectories import assemble
from rlhf.types import Annotation, Group, Head, OnlineShape, RoleSpec, Row, RunOptions, Snapshot, Trajectory, Turn
from torch import Tensor

from rlhf_algorithms.policy_gradient_config import TeacherConfig

TEACHER, TEACHER_LOGPROBS = "teacher", "teacher_logprobs"
"""The frozen role, and the token column with its log-probs."""
TAUGHT = "taught"
"""Token column, bool: the tokens with log-probs of a teacher. If it is absent, these are all tokens of the policy. With
the suffix ``.ROLE``: the tokens that this role reads."""


class Teacher:
    """The teacher of an algorithm. Raises ConfigError for options that do not fit the run.

    Args:
        output: the teacher's output at each token of the policy.
        column: the token column that :meth:`read` writes.
    """

    opening: Callable[[Row, str], Sequence[int]] | None = None
    """:attr:`rlhf.interfaces.Tokens.opening`."""

    def __init__(
        self, config: TeacherConfig, run: RunOptions, output: str | Head = "logprobs", column: str = TEACHER_LOGPROBS
    ) -> None:
        self.config, self._run, self._output, self._column = config, run, output, column
        self.is_used = config.coef > 0
        self.is_served = self.is_used and bool(run.teachers)
        self._roles = tuple(dict.fromkeys(config.roles.values())) or (TEACHER,)
        self._role_of = {source: self._roles.index(role) for source, role in config.roles.items()}
        self._is_single = not config.roles and config.context is None and config.weights != "live"
        """Whether one role reads every token of the policy, in the same context as the policy."""
        reads = self.is_used and not self.is_served and not self._is_single
        self.masks = tuple(f"{TAUGHT}.{name}" for name in self._roles) if reads else ()
        """Token columns that :meth:`prepared` adds: the tokens that each role reads."""
        if self.is_used:
            self._check()

    def _check(self) -> None:
        run, config = self._run, self.config
        of_roles = {"roles": bool(config.roles), "weights": config.weights != "role", "context": bool(config.context)}
        options = [name for name, is_set in of_roles.items() if is_set]
        if run.teachers and options:
            raise ConfigError(
                f"algorithm.teacher.{', '.join(options)} configures a teacher that the run holds, but reward "
                f"{', '.join(map(repr, run.teachers))} already gives the log-probs of a teacher. Remove one of the two"
            )
        if config.context is not None and (ENV in run.weights or ENV in run.step_sources):
            raise ConfigError(
                f"algorithm.teacher.context = {config.context!r} is added to a row's prompt, but an environment writes "
                "the prompts of this run. Remove algorithm.teacher.context, or run without [env]"
            )
        if not run.sources:  # not in a run
            return
        if unknown := [source for source in config.roles if source not in run.sources]:
            raise ConfigError(
                f"algorithm.teacher.roles: {', '.join(map(repr, unknown))} is not a source of data.train; its sources "
                f"are {', '.join(map(repr, run.sources))}. A source's name is its `name`, or the stem of its file"
            )
        counts = {source: self._teachers_of(source) for source in run.sources}
        if sources := [source for source, count in counts.items() if count > 1]:
            raise ConfigError(
                f"the rows of {', '.join(map(repr, sources))} have several teachers: {', '.join(run.teachers)}. Name "
                "the data sources of each in its reward's `sources`"
            )
        if not config.task and (untaught := [source for source, count in counts.items() if count == 0]):
            raise ConfigError(
                "algorithm.teacher.task = false takes all credit from the teacher, but the rows of "
                f"{', '.join(map(repr, untaught))} have no teacher. Set one, or also learn from a reward (task = true)"
            )

    def _teachers_of(self, source: str) -> int:
        if self.is_served:
            return sum(not sources or source in sources for sources in self._run.teachers.values())
        return int(not self._role_of or source in self._role_of)

    # ---------------------------------------------------------------------- requirements and plans

    def roles(self) -> list[RoleSpec]:
        """The roles that the run holds for the teacher."""
        if not self.is_used or self.is_served or self.config.weights == "live":
            return []
        like = None if self.config.weights == "role" else "policy"
        return [RoleSpec(name, like=like) for name in self._roles]

    def annotations(self) -> list[Annotation]:
        if not self.is_used or self.is_served:
            return []
        if self._is_single:
            return [Annotation(TEACHER, self._output, self._column)]
        head, is_live = resolve_head(self._output), self.config.weights == "live"
        return [
            Annotation(
                "policy" if is_live else name,
                replace(head, name=f"{head.name}.{name}", over=mask),
                f"{self._column}.{name}",
            )
            for name, mask in zip(self._roles, self.masks, strict=True)
        ]

    def snapshots(self) -> list[Snapshot]:
        """The averaging of the policy's weights into the teacher, after each step."""
        averaged = self.is_used and self.config.weights == "averaged"
        return [Snapshot(TEACHER, "policy", self.config.share)] if averaged else []

    def conflicts(self, shape: OnlineShape) -> list[str]:
        if not self.is_served or shape.temperature == 1:
            return []
        return [
            f"sampling.temperature = {shape.temperature:g}: reward {', '.join(map(repr, self._run.teachers))} gives "
            "log-probs at temperature 1. Set --sampling.temperature 1, or use a role as teacher."
        ]

    # ------------------------------------------------------------------------- the calls of a step

    def prepared(self, batch: Batch, groups: Sequence[Group]) -> tuple[Batch, dict[str, float]]:
        """Add the columns and sequences that :meth:`annotations` reads to the batch of ``groups``. Metric
        ``teacher/left_out``: the share of samples without a teacher's credit."""
        if not self.is_used or (self._is_single and not self.is_served):
            return batch, {}
        trajectories = [t for group in groups for t in group.trajectories]
        by_index = {(group_number(t.index[0], t.agent), t.index[1]): t for t in trajectories}
        indices = zip(batch.unit["group"].tolist(), batch.unit["sample"].tolist(), strict=True)
        samples = [by_index[index] for index in indices]
        if self.is_served:
            batch, taught_U = self._served(batch, samples)
        elif self.config.context is not None:
            batch, taught_U = self._with_context(batch, samples)
        else:
            role_U = torch.tensor([self._role(sample) for sample in samples])
            taught_U = role_U >= 0
            batch = self._with_masks(batch, batch.tok["loss_mask"], role_U[batch.unit_N])
        return batch, {"teacher/left_out": 1 - float(taught_U.double().mean())}

    def only_taught(self, batch: Batch) -> Batch | None:
        """The units of a batch of :meth:`prepared` that a teacher reads. None if there are none."""
        if not self.masks:
            return batch
        taught_U = _any(self._taught(batch), batch.unit_N, batch.units)
        return batch.select(taught_U.nonzero().flatten().tolist()) if bool(taught_U.any()) else None

    def _taught(self, batch: Batch) -> Tensor:
        return torch.stack([batch.tok[mask] for mask in self.masks]).any(0)

    def read(self, batch: Batch) -> Batch:
        """Add the teacher's output at the policy's tokens to ``batch``, after the annotations, and remove everything
        that :meth:`prepared` added."""
        if not self.masks:
            return batch
        columns = [f"{self._column}.{name}" for name in self._roles]
        taught_N, values_N = self._taught(batch), batch.tok[columns[0]]
        for column in columns[1:]:  # a column is 0 at tokens of other roles
            values_N = values_N + batch.tok[column]
        added = {*self.masks, *columns}
        batch = replace(batch, tok={name: values for name, values in batch.tok.items() if name not in added})
        if self.config.context is None:
            return batch.with_column("tok", self._column, values_N).with_column("tok", TAUGHT, taught_N)
        teacher_B = _any(taught_N, batch.seq_N, batch.sequences)
        taught_U = _any(taught_N, batch.unit_N, batch.units)
        own_N = batch.tok["loss_mask"] & taught_U[batch.unit_N]
        own_values_N = torch.zeros_like(values_N)
        own_values_N[own_N] = values_N[taught_N]  # both masks are in the same order
        batch = batch.with_column("tok", self._column, own_values_N).with_column("tok", TAUGHT, own_N)
        return batch.keep(~teacher_B)

    def _role(self, sample: Trajectory) -> int:
        """The index of the role that reads a sample; -1 if no role does."""
        return self._role_of.get(sample.row.source, -1) if self._role_of else 0

    def _with_masks(self, batch: Batch, mask_N: Tensor, role_N: Tensor) -> Batch:
        for number, mask in enumerate(self.masks):
            batch = batch.with_column("tok", mask, mask_N & (role_N == number), over=None)
        return batch

    def _served(self, batch: Batch, samples: Sequence[Trajectory]) -> tuple[Batch, Tensor]:
        """The log-probs that rewards gave, as columns."""
        values: list[float] = []
        taught: list[bool] = []
        for sample in samples:
            results = [sample.rewards[name] for name in self._run.teachers if name in sample.rewards]
            steps = [step for result in results for step in sorted(result.steps)]
            # An empty answer has no log-probs, but it is not left out if the teacher was asked.
            taught.append(bool(steps) or (bool(results) and not sample.sampled_tokens))
            if steps and len(steps) != sample.sampled_tokens:
                raise TrainingError(
                    f"{name_of(sample)}: {', '.join(self._run.teachers)} gave {len(steps)} log-probs of a teacher for "
                    f"{sample.sampled_tokens} sampled tokens; there must be one for each"
                )
            values += [value for _, _, value in steps]
        taught_U = torch.tensor(taught)
        own_N = batch.tok["loss_mask"] & taught_U[batch.unit_N]
        values_N = torch.zeros(batch.tokens).masked_scatter_(own_N, torch.tensor(values, dtype=torch.float32))
        batch = batch.with_column("tok", TEACHER_LOGPROBS, values_N)
        return batch.with_column("tok", TAUGHT, own_N), taught_U

    def _with_context(self, batch: Batch, samples: Sequence[Trajectory]) -> tuple[Batch, Tensor]:
        """``batch`` with one more sequence per unit for the teacher, after the unit's other sequences."""
        units: list[int] = []
        groups: list[Group] = []
        prompts: dict[tuple[str, int], Sequence[int] | None] = {}
        for unit, sample in enumerate(samples):
            # All samples of a row have the same prompt.
            key = (sample.row.source, sample.row.index)
            if key not in prompts:
                prompts[key] = self._prompt(sample)
            prompt, answer = prompts[key], _answer(sample)
            count = sum(len(turn.ids) for turn in answer)
            longest = self._run.max_tokens
            # read() recognises a sequence of the teacher by its answer, so there is none for an empty answer.
            if prompt is None or not count or self._role(sample) < 0:
                continue
            if longest is not None and len(prompt) + count > longest:
                continue
            units.append(unit)
            turns = [Turn(prompt, sampled=False), *answer]
            groups.append(Group(sample.row, unit, [Trajectory(sample.row, turns, (unit, 0))]))
        taught_U = torch.zeros(batch.units, dtype=torch.bool)
        taught_U[units] = True
        role_U = torch.tensor([self._role(sample) for sample in samples])
        teacher = assemble(groups, scored=False)
        if teacher is None:
            return self._with_masks(batch, taught_U[batch.unit_N], role_U[batch.unit_N]), taught_U
        tok = {
            name: values_N.new_full((teacher.tokens, *values_N.shape[1:]), UNKNOWN if name == EXPERTS else 0)
            for name, values_N in batch.tok.items()
        }
        tok["temperature"] = teacher.tok["temperature"]
        owner_U = torch.tensor([*range(batch.units), *units])
        order_U = torch.argsort(owner_U, stable=True)
        parts = concat([replace(batch, unit={}), replace(teacher, tok=tok, unit={})]).select(order_U.tolist())
        is_teacher_N = (order_U >= batch.units)[parts.unit_N]
        mask_N = torch.zeros_like(is_teacher_N).masked_scatter_(is_teacher_N, teacher.tok["loss_mask"])
        batch = replace(parts, unit_B=owner_U[order_U][parts.unit_B], unit=batch.unit)
        return self._with_masks(batch, mask_N, role_U[batch.unit_N]), taught_U

    def _prompt(self, sample: Trajectory) -> Sequence[int] | None:
        """The teacher's prompt, which contains a column of the row. None if the row has no text in this column."""
        config, row, name = self.config, sample.row, name_of(sample)
        if self.opening is None:
            raise TrainingError("algorithm.teacher.context needs the prompts of a run and works only in a run")
        text = row.get(config.context or "")
        if text is None or text == "":
            return None
        if not isinstance(text, str):
            raise TrainingError(
                f"{name}: the column algorithm.teacher.context = {config.context!r} must hold text, got {brief(text)}"
            )
        prompt_ids = [i for turn in sample.turns[: _first(sample)] for i in turn.ids]
        if any(turn.images for turn in sample.turns) or prompt_ids != list(self.opening(row, "")):
            raise TrainingError(
                f"{name}: algorithm.teacher.context is added to a row's text prompt, but this sample has images, or "
                "its rollout wrote a different prompt from the row's. Remove the option, or use another rollout"
            )
        return self.opening(row, config.template.replace("{context}", text))


def _first(sample: Trajectory) -> int:
    """The number of the first sampled turn."""
    return next((n for n, turn in enumerate(sample.turns) if turn.sampled), len(sample.turns))


def _answer(sample: Trajectory) -> list[Turn]:
    """The turns from the first to the last sampled one, without records, which a teacher does not read."""
    first = _first(sample)
    last = max((n for n, turn in enumerate(sample.turns) if turn.sampled and turn.ids), default=first)
    turns = sample.turns[first : last + 1]
    if any(turn.fresh for turn in turns):
        raise TrainingError(
            f"{name_of(sample)}: its context was rewritten between turns, and algorithm.teacher.context supports only "
            "samples with one context. Remove the option, or use another rollout"
        )
    return [replace(turn, logprobs=None, experts=None) for turn in turns]


def _any(mask_N: Tensor, owner_N: Tensor, count: int) -> Tensor:
    """bool: for each owner, whether one of its tokens is under the mask."""
    return torch.zeros(count, dtype=torch.int64).index_add_(0, owner_N, mask_N.long()) > 0


def with_teacher(batch: Batch, coef: float) -> tuple[Batch, dict[str, float]]:
    """Add coef (teacher - policy) to the token column ``advantages``, 0 where it is absent (arXiv:2601.02780), at the
    tokens that a teacher scored.

    Both log-probs are at the sampling temperature; the policy's are from the start of the update. In expectation over
    the policy's samples, the gradient of this credit is the gradient of -coef KL(policy || teacher) of the next token.
    Credit of later tokens is left out, as published.

    Returns: the batch, and ``teacher/kl``, the mean of (policy - teacher) over these tokens [nats]: an estimate of
    KL(policy || teacher).
    """
    mask_N = batch.tok.get(TAUGHT, batch.tok["loss_mask"])
    gap_N = batch.column(TEACHER_LOGPROBS).double() - batch.column("old_logprobs").double()
    gap_N = torch.where(mask_N, gap_N, torch.zeros_like(gap_N))
    task_N = batch.tok["advantages"].double() if "advantages" in batch.tok else torch.zeros_like(gap_N)
    own_A = masked(gap_N, mask_N)
    mean = float(own_A.mean()) if own_A.numel() else 0.0
    return batch.with_column("tok", "advantages", (task_N + coef * gap_N).float()), {"teacher/kl": -mean}
