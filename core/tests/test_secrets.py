import pytest
from rlhf.samples import first_samples, sample_table
from rlhf.secrets import find_secrets, redact
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn


def test_redact_hides_secrets_and_nothing_else():
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
    assert redact({key: ["abc", 1, ""], "x": ["abc"]}) == {key: ["<hidden>", 1, ""], "x": ["abc"]}
    assert redact({key: {"value": "abc"}}) == {key: {"value": "<hidden>"}}


FORMS = [
    "hf_" + "a" * 20,
    "sk-" + "a" * 20,
    "ghp_" + "a" * 20,
    "github_pat_" + "a" * 20,
    "glpat-" + "a" * 20,
    "AKIA" + "A" * 16,
    "xoxb-" + "1" * 12,
    "AIza" + "a" * 32,
    "nvapi-" + "a" * 20,
    "gsk_" + "a" * 20,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9." + "a" * 20,
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", FORMS)
def test_a_token_that_a_run_file_may_not_hold_is_hidden_from_observers(secret):
    assert list(find_secrets({"reward": [{"header": secret}]})) == ["reward.0.header"]
    assert redact({"text": f"use {secret}"}) == {"text": "use <hidden>"}


@pytest.mark.parametrize("key", ["api_key", "wandb_token", "passphrase", "session_token", "passwd", "private-key"])
def test_a_name_that_a_run_file_may_not_hold_is_hidden_from_observers(key):
    assert list(find_secrets({key: "abc"})) == [key]
    assert redact({key: "abc"}) == {key: "<hidden>"}


@pytest.mark.parametrize(
    "value",
    [
        "https://:pw12@host/x",
        "https://host/x?a=1&api_key=abc",
        "https://host/x?key=abc",
        ["--api-key=abc"],
        ["docker", "-e", "OPENAI_API_KEY=abc"],
        ["--header", "Authorization: Basic abc"],
        ["--token", "abc"],
    ],
)
def test_a_secret_in_an_address_or_a_command_is_found(value):
    paths = list(find_secrets({"rollout": {"option": value}}))
    assert len(paths) == 1
    assert paths[0].startswith("rollout.option")


@pytest.mark.parametrize(
    "value",
    [
        "https://host/x?version=2",
        "the password: abc",
        ["--api-key=$KEY", "--token", "${KEY}", "--password", "--verbose", "Authorization: Bearer ${KEY}"],
        ["sh", "-c", "exec server --api-key=$KEY"],
        ["--max-tokens", "5", "--tokenizer", "q", "--eos-token=</s>"],
        ["user:", "Answer: 5"],
    ],
)
def test_other_addresses_and_arguments_are_no_secrets(value):
    assert list(find_secrets({"option": value})) == []


def test_the_name_of_an_environment_variable_is_not_a_secret():
    assert list(find_secrets({"api_key_env": "MY_KEY", "eos_token": "</s>", "prompt_key": "question"})) == []


def test_first_samples_show_many_prompts():
    row = Row({}, "gsm", 0)

    def trajectory(g, s):
        turns = [Turn([1], False, text=f"p{g}"), Turn([2, 3], True, text=f"a{g}{s}")]
        rewards = {"math": RewardResult(1.0), "style": RewardResult(None)}
        return Trajectory(row, turns, (g, s), rewards=rewards, reward=1.0)

    groups = [Group(row, g, [trajectory(g, s) for s in range(2)]) for g in range(3)]
    samples = first_samples(groups, 4)
    assert [(s.group, s.sample) for s in samples] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    first = samples[0]
    assert (first.prompt, first.completion, first.rewards, first.tokens) == ("p0", "a00", "math 1, style none", 2)
    assert len(first_samples(groups, 99)) == 6


def test_a_table_of_samples_names_the_agents_of_a_game():
    def trajectory(agent):
        turns = [Turn([1], False, text="p", agent=agent), Turn([2], True, text="a", agent=agent)]
        return Trajectory(row, turns, (0, 0), reward=1.0)

    row = Row({}, "gsm", 0)
    columns, rows = sample_table(first_samples([Group(row, 0, [trajectory("white"), trajectory("black")])], 2))
    assert [row[columns.index("agent")] for row in rows] == ["white", "black"]
    columns, rows = sample_table(first_samples([Group(row, 0, [trajectory("")])], 2))
    assert columns == ["group", "sample", "source", "prompt", "completion", "reward", "rewards", "status", "tokens"]
    assert rows == [[0, 0, "gsm", "p", "a", 1.0, "", "ok", 1]]
