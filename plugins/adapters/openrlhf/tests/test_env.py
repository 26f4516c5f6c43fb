"""AgentInstance files, written for these tests in OpenRLHF's documented style."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

import pytest
from PIL import Image
from pydantic import ValidationError
from rlhf.errors import EnvError, PluginInvalid
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row, Sampling

ROW = Row({"prompt": "Guess:", "label": "7"}, "unit", 0)
SAMPLING = Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9)

DOCUMENTED = """
from typing import Any, Dict
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.step_idx = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs) -> Dict[str, Any]:
        self.step_idx += 1
        done = states["action_text"] == states["label"]
        reward = torch.tensor(1.0 if done else -0.25)
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "right" if done else f" no ({len(states['observation_text'])}), ",
            "done": done,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"turn": torch.tensor(self.step_idx)},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def resolve(reference: str):
    return Plugins.discover().resolve("env", reference)


def play(reference: str, *actions: str, row: Row = ROW, seed: int = 3, **options) -> tuple[str, list[EnvStep]]:
    async def episode():
        cls = resolve(reference).cls
        env = cls(cls.Config(**options))
        env.sampling = SAMPLING
        opening = await env.reset(row, seed)
        try:
            return opening, [await env.step(a) for a in actions]
        finally:
            await env.close()

    return asyncio.run(episode())


def test_a_documented_agent(file) -> None:
    opening, steps = play(file(DOCUMENTED), "5", "7")
    assert opening == ""
    assert steps == [
        EnvStep(" no (6), ", -0.25, False, None, {"turn": 1.0, "scores": -0.25}, score=-0.25),
        EnvStep("right", 1.0, True, None, {"turn": 2.0, "scores": 1.0}, score=1.0),
    ]


def test_the_observation_grows_by_action_and_feedback(file) -> None:
    _, steps = play(file(DOCUMENTED), "5", "66", "7")
    assert steps[1].observation == f" no ({len('Guess:5 no (6), ')}), "


def test_an_instance_alone_is_enough_and_one_of_several_is_picked_by_name(file) -> None:
    text = DOCUMENTED[: DOCUMENTED.index("class AgentExecutor")]
    assert play(file(text), "7")[1][0].done
    two = text + "\n\nclass Other(AgentInstance):\n    pass\n"
    with pytest.raises(PluginInvalid, match=r"got AgentInstance, Other\. Pick one with file:PATH\.py:NAME"):
        resolve(file(two))
    assert play(file(two) + ":Other", "7")[1][0].done


def agent(reset: str = 'return {"observation": states["observation"]}', step: str = "", extra: str = "") -> str:
    return f"""
import random
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    closed = []
    def __init__(self, *args, **kwargs):
        pass
    async def reset(self, states, **kwargs):
        {reset}
    async def step(self, states, **kwargs):
        result = {{"rewards": 0.0, "environment_feedback": "", "done": False}}
        {step}
        return result
{extra}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def test_reset_adds_to_the_prompt_and_draws_from_the_seed(file) -> None:
    text = agent(reset='return {"observation": states["observation"] + f" {random.Random(kwargs[\'seed\']).random()}"}')
    assert play(file(text), seed=3) == play(file(text), seed=3)
    assert play(file(text), seed=3) != play(file(text), seed=4)


def test_reset_cannot_replace_the_prompt(file) -> None:
    with pytest.raises(EnvError, match=r"begins with the prompt 'Guess:' it was given, got \{'observation': 'other'\}"):
        play(file(agent(reset='return {"observation": "other"}')))


def test_labels_and_prompts_come_from_their_columns(file) -> None:
    row = Row({"question": [{"role": "user", "content": "Guess:"}], "gold": "7"}, "unit", 0)
    assert play(file(DOCUMENTED), "7", row=row, prompt="question", label="gold")[1][0].done
    with pytest.raises(EnvError, match=r"no column 'prompt'; it has \['gold', 'question'\]. Set `prompt`"):
        play(file(DOCUMENTED), row=row)


@pytest.mark.parametrize(
    ("step", "sampling"),
    [
        ('p = states["sampling_params"]; p.max_tokens = 4; result["sampling_params"] = p', {"max_new_tokens": 4}),
        ('states["sampling_params"].max_tokens = 4', {}),
        ('p = states["sampling_params"]; p.stop = "x"; p.top_k = -1; result["sampling_params"] = p', {"stop": ("x",)}),
        ('result["sampling_params"] = states["sampling_params"]', {}),
    ],
)  # fmt: skip
def test_each_sample_has_its_own_sampling_params(file, step: str, sampling: dict) -> None:
    """In OpenRLHF the samples of a prompt share one object, so one sample that changes it truncates the others."""
    _, (first, second) = play(file(agent(step=step)), "a", "b")
    assert first.sampling == (replace(SAMPLING, **sampling) if sampling else None)
    assert second.sampling == first.sampling  # the second turn gets the policy's parameters, not the changed copy
    assert Sampling(max_new_tokens=20, temperature=0.8, top_p=0.9) == SAMPLING


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        ('p = states["sampling_params"]; p.min_tokens = 9; result["sampling_params"] = p', ValueError,
         "sampling_params.min_tokens = 9 is not supported"),
        ('result["environment_images"] = [3]', TypeError, "environment_images holds int 3; allowed: PIL images"),
        ('result["rewards"] = None', EnvError, "return 0.0 if a step has no reward"),
        ('result["rewards"] = [1.0, 2.0]', TypeError, "rewards is .* expected one number"),
        ("result = None", EnvError, "must return a dict with at least 'rewards' and 'done', got None"),
    ],
)  # fmt: skip
def test_unsupported_results_of_a_step_are_errors(file, step: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        play(file(agent(step=step)), "a")


def test_images_of_a_step_become_files(file) -> None:
    images = 'from PIL import Image; result["environment_images"] = [Image.new("RGB", (8, 6), "red"), b"file"]'
    _, [step] = play(file(agent(step=images)), "a")
    picture, content = step.images
    with Image.open(io.BytesIO(picture)) as image:
        assert (image.size, image.getpixel((0, 0))) == ((8, 6), (255, 0, 0))
    assert content == b"file"


def test_close_is_called_if_the_instance_has_it(file) -> None:
    reference = file(agent(extra="    async def close(self):\n        self.closed.append(1)\n"))
    play(reference, "a")
    assert resolve(reference).cls.instance_class.closed == [1]


def test_an_async_init_is_awaited_and_what_openrlhf_does_with_it_is_told(file, caplog) -> None:
    """The multi-turn sample in OpenRLHF's README has it."""
    text = DOCUMENTED.replace("    def __init__(self, *args", "    async def __init__(self, *args")
    reference = file(text)
    for _ in range(3):  # as at the start of a run
        resolve(reference)
    assert play(reference, "5", "7")[1][1].info == {"turn": 2.0, "scores": 1.0}
    assert caplog.text.count("AgentInstance.__init__ is `async def`. It is awaited here. OpenRLHF itself fails") == 1


