"""One recorded batch of policy-gradient samples and one of demonstrations, and a trainer's gradients on them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ours_gradients import demonstrations, groups
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.models.roles import Role
from rlhf_runtime.setup.launch import launch_roles
from rlhf_runtime.setup.prepare import Prepared, prepare
from rlhf_testing.tiny import CHARS, tiny_model
from torch import Tensor

SIZES = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 1024}
SMALL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 128}
ALGORITHMS = ("grpo", "sft")
REWARD = Path(__file__).resolve().parents[1] / "ours_reward.py"
VOCABULARY = 3 + len(CHARS)


@dataclass
class Learnt:
    """The results of one algorithm with one setting."""

    gradients: dict[str, Tensor]
    logprobs_N: Tensor
    kernels: dict[str, int] = field(default_factory=dict)
    """{operation of attention: calls}."""


class Recorded:
    """Model, data files and batches in a folder."""

    def __init__(self, folder: Path, small: bool) -> None:
        self.folder, self.small = folder, small
        self.model = tiny_model(folder / "model", std=0.05, **(SMALL if small else SIZES))
        self.rows = {
            "grpo": _file(folder / "prompts.jsonl", '{"prompt": "1+1="}\n'),
            "sft": _file(folder / "rows.jsonl", '{"prompt": "1+1=", "completion": "2"}\n'),
        }
        self.batches = record(random.Random(0), *((2, 3, 24) if small else (4, 8, 192)))

    def run_file(self, algorithm: str, device: str, dtype: str, **sections: Mapping[str, Any]) -> RunFile:
        """One step of an algorithm with its defaults; ``sections`` are laid over."""
        run: dict[str, Any] = {
            "run": {"output": str(self.folder / "run"), "steps": 1},
            "algorithm": algorithm,
            "policy": {"model": str(self.model), "dtype": dtype, "micro_tokens": 4096},
            "trainer": {"device": device},
            "data": {"train": str(self.rows[algorithm]), "batch_size": 1, "max_tokens": 2048},
        }
        if algorithm == "sft":
            run["data"]["response"] = "completion"
        else:
            run |= {"reward": f"file:{REWARD}:score", "sampling": {"samples_per_prompt": 2, "max_new_tokens": 16}}
        for name, section in sections.items():
            run[name] = {**run.get(name, {}), **section}
        return RunFile.model_validate(run)

    def learn(self, algorithm: str, device: str, dtype: str, **sections: Mapping[str, Any]) -> Learnt:
        """Gradients and log-probs of the recorded batch; nothing is updated."""
        prepared = prepare(self.run_file(algorithm, device, dtype, **sections), Plugins.discover())
        launcher = prepared.parts["launcher"].build()
        try:
            return learn(prepared, launch_roles(prepared, launcher)["policy"], self.batches[algorithm])
        finally:
            launcher.shutdown()


def learn(prepared: Prepared, policy: Role, examples: Any) -> Learnt:
    batch, _ = prepared.algorithm.assemble(examples)
    assert batch is not None
    logprobs_N = policy.forward(batch, [resolve_head("logprobs", None)])["logprobs"]
    batch, _ = prepared.algorithm.credit(batch)
    [update] = prepared.algorithm.updates(0, batch)
    loss = prepared.algorithm.parts[update.loss]
    weighed: Batch = weigh(loss.prepare(batch), loss.reduce())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients = policy.gradients(weighed, loss, update)
    return Learnt(gradients, logprobs_N, attention_calls(profile))


def attention_calls(profile: Any) -> dict[str, int]:
    """Calls of torch's attention kernels. Our own matrix products (for short sequences on a CPU) are not counted."""
    count: Counter[str] = Counter()
    for event in profile.key_averages():
        name = event.key.rpartition("::")[2].strip("_")
        chosen = "dot_product" in name and name != "scaled_dot_product_attention"
        if (chosen or "varlen_attn" in name) and "backward" not in name:
            count[name] += event.count
    return dict(count)


def record(draw: random.Random, prompts: int, samples: int, longest: int) -> dict[str, Any]:
    """{algorithm: what it assembles}. Samples of a prompt share it; answers have any length up to ``longest``."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    grouped = []
    for _ in range(prompts):
        prompt, answers = (
            ids(draw.randrange(longest // 4, longest)),
            [ids(draw.randrange(1, longest + 1)) for _ in range(samples)],
        )
        grouped.append({"prompt": prompt, "answers": answers, "rewards": [draw.random() for _ in answers]})
    rows = [{"prompt": ids(8), "answer": ids(draw.randrange(longest // 8, 2 * longest))} for _ in range(prompts * 4)]
    return {"grpo": groups(grouped), "sft": demonstrations(rows)}


def distance(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """|ours - theirs| / |theirs| over all parameters together."""
    if gradients.keys() != reference.keys():
        raise ValueError(f"the parameters with gradients differ: {sorted(gradients.keys() ^ reference.keys())}")
    squares = sum(float((gradients[n].double() - reference[n].double()).square().sum()) for n in reference)
    return (squares / sum(float(t.double().square().sum()) for t in reference.values())) ** 0.5


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
