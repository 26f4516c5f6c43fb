"""Executors with an ``execute()`` of their own, in OpenRLHF's documented style, as rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import rlhf
from pydantic import ValidationError
from rlhf.errors import PluginInvalid, RolloutError
from rlhf.ops.experts import check_records
from rlhf.plugins import Plugins
from rlhf.types import ExpertRecord, Image, Row, Sampling, Trajectory, Turn
from rlhf_testing.scripted_rollout import ScriptedContext
from rlhf_testing.tiny import tiny_model
from transformers import AutoTokenizer

ROW = Row({"prompt": "2+2=", "label": "4"}, "unit", 0)
EXECUTOR = """
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    def __init__(self, turns=2):
        self.turns = turns

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        ranges, texts, logprobs = [], [], []
        for _ in range(self.turns):
            params = deepcopy(sampling_params)
            params.max_tokens = 5
            output = (await llm_engine.generate(tokens, params)).outputs[0]
            ranges.append((len(tokens), len(tokens) + len(output.token_ids)))
            texts.append(output.text)
            logprobs += [entry[i].logprob for i, entry in zip(output.token_ids, output.logprobs)]
            tokens = tokens + list(output.token_ids) + hf_tokenizer.encode("!", add_special_tokens=False)
        assert label == "4" and max_length == 400 and max(logprobs) <= 0
        result = {"observation_tokens": tokens, "action_ranges": ranges, "reward": len("".join(texts)) / 10}
        return result
"""


@dataclass
class Context(ScriptedContext):
    """With the tokenizer of a tiny model; the made-up answers are its tokens too."""

    path: str = ""
    reported: dict[str, float] = field(default_factory=dict)

    def report(self, name: str, value: float) -> None:
        self.reported[name] = value

    @property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.path)

    def encode_prompt(self, row: Row) -> Turn:
        return Turn(self.tokenizer.encode(row["prompt"], add_special_tokens=False), sampled=False, text=row["prompt"])

    async def generate(self, turns, sampling: Sampling, turn_number: int = 0) -> Turn:
        turn = await super().generate(turns, sampling, turn_number)
        turn.ids = [i % 10 + 5 for i in turn.ids]
        turn.text = self.tokenizer.decode(list(turn.ids))
        return turn


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def run(reference: str, model: str, **options) -> tuple[list[Turn], Context]:
    cls = Plugins.discover().resolve("rollout", reference).cls
    context = Context(path=model)
    return asyncio.run(cls(cls.Config(**options)).run(ROW, 3, context)), context


def test_turns_are_what_was_sampled(file, model: str) -> None:
    turns, context = run(file(EXECUTOR), model)
    assert [t.sampled for t in turns] == [False, True, False, True]  # what follows the last action is left out
    assert turns[0].ids == context.encode_prompt(ROW).ids
    sample = Trajectory(ROW, turns, (0, 0))
    texts = (sample.prompt_text, sample.completion)
    assert texts == ("2+2=", f"{turns[1].text}!{turns[3].text}"), "the texts that rewards read"
    assert [(t.logprobs, t.versions) for t in turns[1::2]] == [(c.turn.logprobs, ((0, 0),)) for c in context.calls]
    assert [c.number for c in context.calls] == [0, 1]
    assert list(context.calls[1].context) == [i for t in turns[:3] for i in t.ids]
    assert [c.sampling.max_new_tokens for c in context.calls] == [5, 5]
    assert (turns[1].reward, turns[3].reward) == (None, pytest.approx((len(turns[1].text) + len(turns[3].text)) / 10))


def test_a_row_with_images_fails_the_sample(file, model: str, monkeypatch) -> None:
    image = Image(b"png", start=1, tokens=1, short=[6])
    monkeypatch.setattr(Context, "encode_prompt", lambda self, row: Turn([5, 6], sampled=False, images=(image,)))
    with pytest.raises(RolloutError, match="row 0 of unit has images"):
        run(file(EXECUTOR), model)


def test_arguments_of_the_executor_come_from_the_run_file(file, model: str) -> None:
    assert len(run(file(EXECUTOR), model, arguments={"turns": 1})[0]) == 2
    with pytest.raises(ValidationError, match=r"AgentExecutor\(turns=2\) cannot be called with them: .*'steps'"):
        run(file(EXECUTOR), model, arguments={"steps": 1})


def test_no_reward_leaves_it_to_the_rewards_and_a_cut_answer_is_truncated(file, model: str) -> None:
    text = EXECUTOR.replace("        return result", "        return result | {'reward': None, 'truncated': True}")
    turns, _ = run(file(text), model)
    assert (turns[-1].reward, turns[-1].finish) == (None, "length")
    cut = "        tokens = tokens[:ranges[-1][0] + 1]\n        result['observation_tokens'] = tokens\n"
    cut += "        result['action_ranges'][-1] = (ranges[-1][0], len(tokens))\n        return result"
    turns, context = run(file(EXECUTOR.replace("        return result", cut)), model)
    assert (list(turns[-1].ids), turns[-1].finish) == ([context.calls[1].turn.ids[0] % 10 + 5], "length")
    assert turns[-1].text == context.tokenizer.decode(list(turns[-1].ids)), "without the tokens that were cut"
    assert list(turns[-1].logprobs) == list(context.calls[1].turn.logprobs)[:1]


def test_a_cut_answer_has_the_experts_and_versions_of_its_own_tokens(file, model: str, monkeypatch) -> None:
    async def generate(self, turns, sampling: Sampling, turn_number: int = 0) -> Turn:
        tokens = len(turns[0].ids)
        record = ExpertRecord(bytes(range(tokens + 2)), layers=1, experts=99, chosen=1)
        return Turn([7, 8, 9], True, [-0.5, -0.6, -0.7], ((0, 4), (2, 5)), "stop", text="xyz", experts=record)

    monkeypatch.setattr(Context, "generate", generate)
    cut = "        result['observation_tokens'] = tokens[:ranges[0][1] - 1]\n"
    cut += "        result['action_ranges'] = [(ranges[0][0], ranges[0][1] - 1)]\n        return result"
    turns, _ = run(file(EXECUTOR.replace("        return result", cut)), model)
    assert (list(turns[1].ids), turns[1].versions) == ([7, 8], ((0, 4),))
    assert turns[1].experts.choices == bytes(range(len(turns[0].ids) + 1)), "without the last of its tokens"
    check_records(turns, None)


def test_scores_and_logs_of_the_result_are_kept(file, model: str) -> None:
    fields = "{'scores': [1.0], 'extra_logs': {'calls': 3, 'none': None}}"
    turns, context = run(file(EXECUTOR.replace("        return result", f"        return result | {fields}")), model)
    assert [t.score for t in turns] == [None, None, None, 1.0]
    assert context.reported == {"calls": 3.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "result['observation_tokens'][ranges[0][0]] += 1",
            r"action range \(4, \d+\), but llm_engine.generate\(\) did",
        ),
        ("result['observation_tokens'][0] += 1", "did not sample these tokens after the preceding tokens"),
        ("result['action_ranges'][0] = (0, 2)", r"action range \(0, 2\)"),
        ("result['action_ranges'][0] = (ranges[0][0], ranges[0][1] + 1)", "did not sample these tokens"),
        ("result['action_ranges'] = []", "nothing to learn from"),
        ("del result['observation_tokens']", "expected a dict with observation_tokens, action_ranges and reward"),
        ("await llm_engine.generate(tokens, params, multi_modal_data={'image': [1]})", "images are not supported"),
    ],
)
def test_tokens_that_were_not_sampled_fail_the_sample(file, model: str, change: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        run(file(EXECUTOR.replace("        return result", f"        {change}\n        return result")), model)


SERVER = EXECUTOR.replace(
    "        return result",
    """        import asyncio, threading
        def serve():
            other.append(asyncio.run(llm_engine.generate(tokens, params)))
        other = []
        thread = threading.Thread(target=serve)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        end = len(tokens) + len(other[0].outputs[0].token_ids)
        ranges.append((len(tokens), end))
        result["observation_tokens"] = tokens + other[0].outputs[0].token_ids
        return result""",
)


def test_the_engine_may_be_called_from_another_event_loop(file, model: str) -> None:
    """OpenRLHF's example of an OpenAI-compatible server does so."""
    assert [t.sampled for t in run(file(SERVER), model)[0]] == [False, True, False, True, False, True]


