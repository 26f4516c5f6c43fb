"""The suite of checks, for VllmCheck."""

from rlhf_plugin_vllm.checks import VllmCheck
from rlhf_testing.check import CheckContract


class TestVllmCheck(CheckContract):
    check = VllmCheck
    finds = ["vllm"]
