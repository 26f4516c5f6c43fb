"""`rlhf rewards try` shows what rewards give for given and recorded answers."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from rlhf_runtime.report.recorded_samples import read_samples

from tests.runs import Say, Workshop
from tests.test_self_play import game

MARKUP = "<script>alert(1)</script>"
ROWS = [
    {"prompt": "1+2=", "answer": "3", "responses": ["3", "12", MARKUP]},
    {"prompt": "2+2=", "answer": "4", "responses": ["5", "4"]},
    {"prompt": "5+2=", "answer": "7", "responses": ["7", "7"]},
]
CONTAINMENT = "async def score(prompt, completion, row):\n    return float(row['answer'] in completion)\n"
SIZE = "def score(prompt, completion, row):\n    return -float(len(completion))\n"
STATUS = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Status(Reward):
    reads = "text"

    async def score(self, group):
        return [RewardResult(float(t.status == "truncated")) for t in group.trajectories]
"""
HANGS = """
import time

def score(prompt, completion, row):
    if completion == "12":
        time.sleep(60)
    if completion == "5":
        raise ValueError("no five")
    return 1.0
"""


def words(shop: Workshop, **rewards: str) -> tuple[object, ...]:
    files = [word for n, text in rewards.items() for word in ("--reward", f"file:{shop.file(f'{n}.py', text)}")]
    return ("rewards", "try", "--model", shop.model, "--data", shop.rows("rows.jsonl", ROWS), *files)


def lines(text: str, title: str) -> list[list[str]]:
    """The cells of a table."""
    body = text.partition(f"{title}\n")[2].partition("\n\n")[0]
    return [re.split(" {2,}", line.strip()) for line in body.splitlines()]


def test_rewards_are_described_and_compared(shop: Workshop, say: Say) -> None:
    code, stdout, err = say(*words(shop, inside=CONTAINMENT, size=SIZE), "--probes", 0)
    assert code == 0, err
    containment, size = [row for row in lines(stdout, "Rewards") if row[0] in ("inside", "size")]
    assert containment == ["inside", "7", "0.5714", "0.4949", "0", "1", "0", "0", "1 of 3"]
    assert size[:2] + size[4:] == ["size", "7", "-25", "-1", "0", "0", "2 of 3"]
    assert "- size: 2 of 3 groups have the same value for all answers" in stdout
    assert lines(stdout, "Distribution of inside")[1:] == [["0", "3", "█" * 24], ["1", "4", "█" * 32]]
    [pair] = lines(stdout, "Agreement")[1:]
    assert pair[:3] == ["inside", "size", "7"]
    assert 0 < float(pair[3]) < 1
    assert lines(stdout, "rewards disagree most")[2] == ["inside 0, size -1", "rows 1", "5"]
    assert "Slowest calls" in stdout
    assert "cheat" not in stdout


def test_a_reward_that_hangs_ends_at_its_deadline_and_the_rest_is_shown(shop: Workshop, say: Say) -> None:
    code, stdout, err = say(
        *words(shop, hangs=HANGS, inside=CONTAINMENT), "--reward.hangs.deadline", 0.5, "--probes", 0
    )
    assert code == 0, err
    hangs, containment = [row for row in lines(stdout, "Rewards") if row[0] in ("hangs", "inside")]
    assert (hangs[1], hangs[7], containment[1], containment[7]) == ("5", "2", "7", "0")
    assert "- 1 calls took longer than their deadline, 1 failed for other reasons" in stdout
    late, failed = [row for row in lines(stdout, "Calls without a result") if row[0] == "hangs"]
    assert late[1:5] == ["took too long", "1", "rows 0", "12"]
    assert failed[1:5] == ["failed", "1", "rows 1", "5"]
    assert late[5].endswith("Make it faster or raise `deadline` in its section."), "not cut"
    assert lines(stdout, "Slowest calls")[1][0] == "hangs"