OWN_EXECUTOR = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        return {}
"""


@pytest.mark.parametrize("base", ["AgentExecutorBase", "MultiTurnAgentExecutor"])
def test_an_executor_with_its_own_execute_is_a_rollout_not_an_environment(file, base: str) -> None:
    with pytest.raises(PluginInvalid, match=r"AgentExecutor runs episodes by its own execute\(\).*\[rollout\] use = "):
        resolve(file(OWN_EXECUTOR.replace("AgentExecutorBase", base)))


OLDER = (
    DOCUMENTED[: DOCUMENTED.index("class AgentExecutor")].replace("MultiTurnAgentExecutor", "AgentExecutorBase")
    + """class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""
)


@pytest.mark.parametrize("kind", ["env", "rollout"])
def test_an_executor_of_an_older_interface_is_refused_with_what_works(file, kind: str) -> None:
    reference = file(OLDER)
    with pytest.raises(PluginInvalid, match=r"takes llm_engine, hf_tokenizer, result_queue.*0\.8") as refusal:
        Plugins.discover().resolve(kind, reference)
    assert f'[env] use = "{reference}:AgentInstance"' in str(refusal.value)
    assert play(f"{reference}:AgentInstance", "7")[1][0].done
    source = "from openrlhf.utils.agent import AgentExecutorBase\n" + OLDER[OLDER.index("class AgentExecutor(") :]
    with pytest.raises(
        PluginInvalid, match=r"0\.8.*Write an execute\(self, prompt, label, sampling_params, max_length"
    ):
        Plugins.discover().resolve(kind, file(source))


@pytest.mark.parametrize("kind", ["env", "rollout"])
def test_an_executor_of_nemo_gym_names_its_environment(file, kind: str) -> None:
    text = OLDER.replace("import torch", "import uvicorn_is_not_here\nfrom nemo_gym.cli import RunHelper")
    with pytest.raises(PluginInvalid, match=r'NeMo Gym.*\[env\] use = "nemo_gym"'):
        Plugins.discover().resolve(kind, file(text))


def test_an_executor_with_arguments_gets_them_from_the_run_file(file) -> None:
    text = DOCUMENTED.replace(
        "    def __init__(self):\n        super().__init__(AgentInstance)",
        "    def __init__(self, loud):\n        super().__init__(Loud if loud else AgentInstance)",
    )
    text = text.replace(
        "class AgentExecutor(",
        """class Loud(AgentInstance):
    async def step(self, states, **kwargs):
        result = await super().step(states)
        return result | {"environment_feedback": result["environment_feedback"].upper()}


class AgentExecutor(""",
    )
    assert play(file(text), "7", arguments={"loud": True})[1][0].observation == "RIGHT"
    assert play(file(text), "7", arguments={"loud": False})[1][0].observation == "right"
    for arguments, message in (({}, "missing a required argument: 'loud'"), ({"quiet": 1}, "'quiet'")):
        with pytest.raises(ValidationError, match=rf"AgentExecutor\(loud\) cannot be called with them: .*{message}"):
            play(file(text), "7", arguments=arguments)
    with pytest.raises(ValidationError, match="the file's executor is not used"):
        play(file(text) + ":Loud", "7", arguments={"loud": True})
