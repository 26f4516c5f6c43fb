"""An algorithm under test: how it is built, what it needs, its fabricated data, and whole steps on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from pydantic import ValidationError
from rlhf.ops.batch import Batch
from rlhf.plugins import Plugins
from rlhf.types import Needs, RoleSpec, RunOptions
from rlhf_runtime.config.components import build_algorithm
from rlhf_runtime.config.problems import describe
from rlhf_runtime.config.sections import Choice

from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import Step, assemble, model_step
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
        options = {"samples": max(4, needs.group_min), "scored": needs.reward, **options}
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
