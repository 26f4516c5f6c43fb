import pytest
from rlhf.redact import redact
from rlhf.samples import first_samples
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn


def test_secrets_are_hidden_and_all_else_stays():
    config = {
        "reward": [{"use": "http", "api_key": "abc", "url": "https://me:pw@host/x?a=1&api_key=zz", "weight": 1.0}],
        "headers": {"Authorization": "Bearer abcdef", "X": "Bearer xyz"},
        "max_tokens": 5,
        "eos_token": "</s>",
        "prompt_key": "question",
        "password": "",
        "text": "use hf_abcdefghijklmnopqrstuvwx now",
    }
    assert redact(config) == {
        "reward": [
            {"use": "http", "api_key": "<hidden>", "url": "https://<hidden>@host/x?a=1&api_key=<hidden>", "weight": 1.0}
        ],
        "headers": {"Authorization": "<hidden>", "X": "Bearer <hidden>"},
        "max_tokens": 5,
        "eos_token": "</s>",
        "prompt_key": "question",
        "password": "",
        "text": "use <hidden> now",
    }


@pytest.mark.parametrize(
    "key", ["api_key", "API-KEY", "hf_token", "client_secret", "db.password", "token", "key", "auth"]
)
def test_secret_keys(key):
    assert redact({key: "abc"}) == {key: "<hidden>"}


def test_first_samples_show_many_prompts():
    row = Row({}, "gsm", 0)

    def trajectory(g, s):
        turns = [Turn([1], False, text=f"p{g}"), Turn([2, 3], True, text=f"a{g}{s}")]
        rewards = {"math": RewardResult(1.0), "style": RewardResult(None)}
        return Trajectory(row, turns, (g, s), rewards=rewards, reward=1.0)

    groups = [Group(row, g, [trajectory(g, s) for s in range(2)]) for g in range(3)]
    shown = first_samples(groups, 4)
    assert [(s.group, s.sample) for s in shown] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    first = shown[0]
    assert (first.prompt, first.completion, first.rewards, first.tokens) == ("p0", "a00", "math 1, style none", 2)
    assert len(first_samples(groups, 99)) == 6
