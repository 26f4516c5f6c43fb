"""The reward: the places of steps, how their values are combined, and wrong options."""

from __future__ import annotations

import json
import math

import pytest
from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import Tokens
from rlhf.types import Group, Image, Row, Trajectory, Turn
from rlhf_plugin_prm.reward import ProcessReward, _probability

from tests.support.scoring import score_groups

BYTES = Tokens(lambda text: list(text.encode()), lambda ids: bytes(list(ids)).decode())
CLASSES = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "wrong", "1": "right"}}

LABELS = {"right_token_id": 7, "wrong_token_id": 9}


@pytest.fixture
def model(tmp_path):
    def make(**settings) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **(settings or CLASSES)}))
        return str(tmp_path)

    return make


def test_a_probability_is_that_of_its_log_odds_and_never_overflows() -> None:
    assert [_probability(x) for x in (math.log(3), -math.log(3), 0.0)] == pytest.approx([0.75, 0.25, 0.5])
    assert (_probability(1e4), _probability(-1e4)) == (1.0, 0.0)


def turn(text: str, sampled: bool = True, fresh: bool = False) -> Turn:
    return Turn(list(text.encode()), sampled, text=text, fresh=fresh)


def group(*answers: str | list[Turn]) -> Group:
    row = Row({}, "unit", 0)
    turns = [a if isinstance(a, list) else [turn("q;?", sampled=False), turn(a)] for a in answers]
    return Group(row, 0, [Trajectory(row, t, (0, i)) for i, t in enumerate(turns)])


