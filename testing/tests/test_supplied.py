"""Data for the suites that only an author can supply: columns of rows, units of pairs, columns of other levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rlhf.interfaces import Env, Loss, Reward, Rollout, Slot
from rlhf.types import EnvStep, LossOutput, Reduce, RewardResult
from rlhf_algorithms.pair_learning import PairLearning
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_cli.main import main
from rlhf_testing import conformance, fabricate


@dataclass
class Selected:
    kind: str
    name: str
    cls: Any


def failures(kind: str, cls: type) -> dict[str, str]:
    """{check: what is wrong} of every check that fails."""
    return {r.name: r.detail for r in conformance.run(Selected(kind, cls.name, cls)) if not r.passed}


class Guess(Env):
    """Reads a column of the row."""

    name = "guess"

    async def reset(self, row, seed):
        self.secret = row["secret"]
        return ""

    async def step(self, action):
        return EnvStep(reward=float(self.secret in action), done=True)


class Gold(Reward):
    """Reads a column of the row, past the row's own message."""

    name = "gold"

    async def score(self, group):
        gold = group.row.columns["secret"]
        return [RewardResult(float(t.answer == gold)) for t in group.trajectories]


class Told(Rollout):
    """Reads a column of the row."""

    name = "told"

    async def run(self, row, seed, ctx):
        assert row["secret"]
        prompt = ctx.encode_prompt(row)
        return [prompt, await ctx.generate([prompt], ctx.sampling, 0)]


class Summed(Loss):
    """The log-prob of the chosen answer less that of the rejected one and a margin."""

    name = "summed"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("margin",)

    def reduce(self):
        return {"pairs": Reduce("unit_mean")}

    def __call__(self, x):
        total_S = x.sum_per_sequence(x["logprobs"])
        margin_U = x.of_role(total_S, 0) - x.of_role(total_S, 1) - x["margin"]
        return LossOutput({"pairs": torch.nn.functional.softplus(-margin_U)})


class Paired(PairLearning):
    """Puts a column of the row and the margin of the pair into the batch."""

    name = "paired"
    slots = {"loss": Slot("loss", "summed")}
    conformance: dict[str, Any] = {"parts": {"loss": Summed}}

    def assemble(self, examples):
        secret_U = torch.tensor([float(e.row["secret"]) for e in examples])
        margin_U = torch.tensor([float(e.values["margin"]) for e in examples])
        batch, metrics = super().assemble(examples)
        return batch.with_column("unit", "margin", margin_U + secret_U), metrics


class Leveled(PolicyGradient):
    """Reads a column of each group's row."""

    name = "leveled"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "rloo"), "loss": Slot("loss", "ppo")}

    def assemble(self, examples):
        assert all(g.row["secret"] for g in examples)
        return super().assemble(examples)


ROWS = "which the made-up rows of this suite do not have (they have prompt, answer). Add an example of it: "


@pytest.mark.parametrize(
    ("kind", "cls", "wrong", "give", "conforming"),
    [
        ("env", Guess, "episodes", '{"rows": [WHOLE]}', {"rows": [{"secret": "plum"}]}),
        ("reward", Gold, "results", '{"columns": WHOLE}', {"columns": {"secret": "plum"}}),
        ("rollout", Told, "turns", '{"columns": WHOLE}', {"columns": {"prompt": "p", "secret": "plum"}}),
        ("algorithm", Leveled, "steps", '{"columns": {"secret": ...}}', {"columns": {"secret": "plum"}}),
        (
            "algorithm",
            Paired,
            "steps",
            '{"columns": {"secret": ...}}',
            {"columns": {"secret": 1, "margin": 0.5}, **Paired.conformance},
        ),
    ],
)
def test_a_column_that_the_suite_cannot_guess(kind, cls, wrong, give, conforming):
    message, give = failures(kind, cls)[wrong], give.replace("WHOLE", '{"prompt": ..., "answer": ..., "secret": ...}')
    assert f"reads the column 'secret', {ROWS}conformance = {give} in the plugin's class" in message
    assert ".py:" in message, "the line that reads it"
    supplied = type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "conformance": conforming})
    assert failures(kind, supplied) == {}


def test_the_margin_of_a_pair_is_a_column_too():
    lacking = type("Paired", (Paired,), {"conformance": {"columns": {"secret": 1}, **Paired.conformance}})
    assert "reads the column 'margin', which" in failures("algorithm", lacking)["steps"]


def test_errors_of_a_plugins_own_tables_are_not_taken_for_missing_columns():
    class Own(Gold):
        """Looks up something else."""

        async def score(self, group):
            return [RewardResult({"a": 1.0}[t.answer]) for t in group.trajectories]

    assert failures("reward", Own)["results"].startswith("KeyError: '4'")


def test_a_column_that_may_be_absent_is_asked_for_as_in_a_run():
    row = fabricate.row()
    assert row.get("secret", 3) == 3
    assert "secret" not in row.columns
    with pytest.raises(KeyError, match=r"'secret', \['prompt', 'answer'\]"):
        row["secret"]


def test_a_reward_function_has_its_columns_beside_it(tmp_path, capsys):
    function = "def score(prompt, completion, row):\n    return float(completion == row['secret'])\n"
    file = tmp_path / "gold.py"
    file.write_text(function)
    assert main(["plugins", "check", f"file:{file}", "--kind", "reward"]) == 1
    assert "(in a file with a function: next to the function) (gold.py:2)" in capsys.readouterr().out
    file.write_text('conformance = {"columns": {"secret": "4"}}\n\n\n' + function)
    assert main(["plugins", "check", f"file:{file}", "--kind", "reward"]) == 0


def test_a_loss_on_pairs_says_what_units_it_needs():
    message = failures("loss", Summed)["declared_needs"]
    assert "loss 'summed' reads the sequence of role 1 in every unit, but 0 of 6 units have one" in message
    assert 'set data = "pairs" in its class' in message


def test_a_column_of_units_says_so():
    class Units(Summed):
        """On pairs; the column has one value a unit."""

        data = "pairs"

    message = failures("loss", Units)["declared_needs"]
    assert "The suite made one value per token for the columns margin" in message
    assert 'conformance = {"levels": {"margin": "unit"}}' in message
    assert "(test_supplied.py:" in message
    Units.conformance = {"levels": {"margin": "unit"}}
    assert failures("loss", Units) == {}


def test_a_statement_reads_the_config_under_test():
    configs = []

    def statement(self, x_BT):
        configs.append(x_BT.config)
        return -(x_BT["logprobs"] * x_BT.mask_BT).sum() / x_BT.mask_BT.sum()

    class Plain(Loss):
        """Likelihood."""

        name = "plain"
        conformance = {"statement": statement}

        def outputs(self):
            return ("logprobs",)

        def reduce(self):
            return {"nll": Reduce("token_mean")}

        def __call__(self, x):
            return LossOutput({"nll": -x["logprobs"]})

    [result] = conformance.run(Selected("loss", "plain", Plain), name_part="statement")
    assert result.passed
    assert [type(config) for config in configs] == [Plain.Config]
