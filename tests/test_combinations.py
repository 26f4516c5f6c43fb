"""Rare combinations of options: each works alone, and together they must give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import Head
from rlhf_runtime.loop.saves import Saves
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.runs import LABELS, PAIRS, Finished, Workshop, assert_same_run, merged

COPYING = """
from rlhf.interfaces import ComponentConfig, Generator, ModelSpec, TakesTensors
from rlhf.interfaces.generator import Proof
from rlhf.types import RoleSpec
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer


class Copying(TakesTensors, Generator):
    '''Samples from a copy of the policy that gets its weights as tensors, like an engine.'''

    name = "copying"
    capabilities = frozenset({"logprobs", "seeds"})

    def __init__(self, config, spec):
        self.config = ComponentConfig()
        self.copy = TorchTrainer(None, ModelSpec(RoleSpec("policy"), spec.path, "fp32"))
        self.inner = TransformersGenerator(None, spec)
        self.inner.load(self.copy, 0)

    def generate(self, requests):
        return self.inner.generate(requests)

    def begin_load(self, version):
        self.coming, self.tensors, self.received = version, [], {}

    def take(self, bucket):
        self.received |= bucket.received()
        self.tensors += [(name, tensor.clone()) for name, tensor in bucket.tensors]

    def end_load(self):
        self.copy.load_weights(iter(self.tensors))
        self.inner.load(self.copy, self.coming)
        self.version = self.coming
        return [Proof(self.version, received=self.received)]
"""
TEXT = """
async def score(prompt, completion, row):
    return sum(ord(c) * n for n, c in enumerate(completion, 1)) % 97 / 97
"""
"""This reward differs for different answers."""


def scores(run: Finished) -> list[float]:
    return [line["eval/reward"] for line in run.lines() if "eval/reward" in line]


def test_answers_of_an_offline_run_use_the_current_weights(shop: Workshop) -> None:
    """Also if the generator holds a copy of the weights."""
    changes: dict[str, Any] = {
        "trainer": {"lr": 3e-2},
        "reward": [{"use": f"file:{shop.file('text.py', TEXT)}"}],
        "sampling": {"max_new_tokens": 6},
        "data": {"eval": str(shop.data)},
        "eval": {"every": 2, "at_start": True},
        "sync": None,
    }
    embedded = shop.train("sft", "embedded", **changes)
    copying = {"use": f"file:{shop.file('copying.py', COPYING)}"}
    copied = shop.train("sft", "copied", generator=copying, **changes | {"sync": {"canaries": 0}})
    assert len(scores(embedded)) == 3
    assert len(set(scores(embedded))) > 1, "the run learns, so its answers change"
    assert scores(copied) == scores(embedded)
    assert [line.get("sync/version") for line in copied.lines()] == [None, None, 2, 3], (
        "weights are sent before answers are sampled"
    )


def test_a_run_that_ends_before_its_policy_is_trained_is_refused(shop: Workshop) -> None:
    refused = shop.run("ppo", "run", algorithm={"critic_warmup": 3})
    assert refused.code == 2
    assert "ppo configured like this does not update 'policy' in any of the run's 3 steps" in refused.said
    shop.train("ppo", "run", "--dry-run", algorithm={"critic_warmup": 3}, run={"steps": 4})


def test_an_average_that_bf16_would_stop_is_refused(shop: Workshop) -> None:
    soft: dict[str, Any] = {
        "data": {"train": str(shop.rows("pairs.jsonl", PAIRS))},
        "policy": {"storage": "bf16", "dtype": "bf16"},
    }
    soft |= {"algorithm": {"snapshot_every": 2, "snapshot_share": 0.05}}
    refused = shop.run("dpo", "run", **soft)
    assert refused.code == 2
    assert "Set --reference.storage fp32" in refused.said
    shop.train("dpo", "run", "--dry-run", **soft, reference={"storage": "fp32", "dtype": "bf16"})


def test_a_resume_makes_an_export_that_a_kill_prevented(shop: Workshop) -> None:
    """The process died between the checkpoint of a step and the export of it."""
    config = {"run": {"steps": 5}, "checkpoint": {"every": 2, "export_every": 2}}
    baseline = shop.train("sft", "whole", **config)
    stopped = {"observer": [{"use": f"file:{shop.file('dying.py', DYING)}"}]}
    broken = shop.run("sft", "broken", **config, **stopped)
    assert broken.code == 1
    assert "no further" in broken.said
    assert exports(broken) == {}
    resumed = shop.train("sft", "broken", "--resume", **config)
    assert exports(resumed) == exports(baseline)
    assert {path.parent.name for path in exports(baseline)} == {"step-000002", "step-000004"}
    repeat = shop.train("sft", "broken", "--resume", **config)
    assert exports(repeat) == exports(baseline), "a finished run exports nothing more"


DYING = """
from rlhf.interfaces import Observer


