"""From sections to components: strict options, slots and their defaults, messages, the resolved run file."""

from __future__ import annotations

from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, model_validator
from rlhf.errors import ConfigError, PluginError, PluginNotFound
from rlhf.interfaces import Advantage, Algorithm, ComponentConfig, Loss, Reward, Slot, Trainer
from rlhf.plugins import Plugins
from rlhf.plugins.registration import abstract_methods
from rlhf.types import RewardResult
from rlhf_runtime.config.components import Selections, build_algorithm, component_config, select, select_algorithm
from rlhf_runtime.config.flag_values import PythonValue
from rlhf_runtime.config.load import load, to_toml
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice


class Colour(Enum):
    RED = "red"


class Inner(ComponentConfig):
    weight: float = 1.0
    names: tuple[str, ...] = ()


class Scorer(Reward):
    name = "scorer"

    class Config(ComponentConfig):
        text: str = "x"
        number: float = 1.0
        count: int = Field(default=1, gt=0)
        flag: bool = False
        pair: tuple[float, float] = (0.0, 1.0)
        either: int | str = 1
        choice: Literal["a", "b"] = "a"
        inner: Inner = Inner()
        many: tuple[Inner, ...] = ()
        table: dict[str, Any] = Field(default_factory=dict)
        path: Path | None = None
        colour: Colour = Colour.RED

    def score(self, group):
        return [RewardResult(0.0) for _ in group.trajectories]


class Clip(Loss):
    name = "clip"

    class Config(ComponentConfig):
        clip_low: float = 0.2
        clip_high: float = 0.2

    def outputs(self):
        return ("logprobs",)

    def reduce(self):
        return {}

    def __call__(self, x):
        raise NotImplementedError


class Plain(Clip):
    name = "plain"

    class Config(ComponentConfig):
        scale: float = 1.0


class Centered(Advantage):
    name = "centered"

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return R_NA, R_NA


class Algo(Algorithm):
    name = "algo"
    slots: ClassVar = {"loss": Slot("loss", "clip", {"clip_high": 0.28}), "advantage": Slot("advantage", "centered")}

    class Config(ComponentConfig):
        kl: float = 0.0

    def assemble(self, examples):
        return None, {}


class Failing(Reward):
    name = "failing"

    def __init__(self, config=None):
        raise OSError("no such device")

    def score(self, group):
        return []


@pytest.fixture
def plugins():
    registry = Plugins()
    for kind, cls in (("reward", Scorer), ("reward", Failing), ("loss", Clip), ("loss", Plain), ("algorithm", Algo)):
        registry.register(kind, cls)
    registry.register("advantage", Centered)
    return registry


def options(*flags, use="scorer"):
    return load(None, [("algorithm", "algo"), ("reward", use), *flags]).reward[0].options


def configure(plugins, values, origins=None):
    return component_config(plugins.resolve("reward", "scorer"), values, "reward.0", origins)


