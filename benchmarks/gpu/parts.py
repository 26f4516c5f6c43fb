"""A section consists of parts. Each is run, checked and recorded alone: a failed part does not stop the others, and
the file of a killed process holds the parts that it had finished."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, ERROR, NOT_RUN, TIMED_OUT = "passed", "failed", "error", "not run", "timed out"
BAD = (FAILED, ERROR, TIMED_OUT)
"""Statuses that make the exit code 1. A part whose packages are not installed is not run; that is not a failure."""


class NotRun(Exception):
    """Raised with the reason why a part cannot be run here."""


@dataclass
class Part:
    """The figures and checks of a part, filled while it runs."""

    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def at_most(self, what: str, value: float, limit: float) -> None:
        self.checks.append({"what": what, "value": value, "at most": limit, "passed": bool(value <= limit)})

    def at_least(self, what: str, value: float, limit: float) -> None:
        self.checks.append({"what": what, "value": value, "at least": limit, "passed": bool(value >= limit)})

    def holds(self, what: str, value: bool) -> None:
        self.checks.append({"what": what, "passed": bool(value)})


@dataclass
class Section:
    """One section's process: its options, its deadline, its file."""

    result: Path
    device: str
    """``cuda`` | ``cpu``."""
    small: bool
    work: Path
    """Folder of this section only, empty at first."""
    shared: Path
    """Folder of all sections of a run, for models that several use."""
    trl_python: Path
    skip: Sequence[str] = ()
    """Parts, or packages, to leave out."""
    deadline: float = math.inf
    """Of :func:`time.monotonic`."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def part(self, name: str, run: Callable[[Part], None], needs: Sequence[str] = (), seconds: float = 0.0) -> None:
        """Run a part and record its result.

        Args:
            needs: packages without which it is not run.
            seconds: the time that it needs at least; with less time left it is not run.
        """
        part, start = Part(), time.monotonic()
        record: dict[str, Any] = {"status": "running"}
        self.parts[name] = record
        self.write()
        try:
            self._possible(name, needs, seconds)
            run(part)
        except NotRun as reason:
            record |= {"status": NOT_RUN, "why": str(reason)}
        except (Exception, SystemExit) as error:  # the benchmarks that are reused here end by sys.exit
            text = "".join(traceback.format_exception(error))
            record |= {"status": ERROR, "error": f"{type(error).__name__}: {error}", "traceback": text[-6000:]}
        else:
            record["status"] = PASSED if all(c["passed"] for c in part.checks) else FAILED
        record |= {"seconds": time.monotonic() - start, "figures": part.figures, "checks": part.checks}
        self.write()
        _release()
        print(f"  {name}: {record['status']}{_reason(record)}", flush=True)

    def _possible(self, name: str, needs: Sequence[str], seconds: float) -> None:
        left_out = next((item for item in (name, *needs) if item in self.skip), None)
        if left_out is not None:
            raise NotRun(f"left out by --skip {left_out!r}")
        for package in needs:
            if importlib.util.find_spec(package) is None:
                raise NotRun(f"{package} is not installed")
        if self.left < seconds:
            raise NotRun(f"{self.left:.0f} s were left, it takes at least {seconds:.0f}")

    def needs_cuda(self) -> None:
        """Raise NotRun if the device is not a GPU."""
        if self.device != "cuda":
            raise NotRun("it needs a GPU, and --device is cpu")

    def write(self) -> None:
        write(self.result, {"parts": self.parts})


def status_of(parts: dict[str, dict[str, Any]]) -> str:
    """Of a section, from its parts."""
    statuses = [part["status"] for part in parts.values()]
    if any(status in BAD for status in statuses):
        return FAILED
    return NOT_RUN if all(status == NOT_RUN for status in statuses) else PASSED


def write(path: Path, value: dict[str, Any]) -> None:
    """Write strict JSON atomically: the file is whole or absent."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(strict(value), indent=1, allow_nan=False) + "\n")
    os.replace(draft, path)


def _release() -> None:
    """Release the GPU memory that torch keeps in reserve: the next part may start another process on the GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def strict(value: Any) -> Any:
    """Numbers that JSON does not have become text."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _reason(record: dict[str, Any]) -> str:
    bad = [c for c in record.get("checks", ()) if not c["passed"]]
    text = record.get("why") or record.get("error") or "; ".join(_check(c) for c in bad)
    return f" ({text[:300]})" if text else ""


def _check(check: dict[str, Any]) -> str:
    bound = next(
        (f" {check['value']:.3g}, {name} {check[name]:.3g}" for name in ("at most", "at least") if name in check), ""
    )
    return f"{check['what']}{bound}"
