"""The doctor survives every failure of a probe and reports it."""

import subprocess
import sys
import time

import pytest
from rlhf_cli.doctor import probes
from rlhf_cli.doctor.child import ask

from tests import orphans


def test_a_probe_returns_values_and_not_prints(site):
    site.module("chatty", "print('noise on standard output')\n__version__ = '1.2'\n")
    site.module("torch", "")  # the probe imports torch first: not needed here, and slow
    answer = ask(probes.module, "chatty")
    assert (answer.error, answer.values) == ("", ["1.2"])
    assert "noise on standard output" in answer.log
    assert 0 < answer.seconds < 30


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os; os._exit(7)", "ended with exit code 7"),
        ("import os; os._exit(0)", "ended without an answer"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise RuntimeError('no such device')", "RuntimeError: no such device"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ImportError('outer') from e", "ZeroDivisionError"),
        (
            "from rlhf.errors import ConfigError; raise ConfigError('2 problems\\nrun.sed\\nrun.x')",
            "2 problems\nrun.sed\nrun.x",
        ),
    ],
)
def test_a_module_that_dies_is_an_error_with_its_first_cause(site, source, error):
    site.module("torch", "")
    site.module("deadly", source)
    answer = ask(probes.module, "deadly")
    assert answer.error.startswith(error)
    assert answer.values == []


@pytest.mark.linux("elsewhere only the group of a probe is known")
def test_a_probe_that_hangs_is_killed_with_all_that_it_started(site, tmp_path):
    site.module("torch", "")
    pids = tmp_path / "pids"
    site.module("slow", f"import time\n{orphans.leaving(pids)}\ntime.sleep(1000)\n")
    start = time.monotonic()
    answer = ask(probes.module, "slow", timeout=5)
    assert answer.error == "no answer within 5 s"
    assert time.monotonic() - start < 100
    assert orphans.end(orphans.left(pids))


DRIVER = "import sys; from rlhf_cli.doctor import child, probes; child.ask(probes.module, 'slow', 600)"


@pytest.mark.linux("elsewhere a probe outlives a doctor that is killed")
def test_nothing_outlives_a_doctor_that_is_killed_in_a_probe(site, tmp_path):
    site.module("torch", "")
    pids = tmp_path / "pids"
    site.module("slow", f"import time\n{orphans.leaving(pids)}\ntime.sleep(1000)\n")
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", DRIVER]), pids)


def test_files_of_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert ask(probes.module, "sys").error == ""
