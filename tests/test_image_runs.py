"""Whole runs of image-text models: embedded, on a cluster with vLLM, over turns, resumed."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.types import Image, RoleSpec
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.model import load_model
from rlhf_runtime.output.metrics import read_metrics
from rlhf_testing.image_models import drawing, tiny_image_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.runs import PROMPTS, Finished, Workshop, assert_same_run, merged

COLOURS = ("red", "blue", "green", "black")
SHOWS = """
import io

from PIL import Image
from rlhf.interfaces import Env
from rlhf.types import EnvStep


class Shows(Env):
    '''Answers the first action with an image of another size for each length of the action.'''

    name = "shows"

    async def reset(self, row, seed):
        self._turns = 0
        return "look"

    async def step(self, action):
        self._turns += 1
        file = io.BytesIO()
        Image.new("RGB", (32, 32 + 16 * (len(action) % 2)), "yellow").save(file, "PNG")
        return EnvStep("again", len(action) / 10, done=self._turns == 2, images=(file.getvalue(),))
"""
VLLM: dict[str, Any] = {
    "launcher": {"use": "ray", "cpus": 2},
    "generator": {"use": "vllm", "kv_cache_gib": 0.0625, "max_sequences": 16},
}


def drawn_rows(folder: Path) -> Path:
    """Half of the rows have an image, one has two. Writes ``rows.jsonl`` and, for pairs, ``pairs.jsonl``."""
    rows = []
    for number, colour in enumerate(COLOURS * 2):
        (folder / f"{colour}.png").write_bytes(drawing(32, 32 + 16 * (number % 2), colour))
        files: list[str] = [[], [f"{colour}.png"]][number % 2]
        rows.append({"prompt": f"c{number}", "images": files, "response": colour, "answer": colour})
    rows[0]["images"] = ["red.png", "blue.png"]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{**row, "chosen": row["response"], "rejected": "none"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return data


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("images")
    return Workshop(folder, tiny_image_model(folder / "model", "qwen3_vl"), drawn_rows(folder))


def changes(shop: Workshop, algorithm: str, **settings: Any) -> dict[str, Any]:
    """Of a run file: room for the tokens of images."""
    data = {"max_tokens": 128} | ({"train": str(shop.folder / "pairs.jsonl")} if algorithm == "dpo" else {})
    return merged({"data": data}, settings)


def vision_moved(shop: Workshop, path: Path) -> bool:
    """Whether the run has trained the part that reads images."""
    old_weights, new_weights = (
        load_file(shop.model / "model.safetensors"),
        load_file(path / "model" / "model.safetensors"),
    )
    assert old_weights.keys() == new_weights.keys()
    return any("visual" in name and not old_weights[name].equal(new_weights[name]) for name in old_weights)


FULL = [pytest.param(algorithm, marks=pytest.mark.full) for algorithm in ("sft", "dpo", "ppo")]


@pytest.mark.parametrize("algorithm", ["grpo", *FULL])
def test_embedded(images, algorithm):
    run = images.train(algorithm, f"{algorithm}-embedded", **changes(images, algorithm))
    lines = run.lines()
    assert len(lines) == 3
    assert all(line["policy/grad_norm"] > 0 for line in lines)
    assert vision_moved(images, run.path)
    assert (run.path / "model" / "processor_config.json").exists()
    if algorithm in ("grpo", "ppo"):
        assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)  # the trainer read the sampler's images


def test_a_teacher_that_reads_text_only_is_refused_before_the_first_step(images, tmp_path):
    """Its tokens and the student's are the same; it would read those of an image as words."""
    size = len(AutoTokenizer.from_pretrained(images.model))
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": size, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = changes(images, "distill_on_policy", reward=None, roles={"teacher": {"model": str(tmp_path)}})
    done = images.run("distill_on_policy", "text-teacher", "--dry-run", **settings)
    assert done.code == 1
    assert "the data have images, but the model" in done.err
    assert "of role 'teacher' is a Qwen3ForCausalLM, which reads text only" in done.err


