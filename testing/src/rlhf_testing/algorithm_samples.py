"""An algorithm under test, whole steps of it on fabricated data, and the checks of algorithms that learn from groups:
small groups, equal rewards, long contexts, failed samples."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from pydantic import ValidationError
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.types import Group, Needs, RoleSpec, RunOptions
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.problems import describe
from rlhf_runtime.config.sections import Choice
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import Step, assemble, model_step
from rlhf_testing.compare import finite, norm
from rlhf_testing.contract import Contract, Nonconformance, expect, knowing_columns

COLUMNS = '"columns": {NAME}'
"""The entry of ``conformance`` with which an author adds a column to the rows of this suite."""


class AlgorithmSubject(Contract):
    """The algorithm under test, its parts and its data."""

    kind = "algorithm"
    algorithm: Any = None
    parts: Mapping[str, Callable[[], Any]] = {}
    """{slot: a function that builds the part}. For other slots the suite builds the slot's default plugin, and a member
    (``Algorithm.has_members``; here ``members.NAME``) with its default options."""
    columns: Mapping[str, Any] = {}
    """Further columns of the made-up rows: those that the algorithm reads in addition to ``prompt`` and ``answer``. For
    pairs, ``margin`` is also in ``Example.values``."""
    steps: int = 2
    """Number of steps to run. Raise it for an algorithm that starts something later (a warm-up)."""

    def build(self, config: Any, run: RunOptions | None = None) -> Any:
        parts = {name: self._part(name, slot) for name, slot in self.cls.slots.items()}
        parts |= {n: make() for n, make in self.parts.items() if n not in parts}
        for name, member in config.members.items() if self.cls.has_members else ():
            if f"members.{name}" not in parts:
                parts[f"members.{name}"] = build_algorithm(self._plugins, Choice(use=member.use), run=run)[0]
        algorithm = self.cls(config, parts, run or RunOptions())
        algorithm.use_tokens(fabricate.TOKENS)
        return algorithm

    def _part(self, name: str, slot: Any) -> Any:
        if name in self.parts:
            return self.parts[name]()
        try:
            cls = self._plugins.resolve(slot.kind, slot.use).cls
        except Exception as error:
            raise Nonconformance(f"{self.about()} slot {name!r}: {type(error).__name__}: {error}") from error
        try:
            return cls(cls.Config.model_validate(dict(slot.defaults)))
        except ValidationError as error:
            wrong = "; ".join(describe(error, cls.Config, f"slots[{name!r}].defaults", {}))
            raise Nonconformance(f"{self.about()} {wrong}") from error

    @cached_property
    def _plugins(self) -> Plugins:
        return Plugins.discover()

    def data(self, algorithm: Any, seed: int = 0, **options: Any) -> list[Any]:
        """The input of ``assemble``: scored groups, or tokenised examples of the algorithm's data form. Sampled turns
        have log-probs only where ``needs().generator_logprobs`` is set."""
        if self.cls.data != "prompts":
            return fabricate.examples(self.cls.data, seed, columns=self.columns)
        needs = algorithm.needs()
        options = {"samples": max(4, needs.group_min), "scored": needs.reward, "greedy": needs.greedy, **options}
        return fabricate.groups(seed, logprobs=needs.generator_logprobs, columns=self.columns, **options)

    def step(self, config: Any, number: int = 0, **options: Any) -> Step:
        """One whole step without the optimizer, on fresh data and a fresh algorithm."""
        algorithm = options.pop("algorithm", None) or self.build(config)
        data = options.pop("data", None) or self.data(algorithm)
        try:
            with knowing_columns("it", COLUMNS):
                return model_step(algorithm, data, number, **options)
        except Nonconformance as error:
            raise Nonconformance(f"{self.about(config)} {error}") from error
        except Exception as error:
            raise Nonconformance(f"{self.about(config)} {type(error).__name__}: {error}") from error

    def assemble(self, algorithm: Any, data: list[Any]) -> Batch | None:
        with knowing_columns(self.about(), COLUMNS):
            try:
                return assemble(algorithm, data)[0]
            except Nonconformance as error:
                raise Nonconformance(f"{self.about()} {error}") from error

    # ------------------------------------------------------------------------------------- checks

    def test_needs(self) -> None:
        """``needs()`` names each role once, the role that another is ``like`` exists, and at least one role is
        trained."""
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            needs = algorithm.needs()
            expect(isinstance(needs, Needs), f"{about} needs() must return Needs, got {type(needs).__name__}")
            expect(needs == self.build(config).needs(), f"{about} needs() must be a function of config and parts")
            names = [r.name for r in needs.roles if isinstance(r, RoleSpec)]
            expect(len(names) == len(needs.roles) > 0, f"{about} needs().roles must be RoleSpecs, got {needs.roles}")
            expect(len(set(names)) == len(names), f"{about} needs() names a role twice: {names}")
            expect(needs.group_min >= 1, f"{about} group_min is {needs.group_min}; it must be at least 1")
            expect(any(r.trained for r in needs.roles), f"{about} no role is trained: {names}")
            for role in needs.roles:
                is_head = role.head in ("lm", "scalar") or role.head.removeprefix("classes:").isdigit()
                expect(is_head, f"{about} role {role.name!r} has head {role.head!r}; allowed: lm, scalar, classes:N")
                expect(
                    role.like is None or role.like in names,
                    f"{about} role {role.name!r} is like {role.like!r}, which is not one of the roles {names}",
                )
            frozen = [r.name for r in needs.roles if r.head == "lm" and not r.trained]
            for each in needs.lent:
                fine = each.role in frozen and each.to in names
                expect(fine, f"{about} {each}: lenders are language models that are not trained, {frozen}")


class SampleChecks(AlgorithmSubject):
    """Checks of algorithms on samples. Algorithms on pairs and demonstrations pass without a check."""

    def test_smallest_group(self) -> None:
        """Groups of ``group_min`` samples with equal rewards give finite credit and gradients, or no batch. Where they
        give no batch, groups of ``group_min`` samples with unequal rewards give one."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            smallest = algorithm.needs().group_min
            data = self.data(algorithm, samples=smallest, equal_rewards=True)
            if self.assemble(algorithm, data) is None:
                data = self.data(algorithm, samples=smallest)
            step = self.step(config, algorithm=algorithm, data=data)
            for name, values in step.batch.tok.items():
                ok = not values.is_floating_point() or bool(torch.isfinite(values).all())
                expect(ok, f"{about} groups of {smallest} with equal rewards: column {name!r} is not finite")
            bad = [f"{n}: {finite(r.gradients)}" for n, r in step.runs.items() if finite(r.gradients)]
            expect(not bad, f"{about} groups of {smallest} with equal rewards: gradients are not finite, {bad}")

    def test_rewards_teach(self) -> None:
        """In groups of ``group_min`` samples, unequal rewards give different credit than equal rewards. Otherwise
        ``group_min`` is too small to learn from."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            about, needs = self.about(config), self.build(config).needs()
            data = self.data(self.build(config), samples=needs.group_min)
            equal = with_rewards(data, 1.0)
            if not needs.reward or self.assemble(self.build(config), equal) is None:
                continue
            unequal = self.step(config, data=data)
            columns = credited_columns(unequal)
            if columns:
                expect(
                    bool(apart(columns, credited_columns(self.step(config, data=equal)))),
                    f"{about} in groups of {needs.group_min} samples, which needs() calls enough, unequal rewards give "
                    f"the credit of equal ones ({', '.join(columns)}): nothing is learnt from them. Declare a larger "
                    "group_min",
                )
            else:
                taught = any(norm(run.gradients) > 0 for run in unequal.runs.values())
                expect(
                    taught,
                    f"{about} groups of {needs.group_min} samples, which needs() calls enough, give no gradient",
                )

    def test_longer_contexts(self) -> None:
        """Longer prompts and observations do not change the credit, which belongs to the tokens that the policy
        chose."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            about, data = self.about(config), self.data(self.build(config))
            short = self.step(config, data=data)
            longer = self.step(config, data=with_longer_contexts(data), annotated_as=short.annotated)
            changed = apart(credited_columns(short), credited_columns(longer))
            expect(
                not changed,
                f"{about} longer prompts and observations change the credit (by {changed}): take statistics over the "
                'tokens under batch.tok["loss_mask"] only',
            )

    def test_nothing_to_learn_from(self) -> None:
        """Failed samples are left out, and so are samples without a reward unless ``Needs.reward`` is False. If no
        sample is left, ``assemble`` returns no batch."""
        if self.cls.data != "prompts":
            return
        for config in self.grid():
            about, algorithm = self.about(config), self.build(config)
            groups: list[Group] = self.data(algorithm)
            scored = algorithm.needs().reward
            groups[0].trajectories[0].reward = groups[0].trajectories[0].score = None
            groups[1].trajectories[-1].status = "failed"
            groups[1].trajectories[-1].turns = []
            usable = [[t for t in g.trajectories if t.turns and (t.reward is not None or not scored)] for g in groups]
            rest = [replace(group, trajectories=own) for group, own in zip(groups, usable, strict=True)]
            taught = self.step(config, algorithm=algorithm, data=groups).batch.ids_N
            expect(
                torch.equal(taught, self.step(config, data=rest).batch.ids_N),
                f"{about} a failed sample{' or one without a reward' * scored} takes part in the batch",
            )
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.reward = trajectory.score = None
                    trajectory.status = trajectory.status if scored else "failed"
            batch = self.assemble(algorithm, groups)
            why = "no sample has a reward" if scored else "every sample failed"
            expect(batch is None, f"{about} assemble() must return no batch when {why}, got {type(batch)}")