def test_answers_that_cheat_are_scored_beside_the_given_ones(shop: Workshop, say: Say) -> None:
    code, stdout, err = say(*words(shop, inside=CONTAINMENT, size=SIZE))
    assert code == 0, err
    assert lines(stdout, "Answers that try to cheat")[0] == ["- the right answer is the column 'answer'"]
    rows = {tuple(row[:2]): row[2:] for row in lines(stdout, "Answers that try to cheat")[2:]}
    assert rows["inside", "empty"] == ["0", "0.6111", "0 of 3"]
    assert rows["inside", "right answer buried in others"] == ["1", "0.6111", "3 of 3", "pays"]
    assert rows["size", "empty"][0] == "0"
    assert rows["size", "empty"][-1] == "pays"
    assert rows["size", "the prompt repeated"][0] == "-4"
    assert ("inside", "format alone") in rows
    assert "- inside: right answer buried in others: 1 on average, while the given answers get 0.6111" in stdout


def test_the_page_has_whole_texts_escaped_and_loads_nothing(shop: Workshop, say: Say) -> None:
    page = shop.folder / "lab.html"
    code, stdout, err = say(*words(shop, size=SIZE, inside=CONTAINMENT), "--html", page)
    assert code == 0, err
    text = page.read_text()
    assert MARKUP not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img)|https?://|url\(", text)
    assert str(page) in stdout


def test_a_recorded_run_gives_its_samples_data_and_rewards(shop: Workshop, say: Say) -> None:
    shop.train("rloo", "run", run={"steps": 2}, checkpoint={"save_rollouts": True})
    run = shop.folder / "run"
    code, stdout, err = say("rewards", "try", run, "--reward", f"file:{shop.file('size.py', SIZE)}", "--reward", "math")
    assert code == 0, err
    assert [row[0] for row in lines(stdout, "Rewards")[-2:]] == ["size", "math"]
    code, stdout, err = say("rewards", "try", run, "--step", 1, "--probes", 2)
    assert code == 0, err
    [reward] = lines(stdout, "Rewards")[-1:]
    assert int(reward[1]) > 0
    status = ("--reward", f"file:{shop.file('status.py', STATUS)}", "--step", 2, "--probes", 0)
    truncated = [sample.status == "truncated" for sample in read_samples(run / "rollouts/step-000002.arrow", 2)]
    [reward] = lines(say("rewards", "try", run, *status)[1], "Rewards")[-1:]
    assert float(reward[2]) == pytest.approx(sum(truncated) / len(truncated), abs=1e-4)
    assert any(truncated)
    assert "It holds samples of steps 1 to 2" in say("rewards", "try", run, "--step", 7)[2]
    assert "already has answers" in say("rewards", "try", run, "--data", "x.jsonl")[2]


def test_each_agent_of_a_recorded_game_is_a_group_as_in_the_run(shop: Workshop, say: Say) -> None:
    size = "async def score(completions, **columns):\n    return [float(len(completions)) for _ in completions]\n"
    rewards = [{"use": f"file:{shop.file('size.py', size)}:score", "name": "size"}]
    run = shop.train("grpo", "run", **(game(shop, "rae") | {"reward": rewards}))
    code, stdout, err = say("rewards", "try", run.path, "--probes", 0)
    assert code == 0, err
    [reward] = lines(stdout, "Rewards")[-1:]
    samples = list(run.samples_of("step-000003.arrow"))
    assert float(reward[2]) == pytest.approx(run.lines()[-1]["reward/size/mean"], abs=1e-3)
    groups = Counter((sample["group"], sample["turns"][0]["agent"]) for sample in samples)
    compared = sum(count > 1 for count in groups.values())
    assert reward[-1] == f"{compared} of {compared}"
    assert compared > 4, "no second agent had several turns"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("tyr",), "unknown action 'tyr'; allowed actions: try. Did you mean 'try'?"),
        (("try", "--reward", "length"), "no data is named"),
        (("try", "--data", "rows.jsonl"), "no reward is named"),
        (("try", "--step", "1"), "only the folder of a run has steps"),
        (("try", "--html", "nowhere/lab.html"), "name a file in a folder that exists"),
        (("try", "--probes", "-1"), "the number of rows must be at least 0"),
        (("try", "."), "config.toml"),
    ],
)
def test_wrong_arguments_are_refused(
    say: Say, flags: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = say("rewards", *flags)
    assert code != 0
    assert message in err
