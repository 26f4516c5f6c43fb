"""The program's process: what it gets, what it returns, how it fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf_plugin_agent import Agent

from tests import orphans

ASKS = "ask(base_url, api_key)\n"


def gone(pid):
    """Whether a process has ended, at once or soon."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_function_gets_the_row_and_an_endpoint(lab, program, wire, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "hidden")
    monkeypatch.setenv("GIVEN", "shown")
    body = "status, answer = ask(base_url, api_key)\nimport os\nnote(task, status, answer, task, dict(os.environ))"
    options = program(body, "async def run(task, base_url, api_key):", environment=["GIVEN"])
    options["environment"] = tuple(options["environment"])
    trajectory = lab.one(options, {"level": 3, "wire": wire.path})
    assert trajectory.status in ("ok", "truncated"), trajectory.error
    [[status, answer, task, environment]] = wire()
    assert (status, task["prompt"], task["level"]) == (200, "1+2?", 3)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == trajectory.sampled_tokens
    assert [t.sampled for t in trajectory.turns] == [False, True]
    assert environment["GIVEN"] == "shown"
    assert "SOME_TOKEN" not in environment
    assert "RLHF_RESULT_FD" not in environment


def test_a_python_of_its_own_sees_no_packages_of_the_runs(lab, program, wire, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "of the run")
    monkeypatch.setenv("VIRTUAL_ENV", "of the run")
    body = "ask(base_url, api_key)\nimport os\nnote(task, dict(os.environ))"
    for python in (None, sys.executable):
        lab.one(program(body, python=python), {"wire": wire.path})
    [[shared], [separate]] = wire()
    assert (shared["PYTHONPATH"], shared["VIRTUAL_ENV"]) == ("of the run", "of the run")
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & separate.keys()
    assert separate["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}{shared['PATH']}"


@pytest.mark.parametrize(
    ("returns", "returns_reward", "reward", "error"),
    [
        ("0.25", True, 0.25, ""),
        ("None", False, None, ""),
        ("None", True, None, "returned no reward, but rollout.returns_reward = true"),
        ("1.0", False, None, "the program returned 1.0. Set rollout.returns_reward = true"),
        ("float('nan')", True, None, "a reward is a finite number"),
        ("True", True, None, "the program returned True as reward"),
        ("'1'", True, None, "the program returned '1' as reward"),
        ("object()", True, None, "Object of type object is not JSON serializable"),
    ],
)
def test_the_reward_is_what_the_function_returns(lab, program, returns, returns_reward, reward, error):
    trajectory = lab.one(program(f"{ASKS}return {returns}", returns_reward=returns_reward))
    assert error in trajectory.error
    assert (trajectory.status == "failed") == bool(error), trajectory.error
    if not error:
        assert trajectory.turns[-1].reward == reward


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ValueError('broken here ' + api_key)", "ValueError: broken here <key>"),
        (f"{ASKS}import os; os._exit(3)", "ended with exit code 3"),
        (f"{ASKS}import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        (
            f"{ASKS}import sys; print('bye'); sys.exit(0)",
            "ended before its function returned. The end of its output:\nbye",
        ),
        ("print('x')", "ended without an answer from the policy. It must send requests to the endpoint"),
        ("import missing_module", "No module named 'missing_module'"),
    ],
)
def test_a_program_that_fails_is_a_failed_sample_with_its_cause(lab, program, body, error):
    trajectory = lab.one(program(body))
    assert trajectory.status == "failed"
    assert error in trajectory.error
    assert trajectory.error.startswith("RolloutError: ")


def test_a_program_that_hangs_is_killed_with_all_that_it_started(lab, program, wire):
    body = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
import os
note(task, os.getpid(), child.pid)
ask(base_url, api_key)
time.sleep(600)
"""
    trajectory = lab.one(program(body), {"wire": wire.path}, deadline=4.0)
    assert trajectory.status == "failed"
    assert "took over stream.rollout_deadline = 4.0 s" in trajectory.error
    [pids] = wire()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    "body",
    [
        "import os, time\nchild = os.fork()\nif not child: time.sleep(600)\nnote(task, child)\nask(base_url, api_key)",
        "import os, time\nif not os.fork():\n    os.setsid()\n    note(task, os.getpid())\n    time.sleep(600)\n"
        f"while not os.path.exists(task['wire']): time.sleep(0.01)\ntime.sleep(0.2)\n{ASKS}",
    ],
    ids=["in its session", "in another session"],
)
def test_what_a_program_leaves_behind_is_killed(lab, program, wire, body):
    trajectory = lab.one(program(body), {"wire": wire.path})
    assert trajectory.status != "failed", trajectory.error
    assert gone(wire()[0][0])


DRIVER = """
import asyncio, sys
from rlhf_plugin_agent.config import AgentConfig
from rlhf_plugin_agent.program import AgentProgram

