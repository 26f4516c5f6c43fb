"""Recorded samples become plain answers; what is none is counted by its reason."""

from __future__ import annotations

import pytest
from rlhf.errors import DataError
from rlhf.types import Group, Image, Row, Trajectory, Turn
from rlhf_runtime.checkpoint.saved_groups import write_groups, write_lines
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import export
from rlhf_runtime.data.image_files import image_file
from rlhf_runtime.data.recorded_answers import RecordedAnswer, read_answers
from rlhf_runtime.data.template import Template
from rlhf_testing.image_models import drawing

MESSAGES = [{"role": "user", "content": "hi"}]


def sample(number, text="yes", **changes):
    row = Row({"prompt": f"p{number[0]}"}, "rows", number[0])
    turns = [Turn([1], False, text=f"p{number[0]}"), Turn([2], True, [-1.0], finish="stop", text=text)]
    trajectory = Trajectory(row, turns, number, reward=0.5, score=0.5)
    for name, value in changes.items():
        setattr(trajectory, name, value)
    return trajectory


def write(path, *trajectories, prompt=lambda t: t.row["prompt"]):
    groups = {}
    for t in trajectories:
        groups.setdefault(t.index[0], Group(t.row, t.index[0], [])).trajectories.append(t)
    (write_groups if path.suffix == ".arrow" else write_lines)(path, groups.values(), prompt)
    return path


