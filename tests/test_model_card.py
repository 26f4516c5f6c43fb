"""The model card in exports: what was run, without a path of the machine or a secret."""

from __future__ import annotations

import json

import yaml
from rlhf_runtime.loop.model_card import curve, public

from tests.runs import Workshop

REWARD = "def score(prompt, completion, row):\n    return float(len(completion))\n"


def test_the_card_says_what_was_run(shop: Workshop) -> None:
    reward = [{"use": f"file:{shop.file('own_reward.py', REWARD)}"}]
    run = shop.train("grpo", "run", data={"system": "Say 1/2."}, reward=reward, trainer={"lora": {"rank": 2}})
    text = (run.path / "model" / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1]) == {"library_name": "transformers", "tags": ["rlhf", "grpo"]}
    start = json.loads((run.path / "manifest.json").read_text())["starts"][0]
    [data] = start["data"]["train"].values()
    first, *_, last = run.lines()
    for words in (
        "`model` trained with `grpo`: the model after step 3",
        f"| 12 | `{data['fingerprint'][:16]}` |",
        f"| hash of policy.model | `{start['content']['policy.model'][:16]}` |",
        f"| reward/mean | {first['reward/mean']:.4g} | {last['reward/mean']:.4g} | ",
        "trainer.lora.rank = 2",
        'data.system = "Say 1/2."',
        '"file:own_reward.py"',
        "| torch | ",
        "| trainer torch | rlhf-plugin-local ",
        "Seed 1.",
    ):
        assert words in text, (words, text)
    for folder in (shop.folder, shop.model.parent):
        assert str(folder) not in text


def test_paths_addresses_and_secrets_are_left_out() -> None:
    assert public("/home/ada/models/base") == "base"
    assert public("models\\base") == "base"
    assert public("/Users/ada/My Drive/rows of ada.jsonl") == "rows of ada.jsonl"
    assert public("~/My Drive/rows.jsonl") == public("C:\\My Files\\rows.jsonl") == "rows.jsonl"
    assert public("owner/name@main") == "owner/name@main"
    assert public("file:/home/ada/reward.py:score") == "file:reward.py:score"
    assert public("http://10.0.0.1:8000/score") == "<address>"
    assert public({"api_key": "abc", "n": [1, "/data/x.jsonl"]}) == {"api_key": "<hidden>", "n": [1, "x.jsonl"]}
    assert public("Answer in 1/2 words.") == "Answer in 1/2 words."


def test_a_curve_is_a_line_of_text() -> None:
    assert curve([0.0, 1.0, 2.0, 7.0]) == "▁▂▃█"
    assert curve([1.0, 1.0]) == "▁▁"
    assert curve([float("nan")]) == ""
    assert len(curve([float(n) for n in range(1000)])) == 24
