"""`rlhf doctor` as users run it: a process of its own, on this machine and on spoiled ones."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf_testing.tiny import tiny_model

INSTALLATION = [
    *("python", "versions", "requirements", "vision packages", "torch", "nccl", "transformers", "plugins"),
    *("cores", "memory", "shared memory", "open files", "loopback", "disk", "environment"),
]
OF_PLUGINS = ["code", "deepspeed", "ray", "ray start", "ray cluster", "vllm"]
STUB = "raise ImportError('left out of this test')"


def doctor(*words, env=None, cwd=None):
    """(exit code, standard output, standard error)."""
    command = [sys.executable, "-m", "rlhf_cli.main", "doctor", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}, cwd=cwd
    )
    return done.returncode, done.stdout, done.stderr


def report(*words, **options):
    code, out, err = doctor(*words, "--json", **options)
    result = json.loads(out)
    assert err == ""
    assert code == (1 if result["status"] == "fail" else 0)
    assert result["status"] == ("fail" if any(c["status"] == "fail" for c in result["checks"]) else "ok")
    assert all(set(c) == {"name", "status", "text", "remedy"} for c in result["checks"])
    return {check["name"]: check for check in result["checks"]}


@pytest.fixture
def light(tmp_path):
    """An environment without the frameworks, so that their checks end at once (and fail)."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("torch", "transformers", "vllm", "deepspeed", "ray"):
        (site / f"{name}.py").write_text(STUB)
    return {"PYTHONPATH": str(site), "COLUMNS": "200"}


@pytest.fixture
def run_file(tmp_path):
    """A run that lacks nothing."""
    tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = '[algorithm]\nuse = "rloo"\n[policy]\nmodel = "model"\n[data]\ntrain = "rows.jsonl"\n[run]\noutput = "out"\n'
    (tmp_path / "run.toml").write_text(text + '[[reward]]\nuse = "math"\n')
    return tmp_path


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cluster
def test_this_machine_and_a_run(run_file):
    """Everything once, frameworks included."""
    start = time.monotonic()
    checks = report("run.toml", cwd=run_file, env={"HF_TOKEN": "hf_0123456789abcdefghij", "OMP_NUM_THREADS": "1"})
    run = ["run file", "run plugins", "policy.model", "data", "output", "output disk"]
    assert list(checks) == INSTALLATION + run + OF_PLUGINS
    failed = {name: check["text"] for name, check in checks.items() if check["status"] == "fail"}
    assert failed == {}
    skipped = {name for name, check in checks.items() if check["status"] == "skipped"}
    assert skipped <= {"nccl", "ray start", "ray cluster", "vllm", "deepspeed", "ray"}
    assert checks["run plugins"]["text"].startswith("advantage rloo, algorithm rloo, generator transformers, ")
    assert "HF_TOKEN" in checks["environment"]["text"]
    assert "hf_0123456789abcdefghij" not in json.dumps(checks)
    assert sorted(p.name for p in run_file.iterdir()) == ["model", "rows.jsonl", "run.toml"], "it left nothing"
    assert time.monotonic() - start < 300


def test_a_broken_installation_is_a_table_whose_lines_come_when_a_check_ends_and_exit_code_1(light, tmp_path):
    """The check of transformers ends only after the line of an earlier check was read."""
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\n{STUB}"
    (tmp_path / "site" / "transformers.py").write_text(wait)
    command = [sys.executable, "-m", "rlhf_cli.main", "doctor", "--timeout", "20"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **light}) as process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("torch "):
                gate.touch()
            if line.startswith("transformers "):
                assert "left out of this test" in line, "it was not waited for until the deadline"
    assert process.returncode == 1
    assert lines[0].split() == ["check", "status", "result,", "and", "what", "to", "do"]
    [index] = [number for number, line in enumerate(lines) if line.startswith("vllm ")]
    assert lines[index].split()[1] == "fail"
    assert "ImportError: left out of this test" in lines[index]
    assert lines[index + 1].split()[:2] == ["To", "do:"]
    assert " ok, " in lines[-1]
    assert " fail, " in lines[-1]


def test_json_names_every_check_once_and_what_a_run_lacks(light, run_file):
    (run_file / "rows.jsonl").unlink()
    (run_file / "out").mkdir()
    (run_file / "out" / "config.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = ("run.toml", "--policy.model", "modell", "--launcher.address", address)
    checks = report(*words, cwd=run_file, env=light)
    of_run = ["run file", "run plugins", "policy.model", "data", "output", "output disk"]
    # no "ray start": Ray itself cannot be imported here
    of_plugins = ["code", "deepspeed", "ray", "ray cluster", "ray nodes", "vllm"]
    assert list(checks) == [*INSTALLATION, *of_run, *of_plugins]
    assert checks["ray cluster"]["text"] == f"{address}: Connection refused"
    assert checks["ray nodes"]["status"] == "skipped"
    assert checks["run file"]["status"] == "ok"
    assert checks["policy.model"]["status"] == "skipped", "it may be the name of a model on a hub"
    assert checks["data"]["text"] == "cannot be read: rows.jsonl"
    assert checks["output"]["text"] == "out already holds a run"
    assert checks["run plugins"]["status"] == "fail"
    assert checks["run plugins"]["text"].startswith("algorithm 'rloo' (rlhf-plugin-rloo ")


def test_wrong_usage():
    code, _, err = doctor("--timeout", "0")
    assert (code, err) == (2, "rlhf: --timeout 0: it must be more than 0 seconds\n")


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys\nfrom rlhf_cli.main import main\ntry:\n    main(['doctor', '--help'])\n"
        "finally:\n    print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    start = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.endswith("False False\n")
    assert "RUN.TOML" in done.stdout
    seconds = after.children_user + after.children_system - start.children_user - start.children_system
    assert seconds < 0.5, "of the processor: other processes may share it"


def test_the_page_names_every_check():
    page = (Path(__file__).parents[3] / "docs/how-to/doctor.md").read_text()
    missing = [name for name in INSTALLATION + OF_PLUGINS if f"| `{name}` |" not in page]
    assert missing == []
