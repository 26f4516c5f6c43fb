"""The conformance suite of rewards."""

from rlhf_plugin_math.reward import MathReward
from rlhf_testing.reward import RewardContract


class TestMath(RewardContract):
    reward = MathReward
    configs = (MathReward.Config(), MathReward.Config(wrong=-1.0, tolerance=1e-3))
    cases = (
        ({"answer": "4"}, r"so it is \boxed{4}", 1.0),
        ({"answer": "7 * 6 = 42 #### 42"}, "#### 42", 1.0),
        ({"answer": "1/2"}, r"\boxed{0.5}", 1.0),
        ({"answer": "4"}, r"\boxed{5}", 0.0),
        ({"answer": "4"}, "no idea", 0.0),
    )
