"""Checks and measurements that need a GPU, in one JSON: kernels against float64, equal numbers in bf16, determinism,
speed and memory of steps at 0.6B, the sync and sleep of a hybrid engine, and GRPO and SFT compared with TRL.

    python benchmarks/gpu/run.py --result FILE [--only equality ...] [--skip vllm ...] [--seconds 1500]
    python benchmarks/gpu/run.py --result FILE --device cpu --small      # tests the script; the times mean nothing

Runs in a checkout, installed or not. What is expected is printed before anything is measured. The file is written
whenever a part of a section ends. A part that needs a package that is not installed, or a GPU, is not run, and the file
says so. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import predictions
from checkout import ROOT, use_checkout
from parts import BAD, NOT_RUN, TIMED_OUT, status_of, write

HERE = Path(__file__).resolve().parent
SECTIONS = {
    "attention": 60.0,
    "equality": 240.0,
    "determinism": 120.0,
    "training": 360.0,
    "sync": 210.0,
    "sleep": 210.0,
    "colocated": 590.0,
    "throughput": 590.0,
}
"""The sections in order, and the most seconds of each."""
GRACE = 10.0
"""Seconds beyond a section's own deadline before it is ended."""


class Report:
    """The JSON."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "format": 1,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "revision": revision(),
            "settings": settings,
            "machine": {},
            "sections": {},
        }

    def write(self) -> None:
        write(self.path, self.content)

    def take(self, name: str, file: Path, **facts: Any) -> dict[str, Any]:
        """What the section's process has written so far."""
        parts = json.loads(file.read_text())["parts"] if file.exists() else {}
        self.content["sections"][name] = section = {**facts, "parts": parts}
        self.write()
        return section


def main() -> int:
    arguments = parse()
    settings = {"device": arguments.device, "small": arguments.small, "seconds": arguments.seconds}
    settings |= {"only": arguments.only, "skip": arguments.skip}
    report = Report(arguments.result, settings)
    expected = predictions.of(arguments.only, arguments.device, arguments.small)
    report.content["predictions"] = predictions.compared(expected, {})
    report.write()
    print(*predictions.announced(expected), sep="\n", flush=True)
    deadline = time.monotonic() + arguments.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a section's process does not outlive this one
    with tempfile.TemporaryDirectory() as folder:
        settings["installed"] = not use_checkout(Path(folder) / "metadata")
        file = Path(folder) / "machine.json"
        code, output = Child("machine", file, 120, arguments).wait()
        if code != 0:
            print(f"the machine cannot be described, so nothing is run:\n{output}", file=sys.stderr)
            report.content["error"] = output
            report.write()
            return 1
        report.content["machine"] = json.loads(file.read_text())
        for name in arguments.only:
            run_section(name, report, Path(folder), deadline, arguments)
    report.content["predictions"] = rows = predictions.compared(expected, report.content["sections"])
    for row in rows:
        print(f"  expected: {row['expected']}; measured: {row['measured']}")
    report.content["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    report.write()
    sections = report.content["sections"]
    print(f"{arguments.result}: " + ", ".join(f"{name} {told(section)}" for name, section in sections.items()))
    return int(any(section["status"] in BAD for section in sections.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="parts or packages to leave out")
    parser.add_argument("--small", action="store_true", help="a tiny shape: tests the script only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for everything")
    peers = ROOT / ".venv-peers/bin/python"
    default = peers if peers.exists() else Path(sys.executable)
    parser.add_argument("--trl-python", type=Path, default=default, help="Python that has TRL")
    return parser.parse_args()


def run_section(name: str, report: Report, folder: Path, deadline: float, arguments: argparse.Namespace) -> None:
    seconds = min(SECTIONS[name], deadline - time.monotonic() - GRACE)
    print(f"{name}, at most {seconds:.0f} s", flush=True)
    start, file = time.monotonic(), folder / f"{name}.json"
    child = Child(name, file, max(seconds, 0.0), arguments)
    code, output = child.wait(lambda: report.take(name, file, status="running"))
    section = report.take(name, file, seconds=time.monotonic() - start)
    for part in section["parts"].values():
        if part["status"] == "running":
            part |= {"status": TIMED_OUT if child.late else "error", "error": output}
    section["status"] = status_of(section["parts"])
    if code != 0 and section["status"] not in BAD:  # it ended outside of any part
        section |= {"status": TIMED_OUT if child.late else "error", "error": output}
        print(f"  {section['status']}: {output[-1500:]}", flush=True)
    report.write()


def told(section: dict[str, Any]) -> str:
    """The status of a section, and the number of parts that were not run."""
    missing = [part for part in section["parts"].values() if part["status"] == NOT_RUN]
    incomplete = 0 < len(missing) < len(section["parts"])
    return section["status"] + (f" ({len(missing)} of {len(section['parts'])} parts not run)" if incomplete else "")


class Child:
    """The process of one section, and all processes that it starts."""

    def __init__(self, name: str, result: Path, seconds: float, arguments: argparse.Namespace) -> None:
        command = [sys.executable, str(HERE / "section.py"), name, "--result", str(result)]
        command += ["--shared", str(result.parent / "shared"), "--device", arguments.device, "--seconds", str(seconds)]
        command += ["--trl-python", str(arguments.trl_python), *(["--small"] if arguments.small else [])]
        command += ["--skip", *arguments.skip] if arguments.skip else []
        self.log = result.with_suffix(".log")
        self.late = False
        self.end = time.monotonic() + seconds + GRACE
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=None, stderr=log, start_new_session=True)

    def wait(self, tick: Any = lambda: None) -> tuple[int, str]:
        """(exit code, the end of what it wrote to stderr); ``tick`` is called every other second."""
        try:
            while True:
                try:
                    self.process.wait(2.0)
                    break
                except subprocess.TimeoutExpired:
                    tick()
                if time.monotonic() > self.end:
                    self.late = True
                    break
        finally:
            self._kill()
        return self.process.wait(), self.log.read_text(errors="replace")[-6000:]

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def revision() -> str:
    """The commit of the checkout, with a mark if files differ from it; empty if git does not know it."""
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.exit(main())
