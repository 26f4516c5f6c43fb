"""The suite of checks, for DeepSpeedCheck."""

from rlhf_plugin_deepspeed.checks import DeepSpeedCheck
from rlhf_testing.check import CheckContract


class TestDeepSpeedCheck(CheckContract):
    check = DeepSpeedCheck
    finds = ["deepspeed"]
