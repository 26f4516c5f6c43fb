"""Chat templates without an end, and files of a model that are none."""

from __future__ import annotations

import os

import pytest
from rlhf.errors import ConfigError, ModelError
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import template_render
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.template_options import LARGEST, named_template
from rlhf_runtime.data.tokenizer import load_tokenizer
from rlhf_testing.tiny import tiny_tokenizer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
HOSTILE = {
    "loops": (f"{CONTENTS}{{% if messages | length > 2 %}}{LOOP}{{% endif %}}", "computes for more than 1 s"),
    "a number": ("{{ 10 ** (10 ** 9) }}", "more than"),
    "a long text": ("{{ 'a' * (messages | length * 2 ** 34) }}", "more than 1024 MiB of memory"),
    "a long text in the source": ("{{ 'a' * 2 ** 34 }}", "more than 1024 MiB of memory"),
    "many characters": ("{{ 'a' * (messages | length * 10 ** 8) }}", "writes more than 10,000,000 characters"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_a_template_without_limits_is_refused(tmp_path, monkeypatch, case):
    if case != "many characters":  # which takes a second on a busy machine
        monkeypatch.setattr(template_render, "SECONDS", 1)
    source, says = HOSTILE[case]
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chat_template=source)))
    for _ in range(2 if case == "many characters" else 1):  # it is not remembered as one that passed
        with pytest.raises(ConfigError, match=f"the chat template .*{says}"):
            ChatTemplate(tokenizer, {})


def test_other_errors_of_a_template_are_those_of_its_rows(tmp_path):
    source = CONTENTS + "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chat_template=source)))
    assert ChatTemplate(tokenizer, {}).text([{"role": "user", "content": "x"}], answer=True) == "x"


def test_a_template_is_tried_once_in_a_process(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(str(tiny_tokenizer(tmp_path, chat_template=f"once {CONTENTS}")))
    ChatTemplate(tokenizer, {})
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("tried again"))
    ChatTemplate(tokenizer, {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", "device"),
        ("tokenizer.json", "pipe"),
        ("chat_template.jinja", "device"),
        ("model.safetensors", "pipe"),
    ],
)
def test_a_file_of_a_model_without_an_end_is_refused(tmp_path, name, kind):
    tiny_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is neither a file nor a link to one"):
        load_tokenizer(str(tmp_path))


def test_files_of_a_model_that_are_too_large_are_refused(tmp_path):
    tiny_tokenizer(tmp_path)
    for name, size in (("chat_template.jinja", 2**20 + 1), ("tokenizer.json", 2**28 + 1)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # takes no space
        with pytest.raises(
            ModelError, match=rf"{name} has [\d,]+ bytes, but a settings file of a model may have at most"
        ):
            load_tokenizer(str(tmp_path))
        (tmp_path / name).unlink()


def test_a_link_to_a_file_or_to_nothing_is_allowed(tmp_path):
    tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "blob")
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "blob")
    (tmp_path / "model" / "notes.txt").symlink_to(tmp_path / "nowhere")
    load_tokenizer(str(tmp_path / "model"))


def test_a_named_template_without_an_end_is_refused():
    with pytest.raises(ConfigError, match=f"/dev/zero has more than {LARGEST:,} bytes"):
        named_template(DataSection(chat_template="/dev/zero"))
