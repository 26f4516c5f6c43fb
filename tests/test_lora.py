"""Runs with adapters: the reference is the base of the policy and needs no second model; what they export in PEFT's
form is a model for other runs."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict

import pytest
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_testing.models import model_path

from tests.pages import ROOT

KL = {"kl": {"coef": 0.1, "where": "loss", "estimator": "k3"}}


def test_the_base_view_gives_the_numbers_of_a_second_reference_model(shop, monkeypatch):
    launch, roles = LocalLauncher.launch_trainer, []

    def launch_trainer(self, trainer, config, spec):
        roles.append(spec.role.name)
        return launch(self, trainer, config, spec)

    monkeypatch.setattr(LocalLauncher, "launch_trainer", launch_trainer)
    changes = {"trainer": {"lora": {"rank": 4}, "lr": 1e-2}, "algorithm": KL}
    base_view = shop.train("grpo", "base_view", **changes).lines()
    assert roles == ["policy"]
    second_model = shop.train("grpo", "second_model", placement={"reference": {}}, **changes).lines()
    assert roles == ["policy", "policy", "reference"]
    for first, second in zip(base_view, second_model, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert abs(value - second[name]) <= 1e-4 * max(1.0, abs(value)), name
    shop.train("grpo", "same_place", placement={"reference": {"share": "policy"}}, **changes, run={"steps": 1})
    assert roles[3:] == ["policy"], "the base view is in the policy's process, and no devices are reserved"
    del roles[3:]
    shop.train("grpo", "own_settings", reference={"micro_tokens": 64}, **changes, run={"steps": 1})
    assert roles[3:] == ["policy", "reference"], "options of the reference are not ignored"
    assert any(value > 0 for name, value in base_view[-1].items() if "kl" in name), sorted(base_view[-1])


@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("vllm", marks=[pytest.mark.cluster, pytest.mark.full])]
)
def test_the_rollout_of_the_page_compares_with_a_base_that_does_not_change(shop, engine):
    pytest.importorskip("vllm" if engine == "vllm" else "transformers")
    page = (ROOT / "docs/how-to/adapters.md").read_text(encoding="utf-8")
    file = shop.file("against_base.py", re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    assert shop.command("plugins", "check", f"file:{file}", "--kind", "rollout").code == 0
    reward = "def score(prompt, completion, row):\n    return sum(map(ord, completion)) % 97 / 97\n"
    changes = {
        "policy": {"model": str(model_path("qwen3", head_dim=32))},
        "rollout": {"use": f"file:{file}"},
        "reward": [{"use": f"file:{shop.file('letters.py', reward)}"}],
        "run": {"steps": 6},
        "trainer": {"lora": {"rank": 4}, "lr": 1e-1},
    }
    if engine == "vllm":
        changes["generator"] = {"use": "vllm", "kv_cache_gib": 0.0625, "max_sequences": 16}
    merged = shop.run("rloo", "merged", "--dry-run", **changes)
    assert (merged.code == 2) == ("Set --sync.adapters alone" in merged.said) == (engine == "vllm"), merged.said
    run = shop.train("rloo", "run", **changes, sync={"adapters": "alone" if engine == "vllm" else "merged"})
    of_prompts = defaultdict(list)
    for sample in run.samples():
        of_prompts[sample["turns"][0]["text"]].append(sample["info"]["rollout/base_reward"])
    assert {len(values) for values in of_prompts.values()} == {2 * 3}, "two epochs"
    assert all(len(set(values)) == 1 for values in of_prompts.values())
    assert len({values[0] for values in of_prompts.values()}) > 1


def test_an_exported_adapter_is_the_start_and_the_reference_of_a_run(shop):
    lora = {"trainer": {"lora": {"rank": 4}, "lr": 1e-2}}
    first = shop.train("sft", "first", **lora)
    adapter = {"policy": {"model": str(first.path / "model" / "adapter")}}
    merged = {"policy": {"model": str(first.path / "model")}}
    going_on = shop.train("dpo", "going_on", **lora, **adapter).lines()
    second_model = shop.train("dpo", "beside", **lora, **adapter, reference=merged["policy"]).lines()
    other = shop.train("dpo", "other", **lora, **adapter, reference={"model": adapter["policy"]["model"]}).lines()
    for line, model_line, other_line in zip(going_on, second_model, other, strict=True):
        assert abs(line["policy/loss"] - model_line["policy/loss"]) < 1e-5, "the reference is the policy at its start"
        assert abs(line["policy/loss"] - other_line["policy/loss"]) < 1e-5
    assert abs(going_on[0]["policy/loss"] - 0.6931) < 1e-3
    starts = [shop.train("sft", f"sft-{n}", run={"steps": 1}, **m).lines()[0] for n, m in enumerate((adapter, merged))]
    assert abs(starts[0]["policy/loss"] - starts[1]["policy/loss"]) < 1e-5, "merged"


def test_an_adapter_with_a_head_is_a_reward_model(shop):
    trained = shop.train("reward_model", "rm", trainer={"lora": {"rank": 4}, "lr": 1e-2})
    rewards = []
    for number, model in enumerate((trained.path / "model", trained.path / "model" / "adapter")):
        reward = [{"use": f"model:{model}", "normalise": True}]
        run = shop.train("rloo", f"run-{number}", reward=reward, run={"steps": 1})
        rewards.append(run.lines()[-1]["reward/mean"])
    assert abs(rewards[0] - rewards[1]) < 1e-4


def test_an_adapter_without_its_base_is_refused_before_the_start(shop):
    first = shop.train("sft", "first", trainer={"lora": {"rank": 4}}, run={"steps": 1})
    folder = shop.folder / "moved"
    shutil.copytree(first.path / "model" / "adapter", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "/models/gone"}))
    run = shop.run("sft", "run", "--dry-run", policy={"model": str(folder)})
    assert (run.code, "adapter of /models/gone, but this folder does not exist" in run.said) == (1, True), run.said
    run = shop.run("sft", "run", "--dry-run", policy={"model": str(first.path / "model" / "adapter")},
                   trainer={"lora": {"rank": 8}})  # fmt: skip
    assert (run.code, "trainer.lora.rank is 8" in run.said) == (2, True), run.said


@pytest.mark.cluster  # the generator vllm
def test_adapters_that_cannot_go_alone_are_refused_before_the_start(shop):
    pytest.importorskip("vllm")
    options = {"generator": {"use": "vllm"}, "sync": {"adapters": "alone"}}
    for trainer, message in (
        ({"lora": {"rank": 4, "use_dora": True}}, "sync.adapters = 'alone': trainer.lora.use_dora"),
        ({}, "sync.adapters = 'alone': the policy trains no adapters"),
    ):
        run = shop.run("grpo", "run", "--dry-run", trainer=trainer, **options)
        assert (run.code, message in run.said) == (2, True), run.said