@pytest.mark.parametrize("base", ["SingleTurnAgentExecutor", "MultiTurnAgentExecutor"])
def test_an_executor_may_call_the_execute_that_it_inherits(file, model: str, base: str) -> None:
    text = f"""
from openrlhf.utils.agent import AgentInstanceBase, {base}

class AgentInstance(AgentInstanceBase):
    async def __init__(self):
        self.steps = 0

    async def step(self, states, **kwargs):
        self.steps += 1
        return {{"rewards": 0.5, "environment_feedback": "!", "done": self.steps == 3}}

class AgentExecutor({base}):
    def __init__(self):
        super().__init__({"AgentInstance" if base.startswith("Multi") else ""})

    async def execute(self, *args, **kwargs):
        kwargs["sampling_params"].max_tokens = 4
        result = await super().execute(*args, **kwargs)
        return result | {{"reward": (result["reward"] or 0.0) + 1.0}}
"""
    turns, _ = run(file(text), model)
    reward = 2.5 if base.startswith("Multi") else 1.0
    assert ([t.sampled for t in turns].count(True), turns[-1].reward) == (3 if reward == 2.5 else 1, reward)


def test_an_executor_without_its_own_execute_is_an_environment(file) -> None:
    text = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, states, **kwargs):
        return {"rewards": 0.0, "done": True}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
    with pytest.raises(PluginInvalid, match=r"inherits execute\(\)\. Use the file as an environment: \[env\] use = "):
        Plugins.discover().resolve("rollout", file(text))


def test_a_run_learns_from_an_executor_and_filters_by_its_scores(file, model: str, tmp_path) -> None:
    text = EXECUTOR.replace(" and max_length == 400", "")
    fields = "{'reward': result['reward'] + 1, 'scores': 0.5, 'extra_logs': {'turns': self.turns}}"
    text = text.replace("        return result", f"        return result | {fields}")
    result = rlhf.train(
        algorithm="rloo",
        model=model,
        data=[{"prompt": "2+2=", "label": "4"}, {"prompt": "3+1=", "label": "4"}],
        steps=1,
        output=tmp_path / "run",
        options={
            "rollout.use": file(text),
            "rollout.arguments": {"turns": 3},
            "sampling.samples_per_prompt": 2,
            "data.batch_size": 2,
            "stream.filter.low": 0,
            "stream.filter.high": 1,
        },
    )
    assert result.metrics[-1]["reward/mean"] > 1  # the executor's own reward, which the filter would reject
    assert (result.metrics[-1]["stream/filtered"], result.metrics[-1]["rollout/turns"]) == (0, 3)