class Model:
    """Log-odds that are the number of tokens up to the step, and what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, list[int]]] = []

    async def read(self, role, head, ids, positions):
        self.head = head
        self.asked += [(role, bytes(list(i)).decode(), list(p)) for i, p in zip(ids, positions, strict=True)]
        return [[(p + 1) / 10 for p in places] for places in positions]


def score(samples: Group, credit: str = "outcome", **config) -> Model:
    model = Model()
    options = {"separator": ";", **config}
    score_groups("prm", samples, options=options, read_role=model.read, tokens=BYTES, credit=credit)  # type: ignore[arg-type]
    return model


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_steps_are_scored_at_their_ends_in_sampled_turns(model) -> None:
    samples = group("a;bc;d", "no step")
    calls = score(samples, "step", model=model()).asked
    assert calls == [("process_reward_model", "q;?a;bc;d", [4, 7])], "the prompt's ';' ends no step of the answer"
    first, second = samples.trajectories
    assert first.rewards["prm"].steps == ((1, 1, pytest.approx(sigma(0.5))), (1, 4, pytest.approx(sigma(0.8))))
    assert (first.reward, first.score) == (0.0, pytest.approx(sigma(0.5))), (
        "the steps go to their tokens, filters see min"
    )
    assert (second.reward, second.rewards["prm"].value) == (None, None)


@pytest.mark.parametrize("without_steps", ["skip", "last_token"])
def test_the_model_sees_the_images_of_each_context(model, without_steps) -> None:
    text = "a;" if without_steps == "skip" else "a"
    turns = [turn("q?", sampled=False), turn(text), turn("xy", sampled=False), turn(text)]
    turns[0].images, turns[2].images = (Image(b"one", 1, 1, [9]),), (Image(b"two", 0, 2, [9]),)
    samples, calls = group("b;", turns), []

    async def read(role, head, ids, positions, images=()):
        calls.extend(zip([bytes(i).decode() for i in ids], images, strict=True))
        return [[0.0] * len(p) for p in positions]

    options = {"separator": ";", "model": model(), "without_steps": without_steps}
    score_groups("prm", samples, options=options, read_role=read, tokens=BYTES)
    offset = len(f"q?{text}")
    images = (Image(b"one", 1, 1, [9]), Image(b"two", offset, 2, [9]))
    assert calls == [("q;?b;", ()), (f"q?{text}xy{text}", images)]


def test_several_turns_and_rewritten_contexts(model) -> None:
    talk = [turn("q", False), turn("a;"), turn("obs;", False), turn("b"), turn("new", False, fresh=True), turn("c;d;")]
    samples = group(talk)
    calls = score(samples, "step", model=model()).asked
    assert [(text, ends) for _, text, ends in calls] == [("qa;obs;b", [2]), ("newc;d;", [4, 6])]
    assert [(t, i) for t, i, _ in samples.trajectories[0].rewards["prm"].steps] == [(1, 1), (5, 1), (5, 3)]


def test_a_token_that_ends_two_steps_is_one_place(model) -> None:
    pieces = {1: "a;b;", 2: "q"}
    tokens = Tokens(BYTES.encode, lambda ids: "".join(pieces[i] for i in ids))
    row, stand_in = Row({}, "unit", 0), Model()
    samples = Group(row, 0, [Trajectory(row, [Turn([2], False), Turn([1], True)], (0, 0))])
    options = {"separator": ";", "model": model()}
    score_groups("prm", samples, options=options, read_role=stand_in.read, tokens=tokens, credit="step")
    assert [ends for _, _, ends in stand_in.asked] == [[1]]
    assert len(samples.trajectories[0].rewards["prm"].steps) == 1


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("min", 0.4), ("mean", 0.55), ("last", 0.7), ("product", 0.28), ("sum", 1.1)],
)
def test_aggregates(model, aggregate: str, expected: float) -> None:
    """Probabilities 0.4 and 0.7, the second one in another context."""

    async def read(role, head, ids, positions):
        values = iter([math.log(0.4 / 0.6), math.log(0.7 / 0.3)])
        return [[next(values) for _ in places] for places in positions]

    samples = group([turn("q", False), turn("a;"), turn("n", False, fresh=True), turn("b;")])
    options = {"separator": ";", "model": model(), "aggregate": aggregate}
    score_groups("prm", samples, options=options, read_role=read, tokens=BYTES)
    result = samples.trajectories[0].rewards["prm"]
    assert (result.value, result.steps) == (pytest.approx(expected), ())
    assert result.info == {"steps": 2, "probabilities": pytest.approx([0.4, 0.7])}


def test_the_baseline_is_subtracted_from_every_step(model) -> None:
    samples = group("a;bc;d")
    score(samples, "step", model=model(), baseline=0.5, aggregate="sum")
    result = samples.trajectories[0].rewards["prm"]
    assert [v for _, _, v in result.steps] == pytest.approx([sigma(0.5) - 0.5, sigma(0.8) - 0.5])
    assert result.score == pytest.approx(sigma(0.5) + sigma(0.8) - 1)
    assert result.info["probabilities"] == pytest.approx([sigma(0.5), sigma(0.8)])


@pytest.mark.parametrize("credit", ["outcome", "step"])
def test_answers_without_a_step_may_be_read_after_their_last_token(model, credit: str) -> None:
    observed = [turn("q", False), turn("ab"), turn("observed", False)]
    samples = group("word", "", observed, "a;tail")
    calls = score(samples, credit, model=model(), without_steps="last_token").asked
    assert [(text, ends) for _, text, ends in calls] == [("q;?word", [6]), ("qab", [2]), ("q;?a;tail", [4])]
    word, empty, talk, stepped = (t.rewards["prm"] for t in samples.trajectories)
    assert (empty.value, empty.steps) == (None, ()), "nothing was sampled"
    if credit == "outcome":
        assert [r.value for r in (word, talk, stepped)] == pytest.approx([sigma(0.7), sigma(0.3), sigma(0.5)])
    else:
        assert [r.steps[0][:2] for r in (word, talk, stepped)] == [(1, 3), (1, 1), (1, 1)]


@pytest.mark.parametrize("credit", ["outcome", "step"])
def test_the_text_after_the_last_separator_may_be_the_last_step(model, credit: str) -> None:
    """The model reads the separator in place of the end token. Where the answer ends with a separator, or not with the
    policy's text, nothing changes."""
    open_turns = [turn("q", False), turn("a;b")]
    open_turns[1].ids.append(0)
    complete_turns = [turn("q", False), turn("a; ")]
    complete_turns[1].ids.append(0)
    observed = [turn("q", False), turn("ab"), turn("observed", False)]
    samples = group("a;bc", open_turns, complete_turns, observed, "word", "", [])
    calls = score(samples, credit, model=model(), open_step="close").asked
    assert [(text, ends) for _, text, ends in calls] == [
        ("q;?a;bc;", [4, 7]), ("qa;b;", [2, 4]), ("qa; \0", [2]), ("q;?word;", [7])
    ]  # fmt: skip
    results = [t.rewards["prm"] for t in samples.trajectories]
    if credit == "outcome":
        values = [r.value for r in results]
        assert values == [*map(pytest.approx, map(sigma, (0.5, 0.3, 0.3))), None, pytest.approx(sigma(0.8)), None, None]
    else:
        places = [[step[:2] for step in r.steps] for r in results]
        assert places == [[(1, 1), (1, 3)], [(1, 1), (1, 2)], [(1, 1)], [], [(1, 3)], [], []]


