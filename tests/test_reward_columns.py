"""Rewards declare the columns that they need. A run whose data lacks one is refused before a model is loaded."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import Any

import pytest
import rlhf
from rlhf.errors import ConfigError
from rlhf.interfaces import Reward
from rlhf.types import Row
from rlhf_runtime.jobs import inference, scoring
from rlhf_runtime.setup import build
from transformers import AutoTokenizer

from tests.runs import Finished, Workshop
from tests.test_bad_input import nothing_written, refused

MATH = [{"use": "math"}]
BARE = [{"prompt": f"{n}+1=", "answr": str(n + 1), "response": "2"} for n in range(8)]
"""Rows without the column ``answer``."""
OPENRLHF = "def reward_func(queries, prompts, labels, **kwargs):\n    return {'rewards': 1.0}\n"
DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "math": ({"column": "gold"}, "--reward.math.column"),
    "code": ({"column": "gold", "sandbox": "limits"}, "--reward.code.column"),
    "http": ({"urls": ["http://127.0.0.1:1"], "label": "gold"}, "--reward.http.label"),
    "judge": ({"url": "http://127.0.0.1:1", "model": "m", "reference": "gold"}, "--reward.judge.reference"),
    "openrlhf": ({"label": "gold"}, "--reward.openrlhf.label"),
}
"""{reward: (options that name the column ``gold``, the flag that names another one)}."""


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""
    for module in (build, inference, scoring):
        monkeypatch.setattr(module, "launch_roles", lambda *_: pytest.fail("models are loaded"))


def trained(shop: Workshop, *flags: str, train: Any = None, held_out: Any = None, **changes: Any) -> Finished:
    """A run of two steps with ``math`` on these sources."""
    data = {"train": train or str(shop.rows("bare.jsonl", BARE)), "eval": held_out or []}
    changes = {"reward": MATH, "run": {"steps": 2}} | changes
    return shop.run("rloo", "run", *flags, data=data, **changes)


def sources(shop: Workshop, **rows: Any) -> list[dict[str, str]]:
    return [{"path": str(shop.rows(f"{name}.jsonl", examples)), "name": name} for name, examples in rows.items()]


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_missing_column_is_refused_before_models_are_loaded(shop: Workshop, no_models, flags: list[str]) -> None:
    run = trained(shop, *flags)
    error = refused(
        run,
        "the rewards cannot score the data (1 problem)",
        "data.train 'bare' (",
        "bare.jsonl) has no column 'answer', which reward 'math' reads; columns present: prompt, answr, response.",
        "Did you mean 'answr'? Name the right one with --reward.math.column.",
    )
    assert "sources" not in error, "no other source has the column"
    assert nothing_written(run)
    assert trained(shop, "--dry-run", "--reward.math.column", "answr").code == 0


@pytest.mark.parametrize("name", DECLARED)
def test_rewards_declare_the_column_that_an_option_names(shop: Workshop, no_models, name: str) -> None:
    options, flag = DECLARED[name]
    use = f"file:{shop.file('openrlhf.py', OPENRLHF)}" if name == "openrlhf" else name
    run = trained(shop, "--dry-run", reward=[{"use": use, **options}])
    refused(run, f"no column 'gold', which reward '{name}' reads", f"Name the right one with {flag}.")
    assert trained(shop, "--dry-run", flag, "answr", reward=[{"use": use, **options}]).code == 0


@pytest.mark.parametrize(
    ("use", "options"),
    [("http", {"urls": ["http://127.0.0.1:1"]}), ("judge", {"url": "http://127.0.0.1:1", "model": "m"})],
)
def test_columns_that_a_reward_can_do_without_are_not_needed(shop: Workshop, use: str, options: dict[str, Any]) -> None:
    assert trained(shop, "--dry-run", reward=[{"use": use, **options}]).code == 0
    function = f"file:{shop.file('openrlhf.py', OPENRLHF)}"
    assert trained(shop, "--dry-run", reward=[{"use": function}]).code == 0


@pytest.mark.skipif(find_spec("rlhf_plugin_reasoning_gym") is None, reason="rlhf-plugin-reasoning-gym is not installed")
def test_fixed_columns_are_all_named(shop: Workshop) -> None:
    run = trained(shop, "--dry-run", reward=[{"use": "reasoning_gym"}])
    error = refused(run, "(3 problems)", "Add it to the data.")
    assert all(f"has no column {name!r}" in error for name in ("task", "task_config", "seed"))


def test_each_source_is_checked_and_only_where_the_reward_scores_it(shop: Workshop, no_models) -> None:
    two = sources(shop, sums=[{"prompt": "1+1=", "answer": "2"}] * 4, chat=BARE)
    error = refused(trained(shop, train=two), "(1 problem)", "data.train 'chat' (")
    assert "or name the sources that this reward scores with --reward.math.sources." in error
    rewards = [{"use": "math", "sources": ["sums"]}, {"use": "length", "high": 3}]
    assert trained(shop, "--dry-run", train=two, reward=rewards).code == 0


def test_a_value_of_none_and_a_column_of_some_rows_are_accepted(shop: Workshop) -> None:
    rows = [*BARE, {"prompt": "1+1=", "answer": None}]
    assert trained(shop, "--dry-run", train=str(shop.rows("some.jsonl", rows))).code == 0


VERL = [{"prompt": f"{n}+1=", "reward_model": {"style": "rule", "ground_truth": str(n + 1)}} for n in range(8)]
"""Rows as verl has them: the answer is inside of a column."""


def test_a_dotted_name_is_a_value_inside_of_a_column(shop: Workshop, no_models) -> None:
    data = str(shop.rows("verl.jsonl", VERL))
    column = ("--dry-run", "--reward.math.column")
    assert trained(shop, *column, "reward_model.ground_truth", train=data).code == 0
    refused(trained(shop, *column, "reward_model.answer", train=data), "no column 'reward_model.answer'")
    refused(trained(shop, *column, "prompt.answer", train=data), "no column 'prompt.answer'")


def test_a_row_reads_dotted_names_and_a_column_of_that_name_comes_first() -> None:
    row = Row({"a": {"b": {"c": None}, "d.e": 5}, "a.d": 2, "text": "x"}, "unit", 0)
    assert (row["a.b.c"], row["a.b"], row["a.d"], row["a.d.e"]) == (None, {"c": None}, 2, 5)
    assert (row.get("a.b.c", 1), row.get("a.x", 1), row.get("text.x", 1), row.get("x.y")) == (None, 1, 1, None)
    assert [name in row.columns for name in ("a.b.c", "a.b.x", "a.b.c.d")] == [True, False, False]
    assert list(row.columns) == ["a", "a.d", "text"]
    for name, message in {"a.b.x": "'a.b' holds: c", "b.c": "columns present: a, a.d, text"}.items():
        with pytest.raises(KeyError, match=message):
            row[name]


def test_held_out_rows_of_every_source_are_scored_whatever_the_limit(shop: Workshop, no_models) -> None:
    held_out = sources(shop, sums=[{"prompt": "1+1=", "answer": "2"}] * 4, chat=BARE)
    for limit in ((), ("--eval.max_rows", "4")):
        run = trained(shop, "--dry-run", *limit, train=str(shop.data), held_out=held_out)
        refused(run, "(1 problem)", "data.eval 'chat' (")


def test_an_offline_run_needs_the_column_in_held_out_rows_only(shop: Workshop) -> None:
    data = {"train": str(shop.rows("bare.jsonl", BARE)), "eval": str(shop.data)}
    sampling = {"max_new_tokens": 4}
    shop.train("sft", "run", "--dry-run", reward=MATH, data=data, sampling=sampling)
    run = shop.run("sft", "run", "--dry-run", reward=MATH, data=data | {"eval": data["train"]}, sampling=sampling)
    refused(run, "data.eval 'bare' (")


def test_eval_and_score_are_refused_before_models_are_loaded(shop: Workshop, no_models) -> None:
    """Every source is checked, whatever the limit."""
    first, second = sources(shop, sums=[{"prompt": "1+1=", "answer": "2", "response": "2"}], chat=BARE)
    words = ("--model", str(shop.model), "--reward", "math", "--data", second["path"])
    error = refused(shop.command("eval", *words), "(1 problem)", "data.eval 'chat' (")
    assert "data.train" not in error
    words = ("score", *words[:-2], "--data", first["path"], *words[-2:], "-o", str(shop.folder / "scored.jsonl"))
    for limit in ((), ("--eval.max_rows", "1")):
        refused(shop.command(*words, *limit), "data.eval 'chat' (", "--reward.math.sources")


def test_functions_and_classes_of_python_are_checked(shop: Workshop, no_models) -> None:
    def level_of(completions, level, answr, other=None, **columns):
        return [1.0 for _ in completions]

    class Named(Reward):
        async def score(self, group):
            raise AssertionError

        def columns(self):
            return self.needed

    def train(reward: Any) -> None:
        arguments = {"model": shop.model, "data": BARE, "output": shop.folder / "out", "steps": 1}
        rlhf.train("rloo", reward=reward, options={"sampling.samples_per_prompt": 2}, **arguments)

    with pytest.raises(ConfigError, match=r"\(1 problem\)[^$]*no column 'level', which reward 'level_of' reads"):
        train(level_of)
    instance = Named()
    for wrong in ("answr", ["answr", ""], 3):
        instance.needed = wrong
        with pytest.raises(rlhf.errors.PluginError, match=r"reward 'named'.*: columns\(\) (returned|raised TypeError)"):
            train(instance)


@pytest.mark.parametrize("form", [{"template": "<think>{...}</think>{...}"}, {"pattern": r".*<\/think>.*"}])
def test_a_format_with_special_tokens_is_refused_before_models_are_loaded(shop: Workshop, no_models, form) -> None:
    model = shutil.copytree(shop.model, shop.folder / "special")
    tokenizer = AutoTokenizer.from_pretrained(model)
    reward = [{"use": "format", **form}]
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(model)
    changes: dict[str, Any] = {"policy": {"model": str(model)}, "data": {"template": "plain"}, "reward": reward}
    shop.train("rloo", "run", "--dry-run", **changes)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    refused(shop.run("rloo", "run", "--dry-run", **changes), "reward 'format'", "special token '</think>'")


def test_functions_in_worker_processes_get_the_prompt_of_the_data_as_those_in_the_run_do(shop: Workshop) -> None:
    """The prompt stands in a column of another name, as text and as messages."""
    body = "    return [10 * len(p) + isinstance(c, list) for p, c in zip(prompts, completions)]\n"
    code = f"def size(prompts, completions):\n{body}"
    files = {"plain": shop.file("plain.py", code), "coroutine": shop.file("coroutine.py", f"async {code}")}
    rewards = [{"use": f"file:{path}:size", "name": name} for name, path in files.items()]
    template = shop.file(
        "chat.jinja", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}answer: "
    )
    for number, question in enumerate(("1+2=", [{"role": "user", "content": "1+2="}])):
        data = {"train": str(shop.rows("questions.jsonl", [{"question": question}])), "chat_template": str(template)}
        run = shop.train("rloo", f"run{number}", run={"steps": 1}, data=data | {"batch_size": 1}, reward=rewards)
        values = [{name: result["value"] for name, result in s["rewards"].items()} for s in run.samples()]
        assert values == [dict.fromkeys(files, [40.0, 11.0][number])] * len(values), question
