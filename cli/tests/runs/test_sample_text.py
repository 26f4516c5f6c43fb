import pytest
from rlhf.types import Group, Image, RewardResult, Row, Trajectory, Turn
from rlhf_cli.runs.sample_text import sample_text
from rlhf_runtime.checkpoint.saved_groups import write_groups
from rlhf_runtime.report.recorded_samples import RecordedSample, read_samples
from rlhf_testing.image_models import drawing


@pytest.mark.parametrize(
    ("rewards", "name", "value"),
    [
        ({"math": 0.5}, None, 2.0),
        ({"math": 0.5}, "math", 0.5),
        ({"math": 0.5}, "format", None),
        ({"math": 0.5}, "length", 7.0),
        ({"length": 0.25}, "length", 0.25),
    ],
    ids=["the whole reward", "one reward", "a reward that this sample lacks", "the length", "a reward called length"],
)
def test_what_samples_are_sorted_by(rewards, name, value):
    sample = RecordedSample(1, 0, 0, "rows", 0, "1+1=", [], 2.0, rewards, "complete", "", length=7)
    assert sample.value(name) == value


def test_numbers_about_a_sample_are_shown():
    info = {"env/solved": 0.0, "rollout/calls/add": 2.0, "rollout/calls_unknown": 0.0}
    sample = RecordedSample(1, 0, 0, "rows", 0, "1+1=", [], 2.0, {}, "ok", "", length=7, info=info)
    assert "\n  env/solved 0, rollout/calls/add 2\n" in sample_text(sample).plain
    assert "env/solved 0, rollout/calls/add 2, rollout/calls_unknown 0\n" in sample_text(sample, full=True).plain


def recorded(folder, turns, prompt, rewards=None):
    """The text of a sample that was recorded."""
    group = Group(Row({}, "rows", 0), 0, [])
    group.trajectories.append(Trajectory(group.row, turns, (0, 0), rewards=rewards or {}))
    write_groups(folder / "step-000001.arrow", [group], lambda _: prompt)
    [sample] = read_samples(folder / "step-000001.arrow", 1)
    return sample_text(sample).plain


def test_what_a_reward_says_beside_its_value_is_shown(tmp_path):
    info = {"passed": 1, "failed": "test 2: got 3", "verdicts": ["passed", "wrong"]}
    turns = [Turn([1], False, text="1+1="), Turn([5], True, [-0.5], ((0, 0),), "stop", 1.0, text="3")]
    rewards = {"code": RewardResult(0.5, info=info), "size": RewardResult(1.0)}
    text = recorded(tmp_path, turns, "1+1=", rewards)
    assert '\n  code: passed 1; failed test 2: got 3; verdicts ["passed", "wrong"]\n' in text
    assert "size:" not in text


def test_turns_of_a_chat_are_shown_message_by_message(tmp_path):
    opening = (("system", "Be brief."), ("user", "1+1=\n\nAnswer with a digit."))
    image = Image(drawing(8, 6), 0, 1, [9])
    turns = [
        Turn([1], False, text="system\nBe brief.\nuser\n1+1=\n\nAnswer with a digit.\nassistant\n", messages=opening),
        Turn([5], True, [-0.5], ((0, 0),), "stop", 1.0, -0.5, "3", score=0.25),
        Turn([9, 2], False, text="\nuser\nWrong.\nassistant\n", images=(image,), messages=(("user", "Wrong."),)),
        Turn([6], True, [-0.5], ((0, 0),), "stop", 1.0, text="2"),
        Turn([7], False, text="2\nuser\n", messages=(("tool", "4"), ("tool", "5"))),
    ]
    lines = recorded(tmp_path, turns, None).split("\n")[2:]
    assert [line.strip() for line in lines] == [
        "prompt", "[system] Be brief.", "[user] 1+1=", "", "Answer with a digit.",
        "policy, 1 tokens, reward -0.5, score 0.25", "3",
        "environment, 2 tokens", "[user] [image 8x6]Wrong.",
        "policy, 1 tokens", "2",
        "environment, 1 tokens", "[tool] 4", "[tool] 5",
    ]  # fmt: skip


def test_images_are_shown_as_their_size(tmp_path):
    first, second = Image(drawing(40, 24), 1, 4, [9]), Image(drawing(8, 6), 0, 1, [9])
    sampled = Turn([5], True, [-0.5], ((0, 0),), "stop", 1.0, text="red")
    turns = [Turn([1, 9, 9, 9, 9, 2], False, text="what?", images=(first,)), sampled]
    turns += [Turn([9, 3], False, text="and now?", images=(second,)), sampled]
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    for prompt in (messages, "what?", None):
        text = recorded(tmp_path, turns, prompt)
        assert "[image 40x24]what?" in text
        assert "[image 8x6]and now?" in text