def test_a_token_that_ends_a_step_and_begins_another_is_one_place(model) -> None:
    pieces = {1: "a;b", 2: "q", 3: ";"}
    tokens = Tokens(lambda text: [3], lambda ids: "".join(pieces[i] for i in ids))
    row, stand_in = Row({}, "unit", 0), Model()
    samples = Group(row, 0, [Trajectory(row, [Turn([2], False), Turn([1], True, text="a;b")], (0, 0))])
    options = {"separator": ";", "model": model(), "open_step": "close"}
    score_groups("prm", samples, options=options, read_role=stand_in.read, tokens=tokens, credit="step")
    assert [ends for _, _, ends in stand_in.asked] == [[1]]


def test_label_tokens_of_a_language_model(model) -> None:
    settings = {"architectures": ["Qwen3ForCausalLM"], "right_token_id": 7, "wrong_token_id": 9}
    assert score(group("a;"), model=model(**settings)).head.constants == {"outputs": (7, 9)}
    result = score(group("a;"), model=model(**settings), label_tokens=("+", "-"))
    assert result.head.constants == {"outputs": (43, 45)}
    assert score(group("a;"), model=model()).head.constants == {"outputs": (1, 0)}


def test_the_separator_is_that_of_the_models_training(model) -> None:
    def step_ends(separator: str | None, **settings) -> list[list[int]]:
        result = score(group("a;\n b\n"), separator=separator, model=model(**CLASSES, **settings))
        return [positions for _, _, positions in result.asked]

    start = len("q;?")
    assert step_ends(None) == [[start + 2, start + 5]]  # a line break, where nobody says anything
    assert step_ends(None, step_separator=";") == [[start + 1]]
    assert step_ends(";", step_separator=";") == [[start + 1]]
    assert step_ends(";") == [[start + 1]]
    contradicted = ProcessReward(ProcessReward.Config(model=model(**CLASSES, step_separator="\n\n"), separator="\n"))
    with pytest.raises(
        ConfigError, match=r"separator = '\\n', but .* steps that end with '\\n\\n' .* Remove separator"
    ):
        contradicted.roles()


def test_what_cannot_be_read_is_refused(model, tmp_path) -> None:
    lm = {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ConfigError, match=r"does not say which tokens its labels are. Set label_tokens"):
        score(group("a;"), model=model(**lm))
    with pytest.raises(ConfigError, match=r"does not say which tokens its labels are. Set label_tokens"):
        ProcessReward(ProcessReward.Config(model=model(**lm))).roles()
    with pytest.raises(ConfigError, match=r"label_tokens: 'good' must be one token .* 4 \("):
        score(group("a;"), model=model(**lm), label_tokens=("good", "-"))
    with pytest.raises(ConfigError, match="has two classes and does not use label_tokens"):
        score(group("a;"), model=model(), label_tokens=("+", "-"))
    classifier = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    with pytest.raises(ModelError, match=r"has 1 labels; .* --reward model:PATH"):
        ProcessReward(ProcessReward.Config(model=model(**classifier))).roles()
    with pytest.raises(ModelError, match=r"config.json"):
        ProcessReward(ProcessReward.Config(model=str(tmp_path / "absent"))).roles()
    with pytest.raises(ConfigError, match="needs `model`"):
        ProcessReward()


@pytest.mark.parametrize(
    ("settings", "head"), [(CLASSES, "classes:2"), ({"architectures": ["LlamaForCausalLM"], **LABELS}, "lm"),
                           ({"architectures": ["LlamaForTokenClassification"]}, "classes:2")]
)  # fmt: skip
def test_the_role_follows_the_model(model, settings: dict, head: str) -> None:
    (spec,) = ProcessReward(ProcessReward.Config(model=model(**settings), role="judge")).roles()
    assert (spec.name, spec.head, spec.trained) == ("judge", head, False)
