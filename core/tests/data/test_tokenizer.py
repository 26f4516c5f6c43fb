"""Loading a tokenizer, and what is said where that fails."""

from __future__ import annotations

import json
import re

import pytest
from rlhf.data.tokenizer import Decoder, check_stops, load_tokenizer, tokens_of
from rlhf.errors import ConfigError, ModelError
from rlhf.testing.tiny import tiny_tokenizer


def refused(path) -> str:
    with pytest.raises(ModelError) as error:
        load_tokenizer(str(path))
    return str(error.value)


def test_loads(tmp_path):
    assert load_tokenizer(str(tiny_tokenizer(tmp_path / "m"))).eos_token == "<eos>"


def test_missing_folder_names_those_beside_it(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    message = refused(tmp_path / "modle")
    assert "there is no such folder" in message
    assert "there are: model." in message


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "holds no tokenizer (none of tokenizer.json" in refused(tmp_path)


def test_damaged_tokenizer(tmp_path):
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot load the tokenizer of" in refused(tmp_path)


def test_no_end_token(tmp_path):
    tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "has no end token" in refused(tmp_path)


def test_stop_strings_that_no_text_shows(tmp_path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab<>eos|+", chat_template="default")))
    check_stops(("eos", "<eo", "\n\n"), tokenizer)
    for stop, token in (("<eos>", "<eos>"), ("a<|user|>", "<|user|>")):
        assert Decoder(str(tmp_path))(tokenizer.encode(stop)) == stop.replace(token, "")
        with pytest.raises(ConfigError, match=re.escape(f"{stop!r} holds the special token {token!r}, which")):
            check_stops((stop,), tokenizer)


def test_what_plugins_get_of_a_tokenizer(tmp_path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab+")))
    tokens = tokens_of(tokenizer)
    assert tokens.encode("ab<eos>") == [3, 4, 1]
    assert tokens.decode([3, 1, 4]) == "a<eos>b"
    assert tokens.single("+", "label") == 5


@pytest.mark.parametrize(("text", "shown"), [("ba", r"2 \(4 'b', 3 'a'\)"), ("", r"0 \(none\)")])
def test_a_text_that_is_not_one_token(tmp_path, text, shown):
    tokens = tokens_of(load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab+"))))
    with pytest.raises(ConfigError, match=rf"^the label: {text!r} must be one token .* but is {shown}\. Choose"):
        tokens.single(text, "the label")
