"""Parts of a run that meet rarely: each works alone, and together they must give the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runs import Finished, Workshop

COPYING = """
from rlhf.interfaces import ComponentConfig, Generator, ModelSpec
from rlhf.interfaces.generator import Proof
from rlhf.types import RoleSpec
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer


class Copying(Generator):
    '''An engine without an engine: samples from a copy of the policy that tensors are sent to.'''

    name = "copying"
    capabilities = frozenset({"accept:tensors", "logprobs", "seeds"})

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
"""Differs wherever the answer does."""


def scores(run: Finished) -> list[float]:
    return [line["eval/reward"] for line in run.lines() if "eval/reward" in line]


def test_answers_of_an_offline_run_are_those_of_the_policy_of_now(shop: Workshop) -> None:
    """Also where the generator holds a copy of the weights."""
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
    assert len(set(scores(embedded))) > 1, "it learns something, so its answers change"
    assert scores(copied) == scores(embedded)
    assert [line.get("sync/version") for line in copied.lines()] == [None, None, 2, 3], (
        "sent where answers are asked for"
    )


def test_a_run_that_ends_before_its_policy_is_trained_is_refused(shop: Workshop) -> None:
    warm_up: dict[str, Any] = {"algorithm": {"critic_warmup": 3}}
    refused = shop.run("ppo", "run", **warm_up)
    assert refused.code == 2
    assert "ppo configured like this updates 'policy' in none of the run's 3 steps" in refused.said
    assert not refused.path.exists(), "nothing was started"
    assert shop.train("ppo", "run", **warm_up, run={"steps": 4}).lines()[3]["policy/grad_norm"] > 0


def test_an_export_that_a_kill_came_before_is_made_by_the_resume(shop: Workshop) -> None:
    """The process died between the checkpoint of a step and the export of it."""
    config = {"run": {"steps": 5}, "checkpoint": {"every": 2, "export_every": 2}}
    whole = shop.train("sft", "whole", **config)
    stopped = {"observer": [{"use": f"file:{shop.file('dying.py', DYING)}"}]}
    broken = shop.run("sft", "broken", **config, **stopped)
    assert broken.code == 1
    assert "no further" in broken.said
    assert exports(broken) == {}
    resumed = shop.train("sft", "broken", "--resume", **config)
    assert exports(resumed) == exports(whole)
    assert {path.parent.name for path in exports(whole)} == {"step-000002", "step-000004"}
    again = shop.train("sft", "broken", "--resume", **config)
    assert exports(again) == exports(whole), "a finished run exports nothing more"


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