async def main():
    program = AgentProgram(AgentConfig(command=(sys.executable, "-c", sys.argv[1])), {}, "http://x/v1", "key", 0)
    await program.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_outlives_a_driver_that_is_killed(tmp_path):
    """A program that ignores signals, and what it started in another session."""
    pids = tmp_path / "pids"
    program = f"import signal, time\nsignal.signal(15, signal.SIG_IGN)\n{orphans.leaving(pids)}\ntime.sleep(600)"
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", DRIVER, program]), pids)


def test_any_amount_of_output_is_read(lab, program):
    body = f"{ASKS}print('x' * 5_000_000, flush=True)\nraise SystemExit('end')"
    trajectory = lab.one(program(body))
    assert trajectory.error.endswith("xxx\nend")
    assert len(trajectory.error) < 3000


def test_a_command_gets_the_task_and_may_give_the_reward(lab, tmp_path):
    script = tmp_path / "agent.py"
    text = (Path(__file__).parent / "ask.py").read_text()
    text += "\nimport os, sys\ntask = json.load(sys.stdin)\n"
    text += "at = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"
    text += "ask(*at, [{'role': 'user', 'content': task['prompt']}])\n"
    script.write_text(text)
    command = (sys.executable, str(script))
    assert lab.one({"command": command}).turns[-1].reward is None
    assert "returned no reward" in lab.one({"command": command, "returns_reward": True}).error
    script.write_text(text + "os.write(int(os.environ['RLHF_RESULT_FD']), b'{\"reward\": 0.5}')\n")
    assert lab.one({"command": command, "returns_reward": True}).turns[-1].reward == 0.5
    script.write_text(text + "os.write(int(os.environ['RLHF_RESULT_FD']), b'half')\n")
    assert "the program sent b'half' as its result" in lab.one({"command": command, "returns_reward": True}).error


def test_many_samples_each_with_its_own_key(lab, program, wire):
    rows = [{"wire": wire.path, "n": n} for n in range(3)]
    groups = lab.groups(program("note(task, task['n'], api_key)\n" + ASKS, concurrency=2), rows, samples=2)
    assert all(t.status != "failed" for g in groups for t in g.trajectories), groups
    assert len({key for _, key in wire()}) == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "set exactly one of program = 'file:PATH.py:FUNCTION' and command"),
        ({"program": "file:a.py:run", "command": ("x",)}, "exactly one of"),
        ({"program": "a.py"}, "program is 'a.py'; allowed: 'file:PATH.py:FUNCTION'"),
        ({"command": ("x",), "python": "python3"}, "python applies only to program"),
        ({"command": ()}, "at least 1 item"),
        ({"program": "file:a.py:run", "concurrency": 0}, "greater than 0"),
    ],
)
def test_options_that_fit_no_program_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        Agent.Config(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"program": "file:missing.py:run"}, "cannot read .*missing.py"),
        ({"program": "file:{folder}/agent.py:walk"}, "defines no 'walk'; it defines run"),
        ({"program": "file:{folder}/broken.py:run"}, "cannot read .* as Python"),
        ({"program": "file:{folder}/none.py:run"}, "cannot read .*none.py': No such file or directory. Give the path"),
        ({"program": "file:{folder}/agent.py:run", "python": "no-python"}, "'no-python' is not a program"),
        ({"program": "file:{folder}/agent.py:run", "environment": ("UNSET_X",)}, "UNSET_X is not set"),
        ({"command": ("no-such-program",)}, "the program 'no-such-program' was not found"),
    ],
)
def test_what_is_missing_is_found_before_the_run(tmp_path, options, error):
    (tmp_path / "agent.py").write_text("def run(task, base_url, api_key): ...\n")
    (tmp_path / "broken.py").write_text("def run(:\n")
    options = {k: v.format(folder=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(ConfigError, match=error):
        Agent(Agent.Config(**options)).check()


def test_a_row_that_is_no_json(lab, program):
    trajectory = lab.one(program(ASKS), {"value": b"bytes"})
    assert "the row cannot be given to the program as JSON" in trajectory.error


def test_no_descriptor_is_left_open(lab, program):
    options = program(ASKS)
    lab.one(options)
    count = len(os.listdir("/proc/self/fd"))
    lab.one(options)
    assert len(os.listdir("/proc/self/fd")) <= count
