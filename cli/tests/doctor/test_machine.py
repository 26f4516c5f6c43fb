import os
import subprocess
import sys

import pytest
from rlhf.interfaces import Finding
from rlhf_cli.doctor import machine
from rlhf_cli.doctor.examine import redacted
from rlhf_cli.doctor.machine import GIB


def in_a_namespace(kind, setup, code):
    """The output of ``code``, run as root in its own mount or network namespace."""
    script = f"{setup} && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["unshare", kind, "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode and ("not permitted" in done.stderr or "Permission denied" in done.stderr):
        pytest.skip("needs root")
    assert done.returncode == 0, done.stderr
    return done.stdout


def show(call):
    return f"from rlhf_cli.doctor import machine; c = machine.{call}; print(c.status, c.text, c.remedy, sep=chr(10))"


# -------------------------------------------------------------------------------------- shared memory


def test_shared_memory_too_small():
    out = in_a_namespace("-m", "mount -t tmpfs -o size=64m tmpfs /dev/shm", show("shared_memory()"))
    status, text, remedy = out.splitlines()
    assert status == "warn"
    assert text == "/dev/shm: 0.1 GiB, 0.1 GiB free"
    assert "the weight sync need 2.0 GiB" in remedy
    assert "--shm-size" in remedy


def test_shared_memory_full():
    fill = "mount -t tmpfs -o size=2304m tmpfs /dev/shm && head -c 400M /dev/zero > /dev/shm/left-behind"
    status, text, remedy = in_a_namespace("-m", fill, show("shared_memory()")).splitlines()
    assert (status, text) == ("warn", "/dev/shm: 2.2 GiB, 1.9 GiB free")
    assert "remove leftover files from" in remedy


def test_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    check = machine.shared_memory(tmp_path / "none")
    assert (check.status, check.text) == ("warn", f"there is no {tmp_path / 'none'}")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.shared_memory(tmp_path / "none").status == "skipped"


def test_shared_memory_large_enough(tmp_path):
    check = machine.shared_memory(tmp_path, minimum=1)
    assert (check.status, check.remedy) == ("ok", "")


# ------------------------------------------------------------------------------------------- loopback


def test_loopback():
    check = machine.loopback()
    assert (check.status, check.text) == ("ok", "127.0.0.1: 32 free ports opened and reached")


def test_loopback_that_is_down():
    status, text, remedy = in_a_namespace("-n", "true", show("loopback()")).splitlines()
    assert status == "fail"
    assert text.startswith("127.0.0.1: ")
    assert "ip link set lo up" in remedy


# ----------------------------------------------------------------------------------------- open files


@pytest.mark.parametrize(("hard", "advice"), [(20000, "ulimit -n 20000"), (512, "ulimit -n 8192 as root")])
def test_few_open_files(hard, advice):
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard})); " + show("file_descriptors()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, text, remedy = done.stdout.splitlines()
    assert (status, text) == ("warn", f"256 open files (at most {hard})")
    assert advice in remedy


def test_enough_open_files():
    assert machine.file_descriptors(minimum=1).status == "ok"


# ------------------------------------------------------------------------------------ cores and memory


def cgroup(tmp_path, **files):
    """A control group /job/step with files in the folders named."""
    (tmp_path / "fs" / "job" / "step").mkdir(parents=True)
    membership = tmp_path / "own"
    membership.write_text("0::/job/step\n")
    for place, text in files.items():
        (tmp_path / "fs" / place.replace("__", "/").replace("_", ".")).write_text(text)
    return tmp_path / "fs", membership


def test_the_lowest_limit_of_the_groups_counts(tmp_path):
    fs, membership = cgroup(
        tmp_path, job__cpu_max="150000 100000\n", job__step__cpu_max="300000 100000\n", cpu_max="max 100000\n"
    )
    assert machine.cpu_limit(fs, membership) == 1.5
    check = machine.cores(fs, membership, {"OMP_NUM_THREADS": "4"})
    assert check.status == "warn"
    assert "limited by the cgroup to the time of 1.5 cores; torch uses 4 threads" in check.text
    assert "OMP_NUM_THREADS=1 " in check.remedy
    assert machine.cores(fs, membership, {"OMP_NUM_THREADS": "1"}).status == "ok"


def test_more_threads_than_cores(tmp_path):
    cores = len(os.sched_getaffinity(0))
    check = machine.cores(tmp_path, tmp_path / "absent", {"OMP_NUM_THREADS": str(cores + 1)})
    assert check.status == "warn"
    assert f"OMP_NUM_THREADS={cores} " in check.remedy
    assert machine.cores(tmp_path, tmp_path / "absent", {}).text.endswith("(OMP_NUM_THREADS not set)")
    assert machine.cores(tmp_path, tmp_path / "absent", {"OMP_NUM_THREADS": "many"}).status == "warn"


def test_memory(tmp_path):
    fs, membership = cgroup(tmp_path, job__memory_max=f"{GIB // 2}\n", job__step__memory_max="max\n")
    check = machine.memory(fs, membership)
    assert check.status == "ok"
    assert check.text.endswith("limited to 0.5 GiB by the cgroup")
    assert machine.memory(fs, membership, tmp_path / "absent").status == "skipped"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {1000 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {500 * 2**20} kB\n")
    text = machine.memory(tmp_path / "none", tmp_path / "none", meminfo).text
    assert text == "1000.0 GiB, 500.0 GiB available"


# ----------------------------------------------------------------------------------- disk, environment


def test_disk(tmp_path):
    assert machine.disk(tmp_path, need=1 << 60, content="5 checkpoints").status == "warn"
    small = in_a_namespace(
        "-m",
        f"mount -t tmpfs -o size=2g tmpfs {tmp_path}",
        f'from pathlib import Path; from rlhf_cli.doctor import machine; c = machine.disk(Path("{tmp_path}"));'
        "print(c.status, c.text)",
    )
    assert small == f"warn {tmp_path}: 2.0 GiB of 2.0 GiB free\n"


def test_environment_by_name_only():
    check = machine.environment_variables({"HF_TOKEN": "hf_secretsecret", "RAY_ADDRESS": "here:1", "EDITOR": "vi"})
    assert check == Finding("environment", "ok", "HF_TOKEN, RAY_ADDRESS")


def test_a_finding_that_is_not_ok_must_have_a_remedy():
    with pytest.raises(ValueError, match="does not say what to do"):
        Finding("x", "warn", "something")


def test_secrets_are_not_shown():
    environment = {"HF_TOKEN": "hf_0123456789abcdefghij", "WANDB_API_KEY": "0123456789", "HOME": "/home/me"}
    check = redacted(Finding("x", "fail", "401 for hf_0123456789abcdefghij in /home/me", "key 0123456789"), environment)
    assert (check.text, check.remedy) == ("401 for $HF_TOKEN in /home/me", "key $WANDB_API_KEY")