class Dying(Observer):
    name = "dying"

    def checkpoint_saved(self, step, path):
        raise ValueError("no further")
"""


def exports(run: Finished) -> dict[Path, bytes]:
    root = run.path / "exports"
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# -------------------------------------------------------------------------------- many options at once

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tied": False},
    "gemma2": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 8.0, "sliding_window": 6},
    "mistral": {"sliding_window": 6, "attention_dropout": 0.1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tied": False},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
LORA = {"rank": 4}
KL: dict[str, Any] = {"coef": 0.1, "target": 0.01}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "critic": (
        "ppo",
        "llama",
        {
            "algorithm": {"epochs": 2, "minibatches": 2, "critic_warmup": 1, "kl": KL, "mask_truncated": True},
            "trainer": {"lora": {**LORA, "dropout": 0.2}, "ema_decay": 0.7, "schedule": "linear", "warmup_steps": 2},
            "stream": {"staleness": 1},
        },
    ),
    "rounds": (
        "grpo",
        "gemma2",
        {
            "algorithm": {"kl": {"coef": 0.1, "where": "loss", "snapshot_every": 2}},
            "trainer": {"logits_chunk": 400, "schedule": "cosine", "weight_decay": 0.1},
            "stream": {"round": 2, "filter": {"min_std": 0.05}},
            "eval": {"every": 3},
        },
    ),
    "following": (
        "dpo",
        "mistral",
        {
            "algorithm": {"snapshot_every": 2, "snapshot_share": 0.6},
            "trainer": {"lora": {**LORA, "targets": ["q_proj", "v_proj"]}, "ema_decay": 0.7},
        },
    ),
    "answers of both": (
        "distill_on_policy",
        "qwen3",
        {"algorithm": {"sampled": 0.5}, "trainer": {"lora": LORA}, "policy": {"dtype": "bf16"}},
    ),
    "experts": ("kto", "qwen3_moe", {"trainer": {"aux_loss_coef": 0.02, "ema_decay": 0.7}, "eval": {"every": 2}}),
    "scores": ("reward_model", "mixtral", {"trainer": {"lora": LORA}, "eval": {"every": 2, "at_start": True}}),
}
"""{combination: (algorithm, family, changes)}. Each case also uses gradient checkpointing, micro-batches of two or
three sequences, and several passes over its rows with a batch size that does not divide their number."""

STOPPING = """
from rlhf.interfaces import Observer


class Stopping(Observer):
    name = "stopping"

    def step_finished(self, step, metrics):
        if step == 3:
            raise KeyboardInterrupt  # nothing is saved, like after a kill
