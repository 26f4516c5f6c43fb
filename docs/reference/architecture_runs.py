"""Runs of ``rlhf train`` with a model's folder: a dry run, then one step, with each trainer and each sampler."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_cli.main import main

ONLINE = [
    "--reward", "file:reward.py", "--sampling.max_new_tokens", "4", "--sampling.samples_per_prompt", "4",
    "--generator.use",
]  # fmt: skip
PARTS: dict[str, tuple[str, list[str], str]] = {
    "torch": ("sft", ["--trainer.use", "torch"], "torch"),
    "fsdp": ("sft", ["--trainer.use", "fsdp"], "torch"),
    "deepspeed": ("sft", ["--trainer.use", "deepspeed"], "deepspeed"),
    "transformers": ("grpo", [*ONLINE, "transformers"], "transformers"),
    "vllm": ("grpo", [*ONLINE, "vllm", "--generator.kv_cache_gib", "0.0625"], "vllm"),
}
"""{trainer or sampler: (algorithm, flags, the package that it needs)}."""
COMMON = [
    "--steps", "1", "--data", "rows.jsonl", "--policy.dtype", "fp32", "--data.batch_size", "4", "--data.max_tokens",
    "64",
]  # fmt: skip
ROWS = [{"prompt": f"{a}+{b}=", "response": f"{a + b} is the sum"} for a in range(3) for b in range(4)]
REWARD = "async def score(prompt, completion, row):\n    return len(set(completion)) / 6\n"
CLOSE = 1e-3
"""Largest relative difference of a first loss, and of the norm of its gradients, between two trainers."""
COMPARED = ("policy/loss", "policy/grad_norm")


def in_process(work: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """What ``work`` returns in a process of its own, which may crash or hang: then ``failed`` says so."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-architectures-"))
    process = context.Process(target=_child, args=(work, folder))
    process.start()
    process.join(limit)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result
    except OSError:
        failure = f"took more than {limit:g} seconds" if late else f"its process ended with {process.exitcode}"
        return {"verdict": "raw", "failed": failure}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _child(work: Callable[[], dict[str, Any]], folder: Path) -> None:
    warnings.simplefilter("ignore")
    result = work()
    (folder / "result.part").write_text(json.dumps(result))
    (folder / "result.part").rename(folder / "result.json")


def run_part(part: str, model: Path, limit: float) -> dict[str, Any]:
    """One trainer or sampler with the model: ``verdict``, the reason in ``failed``, and the figures of the step."""
    package = PARTS[part][2]
    if importlib.util.find_spec(package) is None:
        return {"verdict": "not run", "failed": f"{package} is not installed"}
    with tempfile.TemporaryDirectory(prefix="rlhf-architectures-") as folder:
        return in_process(lambda: _train(part, model, Path(folder)), limit)


def _train(part: str, model: Path, folder: Path) -> dict[str, Any]:
    words = _words(part, model, folder)
    with contextlib.chdir(folder):
        for stage, extra in (("dry run", ["--dry-run"]), ("run", [])):
            try:
                code, text = _command([*words, *extra])
            except BaseException as error:
                return {"verdict": "raw", "stage": stage, "failed": f"{type(error).__name__}: {first_line(error)}"}
            if code != 0:
                message = text.split("rlhf: ", 1)[-1].strip() or f"exit code {code} and no words"
                return {"verdict": "refused", "stage": stage, "failed": message.splitlines()[0]}
        metrics = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return {"verdict": "yes"} | {name: metrics[name] for name in COMPARED if name in metrics}


def _words(part: str, model: Path, folder: Path) -> list[str]:
    """The command line of a run in ``folder``, with the files that it names."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(REWARD)
    algorithm, flags, _ = PARTS[part]
    return ["train", "--algo", algorithm, "--model", str(model.absolute()), "--output", "run", *COMMON, *flags]


def import_all(model: Path, parts: Sequence[str]) -> None:
    """Import what runs of these parts need, so that the processes that are forked from this one have it."""
    for part in parts:
        if PARTS[part][2] != "vllm" and importlib.util.find_spec(PARTS[part][2]):  # vLLM changes its process
            importlib.import_module(PARTS[part][2])
            with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
                _command([*_words(part, model, Path(place)), "--dry-run"])


def _command(words: list[str]) -> tuple[int, str]:
    """The exit code of ``rlhf WORDS`` and what it says on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, err.getvalue()


def run_parts(model: Path, parts: list[str], limit: float) -> dict[str, dict[str, Any]]:
    """{part: result}; a trainer whose first step is another one than that of ``torch`` is ``WRONG``."""
    results = {part: run_part(part, model, limit) for part in parts}
    for part in ("fsdp", "deepspeed"):
        if part in results:
            results[part] |= _difference(results[part], results.get("torch", {}))
    return results


def _difference(result: Mapping[str, Any], torch: Mapping[str, Any]) -> dict[str, Any]:
    if result["verdict"] != "yes" or torch.get("verdict") != "yes":
        return {}
    for name in COMPARED:
        value, reference = result[name], torch[name]
        if not abs(value - reference) <= CLOSE * max(1e-6, abs(reference)):
            return {"verdict": "WRONG", "failed": f"{name} {value:.6g}, and {reference:.6g} with trainer torch"}
    return {}


def first_line(error: BaseException) -> str:
    words = str(error).strip()
    return words.splitlines()[0] if words else ""