def with_longer_contexts(groups: Sequence[Group]) -> list[Group]:
    """The same samples after longer prompts and observations; all samples of a group share the longer prompt."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for group in copies:
        for trajectory in group.trajectories:
            rng = random.Random(group.trajectories[0].index[0])
            for turn in trajectory.turns:
                if not turn.sampled:
                    more = [rng.randrange(1, fabricate.VOCABULARY) for _ in range(rng.randint(3, 9))]
                    turn.ids = array("i", more) + turn.ids
    return copies


def with_rewards(groups: Sequence[Group], reward: float) -> list[Group]:
    """The same samples, all with this reward."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for trajectory in (t for group in copies for t in group.trajectories if t.reward is not None):
        trajectory.reward = trajectory.score = reward
        trajectory.rewards = {name: type(result)(reward) for name, result in trajectory.rewards.items()}
    return copies


def credited_columns(step: Step) -> dict[str, Tensor]:
    """{column that ``credit`` made: its values in float64}. Of token columns only the values under the loss mask."""
    batch: Batch = step.batch
    columns = {}
    for name in sorted(step.credited):
        values = batch.column(name)
        columns[name] = (values[batch.tok["loss_mask"]] if name in batch.tok else values).double()
    return columns


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """{column: largest difference, relative to max(largest value, 1)}; infinity where the shapes differ. Only columns
    with a difference above 1e-5."""
    differences = {}
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if left is None or right is None or left.shape != right.shape:
            differences[name] = float("inf")
        elif left.numel():
            differences[name] = float((left - right).abs().max()) / max(1.0, float(left.abs().max()))
    return {name: size for name, size in differences.items() if not size <= 1e-5}
