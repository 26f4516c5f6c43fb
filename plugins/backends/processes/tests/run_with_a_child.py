"""A driver with one rank that has a child of its own, run by test_ends.py. The first argument says how the driver
ends, or is a statement that the rank executes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from rlhf.interfaces import ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_processes.launcher import ProcessesLauncher
from rlhf_testing.launcher import CountingTrainer


class Parent(CountingTrainer):
    name = "parent"

    def starts(self) -> list[int]:
        """[this process, a child that left its session]."""
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return [os.getpid(), child.pid]

    def fail_later(self, seconds: float) -> None:
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def says(self, text: str) -> None:
        print(text, flush=True)

    def executes(self, statement: str) -> None:
        exec(statement)
        time.sleep(600)

    def leaves(self, code: int) -> None:
        os._exit(code)


def main(mode: str) -> None:
    launcher = ProcessesLauncher()
    launcher.place({"policy": Place()})
    policy = launcher.launch_trainer(Parent, None, ModelSpec(RoleSpec("policy"), ""))
    if mode.startswith("exec"):
        policy.call("executes", [(mode,)])
    print(json.dumps(policy.call("starts", [()])[0]), flush=True)
    sys.stdin.readline()
    if mode == "raises":
        raise ValueError("a reward failed")
    if mode == "forgets":
        os._exit(3)
    launcher.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