def refused(call, error=ConfigError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_a_misspelled_field_of_the_section_itself_is_recognised(plugins):
    """`weight` is the section's and not the plugin's; who misspells it does not know."""
    message = refused(lambda: select(plugins, "reward", Choice(use="scorer", options={"weigth": 2.0}), "reward.0"))
    assert "reward.0.weigth: unknown key. Did you mean 'weight'? Allowed here: choice," in message
    assert "retries" in message


def test_toml_values_are_strict_and_lists_become_tuples(plugins):
    config = configure(
        plugins,
        {
            "number": 2,
            "pair": [1, 2.5],
            "inner": {"names": ["a"]},
            "many": [{"weight": 2.0}],
            "table": {"a": [1]},
            "path": "a/b",
            "colour": "red",
        },
    )
    assert (config.number, config.pair, config.inner.names) == (2.0, (1.0, 2.5), ("a",))
    assert (config.many[0].weight, config.table, config.path, config.colour) == (
        2.0,
        {"a": [1]},
        Path("a/b"),
        Colour.RED,
    )


def test_flags_are_read_by_the_plugins_types(plugins):
    flags = {
        "text": "123", "number": "3", "flag": "true", "pair": "[1, 2]", "either": "7", "choice": "b",
        "inner.names": '["q"]', "inner.weight": "0.5", "table.deep": "false", "path": "x/y",
    }  # fmt: skip
    config = configure(plugins, options(*((f"reward.0.{k}", v) for k, v in flags.items())))
    assert (config.text, config.number, config.flag, config.pair) == ("123", 3.0, True, (1.0, 2.0))
    assert (config.either, config.choice, config.inner) == (7, "b", Inner(weight=0.5, names=("q",)))
    assert (config.table, config.path) == ({"deep": False}, Path("x/y"))


def test_every_problem_is_named_with_plugin_path_origin_and_alternative(plugins):
    origins = {"reward.0.numbr": "run.toml, line 7"}
    values = {
        "numbr": 1,
        "text": 5,
        "count": 0,
        "choice": "c",
        "inner": {"wight": 1},
        "flag": "true",
        "many": [{"x": 1}],
        "pair": [1.0, "2"],
    }
    message = refused(lambda: configure(plugins, values, origins))
    assert message.startswith(f"{plugins.resolve('reward', 'scorer')} cannot be configured like this:")
    assert "reward.0.numbr (run.toml, line 7): unknown key. Did you mean 'number'? Allowed here: choice," in message
    assert "reward.0.text: should be a valid string, got integer 5" in message
    assert "reward.0.count: should be greater than 0, got integer 0" in message
    assert "reward.0.pair.1: should be a valid number, got string '2'" in message
    assert "reward.0.choice: should be 'a' or 'b', got string 'c'" in message
    assert "reward.0.inner.wight: unknown key. Did you mean 'weight'? Allowed here: names, weight." in message
    assert "reward.0.flag: should be a valid boolean, got string 'true'. Write true or false" in message
    assert "reward.0.many.0.x: unknown key. Allowed here: names, weight." in message


def test_a_plugin_without_options_says_so(plugins):
    message = refused(lambda: component_config(plugins.resolve("reward", "failing"), {"a": 1}, "rollout"))
    assert "rollout.a: unknown key. There are no options here." in message


def test_options_of_the_reference(plugins):
    from dataclasses import replace

    resolved = replace(plugins.resolve("reward", "scorer"), ref="model:PATH", options={"text": "PATH"})
    assert component_config(resolved, {"number": 2}, "reward.0").text == "PATH"
    assert component_config(resolved, {"text": "PATH"}, "reward.0").text == "PATH"
    message = refused(lambda: component_config(resolved, {"text": "OTHER"}, "reward.0"))
    assert "reward.0.text: string 'OTHER', but the reference 'model:PATH' already sets it to 'PATH'" in message


def test_build_and_select(plugins):
    selection = select(plugins, "reward", Choice(use="plugin:scorer", options={"number": 4.0}))
    assert (selection.build().config.number, selection.resolved.name) == (4.0, "scorer")
    assert select(plugins, "reward", Choice(use="scorer")).config == Scorer.Config()
    message = refused(select(plugins, "reward", Choice(use="failing")).build, PluginError)
    assert "raised OSError: no such device" in message
    assert "failing" in message


def test_slots_use_the_algorithms_defaults_only_with_the_default_plugin(plugins):
    def loss(**values):
        algorithm = build_algorithm(plugins, Choice(use="algo", options={"loss": values} if values else {}))
        return algorithm.parts["loss"]

    assert loss().config.clip_high == 0.28
    assert loss(clip_low=0.1).config == Clip.Config(clip_low=0.1, clip_high=0.28)
    assert loss(clip_high=0.5).config.clip_high == 0.5
    for name in ("clip", "plugin:clip", f"{plugins.resolve('loss', 'clip').distribution}/clip"):
        assert loss(use=name).config.clip_high == 0.28
    assert loss(use="plain", scale=3.0).config.scale == 3.0


def test_an_algorithm_names_every_plugin_and_takes_short_slots(plugins):
    choice = Choice(use="algo", options={"kl": 0.5, "loss": "plain"})
    algorithm, used = build_algorithm(plugins, choice), select_algorithm(plugins, choice, {}).plugins()
    assert (algorithm.config.kl, algorithm.parts["loss"].name, algorithm.parts["advantage"].name) == (
        0.5,
        "plain",
        "centered",
    )
    assert [(r.kind, r.name) for r in used] == [("algorithm", "algo"), ("loss", "plain"), ("advantage", "centered")]


def test_problems_of_algorithm_and_slots_come_together(plugins):
    values = {"k": 1, "clip_high": 0.3, "los": {}, "loss": {"clip_hih": 1.0}, "advantage": {"x": 1}}
    message = refused(lambda: build_algorithm(plugins, Choice(use="algo", options=values)))
    assert "algorithm.k: unknown key. Did you mean 'kl'? Allowed here: advantage, kl, loss." in message
    assert "algorithm.clip_high: belongs to algorithm.loss; write --algorithm.loss.clip_high 0.3." in message
    assert "algorithm.los: unknown key. Did you mean 'loss'?" in message
    assert "algorithm.loss.clip_hih: unknown key. Did you mean 'clip_high'?" in message
    assert "advantage 'centered'" in message
    assert "algorithm.advantage.x: unknown key" in message


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (3, "algorithm.loss: a slot is a table or the name of a plugin of kind 'loss', got integer 3"),
        ({"use": 3}, "algorithm.loss.use: expected the name of a plugin, got integer 3"),
    ],
)
def test_slots_of_the_wrong_form(plugins, loss, expected):
    assert expected in refused(lambda: build_algorithm(plugins, Choice(use="algo", options={"loss": loss})))


def test_an_unknown_plugin_in_a_slot(plugins):
    message = refused(lambda: build_algorithm(plugins, Choice(use="algo", options={"loss": "clipp"})), PluginNotFound)
    assert "'clip'" in message
    assert "for the slot" not in message
    absent = type("Absent", (Algo,), {"name": "other", "slots": {"loss": Slot("loss", "absent")}, "__doc__": "x"})
    plugins.register("algorithm", absent)
    message = refused(lambda: build_algorithm(plugins, Choice(use="other")), PluginNotFound)
    assert "no loss named 'absent'" in message
    assert "The algorithm uses this plugin for the slot if algorithm.loss.use is not set." in message


