"""Mistakes that authors make, kind by kind: `rlhf plugins check` names each one and the change to make."""

from __future__ import annotations

import io
import json
import os
import random
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rlhf.interfaces import ComponentConfig, Env, Observer, Reward, Rollout, Slot
from rlhf.ops.groups import group_center
from rlhf.types import EnvStep, RewardResult, RoleSpec, Turn, Update
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_cli.main import main
from rlhf_testing import conformance
from rlhf_testing.contract import Nonconformance, no_number, not_default

from tests.support.parts import Centered


@dataclass
class Selected:
    kind: str
    name: str
    cls: Any


def failures(kind: str, cls: type, name_part: str = "") -> dict[str, str]:
    """{check: what is wrong} of every check that fails, or of those whose names contain ``name_part``."""
    return {
        r.name: r.detail for r in conformance.run(Selected(kind, cls.name, cls), name_part=name_part) if not r.passed
    }


# ------------------------------------------------------------------------------------------ any kind


class Constant(Reward):
    """Well made."""

    name = "constant"

    async def score(self, group):
        return [RewardResult(1.0) for _ in group.trajectories]


def with_field(base: type, name: str) -> type:
    """``base`` with a Config that has one documented field of text."""
    body = {"__annotations__": {name: str}, name: "x", "__doc__": "Options.", "__module__": __name__}
    config = type("Config", (ComponentConfig,), body)
    config.model_fields[name].description = "Documented."
    return type("Made", (base,), {"__doc__": "Made.", "Config": config})


@pytest.mark.parametrize(
    ("kind", "base", "field", "says"),
    [
        ("advantage", Centered, "use", "Config.use cannot be set: the section of the advantage itself uses the name"),
        ("reward", Constant, "weight", "Config.weight cannot be set: the section of the reward itself uses the name"),
        ("reward", Constant, "api_key", "api_key has the name of a secret, but run files are copied and logged"),
    ],
)
def test_an_option_that_no_run_file_could_set(kind, base, field, says):
    assert failures(kind, base) == {}
    assert failures(kind, with_field(base, "column")) == {}
    assert says in failures(kind, with_field(base, field))["config"]


def test_a_layout_names_options():
    base = with_field(Constant, "url")
    assert failures("reward", type("Made", (base,), {"__doc__": "Made.", "layout": frozenset({"url"})})) == {}
    wrong = type("Made", (base,), {"__doc__": "Made.", "layout": frozenset({"urls"})})
    assert "layout names ['urls']; Config has ['url']" in failures("reward", wrong)["config"]


def test_methods_with_another_signature_are_found():
    class Fewer(Centered):
        """No groups."""

        def baseline(self, r_N):
            return r_N

    class NoProperty(Centered):
        """Always true."""

        def needs_values(self):
            return False

    class PlainSetup(Constant):
        """Not awaited."""

        def setup(self, context):
            self.seed = context.seed

    assert (
        "Fewer.baseline(self, r_N) is called as baseline(self, r_N, group_N)" in failures("advantage", Fewer)["class"]
    )
    assert "put @property above it" in failures("advantage", NoProperty)["class"]
    assert "PlainSetup.setup is awaited: write `async def setup`" in failures("reward", PlainSetup)["class"]


def test_more_arguments_with_defaults_and_other_names_are_fine():
    class Wider(Centered):
        """As called."""

        def baseline(self, rewards, groups, scale=1.0):
            return scale * group_center(rewards, groups)

    assert failures("advantage", Wider) == {}


class Options(ComponentConfig):
    """For :func:`not_default`."""

    rate: float = 0.1
    parts: tuple[str, ...] = ()


class Nested(ComponentConfig):
    """For :func:`not_default`."""

    inner: Options = Options()
    path: str


def test_messages_name_only_what_is_not_at_its_default():
    assert not_default(Options()) == []
    assert not_default(Nested(path="p", inner=Options(rate=0.2))) == ["inner.rate = 0.2", "path = 'p'"]


def test_numbers_of_other_libraries_are_numbers_as_in_a_run():
    import numpy as np

    assert [no_number(v) for v in (1, 0.5, np.float32(1), np.float64(1))] == [""] * 4
    assert no_number(float("nan")) == "nan (float); allowed is a finite number."
    assert no_number(True) == "True (bool); allowed is a finite number. Write float(...)."
    assert no_number(torch.tensor(1.0)) == "tensor(1.) (Tensor); allowed is a finite number. Write .item()."


