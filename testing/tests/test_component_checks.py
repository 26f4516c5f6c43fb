"""What the suites check of every component: config, name, state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from rlhf.interfaces import Advantage, ComponentConfig
from rlhf_testing.advantage import AdvantageContract
from rlhf_testing.contract import Nonconformance


def suite(estimator, **attributes):
    return type("Broken", (AdvantageContract,), {"advantage": estimator, "registered": False, **attributes})()


def component(config=ComponentConfig, **attributes):
    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return R_NA, R_NA

    members = {"__doc__": "Made.", "name": "made", "returns": returns, "Config": config, **attributes}
    return type("Made", (Advantage,), members)


class Nested(ComponentConfig):
    size: int = 1
    """Documented."""


class Good(ComponentConfig):
    rate: float = 0.1
    """Documented."""
    parts: tuple[str, ...] = ("a",)
    """Documented."""
    nested: Nested = Nested()
    """Documented."""
    table: Mapping[str, int] = {}
    """Documented."""


class Undocumented(ComponentConfig):
    rate: float = 0.1


class UndocumentedNested(ComponentConfig):
    inner: Undocumented = Undocumented()
    """Documented."""


class Mutable(ComponentConfig):
    parts: list[str] = []
    """Documented."""


class MutableInside(ComponentConfig):
    parts: tuple[dict[str, int], ...] | None = None
    """Documented."""


class Thawed(ComponentConfig, frozen=False):
    rate: float = 0.1
    """Documented."""


class Lenient(ComponentConfig, extra="ignore"):
    rate: float = 0.1
    """Documented."""


class Required(ComponentConfig):
    rate: float
    """Documented."""


def test_good_config_passes():
    suite(component(Good)).test_config()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Undocumented, "Undocumented.rate is not documented"),
        (UndocumentedNested, "UndocumentedNested.inner.rate is not documented"),
        (Mutable, "Mutable.parts is a list"),
        (MutableInside, "MutableInside.parts is a dict"),
        (Thawed, "Thawed.rate can be set"),
        (Lenient, "accepts the unknown key"),
    ],
)
def test_bad_config_fails(config, message):
    with pytest.raises(Nonconformance, match=message):
        suite(component(config)).test_config()


def test_required_field_asks_for_configs():
    import unittest

    with pytest.raises(unittest.SkipTest, match=r"configs = \[Made.Config"):
        suite(component(Required)).test_config()
    suite(component(Required), configs=[Required(rate=1.0)]).test_config()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "Made-Up"}, r"it must match \[a-z\]"),
        ({"__doc__": None}, "has no docstring"),
    ],
)
def test_bad_class_fails(attributes, message):
    with pytest.raises(Nonconformance, match=message):
        suite(component(**attributes)).test_class()


def test_unfinished_class_fails():
    class Unfinished(Advantage):
        """No returns."""

        name = "unfinished"

    with pytest.raises(Nonconformance, match="does not define"):
        suite(Unfinished).test_class()


def test_name_must_be_an_entry_point():
    with pytest.raises(Nonconformance, match=r"offers \[\] in the entry-point group"):
        suite(component(__module__="nowhere.at_all"), registered=True).test_entry_point()


def test_the_hook_must_offer_the_class(tmp_path, monkeypatch):
    """A class that was renamed, but not in its hook, passed all of its tests."""
    folder = tmp_path / "renamed-0.1.dist-info"
    for path, text in {
        folder / "METADATA": "Name: renamed\nVersion: 0.1\n",
        folder / "entry_points.txt": "[rlhf.advantage]\nsmall = renamed\n",
        tmp_path
        / "renamed"
        / "__init__.py": "from rlhf import hookimpl\n\n\n@hookimpl\ndef rlhf_register_advantage():\n"
        "    from renamed import OldName\n",
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Nonconformance, match=r"a run cannot select advantage 'small': .*cannot import name 'OldName'"):
        suite(component(__module__="renamed.advantage", name="small"), registered=True).test_entry_point()


def test_state_must_be_json_and_survive():
    lost = component(state_dict=lambda self: {"n": id(self)}, load_state_dict=lambda self, state: None)
    with pytest.raises(Nonconformance, match="after load_state_dict"):
        suite(lost).test_state_is_json()
    tensor = component(state_dict=lambda self: {"n": {1, 2}})
    with pytest.raises(Nonconformance, match="JSON values only"):
        suite(tensor).test_state_is_json()


def test_suite_without_a_class_says_what_to_set():
    with pytest.raises(Nonconformance, match="advantage = YourClass"):
        type("Empty", (AdvantageContract,), {})().test_class()


@pytest.mark.parametrize(
    ("name", "meant"), [("baselines", "baseline"), ("need_values", "needs_values"), ("group_minimum", "group_min")]
)
def test_a_misspelled_member_is_named(name, meant):
    with pytest.raises(Nonconformance, match=f"Made.{name} is not a member of kind advantage.*Did you mean '{meant}'"):
        suite(component(**{name: True})).test_class()


def test_a_helper_beside_the_member_it_is_named_after_is_none():
    def baseline(self, r_N, group_N):
        return r_N

    suite(component(baseline=baseline, baselines=[], _baseline=1, gamma=1.0)).test_class()
