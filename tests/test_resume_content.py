"""A resume compares the files that the run reads by a path: a model, a chat template, held-out rows. It restores the
state of the rollout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.runs import PAIRS, Workshop, assert_same_run


def copied(shop: Workshop) -> Path:
    """A model of this test."""
    return Path(shutil.copytree(shop.model, shop.folder / "model"))


def test_a_reference_that_was_trained_further_under_its_path_is_refused(shop: Workshop) -> None:
    """The checkpoint holds the policy. The frozen reference is loaded from its folder, with other weights now."""
    changes = {"policy": {"model": str(model := copied(shop))}, "checkpoint": {"every": 1}}
    baseline = shop.train("dpo", "whole", **changes)
    shop.train("dpo", "run", "--run.stop_after", "2", **changes)
    weights, content = load_file(model / "model.safetensors"), (model / "model.safetensors").read_bytes()
    save_file({name: w * 1.5 if "layers.1" in name else w for name, w in weights.items()}, model / "model.safetensors")
    for flags in (["--dry-run"], []):
        refused = shop.run("dpo", "run", "--resume", *flags, **changes)
        assert refused.code == 1
        assert "was saved with a different config:\n  content of policy.model: was " in refused.said
        assert "\n  content of reference.model: was " in refused.said
    (model / "model.safetensors").write_bytes(content)  # with another time, as in a copy
    (model / "README.md").write_text("no run reads this")
    resumed = shop.train("dpo", "run", "--resume", **changes)
    assert "content of" not in resumed.said
    assert_same_run(resumed, baseline)


def test_a_run_continues_with_a_model_and_rows_that_were_moved(shop: Workshop) -> None:
    rows = shop.rows("rows.jsonl", PAIRS)
    changes = {"policy": {"model": str(copied(shop))}, "data": {"train": str(rows)}, "checkpoint": {"every": 1}}
    baseline = shop.train("dpo", "whole", **changes)
    shop.train("dpo", "run", "--run.stop_after", "2", **changes)
    (folder := shop.folder / "moved").mkdir()
    model, data = (shutil.move(path, folder) for path in (shop.folder / "model", rows))
    changes |= {"policy": {"model": str(model)}, "data": {"train": str(data)}}
    Path(data).write_text(Path(data).read_text().replace("1", "2"))
    refused = shop.run("dpo", "run", "--resume", "--dry-run", **changes)
    assert "content of data.train.rows: was " in refused.said
    shop.rows("moved/rows.jsonl", PAIRS)
    resumed = shop.train("dpo", "run", "--resume", **changes)
    assert "read from another place, with the same content: " in resumed.said
    assert "different run" not in resumed.said
    assert_same_run(resumed, baseline)


ON_A_SERVER = """
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import RewardResult


class OnServerConfig(ComponentConfig):
    url: str
    bonus: float = 0.0


class OnServer(Reward):
    name = "on_server"
    Config = OnServerConfig
    layout = frozenset({"url"})

    def score(self, group):
        return [RewardResult(float(len(t.completion)) + self.config.bonus) for t in group.trajectories]
"""


def test_a_run_continues_with_the_new_address_of_a_rewards_server(shop: Workshop) -> None:
    reward = {"use": f"file:{shop.file('on_server.py', ON_A_SERVER)}", "url": "http://a"}
    shop.train("grpo", "run", "--run.stop_after", "2", reward=[reward])
    refused = shop.run("grpo", "run", "--resume", reward=[{**reward, "bonus": 1.0}])
    assert refused.code == 1
    assert "\n  reward.0.bonus: was 0.0, now 1.0" in refused.said
    resumed = shop.train("grpo", "run", "--resume", reward=[{**reward, "url": "http://b"}])
    assert "reward.0.url: was 'http://a', now 'http://b'" in resumed.said
    assert len(resumed.lines()) == 3


@pytest.mark.full
def test_another_chat_template_under_the_same_path_is_refused(shop: Workshop) -> None:
    template = shop.file("chat.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    changes = {"data": {"chat_template": str(template)}, "checkpoint": {"every": 1}}
    shop.train("sft", "run", "--run.stop_after", "2", **changes)
    template.write_text("{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}")
    refused = shop.run("sft", "run", "--resume", **changes)
    assert refused.code == 1
    assert "content of data.chat_template: was " in refused.said


def test_other_held_out_rows_under_the_same_path_are_reported(shop: Workshop) -> None:
    """The best value so far is of other rows."""
    held_out = shop.rows("held_out.jsonl", PAIRS[:3])
    changes = {"data": {"eval": str(held_out)}, "eval": {"every": 1}, "checkpoint": {"every": 1}}
    shop.train("dpo", "run", "--run.stop_after", "2", **changes)
    shop.rows("held_out.jsonl", PAIRS[1:4])
    resumed = shop.train("dpo", "run", "--resume", **changes)
    assert "continues as a different run, no longer bit-equal to the one that was saved:" in resumed.said
    assert "content of data.eval.held_out: was " in resumed.said


def test_a_template_that_reads_the_clock_reads_the_time_of_the_runs_first_start(shop: Workshop) -> None:
    """Here a time in microseconds, so that no two starts read the same one."""
    template = shop.file(
        "chat.jinja",
        "{{ strftime_now('%f') }}{% for m in messages %}{{ m['role'] + m['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}",
    )
    changes = {"data": {"chat_template": str(template)}, "checkpoint": {"every": 1}}
    shop.train("sft", "run", "--run.stop_after", "2", **changes)
    shutil.copytree(shop.folder / "run", shop.folder / "copy")
    resumed, copy = (shop.train("sft", name, "--resume", **changes) for name in ("run", "copy"))
    assert_same_run(resumed, copy)
    starts = json.loads((resumed.path / "manifest.json").read_text())["starts"]
    assert len(starts) == 2
    assert len({start["template_day"] for start in starts}) == 1


COUNTS = """
from rlhf.interfaces import Rollout


class Counts(Rollout):
    name = "counts"
    count = 0

    async def run(self, row, seed, ctx):
        self.count += 1
        ctx.report("count", self.count)
        prompt = ctx.encode_prompt(row)
        return [prompt, await ctx.generate([prompt], ctx.sampling)]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""


def test_a_rollout_continues_with_its_state(shop: Workshop) -> None:
    changes = {"rollout": {"use": f"file:{shop.file('counts.py', COUNTS)}"}, "stream": {"staleness": 1}}
    baseline = shop.train("grpo", "whole", **changes)
    shop.train("grpo", "run", "--run.stop_after", "1", **changes)
    resumed = shop.train("grpo", "run", "--resume", **changes)
    assert [line["rollout/count"] for line in baseline.lines()] == [6.5, 18.5, 30.5], "means of the numbers 1 to 36"
    assert_same_run(resumed, baseline)


def test_a_resume_that_stop_after_ends_at_once_says_so(shop: Workshop) -> None:
    shop.train("sft", "run", run={"stop_after": 2})
    for flags in (["--dry-run"], []):
        retry = shop.train("sft", "run", "--resume", *flags, run={"stop_after": 2})
        assert "run.stop_after = 2, but 2 of 3 steps are done" in retry.said
        assert "--run.stop_after 3" in retry.said
    last = shop.train("sft", "run", "--resume", "--run.stop_after", "3", run={"stop_after": 2})
    assert "run.stop_after" not in last.err
    assert len(last.lines()) == 3