def test_a_teacher_with_other_tokens_of_images_is_refused_before_the_first_step(images):
    teacher = tiny_image_model(images.folder / "teacher", "qwen3_vl")
    file = teacher / "processor_config.json"
    processor = json.loads(file.read_text())
    processor["image_processor"]["size"]["longest_edge"] //= 2  # as another family's: larger images get fewer tokens
    file.write_text(json.dumps(processor))
    settings = changes(images, "distill_on_policy", reward=None, roles={"teacher": {"model": str(teacher)}})
    done = images.run("distill_on_policy", "other-teacher", "--dry-run", **settings)
    assert done.code == 1
    assert "role 'teacher'" in done.err
    assert "reads an image of 64x64 pixels as" in done.err


@pytest.mark.full
def test_a_reward_model_sees_the_images_of_samples(images):
    """Its outputs are those of the model for each sample with its images, and not those without."""
    offline = {"sampling": None, "reward": None, "run": {"steps": 1}, "trainer": {"lr": 0.01}}
    pairs = {"data": {"train": str(images.folder / "pairs.jsonl")}}
    path = images.train("reward_model", "judge", **changes(images, "reward_model", **merged(offline, pairs))).path
    run = images.train("grpo", "judged", **changes(images, "grpo", reward=[{"use": f"model:{path / 'model'}"}]))
    model = load_model(ModelSpec(RoleSpec("judge", head="scalar"), str(path / "model")), torch.device("cpu"))
    count = 0
    for sample in run.samples():
        ids, output = [i for turn in sample["turns"] for i in turn["ids"]], sample["rewards"]["model"]["value"]
        pictures = tuple(Image(**{**i, "data": b64decode(i["data"])}) for i in sample["turns"][0]["images"])
        score, blind = (_score(model, torch.tensor(ids), inputs) for inputs in (pictures, ()))
        assert output == pytest.approx(score, abs=1e-4)
        assert not pictures or abs(output - blind) > 1e-3
        count += bool(pictures)
    assert count
    inputs = [{**json.loads(line), "answers": ["red"]} for line in images.data.read_text().splitlines()[:2]]
    images.rows("given.jsonl", inputs)  # the first has two images, the second one
    output = images.folder / "scored.jsonl"
    words = ("--data", str(images.folder / "given.jsonl"), "--reward", f"model:{path / 'model'}", "-o", str(output))
    done = images.command("score", *words, "--answers", "answers", "--roles.reward_model.dtype", "fp32")
    assert done.code == 0, done.said
    for scored in map(json.loads, output.read_text().splitlines()):
        ids = torch.tensor([i for turn in scored["turns"] for i in turn["ids"]])
        pictures = tuple(Image(**{**i, "data": b64decode(i["data"])}) for i in scored["turns"][0]["images"])
        assert pictures
        assert scored["rewards"]["model"]["value"] == pytest.approx(_score(model, ids, pictures), abs=1e-4)


@torch.no_grad()
def _score(model: LoadedModel, ids_T: torch.Tensor, images: tuple[Image, ...]) -> float:
    hidden_TH = model.hidden(ids_T, torch.arange(len(ids_T)), [len(ids_T)], (images,) if images else ())
    return float(model.logits(hidden_TH[-1:]))


def over_turns(shop: Workshop, output: str, *flags: str, **settings: Any) -> Finished:
    """A run of two turns, with an image between them."""
    env = {"use": f"file:{shop.file('shows.py', SHOWS)}", "max_turns": 2}
    base = merged({"rollout": {"use": "multi_turn"}, "env": env, "reward": None}, settings)
    run = shop.train("grpo", output, *flags, **changes(shop, "grpo", **base))
    assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in run.lines())
    observed = [turn for sample in run.samples() for turn in sample["turns"][2:] if not turn["sampled"]]
    assert observed
    assert all(len(turn["images"]) == 1 for turn in observed)
    return run


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_a_resume_is_exact_where_rows_and_an_environment_show_images(tmp_path, family):
    shop = Workshop(tmp_path, tiny_image_model(tmp_path / "model", family), drawn_rows(tmp_path))
    settings = {"checkpoint": {"every": 1}, "run": {"steps": 4}, "data": {"max_tokens": 1024}}
    baseline = over_turns(shop, "whole", **settings)
    over_turns(shop, "parted", "--run.stop_after", "2", **settings)
    assert_same_run(over_turns(shop, "parted", "--resume", **settings), baseline)
    assert any(line["policy/grad_norm"] > 0 for line in baseline.lines()[2:]), "nothing was learnt after the resume"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("generator", ["transformers", "vllm"])
