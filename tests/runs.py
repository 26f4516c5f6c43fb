"""Whole runs for tests: models and data of a few kilobytes, run files, and readers of run directories."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tomli_w
from pyarrow import feather
from rlhf_cli.main import main
from rlhf_runtime.checkpoint.saved_groups import recorded
from rlhf_runtime.output.metrics import MEASURED, read_metrics

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "response": str(a + b)} for a in range(3) for b in range(4)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(4) for b in range(3)]
LABELS = [{"prompt": f"{a}+1=", "response": str(a + b), "label": b == 1} for a in range(4) for b in range(3)]
REWARD = """
async def score(prompt, completion, row):
    digits = sum(c in "0123456789" for c in completion)
    return digits / 6 + (row["answer"] in completion)
"""
"""This reward differs between the answers of an untrained model, so a run can learn from it."""

ALGORITHMS = ("ppo", "reinforce_pp", "reinforce_pp_baseline", "grpo", "dr_grpo", "rloo")
"""Algorithms that sample and score."""
ROWS = {"sft": PROMPTS, "dpo": PAIRS, "reward_model": PAIRS, "kto": LABELS}
"""Algorithms that learn from data, with the form of their data."""

Say = Callable[..., tuple[int, str, str]]
"""A command of `rlhf`: (exit code, standard output, standard error)."""


def require(*packages: str) -> None:
    """Skip a file of tests where one of its packages is not installed. None is imported: that of DeepSpeed, and of
    MLflow with it, takes seconds in each process that collects the file."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, table by table; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


@dataclass(frozen=True)
class Workshop:
    """A folder with tiny models, data and runs."""

    folder: Path
    model: Path
    data: Path

    def file(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def config(self, algo: str, output: str, **changes: Any) -> dict[str, Any]:
        """A run file of three short steps, as nested tables."""
        base: dict[str, Any] = {
            "run": {"output": str(self.folder / output), "steps": 3, "seed": 1},
            "algorithm": {"use": algo},
            "data": {"train": str(self.data), "batch_size": 4, "max_tokens": 64},
            "policy": {"model": str(self.model), "dtype": "fp32"},
            "trainer": {"lr": 1e-3},
        }
        if algo in ROWS:
            base["data"]["train"] = str(self.data if algo == "sft" else self.rows(f"{algo}.jsonl", ROWS[algo]))
        else:
            base["sampling"] = {"samples_per_prompt": 3, "max_new_tokens": 6}
            base["reward"] = [{"use": f"file:{self.file('reward.py', REWARD)}"}]
        return merged(base, changes)

    def arguments(self, config: Mapping[str, Any], *flags: str) -> list[str]:
        """The command line that runs ``config``. Roles with ``dtype = "auto"`` are fp32, whatever the machine."""
        config = merged(config, {"roles": {role: {"dtype": "fp32"} for role in _frozen(config)}})
        output = Path(config["run"]["output"])
        path = output.parent / f"{output.name}.toml"
        path.write_text(tomli_w.dumps(config))
        return ["train", str(path), *flags]

    def run(self, algo: str, output: str, *flags: str, **changes: Any) -> Finished:
        """Run in this process and return the result; the run may fail."""
        return self.run_config(self.config(algo, output, **changes), *flags)

    def run_config(self, config: Mapping[str, Any], *flags: str) -> Finished:
        return self.command(*self.arguments(config, *flags), output=config["run"]["output"])

    def command(self, *words: str, output: str | Path = "") -> Finished:
        """``rlhf WORDS`` in this process. ``output``: its run directory, if it makes one."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        return Finished(Path(output), code, out.getvalue(), err.getvalue())

    def train(self, algo: str, output: str, *flags: str, **changes: Any) -> Finished:
        """:meth:`run`, which must succeed."""
        return self.train_config(self.config(algo, output, **changes), *flags)

    def train_config(self, config: Mapping[str, Any], *flags: str) -> Finished:
        """:meth:`run_config`, which must succeed."""
        finished = self.run_config(config, *flags)
        assert finished.code == 0, finished.said
        return finished


@dataclass(frozen=True)
class Finished:
    """A run directory and how its process ended."""

    path: Path
    code: int
    out: str = field(default="", repr=False)
    err: str = field(default="", repr=False)

    @property
    def said(self) -> str:
        """Everything that was printed."""
        return self.out + self.err

    def lines(self) -> list[dict[str, Any]]:
        """``metrics.jsonl`` without what is measured: times, throughput, memory."""
        return [
            {name: value for name, value in line.items() if not name.startswith(MEASURED)}
            for line in read_metrics(self.path / "metrics.jsonl")
        ]

    @property
    def weights(self) -> bytes:
        """The final model, as bytes."""
        return (self.path / "model" / "model.safetensors").read_bytes()

    @property
    def last_checkpoint(self) -> Path:
        return max((self.path / "checkpoints").glob("step-*"))

    def checkpoint(self) -> dict[str, Any]:
        """{file: size and checksum} of the newest checkpoint: weights, optimizer, data order, counters, best value."""
        return json.loads((self.last_checkpoint / "manifest.json").read_text())["files"]

    def rollouts(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.path / "rollouts").glob("*"))}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Every sample that a step was trained on, in order."""
        for name in self.rollouts():
            yield from self.samples_of(name)

    def samples_of(self, name: str) -> Iterator[dict[str, Any]]:
        """The samples of one file of ``rollouts/``."""
        yield from read_rows(self.path / "rollouts" / name)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The samples in an Arrow file, as the JSON lines of `rlhf eval --save` have them."""
    return json.loads(json.dumps([values for _, values in recorded(path)], default=lambda array: array.tolist()))


def change_rows(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of an Arrow file."""
    table = feather.read_table(path, memory_map=False)
    rows = table.to_pylist()
    change(rows)
    feather.write_feather(pa.Table.from_pylist(rows, table.schema), path, compression="uncompressed")


def assert_same_run(a: Finished, b: Finished) -> None:
    """Assert that two runs are bit-equal, except wall times and the folder's name."""
    assert [line["step"] for line in a.lines()] == [line["step"] for line in b.lines()]
    for first, second in zip(a.lines(), b.lines(), strict=True):
        assert first == second
    assert a.rollouts() == b.rollouts()
    assert a.checkpoint() == b.checkpoint()
    assert a.weights == b.weights


def _frozen(config: Mapping[str, Any]) -> list[str]:
    """The roles of rewards with a model that the run file does not configure."""
    role_names = {"model": "reward_model", "prm": "process_reward_model"}
    used = [(role_names.get(reward["use"].partition(":")[0]), reward) for reward in config.get("reward", [])]
    roles = [reward.get("role", role) for role, reward in used if role is not None]
    return [role for role in roles if role not in config.get("roles", {})]
