"""What a value that fits no branch of a union is told."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field, ValidationError
from rlhf.interfaces import ComponentConfig
from rlhf_runtime.config.problems import describe


class Several(ComponentConfig):
    kind: Literal["sigmoid", "ipo"] | tuple[Literal["sigmoid", "ipo"], ...] = "sigmoid"


def told(**values):
    with pytest.raises(ValidationError) as error:
        Several(**values)
    return describe(error.value, Several, "algorithm.loss", {"algorithm.loss.kind": "flag --algorithm.loss.kind"})


def test_the_error_is_of_the_union_branch_that_fits_the_type():
    [line] = told(kind="ippo")
    expected = "algorithm.loss.kind (flag --algorithm.loss.kind): should be 'sigmoid' or 'ipo', got string 'ippo'."
    assert line == f"{expected} Did you mean 'ipo'?"


def test_an_entry_of_a_list_is_named_by_its_place():
    [line] = [line for line in told(kind=("ipo", "hing")) if "kind.1" in line]
    assert "should be 'sigmoid' or 'ipo', got string 'hing'" in line


class Addresses(ComponentConfig):
    urls: tuple[str, ...]


def test_a_flag_with_a_list_says_how_to_write_the_list():
    for values, expected in (
        ({"urls": "a"}, """should be a list, got string 'a'. Write a list in the form of TOML: '["a"]'."""),
        ({"urls": "a, b"}, """should be a list, got string 'a, b'. Write a list in the form of TOML: '["a", "b"]'."""),
        ({"urls": "[a]"}, """should be a list, got string '[a]'. Write a list in the form of TOML: '["a"]'."""),
        ({"urls": "0.9,1"}, """should be a list, got string '0.9,1'. Write a list in the form of TOML: '[0.9, 1]'."""),
        ({}, "required, but not set. Set it with --r.urls '[VALUE, ...]'."),
    ):
        with pytest.raises(ValidationError) as error:
            Addresses(**values)
        [line] = describe(error.value, Addresses, "r", {"r.urls": "flag --r.urls"})
        assert line == f"r.urls (flag --r.urls): {expected}"


class Places(ComponentConfig):
    extract: tuple[Literal["boxed", "hash"], ...] = Field(("boxed",), min_length=1)
    separator: str = Field("\n", min_length=1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"extract": ("box",)}, "r.extract.0: should be 'boxed' or 'hash', got string 'box'. Did you mean 'boxed'?"),
        ({"extract": ()}, "r.extract: should have at least 1 item, got list ()."),
        ({"separator": ""}, "r.separator: should have at least 1 character, got string ''."),
    ],
)
def test_a_list_is_called_too_short_only_if_it_is(values, expected):
    with pytest.raises(ValidationError) as error:
        Places(**values)
    assert describe(error.value, Places, "r", {}) == [expected]
