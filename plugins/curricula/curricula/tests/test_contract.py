"""The conformance suite of curricula."""

from rlhf_plugin_curricula import AdaptiveMixing, EasyToHard, PassRate
from rlhf_testing.curriculum import CurriculumContract


class TestPassRate(CurriculumContract):
    curriculum = PassRate
    configs = (
        PassRate.Config(),
        PassRate.Config(low=0.3, high=0.6, explore=0.0, memory=1.0),
        PassRate.Config(explore=1.0, memory=0.0, pass_threshold=0.5),
    )


class TestEasyToHard(CurriculumContract):
    curriculum = EasyToHard
    columns = EasyToHard.conformance["columns"]
    configs = (
        EasyToHard.Config(column="level"),
        EasyToHard.Config(column="level", harder="smaller", start=0.01, until=1.0, schedule="root"),
    )


class TestAdaptiveMixing(CurriculumContract):
    curriculum = AdaptiveMixing
    configs = (AdaptiveMixing.Config(), AdaptiveMixing.Config(rate=1.0, temperature=0.01, min_share=0.0))
