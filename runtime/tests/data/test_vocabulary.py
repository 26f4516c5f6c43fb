"""A role that means another token by an id is refused before its model is loaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_runtime.data.tokenizer import check_vocabularies, load_tokenizer
from rlhf_testing.models import model_path

POLICY = ModelSpec(RoleSpec("policy"), "")


@pytest.fixture
def policy():
    return replace(POLICY, path=str(model_path()))


@pytest.fixture
def other(tmp_path):
    shutil.copytree(model_path(), tmp_path / "other")
    return tmp_path / "other"


def check(policy, path):
    teacher = ModelSpec(RoleSpec("teacher"), str(path))
    check_vocabularies(policy, load_tokenizer(policy.path), [policy, teacher])


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_the_same_tokenizer_in_another_folder_passes(policy, other):
    check(policy, other)


def test_swapped_tokens_are_named(policy, other):
    def swap(tokenizer):
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit(other / "tokenizer.json", swap)
    with pytest.raises(
        ModelError, match=r"the tokenizer of role 'teacher' .* differs from the policy's .*: 2 of \d+ ids"
    ) as e:
        check(policy, other)
    assert "is 'a' for the policy and 'b' for the role" in str(e.value)


def test_an_embedding_too_small_is_refused_without_a_tokenizer_too(policy, other):
    edit(other / "config.json", lambda config: config.update(vocab_size=20))
    for file in other.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has a vocabulary of 20 tokens; the policy's tokenizer .* has ids up to \d+"):
        check(policy, other)


def test_tokens_that_the_policys_embedding_lacks_need_no_row_of_a_role(policy, other, tmp_path):
    rows = json.loads((other / "config.json").read_text())["vocab_size"]
    folder = tmp_path / "policy"
    shutil.copytree(other, folder)
    edit(folder / "tokenizer.json", lambda t: t["model"]["vocab"].update({"unused": rows}))
    check(replace(policy, path=str(folder)), other)


def test_additional_tokens_of_a_role_are_accepted(policy, other):
    edit(other / "tokenizer.json", lambda t: t["model"]["vocab"].update({"further": len(t["model"]["vocab"])}))
    check(policy, other)


def test_a_tokenizer_without_an_end_token_is_compared_too(policy, other):
    edit(other / "tokenizer_config.json", lambda config: config.pop("eos_token"))
    edit(other / "tokenizer.json", lambda t: t["model"]["vocab"].update(a=t["model"]["vocab"]["b"], b=0))
    with pytest.raises(ModelError, match=r"the tokenizer of role .* differs from the policy's"):
        check(policy, other)


def test_a_tokenizer_that_cannot_be_loaded_is_refused(policy, other):
    for file in other.glob("tokenizer*"):
        file.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer of role 'teacher' .* cannot be loaded.*Fix it"):
        check(policy, other)
