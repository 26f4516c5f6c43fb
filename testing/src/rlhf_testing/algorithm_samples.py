"""Checks of algorithms that learn from groups: small groups, equal rewards, long contexts, failed samples."""

from __future__ import annotations

from dataclasses import replace

import torch
from rlhf.types import Group

from rlhf_testing.algorithm_credit import apart, credited_columns, with_longer_contexts, with_rewards
from rlhf_testing.algorithm_subject import AlgorithmSubject
from rlhf_testing.compare import finite, norm
from rlhf_testing.contract import expect


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