"""
PROBES = [[5, 9, 20, 31, 7, 8], [70, 71], [12, 40, 3, 3, 17, 18, 19, 50, 61, 4, 33]]


def case(shop: Workshop, folder: Path, name: str) -> tuple[str, dict[str, Any]]:
    """(algorithm, changes of its run file), with its own model."""
    algorithm, family, changes = CASES[name]
    model = tiny_model(folder / family, architecture=family, hidden=16, heads=4, kv_heads=2, **FAMILIES[family])
    rows = {"dpo": PAIRS, "reward_model": PAIRS, "kto": LABELS}.get(algorithm)
    data = str(shop.rows("rows.jsonl", rows[:11]) if rows else shop.data)
    base: dict[str, Any] = {
        "run": {"steps": 4},
        "policy": {"model": str(model), "gradient_checkpointing": True, "micro_tokens": 24},
        "trainer": {"lr": 5e-3},
        "data": {"train": data, "batch_size": 5},
        "checkpoint": {"every": 2},
    }
    if algorithm == "distill_on_policy":
        base |= {"roles": {"teacher": {"model": str(shop.model)}}, "reward": None}
    if algorithm in ("ppo", "grpo"):
        base["sampling"] = {"max_new_tokens": 4, "samples_per_prompt": 2}
    if "eval" in changes:
        base["data"]["eval"] = [{"path": data, "max_rows": 4, "name": "held_out"}]
    return algorithm, merged(base, changes)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of the run's policy for the probes, at each export."""
    probe_outputs: list[Tensor] = []
    write_model = Saves.write_model
    units = [
        UnitData([SequenceData(ids, {"loss_mask": [False] * len(ids), "every": [True] * len(ids)})]) for ids in PROBES
    ]

    def listened(self: Saves, path: Path) -> None:
        policy = self._state.roles["policy"]
        view = "ema" if "ema" in policy.facts.views else "live"
        probe_outputs.append(
            policy.forward(pack(units), [Head("outputs", _as_they_are, over="every", position="at")], view)["outputs"]
        )
        write_model(self, path)

    monkeypatch.setattr(Saves, "write_model", listened)
    return probe_outputs


def _as_they_are(outputs_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return outputs_CV


@pytest.mark.parametrize(
    "name", [name if name in ("critic", "experts") else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_many_options_at_once(shop: Workshop, live: list[Tensor], name: str) -> None:
    """A run that was stopped and resumed equals an uninterrupted one. transformers computes the same from the export,
    one sequence at a time. All trained parameters changed, and no others."""
    algorithm, changes = case(shop, shop.folder, name)
    baseline = shop.train(algorithm, "whole", **changes)
    final = live[-1]  # the best model is exported before it
    stopping = {"observer": [{"use": f"file:{shop.file('stopping.py', STOPPING)}"}]}
    assert shop.run(algorithm, "broken", **changes, **stopping).code == 130
    resumed = shop.train(algorithm, "broken", "--resume", **changes)
    assert "resumed after step 2" in resumed.said
    assert_same_run(resumed, baseline)
    assert torch.equal(live[-1], final)

    tolerance = 0.1 if changes["policy"].get("dtype") == "bf16" else 1e-4
    torch.testing.assert_close(outputs(baseline.path / "model"), final, atol=tolerance, rtol=0)
    old_weights, new_weights = (
        load_file(Path(p) / "model.safetensors") for p in (changes["policy"]["model"], baseline.path / "model")
    )
    moved = {n for n in old_weights if n in new_weights and not torch.equal(old_weights[n], new_weights[n])}
    lora = changes["trainer"].get("lora")
    adapted = {
        n
        for n in new_weights
        if new_weights[n].ndim >= 2 and not any(w in n for w in ("embed_tokens", "lm_head", "score"))
    }
    trained = {n for n in old_weights if n in new_weights}
    if lora is not None:
        trained &= {n for n in adapted if n.removesuffix(".weight").endswith(tuple(lora.get("targets", ("_proj",))))}
    routed = {
        n for n in old_weights if "expert" in n or ".gate." in n
    }  # some get no token, and transformers' are no linear layers
    assert moved - routed == trained - routed


def outputs(folder: Path) -> Tensor:
    """The results of transformers for an export, sequence by sequence, with its own attention."""
    config = AutoConfig.from_pretrained(folder)
    scores = "SequenceClassification" in config.architectures[0]
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_pretrained(folder, attn_implementation="eager")
    logits = []
    with torch.no_grad():
        for ids in PROBES:
            hidden = model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state
            logits.append(model.score(hidden)[0] if scores else model(torch.tensor([ids]), use_cache=False).logits[0])
    return torch.cat(logits)
