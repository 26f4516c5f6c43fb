"""Loading a tokenizer, and what is said where that fails."""

from __future__ import annotations

import json
import pickle
import re

import pytest
from rlhf.errors import ConfigError, DataError, ModelError
from rlhf.types import Row
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_runtime.data.text_tokens import TextTokens
from rlhf_runtime.data.tokenizer import TokenDecoder, check_ids, check_stops, load_tokenizer, tokens_of
from rlhf_testing.tiny import tiny_tokenizer


def refused(path) -> str:
    with pytest.raises(ModelError) as error:
        load_tokenizer(str(path))
    return str(error.value)


def test_loads(tmp_path):
    assert load_tokenizer(str(tiny_tokenizer(tmp_path / "m"))).eos_token == "<eos>"


def test_missing_folder_names_those_beside_it(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    message = refused(tmp_path / "modle")
    assert "modle does not exist" in message
    assert "there are: model." in message


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "holds no tokenizer (none of tokenizer.json" in refused(tmp_path)


def test_folder_of_a_run(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "manifest.json").write_text("{}")
    assert refused(tmp_path) == f"{tmp_path} is not a model, but holds models: {tmp_path / 'model'}"
    assert "`rlhf export` writes the model of a run's checkpoint" in refused(tmp_path / "checkpoints" / "step-000001")


def test_damaged_tokenizer(tmp_path):
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert "cannot load the tokenizer of" in refused(tmp_path)


def test_two_tokens_of_one_id(tmp_path):
    file = tiny_tokenizer(tmp_path) / "tokenizer.json"
    check_ids(str(tmp_path))
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["b"] = vocabulary["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"has two tokens with the id {vocabulary['a']}, 'a' and 'b'"):
        check_ids(str(tmp_path))
    vocabulary["b"] = content["added_tokens"][0]["id"]
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=f"two tokens with the id {vocabulary['b']}"):
        check_ids(str(tmp_path))


@pytest.mark.parametrize("value", ["x", [], True])
def test_a_limit_that_is_no_number(tmp_path, value):
    file = tiny_tokenizer(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": value}))
    assert f"has model_max_length = {value!r}" in refused(tmp_path)


def test_no_end_token(tmp_path):
    tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert "has no end token" in refused(tmp_path)


def test_an_end_token_outside_the_embedding(tmp_path):
    tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 1}')
    assert "end token" in (message := refused(tmp_path))
    assert "id 1; the model's embedding has 1 rows" in message


@pytest.mark.parametrize(
    "settings", ['{"vocab_size": 6}', '{"vocab_size": 20, "text_config": {"vocab_size": 6}}'], ids=["text", "images"]
)
def test_a_text_with_a_token_outside_the_embedding_is_refused(tmp_path, settings):
    (tmp_path / "config.json").write_text(settings)
    tokens = TextTokens(load_tokenizer(str(tiny_tokenizer(tmp_path, chars="abcd"))))
    assert tokens.ids("abc") == [3, 4, 5]
    with pytest.raises(DataError, match="'d' with id 6; the model's embedding has 6 rows"):
        tokens.ids("abcd")


def test_stop_strings_with_special_tokens_are_refused(tmp_path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab<>eos|+", chat_template="default")))
    check_stops(("eos", "<eo", "\n\n"), tokenizer)
    for stop, token in (("<eos>", "<eos>"), ("a<|user|>", "<|user|>")):
        assert TokenDecoder(str(tmp_path))(tokenizer.encode(stop)) == stop.replace(token, "")
        with pytest.raises(ConfigError, match=re.escape(f"{stop!r} contains the special token {token!r}.")):
            check_stops((stop,), tokenizer)


def test_a_decoder_uses_the_tokenizer_that_is_loaded_and_another_process_loads_its_own(tmp_path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab")))
    assert TokenDecoder("no folder", tokenizer=tokenizer)([3, 4, 1]) == "ab"
    copy = pickle.loads(pickle.dumps(TokenDecoder(str(tmp_path), tokenizer=tokenizer)))
    assert copy.tokenizer is None
    assert copy([3, 4, 1]) == "ab"


def test_plugins_can_encode_and_decode(tmp_path):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab+")))
    tokens = tokens_of(tokenizer)
    assert tokens.encode("ab<eos>") == [3, 4, 1]
    assert tokens.decode([3, 1, 4]) == "a<eos>b"
    assert tokens.single("+", "label") == 5


@pytest.mark.parametrize(("text", "description"), [("ba", r"2 \(4 'b', 3 'a'\)"), ("", r"0 \(none\)")])
def test_a_text_that_is_not_one_token(tmp_path, text, description):
    tokens = tokens_of(load_tokenizer(str(tiny_tokenizer(tmp_path, chars="ab+"))))
    with pytest.raises(ConfigError, match=rf"^the label: {text!r} must be one token .* but is {description}\. Choose"):
        tokens.single(text, "the label")


def test_a_named_chat_template_takes_the_place_of_the_tokenizers_own(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role[0] + '|' + m.content + eos_token }}{% endfor %}", encoding="utf-8"
    )
    row = Row({"prompt": "a+b"}, "data", 0)
    for name, chat_template in (("none", None), ("default", "default")):
        tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path / name, chars="abu|+", chat_template=chat_template)))
        template = Template(tokenizer, DataSection(chat_template=str(file)))
        assert tokenizer.decode(template.encode_prompt(row).ids) == "u|a+b<eos>"
        assert tokenizer.chat_template == file.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chat_template": "gone.jinja"},
            r"cannot read '.*gone.jinja'.*It must be the path of a file with a Jinja template",
        ),
        ({"chat_template": "empty.jinja"}, "empty.jinja is empty"),
        ({"chat_template": "broken.jinja"}, "unexpected char"),
        ({"chat_template": "empty.jinja", "template": "plain"}, "has no effect with data.template = 'plain'"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(tmp_path, options, message):
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "broken.jinja").write_text("{% ? %}")
    section = DataSection(**{**options, "chat_template": str(tmp_path / options["chat_template"])})
    with pytest.raises((ConfigError, DataError), match=message):
        Template(load_tokenizer(str(tiny_tokenizer(tmp_path / "m"))), section).encode_prompt(
            Row({"prompt": "a"}, "d", 0)
        )