@cache
def installed() -> Plugins:
    """The installed plugins and those of this module."""
    plugins = Plugins.discover()
    for kind, cls in (
        ("reward", Scorer),
        ("loss", Clip),
        ("loss", Plain),
        ("algorithm", Algo),
        ("advantage", Centered),
    ):
        plugins.register(kind, cls)
    return plugins


DEFAULTS = {
    "sampling.temperature": "1.0",
    "trainer.use": "torch",
    "trainer.schedule": "constant",
    "reward.0.weight": "1",
    "reward.0.number": "1",
    "reward.0.pair": "[0, 1]",
    "reward.0.inner.weight": "1.0",
    "algorithm.kl": "0.0",
    "algorithm.loss.use": "plugin:clip",
    "algorithm.loss.clip_high": "0.28",  # of the slot, not of the loss
    "critic.trainer.lr": "0.25",  # of [trainer]
    "run.name": "",
}
OTHERS = {
    "sampling.temperature": "0.5",
    "trainer.schedule": "cosine",
    "reward.0.weight": "2",
    "reward.0.number": "2",
    "reward.0.pair": "[1, 2]",
    "reward.0.inner.weight": "0.5",
    "algorithm.kl": "0.1",
    "algorithm.loss.clip_high": "0.2",
    "critic.trainer.lr": "1e-6",
    "placement.policy.ranks": "2",
    "trainer.lora.rank": "16",  # without the table there are no adapters
    "run.name": "x",
}


@pytest.mark.parametrize(
    ("options", "differ"), [(DEFAULTS, False), (OTHERS, True), ({"algorithm.loss.use": "plain"}, True)]
)
def test_the_options_that_differ_from_their_defaults(options, differ, tmp_path):
    """Of a run, and of another one with its ``config.toml``, in which every option is set."""
    expected = {"algorithm.use", "reward.0.use", "trainer.lr", *(options if differ else ())}
    flags = [("algorithm", "algo"), ("reward", "scorer"), ("trainer.lr", "0.25"), *options.items()]
    first = Selections.of(installed(), load(None, flags))
    assert {*first.user_options()} == expected
    path = tmp_path / "config.toml"
    path.write_text(to_toml(first.config))
    assert {*Selections.of(installed(), load(str(path))).user_options()} == expected


def test_an_option_that_python_sets_to_none_differs():
    flags = [("algorithm", "algo"), ("trainer.max_grad_norm", PythonValue(None))]
    assert Selections.of(installed(), load(None, flags)).user_options() == ["algorithm.use", "trainer.max_grad_norm"]


def test_the_resolved_run_file_has_every_default_and_reloads_to_itself(tmp_path):
    plugins = installed()
    run = load(
        None,
        [
            ("algorithm", "algo"),
            ("algorithm.loss.clip_low", "0.1"),
            ("reward", "scorer"),
            ("reward.0.text", "123"),
            ("reward.0.pair", "[1, 2]"),
            ("critic.trainer.lr", "0.5"),
        ],
    )
    config = Selections.of(plugins, run).config
    assert config.algorithm.options["loss"] == {"use": "clip", "clip_low": 0.1, "clip_high": 0.28}
    assert config.algorithm.options["kl"] == 0.0
    assert config.reward[0].options["text"] == "123"
    assert config.reward[0].options["inner"] == {"weight": 1.0, "names": []}
    assert "lr" in config.trainer.options
    assert config.critic.trainer == {"lr": 0.5}
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(str(path)) == config
    assert Selections.of(plugins, load(str(path))).config == config


class Staged(ComponentConfig):
    """Its second option is allowed beside stage 3 only."""

    stage: int
    share: int = 1

    @model_validator(mode="after")
    def _possible(self):
        if self.share != 1 and self.stage != 3:
            raise ValueError(f"share = {self.share} needs stage 3; stage is {self.stage}")
        return self


def test_options_of_a_roles_own_trainer_are_checked_with_those_of_the_trainer():
    plugins, methods = Plugins.discover(), dict.fromkeys(abstract_methods(Trainer), lambda self: None)
    trainer = type("Needed", (Trainer,), {**methods, "name": "needed", "Config": Staged})
    for kind, cls in (("trainer", trainer), ("algorithm", Algo), ("loss", Clip), ("advantage", Centered)):
        plugins.register(kind, cls)

    def run(stage, **settings):
        options = {"use": "needed", "stage": stage}
        return RunFile.model_validate({"algorithm": "algo", "trainer": options, "critic": {"trainer": settings}})

    selections = Selections.of(plugins, run(3, share=2))
    assert selections["critic.trainer"].config == Staged(stage=3, share=2)
    assert selections.config.critic.trainer == {"share": 2}
    assert "critic.trainer: share = 2 needs stage 3" in refused(lambda: Selections.of(plugins, run(2, share=2)))
    message = refused(lambda: Selections.of(plugins, run("two", shar=2)))
    assert "trainer.stage: should be a valid integer" in message
    assert "critic.trainer.shar: unknown key" in message
