"""A rollout that encodes messages: which answer is parsed, and whether it is closed before what follows."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rlhf.interfaces import Generator, Proof, Rollout
from rlhf.types import Image, Row, Sampling, Turn
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_runtime.observe.timeline import Slice
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleContext, SampleParts, TurnLog
from rlhf_testing.chat_templates import HERMES
from rlhf_testing.tiny import tiny_tokenizer

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
ASK = {"role": "user", "content": "go"}


class Scorer:
    async def score(self, group, trained_on=True):
        pass


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=HERMES)
    return Template(AutoTokenizer.from_pretrained(str(path)), DataSection())


class Says(Generator):
    """Answers with given texts in turn."""

    name = "says"

    def __init__(self, template, *texts):
        self.template, self.texts = template, list(texts)

    def generate(self, requests):
        for position, _ in enumerate(requests):
            text = self.texts.pop(0)
            ids = self.template.tokens.ids(text)
            yield position, Turn(ids, True, [-1.0] * len(ids), ((0, 0),), "stop", text=text)

    def load(self, source, version):
        return Proof(version)


class Talk(Rollout):
    name = "talk"

    def __init__(self):
        super().__init__()
        self.seen = {}

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_messages([ASK])
        first = await ctx.generate([prompt], ctx.sampling, 0)
        second = await ctx.generate([prompt], ctx.sampling, 1)
        answers = [ctx.parse_answer(turn) for turn in (first, second)]
        reply = [{"role": "user", "content": "x"}]
        self.seen["ids"] = [answer["tool_calls"][0]["id"] for answer in answers]
        self.seen["after first"] = ctx.encode_following([ASK], answers[0], reply, turn=first)
        self.seen["after last"] = ctx.encode_following([ASK], answers[1], reply)
        self.seen["told first"], self.seen["told last"] = (
            ctx.encode_observation("x", (), first),
            ctx.encode_observation("x"),
        )
        if row["foreign"]:
            ctx.parse_answer(Turn([5], True))
        return [prompt, first]


def run(main, template, foreign=False, end="<eos>"):
    rollout = Talk()
    rollouts = Rollouts(SampleParts(rollout, template, Scorer()), Says(template, f"{CALL}{end}", CALL), main)
    settings = RolloutSettings(Sampling(), 1, "sample", 0, 1000, 5.0, abort_on_failure=False)
    [group] = rollouts.run([Row({"foreign": foreign}, "rows", 0)], 0, settings)
    return group.trajectories[0], rollout.seen


def test_ids_of_calls_follow_from_the_turns_number(main, template):
    first, second = run(main, template)[1]["ids"], run(main, template)[1]["ids"]
    assert first == second
    assert first[0] != first[1]


def test_an_answer_that_was_cut_off_is_closed_by_what_follows(main, template):
    trajectory, contexts = run(main, template)
    assert trajectory.status == "ok"
    texts = [
        template.tokenizer.decode(contexts[f"{kind} {key}"].ids)
        for kind in ("after", "told")
        for key in ("first", "last")
    ]
    assert texts == [f"{end}\n<|im_start|>user\nx<eos>\n<|im_start|>assistant\n" for end in ("", "<eos>")] * 2


def test_an_end_token_that_opens_the_next_message_comes_once(main, template):
    """As ``<|observation|>`` of GLM, one of the end tokens of its generation config; its template writes no other."""
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.add_tokens("<|user|>", special_tokens=True)
    tokenizer.chat_template = HERMES.replace("<eos>\\n", "").replace("'<|im_start|>' + m.role + '\\n'", "'<|user|>'")
    role_ends = Template(tokenizer, DataSection())
    _, contexts = run(main, role_ends, end="<|user|>")
    texts = [tokenizer.decode(contexts[key].ids) for key in ("after first", "after last")]
    assert texts == [f"{role}x<|im_start|>assistant\n" for role in ("", "<|user|>")]


def test_an_image_after_an_end_token_that_opens_its_message_keeps_its_tokens(main, template):
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.add_tokens("<|user|>", special_tokens=True)
    role = tokenizer.convert_tokens_to_ids("<|user|>")
    role_ends = Template(tokenizer, DataSection())
    message = Turn([role, 5, 6, 6, 7], False, images=(Image(b"", 2, 2, [6, 6]),))
    role_ends.observations = SimpleNamespace(encode=lambda text, closed, images: message)

    async def observed(answer):
        parts = SampleParts(Talk(), role_ends, Scorer())
        settings = RolloutSettings(Sampling(), 1, "sample", 0, 1000, 5.0)
        context = SampleContext(parts, (0, 0), settings, None, TurnLog(), Slice())
        return context.encode_observation("x", (b"",), answer)

    for answer, start in ((Turn([5, role], True, finish="stop"), 1), (Turn([5], True, finish="length"), 2)):
        observation = main.run(observed(answer))
        assert [image.start for image in observation.images] == [start]
        assert list(observation.ids[start : start + 2]) == [6, 6]


def test_only_turns_that_were_generated_for_the_sample_can_be_parsed(main, template):
    trajectory, _ = run(main, template, foreign=True)
    assert trajectory.status == "failed"
    assert "parse_answer() takes a turn that generate() of the same sample returned" in trajectory.error


class Halts(Says):
    """Keeps the requests."""

    def generate(self, requests):
        self.requests = list(requests)
        yield from super().generate(requests)


class Asks(Rollout):
    name = "asks"

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_messages([ASK])
        sampling = replace(ctx.sampling, stop=("x", "<|im_start|>"), stop_token_ids=(9,))
        return [prompt, await ctx.generate([prompt], sampling)]


def test_a_special_token_as_stop_string_of_a_rollout_ends_an_answer(main, template):
    """It is not in the text of an answer, in which stop strings are searched."""
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.add_tokens("<|im_start|>", special_tokens=True)
    special = Template(tokenizer, DataSection())
    generator = Halts(special, "b")
    rollouts = Rollouts(SampleParts(Asks(), special, Scorer()), generator, main)
    rollouts.run([Row({}, "rows", 0)], 0, RolloutSettings(Sampling(), 1, "sample", 0, 1000, 5.0))
    [request] = generator.requests
    assert request.sampling.stop == ("x",)
    assert request.sampling.stop_token_ids == (9, tokenizer.convert_tokens_to_ids("<|im_start|>"))
