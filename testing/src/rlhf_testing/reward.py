"""The conformance suite of rewards. Imports no torch.

::

    from rlhf_testing.reward import RewardContract

    class TestMyReward(RewardContract):
        reward = MyReward
        cases = [({"answer": "4"}, "it is 4", 1.0), ({"answer": "4"}, "5", 0.0)]   # columns, answer, value
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rlhf.interfaces import Component, Reward, RewardContext, Tokens
from rlhf.interfaces.reward import Images
from rlhf.types import Group, Head, RewardResult, RoleSpec

from rlhf_testing import fabricate
from rlhf_testing.awaiting import call
from rlhf_testing.contract import Contract, Nonconformance, expect, knowing_columns, missing, no_number

Case = tuple[Mapping[str, Any], str, float | None] | tuple[Mapping[str, Any], Sequence[str], Sequence[float | None]]


class RewardContract(Contract):
    """Checks ``score`` on groups with good, empty, truncated and multi-turn answers."""

    kind = "reward"
    reward: Any = None
    cases: Sequence[Case] = ()
    """(row columns, answer, expected value), written by the author. For a reward that compares the samples of a group,
    use lists: (row columns, answers, expected values)."""
    columns: Mapping[str, Any] = {"prompt": "What is 2 + 2?", "answer": "4"}
    """The row of the fabricated groups. It must have every column that the reward reads."""
    answers: Sequence[str] = ("4", "the answer is 4", "", "five", "\N{SNOWMAN} " * 50)
    deterministic: bool = True
    """False for a judge that samples: results of two calls are not compared."""
    credit: Literal["outcome", "step"] = "outcome"
    """The option ``credit`` of the reward's section in the run file."""
    limit: float = 30.0
    """Maximum seconds for one group."""

    def groups(self) -> list[Group]:
        """The fabricated groups: single-turn answers, and one with an observation between two answers."""
        single = fabricate.text_group(self.columns, self.answers)
        group = fabricate.text_group(self.columns, self.answers, number=1)
        for trajectory in group.trajectories:
            observation = fabricate.text_group({"prompt": "try again"}, [""]).trajectories[0].turns[0]
            trajectory.turns += [observation, replace(trajectory.turns[1])]
        return [single, group]

    def ready(self, config: Any) -> Any:
        """An instance after ``setup``. If ``score`` is plain ``def``, ``setup`` is not called, as in a worker. Roles
        return a fixed score for each token sequence, heads have fixed outputs after each prefix, and tokens are the
        bytes of texts."""
        reward = self.build(config)
        if self.in_worker:
            return reward
        roles = {r.name: r for r in reward.roles()}

        def declared(role: str) -> RoleSpec:
            names = sorted(roles)
            expect(role in roles, f"{self.label(config)} asks role {role!r}, which roles() does not declare: {names}")
            return roles[role]

        async def score(role: str, ids: Sequence[Sequence[int]], images: Images = ()) -> list[float]:
            tokens = all(not isinstance(sequence, str) and all(type(i) is int for i in sequence) for sequence in ids)
            expect(tokens, f"{self.label(config)} gives role {role!r} {ids!r:.80}, not lists of token ids (Turn.ids)")
            return [_number(declared(role).name, sequence) for sequence in ids]

        async def read(
            role: str,
            head: Head,
            ids: Sequence[Sequence[int]],
            positions: Sequence[Sequence[int]],
            images: Images = (),
        ) -> list[list[Any]]:
            return fabricate.read(declared(role), head, ids, positions)

        tokens = Tokens(lambda text: list(text.encode()), lambda ids: bytes(list(ids)).decode(errors="replace"))
        ask = (score, read) if roles else (None, None)
        call(reward.setup, RewardContext(ask[0], 0, ask[1], tokens, self.credit), limit=self.limit)
        return reward

    @property
    def in_worker(self) -> bool:
        """Whether ``score`` runs in worker processes."""
        return not inspect.iscoroutinefunction(self.cls.score)

    def score(self, reward: Any, group: Group) -> Any:
        """The result of ``score``. A reward that scores each sample by itself gets groups of one, as in a run."""
        if not reward.per_sample:
            return self._score(reward, group)
        parts = [self._score(reward, replace(group, trajectories=[t])) for t in group.trajectories]
        wrong = [part for part in parts if not isinstance(part, (list, tuple)) or len(part) != 1]
        return wrong[0] if wrong else [part[0] for part in parts]

    def _score(self, reward: Any, group: Group) -> Any:
        try:
            with knowing_columns(self.label(), '"columns": {EACH}'):
                return call(reward.score, group, limit=self.limit)
        except (AttributeError, TypeError) as error:
            if self.in_worker and isinstance(error, AttributeError) and self.cls.setup is not Reward.setup:
                reason = "score() is plain `def` and runs in a worker process, where setup() is not called"
            elif not reward.roles() and "'NoneType' object is not callable" in str(error):
                reason = "roles() declares no role, so RewardContext has neither score_with_role nor read_role"
            else:
                raise
            raise Nonconformance(f"{self.label()} score() raises {type(error).__name__}: {error}. {reason}") from error

    # ------------------------------------------------------------------------------------- checks

    def test_results(self) -> None:
        """Each trajectory gets one RewardResult, in order; values are finite or None; steps are at sampled tokens."""
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            for group in self.groups():
                results = self.score(reward, group)
                expect(
                    isinstance(results, (list, tuple)) and len(results) == len(group.trajectories),
                    f"{label} score() must return {len(group.trajectories)} results, one per trajectory, got "
                    f"{len(results) if isinstance(results, (list, tuple)) else results!r}",
                )
                for n, result in enumerate(results):
                    self._check(f"{label} result {n}", result, group, n)

    def _check(self, label: str, result: Any, group: Group, n: int) -> None:
        expect(isinstance(result, RewardResult), f"{label} must be a RewardResult, got {result!r}")
        for name in ("value", "score"):
            value = getattr(result, name)
            wrong = "" if value is None else no_number(value)
            expect(not wrong, f"{label}: {name} is {wrong} Use None for 'not applicable'")
        turns = group.trajectories[n].turns
        for turn, token, value in result.steps:
            is_sampled = 0 <= turn < len(turns) and turns[turn].sampled and 0 <= token < len(turns[turn].ids)
            expect(is_sampled, f"{label}: a step reward at turn {turn}, token {token}, which the policy did not sample")
            expect(math.isfinite(value), f"{label}: the step reward at turn {turn}, token {token} is {value!r}")
        if self.cls.is_teacher:
            sampled = [(n, i) for n, turn in enumerate(turns) if turn.sampled for i in range(len(turn.ids))]
            places = sorted((turn, token) for turn, token, _ in result.steps)
            expect(
                result.value is None and places in ([], sampled),
                f"{label}: is_teacher is True, but the value is {result.value!r}, with {len(places)} steps for "
                f"{len(sampled)} sampled tokens; a teacher gives no value, and one step for each token or none at all",
            )
        try:
            json.dumps(result.info)
        except (TypeError, ValueError) as error:
            expect(False, f"{label}: info is written to the rollouts file and must be JSON: {error}")

    def test_place(self) -> None:
        """A plain ``def score``, which runs in worker processes, needs no model and keeps no state."""
        if not self.in_worker:
            return
        reason = "but its score() is plain `def`, which runs in several worker processes that have no models and share "
        reason += "nothing; write `async def score`"
        for config in self.grid():
            expect(not self.build(config).roles(), f"{self.label(config)} declares roles, {reason}")
        expect(self.cls.state_dict is Component.state_dict, f"{self.label()} has a state_dict, {reason}")

    def test_leaves_the_group_alone(self) -> None:
        """Scoring changes neither the group nor its row."""
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            for group in self.groups():
                original = copy.deepcopy(group)
                self.score(reward, group)
                expect(group == original, f"{label} score() changed the group: rewards must only read it")

    def test_repeatable(self) -> None:
        """Equal groups get equal results, also from a new instance. Permuting the samples permutes the results."""
        if not self.deterministic:
            return
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            for group in self.groups():
                first = self.score(reward, group)
                expect(
                    first == self.score(reward, group) == self.score(self.ready(config), group),
                    f"{label} two calls or instances score the same group differently (a judge sets "
                    "deterministic = False)",
                )
                reverse = replace(group, trajectories=group.trajectories[::-1])
                expect(
                    self.score(reward, reverse)[::-1] == first,
                    f"{label} reversing the samples does not reverse the results: return one result per trajectory, in "
                    "order, and do not prefer the first of several samples that are equally good or equally frequent",
                )

    def test_every_answer_alone(self) -> None:
        """A group of one works, whatever the answer (the empty one included)."""
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            for answer in self.answers:
                group = fabricate.text_group(self.columns, [answer])
                count = len(self.score(reward, group))
                expect(count == 1, f"{label} a group of one ({answer[:20]!r}) gets {count} results")

    def test_roles(self) -> None:
        """Roles are untrained RoleSpecs with a head, and depend on the config only."""
        for config in self.grid():
            label, roles = self.label(config), self.build(config).roles()
            expect(roles == self.build(config).roles(), f"{label} roles() must be a function of the config")
            for role in roles:
                expect(isinstance(role, RoleSpec), f"{label} roles() must hold RoleSpecs, got {role!r}")
                expect(not role.trained, f"{label} role {role.name!r} of a reward cannot be trained")

    def test_columns(self) -> None:
        """``columns()`` gives names of columns, and ``score`` fails on a row without one of them."""
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            names = reward.columns()
            is_list = isinstance(names, Collection) and not isinstance(names, str)
            expect(
                is_list and all(isinstance(name, str) and name for name in names),
                f"{label} columns() must return a list or tuple of strings that are not empty, got {names!r}",
            )
            for name in names:
                rest = {column: value for column, value in self.columns.items() if column != name}
                expect(
                    len(rest) < len(self.columns),
                    f"{label} columns() names {name!r}; this suite's row has {sorted(self.columns)}. Add that column "
                    'to the row: conformance = {"columns": {...}}, or `columns` of the suite',
                )
                try:
                    self.score(reward, fabricate.text_group(rest, self.answers))
                except Exception:  # a reward may raise anything; with the whole row it scores (the other checks)
                    continue
                expect(False, f"{label} columns() names {name!r}, but score() works on a row without it. Remove it")

    def test_reads(self) -> None:
        """A reward that reads texts only needs no tokenizer: without token ids its results are the same."""
        for config in self.grid():
            label, reward = self.label(config), self.ready(config)
            allowed = ("text", "tokens")
            expect(reward.reads in allowed, f"{label} reads is {reward.reads!r}; allowed: 'text', 'tokens'")
            if reward.reads == "tokens":
                continue
            expect(not reward.roles(), f"{label} reads = 'text', but it declares roles, whose models read tokens")
            for group in self.groups():
                texts = copy.deepcopy(group)
                for turn in (turn for trajectory in texts.trajectories for turn in trajectory.turns):
                    turn.ids, turn.logprobs = array("i"), None
                equal = self.score(reward, texts) == self.score(reward, group) or not self.deterministic
                expect(equal, f"{label} reads = 'text', but without token ids its scores differ: set reads = 'tokens'")

    def test_cases(self) -> None:
        """The author's cases get their expected values."""
        if not self.cases:
            raise missing("cases = [(row columns, answer, expected value), ...], or with lists for a whole group")
        for config in self.grid()[:1]:
            reward = self.ready(config)
            for columns, answer, expected in self.cases:
                answers: Sequence[str] = [answer] if isinstance(answer, str) else answer
                values = expected if isinstance(expected, Sequence) else [expected]
                results = self.score(reward, fabricate.text_group({**self.columns, **columns}, answers))
                for text, result, value in zip(answers, results, values, strict=True):
                    score, is_none = result.value, value is None or result.value is None
                    equal = score == value if is_none else math.isclose(score, value, abs_tol=1e-6)  # type: ignore[arg-type]
                    expect(equal, f"{self.label(config)} {text!r} gets {score!r}, expected {value!r} ({columns})")


def _number(role: str, ids: Sequence[int]) -> float:
    """A fixed number in -1 .. 1 for a role and tokens."""
    digest = hashlib.sha256(f"{role}/{list(ids)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**31 - 1.0