def test_answers_by_prompt_in_the_order_of_the_files(tmp_path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    second = write(run / "rollouts" / "step-000002.arrow", sample((2, 0), "\u2028d", reward=None))
    other = sample((1, 0), "d")
    other.turns[0].agent = "of another agent"
    first = sample((0, 0), "a"), sample((0, 1), "b"), sample((1, 0), "c"), other
    write(run / "rollouts" / "step-000001.arrow", *first)
    expected = [
        [RecordedAnswer(0, "p0", "a", 0.5), RecordedAnswer(1, "p0", "b", 0.5)],
        [RecordedAnswer(0, "p1", "c", 0.5)],
        [RecordedAnswer(1, "p1", "d", 0.5)],
        [RecordedAnswer(0, "p2", "\u2028d", None)],
    ]
    for source in (run, run / "rollouts"):
        result = read_answers([source])
        assert (result.groups, result.answers, dict(result.left_out)) == (expected, 5, {})
    assert read_answers([second, run]).groups == [expected[3], *expected], "groups of two files are never joined"


def test_answers_of_the_data_that_a_run_trained_on_are_left_out(tmp_path):
    answer = sample((0, 0))
    answer.turns[1].is_demonstration = True
    run = read_answers([write(tmp_path / "step-000001.arrow", answer, sample((0, 1)))])
    assert run.groups == [[RecordedAnswer(1, "p0", "yes", 0.5)]]
    assert run.left_out == {"of the data, which the policy did not sample": 1}
    scored = read_answers([write(tmp_path / "scored.jsonl", answer)])
    assert (len(scored.groups[0]), scored.left_out) == (1, {})


def test_prompts_may_be_messages(tmp_path):
    path = write(tmp_path / "f.jsonl", sample((0, 0)), prompt=lambda t: MESSAGES)
    assert read_answers([path]).groups == [[RecordedAnswer(0, MESSAGES, "yes", 0.5)]]


def test_answers_to_images_are_rows_with_these_images(tmp_path):
    image = Image(drawing(8, 6), 0, 1, [9])
    trajectory = sample((0, 0))
    trajectory.turns[0].images = (image,)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    result = read_answers([write(tmp_path / "step-000001.arrow", trajectory, prompt=lambda t: messages)])
    part = result.groups[0][0].prompt[0]["content"][0]
    assert image_file(part["image_url"]["url"], None) == image.data
    assert result.groups[0][0].images == ()


@pytest.mark.parametrize(
    "prompt", ["<image>hi", [{"role": "user", "content": "<image>"}, {"role": "user", "content": [{"type": "image"}]}]]
)
def test_images_of_placeholders_in_a_prompts_texts_are_in_a_column(tmp_path, prompt):
    pictures = [drawing(8, 6), drawing(6, 8)]
    samples = [sample((0, 0), "yes"), sample((0, 1), "no", score=1.0, reward=1.0)]
    for trajectory in samples:
        trajectory.turns[0].images = tuple(Image(data, n, 1, [9]) for n, data in enumerate(pictures))
    groups = read_answers([write(tmp_path / "f.jsonl", *samples, prompt=lambda t: prompt)]).groups
    for form in (export.demonstrations, export.scored, export.labels, export.best, export.pairs, export.conditional):
        row = form(groups).rows[0]
        assert form is export.conditional or row["prompt"] == prompt
        assert [image_file(url, None) for url in row["images"]] == pictures


def test_samples_that_are_not_answers_are_counted(tmp_path):
    episode = [*sample((0, 0)).turns, Turn([3], False, text="more"), Turn([4], True, [-1.0], text="end")]
    opened = [sample((0, 0)).turns[0], *sample((0, 0)).turns]
    path = write(
        tmp_path / "f.jsonl",
        sample((0, 0)),
        sample((0, 1), status="failed", turns=[], reward=None),
        sample((0, 2), turns=episode),
        sample((0, 3), turns=opened),
        sample((0, 4), " \n"),
        sample((0, 5), status="truncated"),
        sample((0, 6), turns=[Turn([1], False, text="p"), Turn([2], True, [-1.0], finish="length", text="cut")]),
        sample((0, 7), "opened"),
        prompt=lambda t: None if t.index == (0, 7) else "p",
    )
    result = read_answers([path])
    assert [[a.sample for a in g] for g in result.groups] == [[0]]
    assert result.answers == 8
    assert dict(result.left_out) == {
        "that failed": 1,
        "of several turns": 2,
        "without text": 1,
        "cut off": 2,
        "with more in their context than the row's prompt": 1,
    }
    assert [[a.sample for a in g] for g in read_answers([path], truncated=True).groups] == [[0, 5, 6]]


def test_a_last_line_without_its_line_end_counts(tmp_path):
    recording = write(tmp_path / "f.jsonl", sample((0, 0), "a"), sample((1, 0), "b"))
    cut = tmp_path / "g.jsonl"
    cut.write_text(recording.read_text().removesuffix("\n"))
    assert read_answers([cut]) == read_answers([recording])
    cut.write_text(recording.read_text()[:-20])
    with pytest.raises(DataError, match=r"g.jsonl:2 is not valid JSON.*Recorded samples are in a run's rollouts/"):
        read_answers([cut])
    cut.write_text("")
    assert read_answers([cut]).groups == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"group": 0}\n',
            r"f.jsonl:1 is not a recorded sample: it has no 'sample'. Recorded samples are in",
        ),
        ("{\n", r"f.jsonl:1 is not valid JSON"),
        ('"x"\n', r"f.jsonl:1 is not a recorded sample: TypeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, content, message):
    path = tmp_path / "f.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_answers([path])


def test_samples_without_their_prompt_are_refused(tmp_path):
    path = tmp_path / "ready.arrow"
    write_groups(path, [Group(sample((0, 0)).row, 0, [sample((0, 0))])])  # as a checkpoint keeps them
    with pytest.raises(DataError, match=r"ready.arrow, row 1 is not a recorded sample: it has no 'prompt'"):
        read_answers([path])


def test_a_folder_without_samples_says_what_is_allowed(tmp_path):
    with pytest.raises(DataError, match=r"holds no recorded samples\. Allowed: a run directory with rollouts/"):
        read_answers([tmp_path])
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        read_answers([tmp_path / "nowhere"])


def test_a_prompt_is_recorded_as_text_or_messages(chars, chat):
    """Text or messages, the system message included; not where an environment put something into the context."""
    row = Row({"prompt": "1+1="}, "rows", 0)
    plain = Template(chars, DataSection(template="plain", system="add: ", input_template="{prompt} "))
    trajectory = Trajectory(row, [plain.encode_prompt(row)], (0, 0))
    assert plain.prompt_of(trajectory) == "add: 1+1= "
    assert plain.prompt_of(Trajectory(row, plain.encode_opening(row, "now"), (0, 0))) is None
    template = Template(chat, DataSection(system="add"))
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    assert template.prompt_of(Trajectory(row, [template.encode_prompt(row)], (0, 0))) == messages
    assert template.prompt_of(Trajectory(row, template.encode_opening(row, "now"), (0, 0))) is None
    assert template.prompt_of(Trajectory(row, [], (0, 0), status="failed")) is None
