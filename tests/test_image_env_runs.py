"""Runs in which the rows and an environment show images: recorded with the samples, and exact after a resume."""

import pytest
from rlhf_runtime.output.metrics import MEASURED
from rlhf_runtime.python.training import train
from rlhf_runtime.report.recorded_samples import read_samples
from rlhf_testing.image_models import drawing, tiny_image_model

ENV = """
import io
from PIL import Image
from rlhf.interfaces import Env
from rlhf.types import EnvStep

class Look(Env):
    name = "look"

    def reset(self, row, seed):
        self.steps = 0
        return "first"

    def step(self, action):
        self.steps += 1
        file = io.BytesIO()
        Image.new("RGB", (16 * self.steps, 32), "blue").save(file, "PNG")
        return EnvStep("next", sum(map(str.isdigit, action)) / 8, self.steps == 3, images=(file.getvalue(),))
"""


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_a_run_with_images_goes_on_exactly_after_a_resume(family, tmp_path):
    (tmp_path / "env.py").write_text(ENV)
    rows = []
    for colour in ("red", "green", "white", "blue"):
        (tmp_path / f"{colour}.png").write_bytes(drawing(40, 24, colour))
        rows.append({"prompt": "colour?", "images": str(tmp_path / f"{colour}.png")})
    options = {
        "policy.dtype": "fp32",
        "data.batch_size": 2,
        "sampling.max_new_tokens": 6,
        "sampling.samples_per_prompt": 3,
        "rollout.use": "multi_turn",
        "env.use": f"file:{tmp_path / 'env.py'}",
        "trainer.lr": 1e-2,
        "checkpoint.every": 1,
        "checkpoint.save_rollouts": True,
    }
    arguments = {
        "algorithm": "grpo",
        "model": str(tiny_image_model(tmp_path / "model", family)),
        "data": rows,
        "steps": 3,
    }

    def stop(step, metrics, control):
        control.stop("half way")

    baseline = train(**arguments, options=options, output=tmp_path / "whole")
    half = train(**arguments, options=options, output=tmp_path / "half", observers=[stop])
    assert half.status == "stopped"
    rest = train(**arguments, options=options, output=tmp_path / "half", resume=True)
    untimed = [
        [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in run.metrics]
        for run in (baseline, rest)
    ]
    assert len(untimed[0]) == 3
    assert untimed[0] == untimed[1]
    assert any(row["policy/grad_norm"] > 0 for row in untimed[0][1:]), "nothing was learnt after the resume"
    for step in (1, 2, 3):
        samples = [
            read_samples(tmp_path / run / "rollouts" / f"step-00000{step}.arrow", step) for run in ("whole", "half")
        ]
        assert samples[0] == samples[1]
        assert samples[0][0].prompt == [{"role": "user", "content": "[image 40x24]colour?\n\nfirst"}]
        assert [t.text.split("]")[0] for t in samples[0][0].turns if t.speaker != "policy"] == [
            "[image 16x32",
            "[image 32x32",
        ]