def test_a_secret_that_is_printed_or_raised_is_named_and_not_shown(monkeypatch):
    class Tells(Constant):
        """Debugging."""

        async def score(self, group):
            print("key:", os.environ["JUDGE_API_KEY"])
            if len(group.trajectories) == 1:
                raise ValueError(f"401 for {os.environ['JUDGE_API_KEY']}")
            return await super().score(group)

    class Dumps(Constant):
        """Debugging."""

        async def score(self, group):
            print(dict(os.environ))
            return await super().score(group)

    monkeypatch.setenv("JUDGE_API_KEY", "k-" + "Zq7" * 6)
    with redirect_stdout(io.StringIO()) as output:
        problems = failures("reward", Tells)
    assert problems["secrets"] == (
        "What it prints or raises shows $JUDGE_API_KEY. Logs are kept and shared, so they must not hold secrets."
    )
    assert problems["every_answer_alone"].startswith("ValueError: 401 for $JUDGE_API_KEY (")
    assert "key: $JUDGE_API_KEY\n" in output.getvalue()
    assert "Zq7" not in output.getvalue() + json.dumps(problems)
    monkeypatch.delenv("JUDGE_API_KEY")
    with redirect_stdout(io.StringIO()):
        assert "the whole environment" in failures("reward", Dumps)["secrets"]


def test_what_a_plugin_prints_is_not_in_the_json(tmp_path, capsys):
    path = tmp_path / "loud.py"
    path.write_text("async def score(prompt, completion, row):\n    print('hello')\n    return 1.0\n")
    assert main(["plugins", "check", f"file:{path}", "--kind", "reward", "--json"]) == 0
    output = capsys.readouterr()
    assert {row["outcome"] for row in json.loads(output.out)} == {"ok", "left out"}
    assert "hello\n" in output.err


# ---------------------------------------------------------------------------------------- advantages


def test_advantages_with_wrong_results_are_found():
    class Lists(Centered):
        """Not tensors."""

        def baseline(self, r_N, group_N):
            return [float(r) for r in r_N]

    class Text(Centered):
        """No number."""

        group_min = "2"

    class Seeds(Centered):
        """Seeds torch's generator, which dropout uses too."""

        def returns(self, R_NA, mask_NA, values_NA, boot_N):
            torch.manual_seed(0)
            return super().returns(R_NA, mask_NA, values_NA, boot_N)

    assert "baseline() must give float64 (12,), got list [" in failures("advantage", Lists)["shapes"]
    assert "group_min is '2'; it must be an integer of at least 1" in failures("advantage", Text)["shapes"]
    assert list(failures("advantage", Seeds)) == ["shapes"]
    assert "seeds torch's global random generator" in failures("advantage", Seeds)["shapes"]


# ------------------------------------------------------------------------------------------- rewards


class Judged(Reward):
    """Well made: asks a model."""

    name = "judged"

    def roles(self):
        return (RoleSpec("judge", head="scalar", model="m"),)

    async def setup(self, context):
        self.ask = context.score_with_role

    async def score(self, group):
        ids = [[i for turn in t.turns for i in turn.ids] for t in group.trajectories]
        return [RewardResult(v) for v in await self.ask("judge", ids)]


def test_rewards_that_ask_a_model():
    class Texts(Judged):
        """Not tokens."""

        async def score(self, group):
            return [RewardResult(v) for v in await self.ask("judge", [t.answer for t in group.trajectories])]

    class Undeclared(Judged):
        """No role."""

        def roles(self):
            return ()

    assert failures("reward", Judged) == {}
    assert "not lists of token ids (Turn.ids)" in failures("reward", Texts)["results"]
    assert "roles() declares no role" in failures("reward", Undeclared)["results"]


def test_rewards_that_declare_columns():
    class Reads(Constant):
        """Well made."""

        async def score(self, group):
            return [RewardResult(float(t.answer == group.row["answer"])) for t in group.trajectories]

        def columns(self):
            return ["answer"]

    class Text(Reads):
        """One text is a collection of letters."""

        def columns(self):
            return "answer"

    class Empty(Reads):
        """No name."""

        def columns(self):
            return ("answer", "")

    class Elsewhere(Reads):
        """Not a column of the row."""

        def columns(self):
            return ("gold",)

    class Unread(Constant):
        """Does without it."""

        def columns(self):
            return {"answer"}

    assert failures("reward", Reads) == {}
    assert (
        "must return a list or tuple of strings that are not empty, got 'answer'" in failures("reward", Text)["columns"]
    )
    assert "got ('answer', '')" in failures("reward", Empty)["columns"]
    assert "names 'gold'; this suite's row has ['answer', 'prompt']" in failures("reward", Elsewhere)["columns"]
    assert "but score() works on a row without it. Remove it" in failures("reward", Unread)["columns"]


