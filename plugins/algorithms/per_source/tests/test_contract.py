"""The conformance suite on pairs of members."""

from __future__ import annotations

from typing import Any

from per_source_members import LAYOUTS, algorithm, config_of, with_demonstrations, with_sources
from rlhf_plugin_per_source import PerSource
from rlhf_testing.algorithm import AlgorithmContract


class OnTwoSources(AlgorithmContract):
    algorithm = PerSource

    def data(self, algorithm: Any, seed: int = 0, **options: Any) -> list[Any]:
        return with_sources(super().data(algorithm, seed, **options))


class TestDifferentReferencesAndPasses(OnTwoSources):
    """A reference for one member only; old log-probs before several optimizer steps; masked samples."""

    configs = (config_of("several passes"),)
    parts = LAYOUTS["several passes"]


class TestPairsAndAnswers(OnTwoSources):
    """Units of one sequence and of two; columns that only one member has."""

    configs = (config_of("pairs"),)
    parts = LAYOUTS["pairs"]


class TestObservations(OnTwoSources):
    """Terms over tokens of one member, beside those that the policy sampled."""

    configs = (config_of("observations"),)
    parts = LAYOUTS["observations"]


class TestDemonstrations(OnTwoSources):
    """Rows with an answer beside sampled ones, in several optimizer steps."""

    configs = (config_of("demonstrations"),)
    parts = LAYOUTS["demonstrations"]

    def data(self, algorithm: Any, seed: int = 0, **options: Any) -> list[Any]:
        return with_demonstrations(super().data(algorithm, seed, **options))

    def test_nothing_to_learn_from(self) -> None:
        """Where no sample has a reward, the demonstrations are left, which need none."""
        per_source = algorithm("demonstrations")
        groups = self.data(per_source)
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.reward = trajectory.score = None
        batch, _ = per_source.assemble(groups)
        assert batch is not None
        assert batch.units == sum(group.row.source == "chat" for group in groups)
        assert bool(batch.unit["chat/part"].all())


def test_parts_of_the_members_are_parts_of_the_algorithm() -> None:
    parts = algorithm("pairs").parts
    assert {"loss", "members.math.loss", "members.chat.loss"} <= parts.keys()
