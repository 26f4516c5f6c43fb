"""A tiny model that writes calls and thoughts, and a laboratory that runs a rollout as a run does, for the rollouts in
which a program asks the policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from rlhf.interfaces import GeneratorSpec, ModelSpec, Rollout
from rlhf.ops.trajectories import assemble
from rlhf.types import RewardResult, RoleSpec, Row, Sampling
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts
from rlhf_testing.tiny import CHARS, tiny_model

CALL = '<tool_call>\n{"name": "add",  "arguments": {"a": 1, "b": 2}}\n</tool_call>'
"""With two spaces, which no client and no template writes."""
PIECES = {CALL: 1.0, "<think>\nhm\n</think>\n\n": 0.9, "It is 3. ": 0.9, "</code>": 0.7, "<eos>": 1.1}
"""{text of a token: how often it is sampled}. No text is encoded as one of them except the end token: a sampled answer
that is tokenised again has other tokens."""


def talking_model(path: Path, template: str, call: str = CALL) -> Path:
    """A model's folder, with a chat template. One dimension of its hidden states is the same everywhere, so that the
    head can prefer tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pieces = {call if text == CALL else text: often for text, often in PIECES.items()}
    tiny_model(
        path,
        tied=False,
        max_position_embeddings=32768,
        chars=[*CHARS, *(p for p in pieces if p != "<eos>")],
        chat_template=template,
    )
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 3.0
        model.get_output_embeddings().weight[:, 0] = 0.0
        for text, often in pieces.items():
            model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids(text), 0] = often
    model.save_pretrained(path)
    return path


class Scorer:
    async def score(self, group, trained_on=True):
        for t in group.trajectories:
            if t.status != "failed":
                rewards = [turn.reward for turn in t.turns if turn.reward is not None]
                t.rewards["one"] = RewardResult(1.0)
                t.reward = t.score = sum(rewards) if rewards else 1.0


class Laboratory:
    """The embedded generator and the trainer whose module it samples from."""

    def __init__(self, path):
        self.trainer = TorchTrainer(
            None, ModelSpec(RoleSpec("policy", trained=True), str(path), dtype="fp32", total_updates=4)
        )
        tokenizer = self.trainer.tokenizer
        self.template = Template(tokenizer, DataSection())
        spec = GeneratorSpec(
            tuple(self.trainer.eos_token_ids), lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        )
        self.generator = TransformersGenerator(None, spec)
        self.generator.load(self.trainer, 0)
        self.main = MainThread()

    def groups(self, rollout: Rollout, rows=({},), samples=1, **settings):
        """The groups of rows, each with so many samples."""
        rollout.check()
        rollouts = Rollouts(SampleParts(rollout, self.template, Scorer()), self.generator, self.main)
        fixed = {"sampling": Sampling(12), "purpose": "sample", "seed": 1, "max_tokens": 2000, "deadline": 60.0}
        settings = RolloutSettings(samples=samples, abort_on_failure=False, **{**fixed, **settings})
        examples = [Row({"prompt": "1+2?", **row}, "rows", n) for n, row in enumerate(rows)]
        groups = rollouts.run(examples, 0, settings)
        for group in groups:
            self.check(group)
        return groups

    def check(self, group):
        """The log-probs of all that was sampled are the trainer's."""
        alive = [t for t in group.trajectories if t.status != "failed"]
        if not alive:
            return
        batch = assemble([group], scored=False)
        logprobs = self.trainer.forward([batch], ["logprobs"])[0]["logprobs"]
        trained = batch.tok["loss_mask"]
        assert int(trained.sum()) == sum(t.sampled_tokens for t in alive), "each sampled token is trained on once"
        assert (logprobs - batch.tok["gen_logprobs"])[trained].abs().max() < 1e-5

    def text(self, trajectory):
        """The sequences of a trajectory, as text."""
        texts = []
        for turn in trajectory.turns:
            text = self.template.tokenizer.decode(turn.ids)
            if turn.fresh or not texts:
                texts.append("")
            texts[-1] += text
        return texts

    def close(self):
        self.main.close()


def python_with(folder: Path, name: str, *requirements: str) -> str:
    """The Python of a virtual environment with packages. ``RLHF_TEST_ENVIRONMENTS`` names a folder in which such
    environments are kept; ``folder`` is used without it."""
    parent = os.environ.get("RLHF_TEST_ENVIRONMENTS")
    environment = (Path(parent) if parent else folder) / name
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
    return str(python)