def test_rewards_that_cannot_run_in_a_worker():
    """Mistakes that a run also refuses, or that make its first step fail."""

    class Plain(Constant):
        """Has what it needs."""

        def score(self, group):
            return [RewardResult(1.0) for _ in group.trajectories]

    class PlainRole(Plain):
        """Declares a role, but runs in a process that has no models."""

        def roles(self):
            return (RoleSpec("judge", head="scalar", model="m"),)

    class PlainSetup(Plain):
        """Reads a value that setup() gives, which is not called in worker processes."""

        async def setup(self, context):
            self.value = 1.0

        def score(self, group):
            return [RewardResult(self.value) for _ in group.trajectories]

    class PlainState(Plain):
        """Keeps a state that differs in every worker process."""

        def state_dict(self):
            return {}

    assert failures("reward", Plain) == {}
    assert "declares roles, but its score() is plain `def`" in failures("reward", PlainRole)["place"]
    assert "has a state_dict, but its score() is plain `def`" in failures("reward", PlainState)["place"]
    assert "worker process, where setup() is not called" in failures("reward", PlainSetup)["results"]


# -------------------------------------------------------------------------------------- environments


def test_environments_are_played_from_every_action():
    class NoneForNothing(Env):
        """Returns nothing for an empty answer."""

        name = "none_for_nothing"

        async def reset(self, row, seed):
            return ""

        async def step(self, action):
            return EnvStep(done=True) if action else None

    assert "the answer to '' must be an EnvStep, got None" in failures("env", NoneForNothing)["episodes"]


def test_environments_with_wrong_results_are_found():
    class Made(Env):
        """Answers ``given``."""

        name = "made"
        given = EnvStep(done=True)

        async def reset(self, row, seed):
            return ""

        async def step(self, action):
            return self.given

    def with_step(**fields):
        return failures("env", type("Made", (Made,), {"__doc__": "Made.", "given": EnvStep(**fields)}))["episodes"]

    assert failures("env", Made) == {}
    assert "done is 1, not True or False. Write bool(...)" in with_step(done=1)
    assert "allowed is None, or a Sampling such as dataclasses.replace(" in with_step(sampling={"top_k": 1}, done=True)
    assert "the reward is None (NoneType); allowed is a finite number" in with_step(reward=None, done=True)


# ----------------------------------------------------------------------------------------- observers


def test_observer_methods_that_are_unknown_or_async_are_found():
    class OtherName(Observer):
        """Has a method with the name that another framework uses."""

        name = "other_name"

        def on_step_end(self, step, metrics):
            pass

    class Waits(Observer):
        """Nobody awaits it."""

        name = "waits"

        async def step_finished(self, step, metrics):
            pass

    assert "handles no event: nothing calls on_step_end; events are" in failures("observer", OtherName)["listens"]
    assert "step_finished() is `async def`, which is never awaited" in failures("observer", Waits)["runs"]


# ------------------------------------------------------------------------------------------ rollouts


class Best(Rollout):
    """Keeps the longest of four candidates."""

    name = "best"
    conformance = {"discards": True}

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        answers = [await ctx.generate([prompt], ctx.sampling, n) for n in range(4)]
        question = replace(ctx.encode_observation(" | ".join(t.text for t in answers)), fresh=True)
        verdict = await ctx.generate([question], ctx.sampling, 4)
        return [prompt, answers[len(verdict.ids) % 4]]


def test_candidates_may_be_dropped_if_declared():
    class Silent(Best):
        """Does not declare that it drops candidates."""

        conformance = {}

    class Changes(Best):
        """Drops candidates and changes the one that it keeps."""

        async def run(self, row, seed, ctx):
            prompt, answer = await super().run(row, seed, ctx)
            return [prompt, replace(answer, ids=answer.ids[:-1], logprobs=answer.logprobs[:-1])]

    class Elsewhere(Best):
        """Keeps an answer that was sampled after another context."""

        async def run(self, row, seed, ctx):
            turns = await super().run(row, seed, ctx)
            return [turns[0], replace(turns[0]), turns[1]]

    assert failures("rollout", Best) == {}
    assert list(failures("rollout", Silent)) == ["token_in_token_out"]
    assert "5 turns were generated, but 1 are in the trajectory" in failures("rollout", Silent)["token_in_token_out"]
    assert 'conformance = {"discards": True}' in failures("rollout", Silent)["token_in_token_out"]
    assert "do not tokenise sampled text again" in failures("rollout", Changes)["token_in_token_out"]
    assert "mark a rewritten context with fresh=True" in failures("rollout", Elsewhere)["token_in_token_out"]


