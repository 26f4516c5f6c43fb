"""The peak of the resident memory of a process, also where the system does not report it in /proc."""

from __future__ import annotations

from pathlib import Path

from rlhf.process_memory import resident


def test_the_peak_is_that_of_the_status_or_of_the_process(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    1940 kB\n")
    assert resident(status) == 1940 * 1024
    status.write_text("VmSize:\t9 kB\nVmRSS:\t7 kB\nVmData:\t5 kB\n")  # as gVisor writes it
    assert resident(status) > 2**20
    assert resident(tmp_path / "missing") > 2**20