def test_a_run_of_text_has_the_log_probs_of_transformers(images, generator, monkeypatch):
    """Rows without images: vLLM loads the text part of the model, and gets tokens only."""
    settings: dict[str, Any] = {}
    engines: list[dict[str, Any]] = []
    if generator == "vllm":
        pytest.importorskip("vllm")
        from rlhf_plugin_vllm.engine import engine

        of_engine = engine.arguments
        monkeypatch.setattr(engine, "arguments", lambda *args: engines.append(of_engine(*args)) or engines[-1])
        monkeypatch.setattr(engine.ImagePrompts, "prompt", lambda *args: pytest.fail("a prompt with images"))
        settings["generator"] = VLLM["generator"]
    shop = Workshop(images.folder, tiny_image_model(images.folder / "qwen2_5_vl"), images.rows("text.jsonl", PROMPTS))
    run = shop.train("grpo", f"text-{generator}", **settings)
    assert all(abs(line["policy/kl_generator"]) < 1e-8 and line["policy/grad_norm"] > 0 for line in run.lines())
    assert [engine_arguments["limit_mm_per_prompt"]["image"] for engine_arguments in engines] == [0] * (
        generator == "vllm"
    )
    model = AutoModelForImageTextToText.from_pretrained(shop.model, dtype=torch.float32).eval()
    samples = list(run.samples_of("step-000001.arrow"))
    assert len(samples) == 12
    for sample in samples:  # of the first step, by the weights of the file
        prompt, answer = sample["turns"]
        ids_1T = torch.tensor([[*prompt["ids"], *answer["ids"]]])
        with torch.no_grad():
            every_TV = model(input_ids=ids_1T).logits[0, len(prompt["ids"]) - 1 : -1].log_softmax(-1)
        plain_T = every_TV.gather(1, torch.tensor(answer["ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), plain_T, atol=2e-5, rtol=0)  # other order of sums


@pytest.mark.full
@pytest.mark.slow
def test_a_run_with_images_stops_where_the_engine_has_a_wrong_vision_tower(images, monkeypatch):
    pytest.importorskip("vllm")
    from rlhf_plugin_vllm.worker import reload

    end = reload.Reload.end

    @torch.no_grad()
    def wrong(self):
        missing = end(self)
        self.model.visual.merger.norm.weight.neg_()
        return missing

    monkeypatch.setattr(reload.Reload, "end", wrong)
    run = images.run("grpo", "wrong-tower", **changes(images, "grpo", generator=VLLM["generator"]))
    assert run.code != 0
    assert "log-probs of the canary with an image differ" in run.said


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["single turn", "turns", "continuous"])
def test_on_ray_with_vllm(images, mode):
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    settings = merged(VLLM, {"run": {"steps": 4}})
    if mode == "turns":
        over_turns(images, "ray-turns", **settings)
        return
    if mode == "continuous":
        settings["stream"] = {"mode": "continuous", "staleness": 1}
    run = images.train("grpo", f"ray-{mode.replace(' ', '-')}", **changes(images, "grpo", **settings))
    lines = read_metrics(run.path / "metrics.jsonl")
    assert all(line["sync/canary"] < 1e-5 for line in lines)
    if mode == "single turn":
        assert all(abs(line["policy/kl_generator"]) < 1e-8 for line in lines)
    assert vision_moved(images, run.path)