def test_rollouts_with_wrong_results_are_found():
    class NotAwaited(Best):
        """No await."""

        async def run(self, row, seed, ctx):
            prompt = ctx.encode_prompt(row)
            return [prompt, ctx.generate([prompt], ctx.sampling)]

    class Text(Best):
        """Only the text."""

        async def run(self, row, seed, ctx):
            return (await ctx.generate([ctx.encode_prompt(row)], ctx.sampling)).text

    class FromText(Best):
        """No turns."""

        async def run(self, row, seed, ctx):
            return [Turn([1], False), await ctx.generate([row["prompt"]], ctx.sampling)]

    class Plain(Best):
        """Not awaited."""

        def run(self, row, seed, ctx):
            return [ctx.encode_prompt(row)]

    assert "without awaiting it: await ctx.generate(...)" in failures("rollout", NotAwaited)["turns"]
    assert "run() must return the sample's turns, a list of Turn" in failures("rollout", Text)["turns"]
    assert "ctx.generate() takes the turns so far, a list of Turn" in failures("rollout", FromText)["turns"]
    assert "Plain.run is awaited: write `async def run`" in failures("rollout", Plain)["class"]


# ---------------------------------------------------------------------------------------- algorithms


class Good(PolicyGradient):
    """Well made."""

    name = "good"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "group_norm"), "loss": Slot("loss", "ppo")}


class FirstFailure(Exception):
    """Ends the checks of :func:`first_failure`."""


def first_failure(cls: type) -> str:
    """What is wrong by the first check that fails. The checks after it are not run."""

    def stop(result: conformance.CheckResult) -> None:
        if not result.passed:
            raise FirstFailure(result.detail)

    with pytest.raises(FirstFailure) as error:
        conformance.run(Selected("algorithm", cls.name, cls), stop)
    return str(error.value)


def test_algorithms_that_override_their_base_wrongly_are_found():
    class NoSlots(PolicyGradient):
        """No parts."""

        name = "no_slots"

    class OtherConfig(Good):
        """Not the options of the base."""

        class Config(ComponentConfig):
            """Own."""

    class NoValueLoss(Good):
        """A critic that nothing trains."""

        slots = {"advantage": Slot("advantage", "gae"), "loss": Slot("loss", "ppo")}

    assert "'no_slots' has no slot 'advantage'; its slots are ['value_loss']" in first_failure(NoSlots)
    assert "OtherConfig.Config must subclass rlhf_algorithms.policy_gradient_config.Pol" in first_failure(OtherConfig)
    assert "has no slot 'value_loss'; its slots are ['advantage', 'loss']" in first_failure(NoValueLoss)


def test_slots_whose_defaults_their_plugin_does_not_have():
    class WrongDefault(Good):
        """A typo."""

        slots = Good.slots | {"loss": Slot("loss", "ppo", {"clip_hihg": 0.3})}

    assert "slots['loss'].defaults.clip_hihg: unknown key. Did you mean 'clip_high'?" in first_failure(WrongDefault)


def test_algorithms_with_wrong_results_are_found():
    class NoCredit(Good):
        """Forgets to return."""

        def credit(self, batch):
            super().credit(batch)

    class BatchAlone(Good):
        """Without metrics."""

        def assemble(self, examples):
            return super().assemble(examples)[0]

    class OneUpdate(Good):
        """No list."""

        def updates(self, step, batch=None):
            return Update("policy", "loss")

    class NoMetrics(Good):
        """Forgets to return."""

        def finish(self, step, batch, metrics):
            pass

    class Shuffles(Good):
        """Draws from the generator of the whole process."""

        def assemble(self, examples):
            groups = list(examples)
            random.shuffle(groups)
            return super().assemble(groups)

    assert "credit() must return (batch, metrics), got NoneType None" in first_failure(NoCredit)
    assert (
        "assemble() must return (batch, metrics), with batch = None if there is nothing to learn from"
        in first_failure(BatchAlone)
    )
    assert "updates() must return a list of Updates and Snapshots, got Update" in first_failure(OneUpdate)
    assert "finish() must return metrics ({} if there are none), got NoneType" in first_failure(NoMetrics)
    assert (
        "draws from or seeds random's global random generator"
        in failures("algorithm", Shuffles, name_part="steps")["steps"]
    )


def test_an_option_with_the_name_of_a_slot():
    contract = conformance.suite("algorithm")
    instance = type("Suite", (contract,), {"algorithm": with_field(Good, "loss"), "registered": False})()
    with pytest.raises(Nonconformance, match="loss cannot be set: the slot 'loss' uses the name"):
        instance.test_config()
