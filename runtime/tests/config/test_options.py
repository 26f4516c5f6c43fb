"""Options as data: each with its type, default, allowed values and meaning, under the name that a flag has."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from rlhf.errors import PluginNotFound
from rlhf.interfaces import ComponentConfig
from rlhf.plugins import Plugins
from rlhf_runtime.config.options import default_text, options_of, plugin_options, run_file_options, sections
from rlhf_runtime.config.sections import Choice


class Inner(ComponentConfig):
    weight: float = 0.5
    """A weight."""


class Options(ComponentConfig):
    path: str
    """Where :class:`~pathlib.Path` is
    looked for, in ``here``."""
    limit: Annotated[int, Field(gt=0)] | None = None
    share: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    mode: Literal["a", "b"] | None = "a"
    size: Literal[1, 2] = 1
    on: bool = False
    several: tuple[str, ...] = ("x",)
    modes: list[Literal["a", "b"]] = ["b"]
    pair: tuple[float, float] = (0.9, 0.95)
    table: dict[str, Any] = {}
    anything: Any = None
    folder: Path | None = None
    inner: Inner = Inner()
    maybe: Inner | None = None
    tables: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}


OPTIONS = {o.path: o for o in options_of(Options, "reward.0.")}


def test_names_are_those_of_flags():
    assert [name.removeprefix("reward.0.") for name in list(OPTIONS)[-5:]] == [
        "inner.weight", "maybe", "maybe.weight", "tables.0.weight", "by_name.NAME.weight",
    ]  # fmt: skip
    assert {name for name, o in OPTIONS.items() if o.table} == {
        "reward.0.maybe.weight",
        "reward.0.by_name.NAME.weight",
    }


@pytest.mark.parametrize(
    ("name", "type", "default", "allowed"),
    [
        ("path", "text", "required", ()),
        ("limit", "integer > 0", "", ()),
        ("share", "number >= 0, < 1", "1e-06", ()),
        ("mode", '"a", "b"', '"a"', ("a", "b")),
        ("size", "1, 2", "1", ("1", "2")),
        ("on", "true or false", "false", ("true", "false")),
        ("several", "list of texts", '["x"]', ()),
        ("modes", 'list of "a", "b"', '["b"]', ()),
        ("pair", "list of 2: number, number", "[0.9, 0.95]", ()),
        ("table", "table", "", ()),
        ("anything", "any value", "", ()),
        ("folder", "Path", "", ()),
        ("maybe", "table", "", ()),
    ],
)
def test_type_default_and_allowed_values(name, type, default, allowed):
    option = OPTIONS[f"reward.0.{name}"]
    assert (option.type, default_text(option), option.allowed) == (type, default, allowed)


def test_the_meaning_is_one_paragraph_of_markdown():
    assert OPTIONS["reward.0.path"].doc == "Where `pathlib.Path` is looked for, in `here`."


def test_every_option_of_the_run_file_has_a_meaning():
    options = run_file_options()
    assert len(options) > 100
    assert [o.path for o in options if not o.doc] == []
    assert [o.path for o in options if o.required] == [
        "algorithm.use", "data.train.0.path", "data.eval.0.path", "curriculum.use", "env.use", "reward.0.use",
        "observer.0.use",
    ]  # fmt: skip
    assert {o.kind for o in options} == {
        "", "algorithm", "curriculum", "rollout", "env", "reward", "trainer", "generator", "launcher", "observer",
    }  # fmt: skip


def test_sections_have_their_headings():
    tables = {section.path: section for section in sections()}
    headings = [tables[path].heading for path in ("run", "reward", "data.train", "placement", "stream.filter")]
    assert headings == ["[run]", "[[reward]]", "[[data.train]]", "[placement.NAME]", "[stream.filter]"]
    assert tables["trainer"].default_plugin == "torch"
    assert tables["algorithm"].default_plugin == ""
    assert tables["sync"].doc == "How new weights reach a generator that holds its own copy of them."


def test_options_of_an_algorithm_have_the_defaults_that_it_has_for_its_parts():
    plugins = Plugins.discover()
    options = {o.path: o for o in plugin_options(plugins, "algorithm", "algorithm", Choice(use="dr_grpo"))}
    assert options["algorithm.loss.aggregation"].default == "seq_sum_constant"
    assert options["algorithm.loss.aggregation"].plugin.startswith("loss 'ppo'")
    assert options["algorithm.loss.use"].kind == "loss"
    chosen = Choice(use="dr_grpo", options={"loss": {"use": "gspo"}})
    other = {o.path: o for o in plugin_options(plugins, "algorithm", "algorithm", chosen)}
    assert other["algorithm.loss.clip_high"].default != options["algorithm.loss.clip_high"].default


def test_of_a_part_that_is_not_installed_only_its_name_is_known():
    chosen = Choice(use="sft", options={"loss": {"use": "not_there"}})
    options = plugin_options(Plugins.discover(), "algorithm", "algorithm", chosen, skip_broken=True)
    assert [o.path for o in options] == ["algorithm.loss.use"]
    with pytest.raises(PluginNotFound, match="no loss named 'not_there'"):
        plugin_options(Plugins.discover(), "algorithm", "algorithm", chosen)
